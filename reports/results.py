"""``python -m reports.results``: docs/report.md and docs/results-brief.md, made of what lies in reports/published.

``python -m reports.results --publish RUN --into reports/published/NAME/PART`` judges a run's evidence with this version and puts its
verdicts, its report and its cost there. Nothing in the pages is typed by hand: a selftest compares them with this output.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from reports import closures
from reports import records as r
from reports import results_tables as tables
from reports.cost import Cost, cost_of
from reports.evidence import EvidenceError, load_run
from reports.judge import judge_run, known_gates
from reports.redact import Redactor
from reports.render import json
from reports.render.files import write_all
from reports.results_releases import column_of, release_order, releases
from reports.results_tables import (
    VERDICTS,
    Published,
    interval,
    machine,
    source_of,
    table,
    timing_rows,
    tokens_of,
    versions,
)
from reports.runinfo import run_info
from reports.scoreboard import ScoreRow

ROOT = Path(__file__).resolve().parents[1]
PUBLISHED = ROOT / "reports" / "published"
REPORT = ROOT / "docs" / "report.md"
BRIEF = ROOT / "docs" / "results-brief.md"
COST_FILE = "cost.json"
MADE = "Made by `python -m reports.results` from `reports/published/`; do not edit."


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


def by_kind(runs: Sequence[Published]) -> dict[str, list[Published]]:
    """What is told apart on the pages: kinds of place, and the connector that is other code. (A case that fails through LMCache says
    nothing of vLLM's own connector.) GPU and CPU are there even where nothing is."""
    found: dict[str, list[Published]] = {"GPU": [], "CPU": []}
    for p in runs:
        found.setdefault(p.kind + (", through LMCache" if p.lmcache else ""), []).append(p)
    return {title: found[title] for title in sorted(found, key=lambda title: (not title.startswith("GPU"), title))}


# Pages ----------------------------------------------------------------------------------------------------------------
def section(title: str, runs: Sequence[Published]) -> list[str]:
    """One kind of machine: runs, verdicts, times, cost."""
    parts: list[tuple[str, str, list[str]]] = [
        ("Runs", "", tables.runs_table(runs)),
        ("Verdicts by gate", "", tables.gates_table([p for p in runs if p.gates])),
        ("What did not pass", "", tables.failures_table(runs)),
        ("Which settings close which hole", "Situations that were judged with upstream's defaults and failed, in each pair of vLLM and Mooncake.", _closures(runs)),
        ("Time to first token", "Interleaved blocks on one engine (`suite.bench.ttft`, `suite.bench.offload`). Models named `shape-...` have no weights. Ratios are medians of paired ratios, with an interval that holds at every look.", tables.timing_table(runs)),
        ("Break-even length", "", tables.break_even_table(runs)),
        ("Concurrency", "Prompts of 1,024 tokens, 90 % of each a shared system prompt; the client's own limits are in `docs/baseline.md`.", tables.ladder_table(runs)),
        ("Cost of the verdicts", "Minutes of a run that shared its GPU with others at the same time count in full here.", tables.cost_table(runs)),
        ("Cost of the gates of a session", "Stacks of tiny models share one GPU: several runs at once cost hardly more than one.", tables.together_table(runs)),
        ("Cost by gate", "", tables.dearest_table(runs)),
    ]  # fmt: skip
    lines = [f"## {title}", ""]
    for heading, words, body in parts:
        if body:
            lines += [f"### {heading}", "", *([words, ""] if words else []), *body, ""]
    return lines


def _closures(runs: Sequence[Published]) -> list[str]:
    """A row for each situation and release; the newest verdict of a case counts."""
    releases_of: dict[str, list[Published]] = {}
    for p in sorted(runs, key=lambda p: (release_order(column_of(p)), p.board.run.wall_s)):
        releases_of.setdefault(versions(p), []).append(p)
    rows = [
        (pair, *hole.row())
        for pair, found in releases_of.items()
        for hole in closures.holes(row.verdict for p in found for row in p.rows)
    ]
    return table(("releases", *closures.HEADS), sorted(rows, key=lambda row: (row[1], row[0]))) if rows else []


def report(runs: Sequence[Published]) -> str:
    """docs/report.md."""
    lines = ["# Results", "", MADE, ""]
    for title, found in by_kind(runs).items():
        lines += section(title, found) if found else [f"## {title}", "", "Nothing published.", ""]
    lines += releases(runs)
    return "\n".join(lines).rstrip() + "\n"


def brief(runs: Sequence[Published]) -> str:
    """docs/results-brief.md: what a reader has time for."""
    lines = ["# Results in brief", "", f"{MADE} The whole is in [report.md](report.md).", ""]
    for title, found in by_kind(runs).items():
        if not found:
            continue
        in_order = sorted(found, key=lambda p: (release_order(column_of(p)), p.board.run.wall_s))
        newest: dict[str, r.Verdict] = {row.verdict.case_id: row.verdict for p in in_order for row in p.rows}
        counts = Counter(str(v.outcome) for v in newest.values())
        days = sorted({p.day for p in found})
        lines += [f"## {title}", ""]
        lines.append(
            f"{' and '.join(sorted({machine(p) for p in found}))}; {' and '.join(sorted({versions(p) for p in found}))}; {days[0]}"
            + (f" to {days[-1]}" if len(days) > 1 else "")
            + f". {len(newest)} cases, the newest verdict of each in the newest release that ran it: "
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
        groups.setdefault((p.model_of(), source_of(p, row)), []).append((p, row))
    rows = []
    for (model, source), found in groups.items():
        for _, row in found[:1] + found[1:][-1:]:
            n = row.verdict.numbers
            ms = n["ttft_ms"]
            rows.append(
                (model, f"{tokens_of(row):,}", source, ms["cold"]["p50"], ms["external"]["p50"], interval(n["external_over_cold"]))
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
    write_all(board, into, redactor, with_html=False)
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
