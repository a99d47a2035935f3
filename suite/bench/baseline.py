"""``python -m suite.bench.baseline RUN...``: a run's baseline as one small file, and the page and heat map made of it.

With ``--publish DIR`` the runs' figures go to DIR/baseline.json, DIR/heatmap.svg, and the page to docs/baseline.md. Given DIR itself instead of runs
it makes the same page again: a selftest holds that the committed page is the one that the published file gives.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import msgspec

from fixtures.errors import UsageError
from reports import records as r
from reports.evidence import EvidenceError, LoadedRun, load_run
from reports.runinfo import run_info
from suite.bench import replays
from suite.bench.replays import Cell, measured_in
from suite.bench.sweep import CONSTRAINED_BLOCKS, REQUESTS, row
from suite.workload.arguments import Parser, tell

ROOT = Path(__file__).parents[2]
FILE = "baseline.json"
PICTURE = "heatmap.svg"
PAGE = ROOT / "docs" / "baseline.md"


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One replay."""

    gate: str
    """``B.sweep`` or ``B.ladder``."""
    cell: Cell
    figures: dict[str, Any]
    """See ``suite.bench.sweep.row``."""


class Said(msgspec.Struct, frozen=True, kw_only=True):
    """One verdict."""

    case: str
    outcome: str
    finding: str
    claim: str
    got: str
    numbers: dict[str, Any]
    notes: tuple[str, ...]


