"""A strip plot of times to first token as inline SVG: one row a role, one dot a request, logarithmic axis. And what drawings share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

_WIDTH, _LEFT, _RIGHT, _ROW, _AXIS = 720, 110, 20, 26, 34


def ttft_plot(ttft_s: Mapping[str, Sequence[float]]) -> str:
    """SVG text; "" when there is nothing to show. Values in seconds, all positive ones are drawn."""
    series = {role: [v for v in values if v > 0] for role, values in ttft_s.items()}
    series = {role: values for role, values in series.items() if values}
    if not series:
        return ""
    low = math.floor(math.log10(min(min(v) for v in series.values())))
    high = max(math.ceil(math.log10(max(max(v) for v in series.values()))), low + 1)
    height = _ROW * len(series) + _AXIS

    def x(value: float) -> float:
        return _LEFT + (math.log10(value) - low) / (high - low) * (_WIDTH - _LEFT - _RIGHT)

    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" role="img"'
        ' aria-label="Time to first token by role">'
    ]
    for exponent in range(low, high + 1):
        at = x(10.0**exponent)
        parts.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="0" y2="{_ROW * len(series)}"></line>')
        parts.append(f'<text x="{at:.1f}" y="{height - 12}" text-anchor="middle">{seconds(10.0**exponent)}</text>')
    for row, (role, values) in enumerate(series.items()):
        y = row * _ROW + _ROW / 2
        middle = sorted(values)[len(values) // 2]
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4}" text-anchor="end">{escape(role)}</text>')
        parts += [f'<circle cx="{x(v):.1f}" cy="{y}" r="3"></circle>' for v in values]
        parts.append(
            f'<line class="median" x1="{x(middle):.1f}" x2="{x(middle):.1f}" y1="{y - 9}" y2="{y + 9}">'
            f"<title>median {seconds(middle)} of {len(values)}</title></line>"
        )
    return "".join([*parts, "</svg>"])


def picture_head(width: float, height: float, label: str, font_size: int = 12) -> str:
    """How a drawing that is a file of its own begins: on white, whatever shows it. label: plain text, for who cannot see it."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        f' font-family="system-ui,sans-serif" font-size="{font_size}" fill="#263238" role="img" aria-label="{escape(label)}">'
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>'
    )


def seconds(value: float) -> str:
    """``1.5 s``, ``20 ms``: three digits."""
    return f"{value:.3g} s" if value >= 1 else f"{value * 1000:.3g} ms"
