"""The results pages' view of releases side by side: which case came out otherwise in which release."""

from __future__ import annotations

import re
from collections.abc import Sequence

from reports import records as r
from reports.results_tables import Published, table

Column = tuple[str, str, str]
"""vLLM's release, Mooncake's, ``GPU`` or ``CPU``: what a column of the table stands for."""


def column_of(p: Published) -> Column:
    """The releases and the kind of machine of a run; "?" for a release that the run does not name."""
    found = p.board.run.versions
    return found.get("vllm", "?"), found.get("mooncake", "?"), "GPU" if p.on_gpu else "CPU"


def newer(release: str) -> tuple[int, ...]:
    """Orders releases: ``0.3.13.post1`` after ``0.3.13``."""
    return tuple(int(number) for number in re.findall(r"\d+", release))


def by_release(runs: Sequence[Published]) -> dict[Column, dict[str, r.Verdict]]:
    """The newest verdict on each case of a gate, by column, oldest release first. ``runs``: oldest first."""
    found: dict[Column, dict[str, r.Verdict]] = {}
    for p in runs:
        for row in p.rows:
            if not row.verdict.gate.startswith("B."):
                found.setdefault(column_of(p), {})[row.verdict.case_id] = row.verdict
    return {key: found[key] for key in sorted(found, key=lambda key: (newer(key[0]), newer(key[1]), key[2]))}


def releases(runs: Sequence[Published]) -> list[str]:
    """A sentence and a table of the cases that at least two columns have, and that did not come out alike."""
    columns = by_release(runs)
    if len(columns) < 2:
        return []
    cases = sorted({case for verdicts in columns.values() for case in verdicts})
    shared = [case for case in cases if sum(case in verdicts for verdicts in columns.values()) > 1]
    rows = []
    for case in shared:
        cells = [_cell(verdicts.get(case)) for verdicts in columns.values()]
        if len({cell for cell in cells if cell}) > 1:
            rows.append((f"`{case}`", *cells))
    words = (
        f"{len(shared)} cases ran in at least two of {len(columns)} columns; {len(shared) - len(rows)} came out alike."
        " A column is a pair of releases on a kind of machine; the newest verdict counts. Block sizes differ between"
        " machines (see the specs), so a difference may be the machine's as well."
    )
    head = ("case", *(f"{vllm} / {mooncake}, {kind}" for vllm, mooncake, kind in columns))
    return ["## Releases side by side", "", f"vLLM / Mooncake. {words}", "", *table(head, rows), ""]


def _cell(verdict: r.Verdict | None) -> str:
    if verdict is None:
        return ""
    outcome = str(verdict.outcome)
    return f"{outcome} `{verdict.finding}`" if verdict.finding else outcome
