"""Tables of the results pages, each made of published runs (``reports.results``)."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from reports import records as r
from reports.cost import Cost, covered_s
from reports.scoreboard import Scoreboard, ScoreRow

VERDICTS = ("PASS", "FAIL", "INCONCLUSIVE", "UNTESTABLE", "HARNESS_ERROR")
CUT = str(r.FindingCode.INCOMPLETE_CASE)
TIMED = ("B.ttft", "B.offload")


class Published(msgspec.Struct, frozen=True, kw_only=True):
    """One published run: its folder below reports/published, its verdicts, and its cost where that was published too."""

    name: str
    board: Scoreboard
    cost: Cost | None = None

    @property
    def on_gpu(self) -> bool:
        """Its engines ran on GPUs."""
        return any(stack.platform == "cuda" for stack in self.board.run.stacks)

    @property
    def rows(self) -> list[ScoreRow]:
        """Its verdicts, but for the case inside which the run was cut: nothing is known of that one."""
        return [row for row in self.board.rows if row.verdict.finding != CUT]

    @property
    def counts(self) -> Counter[str]:
        """Verdicts by outcome; the case that was cut under ``CUT``."""
        found = Counter(str(row.verdict.outcome) for row in self.rows)
        found[CUT] = len(self.board.rows) - len(self.rows)
        return found

    @property
    def gates(self) -> bool:
        """It judged gates, not benchmarks alone."""
        return any(not row.verdict.gate.startswith("B.") for row in self.rows)

    @property
    def day(self) -> str:
        """Day it began, in UTC."""
        return time.strftime("%Y-%m-%d", time.gmtime(self.board.run.wall_s))

    def model_of(self, engine_model: str = "") -> str:
        """Names of the models served, without digests."""
        models = {e.model for stack in self.board.run.stacks for e in stack.engines}
        return ", ".join(sorted({Path(engine_model or m).name.rpartition("-")[0] or Path(m).name for m in models}))


def table(head: Sequence[str], rows: Iterable[Sequence[object]], right: Sequence[int] = ()) -> list[str]:
    """A Markdown table; columns of ``right`` are numbers. Empty without rows."""
    lines = ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in rows]
    if not lines:
        return []
    rule = "|" + "|".join("--:" if i in right else "---" for i in range(len(head))) + "|"
    return ["| " + " | ".join(head) + " |", rule, *lines]


def machine(p: Published) -> str:
    """What a run ran on."""
    host = p.board.run.host
    gpu = str(host.get("gpu") or "").rpartition(": ")[2]
    memory = f"{int(host.get('memory_bytes') or 0) / 2**30:.0f} GiB"
    return ", ".join(x for x in (gpu, f"{host.get('cpus')} cores ({host.get('cpu_model')})", memory) if x)


def versions(p: Published) -> str:
    """Releases that verdicts depend on."""
    found = p.board.run.versions
    return ", ".join(f"{name} {found[name]}" for name in ("vllm", "mooncake", "lmcache", "torch") if name in found)


def runs_table(runs: Sequence[Published]) -> list[str]:
    """One line a run."""
    rows = []
    for p in runs:
        stacks = ", ".join(sorted({s.name for s in p.board.run.stacks}))
        counts = [p.counts[verdict] or "" for verdict in (*VERDICTS, CUT)]
        rows.append((f"`{p.name}`", p.day, machine(p), versions(p), stacks, p.model_of(), *counts))
    head = ("run", "day", "machine", "releases", "stack", "models", *VERDICTS, "cut")
    return table(head, rows, right=range(6, 12))


def gates_table(runs: Sequence[Published]) -> list[str]:
    """Gates x runs: how many cases ended how."""
    gates = sorted({row.verdict.gate for p in runs for row in p.rows if not row.verdict.gate.startswith("B.")})
    rows = []
    for gate in gates:
        cells = []
        for p in runs:
            counts = Counter(str(row.verdict.outcome) for row in p.rows if row.verdict.gate == gate)
            cells.append(", ".join(f"{counts[v]} {v}" for v in VERDICTS if counts[v]) or "")
        rows.append((f"`{gate}`", *cells))
    return table(("gate", *(f"`{p.name}`" for p in runs)), rows)


def failures_table(runs: Sequence[Published]) -> list[str]:
    """Every case that did not pass, with the newest run's words and all runs that say the same."""
    seen: dict[tuple[str, str, str], tuple[ScoreRow, list[str]]] = {}
    for p in runs:
        for row in p.rows:
            v = row.verdict
            if v.outcome in (r.Outcome.FAIL, r.Outcome.INCONCLUSIVE, r.Outcome.HARNESS_ERROR):
                key = (v.case_id, str(v.outcome), v.finding)
                names = seen[key][1] if key in seen else []
                seen[key] = (row, [*names, p.name])
    rows = [
        (f"`{case}`", outcome, f"`{finding}`", row.verdict.got, ", ".join(f"`{n}`" for n in names))
        for (case, outcome, finding), (row, names) in sorted(seen.items())
    ]
    return table(("case", "verdict", "finding", "got", "runs"), rows)


