"""The baseline that any pool must beat: sharing x cache size x engines, with the pool and without; and a concurrency ladder.

A case of ``B.sweep`` is one stack, native or pool. Cells of one engine share a stack: the first engine's own cache is ample, the last
one's constrained, and each is replayed against alone (the other idles: it is there, and in a pool its memory is). Cells of all engines
have a stack for each cache size. The same traces go to every stack, so hit rates compare as counts. ``B.promise`` reads what the
run's sweep measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from reports import records as r
from reports.compare_runs import RESULTS
from reports.history import History
from suite.bench import thresholds
from suite.bench.replays import (
    UNANSWERED,
    Cell,
    Measured,
    measure,
    measured_by_cell,
    measured_in,
    results_of,
    warm_up,
)
from suite.bench.sampler import remote_reader
from suite.checks import logs
from suite.checks.base import COMPUTED, EXTERNAL, LOCAL, PROMPT, finding, run, too_few
from suite.contract import Case, Gate, outcome_of
from suite.gates.judging import ordered

if TYPE_CHECKING:
    from fixtures.spec import StackSpec
    from fixtures.stack import Stack

SHARES = (0, 50, 90)
REQUESTS = 24
CONCURRENCY_AN_ENGINE = 2
CONSTRAINED_BLOCKS = 96
"""Blocks of a constrained cache: two prompts in flight pin 66 of them, so about one more prompt is kept."""
SWEEP_MAX_LEN = 2048
LADDER = (1, 2, 4, 8, 16)
LADDER_SHARE = 90

LEAST_LOSS = 0.05
"""Part of the prompt tokens that a constrained cache has to lose before giving them back can be judged."""


def sweep_stack(base: StackSpec, arm: str, cache: str) -> StackSpec:
    """The stack of one arm. cache: that of every engine, or ``pair``: ample on the first engine, constrained on the last."""
    from fixtures.models import resolve_model  # why here: models need numpy, and judging needs none

    engine = base.engines[0]
    constrained = CONSTRAINED_BLOCKS * engine.block_tokens * resolve_model(engine.model).kv_bytes_per_token()
    spec = base.with_all_engines(max_model_len=SWEEP_MAX_LEN)
    if arm == "native":
        spec = spec.with_all_engines(connector="native").with_changes(store=None)
    if cache == "constrained":
        return spec.with_all_engines(kv_cache_bytes=constrained)
    if cache == "pair":
        return spec.with_engine(spec.engines[-1].name, kv_cache_bytes=constrained)
    return spec


class Sweep(Gate):
    """Claim: on every stack of the sweep all requests are answered, every prompt token has one source, and no more is reused
    than the trace repeats. What it measures is the baseline.

    How it can lie: requests fail quietly and flatter the rest; the client is the bottleneck; hits are counted that the
    trace cannot have; another stack got another trace.
    Oracle: the trace's own infinite-pool count; counters of the engines against prompt tokens as the client sent them; latency
    counts from when a request was due.
    Turns red: failed requests, counters that do not add up, more hits than the trace repeats.
    """

    id = "B.sweep"
    claim = (
        "in the baseline sweep all requests are answered, sources add up, and no more is reused than the traces repeat"
    )
    needs_pool = False
    proof = ()

    def cases(self) -> Iterable[Case]:
        for arm in ("native", "pool"):
            yield Case(f"{self.id}.{arm}-e1", {"arm": arm, "cache": "pair"}, variant=f"{arm}-pair", core=False)
        for cache in ("ample", "constrained"):
            for arm in ("native", "pool"):
                params = {"arm": arm, "cache": cache}
                yield Case(f"{self.id}.{arm}-{cache}-all", params, variant=f"{arm}-{cache}", core=False)

    def stack(self, base: StackSpec, case: Case) -> StackSpec:
        return sweep_stack(base, case.params["arm"], case.params["cache"])

    def collect(self, stack: Stack, case: Case) -> None:
        warm_up(stack, case.id)
        results: list[dict[str, Any]] = []
        for cache, names in self._engines(stack, case.params["cache"]):
            for share in SHARES:
                cell = Cell(
                    arm=case.params["arm"],
                    cache=cache,
                    engines=len(names),
                    share=share,
                    concurrency=CONCURRENCY_AN_ENGINE * len(names),
                )
                results += results_of(measure(stack, case.id, cell, REQUESTS, names))
        stack.fact(RESULTS, results)
        stack.scan_logs(case.id)

    @staticmethod
    def _engines(stack: Stack, cache: str) -> list[tuple[str, list[str]]]:
        """Cache size and engines of each round of replays."""
        if cache == "pair":
            return [("ample", stack.names[:1]), ("constrained", stack.names[-1:])]
        return [(cache, stack.names)]

    def judge(self, history: History) -> r.Verdict:
        return judge_replays(self, history)


class Ladder(Gate):
    """Claim: up to the ladder's highest concurrency no request fails; throughput and latency are known at each rung.

    How it can lie: the client saturates before the engines do; a rung is warmed by the one before.
    Oracle: new prompts at each rung; the client's own lag is written beside each figure.
    Turns red: failed requests, counters that do not add up, more hits than the trace repeats.
    """

    id = "B.ladder"
    claim = "up to the highest concurrency no request fails, sources add up, and throughput is known at every rung"
    proof = ()

    def cases(self) -> Iterable[Case]:
        yield Case(f"{self.id}.s{LADDER_SHARE}", {"share": LADDER_SHARE, "requests": 32})

    def stack(self, base: StackSpec, case: Case) -> StackSpec:
        return remote_reader(base)  # that of B.ttft, so that a short run starts one stack

    def collect(self, stack: Stack, case: Case) -> None:
        warm_up(stack, case.id)
        results: list[dict[str, Any]] = []
        for concurrency in LADDER:
            cell = Cell(
                arm="pool",
                cache="ample",
                engines=len(stack.names),
                share=case.params["share"],
                concurrency=concurrency,
            )
            results += results_of(measure(stack, case.id, cell, case.params["requests"], stack.names))
        stack.fact(RESULTS, results)
        stack.scan_logs(case.id)

    def judge(self, history: History) -> r.Verdict:
        return judge_replays(self, history)


class Promise(Gate):
    """Claim: where each engine's own cache is too small, the pool gives back at least the given part of the hits that this costs.

    How it can lie: nothing was lost; the pool's hits are those of the engines' own caches; the pool recovers hits and costs more
    time than computing.
    Oracle: counts of one trace on three stacks of the run's sweep: native with ample caches, native with constrained ones, pool
    with constrained ones, each sound (all answered, sources add up, no impossible hit). Hits beyond what the ample caches give (engines that share) count too, and are told apart.
    Turns red: a pool without hits, with part of them, or too small for the working set.
    """

    id = "B.promise"
    version = 2
    claim = "with constrained caches the pool gives back at least the threshold's part of the hits lost"
    proof = ()

    def cases(self) -> Iterable[Case]:
        for engines, cache in ((1, "pair"), (2, "constrained")):
            for share in SHARES[1:]:
                params = {"share": share, "engines": engines, "cache": cache}
                yield Case(f"{self.id}.s{share}-e{engines}", params, variant=f"pool-{cache}", core=False)

    def stack(self, base: StackSpec, case: Case) -> StackSpec:
        return sweep_stack(base, "pool", case.params["cache"])

    def collect(self, stack: Stack, case: Case) -> None:
        with stack.phase(case.id, "nothing of its own"):
            stack.fact("bench.promise", {"from": "replays of B.sweep in this run"})

    def judge(self, history: History) -> r.Verdict:
        stack = history.stack
        wanted = thresholds.recovered_share(stack.spec if stack else {})
        found = self._cells(history)
        missing = [name for name, m in found.items() if m is None]
        if missing:
            text = f"not measured in this run: {', '.join(missing)}; run B.sweep with it, in one process"
            findings: list[r.Finding] = [finding(r.FindingCode.NO_CONTROL, text)]
            return self.verdict(history, outcome_of(findings), findings=findings, got=text, wanted="three stacks")
        measured = [m for m in found.values() if m is not None]
        if spoiled := [m.cell.name for m in measured if m.summary.failed or _sources(m) or _impossible(m)]:
            text = f"figures that count for nothing, B.sweep says why: {', '.join(spoiled)}"
            findings = [finding(r.FindingCode.NO_CONTROL, text)]
            return self.verdict(
                history, outcome_of(findings), findings=findings, got=text, wanted="three sound replays"
            )
        ample, native, pool = measured
        lost = ample.hit_rate - native.hit_rate
        recovered = pool.hit_rate - native.hit_rate
        share = recovered / lost if lost > 0 else None
        text = (
            f"hit rate {native.hit_rate:.1%} with constrained caches, {ample.hit_rate:.1%} with ample ones, {pool.hit_rate:.1%} with"
            f" the pool ({pool.rate('external'):.1%} from it)"
        )
        findings = []
        if lost < LEAST_LOSS:
            findings = too_few(f"{text}: a loss of {lost:.1%} leaves nothing to give back")
        elif share is not None and share < wanted:
            findings = [finding(r.FindingCode.FEWER_HITS, f"{text}: {share:.0%} of the loss given back")]
        factor = pool.summary.ttft.p50 / native.summary.ttft.p50
        return self.judged(
            history,
            findings,
            good=f"{text}: {share:.0%} of the loss given back",
            wanted=f"{wanted:.0%} of the loss at least",
            numbers={"lost": round(lost, 4), "recovered": round(recovered, 4), "share": share and round(share, 3)},
            notes=(
                f"TTFT p50 {pool.summary.ttft.p50:.0f} ms with the pool, {native.summary.ttft.p50:.0f} ms without ({factor:.2f} times);"
                " one replay each, on stacks one after the other: reported, not judged",
            ),
            cause="keys differ, saves lag behind the traffic, or the pool holds less than the working set"
            if findings
            else "",
            production="vllm:external_prefix_cache_hits_total over _queries_total" if findings else "",
            next_command="pytest -m bench -k 'B.sweep or B.promise'" if findings else "",
        )

    @staticmethod
    def _cells(history: History) -> dict[str, Measured | None]:
        have = measured_by_cell(history)
        share, engines = int(history.case.params["share"]), int(history.case.params["engines"])

        def at(arm: str, cache: str) -> Measured | None:
            return have.get(
                Cell(arm=arm, cache=cache, engines=engines, share=share, concurrency=CONCURRENCY_AN_ENGINE * engines)
            )

        names = (("native", "ample"), ("native", "constrained"), ("pool", "constrained"))
        return {f"{arm}-{cache} with {engines} engines": at(arm, cache) for arm, cache in names}


def judge_replays(gate: Gate, history: History) -> r.Verdict:
    """Judge the replays of a case: all answered, sources add up, no impossible hits, logs clean."""
    found = measured_in(history.records)
    checks = {
        "answered": lambda: _answered(found, history),
        "sources": lambda: [f for m in found for f in _sources(m)],
        "hits": lambda: [f for m in found for f in _impossible(m)],
        "logs": lambda: logs.check_logs(history),
    }
    findings = ordered(run(checks))
    late = [m.cell.name for m in found if m.summary.client_behind]
    return gate.judged(
        history,
        findings,
        good=f"{len(found)} replays, {sum(m.requests for m in found)} requests",
        wanted="every request answered, sources that add up, no hit that the trace cannot have",
        numbers={m.cell.name: row(m) for m in found},
        notes=tuple(f"{name}: the client was late, its latencies are in part its own" for name in late),
        next_command=f"pytest -m bench -k '{history.case.case_id}'" if findings else "",
    )


def row(m: Measured) -> dict[str, Any]:
    """The figures of one replay, as tables show them: rates as parts, times in milliseconds, rates a second."""
    s = m.summary
    return {
        "hit_local": round(m.rate("local"), 4),
        "hit_external": round(m.rate("external"), 4),
        "hit_possible": round(m.reusable_tokens / m.input_tokens, 4),
        "ttft_ms": [round(x, 1) for x in (s.ttft.p50, s.ttft.p90, s.ttft.p99)],
        "itl_ms": [round(x, 1) for x in (s.itl.p50, s.itl.p90, s.itl.p99)] if s.itl else None,
        "requests_per_s": round(s.requests_per_s, 2),
        "output_tokens_per_s": round(s.output_tokens_per_s, 1),
        "goodput_per_s": None if s.goodput_per_s is None else round(s.goodput_per_s, 2),
        "failed": s.failed,
        "settle_s": m.settle_s,
    }


def _answered(found: Sequence[Measured], history: History) -> list[r.Finding]:
    nothing = [fact.value for fact in history.facts(UNANSWERED)]
    if nothing:
        text = f"{nothing[0]['cell']}: no request was answered whole: {nothing[0]['errors']}"
        return [finding(r.FindingCode.FAILED_REQUEST, text, cells=[x["cell"] for x in nothing])]
    if not found:
        return too_few("no replay was measured")
    failed = [m for m in found if m.summary.failed or m.summary.requests != m.requests]
    if not failed:
        return []
    first = failed[0]
    text = f"{first.cell.name}: {first.summary.failed} of {first.requests} requests failed: {first.summary.errors}"
    return [finding(r.FindingCode.FAILED_REQUEST, text, cells=[m.cell.name for m in failed])]


def _sources(m: Measured) -> list[r.Finding]:
    """Each engine's counters add up to the prompt tokens that were sent to it."""
    if m.summary.failed:
        return []  # a failed request may be counted or not; that it failed is a finding of its own
    found = []
    for engine, counted in m.by_engine.items():
        parts = counted[LOCAL] + counted[EXTERNAL] + counted[COMPUTED]
        if not counted[PROMPT] == parts == m.sent_by_engine[engine]:
            text = (
                f"{m.cell.name}: {engine} counts {counted[PROMPT]:.0f} prompt tokens and sources of {parts:.0f}; it was sent"
                f" {m.sent_by_engine[engine]}"
            )
            found.append(finding(r.FindingCode.CONSERVATION, text, engine=engine))
    return found


def _impossible(m: Measured) -> list[r.Finding]:
    """No more hits than the trace repeats: prompts were new, so anything more is somebody else's block."""
    hits = m.tokens("local") + m.tokens("external")
    if m.summary.failed or hits <= m.reusable_tokens:
        return []
    if any(counted["preemptions"] for counted in m.by_engine.values()):
        return []  # a request that was put off finds its own blocks again
    text = f"{m.cell.name}: {hits:.0f} prompt tokens were reused, the trace repeats {m.reusable_tokens}"
    return [finding(r.FindingCode.EXTRA_HITS, text)]


SWEEP = Sweep()
LADDER_GATE = Ladder()
PROMISE = Promise()
