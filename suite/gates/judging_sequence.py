"""How sequences of requests are judged: what each must get follows from all that was sent before it.

The model of the pool (``suite.checks.pool_model``) is fed with the case's own requests in the order in which they ended,
and with what was lost in between (facts ``reset-local`` and ``lost``). Roles: ``cold`` (a salt of its own: nothing can be
reused, and the counters must confirm it); every other role is judged by the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from reports import records as r
from reports.history import History
from suite.checks import answers, hits, liveness, logs
from suite.checks.base import EXTERNAL, LOCAL, PROMPT, finding, run, too_few
from suite.checks.pool_model import Expected, PoolModel, Rules
from suite.contract import Gate
from suite.gates.arms import REFERENCE
from suite.gates.judging import delta_of, explanation, failed_loads, measured_checks, ordered, visible_findings
from suite.gates.oracle import Oracle
from suite.gates.selections import COLD, cold_pairs, kind_of, measured

LOST = "lost"
"""Fact: ``{"local": engine}`` (its own cache is empty), ``{"pool": true}`` (all of it) or ``{"saved_by": engine}``."""


def rules_of(history: History, **changes: Any) -> Rules:
    """Rules of the case's stack: block size of its engines, no local caching where the spec switches it off."""
    stack = history.stack
    if stack is None:
        raise ValueError("the case ran on no stack")
    settings = stack.engines[0].settings
    fields: dict[str, Any] = {
        "block_tokens": stack.engines[0].block_tokens,
        "local_caching": bool(settings.get("prefix_caching", True)),
        **changes,
    }
    return Rules(**fields)


def expectations(history: History, model: PoolModel) -> list[tuple[r.Observation, Expected]]:
    """What every request of the case was to get, in order. Feeds ``model``."""
    out: list[tuple[r.Observation, Expected]] = []
    own = history.case.case_id
    for record in history:
        if isinstance(record, r.Observation) and record.case_id == own and record.engine != REFERENCE:
            out.append((record, model.observe(record, visible=True)))
        elif isinstance(record, r.Fact):
            forget(model, record)
    return out


def forget(model: PoolModel, fact: r.Fact) -> None:
    """Tell the model what a fact says was lost."""
    if fact.name == "reset-local" and fact.value["http_status"] == 200:
        model.forget_local(fact.value["engine"])
    elif fact.name == LOST:
        if "local" in fact.value:
            model.forget_local(fact.value["local"])
        if "saved_by" in fact.value:
            model.forget_saved_by(fact.value["saved_by"])
        if fact.value.get("pool"):
            model.forget_pool()


def check_exact(history: History, expected: Sequence[tuple[r.Observation, Expected]]) -> list[r.Finding]:
    """Every request got exactly what the model says, from each source; cold ones got nothing."""
    found: list[r.Finding] = []
    for o, wanted in expected:
        delta = delta_of(history, o)
        if not o.ok:
            continue  # liveness says so
        if delta is None:
            found += too_few(f"no counters around request {o.request_id}: nobody knows what it got from where")
        elif delta.get(PROMPT) == len(o.prompt_token_ids):
            found += hits.check_hits(o, delta, wanted)
        # Else conservation says that its tokens were not counted: the same counters say nothing of its hits.
    return found


def check_control(history: History, expected: Sequence[tuple[r.Observation, Expected]]) -> list[r.Finding]:
    """The sequence did read the pool: at least one request was to get external tokens, and got some."""
    wanted = sum(e.external_tokens for _, e in expected)
    got = sum((delta_of(history, o) or {}).get(EXTERNAL, 0.0) for o, _ in expected)
    if wanted and got:
        return []
    return [finding(r.FindingCode.NO_CONTROL, f"{got:g} external tokens in this case, {wanted} expected of it")]


def check_answers(history: History, oracle: Oracle) -> list[r.Finding]:
    """External answers against native ones of equal shape, within the native floor; every answer against the cold one.

    Equal shape: same prompt, same number of cached tokens, no load that failed. The native one was served by the
    engine's own cache alone.
    """
    asked = [o for o in history.observations() if o.engine != REFERENCE and kind_of(o) != COLD]
    told = {o.request_id: delta_of(history, o) or {} for o in asked}
    whole = [o for o in asked if o.ok and not failed_loads(history, o)]
    native = {
        (o.prompt_token_ids, o.cached_tokens): o
        for o in whole
        if told[o.request_id].get(LOCAL, 0) > 0 and not told[o.request_id].get(EXTERNAL, 0)
    }
    equal = [
        (o, native[o.prompt_token_ids, o.cached_tokens])
        for o in whole
        if told[o.request_id].get(EXTERNAL, 0) > 0 and (o.prompt_token_ids, o.cached_tokens) in native
    ]
    found = answers.judge_external_vs_native(equal, oracle.native) if equal else []
    return found + answers.judge_cold(cold_pairs(history, asked), oracle.cold_limit).findings


def judge_sequence(
    gate: Gate, history: History, *, rules: Rules | None = None, extra: Sequence[r.Finding] = ()
) -> r.Verdict:
    """Judge requests that were sent one after the other: exact hits, sums, sources, answers, liveness, logs."""
    oracle = Oracle.of(history)
    observed = history.observations()
    expected = expectations(history, PoolModel(rules or rules_of(history)))
    checks: dict[str, Callable[[], Sequence[r.Finding]]] = {
        "liveness": lambda: liveness.check_liveness(observed),
        "clock": lambda: liveness.check_clock(observed),
        "oracle": oracle.check,
        "same function": oracle.check_same_function,
        "answers": lambda: check_answers(history, oracle),
        "hits": lambda: check_exact(history, expected),
        "control": lambda: check_control(history, expected),
        **measured_checks(history, measured(history)),
        "visible": lambda: visible_findings(history),
        "logs": lambda: logs.check_logs(history),
    }
    findings = ordered([*run(checks), *extra])
    asked = [(o, e) for o, e in expected if kind_of(o) != COLD]
    return gate.judged(
        history,
        findings,
        good=f"{len(asked)} requests, each with exactly its hits and right answer",
        wanted=f"local/external tokens {[(e.local_tokens, e.external_tokens) for _, e in asked]}",
        numbers={**oracle.numbers(), "requests": len(observed)},
        notes=tuple(answers.judge_cold(cold_pairs(history, [o for o, _ in asked]), oracle.cold_limit).notes),
        **explanation(history, findings),
    )
