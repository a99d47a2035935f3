"""Family P, pressure: caches far too small, leases that run out, requests that are given up; nothing wrong comes of it."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from fixtures.faults import ThrottleLink
from fixtures.model_files import config_json
from fixtures.model_kv import kv_layers
from fixtures.models import TINY, resolve_model
from fixtures.request import Request
from reports import records as r
from reports.history import History
from suite.contract import Case, Gate
from suite.gates import gate_cases
from suite.gates.arms import calibrate
from suite.gates.judging_pressure import (
    ANSWER_TOKENS,
    EXPLAINS,
    IDLE_LABEL,
    LOADED,
    LOADING,
    MASTER,
    MAXIMUM,
    judge_pressure,
)
from suite.gates.sequences import at_rest
from suite.workload.prompts import Prompt

if TYPE_CHECKING:
    from fixtures.client import Pending
    from fixtures.spec import StackSpec
    from fixtures.stack import Stack

FAMILIES, SIBLINGS = 6, 4
"""Prompts of the load: each family shares a prefix, so that there is something to reuse while everything is evicted."""

SHARED_TOKENS, OWN_TOKENS = 1000, 1000

CACHE_OF_MAXIMUM = 1.5
"""The engine's KV cache, in requests of maximum length: it must hold one, and holds three of the load's."""

SEGMENT_OF_MAXIMUM = 2.0
"""An engine's share of the pool, in requests of maximum length. Both together hold a third of the load's blocks."""

DTYPE_BYTES = 2
"""Of bfloat16 and float16, in which the KV of every ready stack is kept."""

AT_ONCE = 12
"""Requests of one wave, spread over both engines: about twice what their caches hold."""

CANCELLED_OF_WAVE = 4

CANCEL_WITHIN_S = 1.5
"""Cancellations fall into this time after a wave began, or at the first token, when the save begins. A lookup takes 1 ms,
a load 10 to 100 ms, a prefill of 2,000 tokens 0.2 s alone and several times that in a wave, on two cores."""

IDLE_BOUND_S = 20.0
"""For the engines to come to rest after the load: saves of a wave lag by a second or two."""

SHORT_LEASE_MS = 50
"""Loads of 62 blocks over loopback take 10 to 100 ms alone, and longer beside others."""

LEASE_MS = 1000
"""Longer than a load, short enough that the store can evict: blocks under a lease stay."""


SLOW_LINK_BYTES_PER_S = 2 << 20
"""Each way to each engine's memory; loopback carries a thousand times as much. A load of 62 blocks is 4 MB, half of them in the other
engine's memory: what a wave reads at once is well beyond the second's worth that such a link lets through at once."""

SLOW_LEASE_MS = 5000
"""Longer than the slowest of those loads: what the case is about is the link, not the lease."""


class Pressure(Gate):
    """Claim: with caches far below the working set, blocks evicted and requests preempted or cancelled at any moment, every
    answer is the cold one, and nothing is left in use; over a slow link too.

    How it can lie: nothing was evicted or preempted; every request was recomputed, so nothing was read; blocks of a
    cancelled load are handed to another request while bytes still arrive; what stays pinned shows only later.
    Oracle: cold answers under salts, within the floors measured under concurrency, for the load and for a replay of
    every prompt afterwards; sums over each replayed request; KV usage of idle engines; a request of maximum length.
    Proof: the engines' preemption counters and the master's eviction counter moved, and requests were cancelled under way.
    Control: both engines read tokens from the pool while all this went on.
    Turns red: blocks reused while they are written, leaks on cancellation, a load that outlives its lease and is used.
    """

    id = "P.pressure"
    proof = ("foreign-block",)
    version = 4
    claim = (
        "under eviction, preemption, short leases and cancellations every answer is right, and nothing is left in use"
    )

    def cases(self) -> Iterable[Case]:
        yield Case(f"{self.id}.evicting", {"lease_ms": LEASE_MS}, variant="tiny-caches")
        yield Case(f"{self.id}.short-lease", {"lease_ms": SHORT_LEASE_MS}, variant="short-lease", core=False)
        slow = {"lease_ms": SLOW_LEASE_MS, "bytes_per_s": SLOW_LINK_BYTES_PER_S}
        yield Case(f"{self.id}.slow-link", slow, variant="slow-link", core=False, needs=("nft",))

    def stack(self, base: StackSpec, case: Case) -> StackSpec:
        return tiny_caches(base, case.params["lease_ms"])

    def collect(self, stack: Stack, case: Case) -> None:
        calibrate(stack, planted=False)
        seed = f"{stack.stack_id}/{case.id}"
        stack.fact("seed", seed)
        load = working_set(stack, case)
        with stack.phase(case.id, "cold"):
            for name in stack.names[:2]:
                stack.snapshot_processes(name, "before")
            for i, prompt in enumerate(load):
                engine = stack.names[i % 2]
                stack.ask(engine, prompt, f"cold/{i}", cache_salt=f"{case.id}.{i}", max_tokens=ANSWER_TOKENS)
        with stack.phase(case.id, LOADED):
            began = time.monotonic()
            counters(stack, "before-load")
            with slow_links(stack, case.params.get("bytes_per_s", 0)):
                answered = press(stack, load, random.Random(seed))
            rest(stack)
            counters(stack, "after-load")
            record_pressure(stack, began)
        if not answered:  # an engine that answers nothing any more would only add its deadline, again and again
            stack.dirty = True
            stack.scan_logs(case.id)
            return
        with stack.phase(case.id, "replay"):
            for i, prompt in enumerate(load):
                stack.ask_measured(stack.names[(i + 1) % 2], prompt, f"replay/{i}", max_tokens=ANSWER_TOKENS)
        with stack.phase(case.id, "after"):
            longest = min(stack.engines[name].facts.max_model_len for name in stack.names) - ANSWER_TOKENS
            for name in stack.names[:2]:
                prompt = stack.prompts(case.id).fresh(f"maximum/{name}", longest)
                stack.ask(name, prompt, MAXIMUM, max_tokens=ANSWER_TOKENS)
            rest(stack)
            for name in stack.names[:2]:
                stack.snapshot_processes(name, "after")
        stack.scan_logs(case.id)

    def judge(self, history: History) -> r.Verdict:
        return judge_pressure(self, history)


@contextmanager
def slow_links(stack: Stack, bytes_per_s: int) -> Iterator[None]:
    """Limit the way to each engine's memory; 0: leave it as it is. That the limit was felt is recorded before it is lifted."""
    links = [ThrottleLink("data", name, bytes_per_s=bytes_per_s) for name in stack.names[:2]] if bytes_per_s else []
    for link in links:
        link.inject(stack)
    try:
        yield
    finally:
        for link in links:
            link.confirm(stack)
            link.heal(stack)


