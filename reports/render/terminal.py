"""The scoreboard and the failure message as plain text, for 60 columns and more, with or without colour."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable, Mapping
from typing import TextIO

from reports import records as r
from reports.redact import one_line, secrets_out
from reports.scoreboard import NotRun, Scoreboard, ScoreRow, highlights, next_command, summary_line

WIDE = 120
"""From this many columns on got and wanted stand side by side."""
NARROWEST = 60
_COLOURS = {
    r.Outcome.PASS: "32",
    r.Outcome.FAIL: "31",
    r.Outcome.INCONCLUSIVE: "33",
    r.Outcome.UNTESTABLE: "36",
    r.Outcome.HARNESS_ERROR: "35",
}
_SHORT = {r.Outcome.INCONCLUSIVE: "INCONCL", r.Outcome.UNTESTABLE: "UNTEST", r.Outcome.HARNESS_ERROR: "HARNESS"}
_OUTCOME_COLUMNS = 8
_GOT_LINES = 3
_IDS_SHOWN = 4


def wants_colour(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """Colour only on a terminal, and never where NO_COLOR is set or the terminal is dumb (no-color.org)."""
    return not environ.get("NO_COLOR") and environ.get("TERM") != "dumb" and stream.isatty()


def terminal_width() -> int:
    """Columns of the terminal (COLUMNS wins), 80 where there is none."""
    return shutil.get_terminal_size((80, 24)).columns


def render(scoreboard: Scoreboard, width: int = 80, colour: bool = False) -> str:
    """The whole scoreboard; the last line holds the counts, unwrapped. No other line is longer than ``width`` (at least 60)."""
    width = max(width, NARROWEST)
    lines: list[str] = []
    for gate in scoreboard.gates:
        flag = "UNPROVEN" if gate.unproven else ""
        lines += _heading(gate.gate, gate.claim, flag, width, colour)
        for row in scoreboard.rows_of(gate.gate):
            lines += _wide_row(row, width, colour) if width >= WIDE else _narrow_row(row, width, colour)
        lines.append("")
    lines += _not_run(scoreboard.not_run, width)
    if any(gate.unproven for gate in scoreboard.gates):
        lines += textwrap.wrap("UNPROVEN: no planted defect is known to turn this gate red.", width)
    lines.append(summary_line(scoreboard))
    return "\n".join(lines) + "\n"


def _clean(text: str) -> str:
    # Before any wrapping or cutting: half a secret on each of two lines would be seen by nobody but a reader.
    return one_line(secrets_out(text))


def _paint(text: str, code: str, colour: bool) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if colour and text else text


def _heading(gate: str, claim: str, flag: str, width: int, colour: bool) -> list[str]:
    room = width - len(gate) - 2 - (len(flag) + 2 if flag else 0)
    text = _cut(_clean(claim), room) if room > 0 else ""
    gap = " " * (room - len(text) + 2) if flag else ""
    return [f"{_paint(gate, '1', colour)}  {text}{gap}{_paint(flag, '33', colour)}".rstrip()]


def _cut(text: str, room: int) -> str:
    return text if len(text) <= room else text[: max(room - 3, 0)] + "..."[: max(room, 0)]


def _short_id(row: ScoreRow) -> str:
    """The case id without its gate's id: the heading says that already."""
    v = row.verdict
    return v.case_id.removeprefix(v.gate).removeprefix(".") or v.case_id


def _mark(row: ScoreRow) -> str:
    return {"": "", "expected": "[expected]", "unexpected": "[UNEXPECTED]"}[row.mark]


def _outcome(row: ScoreRow, colour: bool) -> str:
    outcome = row.verdict.outcome
    return _paint(_SHORT.get(outcome, str(outcome)).ljust(_OUTCOME_COLUMNS), _COLOURS[outcome], colour)


def _mark_painted(row: ScoreRow, colour: bool) -> str:
    return _paint(_mark(row), "31;1" if row.mark == "unexpected" else "2", colour)


def _details(row: ScoreRow) -> list[tuple[str, str]]:
    """What stands below a row: the reason of an expectation, or what was expected instead."""
    if row.mark == "expected" and row.verdict.outcome is not r.Outcome.PASS:
        return [("because", " ".join(part for part in (row.reason, row.link) if part))]
    if row.mark == "unexpected":
        return [("expected", row.expected or "PASS")]
    return []


