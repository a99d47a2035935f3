"""Family P, readmission: a request whose load failed is admitted again, also where the KV cache is not twice its size."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from fixtures.healthy import prove_healthy
from reports import records as r
from reports.history import History
from suite.checks import answers, degrade, faults, liveness, logs, recovery
from suite.checks.base import STORE_GET, STORE_LOOKUP, finding, run, store_ops
from suite.contract import Case, Gate, outcome_of
from suite.gates import gate_cases
from suite.gates.arms import calibrate, settle_saves
from suite.gates.judging import explanation, healthy_findings, ordered, read_in_full, visible_findings
from suite.gates.judging_integrity import EXPLAINS
from suite.gates.oracle import Oracle
from suite.gates.selections import budget_of, cold_pairs
from suite.gates.sequences import ask_cold, save_naming
from suite.gates.test_pressure import LEASE_MS, tiny_caches

if TYPE_CHECKING:
    from fixtures.spec import StackSpec
    from fixtures.stack import Stack

VICTIM_OF_MAXIMUM = 0.85
"""The victim's length, in requests of maximum length. The KV cache of this stack holds 1.5: one victim, not two."""

VICTIM_DEADLINE_S = 30.0
"""Recomputing it takes a second on two cores; the master's lease is a second, its client TTL ten."""

BYSTANDER_TOKENS, BYSTANDER_DEADLINE_S = 200, 15.0

LOAD_FAILED = "load-failed"
"""Wait for the victim's load to fail, after which the bystander is sent."""

FAILED_BOUND_S = 15.0
"""For the load to fail after the victim was sent: a lookup and a load take a tenth of a second."""


class Readmission(Gate):
    """Claim: a request whose load failed as a whole is admitted again and answered, and holds up nobody meanwhile, in a KV
    cache that holds one such request but not two.

    How it can lie: in a roomy cache there is space for everything, so nothing is ever refused; no load failed; the
    bystander was sent when all was over.
    Oracle: status, deadline and cold answers of the victim and of a bystander that needs nothing from the pool; failed
    loads and lookups counted around both. Proof: the first block's stored value was cut short (digests), and a load was
    booked as failed before the bystander was sent. Control: an undamaged prompt was read from the pool in full.
    Turns red: a scheduler that reserves space for the failed request against itself, or queues everyone behind it; a
    connector that looks up and loads without a bound.
    """

    id = "P.readmission"
    version = 3
    claim = "after a load that failed as a whole the request is answered, and holds up nobody, in a cache not twice its size"

    def cases(self) -> Iterable[Case]:
        yield Case(f"{self.id}.half-cache", {"lease_ms": LEASE_MS}, variant="tiny-caches")

    def stack(self, base: StackSpec, case: Case) -> StackSpec:
        return tiny_caches(base, case.params["lease_ms"])

    def collect(self, stack: Stack, case: Case) -> None:
        calibrate(stack, planted=False)
        saver, reader = stack.names[0], stack.names[1]
        prompts = stack.prompts(case.id)
        longest = min(stack.engines[name].facts.max_model_len for name in stack.names)
        victim = prompts.fresh("victim", int(VICTIM_OF_MAXIMUM * longest))
        control, bystander = (prompts.fresh(name, BYSTANDER_TOKENS) for name in ("control", "bystander"))
        with stack.phase(case.id, "save"):
            settle_saves(stack)
            # A pool that is full evicts: then keys neither stay nor can be counted.
            stack.store_tool([{"op": "remove", "keys": sorted(stack.keys())}])
            for name, prompt in (("victim", victim), ("control", control), ("bystander", bystander)):
                ask_cold(stack, saver, prompt, name)
            keys = save_naming(stack, saver, victim, (0,))
            stack.save(saver, control, role="save/control")
        with stack.phase(case.id, "control"):
            stack.ask_measured(reader, control, "control")
        with stack.phase(case.id, "damage"):
            cut_short(stack, keys.get(0, ""))
        with stack.phase(case.id, "read"):
            read(stack, reader, victim, bystander)
        with stack.phase(case.id, "after"):
            stack.store_tool([{"op": "remove", "keys": list(keys.values())}])
        prove_healthy(stack, case.id)
        stack.scan_logs(case.id)

    def judge(self, history: History) -> r.Verdict:
        return judge_readmission(self, history)


