"""How damaged blocks are judged: was the block used, and what came of it?"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from reports import records as r
from reports.history import History
from suite.checks import answers, degrade, faults, liveness, logs, recovery
from suite.checks.base import EXTERNAL, finding, run, too_few
from suite.checks.comparison import Difference, compare
from suite.contract import Gate
from suite.gates.judging import delta_of, failed_loads, ordered, read_in_full, visible_findings
from suite.gates.oracle import Oracle
from suite.gates.selections import budget_of, cold_pairs

CORRUPTION = "damaged-block"
"""Fact: how, the keys that were touched, the blocks whose keys are known, and the store tool's answer."""

CONTROL_TAG = "control"

EXPLAINS = (
    r"(?i)(get|load|read|transfer|batch_?get).*(fail|error|mismatch|invalid|short|size)",
    r"(?i)(fail|error|mismatch|invalid|short).*(get|load|read|transfer|keys)",
    r"(?i)recover|recomput|reschedul",
    r"(?i)kv[ _-]?load",
    r"(?i)checksum|digest|corrupt|integrity",
    r"handles len:\d+, all_slice_len:\d+",  # Mooncake 0.3.13: what is stored and what was asked for differ in length
)
"""Log lines in which a stack that notices says so. Crashes and tracebacks are not among them."""

CAUSES: dict[str, tuple[str, str]] = {
    r.FindingCode.UNDETECTED_CORRUPTION: (
        "neither the connector nor the store compares what it reads with what was saved: no checksum over values",
        "invisible",
    ),
    r.FindingCode.UNBOUNDED_LOOKUPS: (
        "the block is listed and cannot be loaded, so the same request looks it up and loads it again, without a bound",
        "vllm:mooncake_store_operation_total{operation='load_get',status!='ok'}",
    ),
    r.FindingCode.HANG: (
        "the block is listed and cannot be loaded, so the same request looks it up and loads it again, without a bound",
        "vllm:mooncake_store_operation_total{operation='load_get',status!='ok'}",
    ),
}


def victim_of(history: History) -> r.Observation | None:
    """The request over the damaged block."""
    return next((o for o in history.observations(phase="read") if o.role == "ask/victim"), None)


def served_silently(history: History, o: r.Observation) -> bool:
    """Tokens of the damaged block were taken from the pool, and no load was booked as failed.

    An answer whose log probabilities are no numbers is served as well, though nobody would call it complete.
    """
    external = (delta_of(history, o) or {}).get(EXTERNAL, 0.0)
    reached = external > first_damaged_token(history, o)
    return o.http_status == 200 and not o.timed_out and reached and not failed_loads(history, o)


def first_damaged_token(history: History, o: r.Observation) -> int:
    """Token at which the first damaged block begins."""
    fact = history.fact(CORRUPTION)
    blocks = fact.value.get("blocks", []) if fact else []
    return int(blocks[0]) * history.engine(o.engine).block_tokens if blocks else 0


def difference(history: History, o: r.Observation) -> Difference | None:
    """The victim's answer against its cold one."""
    pairs = cold_pairs(history, [o])
    return compare(*pairs[0]) if pairs else None


def check_damage(history: History) -> list[r.Finding]:
    """The value's digest changed, and the reader then used the block or failed to load it."""
    found = faults.check_faults(history.faults())
    o = victim_of(history)
    if found or o is None or o.cancelled:
        return found or too_few("nobody asked for the damaged block, or waited for the answer")
    delta = delta_of(history, o)
    if delta is None:
        return too_few("no counters around the request over the damaged block")
    reached = (delta.get(EXTERNAL, 0.0) > first_damaged_token(history, o)) or failed_loads(history, o) > 0
    return [] if reached or not o.ok else faults.no_pressure("reads of the damaged block", 0, 1)


