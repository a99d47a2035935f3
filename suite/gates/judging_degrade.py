"""How the gates of family D judge: the same checks for every fault, victims and bystanders apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from reports import records as r
from reports.history import History
from suite.checks import answers, degrade, faults, liveness, logs, recovery
from suite.checks.base import finding, run
from suite.contract import Gate
from suite.gates.judging import explanation, ordered, read_in_full, visible_findings
from suite.gates.oracle import Oracle
from suite.gates.selections import budget_of, cold_pairs

VICTIM, BYSTANDER, BASELINE, CONTROL, MAXIMUM = "victim", "bystander", "baseline", "control", "maximum-length"


def judge_degrade(gate: Gate, history: History) -> r.Verdict:
    """Judge a case that hurt the stack: proof, pressure, control, answers, statuses, budget, lookups, recovery, logs."""
    oracle = Oracle.of(history)
    degraded = history.observations(phase="degraded")
    victims = [o for o in degraded if o.role.startswith(VICTIM)]
    checks: dict[str, Callable[[], Sequence[r.Finding]]] = {
        "faults": lambda: faults.check_faults(history.faults()),
        "pressure": lambda: pressure(history, victims),
        "visible": lambda: visible_findings(history),
        "control": lambda: control(history),
        "oracle": oracle.check,
        "clock": lambda: liveness.check_clock(history.observations()),
        "liveness": lambda: liveness.check_liveness(degraded),
        "stuck": lambda: liveness.check_stuck(degraded, history.of(r.HealthProbe)),
        "same engine": lambda: same_engine(history),
        "answers": lambda: degraded_answers(history, victims, oracle),
        "budget": lambda: budget(history, degraded),
        "lookups": lambda: lookups(history, degraded),
        "admission": lambda: admission(history),
        "kv": lambda: recovery.check_kv_released(_idle(history)),
        "logs": lambda: logs.check_logs(history),
    }
    findings = ordered(run(checks))
    budget_s = float(budget_of(history)["ttft_extra_s"])
    return gate.judged(
        history,
        findings,
        good=f"{len(victims)} victims answered right, 200, within budget",
        wanted=f"200, the cold answer, TTFT at most max({budget_of(history)['ttft_factor']:g} x cold, cold + {budget_s:g} s)",
        numbers={**oracle.numbers(), **numbers(history, degraded)},
        notes=tuple(answers.judge_cold(cold_pairs(history, victims), oracle.cold_limit_concurrent).notes),
        **explanation(history, findings),
    )


def pressure(history: History, victims: Sequence[r.Observation]) -> list[r.Finding]:
    """The fault's target held blocks of every victim (the store's own replica list), and victims were asked for after it."""
    fault = next((f for f in history.faults("inject")), None)
    asked = sum(not o.cancelled and (fault is None or o.sent_s >= fault.t_s) for o in victims)
    owners = [f.value for f in history.facts("owners")]
    held = [o for o in owners if fault is not None and o["held_by"].get(fault.target, 0) > 0]
    found = faults.no_pressure("victims asked for after the fault", asked, 1)
    if len(held) < len(owners) or not held:
        found += faults.no_pressure(
            f"victims with blocks on {fault.target if fault else 'the target'}", len(held), max(1, len(owners))
        )
    return found


def control(history: History) -> list[r.Finding]:
    """Before the fault, the reader did read blocks that the target had saved."""
    for o in history.observations(phase="control"):
        if o.role.startswith("control/") and read_in_full(history, o):
            return []
    return [finding(r.FindingCode.NO_CONTROL, "before the fault, the reader read no block of the target in full")]


def same_engine(history: History) -> list[r.Finding]:
    """The reader's processes are those from before the fault."""
    by_label = {s.label: s for s in history.of(r.ProcessSnapshot)}
    return liveness.check_same_processes(by_label.get("before"), by_label.get("after"))


def degraded_answers(history: History, victims: Sequence[r.Observation], oracle: Oracle) -> list[r.Finding]:
    """Victims that were answered were answered right. Those that were not are ``liveness``'s business."""
    pairs = cold_pairs(history, victims)
    if not pairs and any(not o.ok for o in victims):
        return []
    return answers.judge_cold(pairs, oracle.cold_limit_concurrent).findings


def budget(history: History, degraded: Sequence[r.Observation]) -> list[r.Finding]:
    """Answered requests kept the TTFT budget against cold ones of the same engine before the fault."""
    answered = [o for o in degraded if o.ok]
    if not answered:
        return []  # liveness says so already, and there is no answer whose time could be judged
    spec = budget_of(history)
    cold = [o for o in history.observations(phase="baseline") if o.role.startswith(BASELINE)]
    cold += [o for o in history.observations(phase="baseline") if o.role.startswith("short")]
    return degrade.check_budget(answered, cold, factor=float(spec["ttft_factor"]), extra_s=float(spec["ttft_extra_s"]))


def lookups(history: History, degraded: Sequence[r.Observation]) -> list[r.Finding]:
    """Lookups of the reader while degraded, over the requests it got."""
    if not degraded:
        return []
    reader = degraded[0].engine
    delta = history.delta(reader, "before-fault", "after-fault")
    return degrade.check_lookups(degraded, delta, max_lookups=int(budget_of(history)["max_lookups"]))


def admission(history: History) -> list[r.Finding]:
    """A request of full length is admitted after the fault."""
    asked = [o for o in history.observations(phase="after") if o.role == MAXIMUM]
    longest = history.engine(asked[-1].engine).max_model_len if asked else 0
    return recovery.check_admission(asked[-1] if asked else None, longest)


def _idle(history: History) -> r.MetricsSnapshot | None:
    found = [m for m in history.of(r.MetricsSnapshot) if m.label == "idle"]
    return found[-1] if found else None


def numbers(history: History, degraded: Sequence[r.Observation]) -> dict[str, Any]:
    """The shape of the degradation: status and TTFT of every request over the seconds since the fault."""
    fault = next((f for f in history.faults("inject")), None)
    begin = fault.t_s if fault else 0.0
    cold = [o.ttft_s for o in history.observations(phase="baseline") if o.ttft_s is not None]
    return {
        "cold_ttft_s": round(sorted(cold)[len(cold) // 2], 3) if cold else None,
        "requests": [
            {
                "role": o.role,
                "after_s": round(o.sent_s - begin, 2),
                "status": o.http_status,
                "ttft_s": None if o.ttft_s is None else round(o.ttft_s, 3),
            }
            for o in degraded
        ],
    }
