"""``python -m suite.gates.degrade_settings RUN...`` prints which settings make which faults pass, as Markdown.

Rows are settings, columns the faults under which they are compared (``degrade_cells.SITUATIONS``); each entry is a verdict of the
runs, the last one where several have it. What no run has is NOT RUN.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from reports import records as r
from reports.evidence import EvidenceError, load_run
from suite.gates.degrade_cells import SETTINGS, SITUATIONS, settings_of
from suite.workload.arguments import Parser, run_command

NOT_RUN = "NOT RUN"


def verdicts_of(runs: Sequence[Path]) -> dict[str, r.Verdict]:
    """Case -> its last verdict in these runs. Raises EvidenceError for a folder that holds no run."""
    return {
        verdict.case_id: verdict
        for run in runs
        for history in load_run(run).histories.values()
        for verdict in history.of(r.Verdict)
    }


def table(verdicts: Mapping[str, r.Verdict]) -> str:
    """The table, ending with a newline."""
    columns = {situation.id: settings_of(situation) for situation in SITUATIONS}
    lines = [
        "| engines' settings | " + " | ".join(f"`{name}`" for name in columns) + " |",
        "|---|" + "---|" * len(columns),
    ]
    for row, setting in enumerate(SETTINGS):
        entries = [_entry(verdicts.get(cells[row].id)) for cells in columns.values()]
        lines.append(f"| {setting} | " + " | ".join(entries) + " |")
    return "\n".join(lines) + "\n"


def _entry(verdict: r.Verdict | None) -> str:
    if verdict is None:
        return NOT_RUN
    return str(verdict.outcome) + (f" `{verdict.finding}`" if verdict.finding else "")


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table of some runs; 4 for a folder that holds none."""
    parser = Parser(prog="python -m suite.gates.degrade_settings", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path)
    return run_command(parser, argv, _print, EvidenceError)


def _print(given: argparse.Namespace) -> None:
    sys.stdout.write(table(verdicts_of(given.runs)))


if __name__ == "__main__":
    sys.exit(main())
