"""``report.html``: the whole run as one page that needs nothing else: no script, no font, no request to anywhere."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from html import escape
from string import Template

import msgspec

from reports import records as r
from reports.redact import Redactor, argv_without_secrets
from reports.render import envelope
from reports.render.svg import ttft_plot
from reports.scoreboard import Scoreboard, ScoreRow, highlights, next_command, summary_line

FILE_NAME = "report.html"

_PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>kvgates $run</title>
<style>
:root { color-scheme: light dark; --line: #8884; --soft: #8882; }
body { font: 15px/1.45 system-ui, sans-serif; max-width: 1200px; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; margin: 1rem 0; }
th, td { text-align: left; vertical-align: top; padding: .3rem .6rem; border-bottom: 1px solid var(--line); overflow-wrap: anywhere; }
th { font-weight: 600; }
tr.gate td { background: var(--soft); }
code, pre { font: 13px/1.4 ui-monospace, monospace; }
pre { background: var(--soft); padding: .6rem; overflow: auto; max-height: 24rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; }
dt { font-weight: 600; } dd { margin: 0; overflow-wrap: anywhere; }
.v { font-weight: 700; white-space: nowrap; }
.PASS { color: #1a7f37; } .FAIL { color: #cf222e; } .INCONCLUSIVE { color: #9a6700; }
.UNTESTABLE { color: #57606a; } .HARNESS_ERROR { color: #8250df; }
.flag { border: 1px solid currentColor; border-radius: 3px; padding: 0 .3rem; font-size: 12px; white-space: nowrap; }
.unexpected { color: #cf222e; font-weight: 700; }
svg { max-width: 100%; height: auto; } svg:not(.envelope) text { font: 12px system-ui, sans-serif; fill: currentColor; }
svg .grid { stroke: #8886; } svg:not(.envelope) circle { fill: #0969da; fill-opacity: .35; } svg .median { stroke: #cf222e; stroke-width: 2; }
</style>
</head>
<body>
<h1>kvgates $run</h1>
<p><strong>$summary</strong></p>
$body
</body>
</html>
""")


def render(scoreboard: Scoreboard, redactor: Redactor | None = None) -> str:
    """The page."""
    board = (redactor or Redactor()).data(scoreboard)
    body = [
        _about(board),
        _scores(board),
        _plot(board),
        _faults(board),
        _failures(board),
        _not_run(board),
        _deviations(board),
    ]
    return _PAGE.substitute(
        run=escape(board.run.run_id),
        summary=escape(summary_line(board)),
        body="\n".join(part for part in body if part),
    )


def _about(board: Scoreboard) -> str:
    run = board.run
    pairs = [
        ("Command", shlex.join(argv_without_secrets(run.command))),
        ("kvgates", run.suite_version),
        ("Versions", ", ".join(f"{k} {v}" for k, v in run.versions.items())),
        ("Host", ", ".join(f"{k} {v}" for k, v in run.host.items() if v)),
        ("Stacks", ", ".join(f"{s.name} ({s.runtime} {s.platform} {s.transport})" for s in run.stacks)),
        ("Requests", str(run.requests) if run.requests else ""),
        ("Note", "" if run.complete else "this run was cut short; verdicts go as far as it went"),
    ]
    return _definitions(pairs)


def _definitions(pairs: Iterable[tuple[str, str]]) -> str:
    return "<dl>" + "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in pairs if v) + "</dl>"


def _table(heads: Sequence[str], rows: Iterable[str]) -> str:
    head = "".join(f"<th>{escape(h)}</th>" for h in heads)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _cells(*cells: str) -> str:
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _scores(board: Scoreboard) -> str:
    rows = []
    for gate in board.gates:
        flag = ' <span class="flag" title="no planted defect is known to turn this gate red">UNPROVEN</span>'
        rows.append(
            f'<tr class="gate"><td colspan="6"><strong>{escape(gate.gate)}</strong> {escape(gate.claim)}'
            f"{flag if gate.unproven else ''}</td></tr>"
        )
        rows += [_score(row) for row in board.rows_of(gate.gate)]
    return "<h2>Scoreboard</h2>" + _table(["case", "verdict", "finding", "got", "wanted", "numbers"], rows)


