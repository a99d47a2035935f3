"""``python -m suite.bench.export RUN [--out FILE]``: a run's samples as pytest-benchmark's JSON, for its own ``compare`` and histories.

Series of times become one benchmark each, with their values as rounds; what was decided about them is in ``extra_info``. The statistics
are made by pytest-benchmark's own class, so that its columns mean what they always mean.
"""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from pytest_benchmark import __version__ as benchmark_version
from pytest_benchmark.stats import Stats

from fixtures.errors import UsageError
from reports import records as r
from reports.compare_runs import Series, Unlike, read_run
from reports.evidence import EvidenceError, LoadedRun, load_run
from suite.workload.arguments import Parser, run_command, tell

FIELDS = (
    "min", "max", "mean", "stddev", "rounds", "median", "iqr", "q1", "q3", "iqr_outliers", "stddev_outliers",
    "outliers", "ld15iqr", "hd15iqr", "ops", "total",
)  # fmt: skip
"""Of the statistics, as pytest-benchmark 5 writes them."""


def document(run: LoadedRun) -> dict[str, Any]:
    """The whole JSON document of a run. Raises UsageError for a run without times."""
    figures = read_run(run)
    verdicts = {v.case_id: v for v in run.history.of(r.Verdict)}
    entries = [entry(s, verdicts) for s in figures.series.values() if s.unit == "s" and len(s.values) > 1]
    if not entries:
        raise UsageError(f"{run.path}: no samples of times in it; `pytest -m bench` makes some")
    started = run.history.of(r.RunStarted)
    host = started[0].host if started else {}
    wall_s = started[0].wall_s if started else 0.0
    return {
        "machine_info": {k: host.get(k, "") for k in ("machine", "system", "cpu_model", "cpus", "gpu", "kernel")}
        | {"node": "", "processor": host.get("cpu_model", ""), "python_version": host.get("python", ""), "cpu": {}},
        "commit_info": {
            "id": "",
            "time": None,
            "author_time": None,
            "dirty": False,
            "project": "kvgates",
            "branch": "",
        },
        "benchmarks": entries,
        "datetime": datetime.datetime.fromtimestamp(wall_s, datetime.UTC).isoformat(),
        "version": benchmark_version,
    }


def entry(series: Series, verdicts: dict[str, r.Verdict]) -> dict[str, Any]:
    """One benchmark."""
    stats: Any = Stats()  # type: ignore[no-untyped-call]
    for value in series.values:
        stats.update(value)
    kind, _, tokens = series.benchmark.rpartition("/")
    said = verdicts.get(f"B.ttft.t{tokens}")
    extra = {} if said is None else {"case": said.case_id, "verdict": str(said.outcome), "said": said.got}
    return {
        "group": kind.partition("/")[0],
        "name": series.benchmark,
        "fullname": f"kvgates::{series.benchmark}",
        "params": None,
        "param": None,
        "extra_info": extra,
        "options": {"disable_gc": False, "timer": "monotonic", "min_rounds": 1, "max_time": 0.0, "min_time": 0.0, "warmup": False},
        "stats": {name: getattr(stats, name) for name in FIELDS} | {"iterations": 1, "data": list(series.values)},
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Write the document. Exit code 0, or 4 for a run that has none."""
    parser = Parser(prog="python -m suite.bench.export", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: bench.json in the run's folder")
    return run_command(parser, argv, _export, EvidenceError, Unlike, OSError)


def _export(options: argparse.Namespace) -> None:
    out = options.out or options.run / "bench.json"
    content = msgspec.json.format(msgspec.json.encode(document(load_run(options.run))))
    out.write_bytes(content + b"\n")
    tell(f"wrote {out}")


if __name__ == "__main__":
    sys.exit(main())
