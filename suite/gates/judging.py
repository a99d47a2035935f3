"""How gates judge: the checks of ``suite.checks`` put together for the arms that ``suite.gates.arms`` sends.

Pure functions of a case's history. The order of findings is the order of what matters: a wrong answer before a wrong
count, the cause before its symptom.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from reports import records as r
from reports.history import History
from suite.checks import answers, conservation, hits, liveness, logs, parity, sources
from suite.checks.base import finding, run
from suite.contract import Gate, outcome_of
from suite.gates.arms import CALIBRATION
from suite.workload.prompts import reusable_tokens

ABSOLUTE_MINIMUM_NAT = 0.01
"""A planted wrong block must move a log probability by at least this much (nat), whatever the floor. bfloat16 has
8 bits of mantissa: logits of size 8 to 16 are 1/16 apart, so a visible change is far above this."""

COLD_FACTOR = 2.0
"""The cold arm's limit over its floor. The floor is the largest of some dozens of samples of honest numeric noise; the
largest of as many again may exceed it. The oracle is declared blind unless planted blocks exceed this same limit."""

PRIORITY = (
    r.FindingCode.WRONG_ANSWER,
    r.FindingCode.FOREIGN_REUSE,
    r.FindingCode.SEED_MISMATCH,
    r.FindingCode.SHARED_LOOKUP_CHANNEL,
    r.FindingCode.ENGINE_DIED,
    r.FindingCode.STUCK_BEHIND_HEALTH,
    r.FindingCode.HANG,
    r.FindingCode.FAILED_REQUEST,
    r.FindingCode.SAVE_NOT_VISIBLE,
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
    """Findings with the primary one first."""
    rank = {code: i for i, code in enumerate(PRIORITY)}
    return tuple(sorted(findings, key=lambda f: rank.get(f.code, len(rank))))


def one(history: History, role: str) -> r.Observation | None:
    """The last request of a role, or None."""
    found = history.observations(role=role)
    return found[-1] if found else None


# Calibration --------------------------------------------------------------------------------------------------------


def calibration_records(history: History) -> list[r.Record]:
    """Records of the newest calibration of the case's stack, wherever in the run it was made."""
    everything = [*history.before, *history.records]
    stack = history.stack
    begin = 0
    for i, rec in enumerate(everything):
        if isinstance(rec, r.StackUp) and stack is not None and rec.stack_id == stack.stack_id:
            begin = i
    return everything[begin:]