def source_of(p: Published, row: ScoreRow) -> str:
    """Where the third arm's prompts lie, and what brings them: by the gate, and by the connectors that the run's engines had."""
    through = any(e.connector.startswith("lmcache") for stack in p.board.run.stacks for e in stack.engines)
    if row.verdict.gate == "B.ttft":
        return "pool through LMCache" if through else "pool"
    return "LMCache" if through else "host memory"


def timing_rows(runs: Sequence[Published]) -> list[tuple[Published, ScoreRow]]:
    """TTFT cases that measured something; of one case, model and source the newest."""
    found: dict[tuple[str, str, str], tuple[Published, ScoreRow]] = {}
    for p in runs:
        for row in p.rows:
            if row.verdict.gate in TIMED and row.verdict.numbers.get("ttft_ms"):
                found[(p.model_of(), source_of(p, row), row.verdict.case_id)] = (p, row)
    order = {gate: i for i, gate in enumerate(TIMED)}
    return sorted(
        found.values(), key=lambda x: (order[x[1].verdict.gate], x[0].model_of(), source_of(*x), tokens_of(x[1]))
    )


def tokens_of(row: ScoreRow) -> int:
    return int(row.verdict.case_id.rpartition(".t")[2])


def timing_table(runs: Sequence[Published]) -> list[str]:
    """TTFT by source: medians in milliseconds, and the ratio that is judged."""
    rows = []
    for p, row in timing_rows(runs):
        n = row.verdict.numbers
        ms = {arm: spread["p50"] for arm, spread in n["ttft_ms"].items()}
        rows.append(
            (
                p.model_of(), f"{tokens_of(row):,}", source_of(p, row), ms["cold"], ms["native"], ms["external"],
                interval(n["external_over_cold"]), n["blocks"], sum(n["thrown"].values()), str(row.verdict.outcome), f"`{p.name}`",
            )
        )  # fmt: skip
    head = (
        "model", "prompt tokens", "third arm", "cold p50 ms", "native p50 ms", "third arm p50 ms", "third arm / cold",
        "blocks", "thrown out", "verdict", "run",
    )  # fmt: skip
    return table(head, rows, right=(1, 3, 4, 5, 6, 7, 8))


def interval(values: Sequence[float | None]) -> str:
    """``0.52 [0.50, 0.55]``; an end without bound is a dash."""
    ratio, low, high = ("-" if x is None else f"{x:.2f}" for x in values)
    return f"{ratio} [{low}, {high}]"


def break_even_table(runs: Sequence[Published]) -> list[str]:
    """From which length reading beats computing: the longest length that is surely slower, the shortest that is surely faster."""
    groups: dict[tuple[str, str], list[tuple[int, float, float]]] = {}
    for p, row in timing_rows(runs):
        _, low, high = row.verdict.numbers["external_over_cold"]
        ends = (0.0 if low is None else low, math.inf if high is None else high)
        groups.setdefault((p.model_of(), source_of(p, row)), []).append((tokens_of(row), *ends))
    rows = []
    for (model, source), found in groups.items():
        slower = [tokens for tokens, low, _ in found if low > 1]
        faster = [tokens for tokens, _, high in found if high < 1]
        measured = ", ".join(f"{tokens:,}" for tokens, _, _ in found)
        rows.append(
            (
                model,
                source,
                measured,
                f"{max(slower):,}" if slower else "none",
                f"{min(faster):,}" if faster else "none",
            )
        )
    return table(("model", "third arm", "lengths measured", "longest surely slower", "shortest surely faster"), rows)


