"""Time to first token of a prompt that is cold, in the engine's own cache, or only in the pool (``suite.bench.sampler`` sends them)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from statistics import geometric_mean
from typing import TYPE_CHECKING, Any

from fixtures.errors import Untestable
from reports import records as r
from reports.compare_runs import RESULTS
from reports.history import History
from suite.bench import thresholds
from suite.bench.blocks import ARMS, Blocks, block_tokens_of, chunk_tokens_of, read_blocks
from suite.bench.sampler import ANSWER_TOKENS, Sampler, remote_reader
from suite.bench.statistics import ALPHA, METHOD, Decision, decide, fewest_blocks, sample
from suite.checks import conservation, liveness, logs
from suite.checks.base import finding, run, too_few
from suite.contract import Case, Gate
from suite.gates.judging import counts_loads, delta_of, explanation, ordered, visible_findings
from suite.workload.summary import Spread

if TYPE_CHECKING:
    from fixtures.spec import StackSpec
    from fixtures.stack import Stack

SEGMENTS = "pool"
"""Label of the store's listing and of the socket list that say whose memory the pool is."""

LONG = (1000, 4090, 8190, 16380, 32700)
"""Prompt lengths (tokens) for engines that take long prompts. None is a whole number of blocks: what a connector does with the last
token of a prompt that ends with a block is another question (P.boundary)."""

DEAR_TOKENS = 8000
LONG_MAXIMUM = 12
"""Blocks of a length from ``DEAR_TOKENS`` on, at most: one takes half a minute there over a slow link."""

JUDGED_FROM_TOKENS = 2000
"""Shorter prompts are measured, for the break-even length, and never judged: no pool can beat computing a block or two."""


class Ttft(Gate):
    """Claim: at a prompt length, the first token of a prompt that only the pool holds comes no later than the given part of the
    time that computing it takes. Where the platform has no such threshold the three arms are measured and reported.

    How it can lie: the cold prompt is warm, or the external one is in the engine's own cache, or its blocks lie in the
    reader's own memory; one arm is measured while the machine is busy; the first request pays for all; sampling stops
    when the numbers please.
    Oracle: counters around every request give its state, blocks in any other state are thrown out and counted; the store
    lists the saved blocks before they are read, and its segments belong to other processes; arms are interleaved there and
    back; the interval of the ratio holds at every look.
    Turns red: a pool that is slower than the threshold, one that gives no hits or part of them, failed requests.
    """

    id = "B.ttft"
    version = 2
    judges_lmcache = True
    claim = (
        "the first token of a prompt from the pool comes within the threshold's part of the time that a cold one takes"
    )
    proof = ()

    def cases(self) -> Iterable[Case]:
        for tokens, core in ((128, False), (512, True), (2000, True), (3900, False)):
            yield Case(f"{self.id}.t{tokens}", {"tokens": tokens, "maximum": 16 if core else 24}, core=core)
        yield from long_cases(self.id)

    def stack(self, base: StackSpec, case: Case) -> StackSpec:
        return remote_reader(fitting(base, case))

    def begin(self, stack: Stack, case: Case, tokens: int) -> Sampler:
        """Look whose memory is read; the sampler of the case."""
        sampler = Sampler(stack, case.id, tokens)
        stack.fact("bench.reader", {"reader": sampler.reader, "saver": sampler.saver})
        stack.list_store(SEGMENTS)
        stack.snapshot_sockets(SEGMENTS)
        return sampler

    def collect(self, stack: Stack, case: Case) -> None:
        tokens = int(case.params["tokens"])
        sampler = self.begin(stack, case, tokens)
        sampler.warm_up()
        threshold = _threshold(stack.spec.to_dict(), tokens)
        sample(sampler.take, threshold or 1.0, maximum=int(case.params["maximum"]), minimum=self.fewest(tokens))
        blocks = read_blocks(sampler.records, tokens, sampler.block_tokens, sampler.chunk_tokens)
        stack.fact(RESULTS, results(tokens, blocks))
        stack.scan_logs(case.id)

    def fewest(self, tokens: int) -> int:
        """Blocks to take even when fewer decide: enough for B.break-even, which gives each length its share of the error. A long
        prompt's blocks are dear, and its length far from where the pool begins to pay."""
        share = ALPHA if tokens >= DEAR_TOKENS else ALPHA / len(list(self.cases()))
        return fewest_blocks(share) + 1

    def judge(self, history: History) -> r.Verdict:
        tokens = int(history.case.params["tokens"])
        stack = history.stack
        spec: dict[str, Any] = stack.spec if stack else {}
        threshold = _threshold(spec, tokens)
        blocks = read_blocks(history, tokens, block_tokens_of(history), chunk_tokens_of(history))
        decision = decide(blocks.log_ratios("cold", "external"), threshold or 1.0)
        checks = {
            "liveness": lambda: liveness.check_liveness(history.observations()),
            **self.own_checks(history),
            "state": lambda: _state(blocks),
            "ratio": lambda: _ratio(decision, threshold, blocks),
            "logs": lambda: logs.check_logs(history),
        }
        findings = ordered(run(checks))
        judged = threshold is not None
        return self.judged(
            history,
            findings,
            claim=self.claim
            if judged
            else f"TTFT of a cold, a native and an external prompt of {tokens} tokens is known",
            good=f"external / cold {decision}",
            wanted=f"at most {threshold:g} times the cold one"
            if judged
            else "measured; this platform has no threshold",
            numbers=_numbers(history, blocks, decision),
            notes=() if judged else _notes(tokens, decision),
            **_explained(history, findings),
        )

    def own_checks(self, history: History) -> dict[str, Callable[[], list[r.Finding]]]:
        """Checks of where the external prompts came from."""
        return {
            "visible": lambda: visible_findings(history),
            "remote": lambda: remote_findings(history),
            "accounting": lambda: accounting(history, pooled=True),
        }


