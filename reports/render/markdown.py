"""``report.md``: a whole run in one Markdown text, fit to be pasted into an upstream bug tracker.

It names no machine, no private path and no secret; paths inside the run are relative to the run's folder.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from reports import closures
from reports import records as r
from reports.redact import Redactor, argv_without_secrets, one_line
from reports.render import envelope
from reports.scoreboard import Scoreboard, ScoreRow, highlights, next_command, summary_line

FILE_NAME = "report.md"
EVIDENCE_CHARACTERS = 2000
"""Longest evidence of one finding that is printed; the whole of it is in ``verdicts.json``."""


def render(scoreboard: Scoreboard, redactor: Redactor | None = None) -> str:
    """The report."""
    board = (redactor or Redactor()).data(scoreboard)
    sections = [
        _head(board),
        _stack(board),
        _deviations(board),
        _table(board),
        _closures(board),
        _faults(board),
        _failures(board),
        _not_run(board),
        _how(board),
    ]
    return "\n".join(section for section in sections if section).rstrip() + "\n"


def _head(board: Scoreboard) -> str:
    run = board.run
    when = datetime.fromtimestamp(run.wall_s, UTC).strftime("%Y-%m-%d %H:%M UTC") if run.wall_s else "unknown"
    facts = [("Run", run.run_id), ("Begun", when), ("kvgates", run.suite_version), ("Requests", str(run.requests))]
    lines = ["# kvgates report", "", f"**{summary_line(board)}**", ""]
    lines += [f"- {name}: {inline(value)}" for name, value in facts if value]
    if not run.complete:
        lines.append("- This run was cut short; the verdicts below go as far as it went.")
    if run.host:
        lines.append("- Host: " + ", ".join(f"{k} {inline(str(v))}" for k, v in run.host.items() if v))
    return "\n".join([*lines, ""])


def _stack(board: Scoreboard) -> str:
    if not board.run.stacks:
        return ""
    lines = ["## Stack", ""]
    versions = board.run.versions
    if versions:
        lines += ["Versions: " + ", ".join(f"{name} {version}" for name, version in versions.items()), ""]
    rows = []
    for stack in board.run.stacks:
        for engine in stack.engines:
            rows.append(
                [
                    f"{stack.name} ({stack.stack_id})",
                    " ".join(part for part in (stack.runtime, stack.platform, stack.transport) if part),
                    engine.name,
                    engine.connector,
                    engine.model,
                    str(engine.block_tokens),
                    engine.load_failure_policy,
                    engine.hash_seed if engine.hash_seed is not None else "unset",
                ]
            )
    heads = ["stack", "runtime", "engine", "connector", "model", "block tokens", "load-failure policy", "hash seed"]
    return "\n".join([*lines, *table(heads, rows), ""])


def _deviations(board: Scoreboard) -> str:
    found = board.run.deviations
    if not found:
        return ""
    rows = [[d.where, d.setting, d.upstream, d.ours, d.reason] for d in found]
    return "\n".join(
        [
            "## Deviations from upstream defaults",
            "",
            *table(["where", "setting", "upstream", "here", "reason"], rows),
            "",
        ]
    )


def _table(board: Scoreboard) -> str:
    rows = []
    for gate in board.gates:
        for row in board.rows_of(gate.gate):
            v = row.verdict
            name = gate.gate + (" (UNPROVEN)" if gate.unproven else "")
            verdict = f"{v.outcome} ({row.mark})" if row.mark and v.outcome is not r.Outcome.PASS else str(v.outcome)
            if v.outcome is r.Outcome.PASS and row.mark == "unexpected":
                verdict = "PASS (unexpected)"
            rows.append([name, v.case_id, verdict, v.finding, v.got, v.wanted, ", ".join(highlights(v.numbers))])
    heads = ["gate", "case", "verdict", "finding", "got", "wanted", "numbers"]
    lines = ["## Scoreboard", "", *table(heads, rows), ""]
    if board.counts.get("unproven gates"):
        lines += ["UNPROVEN: no planted defect is known to turn this gate red.", ""]
    return "\n".join(lines)


def _closures(board: Scoreboard) -> str:
    """Worth a table where at least one hole was tried with other settings."""
    rows = [[*hole.row()] for hole in closures.holes(row.verdict for row in board.rows) if hole.others]
    if not rows:
        return ""
    return "\n".join(["## Which settings close which hole", "", *table([*closures.HEADS], rows), ""])


def _faults(board: Scoreboard) -> str:
    rows = envelope.rows(board)
    if not rows:
        return ""
    lines = ["## What faults cost", "", *table(envelope.HEADS, rows), ""]
    return "\n".join(
        [*lines, "Token-seconds: prompt tokens x seconds that the first token came later than without a fault.", ""]
    )


def _failures(board: Scoreboard) -> str:
    lines = ["## Failures", ""] if board.failures else []
    for row in board.failures:
        lines += failure(row)
    return "\n".join(lines)


def failure(row: ScoreRow) -> list[str]:
    """One case that did not pass, in full, in the order of the failure message. Lines of Markdown."""
    v = row.verdict
    lines = [f"### {v.outcome} {v.case_id}", ""]
    if row.mark == "expected":
        lines += [f"Known: {inline(row.reason)} {row.link}".rstrip(), ""]
    elif row.mark == "unexpected":
        lines += [f"Unexpected: wanted was {row.expected or 'PASS'}.", ""]
    fields = [("Claim", v.claim), ("Got", v.got), ("Wanted", v.wanted)]
    lines += [f"- **{name}:** {inline(value) or 'not stated'}" for name, value in fields]
    for finding in v.findings:
        lines.append(f"- **Finding:** `{finding.code}`: {inline(finding.message)}")
        if finding.evidence:
            lines += fenced(_shortened(finding.evidence), "json", indent="  ")
    fields = [
        ("Evidence", row.evidence),
        ("Likely cause", v.cause or "not known"),
        ("In production", v.production or "not known"),
        ("Reproduction without kvgates", v.reproduction),
        ("Next", next_command(v)),
    ]
    lines += [f"- **{name}:** {inline(value)}" for name, value in fields if value]
    if v.numbers:
        lines += ["- **Numbers:**", *fenced(_shortened(v.numbers), "json", indent="  ")]
    lines += [f"- {inline(note)}" for note in v.notes]
    return [*lines, ""]


def _not_run(board: Scoreboard) -> str:
    if not board.not_run:
        return ""
    reasons: dict[str, list[str]] = {}
    for item in board.not_run:
        reasons.setdefault(item.reason, []).append(item.case_id)
    lines = ["## Not run", ""]
    lines += [f"- {inline(reason)}: {', '.join(f'`{i}`' for i in ids)}" for reason, ids in reasons.items()]
    return "\n".join([*lines, ""])


def _how(board: Scoreboard) -> str:
    command = shlex.join(argv_without_secrets(board.run.command)) or "pytest -m gates"
    reproductions = [row.verdict.reproduction for row in board.rows if row.verdict.reproduction]
    lines = ["## How to reproduce", "", "The run:", "", *fenced(command, "sh"), ""]
    lines += ["Judging its evidence again, on any machine:", "", *fenced("python -m reports judge RUN", "sh"), ""]
    if reproductions:
        lines += ["Without kvgates, with vLLM and Mooncake alone (files inside the run):", ""]
        lines += [f"- `{path}/run.sh`" for path in reproductions]
    return "\n".join([*lines, ""])


def inline(text: str) -> str:
    """Text that cannot start markup, a mention or an issue link by accident. Collapsed to one line."""
    text = one_line(text)
    text = re.sub(r"([\\`*_{}\[\]<>|])", r"\\\1", text)
    return re.sub(r"([@#])(?=\w)", "\\1\u200b", text)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table."""
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return lines + ["| " + " | ".join(inline(cell) for cell in row) + " |" for row in rows]


def fenced(text: str, language: str = "", indent: str = "") -> list[str]:
    """A code block whose fence is longer than any inside the text."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return [indent + line for line in (fence + language, *text.splitlines(), fence)]


def _shortened(value: Any) -> str:
    data = msgspec.json.encode(value)
    text = msgspec.json.format(data, indent=1).decode() if len(data) > 100 else data.decode()
    if len(text) > EVIDENCE_CHARACTERS:
        text = text[:EVIDENCE_CHARACTERS] + "\n... (the whole of it is in verdicts.json)"
    return text
