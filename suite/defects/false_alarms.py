"""``python -m suite.defects.false_alarms``: how often healthy gates turn red, and what that number is worth.

The unit is (restart, gate): after each restart of the whole stack every gate that a healthy stack must pass is judged
once, on the next of its core cases. With k alarms in n units the one-sided upper bound of the rate is Clopper-Pearson's;
for k = 0 that is 1 - 0.05^(1/n), about 3/n ("rule of three"). Units of one restart share calibration and machine, so they
are not quite independent; the number of restarts is given beside.

Exit code 0 without an alarm, 10 with one, 11 when fewer units than asked for came to a verdict, 4 for bad input.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec

from fixtures.errors import UsageError
from fixtures.progress import open_progress
from fixtures.pytest_support.options import RunOptions
from fixtures.pytest_support.run import WorkerRun, carried_verdicts
from fixtures.stack_pool import StackPool
from reports import records as r
from reports.evidence import EvidenceError
from suite.contract import Case, Gate
from suite.gates import registry

CONFIDENCE = 0.95
FILE_NAME = "false_alarms.json"

KNOWN_RED = (
    "O.no-master",
    "P.integrity",
    "O.exposed-ports",
    "O.foreign-client",
    "P.concurrent.before-save",
    "P.concurrent.during-save",
)
"""Gates and cases that the tested releases fail on a healthy stack too, always or now and then (an engine without a master never
becomes ready; damaged blocks are served; ports are open to all; colliding saves lose blocks): their FAIL is no false alarm."""

HURTS = ("P.restart",)
"""Gates that hurt the stack themselves, so that it is not healthy while they judge it."""

ROOT = Path(__file__).resolve().parents[2]


WITNESSES = ("load-failure", "save-failure")
"""Categories of ``suite.checks.logs``: the store or the connector says itself that it lost a load or a save."""


class Summary(r.Part, frozen=True, kw_only=True):
    """What was measured. ``units`` came to PASS or FAIL; ``undecided`` did not, and count for nothing.

    alarms: units that failed. witnessed: those of which the stack's own log tells a lost save or load. upper_bound: of the
    rate of all alarms; unwitnessed_upper_bound: of the rate of the others, among units without such a loss.
    """

    runs: tuple[str, ...]
    units: int
    restarts: int
    alarms: int
    undecided: int
    upper_bound: float
    confidence: float = CONFIDENCE
    units_by_gate: dict[str, int] = {}
    alarm_cases: tuple[str, ...] = ()
    undecided_cases: tuple[str, ...] = ()
    witnessed: int = 0
    unwitnessed_upper_bound: float = 1.0


def upper_bound(alarms: int, units: int, confidence: float = CONFIDENCE) -> float:
    """One-sided Clopper-Pearson upper bound of a rate: the largest p that still gives so few alarms with 1 - confidence.

    1.0 where nothing was observed. ValueError for impossible counts.
    """
    if not 0 <= alarms <= units:
        raise ValueError(f"{alarms} alarms in {units} units")
    if alarms == units:
        return 1.0
    low, high = alarms / units, 1.0
    for _ in range(60):  # bisection: the chance of so few falls with p
        middle = (low + high) / 2
        low, high = (middle, high) if _at_most(alarms, units, middle) > 1 - confidence else (low, middle)
    return high


def _at_most(k: int, n: int, p: float) -> float:
    """Chance of at most k successes in n tries."""
    return math.fsum(math.comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(k + 1))


def healthy_cases(gates: dict[str, Gate]) -> dict[str, list[Case]]:
    """Per gate, the core cases that a healthy stack passes on the run's own spec: no faults, no variants, no needs."""
    found = {}
    for gate in gates.values():
        cases = [
            c for c in gate.cases() if c.core and not (c.dirties or c.variant or c.needs) and c.id not in KNOWN_RED
        ]
        if cases and gate.needs_pool and gate.id not in (*KNOWN_RED, *HURTS):
            found[gate.id] = cases
    return found


def plan(gates: dict[str, Gate], units: int) -> Iterator[tuple[int, Gate, Case]]:
    """(restart, gate, case) in order, endless restarts until ``units`` are reached; cases take turns."""
    cases = healthy_cases(gates)
    given = 0
    for restart in itertools.count(1):
        for gate_id, own in cases.items():
            if given == units or not own:
                return
            given += 1
            case = own[(restart - 1) % len(own)]
            yield restart, gates[gate_id], dataclasses.replace(case, id=f"healthy.{restart}:{case.id}")


