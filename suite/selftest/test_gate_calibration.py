"""Calibration on a simulated stack: what a busy host may do to a planted block, and what it may not hide."""

from __future__ import annotations

from typing import Any

import pytest

from reports import records as r
from reports.history import History
from suite.gates.arms import CALIBRATION, PLANT_ATTEMPTS, calibrate
from suite.gates.oracle import POSITIONS, Oracle
from suite.selftest.simulated_stack import SimulatedStack

pytestmark = pytest.mark.selftest


class Refusing(SimulatedStack):
    """A stack whose store refuses the first ``refusals`` damaged blocks."""

    def __init__(self, refusals: int) -> None:
        super().__init__()
        self.refusals = refusals

    def store_tool(self, steps: list[dict[str, Any]]) -> list[Any]:
        if self.refusals:
            self.refusals -= 1
            return [{"put": -1, "before": "a", "after": "a"} for _ in steps]
        return super().store_tool(steps)


def oracle_of(stack: SimulatedStack) -> Oracle:
    calibrate(stack)
    stack.record(r.CaseStarted(case_id="c", gate="g", gate_version=1, claim="", stack_id=stack.stack_id, t_s=0.0))
    return Oracle.of(History(stack.records).for_case("c"))


def planted(stack: SimulatedStack) -> list[r.Observation]:
    return [x for x in stack.records if isinstance(x, r.Observation) and x.role == "planted"]


def test_each_position_gets_one_planted_block_where_all_goes_well() -> None:
    stack = SimulatedStack()
    oracle = oracle_of(stack)
    assert tuple(oracle.planted) == POSITIONS
    assert oracle.check() == []
    assert len(planted(stack)) == len(POSITIONS)
    assert all(o.case_id == CALIBRATION for o in planted(stack))


def test_a_block_that_could_not_be_planted_is_tried_again_with_another_prompt() -> None:
    assert PLANT_ATTEMPTS > 1
    stack = Refusing(PLANT_ATTEMPTS - 1)
    oracle = oracle_of(stack)
    assert oracle.check() == []
    asked = planted(stack)
    assert len(asked) == len(POSITIONS) + PLANT_ATTEMPTS - 1
    assert len({o.prompt_token_ids for o in asked}) == len(asked)


def test_what_never_lands_leaves_the_oracle_blind() -> None:
    (blind,) = oracle_of(Refusing(PLANT_ATTEMPTS)).check()
    assert blind.code is r.FindingCode.ORACLE_BLIND
    assert "2 of 2" in blind.message


def test_a_planted_block_that_does_not_show_is_not_tried_until_it_does() -> None:
    """Only a precondition earns another attempt, never the outcome."""

    class Unmoved(SimulatedStack):
        def _answer(self, prompt: Any, body: Any, number: int, wrong: bool) -> Any:
            return super()._answer(prompt, body, number, False)

    stack = Unmoved()
    (blind,) = oracle_of(stack).check()
    assert blind.code is r.FindingCode.ORACLE_BLIND
    assert len(planted(stack)) == len(POSITIONS)


def roles(stack: SimulatedStack) -> set[str]:
    return {x.role for x in stack.records if isinstance(x, r.Observation) and x.role.endswith("-concurrent")}


def test_noise_under_concurrency_is_measured_by_the_first_case_that_needs_it_and_once() -> None:
    stack = SimulatedStack()
    calibrate(stack, concurrent=False)
    assert roles(stack) == set()
    calibrate(stack, concurrent=False)
    assert roles(stack) == set()
    calibrate(stack)
    assert roles(stack) == {"floor-cold-concurrent", "floor-native-concurrent"}
    seen = len(stack.records)
    calibrate(stack)
    calibrate(stack, concurrent=False)
    assert len(stack.records) == seen


def test_a_case_of_single_requests_is_not_held_to_the_noise_of_concurrent_ones() -> None:
    stack = SimulatedStack()
    calibrate(stack, concurrent=False)
    stack.record(r.CaseStarted(case_id="c", gate="g", gate_version=1, claim="", stack_id=stack.stack_id, t_s=0.0))
    oracle = Oracle.of(History(stack.records).for_case("c"))
    assert oracle.native_concurrent.pairs == oracle.native.pairs > 0
    assert oracle.check() == []
