"""The answer oracle: properties against a brute-force comparison, and right and wrong answers made by hand."""

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reports import records as r
from suite.checks.answers import (
    Difference,
    Floor,
    check_sensitivity,
    cold_floor,
    compare,
    judge_cold,
    judge_external_vs_native,
    native_floor,
    step_difference,
)
from suite.selftest.samples import Top, answer, codes

pytestmark = pytest.mark.selftest

STEP: Top = ((1, -0.1), (2, -2.5), (3, -4.0))


def shifted(top: Top, nat: float) -> Top:
    """The second entry moved by ``nat``."""
    return (top[0], (top[1][0], top[1][1] + nat), *top[2:])


def native(name: str = "n", tokens: tuple[int, ...] = (1, 1, 1), **changes: Any) -> r.Observation:
    return answer(name, tokens, [STEP] * len(tokens), **changes)


def wrong_by(nat: float, name: str = "x", step: int = 1) -> r.Observation:
    tops = [STEP] * 3
    tops[step] = shifted(STEP, nat)
    return answer(name, (1, 1, 1), tops)


def parted(a_margin: float, name: str = "x") -> r.Observation:
    """Prefers token 2 by ``a_margin`` at step 1."""
    return answer(name, (1, 2, 1), [STEP, ((2, -0.7), (1, -0.7 - a_margin), (3, -4.0)), STEP])


ZERO = Floor(kind="native", max_nat=0.0, pairs=4, steps=12)

# Comparison ---------------------------------------------------------------------------------------------------------


def test_equal_answers_differ_by_nothing() -> None:
    d = compare(native("a"), native("b"))
    assert (d.parted, d.max_nat, d.steps, d.problem) == (False, 0.0, 3, "")


def test_one_log_probability_is_enough() -> None:
    d = compare(native("a"), wrong_by(1e-6))
    assert d.max_nat == pytest.approx(1e-6)
    assert (d.max_step, d.parted) == (1, False)


def test_steps_behind_the_parting_are_not_compared() -> None:
    other = answer("b", (1, 2, 1), [STEP, ((2, -0.7), (1, -0.8), (3, -4.0)), shifted(STEP, 2.0)])
    d = compare(native("a"), other)
    assert (d.first_step, d.a_token, d.b_token, d.steps) == (1, 1, 2, 2)
    assert d.max_nat == pytest.approx(1.8)  # token 2: -2.5 against -0.7; the 2.0 of step 2 does not count
    assert d.margin_nat == pytest.approx(2.4)  # a preferred its token by 2.4, b only by 0.1


def test_an_id_missing_on_one_side_is_bounded_from_below() -> None:
    assert step_difference(((1, -0.1), (2, -2.5)), ((1, -0.1), (9, -5.0))) == pytest.approx(2.5)
    assert step_difference(((1, -0.1), (2, -5.0)), ((1, -0.1), (9, -5.0))) == 0.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_log_probabilities_that_are_no_numbers_are_a_corrupt_answer(bad: float) -> None:
    broken = answer("b", (1, 1, 1), [STEP, ((1, bad), (2, -2.5)), STEP])
    d = compare(native("a"), broken)
    assert d.corrupt
    assert "step 1" in d.problem
    assert codes(judge_external_vs_native([(broken, native())], ZERO)) == ["wrong-answer"]
    chosen = answer("b", (1, 1, 1), [STEP] * 3, token_logprobs=(-0.1, bad, -0.1))
    assert compare(chosen, native("a")).corrupt


@pytest.mark.parametrize(
    "other",
    [
        answer("b", (1, 1, 1), []),
        answer("b", (1, 1, 1), [STEP, (), STEP]),
        answer("b", (1, 1, 1), [STEP, STEP]),
        answer("b", (), []),
        native("b", http_status=500),
        native("b", timed_out=True),
    ],
)
def test_what_cannot_be_compared_is_never_equal(other: r.Observation) -> None:
    assert compare(native("a"), other).problem
    assert compare(other, native("a")).problem
    assert codes(judge_external_vs_native([(other, native())], ZERO)) == ["too-few-observations"]
    assert native_floor([(other, native())]).pairs == 0


def test_an_answer_cut_short_is_a_difference() -> None:
    d = compare(native("a"), native("b", tokens=(1, 1)))
    assert (d.first_step, d.a_token, d.b_token, d.margin_nat) == (2, 1, None, None)


