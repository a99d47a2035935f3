"""A master that moves: its judge on hand-made histories, and the moves on real servers without engines."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from fixtures.errors import HarnessError
from fixtures.faults import MoveMaster, moving
from fixtures.stack import Stack
from reports import records as r
from reports.history import History
from suite.contract import safe_judge
from suite.gates.test_master_moved import BEHIND_A_NAME, MASTER_MOVED, ROLLED
from suite.selftest import test_degrade_rolling as rolling_samples
from suite.selftest.degrade_samples import WRONG, Change, replaced
from suite.selftest.process_helpers import own_state_dir, until
from suite.selftest.store_stack import store_stack

pytestmark = pytest.mark.selftest

CASES = {case.params["how"]: case for case in MASTER_MOVED.cases()}
OLD, NEW = "127.0.0.1:1000", "127.0.0.1:2000"


def records(how: str) -> list[r.Record]:
    """The rolling restart's, as those of a move: ``e0`` and ``e1`` stopped and back (where they are rolled), traffic throughout."""
    case = CASES[how]
    told = {"e0": [OLD, NEW], "e1": [OLD, NEW]} if how == ROLLED else {}
    out: list[r.Record] = []
    for record in rolling_samples.records():
        if isinstance(record, r.CaseStarted):
            record = msgspec.structs.replace(record, case_id=case.id, gate=MASTER_MOVED.id, params=case.params)
        elif isinstance(record, r.CaseFinished):
            out.append(r.Fact(name="moved", t_s=899.0, value={"from": OLD, "to": NEW, "told": told, "left": []}))
            record = msgspec.structs.replace(record, case_id=case.id)
        elif isinstance(record, r.Observation):
            changes: dict[str, Any] = {"case_id": case.id} if record.case_id == rolling_samples.CASE.id else {}
            if record.phase == "rolling":
                changes["phase"] = "moving"
            record = msgspec.structs.replace(record, **changes)
        elif how == BEHIND_A_NAME and isinstance(record, r.FaultRecord):
            if record.target != "e0":
                continue
            record = msgspec.structs.replace(
                record, fault_id="move-master:master:1", fault="move-master", target="master", proof={"from": OLD}
            )
        elif how == BEHIND_A_NAME and isinstance(record, r.StartAttempt):
            record = msgspec.structs.replace(record, unit="master-moved")
        out.append(record)
    return out


def judged(how: str, *changes: Change) -> r.Verdict:
    rows = records(how)
    for change in changes:
        rows = change(rows)
    return safe_judge(MASTER_MOVED, History(rows).for_case(CASES[how].id))


def fact(**changes: Any) -> Change:
    return replaced(
        lambda rec: isinstance(rec, r.Fact) and rec.name == "moved",
        lambda rec: msgspec.structs.replace(rec, value=rec.value | changes),
    )


@pytest.mark.parametrize("how", CASES)
def test_a_move_that_nobody_notices_passes(how: str) -> None:
    verdict = judged(how)
    assert verdict.outcome is r.Outcome.PASS, verdict.findings
    assert verdict.numbers["back_s"].keys() == {"hits-back/e0", "hits-back/e1"}


of, gone = rolling_samples.of, rolling_samples.gone
RED: dict[str, tuple[Change, str]] = {
    "a request lost": (of(r.Observation, {"request_id": "t5"}, http_status=None, error="lost: reset"), "failed-request"),
    "another answer": (of(r.Observation, {"request_id": "t5"}, top_logprobs=WRONG), "wrong-answer"),
    "slow": (of(r.Observation, {"request_id": "t5"}, first_token_s=109.0, token_s=(109.0, 109.0), done_s=109.1), "slow-degrade"),
    "the new master never serves": (of(r.StartAttempt, {}, result="neither"), "never-ready"),
    "does not share again": (of(r.WaitRecord, {"what": "hits-back/e1"}, came_true=False), "hits-not-back"),
    "nobody looked whether one shares": (gone(r.WaitRecord, what="hits-back/e1"), "too-few-observations"),
    "no traffic": (gone(r.Observation, phase="moving"), "no-pressure"),
    "nothing moved": (fact(to=OLD), "no-pressure"),
    "nobody says whether it moved": (gone(r.Fact, name="moved"), "no-pressure"),
    "nobody read the logs": (gone(r.Fact, name="logs.scanned"), "too-few-observations"),
}  # fmt: skip


