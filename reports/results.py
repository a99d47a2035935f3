"""``python -m reports.results``: docs/report.md and docs/results-brief.md, made of what lies in reports/published.

``python -m reports.results --publish RUN --into reports/published/NAME/PART`` judges a run's evidence with this version and puts its
verdicts, its report and its cost there. Nothing in the pages is typed by hand: a selftest compares them with this output.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from reports import records as r
from reports.cost import Cost, cost_of, covered_s
from reports.evidence import EvidenceError, load_run
from reports.judge import judge_run, known_gates
from reports.redact import Redactor
from reports.render import json, markdown
from reports.runinfo import run_info
from reports.scoreboard import Scoreboard, ScoreRow

ROOT = Path(__file__).resolve().parents[1]
PUBLISHED = ROOT / "reports" / "published"
REPORT = ROOT / "docs" / "report.md"
BRIEF = ROOT / "docs" / "results-brief.md"
COST_FILE = "cost.json"
MADE = "Made by `python -m reports.results` from `reports/published/`; do not edit."

VERDICTS = ("PASS", "FAIL", "INCONCLUSIVE", "UNTESTABLE", "HARNESS_ERROR")
CUT = str(r.FindingCode.INCOMPLETE_CASE)
TIMED = ("B.ttft", "B.offload")
SOURCE = {"B.ttft": "pool", "B.offload": "host memory"}
"""Gate -> where its third arm's prompts lie."""


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


def published(folder: Path = PUBLISHED) -> list[Published]:
    """Every published run, oldest first. Raises ValueError for a file that is none."""
    found = []
    for path in folder.glob(f"**/{json.FILE_NAME}"):
        cost = path.with_name(COST_FILE)
        found.append(
            Published(
                name=path.parent.relative_to(folder).as_posix(),
                board=json.load(path),
                cost=msgspec.json.decode(cost.read_bytes(), type=Cost) if cost.is_file() else None,
            )
        )
    return sorted(found, key=lambda p: (p.board.run.wall_s, p.name))


# Tables ---------------------------------------------------------------------------------------------------------------
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
    return ", ".join(f"{name} {found[name]}" for name in ("vllm", "mooncake", "torch") if name in found)


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


def timing_rows(runs: Sequence[Published]) -> list[tuple[Published, ScoreRow]]:
    """TTFT cases that measured something; of one case, model and stack the newest."""
    found: dict[tuple[str, str], tuple[Published, ScoreRow]] = {}
    for p in runs:
        for row in p.rows:
            if row.verdict.gate in TIMED and row.verdict.numbers.get("ttft_ms"):
                found[(p.model_of(), row.verdict.case_id)] = (p, row)
    order = {gate: i for i, gate in enumerate(TIMED)}
    return sorted(found.values(), key=lambda x: (order[x[1].verdict.gate], x[0].model_of(), _tokens(x[1])))


def _tokens(row: ScoreRow) -> int:
    return int(row.verdict.case_id.rpartition(".t")[2])


