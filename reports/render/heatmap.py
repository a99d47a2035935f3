"""The heat map gates x defects: which gate caught which planted defect, and what was really read.

Built from verdicts alone (those of ``suite.defects``, whose ``numbers`` say what was planted), so that it can be drawn
again from the evidence of one or several runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from html import escape
from typing import Any

import msgspec

from reports import records as r
from reports.render.svg import picture_head

SCHEMA = "kvgates.heatmap"
SCHEMA_VERSION = 1


class State(StrEnum):
    """What became of one defect under one gate."""

    CAUGHT = "caught"
    """By a gate that should, with a finding that should."""
    OTHERWISE = "caught-otherwise"
    """Red, but with another finding, or by a gate that is not asked to see it."""
    MISSED = "missed"
    """A gate that should see it stayed green (or came to no verdict)."""
    GREEN = "green"
    """A gate that is not asked to see it, and does not."""
    UNTOUCHED = "no-occasion"
    """A gate that is not asked to see it, and that gave it nothing to lie about."""
    QUIET = "quiet"
    """Rate 0: green, as it must be."""
    ALARM = "false-alarm"
    """Rate 0: red."""
    ERROR = "error"
    """Nothing was planted, or the case broke: it says nothing."""


SYMBOLS = {
    State.CAUGHT: "#",
    State.OTHERWISE: "+",
    State.MISSED: "X",
    State.GREEN: ".",
    State.UNTOUCHED: "-",
    State.QUIET: "o",
    State.ALARM: "A",
    State.ERROR: "!",
}
COLOURS = {
    State.CAUGHT: "#1a7f4b",
    State.OTHERWISE: "#8bc3a3",
    State.MISSED: "#c62828",
    State.GREEN: "#e6e8ea",
    State.UNTOUCHED: "#ffffff",
    State.QUIET: "#dbe7f5",
    State.ALARM: "#e8710a",
    State.ERROR: "#f2c744",
}
BAD = frozenset({State.MISSED, State.ALARM, State.ERROR})


class Cell(r.Part, frozen=True, kw_only=True):
    """One defect under one case of a gate. ``read``: wrong acts that reached a request, in ``unit``."""

    case_id: str
    defect: str
    kind: str
    gate: str
    inner_case: str
    rate: float
    state: State
    outcome: str
    finding: str
    wanted: tuple[str, ...] = ()
    read: int = 0
    unit: str = ""


class HeatMap(r.Part, frozen=True, kw_only=True):
    """All cells, and the counts that a reader wants first."""

    schema: str = SCHEMA
    version: int = SCHEMA_VERSION
    runs: tuple[str, ...] = ()
    defects: tuple[str, ...] = ()
    gates: tuple[str, ...] = ()
    counts: dict[str, int] = {}
    bad_acts_read: int = 0
    missed: tuple[str, ...] = ()
    """Defects that no gate caught as it should."""
    unproven: tuple[str, ...] = ()
    """Gates that no planted defect turned red."""
    cells: tuple[Cell, ...] = ()


def build(verdicts: Iterable[r.Verdict], runs: Sequence[str] = (), gates: Sequence[str] = ()) -> HeatMap:
    """The heat map of the verdicts of planted defects; others are left out. ``gates``: all gates there are (for UNPROVEN).

    A case judged more than once counts with its last verdict.
    """
    last = {v.case_id: v for v in verdicts if "planted" in v.numbers}
    cells = tuple(_cell(v) for v in last.values())
    kinds = list(dict.fromkeys(c.kind for c in cells))
    defects = tuple(dict.fromkeys(c.defect for c in sorted(cells, key=lambda c: kinds.index(c.kind))))
    seen = tuple(dict.fromkeys([*gates, *(c.gate for c in cells)]))
    caught = {c.defect for c in cells if c.state is State.CAUGHT}
    red = {c.gate for c in cells if c.state in (State.CAUGHT, State.OTHERWISE)}
    judged = {c.defect for c in cells if c.rate > 0 and c.wanted}
    return HeatMap(
        runs=tuple(runs),
        defects=defects,
        gates=tuple(g for g in seen if any(c.gate == g for c in cells)),
        counts={str(state): sum(c.state is state for c in cells) for state in State},
        bad_acts_read=sum(c.read for c in cells if c.rate > 0),
        missed=tuple(d for d in defects if d in judged and d not in caught),
        unproven=tuple(g for g in seen if g not in red),
        cells=cells,
    )


def _cell(verdict: r.Verdict) -> Cell:
    planted: dict[str, Any] = verdict.numbers["planted"]
    inner: dict[str, str] = verdict.numbers["inner"]
    told: dict[str, Any] = verdict.numbers["told"]
    return Cell(
        case_id=verdict.case_id,
        defect=planted["defect"],
        kind=planted["kind"],
        gate=planted["gate"],
        inner_case=planted["case"],
        rate=planted["rate"],
        state=_state(verdict, planted, inner, int(told.get("read", 0))),
        outcome=inner["outcome"],
        finding=inner["finding"],
        wanted=tuple(planted["wanted"]),
        read=int(told.get("read", 0)),
        unit=str(told.get("unit", "")),
    )


def _state(verdict: r.Verdict, planted: dict[str, Any], inner: dict[str, str], read: int) -> State:
    if verdict.outcome not in (r.Outcome.PASS, r.Outcome.FAIL):
        return State.ERROR
    if not planted["rate"]:
        return State.QUIET if verdict.outcome is r.Outcome.PASS else State.ALARM
    red = inner["outcome"] == planted["outcome"]
    if planted["survey"]:
        if not read:
            return State.UNTOUCHED
        return State.OTHERWISE if inner["outcome"] == r.Outcome.FAIL else State.GREEN
    if verdict.outcome is r.Outcome.PASS:
        return State.CAUGHT
    return State.OTHERWISE if red else State.MISSED


# --------------------------------------------------------------------------------------------------------------------


def to_json(heat: HeatMap) -> bytes:
    """Indented JSON."""
    return msgspec.json.format(msgspec.json.encode(heat), indent=1) + b"\n"


_WORST = (
    State.MISSED,
    State.ALARM,
    State.ERROR,
    State.CAUGHT,
    State.OTHERWISE,
    State.GREEN,
    State.UNTOUCHED,
    State.QUIET,
)


def at(heat: HeatMap, defect: str, gate: str, *, planted: bool = True) -> list[Cell]:
    """Cells of a defect under a gate (planted, or at rate 0), the one that matters most first."""
    cells = [c for c in heat.cells if c.defect == defect and c.gate == gate and (c.rate > 0) == planted]
    return sorted(cells, key=lambda c: _WORST.index(c.state))


def _control(heat: HeatMap, defect: str) -> list[Cell]:
    return [c for c in heat.cells if c.defect == defect and not c.rate]


def to_text(heat: HeatMap) -> str:
    """For a terminal: one row a defect, one column a gate, then what is not as it should be."""
    width = max([len(d) for d in heat.defects], default=6)
    lines = ["planted defects: which gate caught which", ""]
    for i, gate in enumerate(heat.gates):
        lines.append(" " * (width + 2) + "| " * i + f"{gate}")
    for defect in heat.defects:
        row = [SYMBOLS[cells[0].state] if (cells := at(heat, defect, gate)) else " " for gate in heat.gates]
        control = _control(heat, defect)
        quiet = "" if not control else f"rate 0: {sum(c.state is State.QUIET for c in control)} of {len(control)} quiet"
        planted = [c for c in heat.cells if c.defect == defect and c.rate > 0]
        read = f"{sum(c.read for c in planted)} {planted[0].unit} read" if planted else ""
        findings = ", ".join(dict.fromkeys(c.finding for c in planted if c.state is State.CAUGHT))
        lines.append(f"{defect:<{width}}  {' '.join(row)}  {findings or '-'}; {read}" + (f"; {quiet}" if quiet else ""))
    lines += ["", "  ".join(f"{symbol} {state}" for state, symbol in SYMBOLS.items()), "", summary(heat)]
    lines += [f"{c.state}: {c.case_id}: {c.outcome} {c.finding}".rstrip() for c in heat.cells if c.state in BAD]
    return "\n".join(lines) + "\n"


def summary(heat: HeatMap) -> str:
    """One line."""
    caught = len([d for d in heat.defects if d not in heat.missed])
    controls = heat.counts[State.QUIET] + heat.counts[State.ALARM]
    line = f"{caught} of {len(heat.defects)} defects caught by the gate and finding that should;"
    line += f" {heat.bad_acts_read} bad acts read; {heat.counts[State.QUIET]} of {controls} controls at rate 0 quiet"
    if heat.missed:
        line += f"; MISSED: {', '.join(heat.missed)}"
    if heat.unproven:
        line += f"; UNPROVEN gates: {', '.join(heat.unproven)}"
    return line


# SVG ----------------------------------------------------------------------------------------------------------------
_LEFT, _TOP, _SIDE, _ROW = 190, 130, 62, 20


def to_svg(heat: HeatMap) -> str:
    """A picture of its own: rows of defects by kind, columns of gates, and the column of controls at rate 0."""
    columns = [*heat.gates, "at rate 0"]
    height = _TOP + _ROW * (len(heat.defects) + len({c.kind for c in heat.cells})) + 70
    width = _LEFT + _SIDE * len(columns) + 240
    parts = [
        picture_head(width, height, "Gates against planted defects", font_size=11),
        f'<text x="12" y="22" font-size="15" font-weight="600">{escape(summary(heat).split(";")[0])}</text>',
    ]
    for i, name in enumerate(columns):
        x = _LEFT + i * _SIDE + _SIDE / 2
        parts.append(f'<text transform="translate({x},{_TOP - 8}) rotate(-40)">{escape(name)}</text>')
    y, kind = float(_TOP), ""
    for defect in heat.defects:
        cells = [c for c in heat.cells if c.defect == defect]
        if cells[0].kind != kind:
            kind = cells[0].kind
            parts.append(f'<text x="12" y="{y + 15}" font-weight="600">{escape(kind)}</text>')
            y += _ROW
        parts += _row(heat, defect, columns, y)
        y += _ROW
    parts += _legend(y + 20)
    return "".join([*parts, "</svg>"]) + "\n"


def _row(heat: HeatMap, defect: str, columns: Sequence[str], y: float) -> list[str]:
    parts = [f'<text x="{_LEFT - 8}" y="{y + 14}" text-anchor="end">{escape(defect)}</text>']
    for i, name in enumerate(columns):
        found = _control(heat, defect) if name == "at rate 0" else at(heat, defect, name)
        x = _LEFT + i * _SIDE
        if not found:
            parts.append(
                f'<rect x="{x}" y="{y}" width="{_SIDE - 2}" height="{_ROW - 2}" fill="none" stroke="#eceff1"/>'
            )
            continue
        worst = sorted(found, key=lambda c: _WORST.index(c.state))[0]
        title = "&#10;".join(escape(f"{c.case_id}: {c.outcome} {c.finding}; {c.read} {c.unit} read") for c in found)
        text = str(worst.read) if worst.rate else ""
        fill = "#ffffff" if worst.state in (State.CAUGHT, State.MISSED) else "#263238"
        parts.append(
            f'<g><title>{title}</title><rect x="{x}" y="{y}" width="{_SIDE - 2}" height="{_ROW - 2}"'
            f' fill="{COLOURS[worst.state]}"/><text x="{x + _SIDE / 2 - 1}" y="{y + 13}" text-anchor="middle"'
            f' fill="{fill}">{text}</text></g>'
        )
    caught = [c for c in heat.cells if c.defect == defect and c.state is State.CAUGHT]
    findings = ", ".join(dict.fromkeys(c.finding for c in caught))
    x = _LEFT + len(columns) * _SIDE + 8
    return [*parts, f'<text x="{x}" y="{y + 14}" fill="#455a64">{escape(findings)}</text>']


def _legend(y: float) -> list[str]:
    parts = []
    x = 12.0
    for state, colour in COLOURS.items():
        parts.append(f'<rect x="{x}" y="{y}" width="14" height="14" fill="{colour}"/>')
        parts.append(f'<text x="{x + 18}" y="{y + 11}">{state}</text>')
        x += 34 + 7 * len(state)
    parts.append(f'<text x="12" y="{y + 34}">Numbers: wrong acts (blocks, requests, ...) that were really read.</text>')
    return parts
