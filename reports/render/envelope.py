"""The degradation envelope of a fault: one self-contained SVG a case, and one row a fault in the Markdown report.

Drawn from ``numbers`` of a verdict alone (``suite.gates.degrade_envelope`` makes them), so that a run that is judged again
is drawn again. Each request is one mark at the second it was sent (0: the fault) and the time to its first token, or to
its end where none came. Colour says what became of it, shape whose request it was; the shaded part is the fault.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from reports import records as r
from reports.render.svg import seconds
from reports.scoreboard import Scoreboard

FOLDER = "envelopes"
"""Folder of the drawings inside a run."""

COLOURS = {"good": "#2e7d32", "slow": "#ef6c00", "failed": "#c62828", "hang": "#6a1b9a"}
"""Fate of a request -> colour; told apart by lightness too, and named in the legend and in each mark's title."""

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 860, 380, 64, 20, 58, 46

Point = Mapping[str, Any]


def of(verdict: r.Verdict) -> Mapping[str, Any] | None:
    """The envelope of a verdict, or None where it has none worth drawing."""
    found = verdict.numbers.get("envelope")
    if isinstance(found, Mapping) and found.get("requests"):
        return found
    return None


def file_name(case_id: str) -> str:
    """``D.master.kill.busy.svg``: the case id with everything that is no plain file name taken out."""
    return re.sub(r"[^\w.+-]", "_", case_id) + ".svg"


def render(verdict: r.Verdict) -> str:
    """The drawing, or "" where the verdict has no envelope."""
    data = of(verdict)
    if data is None:
        return ""
    points: Sequence[Point] = data["requests"]
    scale = _Scale(points, data.get("healed_s"))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="envelope" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}"'
        f' role="img" aria-label="{escape(verdict.case_id)}: time to first token of every request" font-family="sans-serif"'
        ' font-size="12"><rect width="100%" height="100%" fill="#ffffff"/>',
        *_title(verdict, data),
        *_fault(data, scale),
        *scale.axes(),
        *_budget(points, scale),
        *(_mark(point, scale) for point in points),
        *_legend(points),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


class _Scale:
    """Seconds -> pixels: linear to the right, logarithmic upwards."""

    def __init__(self, points: Sequence[Point], healed_s: float | None) -> None:
        ends = [p["at_s"] + p["took_s"] for p in points]
        self.first: float = min(-0.5, *(p["at_s"] for p in points))
        self.last: float = max(1.0, *(p["at_s"] for p in points), *(min(e, 1e6) for e in ends), healed_s or 0.0)
        times = [p["took_s"] for p in points if p["took_s"] > 0] or [0.1]
        self.low = math.floor(math.log10(min(times)))
        self.high = max(math.ceil(math.log10(max(*times, *(p["limit_s"] for p in points)))), self.low + 1)

    def x(self, at_s: float) -> float:
        return _LEFT + (at_s - self.first) / (self.last - self.first) * (_WIDTH - _LEFT - _RIGHT)

    def y(self, took_s: float) -> float:
        share = (math.log10(max(took_s, math.pow(10, self.low))) - self.low) / (self.high - self.low)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)

    def axes(self) -> list[str]:
        out = []
        for exponent in range(self.low, self.high + 1):
            y = self.y(math.pow(10, exponent))
            out.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#dddddd"/>')
            out.append(
                f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{seconds(math.pow(10, exponent))}</text>'
            )
        step = next(
            s for s in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, math.inf) if (self.last - self.first) / s <= 14
        )
        tick = math.ceil(self.first / step) * step if math.isfinite(step) else 0.0
        while math.isfinite(step) and tick <= self.last:
            out.append(
                f'<text x="{self.x(tick):.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{tick:g}</text>'
            )
            tick += step
        middle = (_WIDTH + _LEFT - _RIGHT) / 2
        out.append(f'<text x="{middle}" y="{_HEIGHT - 10}" text-anchor="middle">seconds since the fault</text>')
        return out


def _title(verdict: r.Verdict, data: Mapping[str, Any]) -> list[str]:
    words = f"{verdict.outcome} {verdict.finding}".strip()
    line = f"{verdict.case_id}: {words}; fault: {data.get('fault', '')}"
    return [f'<text x="{_LEFT}" y="20" font-size="14" font-weight="bold">{escape(line)}</text>']