def timing_table(runs: Sequence[Published]) -> list[str]:
    """TTFT by source: medians in milliseconds, and the ratio that is judged."""
    rows = []
    for p, row in timing_rows(runs):
        n = row.verdict.numbers
        ms = {arm: spread["p50"] for arm, spread in n["ttft_ms"].items()}
        rows.append(
            (
                p.model_of(), f"{_tokens(row):,}", SOURCE[row.verdict.gate], ms["cold"], ms["native"], ms["external"],
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
        groups.setdefault((p.model_of(), SOURCE[row.verdict.gate]), []).append((_tokens(row), *ends))
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


# Pages ----------------------------------------------------------------------------------------------------------------
def section(title: str, runs: Sequence[Published]) -> list[str]:
    """One kind of machine: runs, verdicts, times, cost."""
    parts: list[tuple[str, str, list[str]]] = [
        ("Runs", "", runs_table(runs)),
        ("Verdicts by gate", "", gates_table([p for p in runs if p.gates])),
        ("What did not pass", "", failures_table(runs)),
        ("Time to first token", "Interleaved blocks on one engine (`suite.bench.ttft`, `suite.bench.offload`). Models named `shape-...` have no weights. Ratios are medians of paired ratios, with an interval that holds at every look.", timing_table(runs)),
        ("Break-even length", "", break_even_table(runs)),
        ("Concurrency", "Prompts of 1,024 tokens, 90 % of each a shared system prompt; the client's own limits are in `docs/baseline.md`.", ladder_table(runs)),
        ("Cost of the verdicts", "Minutes of a run that shared its GPU with others at the same time count in full here.", cost_table(runs)),
        ("Cost of the gates of a session", "Stacks of tiny models share one GPU: several runs at once cost hardly more than one.", together_table(runs)),
        ("Cost by gate", "", dearest_table(runs)),
    ]  # fmt: skip
    lines = [f"## {title}", ""]
    for heading, words, body in parts:
        if body:
            lines += [f"### {heading}", "", *([words, ""] if words else []), *body, ""]
    return lines


def report(runs: Sequence[Published]) -> str:
    """docs/report.md."""
    lines = ["# Results", "", MADE, ""]
    for title, found in (("GPU", [p for p in runs if p.on_gpu]), ("CPU", [p for p in runs if not p.on_gpu])):
        lines += section(title, found) if found else [f"## {title}", "", "Nothing published.", ""]
    return "\n".join(lines).rstrip() + "\n"


def brief(runs: Sequence[Published]) -> str:
    """docs/results-brief.md: what a reader has time for."""
    lines = ["# Results in brief", "", f"{MADE} The whole is in [report.md](report.md).", ""]
    for title, found in (("GPU", [p for p in runs if p.on_gpu]), ("CPU", [p for p in runs if not p.on_gpu])):
        if not found:
            continue
        newest: dict[str, r.Verdict] = {row.verdict.case_id: row.verdict for p in found for row in p.rows}
        counts = Counter(str(v.outcome) for v in newest.values())
        days = sorted({p.day for p in found})
        lines += [f"## {title}", ""]
        lines.append(
            f"{' and '.join(sorted({machine(p) for p in found}))}; {' and '.join(sorted({versions(p) for p in found}))}; {days[0]}"
            + (f" to {days[-1]}" if len(days) > 1 else "")
            + f". {len(newest)} cases, the newest verdict of each: "
            + ", ".join(f"{counts[v]} {v}" for v in VERDICTS if counts[v])
            + "."
        )
        lines += ["", *_findings(newest.values()), *_short_timing(found)]
    return "\n".join(lines).rstrip() + "\n"


def _findings(verdicts: Iterable[r.Verdict]) -> list[str]:
    """Findings of failed cases, most frequent first."""
    cases: dict[str, list[str]] = {}
    for v in verdicts:
        if v.outcome is r.Outcome.FAIL:
            cases.setdefault(v.finding, []).append(v.case_id)
    rows = [
        (
            f"`{finding}`",
            len(found),
            ", ".join(f"`{c}`" for c in sorted(found)[:4]) + (", ..." if len(found) > 4 else ""),
        )
        for finding, found in sorted(cases.items(), key=lambda item: (-len(item[1]), item[0]))
    ]
    return [*table(("finding", "failed cases", "which"), rows, right=(1,)), ""] if rows else []


def _short_timing(runs: Sequence[Published]) -> list[str]:
    """TTFT at the longest and the shortest prompt of each model and source."""
    groups: dict[tuple[str, str], list[tuple[Published, ScoreRow]]] = {}
    for p, row in timing_rows(runs):
        groups.setdefault((p.model_of(), row.verdict.gate), []).append((p, row))
    rows = []
    for (model, gate), found in groups.items():
        for _, row in found[:1] + found[1:][-1:]:
            n = row.verdict.numbers
            ms = n["ttft_ms"]
            rows.append(
                (model, f"{_tokens(row):,}", SOURCE[gate], ms["cold"]["p50"], ms["external"]["p50"], interval(n["external_over_cold"]))
            )  # fmt: skip
    head = ("model", "prompt tokens", "from", "cold TTFT p50 ms", "from there p50 ms", "ratio")
    return [*table(head, rows, right=(1, 3, 4, 5)), ""] if rows else []


def publish(run_dir: Path, into: Path) -> None:
    """Judge a run and put verdicts, report and cost into a folder. Raises EvidenceError, OSError."""
    run = load_run(run_dir)
    gates = known_gates()
    board = judge_run(run, gates).scoreboard(gates, run_info(run.histories.values()))
    redactor = Redactor.of(run.histories.values(), str(run_dir))
    into.mkdir(parents=True, exist_ok=True)
    (into / json.FILE_NAME).write_text(json.render(board, redactor), encoding="utf-8")
    (into / "report.md").write_text(markdown.render(board, redactor), encoding="utf-8")
    text = msgspec.json.format(msgspec.json.encode(cost_of(run)), indent=1).decode()
    (into / COST_FILE).write_text(text + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, or 4 for bad input."""
    parser = argparse.ArgumentParser(prog="python -m reports.results", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--publish", type=Path, metavar="RUN", help="a finished run to judge and publish first")
    parser.add_argument("--into", type=Path, metavar="DIR", help="folder below reports/published for it")
    given = parser.parse_args(argv)
    if (given.publish is None) != (given.into is None):
        sys.stderr.write("results: --publish and --into go together\n")
        return 4
    try:
        if given.publish is not None:
            publish(given.publish, given.into)
        runs = published()
        REPORT.write_text(report(runs), encoding="utf-8")
        BRIEF.write_text(brief(runs), encoding="utf-8")
    except (EvidenceError, OSError, ValueError) as exc:
        sys.stderr.write(f"results: {exc}\n")
        return 4
    return 0


if __name__ == "__main__":
    sys.exit(main())
