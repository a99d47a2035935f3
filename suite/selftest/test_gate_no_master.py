"""The judge of O.no-master: ready, dead with a cause, dead without one, neither."""

from __future__ import annotations

from typing import Literal

import pytest

from reports import records as r
from reports.history import History
from suite.contract import safe_judge
from suite.gates.test_operability import NO_MASTER

pytestmark = pytest.mark.selftest

TRACEBACK = (
    '  File "site-packages/vllm/distributed/kv_transfer/kv_connector/v1/mooncake/store/connector.py", line 3, in start',
    "RuntimeError: Engine core initialization failed. See root cause above.",
)
CAUSE = "ConnectionError: Mooncake master 127.0.0.1:5 is unreachable: [Errno 111] Connection refused"


def judged(
    result: Literal["ready", "dead", "neither"],
    tail: tuple[str, ...] = (),
    log: tuple[str, ...] = (),
    usual_s: float = 30.0,
) -> r.Verdict:
    facts = r.EngineFacts(
        name="e0",
        url="http://127.0.0.1:1",
        model="m",
        served_model="m",
        connector="mooncake-store",
        block_tokens=32,
        max_model_len=4096,
        load_failure_policy="recompute",
        hash_seed="0",
        versions={},
    )
    attempt = r.StartAttempt(
        unit="lost",
        t_s=1.0,
        elapsed_s=75.0,
        bound_s=75.0,
        result=result,
        exit_code=1,
        log_tail=tail,
    )
    lines = [
        r.LogLine(unit=unit, line_number=n, text=text, category="", case_id="O.no-master.refused", t_s=2.0)
        for unit in ("e0", "lost")
        for n, text in enumerate(log if unit == "lost" else (CAUSE,))
    ]
    case = r.CaseStarted(
        case_id="O.no-master.refused", gate="O.no-master", gate_version=2, claim="", stack_id="s1", t_s=0.5
    )
    records: list[r.Record] = [
        r.StackUp(stack_id="s1", t_s=0.0, spec={}, engines=(facts,), start_s={"e0": usual_s}),
        case,
        attempt,
        *lines,
        r.CaseFinished(case_id=case.case_id, t_s=3.0),
    ]
    return safe_judge(NO_MASTER, History(records).for_case(case.case_id))


def test_ready_passes_and_neither_does_not() -> None:
    assert judged("ready").outcome is r.Outcome.PASS
    assert judged("neither").finding == "never-ready"


def test_a_start_that_is_usually_as_slow_says_nothing() -> None:
    assert judged("neither", usual_s=60.0).finding == "no-control"


def test_a_death_names_its_cause_somewhere_in_its_own_log() -> None:
    assert judged("dead", tail=TRACEBACK, log=(CAUSE,)).outcome is r.Outcome.PASS
    assert judged("dead", tail=(CAUSE,)).outcome is r.Outcome.PASS
    # The path of a connector is no cause, and what another unit logged is not this one's word.
    assert judged("dead", tail=TRACEBACK[:1]).finding == "misleading-message"
    assert judged("dead", tail=("RuntimeError: out of memory",)).finding == "misleading-message"
