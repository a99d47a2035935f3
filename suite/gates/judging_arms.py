"""Prompts that went through arms: cold, native, external. What each had to reuse, whether that is what was counted, and whether it answered alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from reports import records as r
from reports.history import History
from suite.checks import answers, hits, liveness, logs
from suite.checks.base import EXTERNAL, LOCAL, PROMPT, run, too_few
from suite.contract import Gate
from suite.gates.judging import (
    _external,
    delta_of,
    explanation,
    failed_loads,
    measured_checks,
    ordered,
    visible_findings,
)
from suite.gates.oracle import Oracle
from suite.gates.selections import kind_of, measured
from suite.workload.prompts import reusable_tokens


def judge_arms(
    gate: Gate,
    history: History,
    *,
    arm: str = "external",
    roles: Sequence[str] = (),
    extra: Sequence[r.Finding] = (),
    numbers: dict[str, Any] | None = None,
) -> r.Verdict:
    """Judge every prompt of a case that was sent through arms: hits, sums, bytes, answers, logs.

    arm: what is judged: ``external`` against native and cold, or ``native`` against cold (a stack without a pool).
    roles: what the gate has asked for; a request that is not there was judged by nobody.
    extra: findings of the gate's own (they take part in the order).
    """
    oracle = Oracle.of(history)
    observed = history.observations()
    counted = measured(history)
    checks: dict[str, Callable[[], Sequence[r.Finding]]] = {
        "liveness": lambda: liveness.check_liveness(observed),
        "clock": lambda: liveness.check_clock(observed),
        "oracle": lambda: oracle.check(planted=arm == "external"),
        "same function": lambda: oracle.check_same_function() if any(_external(history, o) for o in counted) else [],
        "asked": lambda: _asked(observed, roles),
        "answers": lambda: _answers(history, oracle, arm),
        "counters": lambda: _uncounted(observed, counted),
        "hits": lambda: _hits(history, counted),
        **measured_checks(history, counted),
        "visible": lambda: visible_findings(history),
        "logs": lambda: logs.check_logs(history),
    }
    findings = ordered([*run(checks), *extra])
    judged = [o for o in counted if kind_of(o) == arm]
    got = [_tokens(history, o, arm) for o in judged]
    wanted = [expected_external(history, o) if arm == "external" else expected_local(history, o) for o in judged]
    return gate.judged(
        history,
        findings,
        good=f"{arm} tokens {got}, answers equal",
        wanted=f"{arm} tokens {wanted}; the native answer within {oracle.native.max_nat:.3g} nat",
        numbers={**oracle.numbers(), **_ttft(observed), **(numbers or {})},
        notes=_cold_notes(history, oracle),
        **explanation(history, findings),
    )


def _tag(role: str) -> tuple[str, str]:
    kind, _, tag = role.partition("/")
    return kind, tag


def expected_external(history: History, o: r.Observation) -> int:
    """External tokens a request must get, by its role; see ``suite.gates.arms``."""
    kind, tag = _tag(o.role)
    block = history.engine(o.engine).block_tokens
    if kind in ("external", "control") and tag != "divergent":
        return reusable_tokens(len(o.prompt_token_ids), block)
    if kind == "external":
        fact = history.fact("divergent")
        return int(fact.value["common_tokens"]) if fact else -1
    engine = history.engine(o.engine)
    if kind in ("native", "native-2") and not engine.caches_prefixes and engine.connector != "native":
        return reusable_tokens(len(o.prompt_token_ids), block)
    return 0


def expected_local(history: History, o: r.Observation) -> int:
    """Tokens a request must get from its engine's own cache, by its role."""
    kind, tag = _tag(o.role)
    if kind not in ("native", "native-2") or not history.engine(o.engine).caches_prefixes:
        return 0
    if tag == "divergent":
        fact = history.fact("divergent")
        return int(fact.value["common_tokens"]) if fact else -1
    return reusable_tokens(len(o.prompt_token_ids), history.engine(o.engine).block_tokens)


def _tokens(history: History, o: r.Observation, arm: str) -> int:
    delta = delta_of(history, o) or {}
    return int(delta.get("prompt_tokens.external" if arm == "external" else "prompt_tokens.local", -1))


def _asked(observed: Sequence[r.Observation], roles: Sequence[str]) -> list[r.Finding]:
    """Every request of the gate was sent. After one that failed others are left out, and that one is the finding."""
    missing = [role for role in roles if all(o.role != role for o in observed)]
    return too_few(f"nobody asked for {', '.join(missing)}") if missing and all(o.ok for o in observed) else []


COUNTED = ("cold", "native", "external", "native-2", "control")
"""Arms whose source the counters have to confirm, each: a cold answer that was none is no reference, however alike the others are."""


def _uncounted(observed: Sequence[r.Observation], counted: Sequence[r.Observation]) -> list[r.Finding]:
    """Whose counters nobody read is judged by none of the checks that rest on them."""
    seen = {o.request_id for o in counted}
    lost = [o for o in observed if o.ok and kind_of(o) in COUNTED and o.request_id not in seen]
    return too_few(f"no counters around {len(lost)} requests; first: {lost[0].request_id}") if lost else []


