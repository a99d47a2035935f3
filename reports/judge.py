"""Judges finished runs again from their evidence alone, on any machine, with this or a later version of the gates.

The only module of ``reports`` that knows gates. Nothing is written and nothing is started.

Exit codes of ``python -m reports judge``:

==  ==========================================================================================
0   every case that was judged came to its recorded verdict (whichever that was)
4   usage: no such run or case, evidence that cannot be read
10  a case is judged FAIL that was recorded otherwise, or FAIL with another finding
12  a case is judged HARNESS_ERROR that was recorded otherwise, or was cut short and cannot be judged, or its records are gone
13  nothing could be judged
14  verdicts differ in another way, or a gate that recorded verdicts is unknown to this version
==  ==========================================================================================

The lowest of 10, 12 and 14 that applies is given. A case without a recorded verdict (its run was killed before) counts
as recorded otherwise when it is judged FAIL or HARNESS_ERROR. A gate that was revised since and comes to the same
verdict is listed, and is no difference.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from reports import records as r
from reports.evidence import LoadedRun
from reports.runinfo import RunInfo
from reports.scoreboard import Scoreboard, build
from suite.contract import Gate, safe_judge

EXIT_SAME = 0
EXIT_FAIL = 10
EXIT_HARNESS = 12
EXIT_NOTHING = 13
EXIT_DIFFERENT = 14


@dataclass(frozen=True)
class Rejudged:
    """One case: the verdict recorded in the run (None: none was), and the verdict given now."""

    history: str
    recorded: r.Verdict | None
    now: r.Verdict

    @property
    def differs(self) -> bool:
        """Outcome or primary finding are not as recorded."""
        return self.recorded is None or (self.recorded.outcome, self.recorded.finding) != (
            self.now.outcome,
            self.now.finding,
        )

    @property
    def revised(self) -> bool:
        """The same verdict, given by another version of the gate."""
        return not self.differs and self.recorded is not None and self.recorded.gate_version != self.now.gate_version

    def __str__(self) -> str:
        before = _words(self.recorded) if self.recorded else "no verdict"
        return f"{self.now.case_id}: recorded {before}, judged {_words(self.now)}"


@dataclass(frozen=True)
class Judgement:
    """A whole run judged again.

    unknown_gates: gate id -> cases, which this version cannot judge. carried: verdicts of cases that recorded no
    evidence (untestable here, or the stack did not start): they cannot be given again and are shown as recorded.
    """

    cases: tuple[Rejudged, ...]
    unknown_gates: Mapping[str, tuple[str, ...]]
    carried: tuple[r.Verdict, ...]

    @property
    def differing(self) -> tuple[Rejudged, ...]:
        """Cases whose outcome or primary finding is not as recorded."""
        return tuple(case for case in self.cases if case.differs)

    @property
    def exit_code(self) -> int:
        """See the module's docstring."""
        if not self.cases:
            return EXIT_NOTHING
        outcomes = {case.now.outcome for case in self.differing}
        if r.Outcome.FAIL in outcomes:
            return EXIT_FAIL
        if r.Outcome.HARNESS_ERROR in outcomes:
            return EXIT_HARNESS
        if self.unknown_gates or any(case.recorded for case in self.differing):
            return EXIT_DIFFERENT
        return EXIT_SAME

    def scoreboard(self, gates: Mapping[str, Gate], run: RunInfo | None = None) -> Scoreboard:
        """The verdicts given now (and those carried) as a scoreboard."""
        unknown = [
            (c, f"gate {g} is unknown to this version") for g, cases in self.unknown_gates.items() for c in cases
        ]
        return build(
            [*(case.now for case in self.cases), *self.carried],
            not_run=unknown,
            proofs=proofs(gates),
            evidence={case.now.case_id: f"{case.history}.jsonl" for case in self.cases},
            run=run,
        )


def _words(verdict: r.Verdict) -> str:
    name = f"{verdict.outcome} {verdict.finding}".strip()
    return f"{name} (version {verdict.gate_version} of the gate)"


