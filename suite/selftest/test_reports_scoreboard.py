"""The scoreboard and its terminal form: marks, counts, widths, colour, the order of the failure message."""

from __future__ import annotations

import io
import re

import pytest

from reports import records as r
from reports.render import terminal
from reports.scoreboard import Accepted, ExpectedResult, build, highlights, mark_of, summary_line
from suite.selftest.report_samples import Code, Out, board, expectation, verdict, verdicts

pytestmark = pytest.mark.selftest

SUMMARY = (
    "1 PASS, 2 FAIL (1 expected, 1 unexpected), 1 INCONCLUSIVE (1 unexpected), 1 UNTESTABLE,"
    " 1 HARNESS_ERROR (1 unexpected), 9 NOT RUN; 3 gates UNPROVEN"
)


def test_the_last_line_counts_everything() -> None:
    assert terminal.render(board()).splitlines()[-1] == SUMMARY


def test_without_expectations_nothing_is_marked() -> None:
    found = board(expected=None)
    assert {row.mark for row in found.rows} == {""}
    assert "expected" not in summary_line(found)


def test_an_empty_run_says_so() -> None:
    assert terminal.render(build([])).splitlines()[-1] == "nothing was judged"


@pytest.mark.parametrize(
    ("judged", "listed", "mark"),
    [
        (verdict("a.b", Out.PASS), None, ""),
        (verdict("a.b", Out.FAIL, Code.HANG), None, "unexpected"),
        (verdict("a.b", Out.UNTESTABLE, Code.MISSING_CAPABILITY), expectation(Out.FAIL, "hang"), ""),
        (verdict("a.b", Out.FAIL, Code.HANG), expectation(Out.FAIL, "hang"), "expected"),
        (verdict("a.b", Out.FAIL, Code.HANG, Code.UNBOUNDED_LOOKUPS), expectation(Out.FAIL, "hang"), "expected"),
        (verdict("a.b", Out.FAIL, Code.HANG, Code.KV_LEAK), expectation(Out.FAIL, "hang"), "unexpected"),
        (verdict("a.b", Out.FAIL, Code.KV_LEAK, Code.HANG), expectation(Out.FAIL, "hang"), "unexpected"),
        (verdict("a.b", Out.PASS), expectation(Out.FAIL, "hang"), "unexpected"),
        (
            verdict("a.b", Out.HARNESS_ERROR, Code.NO_PRESSURE),
            expectation(Out.HARNESS_ERROR, "no-pressure"),
            "unexpected",
        ),
    ],
)
def test_marks(judged: r.Verdict, listed: ExpectedResult | None, mark: str) -> None:
    assert mark_of(judged, {"a.b": listed} if listed else {}) == mark


def test_one_of_accepts_each_of_its_verdicts_and_no_other() -> None:
    either = ExpectedResult(accepted=(Accepted(outcome=Out.PASS), Accepted(outcome=Out.FAIL, finding="hang")))
    assert either.met_by(verdict("a.b", Out.PASS))
    assert either.met_by(verdict("a.b", Out.FAIL, Code.HANG))
    assert not either.met_by(verdict("a.b", Out.FAIL, Code.KV_LEAK))


def test_an_unexpected_pass_is_as_loud_as_an_unexpected_fail() -> None:
    found = build([verdict("a.b", Out.PASS)], expected={"a.b": expectation(Out.FAIL, "hang")})
    text = terminal.render(found)
    assert "[UNEXPECTED]" in text
    assert "expected FAIL hang" in text
    assert text.splitlines()[-1].startswith("1 PASS (1 unexpected)")


@pytest.mark.parametrize("width", [60, 80, 100, 119, 120, 160, 220])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    *lines, last = terminal.render(board(), width=width).splitlines()
    assert max(len(line) for line in lines) <= width
    assert last == SUMMARY


@pytest.mark.parametrize("width", [80, 160])
def test_every_case_its_verdict_and_its_finding_are_shown(width: int) -> None:
    text = terminal.render(board(), width=width)
    for v in verdicts():
        name = v.case_id.removeprefix(v.gate + ".")
        assert re.search(rf"^  {terminal._SHORT.get(v.outcome, v.outcome)} +{re.escape(name)}\b", text, re.MULTILINE)
        assert v.finding in text
    assert "0 external tokens" in text
    assert "ttft.cold 0.213 s" in text
    assert "upstream's default https://example.org/1" in " ".join(text.split())
    assert "9 cases: not in the core: --scope full (P.size.0, P.size.1, P.size.2, P.size.3, and 5 more)" in " ".join(
        text.split()
    )


def test_a_gate_without_proof_is_unproven_and_one_with_proof_is_not() -> None:
    lines = terminal.render(board()).splitlines()
    assert next(line for line in lines if line.startswith("P.boundary")).endswith("UNPROVEN")
    assert "UNPROVEN" not in next(line for line in lines if line.startswith("H.parity"))


def test_colour_changes_nothing_but_colour() -> None:
    plain, painted = terminal.render(board(), 160), terminal.render(board(), 160, colour=True)
    assert "\x1b[31m" in painted
    assert re.sub(r"\x1b\[[\d;]*m", "", painted) == plain


def test_colour_only_on_a_terminal_that_did_not_say_no() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    assert terminal.wants_colour(Terminal(), {})
    assert not terminal.wants_colour(Terminal(), {"NO_COLOR": "1"})
    assert not terminal.wants_colour(Terminal(), {"TERM": "dumb"})
    assert not terminal.wants_colour(io.StringIO(), {})


def test_evidence_cannot_move_the_cursor() -> None:
    wild = verdict("a.b", Out.FAIL, Code.HANG, got="a\x1b[2J\rb\nc")
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", terminal.render(build([wild])) + terminal.failure_message(wild, "x"))


def test_the_failure_message_keeps_its_order() -> None:
    text = terminal.failure_message(verdicts()[0], "out/run-1/history-main.jsonl")
    labels = ["claim", "got", "wanted", "finding", "and", "evidence", "likely cause", "in production", "next"]
    assert [line[2:16].strip() for line in text.splitlines()[1:]] == labels
    assert text.startswith("FAIL D.owner-killed.default\n  claim         after the owner")


def test_without_advice_the_next_command_judges_the_case_again() -> None:
    text = terminal.failure_message(verdict("a.b", Out.FAIL, Code.HANG), "out/run-1/history-main.jsonl")
    assert text.splitlines()[-1].split() == ["next", "python", "-m", "reports", "judge", "out/run-1", "--case", "a.b"]


def test_highlights_put_ttft_first_and_name_units() -> None:
    numbers = {"external_tokens": 1984, "flag": True, "list": [1], "x": {"ttft_cold_s": 0.2131}}
    assert highlights(numbers) == ["x.ttft cold 0.213 s", "external 1984 tokens"]


def test_a_case_judged_twice_counts_once_with_its_last_verdict() -> None:
    found = build(
        [verdict("a.b", Out.FAIL, Code.HANG), verdict("a.b", Out.PASS)], not_run=[("a.b", "no"), ("a.c", "no")]
    )
    assert [row.verdict.outcome for row in found.rows] == [Out.PASS]
    assert [item.case_id for item in found.not_run] == ["a.c"]
