"""How pressure is judged: did it bite, was every answer right all the same, and is nothing left in use?"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from reports import records as r
from reports.history import History
from suite.checks import answers, conservation, faults, hits, liveness, logs, recovery
from suite.checks.base import EXTERNAL, finding, run, too_few
from suite.checks.pool_model import Expected
from suite.contract import Gate
from suite.gates.judging import delta_of, explanation, failed_loads, ordered
from suite.gates.oracle import Oracle
from suite.gates.selections import COLD, cold_pairs, kind_of
from suite.workload.prompts import reusable_tokens

LOADED, LOADING = "load", "load"
"""Phase and role of the requests under pressure."""

MAXIMUM = "maximum-length"
MASTER = "master"
IDLE_LABEL = "idle"

ANSWER_TOKENS = 48
"""More than one block: a request that runs needs new blocks while it decodes, and a full cache preempts another for it."""

EXPLAINS = (
    r"(?i)(put|save|store|batch_?put).*(fail|error|NO_AVAILABLE_HANDLE|no space|full)",
    r"(?i)NO_AVAILABLE_HANDLE|(fail|error|warn).*(put|save|evict)",
    r"(?i)lease",
    r"(?i)(get|load|read|transfer|batch_?get|lookup).*(fail|error|not[ _]?found|expired)",
    r"(?i)(fail|error).*(get|load|read|transfer|keys)",
    r"(?i)OBJECT_NOT_FOUND|REPLICA_IS_NOT_READY",
    r"(?i)recover|recomput|reschedul",
    r"(?i)preempt|abort",
)
"""Log lines that full caches, short leases and cancelled requests explain. Crashes and tracebacks are not among them."""


def loading(history: History) -> list[r.Observation]:
    """The requests under pressure, cancelled ones included."""
    return [o for o in history.observations(phase=LOADED) if kind_of(o) == LOADING]


def replayed(history: History) -> list[r.Observation]:
    """The requests that repeated every prompt afterwards."""
    return history.observations(phase="replay")


def engines_of(history: History) -> list[str]:
    """Engines that took part."""
    return sorted({o.engine for o in loading(history)})


def moved(history: History, unit: str, *names: str) -> float:
    """By how much the first of these counters that exists moved during the load."""
    delta = history.delta(unit, "before-load", "after-load") or {}
    return next((delta[name] for name in names if name in delta), 0.0)


def check_pressure(history: History) -> list[r.Finding]:
    """Requests were preempted, blocks were evicted, requests were cancelled under way."""
    cancelled = sum(o.cancelled for o in loading(history))
    preempted = sum(moved(history, name, "preemptions") for name in engines_of(history))
    evicted = moved(history, MASTER, "master_evicted_key_count_mem", "master_evicted_key_count")
    return [
        *faults.no_pressure("preempted requests", preempted, 1),
        *faults.no_pressure("evicted keys", evicted, 1),
        *faults.no_pressure("requests cancelled under way", cancelled, 4),
    ]


def check_links(history: History) -> list[r.Finding]:
    """Every limit that was put on a link was felt by the stack's own traffic, and lifted; nothing to say where there was none."""
    links = [f for f in history.faults() if f.fault == "throttle-link"]
    return faults.check_faults(links) if links or "bytes_per_s" in history.case.params else []


def check_control(history: History) -> list[r.Finding]:
    """Each engine did read the pool under pressure: an answer that was recomputed proves nothing about reuse."""
    dry = [name for name in engines_of(history) if moved(history, name, EXTERNAL) <= 0]
    if not dry and engines_of(history):
        return []
    return [
        finding(r.FindingCode.NO_CONTROL, f"{', '.join(dry) or 'no engine'}: no token came from the pool under load")
    ]


