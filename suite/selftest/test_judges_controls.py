"""Controls, sums and admissions of the P and I gates: records changed by hand, and the finding that must name it.

The primary finding may be another one (a stack that hits nothing has no control either); here only the check counts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import msgspec
import pytest

from reports import records as r
from reports.history import History
from suite.checks.base import EXTERNAL, PROMPT
from suite.contract import Gate, safe_judge
from suite.gates.degrade_cells import Cell
from suite.gates.judging_degrade_pressure import saved_before
from suite.gates.test_conversation import CONVERSATION
from suite.gates.test_identity import OTHER_ENGINE
from suite.gates.test_pressure import PRESSURE
from suite.gates.test_sampled import SAMPLED
from suite.selftest import degrade_samples
from suite.selftest.identity_samples import Made
from suite.selftest.simulated_stack import SimulatedStack, run_case

pytestmark = [pytest.mark.selftest, pytest.mark.usefixtures("short_calibration")]

F, Out = r.FindingCode, r.Outcome
Change = Callable[[r.Record], r.Record | None]


@cache
def collected(gate: Gate, case_id: str) -> tuple[r.Record, ...]:
    stack = SimulatedStack()
    verdict = run_case(gate, case_id, stack=stack)
    assert verdict.outcome is Out.PASS, verdict.findings
    return tuple(stack.records)


def codes(gate: Gate, case_id: str, change: Change) -> set[r.FindingCode]:
    records = [new for rec in collected(gate, case_id) if (new := change(rec)) is not None]
    assert len(records) != len(collected(gate, case_id)) or records != list(collected(gate, case_id))
    verdict = safe_judge(gate, History(records).for_case(case_id))
    assert verdict.outcome is not Out.PASS
    return {f.code for f in verdict.findings}


def counted(gate: Gate, case_id: str, role: str, **changes: float) -> Change:
    """The engine counted more (or, to 0, nothing) around the first request in a role."""
    asked = next(
        rec
        for rec in collected(gate, case_id)
        if isinstance(rec, r.Observation) and rec.role.startswith(role) and rec.case_id == case_id
    )

    def change(rec: r.Record) -> r.Record:
        if not isinstance(rec, r.MetricsSnapshot) or rec.label != f"{asked.request_id}:after":
            return rec
        values = dict(rec.values)
        for name, more in changes.items():
            values[name.replace("__", ".")] += more
        return msgspec.structs.replace(rec, values=values)

    return change


def test_choices_that_do_not_add_up_are_found() -> None:
    change = counted(SAMPLED, "P.sampled.several", "external", **{PROMPT.replace(".", "__"): 32.0})
    assert F.CONSERVATION in codes(SAMPLED, "P.sampled.several", change)


@pytest.mark.parametrize("what", ["the answer", "the counters"])
def test_a_sampled_case_without_its_external_arm_is_no_pass(what: str) -> None:
    asked = next(
        o for o in collected(SAMPLED, "P.sampled.whole") if isinstance(o, r.Observation) and o.role == "external"
    )
    lost = {f"{asked.request_id}:before", f"{asked.request_id}:after"}

    def forget(rec: r.Record) -> r.Record | None:
        if what == "the answer":
            return None if rec is asked else rec
        return None if isinstance(rec, r.MetricsSnapshot) and rec.label in lost else rec

    assert F.TOO_FEW_OBSERVATIONS in codes(SAMPLED, "P.sampled.whole", forget)


def test_a_control_that_nobody_saw_reading_the_pool_is_none() -> None:
    """The saver's read-back tells its cached tokens; whether they came from the pool only the counters say."""
    made = Made().history()
    read = next(o for o in made.observations() if o.role.startswith("control/"))
    labels = {f"{read.request_id}:before", f"{read.request_id}:after"}
    kept = [rec for rec in made.records if not (isinstance(rec, r.MetricsSnapshot) and rec.label in labels)]
    verdict = safe_judge(OTHER_ENGINE, History(kept, before=made.before).for_case(made.case.case_id))
    assert (verdict.outcome, verdict.finding) == (Out.INCONCLUSIVE, F.NO_CONTROL), verdict.findings


def test_a_sampled_case_whose_prompt_was_not_in_the_pool_has_no_control() -> None:
    whole = next(
        o.cached_tokens
        for o in collected(SAMPLED, "P.sampled.whole")
        if isinstance(o, r.Observation) and o.role == "control"
    )
    change = counted(SAMPLED, "P.sampled.whole", "control", **{EXTERNAL.replace(".", "__"): -float(whole or 0)})
    assert F.NO_CONTROL in codes(SAMPLED, "P.sampled.whole", change)


def test_a_replayed_prompt_whose_sources_do_not_add_up_is_found() -> None:
    replayed = next(
        rec
        for rec in collected(PRESSURE, "P.pressure.evicting")
        if isinstance(rec, r.Observation) and rec.phase == "replay"
    )
    change = counted(PRESSURE, "P.pressure.evicting", replayed.role, **{PROMPT.replace(".", "__"): 32.0})
    assert F.CONSERVATION in codes(PRESSURE, "P.pressure.evicting", change)


def test_an_engine_that_nobody_asked_for_its_full_length_is_no_pass() -> None:
    def forget(rec: r.Record) -> r.Record | None:
        asked = isinstance(rec, r.Observation) and rec.role == "maximum-length" and rec.engine == "e1"
        return None if asked else rec

    assert F.TOO_FEW_OBSERVATIONS in codes(PRESSURE, "P.pressure.evicting", forget)


def test_a_conversation_that_read_nothing_has_no_control() -> None:
    verdict = run_case(CONVERSATION, "P.conversation.turns", ["zero-hits"])
    assert F.NO_CONTROL in {f.code for f in verdict.findings}


def test_identity_wants_all_its_pairs_and_sums_that_add_up() -> None:
    short = safe_judge(OTHER_ENGINE, Made(params={"pairs": ["forward", "backward"]}).history())
    assert (short.outcome, short.finding) == (Out.INCONCLUSIVE, F.TOO_FEW_OBSERVATIONS)
    made = Made().history()
    own = next(o for o in made.observations() if o.role == "own/forward")

    def change(rec: r.Record) -> r.Record:
        if not isinstance(rec, r.MetricsSnapshot) or rec.label != f"{own.request_id}:after":
            return rec
        return msgspec.structs.replace(rec, values=rec.values | {PROMPT: rec.values[PROMPT] + 32})

    broken = History([change(rec) for rec in (*made.before, *made.records)]).for_case(own.case_id)
    verdict = safe_judge(OTHER_ENGINE, broken)
    assert verdict.outcome is Out.FAIL
    assert F.CONSERVATION in {f.code for f in verdict.findings}


def test_a_save_that_was_late_before_the_fault_is_a_finding_and_one_after_it_is_not() -> None:
    cell = Cell("owner", "kill", heal="after-ttl")

    def late(at_s: float) -> degrade_samples.Change:
        return degrade_samples.added(degrade_samples.wait("visible:v1", at_s, came_true=False))

    before = degrade_samples.history(cell, late(degrade_samples.FAULT_S - 20))
    assert [f.code for f in saved_before(before)] == [F.SAVE_NOT_VISIBLE]
    assert saved_before(degrade_samples.history(cell, late(degrade_samples.FAULT_S + 3))) == []
