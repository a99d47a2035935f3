"""A comparison for people: Markdown for a pull request, a page, and a picture of the intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from reports.compare import PAIRS, RUNS, Comparison, Row
from reports.records import Outcome
from reports.render.svg import picture_head

METHODS = {
    PAIRS: "pairs: confidence sequence for the median of paired log ratios (sign martingale; valid at every look), 95 %",
    RUNS: "runs: Student's t on logarithms of run medians (Welch), error spent over looks, 95 % in all",
}

_COLOURS = {Outcome.PASS: "#2e7d32", Outcome.FAIL: "#c62828", Outcome.INCONCLUSIVE: "#757575"}


def markdown(found: Sequence[Comparison]) -> str:
    """All comparisons, ending with a newline."""
    return "\n".join(line for c in found for line in _markdown(c)).rstrip() + "\n"


def _markdown(c: Comparison) -> list[str]:
    lines = [f"## {c.other} against {c.base}: {c.outcome}", ""]
    lines += [
        "| benchmark | base | other | other / base [95 %] | could have seen | verdict |",
        "|---|--:|--:|--:|--:|---|",
    ]
    lines += [_line(row) for row in sorted(c.rows, key=lambda row: (row.outcome != Outcome.FAIL, row.outcome))]
    lines += ["", *(f"- {text}" for text in _remarks(c, "`"))]
    return [*lines, ""]


def _remarks(c: Comparison, quote: str = "") -> list[str]:
    """What is to be said beside the rows. quote: around names of benchmarks."""
    return [
        *(f"VANISHED: {quote}{name}{quote}" for name in c.vanished),
        *(f"new: {quote}{name}{quote}" for name in c.new),
        *(f"allowed difference: {text}" for text in c.allowed),
        *c.notes,
        f"order of the runs (A base, B other): {c.order}{_order_note(c)}",
        *(METHODS[method] for method in dict.fromkeys(row.method for row in c.rows)),
    ]


def _order_note(c: Comparison) -> str:
    if any(row.method == PAIRS for row in c.rows):
        return "; samples interleaved in blocks"
    return (
        "" if c.interleaved else "; NOT interleaved: what changed on the machine in between is part of every difference"
    )


def _line(row: Row) -> str:
    ratio = "" if row.ratio is None else "{:.3f} [{}, {}]".format(row.ratio[0], *map(_end, row.ratio[1:]))
    visible = "" if row.smallest_visible is None or math.isinf(row.smallest_visible) else f"{row.smallest_visible:.1%}"
    cells = [f"`{row.benchmark}`", _figure(row.base, row.unit), _figure(row.other, row.unit), ratio, visible]
    return f"| {' | '.join(cells)} | {row.outcome}: {row.said} ({row.count} {row.method}) |"


def _end(value: float) -> str:
    return "no end" if math.isinf(value) or value == 0 else f"{value:.3f}"


def _figure(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    if unit == "s":
        return f"{value * 1000:.1f} ms"
    return f"{value:.1%}" if unit == "share" else f"{value:.2f} {unit}"


def html(found: Sequence[Comparison]) -> str:
    """One page that stands alone."""
    parts = [
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Comparison of runs</title><style>'
        "body{font:14px system-ui,sans-serif;margin:2em auto;max-width:70em;color:#263238}"
        "td,th{padding:.3em .7em;text-align:left;border-bottom:1px solid #eceff1}td.n{text-align:right}"
        ".FAIL{color:#c62828}.PASS{color:#2e7d32}.INCONCLUSIVE{color:#757575}</style>"
    ]
    for c in found:
        parts.append(
            f'<h1>{escape(c.other)} against {escape(c.base)}: <span class="{c.outcome}">{c.outcome}</span></h1>'
        )
        parts.append(svg([c]))
        parts.append("<table><tr><th>benchmark<th>base<th>other<th>verdict</tr>")
        for row in c.rows:
            figures = "".join(f'<td class="n">{escape(_figure(v, row.unit))}' for v in (row.base, row.other))
            verdict = f'<td><b class="{row.outcome}">{row.outcome}</b> {escape(row.said)} ({row.count} {row.method})'
            parts.append(f"<tr><td>{escape(row.benchmark)}{figures}{verdict}</tr>")
        parts.append("</table><ul>")
        parts += [f"<li>{escape(text)}</li>" for text in _remarks(c)]
        parts.append("</ul>")
    return "".join([*parts, "</html>\n"])


_WIDTH, _LEFT, _RIGHT, _ROW, _TOP = 860, 330, 30, 24, 40


def svg(found: Sequence[Comparison]) -> str:
    """Intervals of the ratio, one a row, on a logarithmic axis; the grey band is the tolerance."""
    rows = [row for c in found for row in c.rows if row.ratio is not None]
    ends = [x for row in rows if row.ratio for x in row.ratio if 0 < x < math.inf]
    reach = max([0.1, *(abs(math.log(x)) for x in ends)]) * 1.1
    height = _TOP + _ROW * len(rows) + 30

    def x_of(log_ratio: float) -> float:
        place = min(max(log_ratio, -reach), reach)
        return _LEFT + (place + reach) / (2 * reach) * (_WIDTH - _LEFT - _RIGHT)

    parts = [
        picture_head(_WIDTH, height, "Ratios with intervals"),
        f'<text x="{x_of(0)}" y="24" text-anchor="middle">other / base</text>',
    ]
    for number, row in enumerate(rows):
        y = _TOP + number * _ROW + _ROW / 2
        band = math.log1p(row.tolerance)
        parts.append(
            f'<rect x="{x_of(-band):.1f}" y="{y - _ROW / 2}" width="{x_of(band) - x_of(-band):.1f}" height="{_ROW}" fill="#eceff1"/>'
        )
        parts.append(f'<text x="{_LEFT - 10}" y="{y + 4}" text-anchor="end">{escape(row.benchmark)}</text>')
        parts.append(_bar(row, y, x_of))
    bottom = _TOP + _ROW * len(rows)
    parts.append(f'<line x1="{x_of(0)}" x2="{x_of(0)}" y1="{_TOP - 6}" y2="{bottom + 4}" stroke="#263238"/>')
    for at in (-reach / 1.1, 0.0, reach / 1.1):
        parts.append(f'<text x="{x_of(at):.1f}" y="{bottom + 20}" text-anchor="middle">{math.exp(at):.2f}</text>')
    return "".join([*parts, "</svg>"])


def _bar(row: Row, y: float, x_of: Callable[[float], float]) -> str:
    assert row.ratio is not None
    middle, low, high = (math.log(x) if 0 < x < math.inf else math.copysign(99, x - 1) for x in row.ratio)
    colour = _COLOURS[row.outcome]
    title = escape(f"{row.benchmark}: {row.outcome}, {row.said}")
    return (
        f'<g><title>{title}</title><line x1="{x_of(low):.1f}" x2="{x_of(high):.1f}" y1="{y}" y2="{y}" stroke="{colour}"'
        f' stroke-width="3"/><circle cx="{x_of(middle):.1f}" cy="{y}" r="5" fill="{colour}"/></g>'
    )
