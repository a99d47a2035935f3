"""Which settings close which hole."""

from __future__ import annotations

import pytest

from reports import records as r
from reports.closures import holes
from reports.render import markdown
from reports.scoreboard import build

pytestmark = pytest.mark.selftest

Out = r.Outcome


def verdict(case_id: str, outcome: r.Outcome, *codes: r.FindingCode) -> r.Verdict:
    found = tuple(r.Finding(code=code, message="m") for code in codes)
    return r.Verdict(case_id=case_id, gate=case_id.rpartition(".")[0], outcome=outcome, claim="c", findings=found)


def rows(*verdicts: r.Verdict) -> list[tuple[str, ...]]:
    return [hole.row() for hole in holes(verdicts)]


WRONG = verdict("I.engine.weights.default", Out.FAIL, r.FindingCode.WRONG_ANSWER)
PREFIX = verdict("I.engine.weights.prefix", Out.PASS)
TENANT = verdict("I.engine.weights.tenant", Out.FAIL, r.FindingCode.WRONG_ANSWER)


def test_a_hole_with_what_closes_it_and_what_does_not() -> None:
    assert rows(WRONG, PREFIX, TENANT) == [
        ("`I.engine.weights`", "FAIL `wrong-answer`", "`prefix`", "`tenant` (FAIL `wrong-answer`)")
    ]
    assert rows(WRONG) == [("`I.engine.weights`", "FAIL `wrong-answer`", "nothing that ran", "")]


def test_what_passes_with_the_defaults_is_no_hole() -> None:
    assert rows(verdict("I.engine.dtype.default", Out.PASS), verdict("I.engine.dtype.prefix", Out.PASS)) == []
    assert rows(PREFIX, TENANT) == []


def test_what_decided_nothing_closes_nothing_and_hides_nothing() -> None:
    open_ = verdict("I.engine.weights.prefix", Out.INCONCLUSIVE, r.FindingCode.ORACLE_BLIND)
    assert rows(WRONG, open_)[0][2:] == ("nothing that ran", "")
    assert rows(WRONG, PREFIX, open_)[0][2] == "`prefix`"
    assert rows(WRONG, open_, PREFIX)[0][2] == "`prefix`"
    late = verdict("I.engine.weights.default", Out.HARNESS_ERROR, r.FindingCode.HARNESS_EXCEPTION)
    assert rows(WRONG, late, PREFIX)[0][1] == "FAIL `wrong-answer`"
    newer = verdict("I.engine.weights.default", Out.PASS)
    assert rows(WRONG, newer, PREFIX) == []


def test_a_runs_report_has_the_table_where_other_settings_were_tried() -> None:
    heading = "## Which settings close which hole"
    assert heading not in markdown.render(build([WRONG]))
    text = markdown.render(build([WRONG, PREFIX]))
    assert heading in text
    assert "| `I.engine.weights` | FAIL `wrong-answer` | `prefix` |" in text.replace("\\", "")
