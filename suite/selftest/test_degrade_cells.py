"""The fault matrix: its table, and its judge on hand-made histories, one that passes and one for each finding."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from fixtures.errors import Untestable
from fixtures.spec import load_spec
from reports import records as r
from suite.contract import safe_judge
from suite.gates import degrade_cells as cells
from suite.gates import degrade_settings
from suite.gates.degrade_cells import Cell
from suite.gates.degrade_faults import stack_of
from suite.gates.stalls import StallWatch
from suite.gates.test_degrade_matrix import MASTER, OWNER, CellGate
from suite.selftest.degrade_samples import (
    FAULT_S,
    WRONG,
    Change,
    added,
    ask,
    fault,
    history,
    hung,
    metrics,
    processes,
    records,
    replaced,
    wait,
)

pytestmark = pytest.mark.selftest

FREEZE = Cell(cells.MASTER, "freeze", "idle", "before-ttl")
OWNED = Cell(cells.OWNER, "freeze", "idle", "before-ttl")
BUSY = Cell(cells.MASTER, "freeze", "busy", "before-ttl")
LOADING = Cell(cells.MASTER, "freeze", "load", "before-ttl")


def judged(cell: Cell, *changes: Change) -> r.Verdict:
    gate: CellGate = OWNER if cell.target == cells.OWNER else MASTER
    return safe_judge(gate, history(cell, *changes))


def role_of(rec: r.Record) -> str:
    return rec.role if isinstance(rec, r.Observation) else ""


def changed(role: str, **fields: Any) -> Change:
    """Every request of a role (or whose role begins with it) with other fields."""
    return replaced(lambda rec: role_of(rec).startswith(role), lambda o: msgspec.structs.replace(o, **fields))


def dropped(kind: type[r.Record], **fields: Any) -> Change:
    """Records of a kind with these fields left out."""
    return replaced(
        lambda rec: isinstance(rec, kind) and all(getattr(rec, k) == v for k, v in fields.items()), lambda _: None
    )


def metric(engine: str, label: str, **values: float) -> Change:
    return replaced(
        lambda rec: isinstance(rec, r.MetricsSnapshot) and (rec.unit, rec.label) == (engine, label),
        lambda rec: metrics(engine, label, rec.t_s, **values),
    )


def late(role: str, took_s: float) -> Change:
    return replaced(
        lambda rec: role_of(rec).startswith(role),
        lambda o: msgspec.structs.replace(
            o, first_token_s=o.sent_s + took_s, token_s=(o.sent_s + took_s,) * 2, done_s=o.sent_s + took_s
        ),
    )


# The table ----------------------------------------------------------------------------------------------------------


def test_ids_are_unique_and_say_what_is_hurt() -> None:
    found = cells.cells()
    assert len({cell.id for cell in found}) == len(found)
    for cell in found:
        assert cell.id.startswith(f"D.{cell.target}.{cell.fault}.{cell.phase}")
        assert cell.target in cells.CLAIMS
        assert cell.fault in cells.FAULTS[cell.target]


def test_the_core_says_why_and_the_rest_is_not_core() -> None:
    assert all(cell.core and cell.why for cell in cells.CORE)
    assert not any(cell.core for cell in cells.full_matrix())
    assert 16 <= len(cells.CORE) <= 24


def test_every_cells_stack_has_what_its_faults_need() -> None:
    base = load_spec("cpu")
    in_containers = base.with_changes(runtime="docker")
    for cell in cells.cells():
        store = stack_of(in_containers if cell.topology == "volume" else base, cell).store
        assert store is not None
        for target, name in cell.parts:
            assert store.control_proxy or not (target == cells.CONTROL and name in cells.PROXIED), cell.id
            assert store.owners or target not in (cells.OWNER, cells.DATA), cell.id
            assert store.ssd_bytes or target != cells.DISK, cell.id
            assert store.ssd_volume_bytes or (target, name) != (cells.DISK, "full"), cell.id
            assert store.masters > 1 or target not in (cells.LEADER, cells.ETCD), cell.id


def test_settings_are_compared_under_cells_of_the_matrix_and_each_changes_the_stack() -> None:
    base = load_spec("cpu")
    have = {cell.id for cell in cells.cells()}
    for situation in cells.SITUATIONS:
        compared = cells.settings_of(situation)
        assert compared[0] == situation
        assert {cell.id for cell in compared} <= have
        assert len({stack_of(base, cell).key() for cell in compared}) == len(cells.SETTINGS)


def test_the_table_of_settings_tells_what_was_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    owner, default = (cell.id for cell in cells.settings_of(cells.SITUATIONS[0])[:2])
    given = {
        owner: r.Verdict(case_id=owner, gate="D.owner", outcome=r.Outcome.PASS, claim=""),
        default: r.Verdict(
            case_id=default,
            gate="D.owner",
            outcome=r.Outcome.FAIL,
            claim="",
            findings=(r.Finding(code=r.FindingCode.FAILED_REQUEST, message="m"),),
        ),
    }
    head, _, first, second, *rest = degrade_settings.table(given).splitlines()
    assert head.count("`D.") == len(cells.SITUATIONS)
    assert first == "| recompute, isolated | PASS | NOT RUN | NOT RUN | NOT RUN |"
    assert second == "| load failures as upstream | FAIL `failed-request` | NOT RUN | NOT RUN | NOT RUN |"
    assert len(rest) == len(cells.SETTINGS) - 2
    assert degrade_settings.main([str(tmp_path)]) == 4
    assert "no history" in capsys.readouterr().err


def test_no_file_system_of_the_host_is_ever_filled() -> None:
    cell = next(cell for cell in cells.cells() if (cell.target, cell.fault) == (cells.DISK, "full"))
    with pytest.raises(Untestable, match="host's own"):
        stack_of(load_spec("cpu"), cell)


def test_every_core_kill_has_a_freeze_twin_somewhere() -> None:
    have = {(cell.target, cell.fault) for cell in cells.cells()}
    assert {(target, "freeze") for target, name in have if name == "kill"} <= have


def test_a_cell_is_read_back_from_its_params() -> None:
    for cell in cells.cells():
        assert msgspec.convert(cell.params(), dict[str, Any])["target"] == cell.target
        assert Cell.of({**cell.params(), "of a later version": 1}).id == cell.id


# The judge ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cell", [FREEZE, OWNED, Cell(cells.MASTER, "restart", "idle")])
def test_a_cell_in_which_all_is_well_passes(cell: Cell) -> None:
    verdict = judged(cell)
    assert verdict.outcome is r.Outcome.PASS, verdict.findings
    assert verdict.numbers["good_requests"] == 10
    assert verdict.numbers["token_seconds_lost"] == 0
    assert verdict.numbers["good_again_s"] == 0
    assert len(verdict.numbers["envelope"]["requests"]) == 16


VICTIM_HANGS = changed("victim/1", timed_out=True, http_status=None, error="deadline", done_s=FAULT_S + 17)
BYSTANDER_HANGS = changed("bystander", timed_out=True, http_status=None, error="deadline", done_s=FAULT_S + 17)

RED: dict[str, tuple[Cell, tuple[Change, ...], str, str]] = {
    # name -> (cell, changes, outcome, primary finding)
    "failed victim": (FREEZE, (changed("victim/1", http_status=500, error="boom"),), "FAIL", "failed-request"),
    "failed bystander": (FREEZE, (changed("bystander", error="stream ended"),), "FAIL", "failed-request"),
    "hanging victim": (FREEZE, (VICTIM_HANGS,), "FAIL", "hang"),
    "stuck engine behind health": (FREEZE, (BYSTANDER_HANGS,), "FAIL", "stuck-behind-health"),
    "slow victim": (FREEZE, (late("victim/1", 5.0),), "FAIL", "slow-degrade"),
    "slow bystander": (FREEZE, (late("bystander", 2.0),), "FAIL", "slow-degrade"),
    "slow after the heal": (FREEZE, (late("returned", 2.0),), "FAIL", "slow-degrade"),
    "wrong victim": (OWNED, (changed("victim/1", top_logprobs=WRONG),), "FAIL", "wrong-answer"),
    "wrong after the heal": (OWNED, (changed("returned", top_logprobs=WRONG),), "FAIL", "wrong-answer"),
    "lookup loop": (OWNED, (metric("e1", "after-fault", **{"store.lookup_exists.ok.ops": 99.0}),), "FAIL", "unbounded-lookups"),
    "an engine died along": (FREEZE, (replaced(lambda rec: isinstance(rec, r.ProcessSnapshot) and rec.label == "after/e0", lambda _: processes("e0", "after", pid=8)),), "FAIL", "engine-died"),
    "never good again": (FREEZE, (replaced(lambda rec: isinstance(rec, r.WaitRecord) and rec.what == "first-good", lambda rec: wait("first-good", rec.t_s, False, 20.0)),), "FAIL", "hang"),
    "hits not back": (FREEZE, (replaced(lambda rec: isinstance(rec, r.WaitRecord) and rec.what == "hits-back", lambda rec: wait("hits-back", rec.t_s, False, 30.0)),), "FAIL", "hits-not-back"),
    "longest request refused": (FREEZE, (changed("maximum-length", http_status=500, error="no room"),), "FAIL", "admission-refused"),
    "KV not given back": (FREEZE, (metric("e0", "idle/e0", kv_usage_ratio=0.25),), "FAIL", "kv-leak"),
    "requests left in the engine": (FREEZE, (metric("e0", "idle/e0", running=1.0),), "FAIL", "kv-leak"),
    "a survivor's traceback": (FREEZE, (added(r.LogLine(unit="e0", line_number=9, text="Traceback (most recent call last):", category="traceback", t_s=FAULT_S + 3)),), "FAIL", "unexplained-log"),
    "a unit that does not come back": (Cell(cells.OWNER, "kill", "idle", "after-ttl"), (added(r.StartAttempt(unit="owner0", t_s=FAULT_S + 5, elapsed_s=30, bound_s=30, result="neither")),), "FAIL", "never-ready"),
    # Ours
    "fault did not land": (FREEZE, (replaced(lambda rec: isinstance(rec, r.FaultRecord) and rec.action == "inject", lambda _: fault(FREEZE, "inject", FAULT_S, landed=False)),), "HARNESS_ERROR", "fault-did-not-land"),
    "no fault": (FREEZE, (dropped(r.FaultRecord),), "HARNESS_ERROR", "no-pressure"),
    "nothing lay on the owner": (OWNED, (replaced(lambda rec: isinstance(rec, r.Fact) and rec.name == "owners", lambda f: msgspec.structs.replace(f, value=f.value | {"held_by": {"e0": 62}})),), "HARNESS_ERROR", "no-pressure"),
    "one victim lay elsewhere": (OWNED, (replaced(lambda rec: isinstance(rec, r.Fact) and rec.name == "owners" and rec.value["label"] == "victim/1", lambda f: msgspec.structs.replace(f, value=f.value | {"held_by": {}})),), "HARNESS_ERROR", "no-pressure"),
    "no victim was asked for": (FREEZE, (replaced(lambda rec: role_of(rec).startswith("victim"), lambda _: None),), "HARNESS_ERROR", "no-pressure"),
    "nothing was stored": (FREEZE, (replaced(lambda rec: isinstance(rec, r.Fact) and rec.name == "owners", lambda f: msgspec.structs.replace(f, value=f.value | {"blocks": 0})),), "HARNESS_ERROR", "no-pressure"),
    "nothing in flight": (LOADING, (), "HARNESS_ERROR", "no-pressure"),
    "no traffic": (BUSY, (), "HARNESS_ERROR", "no-pressure"),
    "no engine was looked at": (FREEZE, (replaced(lambda rec: isinstance(rec, r.ProcessSnapshot) and rec.label.startswith("after/"), lambda _: None),), "HARNESS_ERROR", "no-pressure"),
    # Too little to say
    "no cold answers": (FREEZE, (replaced(lambda rec: role_of(rec).startswith("cold"), lambda _: None),), "INCONCLUSIVE", "too-few-observations"),
    "counters not read": (OWNED, (dropped(r.MetricsSnapshot, label="after-fault", unit="e1"),), "INCONCLUSIVE", "too-few-observations"),
    "no control": (FREEZE, (dropped(r.Observation, role="control/0"),), "INCONCLUSIVE", "no-control"),
    "every victim was cancelled": (FREEZE, (replaced(lambda rec: role_of(rec).startswith("victim"), lambda rec: msgspec.structs.replace(rec, cancelled=True)),), "HARNESS_ERROR", "no-pressure"),
    "the fault came after all was over": (FREEZE, (replaced(lambda rec: isinstance(rec, r.FaultRecord) and rec.action == "inject", lambda rec: msgspec.structs.replace(rec, t_s=rec.t_s + 1000)),), "HARNESS_ERROR", "no-pressure"),
    "nobody waited for hits": (FREEZE, (dropped(r.WaitRecord, what="hits-back"),), "INCONCLUSIVE", "too-few-observations"),
    "nobody looked whether a joiner shares": (Cell(cells.MASTER, "freeze", "idle", "before-ttl", joiner=True), (), "INCONCLUSIVE", "too-few-observations"),
    "nobody asked for health": (FREEZE, (dropped(r.HealthProbe),), "INCONCLUSIVE", "too-few-observations"),
    "no idle engine": (FREEZE, (dropped(r.MetricsSnapshot, label="idle/e0"),), "INCONCLUSIVE", "too-few-observations"),
    "logs unread": (FREEZE, (dropped(r.Fact, name="logs.scanned"),), "INCONCLUSIVE", "too-few-observations"),
    "oracle blind": (FREEZE, (replaced(lambda rec: role_of(rec) == "planted", lambda o: msgspec.structs.replace(o, top_logprobs=ask("x", "x", "x", 0).top_logprobs)),), "INCONCLUSIVE", "oracle-blind"),
}  # fmt: skip


@pytest.mark.parametrize("name", RED)
def test_each_defect_of_a_history_is_found(name: str) -> None:
    cell, changes, outcome, code = RED[name]
    verdict = judged(cell, *changes)
    assert (str(verdict.outcome), verdict.finding) == (outcome, code), [f.message for f in verdict.findings]


def test_a_victim_that_hangs_does_not_make_its_engine_stuck() -> None:
    codes = {str(f.code) for f in judged(OWNED, VICTIM_HANGS).findings}
    assert "hang" in codes
    assert "stuck-behind-health" not in codes


def test_hanging_requests_are_counted_by_kind_once() -> None:
    verdict = judged(
        FREEZE, changed("victim", timed_out=True, http_status=None, done_s=FAULT_S + 17, first_token_s=None, token_s=())
    )
    assert next(f.message for f in verdict.findings if f.code == "hang").startswith("3 of 3 victim requests")
    assert verdict.numbers["hang_requests"] == 3
    assert verdict.numbers["token_seconds_lost"] > 3 * 2000 * 10


def test_traffic_that_two_engines_were_asked_for_is_answered_alike() -> None:
    twins = [
        ask(
            f"t{i}",
            "traffic",
            "degraded",
            FAULT_S + 1 + i,
            engine=f"e{i % 2}",
            number=300 + i // 2,
            tokens=400,
            case_id=BUSY.id,
        )
        for i in range(6)
    ]
    assert judged(BUSY, added(*twins)).outcome is r.Outcome.PASS
    twins[3] = msgspec.structs.replace(twins[3], top_logprobs=WRONG)
    assert judged(BUSY, added(*twins)).finding == "wrong-answer"


def test_a_request_in_flight_is_pressure() -> None:
    caught = ask("v9", "victim/2", "degraded", FAULT_S - 0.1, number=2, case_id=LOADING.id)
    assert judged(LOADING, added(caught)).outcome is r.Outcome.PASS


def test_lines_that_the_fault_explains_are_no_finding_but_only_after_it() -> None:
    def line(t_s: float) -> Change:
        text = "E1129 19:00:00.000000 123 client.cpp:1] Failed to ping master"
        return added(r.LogLine(unit="e0", line_number=9, text=text, category="connection", t_s=t_s))

    assert judged(FREEZE, line(FAULT_S + 3)).outcome is r.Outcome.PASS
    assert judged(FREEZE, line(FAULT_S - 3)).finding == "unexplained-log"


def test_a_late_proof_replaces_an_early_one() -> None:
    """A dropped packet shows only when somebody sends: the last record of an injection counts."""
    first = replaced(
        lambda rec: isinstance(rec, r.FaultRecord) and rec.action == "inject",
        lambda _: fault(FREEZE, "inject", FAULT_S, landed=False),
    )
    assert judged(FREEZE, first, added(fault(FREEZE, "inject", FAULT_S))).outcome is r.Outcome.PASS


def test_without_a_master_unseen_lookups_are_no_lack_of_pressure() -> None:
    none = {"store.lookup_exists.ok.ops": 10.0}
    assert judged(FREEZE, metric("e1", "after-fault", **none)).outcome is r.Outcome.PASS
    assert judged(OWNED, metric("e1", "after-fault", **none)).finding == "no-pressure"


def test_a_stack_that_is_left_broken_is_not_judged_for_recovery() -> None:
    broken = Cell(cells.PEER, "kill", "idle", topology="embedded")
    assert broken.left_broken
    rows = [rec for rec in records(broken) if not isinstance(rec, r.WaitRecord)]
    assert len(rows) == len(records(broken)) - 2
    from suite.gates.test_degrade_matrix import PEER

    held = replaced(
        lambda rec: isinstance(rec, r.Fact) and rec.name == "owners",
        lambda f: msgspec.structs.replace(f, value=f.value | {"held_by": {"peer": 62}}),
    )
    verdict = safe_judge(PEER, history(broken, dropped(r.WaitRecord), held))
    assert verdict.outcome is r.Outcome.PASS, verdict.findings
    assert any("recovery was not judged" in note for note in verdict.notes)


def test_good_again_is_after_the_last_bad_one() -> None:
    verdict = judged(FREEZE, late("victim/2", 5.0))
    assert verdict.numbers["slow_requests"] == 1
    assert 6.0 <= verdict.numbers["good_again_s"] <= 6.5
    all_bad = judged(FREEZE, late("victim", 5.0), late("returned", 5.0), late("bystander", 5.0))
    assert "good_again_s" not in all_bad.numbers


def test_without_a_control_time_is_nobody_s_fault_but_a_wrong_answer_is() -> None:
    control = dropped(r.Observation, role="control/0")
    slow = judged(FREEZE, control, late("victim/1", 5.0), VICTIM_HANGS)
    assert slow.outcome is r.Outcome.INCONCLUSIVE
    assert any(note.startswith("without a control: hang") for note in slow.notes)
    assert judged(OWNED, control, changed("victim/1", top_logprobs=WRONG)).finding == "wrong-answer"
    assert judged(OWNED, control, changed("victim/1", http_status=500, error="x")).finding == "failed-request"


def test_a_lost_disk_has_to_be_missed_by_a_load_and_a_full_one_by_none() -> None:
    assert judged(Cell(cells.DISK, "lose", "idle", topology="tiered")).finding == "too-few-observations"
    assert judged(Cell(cells.KEYS, "delete", "lookup")).finding != ""
    full = judged(Cell(cells.DISK, "full", "idle", "before-ttl", topology="volume"))
    assert full.outcome is r.Outcome.PASS, full.findings


def test_a_host_that_stood_still_is_a_control_that_failed() -> None:
    def still(at_s: float) -> Change:
        return added(r.Fact(name="host.stalls", t_s=FAULT_S + 9, value=[{"from_s": at_s, "stall_s": 4.0}]))

    assert judged(FREEZE, still(FAULT_S + 1), late("victim/1", 5.0)).outcome is r.Outcome.INCONCLUSIVE
    assert judged(FREEZE, still(FAULT_S + 1)).outcome is r.Outcome.INCONCLUSIVE
    assert judged(FREEZE, still(FAULT_S - 20), late("victim/1", 5.0)).finding == "slow-degrade"  # before the fault
    assert judged(OWNED, still(FAULT_S + 1), changed("victim/1", top_logprobs=WRONG)).finding == "wrong-answer"


def test_a_stall_in_the_baseline_buys_no_time_after_the_fault() -> None:
    slow = replaced(
        lambda rec: isinstance(rec, r.Observation) and rec.phase == "baseline",
        lambda rec: msgspec.structs.replace(
            rec, first_token_s=rec.sent_s + 4.0, token_s=(rec.sent_s + 4.0,) * 2, done_s=rec.sent_s + 4.1
        ),
    )
    still = added(r.Fact(name="host.stalls", t_s=FAULT_S + 9, value=[{"from_s": 70.01, "stall_s": 3.8}]))
    assert judged(FREEZE, slow, late("victim/1", 5.0)).outcome is r.Outcome.PASS  # three times a cold request of 4 s
    assert judged(FREEZE, slow, still, late("victim/1", 5.0)).finding == "slow-degrade"


def test_the_watch_notes_when_it_could_not_wake() -> None:
    times = iter([0.0, 0.05, 0.1, 3.1, 3.15, 3.2])
    waits = iter([False, False, False, False, True])
    facts: list[tuple[str, object]] = []
    stack = SimpleNamespace(fact=lambda name, value: facts.append((name, value)))
    with StallWatch(cast(Any, stack), lambda: next(times), lambda _: next(waits)):
        pass
    assert facts == [("host.stalls", [{"from_s": 0.1, "stall_s": 3.0}])]


def test_a_pair_needs_both_faults_to_meet_what_they_are_meant_to_meet() -> None:
    pair = next(cell for cell in cells.pairs() if (cell.target, cell.second) == (cells.MASTER, "owner-kill"))
    assert pair.parts == (("master", pair.fault), ("owner", "kill"))
    assert 0 <= pair.second_after_s <= 3

    def on(unit: str) -> Change:
        return replaced(
            lambda rec: isinstance(rec, r.Fact) and rec.name == "owners",
            lambda f: msgspec.structs.replace(f, value=f.value | {"held_by": {unit: 62}}),
        )

    second = msgspec.structs.replace(fault(OWNED, "inject", FAULT_S + 1), fault_id="kill:owner0:1", fault="kill")
    assert judged(pair, added(second), on("owner0")).outcome is r.Outcome.PASS
    assert judged(pair, added(second), on("e0")).finding == "no-pressure"
    assert judged(pair, on("owner0")).finding == "no-pressure"  # the second never came
    assert (
        judged(pair, added(msgspec.structs.replace(second, landed=False)), on("owner0")).finding == "fault-did-not-land"
    )


def test_hung_helper_is_a_hang() -> None:
    assert (
        judged(FREEZE, added(hung("h", "victim/2", "degraded", FAULT_S + 2, number=2, case_id=FREEZE.id))).finding
        == "hang"
    )


def test_the_page_of_the_matrix_is_the_one_the_table_makes() -> None:
    from suite.gates.degrade_page import page
    from suite.selftest.test_docs import ROOT

    text = (ROOT / "docs" / "fault-matrix.md").read_text()
    assert text == page(), "run: python -m suite.gates.degrade_page > docs/fault-matrix.md"