def _anchor(row: ScoreRow) -> str:
    # Every other character by its number: k3+1 and k3-1 are two cases.
    return "case-" + "".join(c if c.isascii() and c.isalnum() else f"_{ord(c):x}_" for c in row.verdict.case_id)


def _score(row: ScoreRow) -> str:
    v = row.verdict
    name = escape(v.case_id)
    if v.outcome not in (r.Outcome.PASS, r.Outcome.UNTESTABLE) or row.mark == "unexpected":
        name = f'<a href="#{_anchor(row)}">{name}</a>'
    mark = f' <span class="{row.mark}">{row.mark}</span>' if row.mark else ""
    return _cells(
        name,
        f'<span class="v {v.outcome}">{v.outcome}</span>{mark}',
        f"<code>{escape(v.finding)}</code>" if v.finding else "",
        escape(v.got),
        escape(v.wanted),
        "<br>".join(escape(n) for n in highlights(v.numbers)),
    )


def _plot(board: Scoreboard) -> str:
    plot = ttft_plot(board.run.ttft_s)
    return f"<h2>Time to first token by role</h2><p>One dot a request; the bar is the median.</p>{plot}" if plot else ""


def _faults(board: Scoreboard) -> str:
    rows = [_cells(*(escape(cell) for cell in row[:-1])) for row in envelope.rows(board)]
    return "<h2>What faults cost</h2>" + _table(envelope.HEADS[:-1], rows) if rows else ""


def _failures(board: Scoreboard) -> str:
    return "".join(["<h2>Failures</h2>", *(_failure(row) for row in board.failures)]) if board.failures else ""


def _failure(row: ScoreRow) -> str:
    v = row.verdict
    known = {"expected": f"known: {row.reason} {row.link}", "unexpected": f"wanted was {row.expected or 'PASS'}"}
    pairs = [
        ("Claim", v.claim),
        ("Got", v.got or "not stated"),
        ("Wanted", v.wanted or "not stated"),
        *(("Finding", f"{f.code}: {f.message}") for f in v.findings),
        ("Evidence", row.evidence),
        ("Likely cause", v.cause or "not known"),
        ("In production", v.production or "not known"),
        ("Reproduction", v.reproduction),
        ("Next", next_command(v)),
        *(("Note", note) for note in v.notes),
        (row.mark.capitalize(), known.get(row.mark, "")),
    ]
    details = {"evidence": [f.evidence for f in v.findings if f.evidence], "numbers": v.numbers}
    shown = {k: d for k, d in details.items() if d}
    block = msgspec.json.format(msgspec.json.encode(shown), indent=1).decode() if shown else ""
    return (
        f'<h3 id="{_anchor(row)}"><span class="v {v.outcome}">{v.outcome}</span> {escape(v.case_id)}</h3>'
        + _definitions(pairs)
        + envelope.render(v)
        + (f"<details><summary>details</summary><pre>{escape(block)}</pre></details>" if block else "")
    )


def _not_run(board: Scoreboard) -> str:
    rows = [_cells(escape(item.case_id), escape(item.reason)) for item in board.not_run]
    return "<h2>Not run</h2>" + _table(["case", "reason"], rows) if rows else ""


def _deviations(board: Scoreboard) -> str:
    rows = [
        _cells(*(escape(x) for x in (d.where, d.setting, d.upstream, d.ours, d.reason))) for d in board.run.deviations
    ]
    return (
        "<h2>Deviations from upstream defaults</h2>" + _table(["where", "setting", "upstream", "here", "reason"], rows)
        if rows
        else ""
    )