def test_without_log_probabilities_tokens_alone_are_compared() -> None:
    assert not compare(answer("a", (1, 2), []), answer("b", (1, 2), []), logprobs=False).problem
    assert compare(answer("a", (1, 2), []), answer("b", (1, 3), []), logprobs=False).first_step == 1


def test_answers_to_different_prompts_are_not_compared() -> None:
    with pytest.raises(ValueError, match="different prompts"):
        compare(native("a"), native("b", prompt=(5, 6)))


@st.composite
def full_answers(draw: st.DrawFn) -> tuple[list[dict[int, float]], list[dict[int, float]]]:
    """Full distributions over six ids (distinct values, on a grid) for two sides."""
    values = st.permutations([-0.25, -0.5, -1.0, -2.0, -4.0, -8.0])
    steps = draw(st.integers(1, 4))
    return tuple(  # type: ignore[return-value]
        [dict(enumerate(draw(values))) for _ in range(steps)] for _side in range(2)
    )


@given(full_answers(), st.integers(1, 6))
@settings(max_examples=150, deadline=None)
def test_the_comparison_never_claims_more_than_the_full_distributions_show(
    sides: tuple[list[dict[int, float]], list[dict[int, float]]], k: int
) -> None:
    """Brute force sees all six ids; the oracle only the best k. Its claim is a lower bound, exact when k is all."""

    def ranked(dist: dict[int, float]) -> Top:
        return tuple(sorted(dist.items(), key=lambda item: -item[1])[:k])

    a, b = (
        answer(name, [max(d, key=d.__getitem__) for d in side], [ranked(d) for d in side])
        for name, side in zip("ab", sides, strict=True)
    )
    truth = 0.0
    first = None
    for step, (da, db) in enumerate(zip(*sides, strict=True)):
        truth = max(truth, *(abs(da[t] - db[t]) for t in da))
        if a.output_token_ids[step] != b.output_token_ids[step]:
            first = step
            break
    d, back = compare(a, b), compare(b, a)
    assert d.first_step == first
    assert d.max_nat <= truth
    if k == 6:
        assert d.max_nat == truth
    if truth > 0 and k == 6:
        assert codes(judge_external_vs_native([(a, b)], ZERO)) == ["wrong-answer"]
    assert (back.max_nat, back.first_step, back.margin_nat) == (d.max_nat, d.first_step, d.margin_nat)


# Floors -------------------------------------------------------------------------------------------------------------


def test_floors_are_the_largest_differences_with_their_sample_sizes() -> None:
    floor = native_floor([(native("a"), wrong_by(0.02)), (native("b"), wrong_by(-0.05, "y")), (native("c"), native())])
    assert floor.max_nat == pytest.approx(0.05)
    assert (floor.kind, floor.pairs, floor.steps, floor.parted) == ("native", 3, 9, 0)
    both = floor.merged(native_floor([(native("d"), wrong_by(0.3, "z"))]))
    assert both.max_nat == pytest.approx(0.3)
    assert both.pairs == 4


def test_floors_of_two_kinds_or_of_one_answer_are_refused() -> None:
    with pytest.raises(ValueError, match="not one sample"):
        ZERO.merged(cold_floor([]))
    with pytest.raises(ValueError, match="with itself"):
        native_floor([(native("a"), native("a"))])
    with pytest.raises(ValueError, match="native floor belongs"):
        judge_external_vs_native([(native("a"), native())], cold_floor([]))


@pytest.mark.parametrize("floor", [None, native_floor([]), native_floor([(native("a"), native("b", http_status=500))])])
def test_without_a_floor_there_is_no_verdict(floor: Floor | None) -> None:
    assert codes(judge_external_vs_native([(native("a"), native())], floor)) == ["too-few-observations"]


def test_without_pairs_there_is_no_verdict() -> None:
    assert codes(judge_external_vs_native([], ZERO)) == ["too-few-observations"]
    assert codes(judge_cold([], Floor("cold", 0.1, 3, 9)).findings) == ["too-few-observations"]


# Verdicts -----------------------------------------------------------------------------------------------------------


def test_external_equal_to_native_passes() -> None:
    assert judge_external_vs_native([(native("e"), native())], ZERO) == []
    loose = Floor("native", 0.05, 4, 12)
    assert judge_external_vs_native([(wrong_by(0.05), native())], loose) == []


