"""``python -m suite.bench.baseline RUN...``: a run's baseline as one small file, and the page and heat map made of it.

With ``--publish DIR`` the runs' figures go to DIR/baseline.json, DIR/heatmap.svg, and the page to docs/baseline.md. Given DIR itself instead of runs
it makes the same page again: a selftest holds that the committed page is the one that the published file gives.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

import msgspec

from fixtures.errors import UsageError
from reports import records as r
from reports.compare import compare
from reports.compare_runs import Unlike, load_side
from reports.compare_thresholds import DEFAULT_FILE, load_thresholds
from reports.evidence import EvidenceError, LoadedRun, load_run
from reports.judge import judge_run, known_gates
from reports.render.svg import picture_head
from reports.runinfo import run_info
from suite.bench.baseline_page import Baseline, Row, Said, Told, page
from suite.bench.replays import Cell, measured_in
from suite.bench.sweep import row
from suite.workload.arguments import Parser, run_command, tell

ROOT = Path(__file__).parents[2]
FILE = "baseline.json"
PICTURE = "heatmap.svg"
PAGE = ROOT / "docs" / "baseline.md"


def baseline_of(runs: Sequence[LoadedRun]) -> Baseline:
    """The figures of runs; a later run's replace an earlier one's. Raises UsageError for runs without benchmarks."""
    rows: dict[tuple[str, Cell], Row] = {}
    said: dict[str, Said] = {}
    for run in runs:
        for history in run.histories.values():
            for case in history.case_ids():
                view = history.for_case(case)
                gate = view.case.gate
                rows |= {(gate, m.cell): Row(gate=gate, cell=m.cell, figures=row(m)) for m in measured_in(view.records)}
        # Judged now, not as recorded: the page says what this version makes of the evidence.
        judgement = judge_run(run, known_gates())
        verdicts = [*(case.now for case in judgement.cases), *judgement.carried]
        said |= {v.case_id: _said(v) for v in verdicts if v.case_id.startswith("B.")}
    infos = [run_info(run.histories.values()) for run in runs]
    stacks = [stack for info in infos for stack in info.stacks if stack.engines]
    if not rows and not said:
        raise UsageError(f"{runs[0].path}: no benchmarks in it; `pytest -m bench` makes some")
    if not stacks:
        raise UsageError(f"{runs[0].path}: no stack came up in it; there are no figures to show")
    engine = stacks[0].engines[0]
    return Baseline(
        date=time.strftime("%Y-%m-%d", time.gmtime(infos[0].wall_s)),
        platform=stacks[0].platform,
        model=Path(engine.model).name,
        host={k: v for k, v in infos[0].host.items() if k in ("cpu_model", "cpus", "memory_bytes", "gpu", "kernel")},
        versions=infos[0].versions,
        block_tokens=engine.block_tokens,
        kv_bytes_per_token=engine.kv_bytes_per_token,
        runs=tuple(info.run_id for info in infos),
        rows=tuple(rows.values()),
        verdicts=tuple(said.values()),
    )


def _said(verdict: r.Verdict) -> Said:
    return Said(
        case=verdict.case_id,
        outcome=str(verdict.outcome),
        finding=verdict.finding,
        claim=verdict.claim,
        got=verdict.got,
        numbers={} if verdict.gate in ("B.sweep", "B.ladder") else verdict.numbers,
        notes=verdict.notes,
    )


# The heat map -------------------------------------------------------------------------------------------------------
_LEFT, _TOP, _SIDE, _ROW = 190, 70, 104, 46


def heatmap(rows: Iterable[Row]) -> str:
    """Hit rate (colour, and in percent) and TTFT p50 of each cell of the sweep, as SVG."""
    found = {(x.cell.arm, x.cell.cache, x.cell.engines, x.cell.share): x for x in rows if x.gate == "B.sweep"}
    columns = sorted({(k[2], k[3]) for k in found})
    lines = [(arm, cache) for cache in ("ample", "constrained") for arm in ("native", "pool")]
    width, height = _LEFT + _SIDE * len(columns) + 20, _TOP + _ROW * len(lines) + 40
    parts = [
        picture_head(width, height, "Hit rate by cell"),
        '<text x="12" y="22" font-size="15" font-weight="600">Hit rate (local + pool) and TTFT p50</text>',
    ]
    for i, (engines, share) in enumerate(columns):
        x = _LEFT + i * _SIDE + _SIDE / 2
        parts.append(f'<text x="{x}" y="{_TOP - 26}" text-anchor="middle">{engines} engine{"s" * (engines > 1)}</text>')
        parts.append(f'<text x="{x}" y="{_TOP - 10}" text-anchor="middle">{share} % shared</text>')
    for j, (arm, cache) in enumerate(lines):
        y = _TOP + j * _ROW
        parts.append(
            f'<text x="{_LEFT - 10}" y="{y + 27}" text-anchor="end">{escape(arm)}, {escape(cache)} cache</text>'
        )
        for i, (engines, share) in enumerate(columns):
            parts += _tile(found.get((arm, cache, engines, share)), _LEFT + i * _SIDE, y)
    return "".join([*parts, "</svg>"]) + "\n"


def _tile(x: Row | None, left: float, top: float) -> list[str]:
    box = f'x="{left}" y="{top}" width="{_SIDE - 3}" height="{_ROW - 3}"'
    if x is None:
        return [
            f'<rect {box} fill="none" stroke="#cfd8dc"/><text x="{left + 8}" y="{top + 26}" fill="#90a4ae">not run</text>'
        ]
    f = x.figures
    rate = f["hit_local"] + f["hit_external"]
    dark = rate > 0.45
    colour = "#{:02x}{:02x}{:02x}".format(*(round(a + (b - a) * rate) for a, b in ((236, 0), (239, 105), (241, 92))))
    ink = "#ffffff" if dark else "#263238"
    title = escape(
        f"{x.cell.name}: local {f['hit_local']:.1%}, pool {f['hit_external']:.1%}, possible {f['hit_possible']:.1%}"
    )
    middle = left + (_SIDE - 3) / 2
    return [
        f'<g fill="{ink}" text-anchor="middle"><title>{title}</title><rect {box} fill="{colour}"/>',
        f'<text x="{middle}" y="{top + 19}" font-weight="600">{rate:.0%}</text>',
        f'<text x="{middle}" y="{top + 35}">{f["ttft_ms"][0]:.0f} ms</text></g>',
    ]


# Command line -------------------------------------------------------------------------------------------------------
def load(paths: Sequence[Path]) -> Baseline:
    """A published baseline, or that of runs. Raises UsageError and EvidenceError."""
    if len(paths) == 1 and (paths[0] / FILE).is_file():
        try:
            return msgspec.json.decode((paths[0] / FILE).read_bytes(), type=Baseline)
        except msgspec.DecodeError as exc:
            raise UsageError(f"{paths[0] / FILE}: not a baseline: {exc}") from exc
    return baseline_of([load_run(p) for p in paths])


def told_apart(folder: Path) -> list[Told]:
    """What comparing the interleaved runs of a folder says. Raises UsageError where there is nothing to compare."""
    try:
        found = compare(load_side(str(folder / "A")), load_side(str(folder / "B")), load_thresholds(DEFAULT_FILE))
    except Unlike as exc:
        raise UsageError(f"--pairs {folder}: {exc}") from exc
    delays = {
        float(x.options.get("delay_s", 0.0)) for x in load_run(next((folder / "B").iterdir())).history.of(r.RunStarted)
    }
    label = "nothing (A/A)" if delays == {0.0} else f"{max(delays) * 1000:.1f} ms a request"
    return [
        Told(
            label=label,
            benchmark=x.benchmark,
            outcome=str(x.outcome),
            said=x.said,
            ratio=(round(x.ratio[0], 4), round(x.ratio[1], 4), round(x.ratio[2], 4)),
            pairs=x.count,
        )
        for x in found.rows
        if x.ratio
    ]


def publish(base: Baseline, folder: Path) -> list[Path]:
    """Write the baseline, its picture and its page. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE).write_bytes(msgspec.json.format(msgspec.json.encode(base)) + b"\n")
    swept = any(x.gate == "B.sweep" for x in base.rows)
    if swept:
        (folder / PICTURE).write_text(heatmap(base.rows), encoding="utf-8")
    PAGE.write_text(page(base, picture_of(folder)), encoding="utf-8")
    return [folder / FILE, *([folder / PICTURE] if swept else []), PAGE]