def _reused(history: History, o: r.Observation) -> int | None:
    """Tokens that a request did not compute: as the response tells, else as the engine counted; None where neither does."""
    if o.cached_tokens is not None:
        return o.cached_tokens
    delta = delta_of(history, o)
    return None if delta is None else int(delta.get(LOCAL, 0.0) + delta.get(EXTERNAL, 0.0))


def _without_twin(history: History) -> list[r.Finding]:
    """Every answered external request has a native answer to stand beside; else the strict arm was left out without a word.

    Prompts that part in a block (tag ``divergent``) and go on behind it have no native answer of equal shape: a cold one is theirs.
    """
    asked = history.observations()
    native = {o.prompt_token_ids for o in asked if kind_of(o) == "native"}
    cold = {o.prompt_token_ids for o in asked if kind_of(o) in ("cold", "reference")}
    lone = [
        o
        for o in asked
        if o.ok
        and kind_of(o) == "external"
        and o.prompt_token_ids not in (cold if _parts_in_full(history, o) else native)
    ]
    return (
        too_few(f"no answer to compare {len(lone)} external ones with in their shape; first: {lone[0].request_id}")
        if lone
        else []
    )


def _parts_in_full(history: History, o: r.Observation) -> bool:
    return _tag(o.role)[1] == "divergent" and not history.case.params.get("short")


def _hits(history: History, measured: Sequence[r.Observation]) -> list[r.Finding]:
    found: list[r.Finding] = []
    for o in measured:
        delta = delta_of(history, o)
        if o.ok and delta is not None and delta.get(PROMPT) != len(o.prompt_token_ids):
            continue  # its tokens were not counted (conservation says so): the same counters say nothing of its hits
        local, external = expected_local(history, o), expected_external(history, o)
        expected = hits.Expected(
            local_tokens=local,
            external_tokens=external,
            prompt_tokens=len(o.prompt_token_ids),
            block_tokens=history.engine(o.engine).block_tokens,
            at_most_tokens=local + external,
        )
        found += hits.check_hits(o, delta, expected)
    return found


def _pairs(history: History, kind: str, reference: str) -> list[answers.Pair]:
    """(answer of an arm, answer of the reference arm) for equal prompts of the case."""
    references = {o.prompt_token_ids: o for o in history.observations() if kind_of(o) == reference}
    return [
        (o, references[o.prompt_token_ids])
        for o in history.observations()
        if kind_of(o) == kind and o.prompt_token_ids in references
    ]


def _answers(history: History, oracle: Oracle, arm: str) -> list[r.Finding]:
    if arm == "native":
        return answers.judge_cold(_pairs(history, "native", "cold"), oracle.cold_limit).findings
    kinds = ("external", "native-2", "control")
    native = [pair for kind in kinds for pair in _pairs(history, kind, "native")]
    recomputed = {(o.engine, o.prompt_token_ids) for o in history.observations() if failed_loads(history, o)}
    # Equal shape: the same cached length, all of it really read. A reader that reused less, or whose load failed in part
    # and was recomputed, has computed in other shapes (and keeps such blocks); both are findings of other checks, and
    # only the cold arm can say whether the answer is right.
    same = [
        _reused(history, a) == _reused(history, b) and (a.engine, a.prompt_token_ids) not in recomputed
        for a, b in native
    ]
    equal = [pair for pair, is_same in zip(native, same, strict=True) if is_same]
    unequal = [pair for pair, is_same in zip(native, same, strict=True) if not is_same]
    found = answers.judge_external_vs_native(equal, oracle.native) if equal else []
    cold = [*_pairs(history, "external", "cold"), *_pairs(history, "external", "reference"), *unequal]
    confirmed = {a.request_id for a, b in equal if not answers.judge_external_vs_native([(a, b)], oracle.native)}
    twins = [pair for pair in cold if pair[0].request_id in confirmed]
    others = [pair for pair in cold if pair[0].request_id not in confirmed]
    found += [_of_both(f) for f in answers.judge_cold(twins, oracle.cold_limit_of_twins).findings] if twins else []
    found += answers.judge_cold(others, oracle.cold_limit).findings if others or not twins else []
    return found + _without_twin(history)


def _of_both(f: r.Finding) -> r.Finding:
    """What is wrong over the pool's blocks and over the saver's own cache alike was wrong before it was read from the pool, and says so.

    Not that the pool is innocent: an engine with a connector looks its own cache up in other ways than one without (seen in vLLM 0.26.0
    with a model that keeps states), and may have saved what it never computed.
    """
    if f.code is not r.FindingCode.WRONG_ANSWER:
        return f
    own = "the saver's own prefix cache gives the same answer, so it was wrong before any block was read from the pool"
    return msgspec.structs.replace(f, message=f"{f.message}; {own}")


def _cold_notes(history: History, oracle: Oracle) -> tuple[str, ...]:
    return tuple(answers.judge_cold(_pairs(history, "external", "cold"), oracle.cold_limit).notes)


def _ttft(observed: Sequence[r.Observation]) -> dict[str, Any]:
    times = {o.role: round(o.ttft_s * 1000, 1) for o in observed if o.ttft_s is not None}
    return {"ttft_ms": times}
