"""The prompt length from which a pool pays: between the longest that is surely slower and the shortest that is surely faster."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from reports import records as r
from reports.history import History
from suite.bench.blocks import block_tokens_of, chunk_tokens_of, lengths, read_blocks
from suite.bench.sampler import remote_reader
from suite.bench.statistics import ALPHA, Decision, decide
from suite.checks.base import finding, too_few
from suite.contract import Case, Gate
from suite.gates.oracle import calibration_records

if TYPE_CHECKING:
    from fixtures.spec import StackSpec
    from fixtures.stack import Stack


class BreakEven(Gate):
    """Claim: the prompt length from which the pool answers sooner than computing anew is known, with an interval.

    How it can lie: two lengths and a straight line; a length that was never decided counted on one side; each length with an
    error of its own, so that several together err more often.
    Oracle: the blocks of all lengths that the run measured on this stack (``B.ttft``), each decided with its share of the error.
    The interval reaches from the longest length that is surely slower to the shortest that is surely faster.
    Turns red: (inconclusive) nothing measured, the longest length undecided, or lengths that contradict each other.
    """

    id = "B.break-even"
    judges_lmcache = True
    version = 2
    claim = "the prompt length from which the pool answers sooner than computing anew is known within an interval"
    proof = ()
    source = "B.ttft"
    """The gate whose blocks it reads."""

    def cases(self) -> Iterable[Case]:
        yield Case(f"{self.id}.tokens", core=False)  # the core has two lengths only

    def stack(self, base: StackSpec, case: Case) -> StackSpec:
        return remote_reader(base)

    def collect(self, stack: Stack, case: Case) -> None:
        with stack.phase(case.id, "nothing of its own"):
            stack.fact("bench.break-even", {"from": f"blocks of {self.source} on this stack"})

    def judge(self, history: History) -> r.Verdict:
        records = calibration_records(history)
        measured = lengths(records)
        alpha = ALPHA / max(1, len(measured))
        size, chunk = block_tokens_of(history), chunk_tokens_of(history)
        ratios = {n: read_blocks(records, n, size, chunk).log_ratios("cold", "external") for n in measured}
        decisions = {n: decide(values, 1.0, alpha) for n, values in ratios.items() if values}
        findings: list[r.Finding] = []
        if len(decisions) < 2:
            text = f"{len(decisions)} prompt lengths were measured on this stack; run {self.source} in the same run"
            findings = [finding(r.FindingCode.NO_CONTROL, text)]
        low, high, estimate = break_even(decisions)
        if not findings and low >= high:
            text = f"{low} tokens are surely slower from the pool and {high} surely faster"
            findings = [finding(r.FindingCode.NO_CONTROL, text)]
        if not findings and math.isinf(high) and decisions[max(decisions)].side != "above":
            needed = decisions[max(decisions)].needed
            findings = too_few(_break_even_text(low, high, estimate, decisions), needed=needed)
        return self.judged(
            history,
            findings,
            good=_break_even_text(low, high, estimate, decisions),
            wanted="an interval from two prompt lengths or more",
            numbers={
                "tokens_low": low,
                "tokens_high": None if math.isinf(high) else high,
                "tokens_estimate": estimate,
                "ratio": {str(n): [round(x, 4) for x in d.interval.ratio] for n, d in decisions.items()},
            },
        )


def break_even(decisions: dict[int, Decision]) -> tuple[float, float, float | None]:
    """Longest length surely slower from the pool (0: none), shortest surely faster (infinity: none), and the crossing of the
    estimates by interpolation in the logarithm of the length (None: they do not cross)."""
    slower = [n for n, d in decisions.items() if d.side == "above"]
    faster = [n for n, d in decisions.items() if d.side == "below"]
    points = sorted((n, d.interval.estimate) for n, d in decisions.items())
    estimate = None
    for (n0, y0), (n1, y1) in itertools.pairwise(points):
        if y0 > 0 >= y1:
            share = y0 / (y0 - y1)
            estimate = round(math.exp(math.log(n0) + share * (math.log(n1) - math.log(n0))))
            break
    return max(slower, default=0), min(faster, default=math.inf), estimate


def _break_even_text(low: float, high: float, estimate: float | None, decisions: dict[int, Decision]) -> str:
    longest, shortest = max(decisions), min(decisions)
    about = f"; the estimates cross at about {estimate}" if estimate else ""
    if math.isinf(high):
        if decisions[longest].side == "above":
            return f"above {longest} tokens, the longest length measured: there the pool is surely slower"
        surely = f"surely slower up to {low:g}" if low else "none is surely slower either"
        return f"open: no length up to {longest} tokens is surely faster from the pool, {surely}{about}"
    if low == 0 and high == shortest:
        return f"below {shortest} tokens, the shortest length measured"
    return f"between {low:g} and {high:g} tokens{about}"


BREAK_EVEN = BreakEven()