@pytest.mark.parametrize(
    "external", [wrong_by(0.051), parted(0.001), native("x", tokens=(1, 1)), native("x", tokens=(1, 1, 3))]
)
def test_any_excess_over_the_native_floor_is_wrong(external: r.Observation) -> None:
    """Also tokens that part at a margin of 0.001 nat: there is no escape by margin."""
    found = judge_external_vs_native([(native("e"), native()), (external, native())], Floor("native", 0.05, 4, 12))
    assert codes(found) == ["wrong-answer"]
    assert (found[0].evidence["a"], found[0].evidence["b"]) == ("x", "n")


def test_tokens_may_part_only_as_native_answers_did() -> None:
    base = answer("n", (1, 1, 1), [STEP, ((1, -0.7), (2, -0.71), (3, -4.0)), STEP])
    other = answer("m", (1, 2, 1), [STEP, ((2, -0.7), (1, -0.71), (3, -4.0)), STEP])
    floor = native_floor([(base, other)])
    assert floor.parted == 1
    assert judge_external_vs_native([(other, base)], floor) == []
    further = answer("x", (1, 2, 1), [STEP, ((2, -0.7), (1, -0.715), (3, -4.0)), STEP])
    assert codes(judge_external_vs_native([(further, base)], floor)) == ["wrong-answer"]


def test_cold_numerics_are_a_note_and_no_finding() -> None:
    floor = Floor("cold", 0.4, 10, 80)
    base = answer("n", (1, 1, 1), [STEP, ((1, -0.6), (2, -0.8), (3, -4.0)), STEP])
    near = answer("x", (1, 2, 1), [STEP, ((2, -0.7), (1, -0.9), (3, -4.0)), STEP])
    judged = judge_cold([(near, base)], floor)
    assert judged.findings == []
    assert len(judged.notes) == 1
    assert "numerics" in judged.notes[0]


@pytest.mark.parametrize("bad", [wrong_by(0.5), parted(0.5), native("x", tokens=(1, 1))])
def test_cold_excess_is_wrong(bad: r.Observation) -> None:
    judged = judge_cold([(bad, native())], Floor("cold", 0.4, 10, 80))
    assert codes(judged.findings) == ["wrong-answer"]
    assert judged.notes == []


def test_a_wrong_answer_comes_before_what_could_not_be_compared() -> None:
    found = judge_external_vs_native([(native("e", http_status=500), native()), (wrong_by(1.0), native())], ZERO)
    assert codes(found) == ["wrong-answer", "too-few-observations"]


# Sensitivity --------------------------------------------------------------------------------------------------------


def seen(nat: float) -> Difference:
    return compare(wrong_by(nat), native())


def test_an_oracle_that_sees_the_planted_block_passes() -> None:
    assert check_sensitivity([seen(0.2)], ZERO, 0.1) == []
    assert check_sensitivity({"middle": seen(0.2), "last": seen(0.0)}, ZERO, 0.1) == []


@pytest.mark.parametrize(
    ("planted", "floor_nat", "at_least"),
    [
        ([], 0.0, 1),
        ([0.05], 0.0, 1),  # above a floor of zero times any factor, below the absolute minimum
        ([0.5], 0.2, 1),  # above the minimum and the floor, not above 3 floors
        ([0.5, 0.05], 0.0, 2),
    ],
)
def test_a_blind_oracle_is_found(planted: list[float], floor_nat: float, at_least: int) -> None:
    floor = Floor("native", floor_nat, 4, 12)
    found = check_sensitivity([seen(x) for x in planted], floor, 0.1, at_least=at_least)
    assert codes(found) == ["oracle-blind"]
    assert found[0].evidence["planted"] == len(planted)


def test_a_planted_answer_that_failed_shows_nothing() -> None:
    failed = compare(native("x", http_status=500), native())
    assert codes(check_sensitivity([failed], ZERO, 0.1)) == ["oracle-blind"]


def test_sensitivity_needs_a_floor_and_a_positive_minimum() -> None:
    assert codes(check_sensitivity([seen(1.0)], None, 0.1)) == ["too-few-observations"]
    for minimum in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="positive"):
            check_sensitivity([seen(1.0)], ZERO, minimum)


def test_a_margin_above_the_cold_floor_is_wrong_even_where_every_probability_is_within_it() -> None:
    base = answer("n", (1, 1, 1), [STEP, ((1, -0.6), (2, -1.05), (3, -4.0)), STEP])
    other = answer("x", (1, 2, 1), [STEP, ((2, -0.7), (1, -0.9), (3, -4.0)), STEP])
    assert compare(other, base).max_nat < 0.4
    assert codes(judge_cold([(other, base)], Floor("cold", 0.4, 10, 80)).findings) == ["wrong-answer"]
