"""The baseline's page: what it holds (``Baseline``), and its Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from suite.bench import replays
from suite.bench.replays import Cell
from suite.bench.sweep import CONSTRAINED_BLOCKS, REQUESTS


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


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """One comparison of interleaved runs."""

    label: str
    benchmark: str
    outcome: str
    said: str
    ratio: tuple[float, float, float]
    pairs: int


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
    told_apart: tuple[Told, ...] = ()


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
            " rates behave: those are counts. Times of",
            "a tiny model say nothing of GPUs. On a host with GPUs the same command makes this page for them.",
            "",
        ]
    lines += [_setting(base), ""]
    lines += (
        _sweep(base, picture)
        + _promises(base)
        + _ttft(base)
        + _ladder(base)
        + _told_apart(base)
        + _verdicts(base)
        + METHOD
    )
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
        return ["## Sharing x cache x engines", "", "Not run.", ""]
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
        "that holds at every look. `visible` is the time from the end of an answer until the store listed its prompt.",
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


def _told_apart(base: Baseline) -> list[str]:
    if not base.told_apart:
        return []
    lines = [
        "## What this machine tells apart",
        "",
        "Requests of two sides in turns, in blocks, through a proxy each (`python -m suite.bench.interleave`): the same engine on both, and again with",
        "side B's proxy holding each request up for a known part of the median TTFT. Verdicts are those of `python -m reports compare`.",
        "",
        "| planted | benchmark | other / base [95 %] | pairs | verdict |",
        "|---|---|--:|--:|---|",
    ]
    for t in base.told_apart:
        ratio = "{:.3f} [{:.3f}, {:.3f}]".format(*t.ratio)
        lines.append(f"| {t.label} | `{t.benchmark}` | {ratio} | {t.pairs} | {t.outcome}: {t.said} |")
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
    "  were sent to it, and all hits together no more than the trace repeats; otherwise the case fails and no promise is judged by its figures.",
    "- Lines of one engine: the other one is up and idle; in a pool its memory is part of the pool.",
    "- Stacks of a sweep come up one after another: their times are not interleaved, and a difference of times between two lines is not",
    "  a finding. Hit rates are counts. Times by source (TTFT) are interleaved on one engine, in blocks there and back; the interval is a",
    "  confidence sequence for the median of paired log ratios (`reports/compare_intervals.py` has method and sources).",
    "- Again: `pytest -m bench --scope full`, then `python -m suite.bench.baseline RUN --publish reports/published/baseline-DATE`.",
]
