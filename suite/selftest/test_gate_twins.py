"""The cold arm of an answer that its native twin confirms: noise of the shape is no wrong answer, and a wrong block's distance is."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from reports import records as r
from reports.history import History
from suite.gates.oracle import SEPARATION, Oracle
from suite.gates.test_prefix import BOUNDARY
from suite.selftest.simulated_stack import WRONG_NAT, SimulatedStack, run_case

pytestmark = [pytest.mark.selftest, pytest.mark.usefixtures("short_calibration")]

CASE = "P.boundary.k3+1"


def judged(**moved_nat: float) -> r.Verdict:
    """The verdict of a case whose answers of some arms (``cold=0.5``) have log probabilities that are so far away."""
    stack = SimulatedStack()
    assert run_case(BOUNDARY, CASE, stack=stack).outcome is r.Outcome.PASS

    def moved(record: r.Record) -> r.Record:
        nat = moved_nat.get(record.role, 0.0) if isinstance(record, r.Observation) and record.case_id == CASE else 0.0
        if not nat or not isinstance(record, r.Observation):
            return record
        tops = tuple((top[0], (top[1][0], top[1][1] - nat), *top[2:]) for top in record.top_logprobs)
        return msgspec.structs.replace(record, top_logprobs=tops)

    history = History([moved(record) for record in stack.records]).for_case(CASE)
    return BOUNDARY.judge(history)


@pytest.mark.parametrize("nat", [0.01, 0.5 * WRONG_NAT, 0.9 * WRONG_NAT])
def test_what_both_caches_answer_may_be_as_far_from_cold_as_no_wrong_block_is(nat: float) -> None:
    assert judged(cold=nat).outcome is r.Outcome.PASS


def test_as_far_as_a_wrong_block_it_is_wrong() -> None:
    found = judged(cold=1.1 * WRONG_NAT)
    assert (found.outcome, found.finding) == (r.Outcome.FAIL, r.FindingCode.WRONG_ANSWER)
    assert "against cold" in found.findings[0].message
    assert "wrong before any block was read from the pool" in found.findings[0].message


def test_a_limit_is_not_called_the_noise_that_was_measured() -> None:
    found = next(one for one in judged(cold=1.1 * WRONG_NAT).findings if "against cold" in one.message)
    numbers = judged(cold=1.1 * WRONG_NAT).numbers
    assert (
        f"(limit {found.evidence['limit_nat']:.4g} nat, noise {numbers['cold_floor_nat']:.4g} nat in" in found.message
    )
    assert found.evidence["limit_nat"] > numbers["cold_floor_nat"]


def test_without_a_twin_that_confirms_it_the_limit_lies_between_noise_and_damage() -> None:
    found = judged(cold=0.5 * WRONG_NAT, native=0.01)
    assert found.finding == r.FindingCode.WRONG_ANSWER
    assert any("against cold" in one.message for one in found.findings)


def test_a_blind_oracle_says_so_and_calls_no_noise_wrong() -> None:
    """Planted blocks that move answers less than noise does: beyond the noise seen is not yet wrong, only beyond all that was seen."""
    stack = SimulatedStack()
    run_case(BOUNDARY, CASE, stack=stack)
    oracle = Oracle.of(History(stack.records).for_case(CASE))
    noise = 2 * WRONG_NAT
    oracle.cold = replace(oracle.cold, max_nat=noise)
    assert oracle.cold_limit.max_nat == SEPARATION * noise
