"""The scoreboard: one row a case, as every renderer shows it.

Built from verdicts alone, with what was expected of them, what was not run, and which gates have a proof that they can
go red. Imports evidence types only: gates come in as data.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from reports import records as r
from reports.runinfo import RunInfo

SCHEMA = "kvgates.verdicts"
SCHEMA_VERSION = 1
"""Version of ``verdicts.json``. Raised when a field changes its meaning; new fields do not raise it."""

Mark = Literal["", "expected", "unexpected"]


class Accepted(r.Part, frozen=True, kw_only=True):
    """One verdict that is as wanted: an outcome and its primary finding (``""``: none)."""

    outcome: r.Outcome
    finding: str = ""

    def __str__(self) -> str:
        return f"{self.outcome} {self.finding}".strip()


NEVER_BESIDE = (
    r.FindingCode.WRONG_ANSWER,
    r.FindingCode.FOREIGN_REUSE,
    r.FindingCode.UNDETECTED_CORRUPTION,
    r.FindingCode.EXTRA_HITS,
    r.FindingCode.ENGINE_DIED,
    r.FindingCode.NEVER_READY,
    r.FindingCode.HITS_NOT_BACK,
    r.FindingCode.KV_LEAK,
    r.FindingCode.ADMISSION_REFUSED,
    r.FindingCode.RESOURCE_GROWTH,
)
"""Findings that are a failure of their own wherever they are found: no other one brings them about as its by-product, as slow
requests do with lookups and lines in logs. The verdicts of a case name its first finding; these must not hide behind it."""


class ExpectedResult(r.Part, frozen=True, kw_only=True):
    """What an expectations file says of one case. ``accepted`` has one entry, or more where the file says ``one_of``.

    also: findings of ``NEVER_BESIDE`` that are known to come with it.
    """

    accepted: tuple[Accepted, ...]
    also: tuple[str, ...] = ()
    reason: str = ""
    link: str = ""

    def met_by(self, verdict: r.Verdict) -> bool:
        """Outcome *and* primary finding are as expected, and no other failure hides behind it. A harness error never is expected."""
        if verdict.outcome is r.Outcome.HARNESS_ERROR:
            return False
        named = any(a.outcome is verdict.outcome and a.finding == verdict.finding for a in self.accepted)
        return named and not self.beside(verdict)

    def beside(self, verdict: r.Verdict) -> list[str]:
        """Codes of ``NEVER_BESIDE`` that the verdict has and the file does not name."""
        known = {*self.also, *(a.finding for a in self.accepted)}
        if verdict.finding == r.FindingCode.WRONG_ANSWER:
            known.add(r.FindingCode.FOREIGN_REUSE)  # the same of another pair, whose answer came out right by luck
        found = {f.code for f in verdict.findings}
        return [str(code) for code in NEVER_BESIDE if code in found and code not in known]

    def __str__(self) -> str:
        return " or ".join(str(a) for a in self.accepted)


class ScoreRow(r.Part, frozen=True, kw_only=True):
    """One case. ``mark`` is "" where nothing was expected of it, or where an unlisted case passed."""

    verdict: r.Verdict
    mark: Mark = ""
    expected: str = ""
    """The expectation in words (``FAIL slow-degrade``); "" when the case is not listed."""
    reason: str = ""
    link: str = ""
    evidence: str = ""
    """History file that holds the case, relative to the run."""


class NotRun(r.Part, frozen=True, kw_only=True):
    """A case that exists and was not run, and why."""

    case_id: str
    reason: str


class GateRow(r.Part, frozen=True, kw_only=True):
    """One gate. Without planted defects that turn it red (``proof``) its PASS is UNPROVEN."""

    gate: str
    claim: str
    version: int
    proof: tuple[str, ...] = ()

    @property
    def unproven(self) -> bool:
        """No planted defect is known to turn this gate red."""
        return not self.proof


class Scoreboard(r.Part, frozen=True, kw_only=True):
    """Everything that a renderer shows of a run."""

    schema: str = SCHEMA
    version: int = SCHEMA_VERSION
    expectations: bool = False
    """Whether verdicts were compared with expectations at all."""
    counts: dict[str, int] = {}
    """Cases by outcome, and ``NOT RUN``, ``expected``, ``unexpected``, ``unproven gates``."""
    run: RunInfo = RunInfo()
    gates: tuple[GateRow, ...] = ()
    rows: tuple[ScoreRow, ...] = ()
    not_run: tuple[NotRun, ...] = ()

    def rows_of(self, gate: str) -> list[ScoreRow]:
        """Rows of one gate, in order."""
        return [row for row in self.rows if row.verdict.gate == gate]

    @property
    def failures(self) -> list[ScoreRow]:
        """Rows that need a person: FAIL, INCONCLUSIVE and HARNESS_ERROR (also expected ones), and an unexpected PASS."""
        fine = (r.Outcome.PASS, r.Outcome.UNTESTABLE)
        return [row for row in self.rows if row.verdict.outcome not in fine or row.mark == "unexpected"]


def build(
    verdicts: Iterable[r.Verdict],
    *,
    expected: Mapping[str, ExpectedResult] | None = None,
    not_run: Sequence[tuple[str, str]] = (),
    proofs: Mapping[str, tuple[str, ...]] | None = None,
    evidence: Mapping[str, str] | None = None,
    run: RunInfo | None = None,
) -> Scoreboard:
    """Make the scoreboard.

    expected: case id -> expectation; None when the run was given none (then nothing is marked).
    not_run: (case id, reason). proofs: gate id -> planted defects; a gate that is missing here is UNPROVEN.
    evidence: case id -> history file relative to the run. A case judged more than once counts with its last verdict.
    """
    last = {verdict.case_id: verdict for verdict in verdicts}
    proofs, evidence = proofs or {}, evidence or {}
    rows = tuple(_row(verdict, expected, evidence) for verdict in sorted(last.values(), key=_family_order))
    gates: dict[str, GateRow] = {}
    for row in rows:
        v = row.verdict
        gates.setdefault(
            v.gate, GateRow(gate=v.gate, claim=v.claim, version=v.gate_version, proof=tuple(proofs.get(v.gate, ())))
        )
    missing = tuple(NotRun(case_id=case, reason=reason) for case, reason in not_run if case not in last)
    return Scoreboard(
        expectations=expected is not None,
        counts=_counts(rows, missing, gates.values()),
        run=run or RunInfo(),
        gates=tuple(gates.values()),
        rows=rows,
        not_run=missing,
    )


_FAMILIES = "HPIDOTB"
"""Families in the order in which a reader needs them: do engines share, is it right, does it survive, is it worth it."""


def _family_order(verdict: r.Verdict) -> tuple[int, str]:
    # Cases of one gate keep the order in which they ran: the sort is stable.
    place = _FAMILIES.find(verdict.gate[:1])
    return (place if place >= 0 else len(_FAMILIES), verdict.gate)


def _row(verdict: r.Verdict, expected: Mapping[str, ExpectedResult] | None, evidence: Mapping[str, str]) -> ScoreRow:
    entry = (expected or {}).get(verdict.case_id)
    return ScoreRow(
        verdict=verdict,
        mark=mark_of(verdict, expected),
        expected=str(entry) if entry else "",
        reason=entry.reason if entry else "",
        link=entry.link if entry else "",
        evidence=evidence.get(verdict.case_id, ""),
    )


def mark_of(verdict: r.Verdict, expected: Mapping[str, ExpectedResult] | None) -> Mark:
    """Is this verdict as wanted?

    A listed case must meet its entry (UNTESTABLE says nothing of the stack and is left unmarked); an unlisted one is
    wanted to PASS. An unexpected PASS is as loud as an unexpected FAIL.
    """
    if expected is None:
        return ""
    entry = expected.get(verdict.case_id)
    if entry is not None and entry.met_by(verdict):
        return "expected"
    if verdict.outcome is r.Outcome.UNTESTABLE or (entry is None and verdict.outcome is r.Outcome.PASS):
        return ""
    return "unexpected"


def _counts(rows: Sequence[ScoreRow], missing: Sequence[NotRun], gates: Iterable[GateRow]) -> dict[str, int]:
    by_outcome = Counter(row.verdict.outcome for row in rows)
    counts = {str(outcome): by_outcome[outcome] for outcome in r.Outcome}
    counts["NOT RUN"] = len(missing)
    counts["expected"] = sum(row.mark == "expected" for row in rows)
    counts["unexpected"] = sum(row.mark == "unexpected" for row in rows)
    counts["unproven gates"] = sum(gate.unproven for gate in gates)
    return counts


def summary_line(board: Scoreboard) -> str:
    """The last line: ``8 PASS, 3 FAIL (3 expected), 2 NOT RUN; 1 gate UNPROVEN``."""
    parts = []
    for outcome in r.Outcome:
        rows = [row for row in board.rows if row.verdict.outcome is outcome]
        if not rows:
            continue
        marks = Counter(row.mark for row in rows)
        detail = ", ".join(f"{marks[mark]} {mark}" for mark in ("expected", "unexpected") if marks[mark])
        if outcome is r.Outcome.PASS and not marks["unexpected"]:
            detail = ""  # a PASS that was wanted needs no remark
        parts.append(f"{len(rows)} {outcome}" + (f" ({detail})" if detail else ""))
    if board.not_run:
        parts.append(f"{len(board.not_run)} NOT RUN")
    line = ", ".join(parts) or "nothing was judged"
    unproven = board.counts.get("unproven gates", 0)
    if unproven:
        line += f"; {unproven} {'gate' if unproven == 1 else 'gates'} UNPROVEN"
    return line


def next_command(verdict: r.Verdict, run: str = "RUN") -> str:
    """What to type next: the gate's own advice, or the command that judges the case again."""
    return verdict.next_command or f"python -m reports judge {run} --case {verdict.case_id}"


