"""``python -m suite.defects.heatmap RUN... [--out DIR]``: the heat map gates x defects, from the evidence of one or more runs.

Prints it, and writes ``heatmap.json``, ``heatmap.svg`` and ``heatmap.txt`` into DIR (default: the first run). Exit code 0
when every defect was caught and every control quiet, 10 when not, 4 for runs that cannot be read.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from reports import records as r
from reports.evidence import EvidenceError, load_run
from reports.render import heatmap
from suite.gates import registry


def of_runs(runs: Sequence[Path]) -> heatmap.HeatMap:
    """The heat map of some runs; a later run's verdict on a case goes before an earlier one's."""
    return heatmap.build(_verdicts(runs), [run.name for run in runs], sorted(registry()))


def _verdicts(runs: Sequence[Path]) -> Iterable[r.Verdict]:
    for run in runs:
        yield from load_run(run).history.of(r.Verdict)


def write(heat: heatmap.HeatMap, directory: Path) -> list[Path]:
    """Write the three files; their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    contents = {
        "heatmap.json": heatmap.to_json(heat),
        "heatmap.svg": heatmap.to_svg(heat).encode(),
        "heatmap.txt": heatmap.to_text(heat).encode(),
    }
    for name, content in contents.items():
        (directory / name).write_bytes(content)
    return [directory / name for name in contents]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m suite.defects.heatmap", description=__doc__, allow_abbrev=False)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--out", type=Path, metavar="DIR")
    options = parser.parse_args(argv)
    try:
        heat = of_runs(options.runs)
    except (EvidenceError, OSError) as exc:
        sys.stderr.write(f"heatmap: {exc}\n")
        return 4
    sys.stdout.write(heatmap.to_text(heat))
    for path in write(heat, options.out or options.runs[0]):
        sys.stdout.write(f"wrote {path}\n")
    return 10 if heat.missed or any(c.state in heatmap.BAD for c in heat.cells) else 0


if __name__ == "__main__":
    sys.exit(main())
