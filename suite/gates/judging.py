"""How gates judge: the checks of ``suite.checks`` put together for the arms that ``suite.gates.arms`` sends.

Pure functions of a case's history. The order of findings is the order of what matters: a wrong answer before a wrong
count, the cause before its symptom.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from reports import records as r
from reports.history import History
from suite.checks import answers, conservation, degrade, hits, kv_layers, liveness, logs, parity, sources
from suite.checks.base import EXTERNAL, LOCAL, PROMPT, STORE_GET, STORE_LOOKUP, finding, run, store_ops, too_few
from suite.contract import Gate, outcome_of
from suite.gates.oracle import Oracle
from suite.gates.selections import budget_of, kind_of, measured
from suite.workload.prompts import reusable_tokens

PRIORITY = (
    r.FindingCode.WRONG_ANSWER,
    r.FindingCode.FOREIGN_REUSE,
    r.FindingCode.UNDETECTED_CORRUPTION,
    r.FindingCode.SEED_MISMATCH,
    r.FindingCode.SHARED_LOOKUP_CHANNEL,
    r.FindingCode.ENGINE_DIED,
    r.FindingCode.STUCK_BEHIND_HEALTH,
    r.FindingCode.HANG,
    r.FindingCode.FAILED_REQUEST,
    r.FindingCode.SAVE_NOT_VISIBLE,
    r.FindingCode.UNBOUNDED_LOOKUPS,
    r.FindingCode.SILENT_FALLBACK,
    r.FindingCode.ZERO_HITS,
)
"""Primary finding first; codes not named here keep their order behind these."""

CAUSES: dict[str, tuple[str, str]] = {
    # finding -> (likely cause, what shows it in production)
    r.FindingCode.WRONG_ANSWER: ("the KV that was read is not the KV of this prefix", "invisible"),
    r.FindingCode.SEED_MISMATCH: (
        "engines hash blocks from different seeds: set the same PYTHONHASHSEED for every engine",
        "vllm:external_prefix_cache_hits_total stays 0 while _queries_total grows",
    ),
    r.FindingCode.ZERO_HITS: (
        "keys differ between engines, or saves never became visible",
        "vllm:external_prefix_cache_hits_total stays 0 while _queries_total grows",
    ),
    r.FindingCode.FEWER_HITS: ("part of the prefix was not found or not loaded", "external hit rate below its ceiling"),
    r.FindingCode.EXTRA_HITS: ("a block was reused that this prompt does not contain", "invisible"),
    r.FindingCode.SAVE_NOT_VISIBLE: ("saves fail or lag", "mooncake_store_operation_failed_keys_total"),
    r.FindingCode.CONSERVATION: ("a counter books what did not happen", "the sums of prompt_tokens_by_source"),
    r.FindingCode.SOURCE_DISAGREEMENT: ("a counter books what did not happen", "compare counters with bytes"),
    r.FindingCode.FAILED_REQUEST: (
        "kv_load_failure_policy is at its default `fail`: set it to `recompute`",
        "HTTP 5xx; vllm:mooncake_store_operation_total{status!='ok'}",
    ),
    r.FindingCode.SILENT_FALLBACK: (
        "a promised block could not be loaded; the request was recomputed",
        "vllm:mooncake_store_operation_total{operation='load_get',status!='ok'}",
    ),
    r.FindingCode.SLOW_DEGRADE: (
        "lookups and loads of lost blocks are repeated until the master drops the dead client (client TTL)",
        "vllm:time_to_first_token_seconds; mooncake_store_operation_total{operation='lookup_exists'}",
    ),
    r.FindingCode.UNBOUNDED_LOOKUPS: (
        "one request looks the same lost blocks up again and again",
        "mooncake_store_operation_total{operation='lookup_exists'} over requests",
    ),
    r.FindingCode.HANG: ("a load or lookup without a time limit", "vllm:num_requests_running does not fall"),
    r.FindingCode.STUCK_BEHIND_HEALTH: ("the scheduler waits; the API server does not", "only a real completion"),
    r.FindingCode.UNEXPLAINED_LOG: ("see the quoted line", "the log line itself"),
    r.FindingCode.KV_LEAK: ("blocks stay pinned after a failed load or save", "vllm:kv_cache_usage_perc when idle"),
}


def ordered(findings: Iterable[r.Finding]) -> tuple[r.Finding, ...]:
    """Findings with the primary one first; what the harness did wrong comes before all, as it spoils the rest.

    What is merely inconclusive comes last: beside a failure it is not what the verdict rests on.
    """
    rank = {code: i for i, code in enumerate(PRIORITY)}
    rank |= dict.fromkeys(r.HARNESS_CODES, -1) | dict.fromkeys(r.INCONCLUSIVE_CODES, len(PRIORITY) + 1)
    return tuple(sorted(findings, key=lambda f: rank.get(f.code, len(PRIORITY))))


# Arms ---------------------------------------------------------------------------------------------------------------


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
    return gate.verdict(
        history,
        outcome_of(findings),
        findings=findings,
        got=findings[0].message if findings else f"{arm} tokens {got}, answers equal",
        wanted=f"{arm} tokens {wanted}; the native answer within {oracle.native.max_nat:.3g} nat",
        numbers={**oracle.numbers(), **_ttft(observed), **(numbers or {})},
        notes=_cold_notes(history, oracle),
        **explanation(history, findings),
    )


def explanation(history: History, findings: Sequence[r.Finding]) -> dict[str, str]:
    """Likely cause, what shows it in production, and the next command, from the primary finding."""
    if not findings:
        return {}
    cause, production = CAUSES.get(findings[0].code, ("", "invisible"))
    for line in history.of(r.LogLine):
        if "queue-full rejection" in line.text:
            cause = (
                "the load has more slices than Mooncake's TCP queue for one peer holds"
                " (MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER); the rest is turned away and waited for"
            )
            production = f"log of {line.unit}: {line.text.strip()[-60:]}"
            break
    return {
        "cause": cause,
        "production": production,
        "next_command": f"pytest -m gates -k '{history.case.case_id}'",
    }


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


def delta_of(history: History, o: r.Observation) -> dict[str, float] | None:
    """Counter differences around one request, or None."""
    return history.delta(o.engine, f"{o.request_id}:before", f"{o.request_id}:after")


def _tokens(history: History, o: r.Observation, arm: str) -> int:
    delta = delta_of(history, o) or {}
    return int(delta.get("prompt_tokens.external" if arm == "external" else "prompt_tokens.local", -1))


def _external(history: History, o: r.Observation) -> float:
    return (delta_of(history, o) or {}).get(EXTERNAL, 0.0)


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


def _lookups(history: History, measured: Sequence[r.Observation]) -> list[r.Finding]:
    """No request is looked up again and again. Prompts shorter than a block, and engines without a pool, look up nothing."""
    found: list[r.Finding] = []
    for o in measured:
        delta = delta_of(history, o) or {}
        if any(
            count
            for name, count in delta.items()
            if name.startswith(f"store.{STORE_LOOKUP}.") and name.endswith(".ops")
        ):
            found += degrade.check_lookups([o], delta, max_lookups=int(budget_of(history)["max_lookups"]))
    return found


def counts_loads(engine: r.EngineFacts) -> bool:
    """The engine exposes what its connector reads from the pool. Without a connector there is nothing to count, and LMCache exposes
    none of it: response, sources and hits have to agree there."""
    return engine.connector != "native" and not engine.connector.startswith("lmcache")


def sums_and_sources(
    engine: r.EngineFacts, observed: r.Observation | Sequence[r.Observation], delta: dict[str, float] | None
) -> list[r.Finding]:
    """Conservation and three-source agreement of exactly the requests that an engine got between two scrapes."""
    pooled = counts_loads(engine)
    per_token = engine.kv_bytes_per_token if pooled and engine.keeps_all else 0
    found = [
        *conservation.check_conservation(observed, delta, kv_bytes_per_token=per_token),
        *sources.check_sources(observed, delta, kv_bytes_per_token=per_token),
    ]
    if pooled and not engine.keeps_all and delta is not None and isinstance(observed, r.Observation) and observed.ok:
        found += kv_layers.check_bytes_of_hit(observed, delta, engine)
    return found


def _accounting(history: History, measured: Sequence[r.Observation]) -> list[r.Finding]:
    return [f for o in measured for f in sums_and_sources(history.engine(o.engine), o, delta_of(history, o))]


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


def failed_loads(history: History, o: r.Observation) -> int:
    """Loads of one measured request that failed, wholly or in part; 0 also where nobody measured."""
    delta = delta_of(history, o) or {}
    return int(sum(store_ops(delta, STORE_GET, but_ok=True).values()))


def fallbacks(history: History, measured: Sequence[r.Observation]) -> list[r.Finding]:
    """No load failed where nothing was done to the stack; what failed was recomputed, and the response calls it cached."""
    fell = [o for o in measured if failed_loads(history, o)]
    if not fell or history.faults("inject"):
        return []
    first = fell[0]
    took = "no first token" if first.ttft_s is None else f"TTFT {first.ttft_s:.2f} s"
    return [
        finding(
            r.FindingCode.SILENT_FALLBACK,
            f"{len(fell)} of {len(measured)} requests were recomputed after a failed load that no fault explains; first:"
            f" {first.request_id} on {first.engine}: {failed_loads(history, first)} failed loads, {first.cached_tokens}"
            f" tokens reported as cached, {took}",
            request_id=first.request_id,
            engine=first.engine,
            count=len(fell),
        )
    ]


def measured_checks(
    history: History, measured: Sequence[r.Observation]
) -> dict[str, Callable[[], Sequence[r.Finding]]]:
    """What holds of every request that was alone between its two scrapes: sums, sources, lookups, no failed load."""
    return {
        "accounting": lambda: _accounting(history, measured),
        "lookups": lambda: _lookups(history, measured),
        "fallbacks": lambda: fallbacks(history, measured),
    }


def _cold_notes(history: History, oracle: Oracle) -> tuple[str, ...]:
    return tuple(answers.judge_cold(_pairs(history, "external", "cold"), oracle.cold_limit).notes)


def read_in_full(history: History, o: r.Observation) -> bool:
    """All reusable tokens of an answered request came from the pool, by the engine's own counters."""
    whole = reusable_tokens(len(o.prompt_token_ids), history.engine(o.engine).block_tokens)
    return o.ok and (delta_of(history, o) or {}).get(EXTERNAL, 0.0) == whole > 0