_UNITS = {"_s": " s", "_ms": " ms", "_us": " us", "_bytes": " bytes", "_tokens": " tokens", "_nat": " nat"}


def highlights(numbers: Mapping[str, Any], limit: int = 3) -> list[str]:
    """The few scalar numbers worth a place in a table, TTFT first: ``ttft cold 0.213 s``. Nested names are dotted."""
    flat = list(_flatten(numbers))
    flat.sort(key=lambda item: "ttft" not in item[0].lower())
    return [_number(name, value) for name, value in flat[:limit]]


def _flatten(numbers: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, float]]:
    for name, value in numbers.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}{name}", value


def _number(name: str, value: float) -> str:
    unit = ""
    for suffix, text in _UNITS.items():
        if name.endswith(suffix):
            name, unit = name.removesuffix(suffix), text
            break
    shown = str(value) if isinstance(value, int) else f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    return f"{name.replace('_', ' ')} {shown}{unit}"


def decode(data: bytes | str) -> Scoreboard:
    """Read ``verdicts.json`` back. Raises ValueError with one line when it is another or a newer format."""
    try:
        head = msgspec.json.decode(data, type=_Head)
    except msgspec.MsgspecError as exc:
        raise ValueError(f"not a {SCHEMA} file: {exc}") from exc
    if head.schema != SCHEMA:
        raise ValueError(f"not a {SCHEMA} file (schema {head.schema!r})")
    if head.version > SCHEMA_VERSION:
        raise ValueError(
            f"{SCHEMA} version {head.version} is newer than this version reads ({SCHEMA_VERSION}); use a newer kvgates"
        )
    try:
        return msgspec.json.decode(data, type=Scoreboard)
    except msgspec.MsgspecError as exc:
        raise ValueError(f"not a {SCHEMA} file of version {SCHEMA_VERSION} or older: {exc}") from exc


class _Head(msgspec.Struct):
    schema: str = ""
    version: int = 0