def check_corruption(history: History, oracle: Oracle) -> list[r.Finding]:
    """The damaged block was not served; what was recomputed instead is right."""
    o = victim_of(history)
    if o is None or (not o.ok and not served_silently(history, o)):
        return []  # liveness says what became of it
    d = difference(history, o)
    if not served_silently(history, o):
        return answers.judge_cold(cold_pairs(history, [o]), oracle.cold_limit).findings
    told = str(d) if d is not None else o.error or "no cold answer to compare with"
    limit = oracle.cold_limit.max_nat
    arm = answers.judge_cold(cold_pairs(history, [o]), oracle.cold_limit).findings
    wrong = not o.ok or any(f.code is r.FindingCode.WRONG_ANSWER for f in arm)
    fact = history.fact(CORRUPTION)
    how = fact.value["how"] if fact else "?"
    return [
        finding(
            r.FindingCode.UNDETECTED_CORRUPTION,
            f"a block's stored bytes were {how} and served as a hit ({o.cached_tokens} tokens cached, no failed load);"
            f" the answer {'is wrong' if wrong else 'is not to be told from the cold one by the limit'}: {told}",
            request_id=o.request_id,
            engine=o.engine,
            how=how,
            wrong_answer=wrong,
            limit_nat=limit,
            **({} if d is None else {"difference": d.evidence()}),
        )
    ]


def check_control(history: History, oracle: Oracle) -> list[r.Finding]:
    """An undamaged prompt, saved in the same way, was read in full and answered right."""
    for o in history.observations(phase="control"):
        if read_in_full(history, o) and not failed_loads(history, o):
            return answers.judge_cold(cold_pairs(history, [o]), oracle.cold_limit).findings
    return [finding(r.FindingCode.NO_CONTROL, "the undamaged prompt was not read from the pool in full")]


def check_lookups(history: History) -> list[r.Finding]:
    """The request over the damaged block was looked up a few times at most."""
    o = victim_of(history)
    delta = delta_of(history, o) if o is not None else None
    if o is None or delta is None:
        return []  # check_damage says so
    return degrade.check_lookups([o], delta, max_lookups=int(budget_of(history)["max_lookups"]))


def check_rest(history: History) -> list[r.Finding]:
    """Once the damaged block is gone, the reader comes to rest and gives its KV back."""
    idle = [m for m in history.of(r.MetricsSnapshot) if m.label == "idle"]
    return recovery.check_at_rest(idle[-1] if idle else None)


def judge_integrity(gate: Gate, history: History) -> r.Verdict:
    """Judge one damaged block."""
    oracle = Oracle.of(history)
    observed = history.observations()
    checks: dict[str, Callable[[], Sequence[r.Finding]]] = {
        "damage": lambda: check_damage(history),
        "control": lambda: check_control(history, oracle),
        # By a prompt with another block in it: a stack that refuses damaged blocks would not read a planted one either.
        "oracle": lambda: oracle.check(planted=False),
        "clock": lambda: liveness.check_clock(observed),
        "liveness": lambda: liveness.check_liveness(observed),
        "corruption": lambda: check_corruption(history, oracle),
        "lookups": lambda: check_lookups(history),
        "rest": lambda: check_rest(history),
        "visible": lambda: visible_findings(history),
        "logs": lambda: logs.check_logs(history),
    }
    findings = ordered(run(checks))
    victim = victim_of(history)
    d = difference(history, victim) if victim is not None else None
    cause, production = CAUSES.get(findings[0].code, ("", "invisible")) if findings else ("", "")
    return gate.judged(
        history,
        findings,
        good="the damaged block was refused, and the answer is right",
        wanted="the block is refused; status 200 and the cold answer, recomputed, after few lookups",
        cause=cause,
        production=production,
        next_command=f"pytest -m gates -k '{history.case.case_id}'" if findings else "",
        numbers={
            **oracle.numbers(),
            "damage_nat": None if d is None or d.problem else d.max_nat,
            "failed_loads": failed_loads(history, victim) if victim is not None else None,
        },
    )