class Oracle:
    """Floors and sensitivity measured on the case's stack."""

    def __init__(self, history: History) -> None:
        records = calibration_records(history)
        seen = [x for x in records if isinstance(x, r.Observation) and x.case_id == CALIBRATION]
        self.native = self._native(seen, "floor-native")
        """Requests alone on their engine, as the arms send them."""
        self.cold = self._cold(seen, "")
        self.native_concurrent = self.native.merged(self._native(seen, "floor-native-concurrent"))
        """Requests beside others: they share batches, whose shapes differ from run to run."""
        self.cold_concurrent = self.cold.merged(self._cold(seen, "-concurrent"))
        self.planted = self._planted(records, seen)

    @staticmethod
    def _by_prompt(seen: Sequence[r.Observation], role: str) -> list[list[r.Observation]]:
        groups: dict[tuple[int, ...], list[r.Observation]] = {}
        for o in seen:
            if o.role == role:
                groups.setdefault(o.prompt_token_ids, []).append(o)
        return list(groups.values())

    def _native(self, seen: Sequence[r.Observation], role: str) -> answers.Floor:
        pairs = [(group[0], other) for group in self._by_prompt(seen, role) for other in group[1:]]
        return answers.native_floor(pairs)

    def _cold(self, seen: Sequence[r.Observation], suffix: str) -> answers.Floor:
        natives = {g[0].prompt_token_ids: g[0] for g in self._by_prompt(seen, f"floor-native{suffix}")}
        pairs = [
            (cold, natives[cold.prompt_token_ids])
            for group in self._by_prompt(seen, f"floor-cold{suffix}")
            for cold in group
            if cold.prompt_token_ids in natives
        ]
        return answers.cold_floor(pairs)

    @staticmethod
    def _planted(records: Sequence[r.Record], seen: Sequence[r.Observation]) -> dict[str, answers.Difference]:
        """Differences by position; only blocks that were provably replaced and then read count as planted."""
        references = {o.prompt_token_ids: o for o in seen if o.role == "planted-reference"}
        answered = {o.request_id: o for o in seen if o.role == "planted"}
        found: dict[str, answers.Difference] = {}
        for fact in records:
            if not isinstance(fact, r.Fact) or fact.name != "planted-block":
                continue
            replaced = fact.value["replaced"]
            landed = replaced and replaced["put"] == 0 and replaced["before"] != replaced["after"]
            answer = answered.get(fact.value["request_id"])
            reference = references.get(answer.prompt_token_ids) if answer else None
            if landed and answer and reference and answer.cached_tokens:
                found[fact.value["where"]] = answers.compare(answer, reference)
        return found

    @property
    def cold_limit(self) -> answers.Floor:
        """Limit of the cold arm for requests that were alone: the cold floor widened by ``COLD_FACTOR``."""
        return self._widened(self.cold)

    @property
    def cold_limit_concurrent(self) -> answers.Floor:
        """Limit of the cold arm for requests beside others; ``check`` makes sure that planted blocks exceed it."""
        return self._widened(self.cold_concurrent)

    @staticmethod
    def _widened(floor: answers.Floor) -> answers.Floor:
        return answers.Floor(
            kind="cold",
            max_nat=floor.max_nat * COLD_FACTOR,
            pairs=floor.pairs,
            steps=floor.steps,
            parted=floor.parted,
            margin_nat=floor.margin_nat * COLD_FACTOR,
            unusable=floor.unusable,
            first_problem=floor.first_problem,
        )

    def check(self) -> list[r.Finding]:
        """The oracle can see a planted wrong block at every position, beyond the limits that verdicts rest on."""
        widest = max(self.native_concurrent.max_nat, self.cold_limit_concurrent.max_nat)
        floor = answers.Floor("native", widest, self.native.pairs, self.native.steps)
        return answers.check_sensitivity(
            self.planted, floor, ABSOLUTE_MINIMUM_NAT, factor=1.0, at_least=max(1, len(self.planted))
        )

    def numbers(self) -> dict[str, Any]:
        """As shown in a verdict."""
        return {
            "native_floor_nat": self.native.max_nat,
            "native_floor_pairs": self.native.pairs,
            "cold_floor_nat": self.cold.max_nat,
            "cold_floor_pairs": self.cold.pairs,
            "native_floor_concurrent_nat": self.native_concurrent.max_nat,
            "cold_floor_concurrent_nat": self.cold_concurrent.max_nat,
            "planted_nat": {where: d.max_nat for where, d in self.planted.items()},
        }


# Arms ---------------------------------------------------------------------------------------------------------------


def judge_arms(
    gate: Gate, history: History, *, extra: Sequence[r.Finding] = (), numbers: dict[str, Any] | None = None
) -> r.Verdict:
    """Judge every prompt of a case that was sent through arms: hits, sums, bytes, answers, logs.

    extra: findings of the gate's own (they take part in the order).
    """
    oracle = Oracle(history)
    observed = history.observations()
    measured = [o for o in observed if history.metrics(o.engine, f"{o.request_id}:before") is not None]
    checks: dict[str, Callable[[], Sequence[r.Finding]]] = {
        "liveness": lambda: liveness.check_liveness(observed),
        "clock": lambda: liveness.check_clock(observed),
        "oracle": oracle.check,
        "answers": lambda: _answers(history, oracle),
        "hits": lambda: _hits(history, measured),
        "accounting": lambda: _accounting(history, measured),
        "visible": lambda: visible_findings(history),
        "logs": lambda: logs.check_logs(history),
    }
    findings = ordered([*run(checks), *extra])
    external = [o for o in measured if o.role.startswith("external")]
    got = _tokens(history, external)
    wanted = {o.request_id: expected_external(history, o) for o in external}
    return gate.verdict(
        history,
        outcome_of(findings),
        findings=findings,
        got=findings[0].message if findings else f"external tokens {list(got.values())}, answers equal",
        wanted=f"external tokens {list(wanted.values())}; the native answer within {oracle.native.max_nat:.3g} nat",
        numbers={**oracle.numbers(), **_ttft(observed), **(numbers or {})},
        notes=_cold_notes(history, oracle),
        **explanation(history, findings),
    )