def picture_of(folder: Path) -> str:
    """The heat map as seen from the page."""
    return os.path.relpath(folder.resolve() / PICTURE, PAGE.parent)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the page, or publish it. Exit code 0, or 4 for bad input."""
    parser = Parser(prog="python -m suite.bench.baseline", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folders of runs, or one published baseline")
    parser.add_argument(
        "--pairs",
        action="append",
        default=[],
        type=Path,
        metavar="DIR",
        help="folder with A and B of suite.bench.interleave",
    )
    parser.add_argument("--publish", type=Path, metavar="DIR", help="write there, e.g. reports/published/baseline-DATE")
    return run_command(parser, argv, _run, EvidenceError, OSError)


def _run(options: argparse.Namespace) -> None:
    base = load(options.runs)
    if options.pairs:
        told = tuple(t for folder in options.pairs for t in told_apart(folder))
        base = msgspec.structs.replace(base, told_apart=told)
    if options.publish is None:
        sys.stdout.write(page(base, picture_of(options.runs[0])))
        return
    if not options.publish.resolve().is_relative_to(ROOT):
        raise UsageError(f"--publish {options.publish}: give a folder of the project, so that the page can show it")
    for path in publish(base, options.publish):
        tell(f"wrote {path}")


if __name__ == "__main__":
    sys.exit(main())