def long_cases(gate: str) -> Iterable[Case]:
    """A case for each length of ``LONG``."""
    for tokens in LONG:
        yield Case(
            f"{gate}.t{tokens}", {"tokens": tokens, "maximum": 24 if tokens < DEAR_TOKENS else LONG_MAXIMUM}, core=False
        )


def fitting(base: StackSpec, case: Case) -> StackSpec:
    """The stack, where its engines take the case's prompts. Raises Untestable."""
    tokens, most = int(case.params["tokens"]), min(e.max_model_len for e in base.engines)
    if tokens + ANSWER_TOKENS > most:
        raise Untestable(
            "max-model-len",
            f"engines of {base.name!r} take {most} tokens at most, the prompt has {tokens}",
            "give a stack with a larger max_model_len, e.g. --stack gpu-shapes",
        )
    return base


# Results ------------------------------------------------------------------------------------------------------------
def results(tokens: int, blocks: Blocks) -> list[dict[str, Any]]:
    """What ``reports compare`` reads: one value a block and arm (the geometric mean of its two times), in seconds."""
    found = []
    for arm in ARMS:
        values = [geometric_mean(b.ttft_s[arm]) for b in blocks.valid]
        found.append(
            {
                "benchmark": f"ttft/{arm}/{tokens}",
                "unit": "s",
                "better": "lower",
                "values": values,
            }
        )
    return found


def _threshold(spec: dict[str, Any], tokens: int) -> float | None:
    """The threshold of a prompt length; None where it is only measured."""
    return thresholds.external_over_cold(spec) if tokens >= JUDGED_FROM_TOKENS else None


def _explained(history: History, findings: Sequence[r.Finding]) -> dict[str, str]:
    said = explanation(history, findings)
    if findings and findings[0].code is r.FindingCode.SLOWER_THAN_RECOMPUTE:
        said["cause"] = "the pool's path costs more than computing anew at this length, on this transport"
        said["production"] = "vllm:time_to_first_token_seconds of requests with external hits"
    if findings:
        said["next_command"] = f"pytest -m bench -k '{history.case.case_id}'"
    return said