def cut_short(stack: Stack, key: str) -> None:
    """Cut the stored value of a key to half its length, and record the proof."""
    began = time.monotonic()
    answer: dict[str, Any] = {"before": None, "after": None}
    if key:
        (size,) = stack.store_tool([{"op": "digest", "keys": [key]}])
        step = {"op": "replace", "key": key, "how": "truncate", "bytes": size[key]["bytes"] // 2}
        (answer,) = stack.store_tool([step])
    stack.record(
        r.FaultRecord(
            fault_id="damage:first-block",
            fault="damage-truncated",
            target="pool",
            action="inject",
            landed=bool(answer["after"]) and answer["before"] != answer["after"],
            proof={"key": key, "before": answer["before"], "after": answer["after"]},
            t_s=began,
            explains=EXPLAINS,
        )
    )


def read(stack: Stack, reader: str, victim: tuple[int, ...], bystander: tuple[int, ...]) -> None:
    """The victim; once its load has failed, a bystander beside it."""
    before = stack.scrape(reader, "before-read")
    asked = stack.start(stack.request(reader, victim, "victim", deadline_s=VICTIM_DEADLINE_S))
    stack.wait(
        LOAD_FAILED,
        partial(_failed_since, stack, reader, before),
        bound_s=FAILED_BOUND_S,
        bound_source="suite.gates.test_readmission.FAILED_BOUND_S",
        poll_s=0.05,
    )
    beside = stack.start(stack.request(reader, bystander, "bystander", deadline_s=BYSTANDER_DEADLINE_S))
    stack.health(reader)
    beside.result()
    asked.result()
    stack.scrape(reader, "after-read")


def _failed_since(stack: Stack, engine: str, before: r.MetricsSnapshot) -> bool:
    return failed_loads(stack.scrape(engine, "reading").values) > failed_loads(before.values)


def failed_loads(values: dict[str, float]) -> float:
    """Loads that failed, wholly or in part, in a snapshot or a difference."""
    return sum(store_ops(values, STORE_GET, but_ok=True).values())


def lookups(values: dict[str, float]) -> float:
    """Lookups in a snapshot or a difference."""
    return sum(store_ops(values, STORE_LOOKUP).values())


def judge_readmission(gate: Gate, history: History) -> r.Verdict:
    """Judge victim and bystander around one failed load."""
    oracle = Oracle.of(history)
    asked = history.observations(phase="read")
    victims = [o for o in asked if o.role == "victim"]
    delta = history.delta(asked[0].engine, "before-read", "after-read") or {} if asked else {}
    checks: dict[str, Callable[[], Sequence[r.Finding]]] = {
        "damage": lambda: faults.check_faults(history.faults()),
        "failed load": lambda: _failed_before_bystander(history, failed_loads(delta)),
        "control": lambda: _control(history),
        "oracle": lambda: oracle.check(planted=False),
        "clock": lambda: liveness.check_clock(history.observations()),
        "liveness": lambda: liveness.check_liveness(asked, min_requests=2),
        "answers": lambda: _answers(history, asked, oracle),
        "lookups": lambda: degrade.check_lookups(
            victims, delta, max_lookups=int(budget_of(history)["max_lookups"]) + 1
        ),
        "health": lambda: _health(history),
        "visible": lambda: visible_findings(history),
        "logs": lambda: logs.check_logs(history),
    }
    findings = ordered(run(checks))
    told = f"{failed_loads(delta):g} failed loads, {lookups(delta):g} lookups"
    stuck = any(o.role == "bystander" and o.timed_out for o in asked)
    fields = explanation(history, findings)
    if stuck:
        fields["cause"] = (
            "the request whose load failed keeps its reservation, is counted against itself, and is first in the queue of"
            " those that hold KV: nobody behind it is scheduled"
        )
        fields["production"] = "vllm:num_requests_waiting stays up while num_requests_running is 0; lookups go on"
    return gate.verdict(
        history,
        outcome_of(findings),
        findings=findings,
        got=f"{findings[0].message} ({told})" if findings else f"both answered right; {told}",
        wanted="victim and bystander answered right, in time, after one failed load",
        numbers={**oracle.numbers(), "failed_loads": failed_loads(delta), "lookups": lookups(delta)},
        **fields,
    )


def _failed_before_bystander(history: History, failed: float) -> list[r.Finding]:
    """The victim's load failed, and the bystander was sent only then."""
    waits = [w for w in history.of(r.WaitRecord) if w.what == LOAD_FAILED and w.came_true]
    found = faults.no_pressure("failed loads of the victim", failed, 1)
    return found or faults.no_pressure("failed loads seen before the bystander was sent", len(waits), 1)


def _control(history: History) -> list[r.Finding]:
    """The undamaged prompt was read from the pool in full."""
    if any(read_in_full(history, o) for o in history.observations(phase="control")):
        return []
    return [finding(r.FindingCode.NO_CONTROL, "the undamaged prompt was not read from the pool in full")]


def _answers(history: History, asked: Sequence[r.Observation], oracle: Oracle) -> list[r.Finding]:
    """What was answered was answered right; what was not is the business of liveness."""
    answered = [o for o in asked if o.ok]
    if not answered:
        return []
    pairs = cold_pairs(history, answered)
    return answers.judge_cold(pairs, oracle.cold_limit_concurrent, min_pairs=len(answered)).findings


def _health(history: History) -> list[r.Finding]:
    """With the damaged block gone the engine is well again."""
    found = healthy_findings(history, "the damaged block is gone, and the stack is not well")
    idle = [m for m in history.of(r.MetricsSnapshot) if m.label == "healthy"]
    leak = recovery.check_kv_released(idle[-1]) if found and idle else []
    return leak or found


READMISSION = Readmission()


@gate_cases(READMISSION)
def test_readmission(run_case: Any, case: Case) -> None:
    run_case(READMISSION, case)
