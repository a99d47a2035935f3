"""What ``safe_judge`` makes of a judge's verdict: an engine that ended by itself is said, whatever else was found."""

from __future__ import annotations

from typing import Any

import pytest

from reports import records as r
from reports.history import History
from suite.contract import ENGINE_DIED, HOST_PAUSED, Case, Gate, outcome_of, safe_judge

pytestmark = pytest.mark.selftest

F, Out = r.FindingCode, r.Outcome
CASE = "X.told.1"
DIED = {"engine": "e1", "words": "RuntimeError: gone", "log_tail": [], "exit_code": 1, "in_case": True}


class Told(Gate):
    """Judges what the case's fact says."""

    id = "X.told"
    claim = "holds"

    def collect(self, stack: Any, case: Case) -> None:
        raise NotImplementedError

    def judge(self, history: History) -> r.Verdict:
        fact = history.fact("codes")
        findings = tuple(r.Finding(code=F(code), message=code) for code in (fact.value if fact else ()))
        return self.verdict(
            history, outcome_of(findings), findings=findings, got=findings[0].message if findings else ""
        )


def judged(*codes: str, **facts: Any) -> r.Verdict:
    made: list[r.Record] = [
        r.CaseStarted(case_id=CASE, gate="X.told", gate_version=1, claim="holds", t_s=0.0),
        r.Fact(name="codes", t_s=0.0, value=list(codes)),
        *(r.Fact(name=name, t_s=1.0, value=value) for name, value in facts.items()),
        r.CaseFinished(case_id=CASE, t_s=2.0),
    ]
    return safe_judge(Told(), History(made).for_case(CASE))


@pytest.mark.parametrize(
    ("codes", "first"),
    [
        ((), "engine-died"),
        (("failed-request",), "engine-died"),
        (("slow-degrade", "unexplained-log"), "engine-died"),
        (("wrong-answer", "failed-request"), "wrong-answer"),
        (("engine-died",), "engine-died"),
    ],
)
def test_a_known_failure_does_not_hide_that_an_engine_ended(codes: tuple[str, ...], first: str) -> None:
    verdict = judged(*codes, **{ENGINE_DIED: DIED})
    assert (verdict.outcome, verdict.finding) == (Out.FAIL, first)
    assert {f.code for f in verdict.findings} == {F.ENGINE_DIED, *(F(code) for code in codes)}
    assert "e1 ended by itself" in verdict.got or codes[:1] in (("wrong-answer",), ("engine-died",))


def test_a_host_that_stood_still_is_no_reason_for_an_engine_to_end() -> None:
    pause = [{"from_s": 0.0, "stall_s": 9.0}]
    assert judged("hang", **{HOST_PAUSED: pause}).outcome is Out.INCONCLUSIVE
    assert judged("hang", **{HOST_PAUSED: pause, ENGINE_DIED: DIED}).finding == F.ENGINE_DIED