def _narrow_row(row: ScoreRow, width: int, colour: bool) -> list[str]:
    v = row.verdict
    mark = _mark(row)
    room = width - 2 - _OUTCOME_COLUMNS - 1 - (len(mark) + 1 if mark else 0)
    name = _cut("  ".join(part for part in (_short_id(row), v.finding) if part), room)
    pad = " " * (room - len(name) + 1) if mark else ""
    lines = [f"  {_outcome(row, colour)} {name}{pad}{_mark_painted(row, colour)}".rstrip()]
    fields = [("got", v.got), ("wanted", v.wanted)] if v.outcome is not r.Outcome.PASS else []
    fields += _details(row)
    fields.append(("numbers", ", ".join(highlights(v.numbers))))
    for label, text in fields:
        lines += _labelled(label, text, width, indent=2 + _OUTCOME_COLUMNS + 1, lines=_GOT_LINES)
    return lines


def _labelled(label: str, text: str, width: int, indent: int, lines: int) -> list[str]:
    if not text:
        return []
    head = " " * indent + f"{label:<9}"
    return _wrapped(text, width - len(head), lines, first=head, rest=" " * len(head))


def _wrapped(text: str, room: int, lines: int, first: str = "", rest: str = "") -> list[str]:
    parts = textwrap.wrap(_clean(text), room) or [""]
    if len(parts) > lines:
        parts = [*parts[: lines - 1], _cut(parts[lines - 1] + " ...", room)]
    return [(first if i == 0 else rest) + part for i, part in enumerate(parts)]


def _wide_row(row: ScoreRow, width: int, colour: bool) -> list[str]:
    """Columns: verdict, case and finding, got, wanted, numbers, mark."""
    v = row.verdict
    gap = 2
    mark_columns = len("[UNEXPECTED]")
    room = width - 2 - _OUTCOME_COLUMNS - 1 - mark_columns - 4 * gap
    share = room * 26 // 100
    sizes = (share, share, share, room - 3 * share)
    cells = [
        _cell([_short_id(row), v.finding], sizes[0]),
        _cell([v.got], sizes[1]),
        _cell([v.wanted], sizes[2]),
        _cell(highlights(v.numbers), sizes[3]),
    ]
    lines = []
    for i in range(max(len(cell) for cell in cells)):
        body = (" " * gap).join(
            (cell[i] if i < len(cell) else "").ljust(size) for cell, size in zip(cells, sizes, strict=True)
        )
        if i == 0:
            lines.append(f"  {_outcome(row, colour)} {body}{' ' * gap}{_mark_painted(row, colour)}".rstrip())
        else:
            lines.append((" " * (2 + _OUTCOME_COLUMNS + 1) + body).rstrip())
    for label, text in _details(row):
        lines += _labelled(label, text, width, indent=2 + _OUTCOME_COLUMNS + 1, lines=_GOT_LINES)
    return lines


def _cell(parts: Iterable[str], room: int) -> list[str]:
    lines: list[str] = []
    for part in parts:
        if part:
            lines += _wrapped(part, room, _GOT_LINES)
    return lines or [""]


def _not_run(missing: Iterable[NotRun], width: int) -> list[str]:
    by_reason: dict[str, list[str]] = {}
    for item in missing:
        by_reason.setdefault(item.reason, []).append(item.case_id)
    lines: list[str] = []
    for reason, ids in by_reason.items():
        shown = ", ".join(ids[:_IDS_SHOWN]) + (f", and {len(ids) - _IDS_SHOWN} more" if len(ids) > _IDS_SHOWN else "")
        text = f"NOT RUN  {len(ids)} {'case' if len(ids) == 1 else 'cases'}: {_clean(reason)} ({shown})"
        lines += textwrap.wrap(text, width, subsequent_indent=" " * 9)
    return [*lines, ""] if lines else []


def failure_message(verdict: r.Verdict, evidence_path: str) -> str:
    """What a person reads first of a case that did not pass, always in the same order.

    Claim, got, wanted, finding code, evidence path, likely cause, what shows it in production, next command.
    """
    codes = [f"{finding.code}: {finding.message}" for finding in verdict.findings] or ["none"]
    fields = [
        ("claim", verdict.claim),
        ("got", verdict.got or "not stated"),
        ("wanted", verdict.wanted or "not stated"),
        ("finding", codes[0]),
        *(("and", code) for code in codes[1:]),
        ("evidence", evidence_path),
        ("likely cause", verdict.cause or "not known"),
        ("in production", verdict.production or "not known"),
        ("next", next_command(verdict, _run_of(evidence_path))),
    ]
    if verdict.reproduction:
        fields.insert(-1, ("reproduce", verdict.reproduction))
    head = f"{verdict.outcome} {verdict.case_id}"
    lines = [head, *(f"  {label:<14}{_clean(text)}" for label, text in fields)]
    return "\n".join(lines)


def _run_of(evidence_path: str) -> str:
    """The run folder of an evidence path (``RUN/history-main.jsonl``)."""
    head, slash, tail = evidence_path.rpartition("/")
    return head if slash and tail.endswith(".jsonl") else evidence_path or "RUN"