def healthy_findings(history: History, when: str) -> list[r.Finding]:
    """The stack was proven well (``fixtures.healthy``); its first complaint, said of ``when``, otherwise."""
    fact = history.fact("healthy")
    if fact is None:
        return too_few(f"{when}: nobody proved the stack healthy")
    complaints = fact.value["complaints"]
    if not complaints:
        return []
    return [finding(r.FindingCode.HITS_NOT_BACK, f"{when}: {complaints[0]}", complaints=complaints)]


def visible_findings(history: History) -> list[r.Finding]:
    """Every wait for saved blocks came true."""
    late = [w for w in history.of(r.WaitRecord) if w.what.startswith("visible:") and not w.came_true]
    if not late:
        return []
    return [
        finding(
            r.FindingCode.SAVE_NOT_VISIBLE,
            f"blocks of {late[0].what.removeprefix('visible:')} were not listed by the store within {late[0].bound_s:g} s",
            waits=len(late),
        )
    ]


def _ttft(observed: Sequence[r.Observation]) -> dict[str, Any]:
    times = {o.role: round(o.ttft_s * 1000, 1) for o in observed if o.ttft_s is not None}
    return {"ttft_ms": times}


def parity_findings(history: History) -> list[r.Finding]:
    """Settings that must be equal on every worker of the engines that were compared, but are not."""
    snapshots = [s for s in history.of(r.ProcessSnapshot) if s.label == "parity"]
    return parity.check_seed_parity(snapshots)
