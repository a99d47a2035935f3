"""Sends a generated trace to a stack's engines and writes down, as facts, what a benchmark's judge needs.

One replay is one ``bench.replay`` fact: the cell it belongs to, the trace's own hit rates (of an infinite pool), the counters of every
engine that was used, the figures of ``suite.workload.summary`` and a short line a request. ``Measured`` reads it back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from fixtures.errors import HarnessError
from reports import records as r
from reports.history import History
from suite.bench.sampler import captured
from suite.checks.base import COMPUTED, EXTERNAL, LOCAL, PROMPT
from suite.gates.arms import settle_saves
from suite.workload.analyse import Analyser
from suite.workload.bodies import Bodies
from suite.workload.distributions import Arrivals, constant
from suite.workload.materialise import Materialiser
from suite.workload.results import ReplayResult
from suite.workload.sessions import SessionSpec, SessionTraffic, SharedPrompt
from suite.workload.summary import ReplaySummary, summarise
from suite.workload.trace import TraceRequest

if TYPE_CHECKING:
    from fixtures.stack import Stack

REPLAY = "bench.replay"
"""Name of the fact."""

UNANSWERED = "bench.replay-unanswered"
"""Name of the fact that stands for a replay of which no request was answered whole: its cell, and errors by kind."""

PROMPT_TOKENS = 1024
OUTPUT_TOKENS = 8
GROUPS = 6
"""System prompts that share the traffic: their blocks together are more than a constrained cache holds."""
SEED = 7
DEADLINE_S = 120.0
TTFT_LIMIT_S = 0.5
"""For goodput: about five times a cold prompt of this length on two idle cores."""


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One place of a sweep. ``share``: part of each prompt that is a system prompt, in percent."""

    arm: str
    """``native`` or ``pool``."""
    cache: str
    """``ample`` or ``constrained``: each engine's own."""
    engines: int
    """Engines that requests were sent to."""
    share: int
    concurrency: int

    @property
    def name(self) -> str:
        return f"{self.arm}-{self.cache}/e{self.engines}/s{self.share}/c{self.concurrency}"


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One replay as it is written down. Tokens are prompt tokens."""

    cell: Cell
    requests: int
    reusable_tokens: int
    """What an infinite pool would give on this trace: nobody can honestly give more."""
    input_tokens: int
    by_engine: dict[str, dict[str, float]]
    """Counter differences: prompt_tokens and its parts local, external, computed."""
    sent_by_engine: dict[str, int]
    """Prompt tokens of the answered requests of each engine, as the client counts them."""
    summary: ReplaySummary
    settle_s: float | None
    """From the end of the replay until the store listed no new key any more (one second of quiet included); None without a store."""
    lines: list[tuple[int, str, int, int, float]]
    """Each answered request: index, engine, prompt tokens, cached tokens as reported, TTFT in seconds from when it was due."""

    def tokens(self, source: str) -> float:
        """Prompt tokens from ``local``, ``external`` or ``computed``, over all engines."""
        name = {"local": LOCAL, "external": EXTERNAL, "computed": COMPUTED}[source]
        return sum(values.get(name, 0.0) for values in self.by_engine.values())

    def rate(self, source: str) -> float:
        """Part of all prompt tokens that came from a source."""
        return self.tokens(source) / self.input_tokens

    @property
    def hit_rate(self) -> float:
        """Part of all prompt tokens that were not computed."""
        return (self.tokens("local") + self.tokens("external")) / self.input_tokens


def measured_in(records: Sequence[r.Record]) -> list[Measured]:
    """Every replay of a run's records, in order."""
    return [
        msgspec.convert(rec.value, Measured, strict=False)
        for rec in records
        if isinstance(rec, r.Fact) and rec.name == REPLAY
    ]


def measured_by_cell(history: History) -> dict[Cell, Measured]:
    """The newest replay of each cell, the case's own and earlier ones of the run."""
    return {m.cell: m for m in measured_in([*history.before, *history.records])}


def trace_of(share: int, requests: int, block_tokens: int, max_tokens: int) -> list[TraceRequest]:
    """The trace of a share: the same for every stack, in whole blocks of the engine's size."""
    spec = SessionSpec(
        requests=requests,
        opening=SharedPrompt(prompt=constant(PROMPT_TOKENS), share=share / 100),
        sessions=Arrivals(rate_per_s=4),
        output=constant(OUTPUT_TOKENS),
        groups=GROUPS,
        max_tokens=max_tokens,
        block_tokens=block_tokens,
        seed=SEED,
    )
    return list(SessionTraffic(spec))


