"""Family O, rolling restart: what operators do every week must cost nobody a request."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from reports import records as r
from reports.history import History
from suite.checks import answers, faults, liveness, recovery
from suite.checks.base import finding, run
from suite.contract import Case, Gate, outcome_of
from suite.gates import gate_cases
from suite.gates.arms import REFERENCE
from suite.gates.degrade_cells import MASTER, Cell
from suite.gates.judging import explanation, ordered
from suite.gates.judging_degrade_cells import twins, unexplained_logs, waited, within_budget
from suite.gates.oracle import Oracle
from suite.gates.stalls import StallWatch, stalled, stalls_of

if TYPE_CHECKING:
    from fixtures.spec import StackSpec
    from fixtures.stack import Stack

BASELINE_S = 6.0
"""Traffic before the first stop: a dozen requests, whose median is the baseline of the budget."""

DRAIN_BOUND_S = 20.0
"""An engine that gets no new request is idle within a request's own time (0.1 s); the bound is the request's deadline."""


class RollingRestart(Gate):
    """Claim: engines that are restarted one after the other, each drained first, cost no client a request.

    How it can lie: no traffic flowed; the engine was not stopped but killed; the pool was empty, so nothing had to last.
    Oracle: every request of the traffic answered in time and alike by two engines; each engine stops by itself on
    SIGTERM, comes back under its address, reads what the others saved and saves for them. ``upgrade``: each comes back in a
    second environment, with another release of vLLM or Mooncake, while master, owner and the other engines have the old one.
    Turns red: an engine that has to be killed, a neighbour that waits for the one that left, a pool that forgets.
    """

    id = "O.rolling-restart"
    version = 2
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
        from suite.gates.degrade_traffic import Traffic

        collector = CellCollector(stack, case.id, Cell(MASTER, "freeze", topology=case.params["topology"]))
        collector.prepare()
        deadline_s = collector.plan.deadline_s
        with (
            StallWatch(stack),
            Traffic(stack, case.id, collector.prompts, stack.names, "baseline", deadline_s) as traffic,
        ):
            begin_s = time.monotonic()
            stack.wait(
                "the traffic's baseline",
                lambda: time.monotonic() >= begin_s + BASELINE_S,
                bound_s=BASELINE_S + 1,
                bound_source="suite.gates.test_rolling.BASELINE_S",
            )
            traffic.phase = "rolling"
            with stack.phase(case.id, "restarts"):
                for name in stack.names:
                    _restart(stack, name, traffic, upgrade=bool(case.params.get("upgrade")))
                    collector.wait_shared(name)
        stack.fact("traffic", {"sent": traffic.sent, "left_out": traffic.left_out})
        stack.scan_logs(case.id)

    def judge(self, history: History) -> r.Verdict:
        oracle = Oracle.of(history)
        stalls = stalls_of(history) or []
        sent = [o for o in history.observations(phase="rolling") if o.role == "traffic"]
        traffic = [o for o in sent if not stalled(o, stalls)]
        checks = {
            "stops": lambda: _stops(history),
            "upgraded": lambda: _upgraded(history),
            "pressure": lambda: faults.no_pressure("requests of steady traffic", len(traffic), 20),
            "oracle": oracle.check,
            "liveness": lambda: liveness.check_liveness(traffic),
            "answers": lambda: answers.judge_cold(twins(traffic), oracle.cold_limit_concurrent).findings,
            "budget": lambda: within_budget(history, traffic),
            "back": lambda: _back(history),
            "logs": lambda: unexplained_logs(history),
        }
        findings = ordered(run(checks))
        starts = {a.unit: round(a.elapsed_s, 1) for a in history.of(r.StartAttempt)}
        releases = {f.value["engine"]: f.value["releases"] for f in history.facts("upgraded")}
        return self.verdict(
            history,
            outcome_of(findings),
            findings=findings,
            got=findings[0].message
            if findings
            else f"{len(traffic)} requests answered right while {len(starts)} restarted",
            wanted="every request answered right and in time, each engine stopped by itself and shares again",
            numbers={"requests": len(traffic), "start_s": starts, "came_back_with": releases},
            **explanation(history, findings),
        )


def _restart(stack: Stack, name: str, traffic: Any, *, upgrade: bool = False) -> None:
    """Drain, stop, start again (in the second environment where it is upgraded), and let the traffic come back."""
    from fixtures import capabilities
    from fixtures.faults import Stop
    from fixtures.revive import revive

    traffic.engines = [other for other in stack.names if other != name]

    def idle() -> bool:
        values = stack.scrape(name, f"drain/{name}").values
        return values["running"] + values["waiting"] == 0

    stack.wait(
        f"drained/{name}",
        idle,
        bound_s=DRAIN_BOUND_S,
        bound_source="suite.gates.test_rolling.DRAIN_BOUND_S",
        poll_s=0.5,
    )
    Stop(name).inject(stack)
    if stack.handle(name).alive():  # it did not stop by itself, which the record says; the roll goes on
        stack.runtime.stop(stack.handle(name), 0.0)
    python = capabilities.second_python() if upgrade else ""
    revive(stack, name, python=python)
    if upgrade:
        runs = next((list(p.cmdline[:1]) for p in stack.handle(name).processes()), [])
        releases = capabilities.probe("second-stack").probe
        stack.fact("upgraded", {"engine": name, "meant": [python], "runs": runs, "releases": releases})
    traffic.engines = list(stack.names)


def _stops(history: History) -> list[r.Finding]:
    """Each engine was told to stop and did; one that had to be killed is ``unclean-stop``."""
    stops = history.faults("inject")
    engines = _engines(history)
    missing = faults.no_pressure("engines stopped", len({f.target for f in stops} & set(engines)), len(engines) or 1)
    if missing:
        return missing
    unclean = [f for f in stops if not f.landed]
    if not unclean:
        return []
    return [
        finding(
            r.FindingCode.UNCLEAN_STOP,
            f"{len(unclean)} of {len(stops)} engines had not ended by themselves when their time was over; first: {unclean[0].target}",
            proof=unclean[0].proof,
        )
    ]


def _upgraded(history: History) -> list[r.Finding]:
    """Where engines were to be upgraded, each runs in the second environment."""
    if not history.case.params.get("upgrade"):
        return []
    done = {f.value["engine"] for f in history.facts("upgraded") if f.value["runs"] == f.value["meant"]}
    engines = _engines(history)
    return faults.no_pressure("engines upgraded", len(done & set(engines)), len(engines) or 1)


def _back(history: History) -> list[r.Finding]:
    """Each engine became ready again and shared with another in time."""
    found: list[r.Finding] = []
    for attempt in history.of(r.StartAttempt):
        if attempt.result != "ready":
            found.append(finding(r.FindingCode.NEVER_READY, f"{attempt.unit} is {attempt.result} after its restart"))
    for name in _engines(history):
        found += recovery.check_hits_back(waited(history, f"hits-back/{name}"))
    return found


def _engines(history: History) -> list[str]:
    """Names of the engines under test: all of them have to be restarted."""
    stack = history.stack
    return [engine.name for engine in stack.engines if engine.name != REFERENCE] if stack else []


ROLLING_RESTART = RollingRestart()


@gate_cases(ROLLING_RESTART)
def test_rolling_restart(run_case: Any, case: Case) -> None:
    run_case(ROLLING_RESTART, case)
