"""The collect of the fault matrix on a simulated stack: every phase and role of every kind of cell, judged as in a run.

Faults and their heals are stand-ins (``selftest/test_faults*`` has the real ones on real servers); a fault here switches one
lie of the simulated stack on, so that the same path is seen to pass and to fail.
"""

from __future__ import annotations

import socket
import threading
import time
from itertools import islice
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest

from fixtures.faults.base import Fault, Proof
from fixtures.spec import BudgetSpec
from fixtures.waiting import wait_for
from reports import records as r
from suite.gates import degrade_cells as cells
from suite.gates import degrade_faults, degrade_recovery, degrade_soak
from suite.gates.degrade_cells import Cell
from suite.gates.degrade_collect import CellCollector
from suite.gates.test_degrade_matrix import CONTROL, DATA, DISK, KEYS, MASTER, OWNER, PEER, POOL, READER, CellGate
from suite.gates.test_degrade_soak import SOAK
from suite.selftest.simulated_stack import SimulatedPending, SimulatedStack, run_case, simulated_spec

pytestmark = [pytest.mark.selftest, pytest.mark.usefixtures("short_calibration")]

GATES: dict[str, CellGate] = {
    cells.MASTER: MASTER, cells.OWNER: OWNER, cells.PEER: PEER, cells.READER: READER,
    cells.CONTROL: CONTROL, cells.DATA: DATA, cells.KEYS: KEYS, cells.POOL: POOL, cells.DISK: DISK,
}  # fmt: skip


LIES = threading.RLock()
"""Requests of the case and of its traffic are served one at a time: each sees the stack as it was when it was sent."""

PATIENT = BudgetSpec(ttft_extra_s=60.0)
"""The clock of a loaded host is no part of what is tested here; ``test_degrade_cells`` judges budgets."""


class StandIn(Fault):
    """Does one thing to the simulated stack, and undoes it."""

    name: ClassVar[str] = "stand-in"
    healable = True
    lie: ClassVar[str] = ""
    lands: ClassVar[bool] = True
    meets: ClassVar[bool] = True
    """Keys that vanish do so under a load."""

    def _inject(self, stack: Any) -> tuple[bool, Proof]:
        if self.lie:
            with LIES:
                stack.lies.add(self.lie)
        if self.target in (cells.KEYS, cells.DISK) and self.meets:
            stack.held["e1"].counted["store.load_get.partial_failure.ops"] += 1
        return self.lands, {"witness": "the test"}

    def _heal(self, stack: Any) -> tuple[bool, Proof]:
        with LIES:
            stack.lies.discard(self.lie)
        return True, {"witness": "the test"}


class Pending(SimulatedPending):
    """With what the steady traffic asks of it. What the stack does wrong is what it did wrong when this was sent."""

    def __init__(self, stack: HurtStack, request: Any, case_id: str, phase: str) -> None:
        super().__init__(stack, request, case_id, phase)
        with LIES:
            self._lies = set(stack.lies)

    def _finish(self, cancelled: bool) -> r.Observation:
        with LIES:
            now, self._stack.lies = self._stack.lies, self._lies
            try:
                return super()._finish(cancelled)
            finally:
                self._stack.lies = now

    def done(self) -> bool:
        return True

    def result(self, timeout_s: float | None = None) -> r.Observation:
        return super().result()


