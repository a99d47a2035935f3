"""The soak: its schedule, its options, and its judge on hand-made histories. Traffic against a stand-in stack."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from itertools import islice
from typing import Any, cast

import msgspec
import pytest

from fixtures.errors import UsageError
from fixtures.waiting import wait_for
from reports import records as r
from reports.history import History
from suite.contract import safe_judge
from suite.gates.degrade_cells import MASTER, Cell
from suite.gates.degrade_soak import HARNESS, LASTS_S, MENU, QUIET_S, harness_snapshot, replay_command, schedule
from suite.gates.degrade_traffic import MAX_OPEN, Traffic
from suite.gates.stalls import FACT as STALLS
from suite.gates.test_degrade_soak import SOAK, asked_for, duration_s
from suite.selftest.degrade_samples import (
    BUDGET,
    WRONG,
    Change,
    ask,
    calibration,
    engine,
    fault,
    hung,
    processes,
    replaced,
)
from suite.workload.prompts import PromptMaker

pytestmark = pytest.mark.selftest

CASE = next(iter(SOAK.cases()))
QUICK_S = 0.05
"""Interval of the traffic here."""

TURNS, EVERY_S, LASTED_S = 7, 30.0, 10.0


def test_a_seed_is_a_schedule() -> None:
    first, again, other = (list(islice(schedule(seed), 20)) for seed in (7, 7, 8))
    assert first == again != other
    assert [turn.number for turn in first] == list(range(20))
    assert all((turn.target, turn.fault) in MENU for turn in first)
    assert all(LASTS_S[0] <= turn.lasts_s <= LASTS_S[1] and QUIET_S[0] <= turn.quiet_s <= QUIET_S[1] for turn in first)
    assert len({(turn.target, turn.fault) for turn in islice(schedule(1), 60)}) == len(MENU)  # all are drawn


@pytest.mark.parametrize(("text", "seconds"), [("10m", 600), ("90s", 90), ("1h", 3600), ("45", 45), ("0.5m", 30)])
def test_durations(text: str, seconds: float) -> None:
    assert duration_s(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "-1s", "ten minutes", "10d", "9999999999h", "9" * 5000])
def test_bad_durations_name_the_option(text: str) -> None:
    with pytest.raises(UsageError, match="--soak"):
        duration_s(text)


def test_options_change_the_case_and_the_replay_command() -> None:
    case = asked_for(CASE, "10m", "42")
    assert case.id == CASE.id
    assert replay_command(case.params) == "pytest -m gates -k D.soak --soak 600s --soak-seed 42"
    assert asked_for(CASE, None, None) == CASE
    with pytest.raises(UsageError, match="--soak-seed"):
        asked_for(CASE, None, "x")
    with pytest.raises(UsageError, match="--soak-seed"):
        asked_for(CASE, None, "²")


# The judge ----------------------------------------------------------------------------------------------------------


def turn(number: int, **changes: Any) -> r.Fact:
    begin_s = 100.0 + number * EVERY_S
    value = {
        "number": number, "target": "master", "fault": "kill", "lasts_s": LASTED_S, "started_s": begin_s,
        "ended_s": begin_s + LASTED_S, "good": True, "complaints": [],
    }  # fmt: skip
    return r.Fact(name="soak.turn", t_s=begin_s + LASTED_S, value=value | changes)


def snapshot(unit: str, number: int, **changes: Any) -> r.ProcessSnapshot:
    made = msgspec.structs.replace(
        processes(unit, "x"), label=f"turn/{number}", threads=40, sockets=30, rss_bytes=1 << 30
    )
    return msgspec.structs.replace(made, **changes)


def records() -> list[r.Record]:
    spec = {"budget": BUDGET, "store": {"client_ttl_s": 10}}
    out: list[r.Record] = [r.StackUp(stack_id="s1", t_s=0.0, spec=spec, engines=(engine("e0"), engine("e1")))]
    out += calibration()
    start = r.CaseStarted(
        case_id=CASE.id, gate=SOAK.id, gate_version=1, claim="c", params=CASE.params, stack_id="s1", t_s=50.0
    )
    out += [start, processes("e0", "before"), processes("e1", "before")]
    out += [ask(f"b{i}", "traffic", "baseline", 60.0 + i, tokens=400, number=i, case_id=CASE.id) for i in range(6)]
    for number in range(TURNS):
        begin_s = 100.0 + number * EVERY_S
        out.append(
            msgspec.structs.replace(fault(Cell(MASTER, "kill"), "inject", begin_s), fault_id=f"kill:master:{number}")
        )
        out.append(
            hung(
                f"h{number}",
                "traffic",
                "soak",
                begin_s + 1,
                tokens=400,
                number=500 + number,
                case_id=CASE.id,
                deadline_s=5.0,
            )
        )
        for i in range(6):  # twins after it
            at_s = begin_s + LASTED_S + 8 + i
            out.append(
                ask(
                    f"t{number}/{i}",
                    "traffic",
                    "soak",
                    at_s,
                    engine=f"e{i % 2}",
                    tokens=400,
                    number=100 + 10 * number + i // 2,
                    case_id=CASE.id,
                )
            )
        out += [snapshot(unit, number) for unit in ("e0", "e1", HARNESS)]
        out.append(turn(number))
    out += [processes("e0", "after"), processes("e1", "after"), r.Fact(name="logs.scanned", t_s=900.0, value={"e0": 5})]
    return [*out, r.CaseFinished(case_id=CASE.id, t_s=901.0)]


def judged(*changes: Change) -> r.Verdict:
    rows = records()
    for change in changes:
        rows = change(rows)
    return safe_judge(SOAK, History(rows).for_case(CASE.id))


def of_request(name: str, **fields: Any) -> Change:
    return replaced(
        lambda rec: isinstance(rec, r.Observation) and rec.request_id == name,
        lambda o: msgspec.structs.replace(o, **fields),
    )


def of_turn(number: int, **fields: Any) -> Change:
    return replaced(
        lambda rec: isinstance(rec, r.Fact) and rec.name == "soak.turn" and rec.value["number"] == number,
        lambda _: turn(number, **fields),
    )


def growing(unit: str, **per_turn: int) -> Change:
    def grow(rec: Any) -> r.Record:
        number = int(rec.label.split("/")[1])
        return snapshot(unit, number, **{name: getattr(rec, name) + by * number for name, by in per_turn.items()})

    return replaced(
        lambda rec: isinstance(rec, r.ProcessSnapshot) and rec.unit == unit and rec.label.startswith("turn/"), grow
    )


def first_turns(count: int) -> Change:
    return replaced(
        lambda rec: isinstance(rec, r.Fact) and rec.name == "soak.turn" and rec.value["number"] >= count, lambda _: None
    )


def quiet_from(at_s: float) -> Change:
    return replaced(
        lambda rec: isinstance(rec, r.Observation) and rec.phase == "soak" and rec.sent_s >= at_s, lambda _: None
    )


def test_a_soak_in_which_only_requests_inside_faults_fail_passes() -> None:
    verdict = judged()
    assert verdict.outcome is r.Outcome.PASS, verdict.findings
    assert verdict.numbers["unanswered_inside_faults"] == TURNS
    assert verdict.numbers["requests_outside_faults"] == 6 * TURNS
    assert any("replay: pytest" in note for note in verdict.notes)


RED: dict[str, tuple[tuple[Change, ...], str]] = {
    "a failed request outside": ((of_request("t3/1", http_status=500, error="boom"),), "failed-request"),
    "a slow request outside": ((of_request("t3/1", first_token_s=214.0, token_s=(214.0, 214.0), done_s=214.1),), "slow-degrade"),
    "a wrong answer": ((of_request("t3/1", top_logprobs=WRONG),), "wrong-answer"),
    "not well again": ((of_turn(4, complaints=["e0: gone"]),), "hits-not-back"),
    "no good answer after the heal": ((of_turn(4, good=False),), "hits-not-back"),
    "an engine leaks sockets": ((growing("e1", sockets=4),), "resource-growth"),
    "an engine leaks memory": ((growing("e0", rss_bytes=40 << 20),), "resource-growth"),
    "the harness leaks memory": ((growing(HARNESS, rss_bytes=40 << 20),), "resource-growth"),
    "an engine was replaced": ((replaced(lambda rec: isinstance(rec, r.ProcessSnapshot) and rec.label == "after/e1", lambda _: processes("e1", "after", pid=99)),), "engine-died"),
    "a fault that did not land": ((replaced(lambda rec: isinstance(rec, r.FaultRecord) and rec.fault_id == "kill:master:2", lambda f: msgspec.structs.replace(f, landed=False)),), "fault-did-not-land"),
    "too short": ((first_turns(2), quiet_from(160.0)), "too-few-observations"),
    "no engine was looked at afterwards": ((replaced(lambda rec: isinstance(rec, r.ProcessSnapshot) and rec.label.startswith("after/"), lambda _: None),), "no-pressure"),
    "nothing was looked at between faults": ((replaced(lambda rec: isinstance(rec, r.ProcessSnapshot) and rec.label.startswith("turn/"), lambda _: None),), "too-few-observations"),
    "no traffic": ((replaced(lambda rec: isinstance(rec, r.Observation) and rec.phase == "soak", lambda _: None),), "no-pressure"),
}  # fmt: skip


@pytest.mark.parametrize("name", RED)
def test_each_defect_of_a_soak_is_found(name: str) -> None:
    changes, code = RED[name]
    verdict = judged(*changes)
    assert verdict.finding == code, [f.message for f in verdict.findings]


def test_a_short_stall_does_not_excuse_a_request_that_hangs() -> None:
    lost = of_request("t0/1", timed_out=True, http_status=None, error="deadline", output_token_ids=(), top_logprobs=(), token_s=(), first_token_s=None)  # fmt: skip
    assert judged(lost).finding == "hang"
    sent_s = next(o.sent_s for o in records() if isinstance(o, r.Observation) and o.request_id == "t0/1")
    fact = r.Fact(name=STALLS, t_s=900.0, value=[{"from_s": sent_s, "stall_s": 1.1}])
    verdict = judged(lost, lambda rows: [*rows[:-1], fact, rows[-1]])
    assert (verdict.outcome, verdict.finding) == (r.Outcome.INCONCLUSIVE, "no-control"), verdict.findings


def test_growth_is_not_judged_on_a_few_faults_and_that_is_said() -> None:
    verdict = judged(first_turns(4), quiet_from(220.0), growing("e1", sockets=40))
    assert verdict.outcome is r.Outcome.PASS, verdict.findings
    assert any("growth was not judged" in note for note in verdict.notes)


def test_the_suite_sees_itself() -> None:
    taken = harness_snapshot("turn/0")
    assert taken.unit == HARNESS
    assert taken.rss_bytes > 1 << 20
    assert taken.threads >= 1


# Traffic ------------------------------------------------------------------------------------------------------------


class FakePending:
    """Ends when told; a real engine takes half a minute to start, and what counts here is the bookkeeping."""

    def __init__(self) -> None:
        self.future: Future[None] = Future()

    def done(self) -> bool:
        return self.future.done()

    def result(self, timeout_s: float | None = None) -> None:
        return self.future.result(timeout_s)


class FakeStack:
    def __init__(self, answers: bool) -> None:
        self.sent: list[dict[str, Any]] = []
        self.client = self
        self.answers = answers
        self.lock = threading.Lock()

    def request(self, engine: str, prompt: tuple[int, ...], role: str, **fields: Any) -> dict[str, Any]:
        return {"engine": engine, "prompt": prompt, "role": role, **fields}

    def start(self, request: dict[str, Any], *, case_id: str, phase: str) -> FakePending:
        pending = FakePending()
        if self.answers:
            pending.future.set_result(None)
        with self.lock:
            self.sent.append(request | {"phase": phase, "pending": pending})
        return pending


def traffic(stack: FakeStack) -> Traffic:
    return Traffic(cast(Any, stack), "X", PromptMaker("s", 500, 32), ["e0", "e1"], "baseline", deadline_s=1.0)


def test_traffic_asks_each_prompt_of_two_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("suite.gates.degrade_traffic.INTERVAL_S", QUICK_S)
    stack = FakeStack(answers=True)
    with traffic(stack) as running:
        wait_for("four requests", lambda: len(stack.sent) >= 4, bound_s=10, bound_source="4 intervals")
        running.phase = "soak"
        wait_for("one more", lambda: stack.sent[-1]["phase"] == "soak", bound_s=10, bound_source="1 interval")
    a, b, c, d = stack.sent[:4]
    assert a["prompt"] == b["prompt"] != c["prompt"] == d["prompt"]
    assert [x["engine"] for x in (a, b, c, d)] == ["e0", "e1", "e0", "e1"]
    sent = len(stack.sent)
    time.sleep(3 * QUICK_S)  # why: that nothing is sent any more can only be seen by waiting
    assert len(stack.sent) == sent


def test_paused_traffic_sends_nothing_and_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("suite.gates.degrade_traffic.INTERVAL_S", QUICK_S)
    stack = FakeStack(answers=True)
    with traffic(stack) as running:
        wait_for("a request", lambda: stack.sent, bound_s=10, bound_source="1 interval")
        with running.paused():
            sent = len(stack.sent)
            assert not running._open
            time.sleep(3 * QUICK_S)  # why: that nothing is sent can only be seen by waiting
            assert len(stack.sent) == sent
        wait_for("traffic to go on", lambda: len(stack.sent) > sent, bound_s=10, bound_source="1 interval")


def test_traffic_is_bounded_while_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("suite.gates.degrade_traffic.INTERVAL_S", 0.001)
    stack = FakeStack(answers=False)
    with traffic(stack) as running:
        wait_for("requests to be left out", lambda: running.left_out > 3, bound_s=10, bound_source="1 ms a request")
        assert len(stack.sent) == MAX_OPEN
        for one in stack.sent:
            one["pending"].future.set_result(None)
        stack.answers = True


def test_what_breaks_in_the_thread_reaches_the_case() -> None:
    class Broken(FakeStack):
        def start(self, request: dict[str, Any], *, case_id: str, phase: str) -> FakePending:
            raise RuntimeError("no such engine")

    with pytest.raises(RuntimeError, match="no such engine"), traffic(Broken(answers=True)) as running:
        wait_for(
            "the thread to end", lambda: not running._thread.is_alive(), bound_s=10, bound_source="it ends at once"
        )