def send_trace(
    stack: Stack, trace: list[TraceRequest], engines: list[str], *, nonce: str, concurrency: int
) -> list[ReplayResult]:
    """Closed loop, round robin over the engines; results in the order of their ends. nonce: another one, other prompts."""
    from fixtures.request import Target  # why here: judging needs none of these, and httptools is an extra
    from suite.workload.replay import Replay, ReplaySettings

    facts = stack.engines[engines[0]]
    targets = {n: Target(stack.engines[n].url, stack.engines[n].facts.served_model) for n in engines}
    bodies = Bodies(Materialiser.for_model(facts.model, facts.facts.block_tokens, nonce=nonce))
    settings = ReplaySettings(concurrency=concurrency, deadline_s=DEADLINE_S)
    found: list[ReplayResult] = []
    Replay(trace, targets, bodies, settings, None, found.append).run()
    return found


def measure(stack: Stack, case_id: str, cell: Cell, requests: int, names: list[str]) -> Measured | None:
    """One replay against the engines ``names`` between two readings of all counters; written down as a fact. None when no request was answered whole."""
    facts = stack.engines[names[0]].facts
    trace = trace_of(cell.share, requests, facts.block_tokens, facts.max_model_len)
    analyser = Analyser(facts.block_tokens, facts.block_tokens)
    for request in trace:
        analyser.add(request)
    with captured(stack), stack.phase(case_id, cell.name):
        before = {n: stack.scrape(n, f"{cell.name}:before") for n in names}
        results = send_trace(
            stack, trace, names, nonce=f"{stack.stack_id}/{case_id}/{cell.name}", concurrency=cell.concurrency
        )
        whole = [x for x in results if not x.error and x.first_s is not None]
        if not whole:
            errors = Counter(x.error.partition(":")[0] for x in results)
            stack.fact(UNANSWERED, {"cell": cell.name, "errors": dict(errors)})
            return None
        sent = {n: sum(x.input_tokens for x in whole if x.engine == n) for n in names}
        after = {n: _booked(stack, before[n], sent[n], f"{cell.name}:after") for n in names}
        settle_s = _settle(stack)
    found = Measured(
        cell=cell,
        requests=len(trace),
        reusable_tokens=analyser.result().infinite.reusable.hits,
        input_tokens=sum(q.input_tokens for q in trace),
        by_engine={
            n: {k: after[n].values[k] - before[n].values[k] for k in (PROMPT, LOCAL, EXTERNAL, COMPUTED, "preemptions")}
            for n in names
        },
        sent_by_engine=sent,
        summary=summarise(results, TTFT_LIMIT_S),
        settle_s=settle_s,
        lines=[
            (x.index, x.engine, x.input_tokens, x.cached_tokens or 0, round((x.first_s or 0) - x.intended_s, 6))
            for x in sorted(whole, key=lambda x: x.index)
        ],
    )
    stack.fact(REPLAY, msgspec.to_builtins(found))
    return found


def _booked(stack: Stack, before: r.MetricsSnapshot, prompt_tokens: int, label: str) -> r.MetricsSnapshot:
    """The engine's counters once all its requests are in them. Raises HarnessError for an engine that does not answer."""
    found = stack.scrape_booked(before.unit, before, label, prompt_tokens)
    if found is None:
        raise HarnessError(f"{before.unit} answered the replay, and does not answer when asked for its counters")
    return found


def _settle(stack: Stack) -> float | None:
    if stack.store is None:
        return None
    with captured(stack) as records:
        settle_saves(stack)
    waits = [rec.elapsed_s for rec in records if isinstance(rec, r.WaitRecord)]
    return round(waits[-1], 2) if waits else None


def warm_up(stack: Stack, case_id: str) -> None:
    """A few requests of a replay's shape to every engine, not measured."""
    facts = stack.engines[stack.names[0]].facts
    trace = trace_of(50, 2 * len(stack.names), facts.block_tokens, facts.max_model_len)
    send_trace(stack, trace, stack.names, nonce=f"{stack.stack_id}/{case_id}/warm-up", concurrency=len(stack.names))


def results_of(found: Measured | None) -> list[dict[str, Any]]:
    """What ``reports compare`` reads: one value a figure, as the run is the unit."""
    if found is None:
        return []
    s, name = found.summary, found.cell.name
    figures: list[tuple[str, str, str, float | None]] = [
        ("hit-rate", "share", "higher", found.hit_rate),
        ("ttft-p50", "s", "lower", s.ttft.p50 / 1000),
        ("ttft-p90", "s", "lower", s.ttft.p90 / 1000),
        ("itl-p50", "s", "lower", s.itl.p50 / 1000 if s.itl else None),
        ("throughput", "requests/s", "higher", s.requests_per_s),
        ("goodput", "requests/s", "higher", s.goodput_per_s),
    ]
    return [
        {"benchmark": f"replay/{name}/{what}", "unit": unit, "better": better, "values": [value]}
        for what, unit, better, value in figures
        if value is not None
    ]