def known_gates() -> dict[str, Gate]:
    """Every gate of this version by id."""
    # Imported when asked for: only then does judging pay for loading the whole suite.
    from suite.bench.registry import registry as benchmarks
    from suite.defects import planted_elsewhere
    from suite.gates import registry

    return {**registry(), **benchmarks(), **planted_elsewhere.registry()}


def proofs(gates: Mapping[str, Gate]) -> dict[str, tuple[str, ...]]:
    """Gate id -> planted defects that turn it red."""
    return {gate.id: tuple(gate.proof) for gate in gates.values()}


def judge_run(run: LoadedRun, gates: Mapping[str, Gate], only: str | None = None) -> Judgement:
    """Judge every case of a run (or one) again; of a case that several sessions of the run asked, the newest counts.

    KeyError when ``only`` names no case of the run.
    """
    cases: dict[str, Rejudged] = {}
    unknown: dict[str, list[str]] = {}
    carried: dict[str, r.Verdict] = {}
    for name, history in run.histories.items():
        started = {c.case_id: c.gate for c in history.of(r.CaseStarted)}
        recorded = recorded_verdicts(history)
        for case_id, gate_id in started.items():
            if only not in (None, case_id):
                continue
            before, view = recorded.get(case_id), history.for_case(case_id)
            gate = gates.get(gate_id)
            if gate is None:
                unknown.setdefault(gate_id, []).append(case_id)
            elif before is not None and before.outcome is r.Outcome.UNTESTABLE and not view.complete:
                carried[case_id] = before  # its collection found out what the host lacks, and ended there
                cases.pop(case_id, None)
            else:
                cases[case_id] = Rejudged(history=name, recorded=before, now=safe_judge(gate, view))
                carried.pop(case_id, None)
        for case_id, verdict in recorded.items():
            if case_id in started or only not in (None, case_id):
                continue
            cases.pop(case_id, None)
            carried.pop(case_id, None)
            if verdict.outcome in JUDGED_FROM_EVIDENCE:
                cases[case_id] = Rejudged(history=name, recorded=verdict, now=_evidence_lost(verdict))
            else:
                carried[case_id] = verdict
    if only is not None and not (cases or unknown or carried):
        raise KeyError(only)
    return Judgement(
        cases=tuple(cases.values()),
        unknown_gates={gate: tuple(ids) for gate, ids in unknown.items()},
        carried=tuple(carried.values()),
    )


JUDGED_FROM_EVIDENCE = frozenset({r.Outcome.PASS, r.Outcome.FAIL, r.Outcome.INCONCLUSIVE})
"""Outcomes that no case comes to without records of its own; the suite writes those before the verdict."""


def _evidence_lost(verdict: r.Verdict) -> r.Verdict:
    """In place of a verdict whose records are not there: nobody can say that it holds."""
    text = f"recorded as {verdict.outcome}, and the evidence holds no record of this case: part of the file is missing"
    lost = r.Finding(code=r.FindingCode.INCOMPLETE_CASE, message=text)
    return msgspec.structs.replace(
        verdict, outcome=r.Outcome.HARNESS_ERROR, findings=(lost,), got=text, wanted="the whole history of the run"
    )


def recorded_verdicts(history: Iterable[r.Record]) -> dict[str, r.Verdict]:
    """The last verdict of each case; a case that was started again and then cut short has none."""
    found: dict[str, r.Verdict] = {}
    for record in history:
        if isinstance(record, r.CaseStarted):
            found.pop(record.case_id, None)
        elif isinstance(record, r.Verdict):
            found[record.case_id] = record
    return found


def report_lines(judgement: Judgement) -> list[str]:
    """What to say below the scoreboard: differences first, then what could not be judged."""
    lines = [f"DIFFERS  {case}" for case in judgement.differing]
    lines += [f"revised  {case}" for case in judgement.cases if case.revised]
    for gate, ids in judgement.unknown_gates.items():
        lines.append(f"unknown gate {gate}: not judged: {', '.join(ids)}")
    lines += [f"carried  {v.case_id}: {v.outcome} as recorded; it left no evidence to judge" for v in judgement.carried]
    same = len(judgement.cases) - len(judgement.differing)
    lines.append(f"{len(judgement.cases)} judged again: {same} as recorded, {len(judgement.differing)} different")
    return lines
