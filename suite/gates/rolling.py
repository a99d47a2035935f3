"""What gates of planned operations share: traffic that must notice nothing, engines drained and started again, and their judges."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from reports import records as r
from reports.history import History
from suite.checks import answers, faults, liveness, recovery
from suite.checks.base import finding
from suite.gates.arms import REFERENCE
from suite.gates.degrade_traffic import Traffic
from suite.gates.judging_degrade_cells import twins, unexplained_logs, waited, within_budget
from suite.gates.oracle import Oracle
from suite.gates.stalls import StallWatch, stalled, stalls_of, without_stalls

if TYPE_CHECKING:
    from fixtures.stack import Stack
    from suite.gates.degrade_collect import CellCollector

BASELINE_S = 6.0
"""Traffic before the operation: a dozen requests, whose median is the baseline of the budget."""

DRAIN_BOUND_S = 20.0
"""An engine that gets no new request is idle within a request's own time (0.1 s); the bound is the request's deadline."""

LEAST_REQUESTS = 20
"""Fewer requests beside the operation say nothing: 10 s of the traffic."""


@contextmanager
def under_traffic(collector: CellCollector, phase: str) -> Iterator[Traffic]:
    """Steady traffic on all engines, with its baseline behind it, in the named phase."""
    stack = collector.stack
    with (
        StallWatch(stack),
        Traffic(
            stack, collector.case_id, collector.prompts, stack.names, "baseline", collector.plan.deadline_s
        ) as traffic,
    ):
        let_pass(stack, BASELINE_S, "the traffic's baseline", "suite.gates.rolling.BASELINE_S")
        traffic.phase = phase
        yield traffic
    stack.fact("traffic", {"sent": traffic.sent, "left_out": traffic.left_out})


def let_pass(stack: Stack, seconds: float, what: str, source: str) -> None:
    """Time for traffic to flow."""
    begin_s = time.monotonic()
    stack.wait(what, lambda: time.monotonic() >= begin_s + seconds, bound_s=seconds + 1, bound_source=source)


def restart_drained(
    stack: Stack, name: str, traffic: Traffic, *, upgrade: bool = False, between: Callable[[], None] = lambda: None
) -> None:
    """Drain, stop, start again (in the second environment where it is upgraded), and let the traffic come back.

    between: called while the engine is stopped.
    """
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
        bound_source="suite.gates.rolling.DRAIN_BOUND_S",
        poll_s=0.5,
    )
    Stop(name).inject(stack)
    if stack.handle(name).alive():  # it did not stop by itself, which the record says; the roll goes on
        stack.runtime.stop(stack.handle(name), 0.0)
    between()
    python = capabilities.second_python() if upgrade else ""
    revive(stack, name, python=python)
    if upgrade:
        runs = next((list(p.cmdline[:1]) for p in stack.handle(name).processes()), [])
        releases = capabilities.probe("second-stack").probe
        stack.fact("upgraded", {"engine": name, "meant": [python], "runs": runs, "releases": releases})
    traffic.engines = list(stack.names)


def stops(history: History) -> list[r.Finding]:
    """Each engine was told to stop and did; one that had to be killed is ``unclean-stop``."""
    told = [f for f in history.faults("inject") if f.fault == "stop" and f.target in engines_of(history)]
    engines = engines_of(history)
    missing = faults.no_pressure("engines stopped", len({f.target for f in told} & set(engines)), len(engines) or 1)
    if missing:
        return missing
    unclean = [f for f in told if not f.landed]
    if not unclean:
        return faults.check_faults(told)  # each says how it is known
    return [
        finding(
            r.FindingCode.UNCLEAN_STOP,
            f"{len(unclean)} of {len(told)} engines had not ended by themselves when their time was over; first: {unclean[0].target}",
            proof=unclean[0].proof,
        )
    ]


def back(history: History) -> list[r.Finding]:
    """Each engine became ready again and shared with another in time."""
    found: list[r.Finding] = []
    for attempt in history.of(r.StartAttempt):
        if attempt.result != "ready":
            found.append(finding(r.FindingCode.NEVER_READY, f"{attempt.unit} is {attempt.result} after its restart"))
    for name in engines_of(history):
        found += recovery.check_hits_back(waited(history, f"hits-back/{name}"))
    return found


def engines_of(history: History) -> list[str]:
    """Names of the engines under test: all of them have to be restarted."""
    stack = history.stack
    return [engine.name for engine in stack.engines if engine.name != REFERENCE] if stack else []


def touched_by_stalls(history: History, sent: Sequence[r.Observation], stalls: list[dict[str, Any]]) -> list[r.Finding]:
    """Requests that were under way while the host stood still, and failed, or took too long by more than that.

    Whose doing it was is not known (``no-control``). Left out they may not be: the longer a request hangs, the sooner a stall
    of a busy host meets it.
    """
    touched = [without_stalls(o, stalls) for o in sent if stalled(o, stalls)]
    found = [*liveness.check_liveness(touched, min_requests=0), *within_budget(history, touched)]
    if not found:
        return []
    text = f"{len(touched)} requests were under way while the host stood still; that time apart: {found[0].message}"
    return [finding(r.FindingCode.NO_CONTROL, text, codes=[str(f.code) for f in found], stalls=stalls[:10])]


def traffic_checks(
    history: History, phase: str
) -> tuple[list[r.Observation], dict[str, Callable[[], list[r.Finding]]]]:
    """The traffic of that phase, but for what the host's own stalls touched, and what is asked of it. Answers are right or wrong
    however the host fares, so they are judged of all."""
    oracle = Oracle.of(history)
    stalls = stalls_of(history) or []
    sent = [o for o in history.observations(phase=phase) if o.role == "traffic"]
    traffic = [o for o in sent if not stalled(o, stalls)]
    return traffic, {
        "pressure": lambda: faults.no_pressure("requests of steady traffic", len(sent), LEAST_REQUESTS),
        "oracle": oracle.check,
        "clock": lambda: liveness.check_clock(sent),
        "liveness": lambda: liveness.check_liveness(traffic),
        "touched": lambda: touched_by_stalls(history, sent, stalls),
        "answers": lambda: list(answers.judge_cold(twins(sent), oracle.cold_limit_concurrent).findings),
        "budget": lambda: within_budget(history, traffic),
        "logs": lambda: unexplained_logs(history),
    }
