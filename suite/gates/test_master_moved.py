"""Family O, master moved: to another host, another pod, another port. Operators do it, and it must cost nobody a request."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from reports import records as r
from reports.history import History
from suite.checks import faults
from suite.checks.base import run
from suite.contract import Case, Gate
from suite.gates import gate_cases, rolling
from suite.gates.degrade_cells import MASTER, Cell, Topology
from suite.gates.judging import explanation, ordered

if TYPE_CHECKING:
    from fixtures.spec import StackSpec
    from fixtures.stack import Stack
    from suite.gates.degrade_collect import CellCollector

PHASE = "moving"

AFTER_S = 10.0
"""Traffic after the move, when the engines share again: what comes late is seen too."""

BEHIND_A_NAME, ROLLED = "behind-name", "new-address"

MOVED = "moved"
"""Fact: ``{"from", "to", "told": {engine: [before, now]}, "left": [units of before that had to be killed]}``."""


class MasterMoved(Gate):
    """Claim: when the master moves to another address, every request is answered right and in time, and engines share again.

    How it can lie: no traffic flowed; the old master still serves; engines share over the old pool; nothing had to move.
    Oracle: every request of the traffic answered in time and alike by two engines; the new master's own listing shows what
    engines save, and each engine reads it. ``behind-name``: clients keep the name (a proxy, as a virtual address is one), the
    new master is empty, the old one is stopped. ``new-address``: a second master and owner are brought up, each engine is
    drained and restarted with the new address, then the old ones are stopped; meanwhile there are two pools.
    Turns red: an engine that goes on asking the old address, memory that is not mounted again, a wait for a peer that left.
    """

    id = "O.master-moved"
    version = 2
    claim = (
        "when the master moves to another address, every request is answered right and in time, and engines share again"
    )

    def cases(self) -> Iterable[Case]:
        yield Case(f"{self.id}.{BEHIND_A_NAME}", {"how": BEHIND_A_NAME}, core=False, dirties=True)
        yield Case(f"{self.id}.{ROLLED}", {"how": ROLLED}, core=False, dirties=True)

    def stack(self, base: StackSpec, case: Case) -> StackSpec:
        from suite.gates.degrade_faults import stack_of

        return stack_of(base, _cell(case)) if base.store else base

    def collect(self, stack: Stack, case: Case) -> None:
        from suite.gates.degrade_collect import CellCollector

        collector = CellCollector(stack, case.id, _cell(case))
        collector.prepare()
        move = _behind_a_name if case.params["how"] == BEHIND_A_NAME else _rolled
        with rolling.under_traffic(collector, PHASE) as traffic, stack.phase(case.id, "move"):
            stack.scan_logs(case.id)  # of the units that the move ends
            stack.fact(MOVED, move(collector, traffic))
            for name in stack.names:
                collector.wait_shared(name)
            rolling.let_pass(stack, AFTER_S, "traffic after the move", "suite.gates.test_master_moved.AFTER_S")
        stack.scan_logs(case.id)

    def judge(self, history: History) -> r.Verdict:
        traffic, asked = rolling.traffic_checks(history, PHASE)
        checks = {"moved": lambda: _moved(history), **asked, "back": lambda: rolling.back(history)}
        if history.case.params["how"] == ROLLED:
            checks["stops"] = lambda: rolling.stops(history)
        findings = ordered(run(checks))
        back_s = {w.what: round(w.elapsed_s, 1) for w in history.of(r.WaitRecord) if w.what.startswith("hits-back/")}
        return self.judged(
            history,
            findings,
            good=f"{len(traffic)} requests answered right while the master moved",
            wanted="every request answered right and in time, and every engine shares over the new master",
            numbers={
                "requests": len(traffic),
                "ttft_worst_s": round(max((o.ttft_s or 0.0 for o in traffic), default=0.0), 3),
                "back_s": back_s,
            },
            **explanation(history, findings),
        )


def _cell(case: Case) -> Cell:
    topology: Topology = "proxied" if case.params["how"] == BEHIND_A_NAME else "standalone"
    return Cell(MASTER, "freeze", topology=topology)


def _behind_a_name(collector: CellCollector, traffic: Any) -> dict[str, Any]:
    from fixtures.faults import MoveMaster

    record = MoveMaster().inject(collector.stack)
    return {"from": record.proof["from"], "to": record.proof["to"], "told": {}, "left": []}


def _rolled(collector: CellCollector, traffic: Any) -> dict[str, Any]:
    from fixtures.faults import moving

    stack = collector.stack
    assert stack.store is not None
    before = stack.store.address
    master = moving.start_master(stack)
    owner = moving.start_owner(stack, master)
    told: dict[str, tuple[str, str]] = {}

    def tell(name: str) -> None:
        told[name] = moving.tell_address(stack, name, master.plan.address)

    for name in stack.names:
        rolling.restart_drained(stack, name, traffic, between=partial(tell, name))
    former = moving.adopt(stack, master, {moving.NEW_OWNER: owner})
    left = [unit for handle in reversed(former) for unit in stack.runtime.stop(handle, stack.spec.timeouts.stop_s)]
    return {"from": before, "to": master.plan.address, "told": told, "left": left}


def _moved(history: History) -> list[r.Finding]:
    """The master is at another address, and whoever had to be told of it was."""
    fact = history.fact(MOVED)
    if fact is None or fact.value["from"] == fact.value["to"]:
        return faults.no_pressure("masters moved", 0, 1)
    if history.case.params["how"] == BEHIND_A_NAME:
        landed = [f for f in history.faults("inject") if f.fault == "move-master"]
        return faults.check_faults(landed)
    want = [fact.value["from"], fact.value["to"]]
    told = [name for name, pair in fact.value["told"].items() if list(pair) == want]
    engines = rolling.engines_of(history)
    return faults.no_pressure("engines told the new address", len(set(told) & set(engines)), len(engines) or 1)


MASTER_MOVED = MasterMoved()


@gate_cases(MASTER_MOVED)
def test_master_moved(run_case: Any, case: Case) -> None:
    run_case(MASTER_MOVED, case)
