"""The sampler's intervals and decisions, by simulation with seeds and by what can be worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from reports.compare_intervals import (
    Interval,
    fewest_below,
    log_wealth,
    median_interval,
    run_interval,
    spent,
    t_quantile,
)
from suite.bench import statistics as st

pytestmark = pytest.mark.selftest

LOOKS = 300
"""Blocks of a simulated sampling; it is looked at after each."""


def _ever_excludes(below: NDArray[np.bool_], alpha: float) -> NDArray[np.bool_]:
    """For each row of signs: whether an interval ever leaves the true median out, at any of its sizes."""
    counts = np.cumsum(below, axis=1)
    sizes = np.arange(1, below.shape[1] + 1)
    fewest = np.array([fewest_below(int(n), alpha) for n in sizes])
    return np.asarray(((counts < fewest) | (sizes - counts < fewest)).any(axis=1))


@pytest.mark.parametrize("kind", ["normal", "heavy tails", "skewed", "spread that changes"])
def test_the_interval_holds_at_every_size_at_once(kind: str) -> None:
    rng = np.random.default_rng(7)
    shape = (4000, LOOKS)
    noise = {
        "normal": lambda: rng.normal(size=shape),
        "heavy tails": lambda: rng.standard_cauchy(size=shape),
        "skewed": lambda: rng.exponential(size=shape) - math.log(2),
        "spread that changes": lambda: rng.normal(size=shape) * np.linspace(0.1, 10, LOOKS),
    }[kind]()
    missed = _ever_excludes(noise < 0, st.ALPHA).mean()
    assert missed <= st.ALPHA, f"{missed:.3f} of samplings lose the true median at some size"


def test_an_interval_for_one_look_does_not_hold_under_repeated_looks() -> None:
    """What the sampler would be with the usual 95 % sign interval: the simulation above can go red."""
    rng = np.random.default_rng(7)
    counts = np.cumsum(rng.random((1000, LOOKS)) < 0.5, axis=1)
    sizes = np.arange(1, LOOKS + 1)
    outside = np.abs(counts - sizes / 2) > 1.96 * np.sqrt(sizes) / 2
    assert outside[:, 9:].any(axis=1).mean() > 3 * st.ALPHA


def test_the_interval_is_where_the_wealth_stays_small() -> None:
    values = [math.sin(i * 7.7) for i in range(40)]
    found = median_interval(values)
    for candidate in np.linspace(-1.2, 1.2, 400):
        below = sum(v < candidate for v in values)
        believed = log_wealth(40, below) < math.log(1 / st.ALPHA)
        assert believed == (found.low < candidate <= found.high)


def test_wealth_is_a_fair_bet() -> None:
    for count in (1, 2, 7, 30):
        mean = sum(math.comb(count, k) * 0.5**count * math.exp(log_wealth(count, k)) for k in range(count + 1))
        assert mean == pytest.approx(1)


def test_so_few_blocks_can_decide_and_not_fewer() -> None:
    assert st.fewest_blocks() == 7
    assert st.decide([0.5] * 6, 1.0).side == "undecided"
    assert st.decide([0.5] * 7, 1.0).side == "above"
    assert st.decide([-0.5] * 7, 1.0).side == "below"


def _blocks(rng: np.random.Generator, slower: float, noise: float = 0.05, drift: float = 0.002) -> list[float]:
    """Log ratios of simulated ABBA blocks on a machine that gets slower all the time."""
    found = []
    for block in range(400):
        times: dict[str, list[float]] = {"a": [], "b": []}
        for place, arm in enumerate(st.order(("a", "b"), block)):
            level = 0.1 * math.exp(drift * (4 * block + place) + noise * rng.standard_t(3))
            times[arm].append(level * (1 + slower) if arm == "b" else level)
        found.append(st.block_log_ratio(times["a"], times["b"]))
    return found


def test_a_planted_slow_down_of_ten_percent_is_found_and_none_is_found_in_a_a() -> None:
    rng = np.random.default_rng(3)
    sides: dict[float, list[str]] = {0.1: [], 0.0: []}
    for slower, found in sides.items():
        for _ in range(40):
            values = iter(_blocks(rng, slower))
            sampled = st.sample(lambda _: next(values), 1.05, maximum=400)  # noqa: B023 - called at once
            found.append(sampled.decision.side)
            assert sampled.stopped == "decided"
    assert sides[0.1].count("above") >= 38
    assert sides[0.0].count("below") >= 38


def test_blocks_there_and_back_take_even_drift_away() -> None:
    """Without interleaving the same drift looks like a difference."""
    times = [1.0 * 1.01**place for place in range(4)]
    arms = dict(zip(range(4), st.order(("a", "b"), 0), strict=True))
    a = [t for p, t in enumerate(times) if arms[p] == "a"]
    b = [t for p, t in enumerate(times) if arms[p] == "b"]
    assert st.block_log_ratio(a, b) == pytest.approx(0, abs=1e-12)
    assert st.block_log_ratio(times[:2], times[2:]) > 0.01


def test_blocks_that_were_thrown_out_end_the_sampling_too() -> None:
    sampled = st.sample(lambda _: None, 1.0, maximum=9)
    assert (sampled.taken, sampled.log_ratios, sampled.stopped) == (9, (), "maximum")
    assert sampled.decision.side == "undecided"


def test_a_minimum_is_taken_even_when_fewer_decide() -> None:
    assert st.sample(lambda _: 0.3, 1.0, maximum=50, minimum=20).taken == 20


def test_it_says_how_many_blocks_are_missing() -> None:
    clear = st.decide([0.2, 0.3, 0.25], 1.0)
    assert clear.needed is not None
    assert 4 <= clear.needed <= 16
    even = st.decide([0.1, -0.1] * 30, 1.0)
    assert even.needed is None
    assert "hardly" in str(even)
    assert st.decide([0.5] * 20, 1.0).needed == 0


@pytest.mark.parametrize("share", [0.7, 0.85])
def test_the_number_of_missing_blocks_is_about_right(share: float) -> None:
    rng = np.random.default_rng(11)
    ratios = [1.0 if rng.random() < share else -1.0 for _ in range(2000)]
    size = next(n for n in range(7, 2000) if st.decide(ratios[:n], 1.0).side == "above")
    early = st.decide([1.0] * round(30 * share) + [-1.0] * (30 - round(30 * share)), 1.0)
    assert early.needed is not None
    assert size / 4 <= 30 + early.needed <= size * 4 + 40


def test_bad_blocks_and_thresholds_are_refused() -> None:
    with pytest.raises(ValueError, match="times above 0"):
        st.block_log_ratio([0.1, 0.0], [0.1])
    with pytest.raises(ValueError, match="times above 0"):
        st.block_log_ratio([], [0.1])
    with pytest.raises(ValueError, match="above 0"):
        st.decide([], 0)


def test_the_smallest_visible_difference_is_the_longer_half() -> None:
    assert Interval(0.0, -math.log(1.1), math.log(1.04)).smallest_visible == pytest.approx(0.1)
    assert median_interval([0.1] * 3).smallest_visible == math.inf


# Runs
@pytest.mark.parametrize(
    ("probability", "freedom", "value"),
    [(0.975, 4, 2.7764), (0.975, 2, 4.3027), (0.995, 10, 3.1693), (0.95, 30, 1.6973), (0.9995, 3, 12.924)],
)
def test_quantiles_of_t_are_those_of_the_tables(probability: float, freedom: float, value: float) -> None:
    assert t_quantile(probability, freedom) == pytest.approx(value, rel=1e-4)


def test_looks_with_more_and_more_runs_spend_no_more_than_alpha() -> None:
    total = sum(spent(0.05, n) for n in range(3, 5000))
    assert 0.049 < total <= 0.05
    with pytest.raises(ValueError, match="3 are needed"):
        spent(0.05, 2)


def test_runs_cover_under_repeated_looks() -> None:
    rng = np.random.default_rng(5)
    missed = 0
    for _ in range(200):
        base, other = rng.normal(size=9).tolist(), rng.normal(size=9).tolist()
        missed += any(not run_interval(base[:n], other[:n]).holds(0.0) for n in range(3, 10))
    assert missed / 200 <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / 200)


def test_two_runs_a_side_have_no_interval() -> None:
    found = run_interval([0.0, 0.1], [0.5, 0.6])
    assert found.estimate == pytest.approx(0.5)
    assert (found.low, found.high) == (-math.inf, math.inf)
    assert run_interval([], [1.0]) == Interval(0.0, -math.inf, math.inf)