def explanation(history: History, findings: Sequence[r.Finding]) -> dict[str, str]:
    """Likely cause, what shows it in production, and the next command, from the primary finding."""
    if not findings:
        return {}
    cause, production = CAUSES.get(findings[0].code, ("", "invisible"))
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
    return 0


def expected_local(history: History, o: r.Observation) -> int:
    """Tokens a request must get from its engine's own cache, by its role."""
    kind, tag = _tag(o.role)
    if kind not in ("native", "native-2"):
        return 0
    if tag == "divergent":
        fact = history.fact("divergent")
        return int(fact.value["common_tokens"]) if fact else -1
    return reusable_tokens(len(o.prompt_token_ids), history.engine(o.engine).block_tokens)


def delta_of(history: History, o: r.Observation) -> dict[str, float] | None:
    """Counter differences around one request, or None."""
    return history.delta(o.engine, f"{o.request_id}:before", f"{o.request_id}:after")


def _tokens(history: History, observations: Sequence[r.Observation]) -> dict[str, int]:
    out = {}
    for o in observations:
        delta = delta_of(history, o)
        out[o.request_id] = -1 if delta is None else int(delta.get("prompt_tokens.external", -1))
    return out


def _hits(history: History, measured: Sequence[r.Observation]) -> list[r.Finding]:
    found: list[r.Finding] = []
    for o in measured:
        local, external = expected_local(history, o), expected_external(history, o)
        expected = hits.Expected(
            local_tokens=local,
            external_tokens=external,
            prompt_tokens=len(o.prompt_token_ids),
            block_tokens=history.engine(o.engine).block_tokens,
            at_most_tokens=local + external,
        )
        found += hits.check_hits(o, delta_of(history, o), expected)
    return found


def _accounting(history: History, measured: Sequence[r.Observation]) -> list[r.Finding]:
    found: list[r.Finding] = []
    for o in measured:
        delta = delta_of(history, o)
        per_token = history.engine(o.engine).kv_bytes_per_token
        found += conservation.check_conservation(o, delta, kv_bytes_per_token=per_token)
        found += sources.check_sources(o, delta, kv_bytes_per_token=per_token)
    return found


def _pairs(history: History, kind: str, reference: str) -> list[answers.Pair]:
    """(answer of an arm, answer of the reference arm) for equal prompts of the case."""
    references = {o.prompt_token_ids: o for o in history.observations() if _tag(o.role)[0] == reference}
    return [
        (o, references[o.prompt_token_ids])
        for o in history.observations()
        if _tag(o.role)[0] == kind and o.prompt_token_ids in references
    ]


def _answers(history: History, oracle: Oracle) -> list[r.Finding]:
    native = [*_pairs(history, "external", "native"), *_pairs(history, "native-2", "native")]
    found = answers.judge_external_vs_native(native, oracle.native)
    cold = _pairs(history, "external", "cold")
    return found + answers.judge_cold(cold, oracle.cold_limit).findings


def _cold_notes(history: History, oracle: Oracle) -> tuple[str, ...]:
    return tuple(answers.judge_cold(_pairs(history, "external", "cold"), oracle.cold_limit).notes)


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