def check_hits(history: History) -> list[r.Finding]:
    """No request got more than its reusable tokens; a cold one got none."""

    def bound(o: r.Observation, most: int) -> tuple[r.Observation, Expected]:
        block = history.engine(o.engine).block_tokens
        return o, Expected(0, 0, len(o.prompt_token_ids), block, most)

    asked = [o for o in [*loading(history), *replayed(history)] if o.ok]
    pairs = [bound(o, reusable_tokens(len(o.prompt_token_ids), history.engine(o.engine).block_tokens)) for o in asked]
    cold = [bound(o, 0) for o in history.observations(phase=COLD) if o.ok]
    return hits.check_all_hits([*pairs, *cold], mode="at-most", min_requests=len(cold) + 1)


def check_sums(history: History) -> list[r.Finding]:
    """Tokens by source add up for every replayed request; bytes too, where no load failed."""
    found: list[r.Finding] = []
    for o in replayed(history):
        found += conservation.check_conservation(
            o,
            delta_of(history, o),
            kv_bytes_per_token=history.engine(o.engine).kv_bytes_per_token,
            degraded=failed_loads(history, o) > 0,
        )
    return found or ([] if replayed(history) else too_few("no prompt was replayed"))


def check_rest(history: History) -> list[r.Finding]:
    """Every engine came to rest and holds no block."""
    return [f for name in engines_of(history) for f in recovery.check_at_rest(history.metrics(name, IDLE_LABEL))]


def check_admission(history: History) -> list[r.Finding]:
    """A request of maximum length is admitted on every engine."""
    asked = {o.engine: o for o in history.observations(phase="after") if o.role == MAXIMUM}
    found: list[r.Finding] = []
    for name in engines_of(history):
        found += recovery.check_admission(asked.get(name), history.engine(name).max_model_len)
    return found


def check_same_engines(history: History) -> list[r.Finding]:
    """No process of an engine was lost on the way."""
    found: list[r.Finding] = []
    for name in engines_of(history):
        own = {s.label: s for s in history.of(r.ProcessSnapshot) if s.unit == name}
        found += liveness.check_same_processes(own.get("before"), own.get("after"))
    return found


def judge_pressure(gate: Gate, history: History) -> r.Verdict:
    """Judge a load under pressure, the replay after it, and the engines at rest."""
    oracle = Oracle.of(history)
    observed = history.observations()
    judged = [*loading(history), *replayed(history)]
    pairs = cold_pairs(history, [o for o in judged if not o.cancelled])
    checks: dict[str, Callable[[], Sequence[r.Finding]]] = {
        "pressure": lambda: check_pressure(history),
        "links": lambda: check_links(history),
        "control": lambda: check_control(history),
        "liveness": lambda: liveness.check_liveness(observed),
        "clock": lambda: liveness.check_clock(observed),
        "oracle": lambda: oracle.check(planted=False),
        "same function": oracle.check_same_function,
        "answers": lambda: (
            answers.judge_cold(pairs, oracle.cold_limit_concurrent, min_pairs=len(replayed(history))).findings
        ),
        "hits": lambda: check_hits(history),
        "sums": lambda: check_sums(history),
        "rest": lambda: check_rest(history),
        "admission": lambda: check_admission(history),
        "same engines": lambda: check_same_engines(history),
        "logs": lambda: logs.check_logs(history),
    }
    findings = ordered(run(checks))
    cancelled = sum(o.cancelled for o in judged)
    return gate.judged(
        history,
        findings,
        good=f"{len(pairs)} answers right, {cancelled} cancelled, nothing left in use",
        wanted="the cold answer for every prompt, under pressure and after; KV usage 0; maximum length admitted",
        numbers={
            **oracle.numbers(),
            "requests": len(judged),
            "cancelled": cancelled,
            "preemptions": {name: moved(history, name, "preemptions") for name in engines_of(history)},
            "evicted_keys": moved(history, MASTER, "master_evicted_key_count_mem", "master_evicted_key_count"),
            "external_tokens": {name: moved(history, name, EXTERNAL) for name in engines_of(history)},
            "failed_loads": sum(failed_loads(history, o) for o in replayed(history)),
        },
        notes=tuple(answers.judge_cold(pairs, oracle.cold_limit_concurrent).notes)[:5],
        **explanation(history, findings),
    )