def tiny_caches(base: StackSpec, lease_ms: int) -> StackSpec:
    """The stack with caches far below the working set: an engine's, and its share of the pool."""
    engine = base.engines[0]
    maximum_bytes = kv_bytes_per_token(engine.model) * engine.max_model_len
    spec = base.with_all_engines(kv_cache_bytes=int(CACHE_OF_MAXIMUM * maximum_bytes))
    if spec.store is None:
        return spec
    return spec.with_store(segment_bytes=int(SEGMENT_OF_MAXIMUM * maximum_bytes), kv_lease_ttl_ms=lease_ms)


def kv_bytes_per_token(model: str) -> int:
    """Bytes of KV a token takes. Of a tiny model from its spec: cases are laid out before anything is built."""
    if model in TINY:
        spec = TINY[model]
        kept = kv_layers(config_json(spec), spec.kv_heads, spec.head_dim, DTYPE_BYTES)
        return sum(layers.token_bytes for layers in kept)
    return resolve_model(model).kv_bytes_per_token(DTYPE_BYTES)


def working_set(stack: Stack, case: Case) -> list[Prompt]:
    """Every prompt of the load, siblings apart from each other so that a wave mixes families."""
    prompts = stack.prompts(case.id)
    shared = [prompts.fresh(f"family/{f}", SHARED_TOKENS) for f in range(FAMILIES)]
    return [
        prompts.extended(shared[f], f"sibling/{f}/{s}", SHARED_TOKENS + OWN_TOKENS)
        for s in range(SIBLINGS)
        for f in range(FAMILIES)
    ]


def press(stack: Stack, load: list[Prompt], rng: random.Random) -> bool:
    """Every prompt on both engines, in waves; some requests of each wave are cancelled at moments drawn from ``rng``.

    Ends with the first wave in which a request got no answer in time; returns whether there was none.
    """
    asked = [(engine, i) for engine in stack.names[:2] for i in range(len(load))]
    rng.shuffle(asked)
    for start in range(0, len(asked), AT_ONCE):
        wave = asked[start : start + AT_ONCE]
        requests: list[Request] = [
            stack.request(engine, load[i], f"{LOADING}/{i}", max_tokens=ANSWER_TOKENS) for engine, i in wave
        ]
        began = time.monotonic()
        pending = [stack.start(request) for request in requests]
        doomed = rng.sample(range(len(wave)), min(CANCELLED_OF_WAVE, len(wave)))
        cancel(sorted((rng.uniform(0, CANCEL_WITHIN_S), number) for number in doomed), pending, began)
        ended = [one.result() for one in pending]
        if any(o.timed_out for o in ended):
            return False
    return True


def cancel(doomed: list[tuple[float, int]], pending: list[Pending], began: float) -> None:
    """Cancel each at its moment (seconds after the wave began), or at its first token if that comes before."""
    for due_s, number in doomed:
        pending[number].wait_first_token(max(0.0, began + due_s - time.monotonic()))
        pending[number].cancel()


def counters(stack: Stack, label: str) -> None:
    """Record both engines' counters, and the master's."""
    for name in stack.names[:2]:
        stack.scrape(name, label)
    if stack.store is not None:
        values = stack.store.admin.metrics()
        stack.record(r.MetricsSnapshot(unit=MASTER, label=label, t_s=time.monotonic(), values=values))


def record_pressure(stack: Stack, began: float) -> None:
    """Small caches are done to the stack on purpose: their log lines are explained by it."""
    stack.record(
        r.FaultRecord(
            fault_id="pressure:caches",
            fault="pressure",
            target="caches",
            action="inject",
            landed=True,  # as settings; whether they bit is in the counters, which the judge reads
            proof={"kv_cache_bytes": stack.spec.engines[0].kv_cache_bytes, "began_s": began},
            t_s=began,
            explains=EXPLAINS,
        )
    )


def rest(stack: Stack) -> None:
    """Wait until no engine holds a request or a block; the last scrape stays as the evidence."""
    for name in stack.names[:2]:
        stack.wait(
            f"{name}-idle",
            partial(at_rest, stack, name, IDLE_LABEL),
            bound_s=IDLE_BOUND_S,
            bound_source="suite.gates.test_pressure.IDLE_BOUND_S",
            poll_s=0.25,
        )


PRESSURE = Pressure()


@gate_cases(PRESSURE)
def test_pressure(run_case: Any, case: Case) -> None:
    run_case(PRESSURE, case)