class HurtStack(SimulatedStack):
    """A simulated stack that can be asked for owners and health, and that can be hurt."""

    def __init__(self, holder: str) -> None:
        super().__init__(simulated_spec(budget=PATIENT))
        self.holder = holder
        replica = SimpleNamespace(endpoint="127.0.0.1:9")
        store = cast(Any, self.store)
        store.admin.query_key = lambda key: (replica,)
        store.leader = lambda: "master0"
        cast(Any, self.client).start = self._begin
        self.runtime = cast(Any, SimpleNamespace(stop=lambda handle, grace_s: []))

    def _begin(self, request: Any, *, case_id: str, phase: str) -> Pending:
        return Pending(self, request, case_id, phase)

    def snapshot_sockets(self, label: str) -> r.SocketSnapshot:
        taken = r.SocketSnapshot(t_s=time.monotonic(), label=label, listening=(f"{self.holder} 127.0.0.1:9",))
        self.record(taken)
        return taken

    def health(self, engine: str, deadline_s: float = 5.0) -> r.HealthProbe:
        probe = r.HealthProbe(engine=engine, t_s=time.monotonic(), http_status=200, elapsed_s=0.0)
        self.record(probe)
        return probe

    def snapshot_processes(self, unit: str, label: str) -> r.ProcessSnapshot:
        facts = r.ProcessFacts(name=unit, pid=7, ppid=1, start_ticks=7)
        taken = r.ProcessSnapshot(
            unit=unit, t_s=time.monotonic(), label=label, processes=(facts,), threads=9, sockets=9, rss_bytes=1 << 28
        )
        self.record(taken)
        return taken

    def handle(self, unit: str) -> Any:
        return None

    def _serve(self, request: Any, prompt: tuple[int, ...], body: dict[str, Any]) -> dict[str, Any]:
        kind = request.role.partition("/")[0]
        if f"hangs-{kind}" in self.lies:
            return {"http_status": None, "timed_out": True, "error": "deadline"}
        if f"fails-{kind}" in self.lies:
            return {"http_status": 500, "error": "http 500: boom"}
        return super()._serve(request, prompt, body)


def stack_traffic(stack: Any) -> int:
    return sum(isinstance(o, r.Observation) and o.role == "traffic" for o in stack.records)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> type[StandIn]:
    """No time passes between beats; faults, revivals and proofs of health are stand-ins. Returns the fault's class."""

    class Chosen(StandIn):
        pass

    def hold(self: CellCollector, due_s: float) -> None:
        for name in self.plan.survivors:
            self.stack.health(name)
        if self.plan.cell.phase == "busy":
            seen = stack_traffic(self.stack)
            wait_for(
                "more traffic", lambda: stack_traffic(self.stack) > seen, bound_s=20, bound_source="10 ms a request"
            )

    def one(stack: Any, plan: Any, target: str, fault: str) -> Fault:
        return Chosen("data:owner0" if target == cells.DATA else plan.unit_of(target))

    def joined(stack: HurtStack, name: str, *, like: str, bound_s: float) -> r.StartAttempt:
        stack.engines[name], stack.held[name] = stack.engines[like], type(stack.held[like])()
        attempt = r.StartAttempt(unit=name, t_s=0.0, elapsed_s=1.0, bound_s=bound_s, result="ready")
        stack.record(attempt)
        return attempt

    def proven(stack: HurtStack, case_id: str) -> list[str]:
        stack.dirty = False
        return []

    monkeypatch.setattr(CellCollector, "_hold_until", hold)
    monkeypatch.setattr("suite.gates.degrade_traffic.INTERVAL_S", 0.01)
    monkeypatch.setattr("suite.gates.stalls.STALL_S", 3600.0)  # a loaded host is no part of what is tested here
    monkeypatch.setattr(degrade_faults, "make_fault", one)
    monkeypatch.setattr(degrade_recovery, "join", joined)
    monkeypatch.setattr(degrade_recovery, "revive", lambda stack, unit: None)
    monkeypatch.setattr("fixtures.healthy.prove_healthy", proven)
    return Chosen


def collected(cell: Cell, stack: HurtStack | None = None) -> tuple[r.Verdict, HurtStack]:
    holder = {cells.PEER: "e0"}.get(cell.target, "owner0")
    stack = stack or HurtStack(holder)
    return run_case(GATES[cell.target], cell.id, stack=stack), stack


def of_core(target: str) -> list[Cell]:
    return [cell for cell in cells.CORE if cell.target == target]


