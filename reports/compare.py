"""``python -m reports compare BASE OTHER...``: run against run, stack against stack, release against release.

Each side is at least three runs; the first is the base, every other one is compared with it. Where the sides' samples were taken
in turns (``python -m suite.bench.interleave``) they are compared block by block, else run by run; ``reports.compare_intervals``
has both methods and their sources. A benchmark is

PASS          when it is surely no more than its tolerance worse (thresholds: ``reports/compare.toml``),
FAIL          when it is surely worse than that,
INCONCLUSIVE  when the interval reaches to both sides, there are fewer than three runs a side, or it vanished.

Exit code: 0 all PASS, 10 any FAIL, 11 any INCONCLUSIVE, 4 runs that cannot be compared: other hardware, model, stack or versions are
refused unless ``--allow`` says that they are the point.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from reports import records as r
from reports.compare_intervals import MINIMUM_RUNS, Interval, median_interval, run_interval
from reports.compare_runs import KINDS, Series, Side, Unlike, differences, load_side
from reports.compare_thresholds import DEFAULT_FILE, Thresholds, load_thresholds
from reports.records import Outcome

EXIT = {Outcome.PASS: 0, Outcome.FAIL: 10, Outcome.INCONCLUSIVE: 11}

PAIRS = "pairs"
RUNS = "runs"


class Row(r.Part, frozen=True, kw_only=True):
    """One benchmark of two sides. Ratios are other / base."""

    benchmark: str
    unit: str
    better: str
    outcome: Outcome
    said: str
    """The verdict in words."""
    base: float | None = None
    other: float | None = None
    ratio: tuple[float, float, float] | None = None
    """Estimate, low, high; 0 and infinity where the interval has no end."""
    smallest_visible: float | None = None
    tolerance: float = 0.0
    method: str = ""
    """``pairs`` or ``runs``."""
    count: int = 0
    """Pairs, or runs of the smaller side."""


class Comparison(r.Part, frozen=True, kw_only=True):
    """Two sides."""

    base: str
    other: str
    rows: tuple[Row, ...]
    vanished: tuple[str, ...]
    new: tuple[str, ...]
    allowed: tuple[str, ...]
    """Differences that were told to be the point."""
    order: str
    """Which side each run was of, by time of start."""
    notes: tuple[str, ...] = ()

    @property
    def interleaved(self) -> bool:
        """Runs of the sides alternate: neither side came wholly before the other."""
        return "AB" in self.order and "BA" in self.order

    @property
    def outcome(self) -> Outcome:
        """FAIL before INCONCLUSIVE before PASS; a benchmark that vanished leaves the comparison open."""
        outcomes = {row.outcome for row in self.rows}
        if Outcome.FAIL in outcomes:
            return Outcome.FAIL
        if Outcome.INCONCLUSIVE in outcomes or self.vanished or not self.rows:
            return Outcome.INCONCLUSIVE
        return Outcome.PASS


def compare(base: Side, other: Side, thresholds: Thresholds, allow: Sequence[str] = ()) -> Comparison:
    """Compare two sides. Raises Unlike when they differ in what was not allowed, or have no benchmark in common."""
    allowed: list[str] = []
    for kind in KINDS:
        found = differences(base.runs[0], other.runs[0], kind)
        if found and kind not in allow:
            more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
            raise Unlike(
                f"{base.name} and {other.name} differ in {kind}: {found[0]}{more}; if that is the point: --allow {kind}"
            )
        allowed += [f"{kind}: {line}" for line in found]
    common = [name for name in base.benchmarks if name in other.benchmarks]
    if not common:
        raise Unlike(f"{base.name} and {other.name} have no benchmark in common")
    times = sorted([(run.wall_s, "A") for run in base.runs] + [(run.wall_s, "B") for run in other.runs])
    left_out = [f"{run.name}: {text}" for side in (base, other) for run in side.runs for text in run.left_out]
    return Comparison(
        base=base.name,
        other=other.name,
        rows=tuple(compare_series(base.series(n), other.series(n), thresholds.of(n).tolerance) for n in common),
        vanished=tuple(n for n in base.benchmarks if n not in other.benchmarks),
        new=tuple(n for n in other.benchmarks if n not in base.benchmarks),
        allowed=tuple(allowed),
        order="".join(side for _, side in times),
        notes=tuple(f"left out: {text}" for text in left_out),
    )


def compare_series(base: Sequence[Series], other: Sequence[Series], tolerance: float) -> Row:
    """One benchmark: the series of each side's runs."""
    first = base[0]
    figures = [s.figure for s in base], [s.figure for s in other]
    interval, method, count = _interval(base, other, figures)
    runs = min(len(base), len(other))
    if first.unit != other[0].unit or first.better != other[0].better:
        outcome, said = Outcome.INCONCLUSIVE, "unit or direction changed: another benchmark under the same name"
    elif runs < MINIMUM_RUNS:
        outcome, said = Outcome.INCONCLUSIVE, f"{runs} runs on one side; {MINIMUM_RUNS} are needed on each"
    elif interval is None:
        outcome, said = _without_ratio(figures)
    else:
        outcome, said = _verdict(interval, first.better, tolerance)
    return Row(
        benchmark=first.benchmark,
        unit=first.unit,
        better=first.better,
        outcome=outcome,
        said=said,
        base=median(figures[0]),
        other=median(figures[1]),
        ratio=interval.ratio if interval else None,
        smallest_visible=interval.smallest_visible if interval else None,
        tolerance=tolerance,
        method=method,
        count=count,
    )