def _fault(data: Mapping[str, Any], scale: _Scale) -> list[str]:
    healed_s = data.get("healed_s")
    end_s = scale.last if healed_s is None else healed_s
    x, width = scale.x(0.0), max(1.0, scale.x(end_s) - scale.x(0.0))
    text = "fault (not healed)" if healed_s is None else "fault"
    return [
        f'<rect x="{x:.1f}" y="{_TOP}" width="{width:.1f}" height="{_HEIGHT - _TOP - _BOTTOM}" fill="#fdecea"/>',
        f'<text x="{x + 4:.1f}" y="{_TOP + 14}" fill="#8e4a45">{text}</text>',
    ]


def _budget(points: Sequence[Point], scale: _Scale) -> list[str]:
    """The budget of victims (of all requests where there is none), as a dashed line."""
    limits = sorted(p["limit_s"] for p in points if p["role"] == "victim") or sorted(p["limit_s"] for p in points)
    limit_s = limits[len(limits) // 2]
    y = scale.y(limit_s)
    return [
        f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#555555" stroke-dasharray="5 4"/>',
        f'<text x="{_WIDTH - _RIGHT}" y="{y - 4:.1f}" text-anchor="end" fill="#555555">budget {seconds(limit_s)}</text>',
    ]


def _mark(point: Point, scale: _Scale) -> str:
    x, y, colour = scale.x(point["at_s"]), scale.y(point["took_s"]), COLOURS.get(point["fate"], "#000000")
    title = f"{point['role']} on {point['engine']}, sent at {point['at_s']:g} s: {point['fate']}, {seconds(point['took_s'])}"
    return _shape(point["role"], x, y, colour, f"<title>{escape(title)}</title>")


def _shape(role: str, x: float, y: float, colour: str, inner: str = "") -> str:
    """Victims: filled circles (hollow where asked for after the heal); bystanders: squares; the rest: triangles."""
    if role == "victim":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{colour}">{inner}</circle>'
    if role == "returned":
        return (
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="none" stroke="{colour}" stroke-width="2">{inner}</circle>'
        )
    if role == "bystander":
        return f'<rect x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8" fill="{colour}">{inner}</rect>'
    return f'<path d="M{x:.1f} {y - 4:.1f} l4 7 h-8 z" fill="{colour}" fill-opacity="0.6">{inner}</path>'


def _legend(points: Sequence[Point]) -> list[str]:
    out, x, y = [], float(_LEFT), 42.0
    for fate in COLOURS:
        count = sum(p["fate"] == fate for p in points)
        if count:
            out.append(f'<circle cx="{x + 4}" cy="{y - 4}" r="4" fill="{COLOURS[fate]}"/>')
            out.append(f'<text x="{x + 12}" y="{y}">{fate} {count}</text>')
            x += 90
    for role, label in (
        ("victim", "victim"),
        ("returned", "after the heal"),
        ("bystander", "bystander"),
        ("", "others"),
    ):
        known = ("victim", "returned", "bystander")
        if any(p["role"] == role or (not role and p["role"] not in known) for p in points):
            out.append(_shape(role, x + 4, y - 4, "#555555"))
            out.append(f'<text x="{x + 14}" y="{y}">{label}</text>')
            x += 110
    return out


# Rows ---------------------------------------------------------------------------------------------------------------
HEADS = (
    "fault", "verdict", "good", "slow", "failed", "no answer", "worst TTFT", "good again after", "hits back after",
    "token-seconds lost", "envelope",
)  # fmt: skip


def rows(scoreboard: Scoreboard) -> list[list[str]]:
    """One row a fault: what it cost. Cells are plain text; the last one is the path of the drawing inside the run."""
    out = []
    for row in scoreboard.rows:
        v, n = row.verdict, row.verdict.numbers
        if of(v) is None:
            continue
        out.append(
            [
                v.case_id,
                f"{v.outcome} {v.finding}".strip(),
                *(str(n.get(f"{fate}_requests", "")) for fate in COLOURS),
                _number(n.get("worst_ttft_s"), "unknown"),
                _number(n.get("good_again_s"), "never"),
                _number(n.get("hits_back_s"), "not seen"),
                str(n.get("token_seconds_lost", "")),
                f"{FOLDER}/{file_name(v.case_id)}",
            ]
        )
    return out


def _number(value: Any, absent: str) -> str:
    if not isinstance(value, int | float):
        return absent
    return seconds(float(value)) if value > 0 else "0 s"