class Baseline(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the page says of one or more runs."""

    date: str
    platform: str
    model: str
    host: dict[str, Any]
    versions: dict[str, str]
    block_tokens: int
    kv_bytes_per_token: int
    runs: tuple[str, ...]
    rows: tuple[Row, ...]
    verdicts: tuple[Said, ...]


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
            said |= {v.case_id: _said(v) for v in history.of(r.Verdict) if v.case_id.startswith("B.")}
    infos = [run_info(run.histories.values()) for run in runs]
    stacks = [stack for info in infos for stack in info.stacks if stack.engines]
    if not rows and not said:
        raise UsageError(f"{runs[0].path}: no benchmarks in it; `pytest -m bench` makes some")
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


# The page -----------------------------------------------------------------------------------------------------------
def page(base: Baseline, picture: str) -> str:
    """The whole page. picture: the heat map's path as seen from the page."""
    where = "CPU" if base.platform == "cpu" else base.host.get("gpu", base.platform)
    lines = [
        f"# Baseline: what a pool has to beat ({where})",
        "",
        "Made by `python -m suite.bench.baseline`; do not edit.",
        "",
    ]
    if base.platform == "cpu":
        lines += [
            f"**These are numbers of a CPU stack with a tiny model (`{base.model}`).** They show that the method works, and how hit"
            " rates behave: those are counts. Times say nothing of GPUs: a model that computes a thousand tokens in a tenth of a",
            "second on two cores has no use for a pool. On a host with GPUs the same command makes this page for them.",
            "",
        ]
    lines += [_setting(base), ""]
    lines += _sweep(base, picture) + _promises(base) + _ttft(base) + _ladder(base) + _verdicts(base) + METHOD
    return "\n".join(lines).rstrip() + "\n"


def _setting(base: Baseline) -> str:
    versions = ", ".join(f"{k} {v}" for k, v in base.versions.items())
    memory = round(float(base.host.get("memory_bytes", 0)) / 2**30)
    return (
        f"Measured {base.date} on {base.host.get('cpus')} cores ({base.host.get('cpu_model')}), {memory} GiB; {versions}; KV blocks of"
        f" {base.block_tokens} tokens, {base.kv_bytes_per_token:,} bytes a token. Runs: {', '.join(f'`{x}`' for x in base.runs)}."
    )


def _rows(base: Baseline, gate: str) -> list[Row]:
    found = [x for x in base.rows if x.gate == gate]
    return sorted(found, key=lambda x: (x.cell.engines, x.cell.share, x.cell.cache, x.cell.arm, x.cell.concurrency))


def _sweep(base: Baseline, picture: str) -> list[str]:
    rows = _rows(base, "B.sweep")
    if not rows:
        return []
    lines = [
        "## Sharing x cache x engines",
        "",
        f"Each line is one replay of {REQUESTS} requests of {replays.PROMPT_TOKENS} + {replays.OUTPUT_TOKENS} tokens; `shared` is the part of"
        f" a prompt that is one of {replays.GROUPS} system prompts. A constrained",
        f"cache holds {CONSTRAINED_BLOCKS} blocks ({CONSTRAINED_BLOCKS * base.block_tokens:,} tokens) an engine. Hit rates are parts of all prompt"
        " tokens; `possible` is what an infinite pool would give.",
        "",
        "| engines | shared | cache | stack | local hits | pool hits | possible | TTFT p50 / p90 / p99 ms | ITL p50 / p90 / p99 ms"
        " | requests/s | tokens/s out | goodput/s |",
        "|--:|--:|---|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for x in rows:
        f, c = x.figures, x.cell
        cells = [
            c.engines,
            f"{c.share} %",
            c.cache,
            c.arm,
            *(f"{f[k]:.1%}" for k in ("hit_local", "hit_external", "hit_possible")),
        ]
        cells += [
            _times(f["ttft_ms"]),
            _times(f["itl_ms"]),
            f["requests_per_s"],
            f["output_tokens_per_s"],
            f["goodput_per_s"],
        ]
        lines.append("| " + " | ".join(str(v) for v in cells) + " |")
    limit = f"Goodput counts requests with a TTFT of {replays.TTFT_LIMIT_S:g} s or less, from when they were due."
    return [*lines, "", limit, "", f"![Hit rate and TTFT by cell]({picture})", ""]


def _times(values: Sequence[float] | None) -> str:
    return "" if values is None else " / ".join(f"{v:g}" for v in values)


def _promises(base: Baseline) -> list[str]:
    found = [s for s in base.verdicts if s.case.startswith("B.promise.")]
    if not found:
        return []
    lines = ["## What the pool gives back", ""]
    for s in sorted(found, key=lambda s: s.case):
        lines.append(f"- `{s.case}`: **{s.outcome}**. {s.got[:1].upper()}{s.got[1:]}. {' '.join(s.notes)}")
    return [*lines, ""]


def _ttft(base: Baseline) -> list[str]:
    found = [s for s in base.verdicts if s.case.startswith("B.ttft.") and s.numbers.get("ttft_ms")]
    if not found:
        return []
    lines = [
        "## Time to first token by source",
        "",
        "Interleaved blocks on one engine; the pool's copy lies in another process. Ratios are medians of paired ratios with an interval",
        "that holds at every look. `visible` is the time until the store listed a prompt that was just saved.",
        "",
        "| prompt tokens | cold p50 ms | native p50 ms | pool p50 ms | pool / cold | blocks | thrown out | visible p50 / p99 ms |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for s in sorted(found, key=lambda s: int(s.case.rpartition(".t")[2])):
        n = s.numbers
        low, high = n["external_over_cold"][1:]
        ratio = f"{n['external_over_cold'][0]:.2f} [{_end(low)}, {_end(high)}]"
        visible = n.get("visible_ms") or {}
        times = [n["ttft_ms"][arm]["p50"] for arm in ("cold", "native", "external")]
        cells = [s.case.rpartition(".t")[2], *times, ratio, n["blocks"], sum(n["thrown"].values())]
        cells.append(f"{visible.get('p50', '')} / {visible.get('p99', '')}")
        lines.append("| " + " | ".join(str(v) for v in cells) + " |")
    even = [s for s in base.verdicts if s.case.startswith("B.break-even")]
    return [*lines, "", *(f"Break-even length: {s.got} ({s.outcome})." for s in even), ""]


def _end(value: float | None) -> str:
    return "-" if not value else f"{value:.2f}"


def _ladder(base: Baseline) -> list[str]:
    rows = _rows(base, "B.ladder")
    if not rows:
        return []
    lines = [
        "## Concurrency",
        "",
        "| in flight | requests/s | tokens/s out | TTFT p50 / p90 / p99 ms | ITL p50 / p90 / p99 ms | hits |",
        "|--:|--:|--:|--:|--:|--:|",
    ]
    for x in rows:
        f = x.figures
        hits = f"{f['hit_local'] + f['hit_external']:.1%}"
        cells = [
            x.cell.concurrency,
            f["requests_per_s"],
            f["output_tokens_per_s"],
            _times(f["ttft_ms"]),
            _times(f["itl_ms"]),
            hits,
        ]
        lines.append("| " + " | ".join(str(v) for v in cells) + " |")
    return [*lines, ""]


def _verdicts(base: Baseline) -> list[str]:
    lines = ["## Verdicts", "", "| case | verdict | |", "|---|---|---|"]
    for s in sorted(base.verdicts, key=lambda s: s.case):
        lines.append(f"| `{s.case}` | {s.outcome} {s.finding} | {s.got.replace('|', '/')} |")
    return [*lines, ""]


METHOD = [
    "## Method",
    "",
    "- Traffic comes from `suite.workload.sessions` with a fixed seed; every stack gets the same trace, and every replay other prompts (a",
    "  nonce), so nothing that an earlier one left behind can be a hit. Closed loop, two requests in flight an engine, round robin.",
    "- Latency counts from when a request was due. The client's own lag is recorded in each replay, and noted where it matters.",
    "- Hits by source are differences of the engines' counters. Each engine's local + external + computed must be exactly the prompt tokens that",
    "  were sent to it, and all hits together no more than the trace repeats; otherwise the case fails and its figures count for nothing.",
    "- With one engine the other one is up and idle; in a pool its memory is part of the pool.",
    "- Stacks of a sweep come up one after another: their times are not interleaved, and a difference of times between two lines is not",
    "  a finding. Hit rates are counts. Times by source (TTFT) are interleaved on one engine, in blocks there and back; the interval is a",
    "  confidence sequence for the median of paired log ratios (`reports/compare_intervals.py` has method and sources).",
    "- Again: `pytest -m bench --scope full`, then `python -m suite.bench.baseline RUN --publish reports/published/baseline-DATE`.",
]


# The heat map -------------------------------------------------------------------------------------------------------
_LEFT, _TOP, _SIDE, _ROW = 190, 70, 104, 46


def heatmap(rows: Iterable[Row]) -> str:
    """Hit rate (colour, and in percent) and TTFT p50 of each cell of the sweep, as SVG."""
    found = {(x.cell.arm, x.cell.cache, x.cell.engines, x.cell.share): x for x in rows if x.gate == "B.sweep"}
    columns = sorted({(k[2], k[3]) for k in found})
    lines = [(arm, cache) for cache in ("ample", "constrained") for arm in ("native", "pool")]
    width, height = _LEFT + _SIDE * len(columns) + 20, _TOP + _ROW * len(lines) + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        ' font-family="system-ui,sans-serif" font-size="12" fill="#263238" role="img" aria-label="Hit rate by cell">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
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


def publish(base: Baseline, folder: Path) -> list[Path]:
    """Write the baseline, its picture and its page. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE).write_bytes(msgspec.json.format(msgspec.json.encode(base)) + b"\n")
    (folder / PICTURE).write_text(heatmap(base.rows), encoding="utf-8")
    PAGE.write_text(page(base, picture_of(folder)), encoding="utf-8")
    return [folder / FILE, folder / PICTURE, PAGE]


def picture_of(folder: Path) -> str:
    """The heat map as seen from the page."""
    return f"../{folder.resolve().relative_to(ROOT)}/{PICTURE}"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the page, or publish it. Exit code 0, or 4 for bad input."""
    parser = Parser(prog="python -m suite.bench.baseline", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folders of runs, or one published baseline")
    parser.add_argument("--publish", type=Path, metavar="DIR", help="write there, e.g. reports/published/baseline-DATE")
    try:
        options = parser.parse_args(argv)
        base = load(options.runs)
        if options.publish is None:
            folder = options.runs[0] if (options.runs[0] / FILE).is_file() else ROOT
            sys.stdout.write(page(base, picture_of(folder)))
            return 0
        if not options.publish.resolve().is_relative_to(ROOT):
            raise UsageError(f"--publish {options.publish}: give a folder of the project, so that the page can show it")
        for path in publish(base, options.publish):
            tell(f"wrote {path}")
    except (UsageError, EvidenceError, OSError) as exc:
        tell(f"baseline: {exc}")
        return 4
    except SystemExit:
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
