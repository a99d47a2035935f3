"""The results pages' view of releases side by side: which case came out otherwise in which release."""

from __future__ import annotations

from collections.abc import Sequence

from packaging.version import InvalidVersion, Version

from reports import records as r
from reports.results_tables import Published, table

Column = tuple[str, str, str, str]
"""vLLM's release, Mooncake's, the kind of place (``Published.kind``), and LMCache's where that was the connector: what a column of the table stands for."""
DECIDED = (r.Outcome.PASS, r.Outcome.FAIL)


def column_of(p: Published) -> Column:
    """The releases and the kind of machine of a run; "?" for a release that the run does not name."""
    found = p.board.run.versions
    return found.get("vllm", "?"), found.get("mooncake", "?"), p.kind, p.lmcache


def release_order(column: Column) -> tuple[Version, Version, str, Version]:
    """Orders releases as packages do: ``0.3.13.post1`` after ``0.3.13``, ``0.26.0rc1`` before ``0.26.0``; what is none, first."""
    return _version(column[0]), _version(column[1]), column[2], _version(column[3])


def _version(release: str) -> Version:
    try:
        return Version(release)
    except InvalidVersion:
        return Version("0")


def by_release(runs: Sequence[Published]) -> dict[Column, dict[str, r.Verdict]]:
    """The newest verdict on each case of a gate, by column, oldest release first. ``runs``: oldest first.

    PASS and FAIL go before what decided nothing, whenever that was; UNTESTABLE cases did not run.
    """
    found: dict[Column, dict[str, r.Verdict]] = {}
    for p in runs:
        verdicts = found.setdefault(column_of(p), {})
        for row in p.rows:
            v = row.verdict
            if v.gate.startswith("B.") or v.outcome is r.Outcome.UNTESTABLE:
                continue
            if v.outcome in DECIDED or v.case_id not in verdicts or verdicts[v.case_id].outcome not in DECIDED:
                verdicts[v.case_id] = v
    kept = {key: verdicts for key, verdicts in found.items() if verdicts}
    return {key: kept[key] for key in sorted(kept, key=release_order)}


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
        " A column is a pair of releases on a kind of machine, through LMCache where it says so; its newest PASS or FAIL counts, and what decided nothing only"
        " where there is neither. Block sizes differ between machines (see the specs), and a run may be older than its gate: a"
        " difference may be theirs."
    )
    head = (
        "case",
        *(
            f"{vllm} / {mooncake}, {kind}" + (f", LMCache {through}" if through else "")
            for vllm, mooncake, kind, through in columns
        ),
    )
    return ["## Releases side by side", "", f"vLLM / Mooncake. {words}", "", *table(head, rows), ""]


def _cell(verdict: r.Verdict | None) -> str:
    if verdict is None:
        return ""
    outcome = str(verdict.outcome)
    return f"{outcome} `{verdict.finding}`" if verdict.finding else outcome
