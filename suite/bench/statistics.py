"""Samples in pairs, interleaved, and when they say enough.

Two arms, A and B, are taken in blocks A B B A (the next block B A A B, and so on): whatever drifts evenly over a block, as a
machine that warms up or a neighbour that wakes, falls on both arms alike. A block gives one number, the mean of its two
log ratios log(B / A), and the blocks give an interval of the median ratio that is valid however often one looks
(``reports.compare_intervals.median_interval``: the method and its sources). Sampling ends when the interval lies on one
side of the threshold, and at a maximum.

A ratio of medians of single requests would throw the pairing away, and with it the drift; the geometric mean of paired
ratios follows one outlier anywhere. The median over blocks of the blocks' geometric means has neither fault.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from reports.compare_intervals import Interval, fewest_below, log_wealth, median_interval

ALPHA = 0.05
"""Error of an interval at all sample sizes together."""

METHOD = "confidence sequence for the median of paired log ratios (sign martingale, Beta(1/2,1/2) mixture), 95 %"

Side = Literal["below", "above", "undecided"]

_FURTHEST = 20_000
"""Blocks beyond which nobody samples: so many more are told as "not by sampling on"."""


@dataclass(frozen=True)
class Decision:
    """What blocks say of a threshold."""

    side: Side
    """Where the ratio lies: surely ``below`` (or at) the threshold, surely ``above`` it, or ``undecided``."""
    interval: Interval
    threshold: float
    blocks: int
    needed: int | None
    """About so many blocks more would decide, if the coming ones are like those so far; 0 when decided, None when that cannot be
    foreseen (the ratio is too near the threshold)."""

    def __str__(self) -> str:
        ratio, low, high = self.interval.ratio
        text = f"{ratio:.3f} [{low:.3f}, {high:.3f}] over {self.blocks} blocks"
        if self.side != "undecided":
            return text
        more = "more blocks would hardly tell" if self.needed is None else f"about {self.needed} blocks more would tell"
        return f"{text}; undecided against {self.threshold:g}, {more}"


def decide(log_ratios: Sequence[float], threshold: float, alpha: float = ALPHA) -> Decision:
    """Where the median ratio lies. threshold: a ratio above 0."""
    if not threshold > 0:
        raise ValueError(f"threshold {threshold}: a ratio above 0")
    interval = median_interval(log_ratios, alpha)
    at = math.log(threshold)
    side: Side = "below" if interval.high < at else "above" if interval.low > at else "undecided"
    needed = 0 if side != "undecided" else blocks_needed(log_ratios, at, alpha)
    return Decision(side, interval, threshold, len(log_ratios), needed)


def blocks_needed(log_ratios: Sequence[float], at: float, alpha: float = ALPHA) -> int | None:
    """Blocks that are likely to be missing until the side is known; None for more than anybody would take.

    at: the logarithm of the threshold. The part of blocks on the leading side is taken as (s + 1/2) / (n + 1).
    """
    count = len(log_ratios)
    above = sum(x > at for x in log_ratios)
    leading = max(above, count - above)
    share = (leading + 0.5) / (count + 1) if log_ratios else 1.0
    total = count + 1
    while total <= _FURTHEST:
        if log_wealth(total, min(total, math.floor(share * total))) >= math.log(1 / alpha):
            return total - count
        total += max(1, total // 50)
    return None


def fewest_blocks(alpha: float = ALPHA) -> int:
    """Blocks that are needed at the least, all of them on one side."""
    count = 1
    while fewest_below(count, alpha) == 0:
        count += 1
    return count


def block_log_ratio(base_s: Sequence[float], other_s: Sequence[float]) -> float:
    """The number of one block: the mean of log(other) less the mean of log(base). Times in seconds, all above 0.

    Raises ValueError for a block with an empty arm or a time that is no time.
    """
    if not base_s or not other_s or min(*base_s, *other_s) <= 0:
        raise ValueError(f"a block needs times above 0 on both sides, not {list(base_s)} and {list(other_s)}")
    return sum(map(math.log, other_s)) / len(other_s) - sum(map(math.log, base_s)) / len(base_s)


def order(arms: Sequence[str], block: int) -> list[str]:
    """Arms of a block, there and back again; odd blocks begin at the other end: A B B A, then B A A B."""
    there = list(arms) if block % 2 == 0 else list(reversed(arms))
    return there + there[::-1]


@dataclass(frozen=True)
class Sampled:
    """How sampling went."""

    log_ratios: tuple[float, ...]
    decision: Decision
    taken: int
    """Blocks taken, those thrown out included."""
    stopped: Literal["decided", "maximum"]


def sample(
    take: Callable[[int], float | None],
    threshold: float,
    *,
    maximum: int,
    minimum: int = 0,
    alpha: float = ALPHA,
) -> Sampled:
    """Take blocks until they decide, or ``maximum`` were taken.

    take: takes the block of a number (from 0) and returns its log ratio, or None for a block that has to be thrown out (an arm
    was not in the state that it is to measure). Thrown-out blocks count towards the maximum: a stack that never
    reaches the state ends the sampling too. minimum: valid blocks to take even when fewer decide.
    """
    found: list[float] = []
    for number in range(maximum):
        value = take(number)
        if value is None:
            continue
        found.append(value)
        decision = decide(found, threshold, alpha)
        if decision.side != "undecided" and len(found) >= minimum:
            return Sampled(tuple(found), decision, number + 1, "decided")
    return Sampled(tuple(found), decide(found, threshold, alpha), maximum, "maximum")
