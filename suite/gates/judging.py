"""How gates judge: the checks of ``suite.checks`` put together; what every gate shares. Arms are judged in ``judging_arms``.

Pure functions of a case's history. The order of findings is the order of what matters: a wrong answer before a wrong
count, the cause before its symptom.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from reports import records as r
from reports.history import History
from suite.checks import conservation, degrade, kv_layers, parity, sources
from suite.checks.base import EXTERNAL, STORE_GET, STORE_LOOKUP, finding, store_ops, too_few
from suite.gates.selections import budget_of
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


def delta_of(history: History, o: r.Observation) -> dict[str, float] | None:
    """Counter differences around one request, or None."""
    return history.delta(o.engine, f"{o.request_id}:before", f"{o.request_id}:after")


def _external(history: History, o: r.Observation) -> float:
    return (delta_of(history, o) or {}).get(EXTERNAL, 0.0)


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


def parity_findings(history: History) -> list[r.Finding]:
    """Settings that must be equal on every worker of the engines that were compared, but are not."""
    snapshots = [s for s in history.of(r.ProcessSnapshot) if s.label == "parity"]
    return parity.check_seed_parity(snapshots)