def _state(blocks: Blocks) -> list[r.Finding]:
    """A stack that mostly gives something else than its arm measures nothing; an external arm without hits is the stack's."""
    thrown = sum(blocks.thrown.values())
    if thrown <= len(blocks.valid):
        return []
    worst = max(blocks.thrown, key=lambda reason: blocks.thrown[reason])
    text = f"{thrown} of {blocks.taken} blocks had to be thrown out, most often: {worst} ({blocks.thrown[worst]})"
    code = r.FindingCode.TOO_FEW_OBSERVATIONS
    if worst.startswith("external: not wholly"):
        code = r.FindingCode.FEWER_HITS
    return [finding(code, text, thrown=blocks.thrown)]


def _ratio(decision: Decision, threshold: float | None, blocks: Blocks) -> list[r.Finding]:
    if decision.blocks < fewest_blocks():
        return too_few(f"{decision.blocks} valid blocks of {blocks.taken}; {fewest_blocks()} at least are needed")
    if threshold is None or decision.side == "below":
        return []
    text = f"external / cold {decision}"
    if decision.side == "above":
        return [finding(r.FindingCode.SLOWER_THAN_RECOMPUTE, text, threshold=threshold)]
    return too_few(text, needed=decision.needed)


def remote_findings(history: History) -> list[r.Finding]:
    """The pool's memory belongs to known processes, and none of it to the reader."""
    listing = next((s for s in history.of(r.StoreListing) if s.label == SEGMENTS), None)
    sockets = next((s for s in history.of(r.SocketSnapshot) if s.label == SEGMENTS), None)
    reader = history.fact("bench.reader")
    if listing is None or sockets is None or reader is None or not listing.segments:
        return [finding(r.FindingCode.NO_CONTROL, "nobody looked whose memory the pool is")]
    endpoints = [str(segment["endpoint"]) for segment in listing.segments.values()]
    holders = sorted({sockets.unit_at(endpoint) or f"unknown ({endpoint})" for endpoint in endpoints})
    if any(name.startswith("unknown") or name == reader.value["reader"] for name in holders):
        text = (
            f"memory of the pool belongs to {', '.join(holders)}: the reader {reader.value['reader']} may read its own"
        )
        return [finding(r.FindingCode.NO_CONTROL, text)]
    return []


def accounting(history: History, *, pooled: bool) -> list[r.Finding]:
    """The sums of every timed request. pooled: its external bytes are those that the pool's connector counts
    (LMCache counts none in the engine)."""
    found: list[r.Finding] = []
    for o in history.observations():
        if o.role.partition("/")[0] in ARMS:
            engine = history.engine(o.engine)
            per_token = engine.kv_bytes_per_token if pooled and counts_loads(engine) else 0
            found += conservation.check_conservation(o, delta_of(history, o), kv_bytes_per_token=per_token)
    return found


def _notes(tokens: int, decision: Decision) -> tuple[str, ...]:
    said = {
        "below": f"at {tokens} tokens the pool answers sooner than computing anew: {decision}",
        "above": f"at {tokens} tokens the pool is SLOWER than computing anew: {decision}",
        "undecided": f"at {tokens} tokens nobody can say which is sooner: {decision}",
    }
    return (said[decision.side],)


def _numbers(history: History, blocks: Blocks, decision: Decision) -> dict[str, Any]:
    ratio, low, high = decision.interval.ratio
    visible = [w.elapsed_s for w in history.of(r.WaitRecord) if w.what.startswith("visible:") and w.came_true]
    native = decide(blocks.log_ratios("cold", "native"), 1.0).interval.ratio if blocks.valid else None
    return {
        "ttft_ms": {arm: _spread(blocks.ttft_s(arm)) for arm in ARMS if blocks.valid},
        "external_over_cold": [_plain(x) for x in (ratio, low, high)],
        "native_over_cold": [_plain(x) for x in native] if native else None,
        "blocks": len(blocks.valid),
        "thrown": blocks.thrown,
        "needed": decision.needed,
        "visible_ms": _spread(visible) if visible else None,
        "method": METHOD,
    }


def _plain(value: float) -> float | None:
    return None if math.isinf(value) else round(value, 4)


def _spread(values_s: Sequence[float]) -> dict[str, float]:
    found = Spread.of(list(values_s))
    assert found is not None, "no values"
    return {"p50": round(found.p50, 1), "p90": round(found.p90, 1), "p99": round(found.p99, 1)}


TTFT = Ttft()