@pytest.mark.parametrize("cell", [cells.cells_of(target)[0] for target in GATES], ids=lambda cell: cell.id)
def test_every_kind_of_cell_is_collected_whole(cell: Cell, quick: type[StandIn]) -> None:
    verdict, stack = collected(cell)
    assert verdict.outcome is r.Outcome.PASS, [f.message for f in verdict.findings]
    roles = {o.role.partition("/")[0] for o in stack.records if isinstance(o, r.Observation) and o.case_id == cell.id}
    assert {"cold", "baseline", "short", "control", "victim", "bystander", "maximum-length"} <= roles
    assert ("traffic" in roles) == (cell.phase == "busy")
    assert ("doomed" in roles) == (cell.target == cells.READER)
    assert ("returned" in roles) == (not cell.left_broken)
    assert stack.dirty == cell.left_broken  # handed on only where it was proven well
    assert not stack.faults_active  # nothing is left hurt


@pytest.mark.parametrize("phase", ["save", "lookup", "load"])
def test_every_phase_puts_its_own_under_way(phase: cells.Phase, quick: type[StandIn]) -> None:
    cell = next(c for c in cells.cells_of(cells.OWNER) if c.phase == phase and c.fault == "freeze" and not c.second)
    verdict, _ = collected(cell)
    assert verdict.outcome is r.Outcome.PASS, [f.message for f in verdict.findings]


def test_victims_are_asked_once_each_and_by_an_engine_that_never_saw_them(quick: type[StandIn]) -> None:
    _, stack = collected(of_core(cells.OWNER)[0])
    asked = [
        o for o in stack.records if isinstance(o, r.Observation) and o.role.partition("/")[0] in ("victim", "returned")
    ]
    assert len({o.prompt_token_ids for o in asked}) == len(asked)
    assert {o.engine for o in asked} == {"e1"}
    saved = {o.prompt_token_ids for o in stack.records if isinstance(o, r.Observation) and o.role.startswith("cold/")}
    assert {o.prompt_token_ids for o in asked} <= saved


@pytest.mark.parametrize(
    ("lie", "finding"),
    [
        ("hangs-victim", "hang"),
        ("hangs-bystander", "stuck-behind-health"),
        ("fails-victim", "failed-request"),
        ("fails-bystander", "failed-request"),
        ("foreign", "wrong-answer"),
    ],
)
def test_what_the_fault_does_to_requests_is_found(lie: str, finding: str, quick: type[StandIn]) -> None:
    quick.lie = lie
    verdict, _ = collected(Cell(cells.OWNER, "freeze", "idle", "after-ttl"))
    assert verdict.finding == finding, [f.message for f in verdict.findings]


@pytest.mark.parametrize(
    ("lie", "finding"),
    [
        ("fails-probe", "hang"),
        ("zero-hits", "hits-not-back"),
        ("refuses-long", "admission-refused"),
        ("leak", "kv-leak"),
    ],
)
def test_a_stack_that_does_not_recover_is_found(
    lie: str, finding: str, quick: type[StandIn], monkeypatch: pytest.MonkeyPatch
) -> None:
    quick.lie = lie
    monkeypatch.setattr(quick, "_heal", lambda self, stack: (True, {"witness": "the test"}))  # it says so, and does not
    verdict, _ = collected(Cell(cells.MASTER, "freeze", "idle", "before-ttl"))
    assert finding in [str(f.code) for f in verdict.findings]
    assert verdict.outcome is r.Outcome.FAIL


def test_a_fault_that_does_not_land_is_ours(quick: type[StandIn]) -> None:
    quick.lands = False
    verdict, _ = collected(Cell(cells.MASTER, "freeze", "idle", "before-ttl"))
    assert verdict.finding == "fault-did-not-land"


