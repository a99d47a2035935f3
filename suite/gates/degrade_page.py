"""``python -m suite.gates.degrade_page`` prints docs/fault-matrix.md: the reviewed cells with their reasons, and the rest.

A selftest compares the committed page with this output.
"""

from __future__ import annotations

import sys

from fixtures.arguments import Parser
from suite.gates import degrade_cells as cells
from suite.gates.degrade_cells import Cell

INTRODUCTION = """# The fault matrix

Made by `python -m suite.gates.degrade_page > docs/fault-matrix.md` from the table in `suite/gates/degrade_cells.py`.

Each cell is a case of family D: what is hurt, how, while what was under way, and when it was healed (before the master
has dropped a silent client, or after it). All cells are collected and judged in the same way: victims, bystanders on
every other engine, health asked meanwhile; then first good answer, hits, longest request, KV usage, processes. `make gates`
runs the core; `make gates-full` all of it. Runs write one drawing a cell into `envelopes/`.

| topology | what it is |
|---|---|
| standalone | the pool's memory belongs to an owner process: an engine's death loses nothing |
| rejoin | standalone with fixed ports: a restarted owner is back under its old name, with new memory (upstream's default draws a new name) |
| embedded | upstream's default: each engine gives memory to the pool |
| proxied | standalone, with a fault proxy between every client and the master |
| ha | several masters, one elected through etcd |
| tiered | standalone with an SSD tier behind the memory |
| volume | the same, on a small file system of its own (containers alone: `--runtime docker`) |
"""


def page() -> str:
    """The whole page, ending with a newline."""
    lines = [INTRODUCTION, "## Core", "", "| case | topology | why it is in |", "|---|---|---|"]
    lines += [f"| `{cell.id}` | {cell.topology} | {cell.why} |" for cell in cells.CORE]
    lines += ["", "## Full", ""]
    for target, claim in cells.CLAIMS.items():
        rest = [cell for cell in cells.cells_of(target) if not cell.core]
        if rest:
            lines += [f"**D.{target}**: {claim}.", "", *_by_fault(rest), ""]
    return "\n".join(lines).rstrip() + "\n"


def _by_fault(rest: list[Cell]) -> list[str]:
    """One line a fault: its cells without the part of the id that they share."""
    groups: dict[str, list[str]] = {}
    for cell in rest:
        start = f"D.{cell.target}.{cell.fault}."
        groups.setdefault(cell.fault, []).append(f"`{cell.id.removeprefix(start)}`")
    return [f"- {fault}: {', '.join(ids)}" for fault, ids in groups.items()]


if __name__ == "__main__":
    Parser(prog="python -m suite.gates.degrade_page", description=__doc__).parse_args()
    sys.stdout.write(page())
