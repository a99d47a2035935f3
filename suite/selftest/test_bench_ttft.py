"""``collect`` of the TTFT gate on a model of a stack: two engines' caches and a pool as sets, times by source.

A model because the truth has to be known (which source each prompt really has, and how long each takes); what it replaces, the
engines, is what the gate runs on otherwise.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from reports import records as r
from reports.history import History
from suite.bench.blocks import ARMS
from suite.bench.plain import PlainTtft
from suite.bench.sampler import GIVE_UP_AFTER
from suite.bench.statistics import ALPHA, decide
from suite.bench.ttft import TTFT
from suite.contract import Case, safe_judge
from suite.selftest import bench_samples as samples
from suite.workload.prompts import PromptMaker, reusable_tokens

pytestmark = pytest.mark.selftest

TOKENS = 2000
TIMES = {"cold": 0.2, "native": 0.03, "external": 0.1}
CASE = Case(f"B.ttft.t{TOKENS}", {"tokens": TOKENS, "maximum": 24})


class ModelStack:
    """What the gate uses of a stack. Counters, caches and pool are those of the model; time stands still."""

    def __init__(
        self, times: dict[str, float], *, pool_works: bool = True, warm: bool = False, dies_after: int = 10**9
    ) -> None:
        self.times = times
        self.pool_works = pool_works
        self.warm = warm
        self.dies_after = dies_after
        self.names = ["e0", "e1"]
        self.engines = {n: SimpleNamespace(facts=samples.facts(n)) for n in self.names}
        self.stack_id = "s1"
        self.store = object()
        self.records: list[r.Record] = [
            samples.stack_up(platform="cuda"),
            samples.started(CASE.id, "B.ttft", **CASE.params),
        ]
        self.record: Any = self.records.append
        up: Any = self.records[0]
        self.spec = SimpleNamespace(
            timeouts=SimpleNamespace(visible_s=1, request_s=1), to_dict=lambda: up.spec, name="cpu", external=None
        )
        self.shares = itertools.repeat(0.0)
        """Part of the pool in use, at each look."""
        self.removed: list[list[str]] = []
        self.caches: dict[str, set[tuple[int, ...]]] = {n: set() for n in self.names}
        self.pool: set[tuple[int, ...]] = set()
        self.counted = {n: dict.fromkeys(_COUNTERS, 0.0) for n in self.names}
        self.sent = 0
        self._numbers = itertools.count(1)
        self._rng = random.Random(3)

    def prompts(self, label: str, engine: str) -> PromptMaker:
        return PromptMaker(f"{label}/{engine}", 500, samples.BLOCK)

    @contextmanager
    def phase(self, case_id: str, name: str) -> Iterator[None]:
        yield

    def _source(self, engine: str, prompt: tuple[int, ...]) -> str:
        if prompt in self.caches[engine]:
            return "native"
        return "external" if prompt in self.pool and self.pool_works else "cold"

    def ask(self, engine: str, prompt: tuple[int, ...], role: str, **fields: Any) -> r.Observation:
        assert fields["max_tokens"] >= 2, "a request that ends with its first token is never saved"
        self.sent += 1
        source = self._source(engine, prompt)
        reused = 0 if source == "cold" else reusable_tokens(len(prompt), samples.BLOCK)
        counted = self.counted[engine]
        counted["prompt_tokens"] += len(prompt)
        counted["prompt_tokens.computed"] += len(prompt) - reused
        if source != "cold":
            name = "local" if source == "native" else "external"
            counted[f"prompt_tokens.{name}"] += reused
            counted[f"{name}_hits_tokens"] += reused
            counted["store.load_get.ok.bytes"] += reused * samples.KV if name == "external" else 0
        self.caches[engine].add(prompt)
        self.pool.add(prompt)
        took_s = self.times[source] * self._rng.uniform(0.9, 1.1)
        fields = {
            "request_id": f"{CASE.id}#{next(self._numbers)}",
            "case_id": CASE.id,
            "phase": "p",
            "engine": engine,
            "role": role,
        }
        if self.sent > self.dies_after:
            fields |= {"http_status": 500, "error": "http 500: no"}
        else:
            fields |= {
                "http_status": 200,
                "first_token_s": 1.0 + took_s,
                "token_s": (1.0 + took_s,) * 2,
                "output_token_ids": (1, 2),
            }
        found = r.Observation(
            prompt_token_ids=prompt, usage_prompt_tokens=len(prompt), cached_tokens=reused, finish_reason="length", sent_s=1.0,
            done_s=2.0, deadline_s=9.0, **fields,
        )  # fmt: skip
        self.records.append(found)  # the client has its own way into the evidence, past ``record``
        return found

    def ask_measured(self, engine: str, prompt: tuple[int, ...], role: str, **fields: Any) -> r.Observation:
        if self.warm and role.startswith("cold/"):
            self.ask(engine, prompt, "spoiler", max_tokens=2)
        before = dict(self.counted[engine])
        found = self.ask(engine, prompt, role, **fields)
        for when, values in (("before", before), ("after", dict(self.counted[engine]))):
            self.record(r.MetricsSnapshot(unit=engine, label=f"{found.request_id}:{when}", t_s=1.0, values=values))
        return found

    def save(self, engine: str, prompt: tuple[int, ...], role: str = "save", **fields: Any) -> r.Observation:
        found = self.ask(engine, prompt, role, **{"max_tokens": 8, **fields})
        self.record(
            r.WaitRecord(what=f"visible:{found.request_id}", t_s=1.0, elapsed_s=0.1, bound_s=30.0, came_true=True)
        )
        return found

    def key_count(self) -> int:
        return len(self.pool)

    def keys(self) -> frozenset[str]:
        return frozenset(str(len(prompt)) for prompt in self.pool)

    def pool_share(self) -> float:
        return next(self.shares)

    def store_tool(self, steps: list[dict[str, Any]]) -> None:
        (step,) = steps
        assert step["op"] == "remove"
        self.removed.append(step["keys"])
        self.pool.clear()

    def wait(self, label: str, probe: Any, **_: Any) -> bool:
        return any(probe() for _ in range(50))

    def wait_quiet(self, label: str) -> bool:
        return True  # its pool lists what was saved at once

    def list_store(self, label: str) -> None:
        for record in samples.pool_records()[1:]:
            self.record(record)

    def snapshot_sockets(self, label: str) -> None:
        """With the listing."""

    def fact(self, name: str, value: Any) -> None:
        self.record(r.Fact(name=name, t_s=1.0, value=value))

    def scan_logs(self, case_id: str) -> None:
        self.fact("logs.scanned", {"e0": 1, "e1": 1})

    # For plain timings
    def request(self, engine: str, prompt: tuple[int, ...], role: str, **fields: Any) -> Any:
        number = f"{CASE.id}#{next(self._numbers)}"
        return SimpleNamespace(engine=engine, prompt_token_ids=prompt, role=role, request_id=number, fields=fields)

    def start(self, request: Any) -> Any:
        found = self.ask(request.engine, request.prompt_token_ids, request.role, **request.fields)
        found = msgspec.structs.replace(found, request_id=request.request_id)
        return SimpleNamespace(result=lambda: found, wait_first_token=lambda _: True)

    def scrape_booked(
        self, engine: str, before: r.MetricsSnapshot, label: str, prompt_tokens: int
    ) -> r.MetricsSnapshot:
        return self.scrape(engine, label)

    def scrape(self, engine: str, label: str) -> r.MetricsSnapshot:
        return r.MetricsSnapshot(unit=engine, label=label, t_s=1.0, values=dict(self.counted[engine]))


_COUNTERS = (
    "prompt_tokens", "prompt_tokens.local", "prompt_tokens.external", "prompt_tokens.computed", "external_hits_tokens",
    "local_hits_tokens", "store.load_get.ok.bytes",
)  # fmt: skip


def _collected(**kwargs: Any) -> tuple[ModelStack, r.Verdict]:
    stack: Any = ModelStack(kwargs.pop("times", TIMES), **kwargs)
    TTFT.collect(stack, CASE)
    stack.record(r.CaseFinished(case_id=CASE.id, t_s=3.0))
    return stack, safe_judge(TTFT, History(stack.records).for_case(CASE.id))


def test_it_finds_the_ratio_of_the_model_and_stops_when_it_is_decided() -> None:
    stack, verdict = _collected()
    assert verdict.outcome is r.Outcome.PASS, verdict
    ratio, low, high = verdict.numbers["external_over_cold"]
    assert low <= 0.5 <= high
    assert ratio == pytest.approx(0.5, rel=0.1)
    assert verdict.numbers["blocks"] == TTFT.fewest(2000) == 11, (
        "decided after as many blocks as are needed, and no more"
    )
    assert verdict.numbers["thrown"] == {}
    assert verdict.numbers["visible_ms"]["p50"] == 100.0
    (fact,) = History(stack.records).facts("bench.results")
    assert [s["benchmark"] for s in fact.value] == [f"ttft/{arm}/{TOKENS}" for arm in ARMS]
    assert all(len(s["values"]) == 11 for s in fact.value)


def test_a_pool_that_fills_is_emptied_before_it_evicts_and_no_measured_prompt_with_it() -> None:
    stack: Any = ModelStack(TIMES)
    stack.shares = itertools.chain(
        [0.4, 0.6], itertools.repeat(0.0)
    )  # first preparation, second, and after the removal
    TTFT.collect(stack, CASE)
    stack.record(r.CaseFinished(case_id=CASE.id, t_s=3.0))
    verdict = safe_judge(TTFT, History(stack.records).for_case(CASE.id))
    assert (len(stack.removed), verdict.numbers["thrown"]) == (1, {})
    deployed: Any = ModelStack(TIMES)
    deployed.shares, deployed.spec.external = itertools.repeat(1.0), object()
    TTFT.collect(deployed, CASE)
    assert deployed.removed == [], "what lies in a deployed pool is somebody's"


def test_every_prompt_of_an_arm_is_new() -> None:
    stack, _ = _collected()
    for arm in ARMS:
        prompts = [
            x.prompt_token_ids for x in stack.records if isinstance(x, r.Observation) and x.role.startswith(f"{arm}/")
        ]
        assert len(prompts) == len(set(prompts)) == 2 * TTFT.fewest(2000)


def test_a_slow_pool_is_red() -> None:
    _, verdict = _collected(times={**TIMES, "external": 0.4})
    assert (verdict.outcome, verdict.finding) == (r.Outcome.FAIL, "slower-than-recompute")


def test_a_pool_without_hits_is_red_and_ends_at_the_maximum() -> None:
    _, verdict = _collected(pool_works=False)
    assert (verdict.outcome, verdict.finding) == (r.Outcome.FAIL, "fewer-hits")
    assert sum(verdict.numbers["thrown"].values()) == 24


def test_warm_colds_never_become_figures() -> None:
    stack, verdict = _collected(warm=True)
    assert verdict.outcome is r.Outcome.INCONCLUSIVE
    assert verdict.numbers["thrown"] == {"cold: was warm": 24}
    (fact,) = History(stack.records).facts("bench.results")
    assert [s["values"] for s in fact.value] == [[], [], []]


@pytest.mark.parametrize("dies_after", [0, 6, 10, 40])
def test_a_stack_that_stops_answering_is_red_and_not_asked_on_and_on(dies_after: int) -> None:
    stack, verdict = _collected(dies_after=dies_after)
    assert (verdict.outcome, verdict.finding) == (r.Outcome.FAIL, "failed-request")
    assert stack.sent <= dies_after + GIVE_UP_AFTER + 6, "warm-up has six requests"


@pytest.mark.parametrize("arm", ARMS)
def test_plain_timings_are_of_their_arm(arm: str) -> None:
    stack: Any = ModelStack(TIMES)
    plain = PlainTtft(stack, arm, TOKENS)
    for _ in range(3):
        (request,), _ = plain.setup()
        plain.first_token(request)
        plain.drain(request)
    assert plain.complaints == []


def test_plain_timings_tell_what_was_not_of_their_arm() -> None:
    stack: Any = ModelStack(TIMES, pool_works=False)
    plain = PlainTtft(stack, "external", TOKENS)
    (request,), _ = plain.setup()
    plain.first_token(request)
    plain.drain(request)
    assert plain.complaints == ["external: not wholly from the pool"]


def test_every_length_of_a_run_gets_blocks_enough_for_its_share_of_the_error() -> None:
    lengths = [int(case.params["tokens"]) for case in TTFT.cases()]
    for tokens in (tokens for tokens in lengths if tokens < 8000):
        clear = [math.log(0.5)] * (TTFT.fewest(tokens) - 1)  # one block may be thrown out
        assert decide(clear, 1.0, ALPHA / len(lengths)).side == "below"
    assert TTFT.fewest(32700) < TTFT.fewest(4090), "half a minute a block"
