"""Properties for JUnit XML (``record_property``), so that a CI system can show and filter verdicts."""

from __future__ import annotations

from reports.redact import Redactor, one_line
from reports.scoreboard import ScoreRow, highlights


def properties(row: ScoreRow, redactor: Redactor | None = None) -> list[tuple[str, str]]:
    """Name and value pairs of one case; empty values are left out."""
    redactor = redactor or Redactor()
    v = row.verdict
    pairs = [
        ("kvgates.case", v.case_id),
        ("kvgates.gate", v.gate),
        ("kvgates.gate_version", str(v.gate_version)),
        ("kvgates.verdict", str(v.outcome)),
        ("kvgates.finding", v.finding),
        ("kvgates.mark", row.mark),
        ("kvgates.expected", row.expected),
        ("kvgates.got", v.got),
        ("kvgates.wanted", v.wanted),
        ("kvgates.numbers", ", ".join(highlights(v.numbers))),
        ("kvgates.evidence", row.evidence),
        ("kvgates.reproduction", v.reproduction),
    ]
    return [(name, one_line(redactor.text(value))) for name, value in pairs if value]
