"""Distributions of lengths, times and arrivals, drawn in batches from a seeded generator, and their short text form."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Literal, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from fixtures.errors import UsageError

T = TypeVar("T")

BATCH = 4096
"""Values drawn at once: drawing one by one costs more than everything else that a request takes."""

KINDS = ("constant", "uniform", "exponential", "lognormal", "gamma")
_GRAMMAR = (
    "constant:N, uniform:MIN,MAX, exponential:MEAN, lognormal:MEAN,CV or gamma:MEAN,CV; add ,min=N or ,max=N to clip"
)


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of tokens, or seconds. ``mean`` and ``cv`` (standard deviation over mean) are those before clipping."""

    kind: Literal["constant", "uniform", "exponential", "lognormal", "gamma"]
    mean: float
    cv: float = 0.0
    low: float = 0.0
    high: float = math.inf
    """Values outside low..high are moved to the nearer end, which moves the mean."""

    def draw(self, rng: np.random.Generator, count: int) -> NDArray[np.float64]:
        """``count`` values."""
        if self.kind == "constant" or self.mean == 0:
            values = np.full(count, self.mean)
        elif self.kind == "uniform":
            values = rng.uniform(self.low, self.high, count)
        elif self.kind == "exponential":
            values = rng.exponential(self.mean, count)
        elif self.kind == "lognormal":
            sigma2 = math.log1p(self.cv**2)
            values = rng.lognormal(math.log(self.mean) - sigma2 / 2, math.sqrt(sigma2), count)
        else:
            shape = 1 / self.cv**2
            values = rng.gamma(shape, self.mean / shape, count)
        return np.clip(values, self.low, self.high)

    def tokens(self, rng: np.random.Generator) -> Iterator[int]:
        """An endless stream of whole numbers, at least 1, rounded to the nearest."""
        return _stream(lambda: np.maximum(np.rint(self.draw(rng, BATCH)), 1).astype(np.int64).tolist())

    def seconds(self, rng: np.random.Generator) -> Iterator[float]:
        """An endless stream of times."""
        return _stream(lambda: self.draw(rng, BATCH).tolist())

    def __str__(self) -> str:
        if self.kind == "uniform":
            return f"uniform:{self.low:g},{self.high:g}"
        spread = f",{self.cv:g}" if self.kind in ("lognormal", "gamma") else ""
        clip = f",min={self.low:g}" * (self.low > 0) + f",max={self.high:g}" * (self.high < math.inf)
        return f"{self.kind}:{self.mean:g}{spread}{clip}"


def _stream(batch: Callable[[], list[T]]) -> Iterator[T]:
    while True:
        yield from batch()


def uniform01(rng: np.random.Generator) -> Iterator[float]:
    """An endless stream of numbers in [0, 1)."""
    return _stream(lambda: rng.random(BATCH).tolist())


def constant(value: float) -> Distribution:
    """Always ``value``."""
    return Distribution(kind="constant", mean=value)


def parse(text: str, what: str) -> Distribution:
    """A distribution from its short form, e.g. ``lognormal:800,1.5,max=4096``; a plain number is a constant.

    what: the option, for the message. Raises UsageError.
    """
    kind, _, rest = text.rpartition(":")
    kind = kind or "constant"
    arity = {"constant": 1, "uniform": 2, "exponential": 1, "lognormal": 2, "gamma": 2}.get(kind)
    words = rest.split(",")
    numbers = [_number(w, text, what) for w in words if "=" not in w]
    clips = dict(w.split("=", 1) for w in words if "=" in w)
    if arity is None or len(numbers) != arity or not clips.keys() <= {"min", "max"}:
        raise UsageError(f"{what} {text}: not a distribution; give {_GRAMMAR}")
    low = _number(clips["min"], text, what) if "min" in clips else 0.0
    high = _number(clips["max"], text, what) if "max" in clips else math.inf
    if kind == "uniform":
        low, high = max(numbers[0], low), min(numbers[1], high)
        numbers = [(low + high) / 2]
    if low > high:
        raise UsageError(f"{what} {text}: the least value {low:g} is above the greatest, {high:g}; swap them")
    cv = numbers[1] if len(numbers) > 1 else 0.0
    if kind in ("lognormal", "gamma") and (cv <= 0 or numbers[0] <= 0):
        raise UsageError(f"{what} {text}: mean and cv have to be above 0; for no spread give constant:N")
    return Distribution(kind=kind, mean=numbers[0], cv=cv, low=low, high=high)  # type: ignore[arg-type]


def _number(word: str, text: str, what: str) -> float:
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise UsageError(f"{what} {text}: {word!r} is no number of 0 or above; give {_GRAMMAR}")
    return value


class Arrivals(msgspec.Struct, frozen=True, kw_only=True):
    """When something begins: ``rate_per_s`` a second on average.

    poisson: independent arrivals. gamma: the same rate in bursts (``cv`` of the times between arrivals above 1) or smoother
    than Poisson (below 1). constant: evenly spaced.
    """

    rate_per_s: float
    kind: Literal["poisson", "gamma", "constant"] = "poisson"
    cv: float = 1.0

    def gaps_s(self, rng: np.random.Generator) -> Iterator[float]:
        """An endless stream of times between arrivals."""
        mean = 1 / self.rate_per_s
        if self.kind == "constant":
            return constant(mean).seconds(rng)
        if self.kind == "poisson":
            return Distribution(kind="exponential", mean=mean).seconds(rng)
        return Distribution(kind="gamma", mean=mean, cv=self.cv).seconds(rng)


def parse_arrivals(text: str, what: str) -> Arrivals:
    """``poisson:RATE``, ``gamma:RATE,CV`` or ``constant:RATE`` (RATE a second); a plain number is Poisson. Raises UsageError."""
    kind, _, rest = text.rpartition(":")
    kind = kind or "poisson"
    words = rest.split(",")
    if kind not in ("poisson", "gamma", "constant") or len(words) != (2 if kind == "gamma" else 1):
        raise UsageError(f"{what} {text}: not an arrival process; give poisson:RATE, gamma:RATE,CV or constant:RATE")
    numbers = [_number(w, text, what) for w in words]
    if min(numbers) <= 0:
        raise UsageError(f"{what} {text}: rate and cv have to be above 0")
    return Arrivals(kind=kind, rate_per_s=numbers[0], cv=numbers[1] if kind == "gamma" else 1.0)  # type: ignore[arg-type]
