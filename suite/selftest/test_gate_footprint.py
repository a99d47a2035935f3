"""O.footprint on a simulated stack: each thing that a served or cancelled request may leave behind turns it red."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from reports import records as r
from reports.history import History
from suite.contract import safe_judge
from suite.gates.test_footprint import FOOTPRINT
from suite.selftest.simulated_stack import SimulatedStack, run_case

pytestmark = [pytest.mark.selftest, pytest.mark.usefixtures("short_calibration")]

F, Out = r.FindingCode, r.Outcome
SERVED, CANCELLED = "O.footprint.served", "O.footprint.cancelled"


def judged(case_id: str, change: Callable[[r.Record], r.Record] = lambda rec: rec) -> r.Verdict:
    stack = SimulatedStack()
    run_case(FOOTPRINT, case_id, stack=stack)
    return safe_judge(FOOTPRINT, History([change(rec) for rec in stack.records]).for_case(case_id))


@pytest.mark.parametrize("case_id", [SERVED, CANCELLED])
def test_what_leaves_nothing_behind_passes(case_id: str) -> None:
    verdict = judged(case_id)
    assert verdict.outcome is Out.PASS, verdict.findings


@pytest.mark.parametrize(
    ("case_id", "lie", "outcome", "code"),
    [
        (SERVED, "zero-hits", Out.INCONCLUSIVE, F.NO_CONTROL),
        (SERVED, "leak", Out.FAIL, F.KV_LEAK),
        (CANCELLED, "leak", Out.FAIL, F.KV_LEAK),
        (SERVED, "crash", Out.FAIL, F.UNEXPLAINED_LOG),
    ],
)
def test_what_a_stack_may_do_wrong(case_id: str, lie: str, outcome: r.Outcome, code: r.FindingCode) -> None:
    verdict = run_case(FOOTPRINT, case_id, [lie])
    assert (verdict.outcome, verdict.finding) == (outcome, code), verdict.findings


def test_a_request_of_maximum_length_that_is_refused_is_found() -> None:
    verdict = run_case(FOOTPRINT, SERVED, ["refuses-long"])
    assert verdict.outcome is Out.FAIL
    assert F.ADMISSION_REFUSED in {f.code for f in verdict.findings}


def read(change: Callable[[r.Observation], r.Observation], most: int = 99) -> Callable[[r.Record], r.Record]:
    """Changes the first ``most`` reads."""
    seen = 0

    def apply(rec: r.Record) -> r.Record:
        nonlocal seen
        if not isinstance(rec, r.Observation) or rec.phase != "read" or seen >= most:
            return rec
        seen += 1
        return change(rec)

    return apply


def test_nothing_was_cancelled_is_no_pass() -> None:
    verdict = judged(CANCELLED, read(lambda o: msgspec.structs.replace(o, cancelled=False)))
    assert verdict.outcome is not Out.PASS
    assert F.TOO_FEW_OBSERVATIONS in {f.code for f in verdict.findings}


def slow(o: r.Observation) -> r.Observation:
    first_s = o.sent_s + 5.0
    return msgspec.structs.replace(o, first_token_s=first_s, token_s=(first_s,) * len(o.token_s), done_s=first_s)


def test_hits_that_cost_more_than_recompute_fail_where_they_are_more_than_a_stall() -> None:
    assert judged(SERVED, read(slow, most=1)).outcome is Out.PASS
    all_slow = judged(SERVED, read(slow))
    assert (all_slow.outcome, all_slow.finding) == (Out.FAIL, F.SLOWER_THAN_RECOMPUTE)


def test_an_engine_that_does_not_come_to_rest_hangs() -> None:
    def busy(rec: r.Record) -> r.Record:
        if not isinstance(rec, r.MetricsSnapshot) or rec.label != "idle":
            return rec
        return msgspec.structs.replace(rec, values=rec.values | {"running": 1.0})

    verdict = judged(SERVED, busy)
    assert (verdict.outcome, verdict.finding) == (Out.FAIL, F.HANG)


def test_lookups_again_and_again_are_found() -> None:
    def storm(rec: r.Record) -> r.Record:
        if not isinstance(rec, r.MetricsSnapshot) or rec.label != "after-reads":
            return rec
        return msgspec.structs.replace(rec, values=rec.values | {"store.lookup_exists.ok.ops": 9999.0})

    verdict = judged(SERVED, storm)
    assert (verdict.outcome, verdict.finding) == (Out.FAIL, F.UNBOUNDED_LOOKUPS)
