"""Family O, rolling restart: what operators do every week must cost nobody a request."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from reports import records as r
from reports.history import History
from suite.checks import faults
from suite.checks.base import run
from suite.contract import Case, Gate
from suite.gates import gate_cases, rolling
from suite.gates.degrade_cells import MASTER, Cell
from suite.gates.judging import explanation, ordered

if TYPE_CHECKING:
    from fixtures.spec import StackSpec
    from fixtures.stack import Stack

PHASE = "rolling"


class RollingRestart(Gate):
    """Claim: engines that are restarted one after the other, each drained first, cost no client a request.

    How it can lie: no traffic flowed; the engine was not stopped but killed; the pool was empty, so nothing had to last.
    Oracle: every request of the traffic answered in time and alike by two engines; each engine stops by itself on
    SIGTERM, comes back under its address, reads what the others saved and saves for them. ``upgrade``: each comes back in a
    second environment, with another release of vLLM or Mooncake, while master, owner and the other engines have the old one.
    Turns red: an engine that has to be killed, a neighbour that waits for the one that left, a pool that forgets.
    """

    id = "O.rolling-restart"
    version = 3
    claim = "engines that are restarted one after the other, each drained first, cost no client a request"

    def cases(self) -> Iterable[Case]:
        yield Case(f"{self.id}.standalone", {"topology": "standalone"}, core=False, dirties=True)
        yield Case(f"{self.id}.embedded", {"topology": "embedded"}, core=False, dirties=True)
        yield Case(
            f"{self.id}.upgrade",
            {"topology": "standalone", "upgrade": True},
            needs=("second-stack",),
            core=False,
            dirties=True,
        )

    def stack(self, base: StackSpec, case: Case) -> StackSpec:
        from suite.gates.degrade_faults import stack_of

        return stack_of(base, Cell(MASTER, "freeze", topology=case.params["topology"])) if base.store else base

    def collect(self, stack: Stack, case: Case) -> None:
        from suite.gates.degrade_collect import CellCollector

        collector = CellCollector(stack, case.id, Cell(MASTER, "freeze", topology=case.params["topology"]))
        collector.prepare()
        with rolling.under_traffic(collector, PHASE) as traffic, stack.phase(case.id, "restarts"):
            for name in stack.names:
                rolling.restart_drained(stack, name, traffic, upgrade=bool(case.params.get("upgrade")))
                collector.wait_shared(name)
        stack.scan_logs(case.id)

    def judge(self, history: History) -> r.Verdict:
        traffic, checks = rolling.traffic_checks(history, PHASE)
        checks = {
            "stops": lambda: rolling.stops(history),
            "upgraded": lambda: _upgraded(history),
            **checks,
            "back": lambda: rolling.back(history),
        }
        findings = ordered(run(checks))
        starts = {a.unit: round(a.elapsed_s, 1) for a in history.of(r.StartAttempt)}
        releases = {f.value["engine"]: f.value["releases"] for f in history.facts("upgraded")}
        return self.judged(
            history,
            findings,
            good=f"{len(traffic)} requests answered right while {len(starts)} restarted",
            wanted="every request answered right and in time, each engine stopped by itself and shares again",
            numbers={"requests": len(traffic), "start_s": starts, "came_back_with": releases},
            **explanation(history, findings),
        )


def _upgraded(history: History) -> list[r.Finding]:
    """Where engines were to be upgraded, each runs in the second environment."""
    if not history.case.params.get("upgrade"):
        return []
    done = {f.value["engine"] for f in history.facts("upgraded") if f.value["runs"] == f.value["meant"]}
    engines = rolling.engines_of(history)
    return faults.no_pressure("engines upgraded", len(done & set(engines)), len(engines) or 1)


ROLLING_RESTART = RollingRestart()


@gate_cases(ROLLING_RESTART)
def test_rolling_restart(run_case: Any, case: Case) -> None:
    run_case(ROLLING_RESTART, case)