def ladder_table(runs: Sequence[Published]) -> list[str]:
    """Throughput and latency at each rung of concurrency."""
    rows: list[tuple[Any, ...]] = []
    for p in runs:
        for row in p.rows:
            if row.verdict.gate != "B.ladder":
                continue
            for cell, n in row.verdict.numbers.items():
                ttft = " / ".join(f"{x:g}" for x in n["ttft_ms"])
                hits = f"{n['hit_local'] + n['hit_external']:.1%}"
                in_flight = cell.rpartition("/c")[2]
                rows.append((p.model_of(), in_flight, n["requests_per_s"], n["output_tokens_per_s"], ttft, hits, n["failed"], f"`{p.name}`"))  # fmt: skip
    head = ("model", "in flight", "requests/s", "tokens/s out", "TTFT p50 / p90 / p99 ms", "hits", "failed", "run")
    return table(head, rows, right=(1, 2, 3, 5, 6))


def cost_table(runs: Sequence[Published]) -> list[str]:
    """Where the time went."""
    rows = []
    for p in runs:
        c = p.cost
        if c is None:
            continue
        verdicts = sum(p.counts[v] for v in VERDICTS if v != "UNTESTABLE")
        each = c.cases_s / len(c.cases) if c.cases else 0.0
        rows.append(
            (f"`{p.name}`", verdicts, c.stacks, f"{c.wall_s / 60:.1f}", f"{c.gpu_minutes(c.start_s):.1f}", f"{c.gpu_minutes(c.cases_s):.1f}", f"{each:.1f}")
        )  # fmt: skip
    head = ("run", "verdicts", "stacks", "minutes", "GPU-minutes starting stacks", "GPU-minutes in cases", "s a case")
    return table(head, rows, right=range(1, 7))


def together_table(runs: Sequence[Published]) -> list[str]:
    """What the gates of each session of runs cost together, stacks' starts included: runs that overlap count once."""
    sessions: dict[str, list[Published]] = {}
    for p in runs:
        if p.cost is not None and p.gates:
            sessions.setdefault(p.name.partition("/")[0], []).append(p)
    rows = []
    for name, found in sessions.items():
        costs = [p.cost for p in found if p.cost is not None]
        minutes = covered_s(span for c in costs for span in c.spans) / 60
        verdicts = sum(p.counts[v] for p in found for v in VERDICTS if v != "UNTESTABLE")
        gpus = max(c.gpus for c in costs)
        alone = sum(c.wall_s for c in costs) / 60
        rows.append((f"`{name}`", len(found), verdicts, f"{alone:.1f}", f"{minutes:.1f}", f"{minutes * gpus:.1f}"))
    head = (
        "session",
        "runs of gates",
        "verdicts",
        "minutes one after the other",
        "minutes as run",
        "GPU-minutes as run",
    )
    return table(head, rows, right=range(1, 6))


def dearest_table(runs: Sequence[Published]) -> list[str]:
    """Gates by the time that their cases took (the newest run of a case)."""
    newest: dict[str, tuple[str, float]] = {}
    for p in runs:
        gates = {row.verdict.case_id: row.verdict.gate for row in p.board.rows}
        for case, seconds in (p.cost.cases if p.cost else {}).items():
            newest[case] = (gates.get(case, case), seconds)
    sums: dict[str, list[float]] = {}
    for gate, seconds in newest.values():
        if not gate.startswith("B."):
            sums.setdefault(gate, []).append(seconds)
    rows = [
        (f"`{gate}`", len(found), f"{sum(found) / 60:.1f}", f"{sum(found) / len(found):.1f}")
        for gate, found in sorted(sums.items(), key=lambda item: -sum(item[1]))
    ]
    if rows:
        total = sum(sum(found) for found in sums.values())
        rows.append(("all", sum(len(found) for found in sums.values()), f"{total / 60:.1f}", ""))
    return table(("gate", "cases", "minutes", "s a case"), rows, right=(1, 2, 3))
