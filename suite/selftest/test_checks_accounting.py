"""Conservation and three-source agreement, against good and bad counters."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from suite.checks.conservation import check_conservation
from suite.checks.sources import DEGRADED, check_sources
from suite.selftest.samples import codes, delta, observation

pytestmark = pytest.mark.selftest

Changes = dict[str, float]


@st.composite
def accounted(draw: st.DrawFn) -> tuple[list[tuple[int, int, int]], dict[str, float]]:
    """Requests as (prompt, local, external) tokens, with counters summed one by one."""
    requests = []
    total = [0, 0, 0]
    for _ in range(draw(st.integers(1, 6))):
        n = draw(st.integers(1, 200))
        local = draw(st.integers(0, n - 1))
        external = draw(st.integers(0, n - 1 - local))
        requests.append((n, local, external))
        total = [a + b for a, b in zip(total, (n, local, external), strict=True)]
    return requests, delta(*total)


@given(accounted(), st.sampled_from(["", ".local", ".external", ".computed"]), st.sampled_from([-7, -1, 1, 7]))
@settings(max_examples=150, deadline=None)
def test_sums_pass_and_every_single_miscount_is_found(
    case: tuple[list[tuple[int, int, int]], dict[str, float]], part: str, error: int
) -> None:
    sizes, counters = case
    requests = [
        observation(f"q{i}", range(n), cached_tokens=local + external) for i, (n, local, external) in enumerate(sizes)
    ]
    assert check_conservation(requests, counters, kv_bytes_per_token=10) == []
    assert check_sources(requests, counters, kv_bytes_per_token=10) == []
    wrong = dict(counters)
    wrong[f"prompt_tokens{part}"] += error
    assert check_conservation(requests, wrong, kv_bytes_per_token=10) != []


GOOD = delta(100, local=32, external=64)


@pytest.mark.parametrize(
    ("request_changes", "counter_changes"),
    [
        ({}, {"prompt_tokens__computed": 5}),
        ({}, {"prompt_tokens": 132, "prompt_tokens__computed": 36}),  # adds up, but nobody sent 132 tokens
        ({}, {"prompt_tokens__local": 0, "prompt_tokens__computed": 36}),  # adds up, the response says otherwise
        ({}, {"store__load_get__ok__bytes": 0}),
        ({}, {"store__load_get__ok__bytes": 650}),
        ({"usage_prompt_tokens": 99}, {}),
        ({"cached_tokens": 100}, {}),
        ({"cached_tokens": -1}, {}),
    ],
)
def test_broken_conservation(request_changes: dict[str, Any], counter_changes: Changes) -> None:
    request = observation(**{"cached_tokens": 96, **request_changes})
    found = check_conservation(request, delta(100, 32, 64, **counter_changes), kv_bytes_per_token=10)
    assert set(codes(found)) == {"conservation"}
    assert found[0].evidence["first_request"] == "q1"


def test_bytes_may_differ_where_loads_were_made_to_fail() -> None:
    request = observation(cached_tokens=96)
    short = delta(100, 32, 64, store__load_get__ok__bytes=0)
    assert check_conservation(request, short, kv_bytes_per_token=10, degraded=True) == []
    assert check_conservation(request, short, kv_bytes_per_token=0) == []
    assert codes(check_conservation(request, {**short, "prompt_tokens.local": 0.0}, degraded=True)) != []


def test_unanswered_requests_widen_the_sum_and_do_not_spoil_it() -> None:
    ok, lost = observation("q1", cached_tokens=0), observation("q2", http_status=None, error="reset")
    for prompt, expected in ((100, []), (200, []), (99, ["conservation"]), (201, ["conservation"])):
        assert codes(check_conservation([ok, lost], delta(prompt))) == expected


@pytest.mark.parametrize("check", [check_conservation, check_sources])
def test_nothing_to_sum_is_never_a_pass(check: Callable[..., Any]) -> None:
    few = ["too-few-observations"]
    assert codes(check([], GOOD, kv_bytes_per_token=10)) == few
    assert codes(check(observation(http_status=500), GOOD, kv_bytes_per_token=10)) == few
    assert codes(check(observation(), None, kv_bytes_per_token=10)) == few
    with pytest.raises(KeyError, match="prompt_tokens"):
        check(observation(cached_tokens=96), {}, kv_bytes_per_token=10)


def test_counters_of_two_lives_are_not_summed() -> None:
    backwards = delta(100, 32, 64, prompt_tokens__local=-5)
    assert codes(check_conservation(observation(), backwards)) == ["too-few-observations"]


def test_a_missing_store_counter_is_not_zero() -> None:
    bare = {k: v for k, v in GOOD.items() if not k.startswith("store.")}
    with pytest.raises(KeyError, match="no store counters"):
        check_conservation(observation(cached_tokens=96), bare, kv_bytes_per_token=10)
    assert check_conservation(observation(cached_tokens=96), bare) == []


# Sources ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cached", "changes"),
    [
        (32, {}),  # the response knows nothing of external tokens
        (96, {"external_hits_tokens": 128}),
        (96, {"prompt_tokens__external": 0}),
        (96, {"store__load_get__ok__bytes": 0}),  # a claimed hit that moved nothing
        (96, {"store__load_get__partial_failure__ops": 1}),  # bytes right, yet a load failed
        (96, {"store__load_get__timed_out__ops": 1}),  # the same, under a status that no known release has
    ],
)
def test_disagreeing_sources(cached: int, changes: Changes) -> None:
    found = check_sources(observation(cached_tokens=cached), delta(100, 32, 64, **changes), kv_bytes_per_token=10)
    assert codes(found) == ["source-disagreement"]
    assert {"response", "counters", "hits", "bytes"} <= set(found[0].evidence)


def test_what_a_failed_load_may_bend() -> None:
    """Measured after a dead owner: twelve lookups booked as hits, bytes under another status."""
    bent = delta(
        100, 32, 64, external_hits_tokens=768, store__load_get__ok__bytes=0, store__load_get__partial_failure__ops=12
    )
    request = observation(cached_tokens=96)
    assert codes(check_sources(request, bent, kv_bytes_per_token=10)) == ["source-disagreement"] * 2
    assert check_sources(request, bent, kv_bytes_per_token=10, may_differ=DEGRADED) == []
    lying = observation(cached_tokens=32)
    assert codes(check_sources(lying, bent, kv_bytes_per_token=10, may_differ=DEGRADED)) == ["source-disagreement"]


def test_one_source_alone_agrees_with_nobody() -> None:
    silent = observation(cached_tokens=None)
    found = check_sources(silent, GOOD, kv_bytes_per_token=0, may_differ={"hits"})
    assert codes(found) == ["too-few-observations"]