def is_witnessed(verdict: r.Verdict) -> bool:
    """The stack's own log tells of a lost save or load in this case."""
    logs = (f for f in verdict.findings if f.code is r.FindingCode.UNEXPLAINED_LOG)
    return any(f.evidence.get("category") in WITNESSES for f in logs)


def summarise(verdicts: Sequence[r.Verdict], runs: Sequence[str] = ()) -> Summary:
    """Count the units among verdicts (other cases are left out)."""
    last = {v.case_id: v for v in verdicts if v.case_id.startswith("healthy.")}
    decided = [v for v in last.values() if v.outcome in (r.Outcome.PASS, r.Outcome.FAIL)]
    undecided = [v for v in last.values() if v not in decided]
    alarms = [v for v in decided if v.outcome is r.Outcome.FAIL]
    witnessed = sum(map(is_witnessed, alarms))
    return Summary(
        runs=tuple(runs),
        units=len(decided),
        restarts=len({v.case_id.split(":")[0] for v in decided}),
        alarms=len(alarms),
        undecided=len(undecided),
        upper_bound=upper_bound(len(alarms), len(decided)),
        witnessed=witnessed,
        unwitnessed_upper_bound=upper_bound(len(alarms) - witnessed, len(decided) - witnessed),
        units_by_gate=dict(sorted(Counter(v.gate for v in decided).items())),
        alarm_cases=tuple(
            f"{v.case_id}: {v.finding}: {v.got}" + (" (witnessed)" if is_witnessed(v) else "") for v in alarms
        ),
        undecided_cases=tuple(f"{v.case_id}: {v.outcome} {v.finding}: {v.got}" for v in undecided),
    )


def to_text(summary: Summary) -> str:
    """For a terminal."""
    s = summary
    lines = [
        f"{s.alarms} alarms in {s.units} units of (restart, gate), {s.restarts} restarts;"
        f" in {s.witnessed} of them the stack's own log tells of the lost save or load",
        f"upper bound of the rate ({s.confidence:.0%}, one-sided): {s.upper_bound:.2%} of all alarms,"
        f" {s.unwitnessed_upper_bound:.2%} of alarms without such a witness",
        "units: " + ", ".join(f"{gate} {count}" for gate, count in s.units_by_gate.items()),
    ]
    lines += [f"ALARM {text}" for text in s.alarm_cases]
    lines += [f"undecided {text}" for text in s.undecided_cases]
    return "\n".join(lines) + "\n"


def measure(run: WorkerRun, units: int) -> None:
    """Judge units until the plan is through; a new stack for every restart."""
    current = 0
    gates = registry()
    for number, (restart, gate, case) in enumerate(plan(gates, units), start=1):
        if case.id in run.carried:
            continue
        if restart != current:
            run.close_pool()
            current = restart
        run.progress.case(number, units, case.id)
        verdict = run.judge(gate, case)
        run.progress.case_done()
        sys.stdout.write(f"{verdict.outcome:<8} {case.id} {verdict.finding}\n")
        sys.stdout.flush()


def _options(given: argparse.Namespace) -> RunOptions:
    values: dict[str, Any] = {
        "kvgates_stack": given.stack,
        "kvgates_evidence": given.evidence,
        "kvgates_resume": given.resume,
    }
    return RunOptions.parse(values.get, ROOT)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m suite.defects.false_alarms", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--units", type=int, default=100, metavar="N", help="units to judge (default: 100)")
    parser.add_argument("--stack", metavar="FILE", help="as pytest's --stack")
    parser.add_argument("--evidence", metavar="DIR", help="as pytest's --evidence")
    parser.add_argument("--resume", metavar="RUN", help="go on with a run; judged units keep their verdicts")
    given = parser.parse_args(argv)
    try:
        if given.units < 1:
            raise UsageError(f"--units {given.units}: 1 or more")
        options = _options(given)
        carried = carried_verdicts(options) if options.resumed else {}
    except (UsageError, EvidenceError) as exc:
        sys.stderr.write(f"false_alarms: {exc}\n")
        return 4
    with closing(open_progress()) as progress:
        run = WorkerRun(options, "main", StackPool, progress, carried)
        code = 2
        try:
            measure(run, given.units)
            judged = [*carried.values(), *run.evidence.history().of(r.Verdict)]
            summary = summarise(judged, [options.run_id])
            code = 10 if summary.alarms else 11 if summary.units < given.units else 0
        finally:
            run.close_pool()
            run.finish(code)
    (options.run_dir / FILE_NAME).write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=1) + b"\n")
    sys.stdout.write(to_text(summary) + f"wrote {options.run_dir / FILE_NAME}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