def test_keys_that_vanish_before_or_after_the_loads_prove_nothing(quick: type[StandIn]) -> None:
    quick.meets = False
    for target in (cells.KEYS, cells.DISK):
        verdict, _ = collected(cells.cells_of(target)[0])
        assert verdict.outcome is r.Outcome.INCONCLUSIVE


def test_blocks_that_lay_elsewhere_are_no_pressure(quick: type[StandIn]) -> None:
    verdict, _ = collected(Cell(cells.OWNER, "freeze", "idle", "after-ttl"), HurtStack("e1"))
    assert verdict.finding == "no-pressure"


def test_two_faults_are_both_injected_and_both_healed(quick: type[StandIn]) -> None:
    pair = next(cell for cell in cells.pairs() if (cell.target, cell.second) == (cells.MASTER, "owner-freeze"))
    verdict, stack = collected(pair)
    assert verdict.outcome is r.Outcome.PASS, [f.message for f in verdict.findings]
    done = [(f.target, f.action) for f in stack.records if isinstance(f, r.FaultRecord)]
    assert done == [("master", "inject"), ("owner0", "inject"), ("master", "heal"), ("owner0", "heal")]


def test_a_joiner_shares_and_leaves(quick: type[StandIn]) -> None:
    cell = next(c for c in cells.CORE if c.joiner)
    verdict, stack = collected(cell)
    assert verdict.outcome is r.Outcome.PASS, [f.message for f in verdict.findings]
    assert "joiner" not in stack.engines
    assert [w.came_true for w in stack.records if isinstance(w, r.WaitRecord) and w.what == "hits-joiner"] == [True]


# The soak, which is made of the same parts ---------------------------------------------------------------------------


def soaked(monkeypatch: pytest.MonkeyPatch, turns: int = 4) -> tuple[r.Verdict, HurtStack]:
    whole = degrade_soak.schedule

    def wait_until(stack: Any, due_s: float, what: str) -> None:
        seen = stack_traffic(stack)
        wait_for("more traffic", lambda: stack_traffic(stack) >= seen + 8, bound_s=20, bound_source="10 ms a request")

    monkeypatch.setattr(degrade_soak, "schedule", lambda seed: islice(whole(seed), turns))
    monkeypatch.setattr(degrade_soak, "_wait_until", wait_until)
    stack = HurtStack("owner0")
    one, other = socket.socketpair()  # a real client's event loop has such a pair: sockets of this process are counted
    with one, other:
        return run_case(SOAK, "D.soak.random", stack=stack), stack


def test_a_soak_hurts_and_mends_until_its_time_is_over(quick: type[StandIn], monkeypatch: pytest.MonkeyPatch) -> None:
    verdict, stack = soaked(monkeypatch)
    assert verdict.outcome is r.Outcome.PASS, [f.message for f in verdict.findings]
    assert verdict.numbers["faults"] == 4
    done = [f.action for f in stack.records if isinstance(f, r.FaultRecord)]
    assert done.count("inject") >= 4
    assert not stack.faults_active
    assert {s.unit for s in stack.records if isinstance(s, r.ProcessSnapshot) and s.label == "turn/3"} == {
        "e0",
        "e1",
        "harness",
    }


def test_a_soak_whose_stack_is_not_well_again_ends_there(quick: type[StandIn], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fixtures.healthy.prove_healthy", lambda stack, case_id: ["e0: gone"])
    verdict, _ = soaked(monkeypatch)
    assert verdict.finding == "hits-not-back"
    assert verdict.numbers["faults"] == 1


def test_requests_that_hang_inside_a_fault_are_counted_and_not_judged(
    quick: type[StandIn], monkeypatch: pytest.MonkeyPatch
) -> None:
    quick.lie = "hangs-traffic"
    verdict, _ = soaked(monkeypatch, turns=6)  # the first faults of this seed are over at once
    assert verdict.outcome is r.Outcome.PASS, [f.message for f in verdict.findings]
    assert verdict.numbers["unanswered_inside_faults"] > 0
