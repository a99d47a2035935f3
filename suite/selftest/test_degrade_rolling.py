"""Rolling restart: its judge on hand-made histories."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from reports import records as r
from reports.history import History
from suite.contract import safe_judge
from suite.gates.stalls import FACT as STALLS
from suite.gates.test_rolling import ROLLING_RESTART
from suite.selftest.degrade_samples import BUDGET, WRONG, Change, ask, calibration, engine, replaced, wait

pytestmark = pytest.mark.selftest

CASE = next(iter(ROLLING_RESTART.cases()))


def records() -> list[r.Record]:
    spec = {"budget": BUDGET, "store": {"client_ttl_s": 10}}
    out: list[r.Record] = [r.StackUp(stack_id="s1", t_s=0.0, spec=spec, engines=(engine("e0"), engine("e1")))]
    out += calibration()
    out.append(
        r.CaseStarted(
            case_id=CASE.id,
            gate=ROLLING_RESTART.id,
            gate_version=1,
            claim="c",
            params=CASE.params,
            stack_id="s1",
            t_s=50.0,
        )
    )
    out += [ask(f"b{i}", "traffic", "baseline", 60.0 + i, tokens=400, number=i, case_id=CASE.id) for i in range(6)]
    for at_s, name in ((100.0, "e0"), (150.0, "e1")):
        proof = {"signal": "SIGTERM", "exit_code": 0}
        out.append(
            r.FaultRecord(
                fault_id=f"stop:{name}:1",
                fault="stop",
                target=name,
                action="inject",
                landed=True,
                proof=proof,
                t_s=at_s,
            )
        )
        out.append(r.StartAttempt(unit=name, t_s=at_s + 3, elapsed_s=30, bound_s=240, result="ready"))
        out.append(wait(f"hits-back/{name}", at_s + 33))
    for i in range(24):
        out.append(
            ask(
                f"t{i}",
                "traffic",
                "rolling",
                100.0 + i,
                engine=f"e{i % 2}",
                tokens=400,
                number=100 + i // 2,
                case_id=CASE.id,
            )
        )
    out.append(r.Fact(name="logs.scanned", t_s=900.0, value={"e0": 5}))
    return [*out, r.CaseFinished(case_id=CASE.id, t_s=901.0)]


def judged(*changes: Change) -> r.Verdict:
    rows = records()
    for change in changes:
        rows = change(rows)
    return safe_judge(ROLLING_RESTART, History(rows).for_case(CASE.id))


def of(kind: type[r.Record], match: dict[str, Any], **fields: Any) -> Change:
    return replaced(
        lambda rec: isinstance(rec, kind) and all(getattr(rec, k) == v for k, v in match.items()),
        lambda rec: msgspec.structs.replace(rec, **fields),
    )


def gone(kind: type[r.Record], **match: Any) -> Change:
    return replaced(
        lambda rec: isinstance(rec, kind) and all(getattr(rec, k) == v for k, v in match.items()), lambda _: None
    )


def test_a_restart_that_nobody_notices_passes() -> None:
    verdict = judged()
    assert verdict.outcome is r.Outcome.PASS, verdict.findings


RED: dict[str, tuple[Change, str]] = {
    "had to be killed": (of(r.FaultRecord, {"target": "e1"}, landed=False), "unclean-stop"),
    "a request lost": (of(r.Observation, {"request_id": "t5"}, http_status=None, error="lost: reset"), "failed-request"),
    "another answer": (of(r.Observation, {"request_id": "t5"}, top_logprobs=WRONG), "wrong-answer"),
    "a slow neighbour": (of(r.Observation, {"request_id": "t5"}, first_token_s=109.0, token_s=(109.0, 109.0), done_s=109.1), "slow-degrade"),
    "does not come back": (of(r.StartAttempt, {"unit": "e1"}, result="neither"), "never-ready"),
    "does not share again": (of(r.WaitRecord, {"what": "hits-back/e0"}, came_true=False), "hits-not-back"),
    "a stop that nobody saw": (of(r.FaultRecord, {"target": "e1"}, proof={}), "fault-did-not-land"),
    "a clock that went back": (of(r.Observation, {"request_id": "t5"}, done_s=1.0), "harness-exception"),
    "nothing was stopped": (gone(r.FaultRecord), "no-pressure"),
    "one was never stopped": (gone(r.FaultRecord, target="e1"), "no-pressure"),
    "nobody looked whether one shares again": (gone(r.WaitRecord, what="hits-back/e1"), "too-few-observations"),
    "no traffic": (gone(r.Observation, phase="rolling"), "no-pressure"),
    "nobody looked whether hits are back": (replaced(lambda rec: isinstance(rec, r.WaitRecord), lambda _: None), "too-few-observations"),
}  # fmt: skip


def stalled(stall_s: float, *changes: Change) -> r.Verdict:
    """The host stood still while the request t5 was under way."""
    sent_s = next(o.sent_s for o in records() if isinstance(o, r.Observation) and o.request_id == "t5")
    fact = r.Fact(name=STALLS, t_s=900.0, value=[{"from_s": sent_s + 0.01, "stall_s": stall_s}])
    return judged(*changes, lambda rows: [*rows[:-1], fact, rows[-1]])


def late(took_s: float) -> Change:
    sent_s = next(o.sent_s for o in records() if isinstance(o, r.Observation) and o.request_id == "t5")
    first_s = sent_s + took_s
    return of(r.Observation, {"request_id": "t5"}, first_token_s=first_s, token_s=(first_s, first_s), done_s=first_s)


def test_a_request_that_is_late_by_a_stall_of_the_host_is_nobodys_fault() -> None:
    assert stalled(4.0, late(4.2)).outcome is r.Outcome.PASS
    assert judged(late(4.2)).finding == "slow-degrade"


HUNG = of(r.Observation, {"request_id": "t5"}, timed_out=True, http_status=None, error="deadline", output_token_ids=(), top_logprobs=(), token_s=(), first_token_s=None)  # fmt: skip


@pytest.mark.parametrize("change", [late(9.0), HUNG, RED["a request lost"][0]])
def test_a_stall_does_not_explain_what_took_longer_or_failed(change: Change) -> None:
    verdict = stalled(1.1, change)
    assert (verdict.outcome, verdict.finding) == (r.Outcome.INCONCLUSIVE, "no-control"), verdict.findings


def test_a_wrong_answer_is_one_however_the_host_fares() -> None:
    verdict = stalled(1.1, RED["another answer"][0])
    assert (verdict.outcome, verdict.finding) == (r.Outcome.FAIL, "wrong-answer"), verdict.findings


def upgraded(engine_name: str, runs: str = "/second/bin/python") -> Change:
    value = {"engine": engine_name, "meant": ["/second/bin/python"], "runs": [runs], "releases": "mooncake 0.3.12"}
    return lambda rows: [*rows[:-1], r.Fact(name="upgraded", t_s=200.0, value=value), rows[-1]]


def test_an_upgrade_is_one_only_where_each_engine_came_back_in_the_second_environment() -> None:
    started = of(r.CaseStarted, {"case_id": CASE.id}, params={**CASE.params, "upgrade": True})
    both = judged(started, upgraded("e0"), upgraded("e1"))
    assert both.outcome is r.Outcome.PASS, both.findings
    assert both.numbers["came_back_with"] == dict.fromkeys(("e0", "e1"), "mooncake 0.3.12")
    for changes in ((), (upgraded("e0"),), (upgraded("e0"), upgraded("e1", "/first/bin/python"))):
        assert judged(started, *changes).finding == "no-pressure"


@pytest.mark.parametrize("name", RED)
def test_each_defect_of_a_restart_is_found(name: str) -> None:
    change, code = RED[name]
    verdict = judged(change)
    assert verdict.finding == code, [f.message for f in verdict.findings]
