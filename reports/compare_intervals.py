"""Intervals that comparisons rest on. Pure arithmetic on logarithms of ratios; a leaf that imports nothing of the project.

Two methods, for two kinds of data:

``median_interval`` (pairs)
    A confidence sequence for the median of paired log ratios, from signs. For a candidate median m each pair lies above or
    below it like a fair coin, whatever the distribution of latencies: heavy tails, spikes and drift of the spread cost
    nothing, only that each pair's own median is m. A mixture of bets on that coin (Beta(1/2, 1/2) prior) is a
    non-negative martingale of mean 1, so by Ville's inequality it ever passes 1/alpha with probability alpha at most:
    the interval holds at all sample sizes at once, and one may look after every pair and stop when it tells enough.
    Method: Ville (1939); Robbins, "Statistical methods related to the law of the iterated logarithm", Annals of
    Mathematical Statistics 41 (1970); for quantiles: Howard & Ramdas, "Sequential estimation of quantiles with
    applications to A/B testing and best-arm identification", Bernoulli 28 (2022). Chosen over a sequence for the mean
    because means need bounded values or many samples (empirical-Bernstein, asymptotic), and latencies have neither.

``run_interval`` (runs)
    Where sides were not interleaved a run is the unit, and there are few: Student's t on logarithms of the runs' own
    figures (Welch's degrees of freedom). It takes run figures to be about log-normal. It may be looked at again with each
    run that is added, because the error is spent: with n runs a side a look has alpha / ((n - 2)(n - 1)), which adds up
    to alpha over n = 3, 4, ... (alpha spending after Lan & DeMets, Biometrika 70 (1983), with this fixed schedule).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, lru_cache
from statistics import fmean, median, variance
from typing import NamedTuple

MINIMUM_RUNS = 3
"""Fewer runs a side say nothing of how much runs differ."""


class Interval(NamedTuple):
    """An estimate and its interval, all logarithms (natural) of a ratio; ``low`` and ``high`` may be infinite."""

    estimate: float
    low: float
    high: float

    @property
    def ratio(self) -> tuple[float, float, float]:
        """Estimate, low and high as ratios (0 and infinity where the interval has no end)."""
        return math.exp(self.estimate), math.exp(self.low), math.inf if self.high > 700 else math.exp(self.high)

    @property
    def smallest_visible(self) -> float:
        """The smallest relative difference that this much data could have shown: 0.04 is 4 %. Infinite when none.

        The longer half of the interval: an estimate further than that from 1 would have left 1 outside.
        """
        half = max(self.high - self.estimate, self.estimate - self.low)
        return math.inf if half > 700 else math.expm1(half)

    def holds(self, log_ratio: float) -> bool:
        """The value lies inside."""
        return self.low <= log_ratio <= self.high


EVERYTHING = Interval(0.0, -math.inf, math.inf)
"""No data at all."""


# Pairs --------------------------------------------------------------------------------------------------------------
@lru_cache(maxsize=1 << 16)
def log_wealth(count: int, above: int) -> float:
    """Logarithm of what the mixture of bets on a fair coin has made of 1 after ``above`` of ``count`` tosses came up."""
    beta = math.lgamma(above + 0.5) + math.lgamma(count - above + 0.5) - math.lgamma(count + 1)
    return count * math.log(2) + beta - math.log(math.pi)  # Beta(1/2, 1/2) = pi


@cache
def fewest_below(count: int, alpha: float) -> int:
    """The least number of tosses on one side that a fair coin is still believed with; 0 while nothing can be told."""
    limit = math.log(1 / alpha)
    below = 0
    while below <= count // 2 and log_wealth(count, below) >= limit:
        below += 1
    return below


def median_interval(log_ratios: Sequence[float], alpha: float = 0.05) -> Interval:
    """Confidence sequence (1 - alpha, valid at every number of pairs at once) for the median of paired log ratios.

    Ends are values of the sample, so ties only make it wider.
    """
    if not log_ratios:
        return EVERYTHING
    ordered = sorted(log_ratios)
    below = fewest_below(len(ordered), alpha)
    estimate = median(ordered)
    if below == 0:
        return Interval(estimate, -math.inf, math.inf)
    return Interval(estimate, ordered[below - 1], ordered[len(ordered) - below])


# Runs ---------------------------------------------------------------------------------------------------------------
def spent(alpha: float, runs: int) -> float:
    """The error that a look with ``runs`` runs a side (the smaller side) may make. Raises ValueError below three."""
    if runs < MINIMUM_RUNS:
        raise ValueError(f"{runs} runs a side: {MINIMUM_RUNS} are needed")
    return alpha / ((runs - 2) * (runs - 1))


def run_interval(base: Sequence[float], other: Sequence[float], alpha: float = 0.05) -> Interval:
    """Interval of log(other / base) from one logarithm a run. Fewer than three runs a side: no ends."""
    if not base or not other:
        return EVERYTHING
    estimate = fmean(other) - fmean(base)
    runs = min(len(base), len(other))
    if runs < MINIMUM_RUNS:
        return Interval(estimate, -math.inf, math.inf)
    parts = [variance(base) / len(base), variance(other) / len(other)]
    total = sum(parts)
    if total == 0:
        return Interval(estimate, estimate, estimate)
    freedom = total**2 / sum(p**2 / (len(s) - 1) for p, s in zip(parts, (base, other), strict=True))
    half = t_quantile(1 - spent(alpha, runs) / 2, freedom) * math.sqrt(total)
    return Interval(estimate, estimate - half, estimate + half)


def t_quantile(probability: float, freedom: float) -> float:
    """Quantile of Student's t, for a probability above 1/2, by bisection of its distribution function."""
    low, high = 0.0, 2.0
    while _t_below(high, freedom) < probability:
        high *= 2
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if _t_below(middle, freedom) < probability else (low, middle)
    return (low + high) / 2


def _t_below(value: float, freedom: float) -> float:
    """Distribution function of Student's t at a value above 0."""
    return 1 - _beta_part(freedom / 2, 0.5, freedom / (freedom + value * value)) / 2


def _beta_part(a: float, b: float, x: float) -> float:
    """Regularised incomplete beta function by its continued fraction (Abramowitz & Stegun 26.5.8)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):
        return 1 - _beta_part(b, a, 1 - x)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    tiny = 1e-300
    c, d = 1.0, 1 / max(1 - (a + b) * x / (a + 1), tiny)
    value = d
    for m in range(1, 500):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for step in (even, odd):
            d = 1 / (1 + step * d or tiny)
            c = 1 + step / c or tiny
            value *= c * d
        if abs(c * d - 1) < 1e-14:
            break
    return front * value / a