def _interval(
    base: Sequence[Series], other: Sequence[Series], figures: tuple[list[float], list[float]]
) -> tuple[Interval | None, str, int]:
    one = {k: v for s in base for k, v in s.by_block().items()}
    two = {k: v for s in other for k, v in s.by_block().items()}
    pairs = [math.log(two[k] / one[k]) for k in one if k in two and one[k] > 0 and two[k] > 0]
    every = all(s.interleaved for s in (*base, *other))
    distinct = len(one) == sum(len(s.values) for s in base) and len(two) == sum(len(s.values) for s in other)
    if every and distinct and pairs:
        return median_interval(pairs), PAIRS, len(pairs)
    if min(*figures[0], *figures[1]) <= 0:
        return None, RUNS, min(map(len, figures))
    logs = [[math.log(v) for v in side] for side in figures]
    return run_interval(logs[0], logs[1]), RUNS, min(map(len, figures))


def _without_ratio(figures: tuple[list[float], list[float]]) -> tuple[Outcome, str]:
    """Figures of 0 (a hit rate without hits) have no ratio."""
    if set(figures[0]) == set(figures[1]) == {0.0}:
        return Outcome.PASS, "0 on both sides"
    return Outcome.INCONCLUSIVE, "a figure of 0 on one side: there is no ratio"


def _verdict(interval: Interval, better: str, tolerance: float) -> tuple[Outcome, str]:
    """worse: the interval turned so that above 0 is worse."""
    worse = interval if better == "lower" else Interval(-interval.estimate, -interval.high, -interval.low)
    limit = math.log1p(tolerance)
    if worse.low > limit:
        return Outcome.FAIL, f"worse by {math.expm1(worse.estimate):.1%}, surely by more than {tolerance:.0%}"
    if worse.holds(0.0):
        visible = interval.smallest_visible
        said = "no difference seen" + ("" if math.isinf(visible) else f" (from {visible:.1%} on it would have been)")
    else:
        kind = "worse" if worse.estimate > 0 else "better"
        said = f"{kind} by {abs(math.expm1(worse.estimate)):.1%}"
    if worse.high < limit:
        return Outcome.PASS, said
    return Outcome.INCONCLUSIVE, f"{said}; a loss of {tolerance:.0%} cannot be ruled out: more runs"


# Command line -------------------------------------------------------------------------------------------------------
def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add ``compare`` to the commands of ``python -m reports``."""
    command = commands.add_parser(
        "compare", help="benchmarks of runs against runs; at least three a side", allow_abbrev=False
    )
    command.add_argument(
        "sides",
        nargs="+",
        metavar="SIDE",
        help="folder of a run, of several runs, or folders with commas; the first is the base",
    )
    command.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="KIND",
        help=f"a difference that is the point: {', '.join(KINDS)}",
    )
    command.add_argument("--thresholds", metavar="FILE", help=f"TOML (default: reports/{DEFAULT_FILE.name})")
    for name, what in (("markdown", "for a pull request"), ("html", "one page"), ("svg", "the intervals as a picture")):
        command.add_argument(f"--{name}", metavar="FILE", help=f"write it there: {what}")
    return command


def run_command(options: argparse.Namespace) -> tuple[list[Comparison], int]:
    """Compare as asked. Raises Unlike, ThresholdError or EvidenceError; the exit code is that of the worst side."""
    if len(options.sides) < 2:
        raise Unlike("compare: give two sides or more; the first is the base")
    allow = [kind for text in options.allow for kind in text.split(",")]
    for kind in allow:
        if kind not in KINDS:
            raise Unlike(f"--allow {kind}: one of {', '.join(KINDS)}")
    thresholds = load_thresholds(Path(options.thresholds) if options.thresholds else DEFAULT_FILE)
    sides = [load_side(text) for text in options.sides]
    names = [side.name for side in sides]
    if len(set(names)) < len(names):
        sides = [Side(name=text, runs=side.runs) for text, side in zip(options.sides, sides, strict=True)]
    if options.thresholds and (unused := thresholds.unused([b for side in sides for b in side.benchmarks])):
        raise Unlike(f"--thresholds {options.thresholds}: [{unused[0]}] matches no benchmark of these runs")
    found = [compare(sides[0], side, thresholds, allow) for side in sides[1:]]
    outcomes = {c.outcome for c in found}
    worst = next(o for o in (Outcome.FAIL, Outcome.INCONCLUSIVE, Outcome.PASS) if o in outcomes)
    return found, EXIT[worst]