@pytest.mark.parametrize("how", CASES)
@pytest.mark.parametrize("name", RED)
def test_each_defect_of_a_move_is_found(name: str, how: str) -> None:
    change, code = RED[name]
    verdict = judged(how, change)
    assert verdict.finding == code, [f.message for f in verdict.findings]


def test_a_move_behind_a_name_has_landed_and_a_rolled_one_reached_every_engine() -> None:
    assert judged(BEHIND_A_NAME, of(r.FaultRecord, {}, landed=False)).finding == "fault-did-not-land"
    assert judged(BEHIND_A_NAME, gone(r.FaultRecord)).finding == "no-pressure"
    assert judged(ROLLED, fact(told={"e0": [OLD, NEW]})).finding == "no-pressure"
    assert judged(ROLLED, fact(told={"e0": [OLD, NEW], "e1": [NEW, NEW]})).finding == "no-pressure"
    assert judged(ROLLED, of(r.FaultRecord, {"target": "e1"}, landed=False)).finding == "unclean-stop"


# On real servers ----------------------------------------------------------------------------------------------------
@pytest.fixture
def own_state(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    with own_state_dir(monkeypatch):
        yield


def put(stack: Stack, prefix: str) -> set[str]:
    keys = [f"{prefix}{i}" for i in range(4)]
    (answer,) = stack.store_tool([{"op": "put", "keys": keys, "bytes": 1000}])
    assert set(answer.values()) == {0}
    return set(keys)


def segments(stack: Stack) -> int:
    assert stack.store is not None
    return len(stack.store.admin.segment_list())


@pytest.mark.slow
@pytest.mark.needs("cpu-stack")
def test_behind_a_name_clients_find_the_new_master(own_state: None, tmp_path: Path) -> None:
    with store_stack(tmp_path, 'mode = "standalone"\nowners = 1\ncontrol_proxy = true') as stack:
        assert stack.store is not None
        before = stack.store.plan.address
        assert put(stack, "old") <= stack.keys()
        record = MoveMaster().inject(stack)
        assert record.landed, record.proof
        assert (record.proof["from"], record.proof["to"]) == (before, stack.store.plan.address)
        assert "master" not in stack.units()
        assert stack.handle("master").launch.name == moving.NEW_MASTER
        until(lambda: segments(stack) == 1)  # the owner comes to the new one by itself
        assert stack.key_count() == 0
        assert put(stack, "new") <= stack.keys()


@pytest.mark.slow
@pytest.mark.needs("cpu-stack")
def test_a_second_master_and_owner_take_the_place_of_the_first(own_state: None, tmp_path: Path) -> None:
    with store_stack(tmp_path, 'mode = "standalone"\nowners = 1') as stack:
        with pytest.raises(HarnessError, match="its own address"):
            MoveMaster().inject(stack)
        put(stack, "old")
        master = moving.start_master(stack)
        owner = moving.start_owner(stack, master)
        assert set(stack.units()) == {"master", "owner0", moving.NEW_MASTER, moving.NEW_OWNER}
        former = moving.adopt(stack, master, {moving.NEW_OWNER: owner})
        assert [handle.launch.name for handle in former] == ["master", "owner0"]
        for handle in reversed(former):
            stack.runtime.stop(handle, 2.0)
        assert set(stack.units()) == {moving.NEW_MASTER, moving.NEW_OWNER}
        assert put(stack, "new") == stack.keys()


def test_an_engine_is_told_the_new_address_in_its_own_file(tmp_path: Path) -> None:
    config = tmp_path / "mooncake.json"
    config.write_text(json.dumps({"master_server_address": OLD, "protocol": "tcp"}))
    env = {"MOONCAKE_CONFIG_PATH": str(config)}
    stack = cast(Stack, SimpleNamespace(handle=lambda _: SimpleNamespace(launch=SimpleNamespace(env=env))))
    assert moving.tell_address(stack, "e0", NEW) == (OLD, NEW)
    assert json.loads(config.read_text()) == {"master_server_address": NEW, "protocol": "tcp"}
    config.write_text("{}")
    with pytest.raises(HarnessError, match="no master_server_address"):
        moving.tell_address(stack, "e0", NEW)
    env.clear()
    with pytest.raises(HarnessError, match="MOONCAKE_CONFIG_PATH"):
        moving.tell_address(stack, "e0", NEW)
