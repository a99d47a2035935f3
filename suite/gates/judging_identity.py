"""How family I judges: pairs of a case, their controls, and what told the two sides apart.

Pure functions of a case's history. A case with several pairs is as bad as its worst pair.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

import msgspec

from reports import records as r
from reports.history import History
from suite.checks import answers, hits, identity, liveness, logs
from suite.checks.base import finding, run
from suite.contract import Gate, outcome_of
from suite.gates.judging import (
    counts_loads,
    delta_of,
    failed_loads,
    fallbacks,
    ordered,
    sums_and_sources,
    visible_findings,
)
from suite.gates.oracle import ABSOLUTE_MINIMUM_NAT, Oracle
from suite.gates.selections import kind_of, measured
from suite.workload.prompts import reusable_tokens

SHARED_KEYS_SHOWN = 2
"""So many of the keys that both sides used are put into a verdict; all of them are in the evidence."""


def engine_facts(history: History, name: str) -> r.EngineFacts:
    """Facts of an engine of the case: of the stack, or started inside the case. KeyError when there is none."""
    for fact in reversed(history.facts("identity.engine")):
        if fact.value["name"] == name:
            return msgspec.convert(fact.value, r.EngineFacts)
    return history.engine(name)


def judge_identity(gate: Gate, history: History) -> r.Verdict:
    """Judge all pairs of a case; parameters ``setting``, ``avoid``, ``changes_answers``, ``must_isolate``, ``may_lack``."""
    params = history.case.params
    missing = _not_started(history, may_lack=bool(params.get("may_lack")))
    if missing:
        return gate.verdict(
            history,
            outcome_of(missing),
            findings=tuple(missing),
            got=missing[0].message,
            wanted="an engine that starts",
        )
    oracle = Oracle.of(history)
    pairs = [fact.value for fact in history.facts("identity.pair")]
    observed = history.observations()
    judged: list[identity.PairJudgement] = []

    def judge_pairs() -> list[r.Finding]:
        judged.extend(_judge_pair(history, oracle, params, fact) for fact in pairs)
        return [f for j in judged for f in j.findings]

    checks: dict[str, Callable[[], Sequence[r.Finding]]] = {
        "pairs": judge_pairs,
        "enough pairs": lambda: _enough(params, pairs),
        "liveness": lambda: liveness.check_liveness(observed),
        "clock": lambda: liveness.check_clock(observed),
        "oracle": oracle.check,
        "controls": lambda: _controls(history, pairs),
        "accounting": lambda: _accounting(history),
        "fallbacks": lambda: fallbacks(history, _but_foreign(history)),
        "visible": lambda: visible_findings(history),
        "logs": lambda: logs.check_logs(history),
    }
    findings = ordered(run(checks))
    reused = [str(j.numbers.get("reused_tokens", "?")) for j in judged]
    return gate.judged(
        history,
        findings,
        good=f"{', '.join(reused)} tokens reused across; every answer its own",
        wanted=f"nothing reused across {params['setting']}, or the reader's own answer; own blocks and equal engines do hit",
        notes=tuple(n for j in judged for n in j.notes) + _apart(pairs),
        numbers={
            "pairs": {fact["tag"]: j.numbers for fact, j in zip(pairs, judged, strict=False)},
            "told_apart_by": {f["tag"]: identity.told_apart_by(f["saver_keys"], f["reader_keys"]) for f in pairs},
            "oracle": oracle.numbers(),
        },
        **_explanation(history, findings, params),
    )


def _not_started(history: History, *, may_lack: bool) -> list[r.Finding]:
    """The engine that differs did not come up: the host (or build) lacks the setting, or the case has proven nothing."""
    for attempt in history.of(r.StartAttempt):
        if attempt.result == "ready":
            continue
        logged = [line.text for line in history.of(r.LogLine) if line.unit == attempt.unit]
        words = _own_words([*logged, *attempt.log_tail])
        how = attempt.result if attempt.result != "neither" else f"neither ready nor dead in {attempt.bound_s:.0f} s"
        text = f"engine {attempt.unit} with {history.case.params['setting']}: {how}; its own words: {words}"
        # One that says that it failed is not ready for that reason, whether its processes went away or (as seen) stayed.
        lacks = may_lack and (attempt.result == "dead" or _FAILED.search(words) is not None)
        code = r.FindingCode.MISSING_CAPABILITY if lacks else r.FindingCode.NO_PRESSURE
        return [finding(code, text, log_tail=list(attempt.log_tail), exit_code=attempt.exit_code)]
    return []


_FAILED = re.compile(r"\b[A-Z]\w*(?:Error|Exception)\b")


def _own_words(log: Sequence[str]) -> str:
    """The last line of a log that says an error with its message, and not only where to find it; else what comes nearest."""
    lines = [line.strip() for line in log if line.strip() and not _WARNED.search(line)]
    failed = [line for line in lines if _FAILED.search(line)]
    said = [line for line in failed if _SAID.search(line)]
    cause = [line for line in said if "root cause" not in line]
    return (cause or said or failed or lines or ["nothing"])[-1][:300]


_WARNED = re.compile(r"\bWARNING\b")
"""A warning can name an error that has not happened (of the limit of open files at every start: "errors like `OSError: ..."). It is no
word of a failure, and a slow engine that only warned is not one that lacks something."""

_SAID = re.compile(r"\b[A-Z]\w*(?:Error|Exception): \S")
"""An error with its message, and not the line of a traceback that raises it."""


def _enough(params: Mapping[str, Any], pairs: Sequence[Mapping[str, Any]]) -> list[r.Finding]:
    wanted = list(params["pairs"])
    if [p["tag"] for p in pairs] == wanted:
        return []
    message = f"pairs {[p['tag'] for p in pairs]} were sent, {wanted} belong to the case"
    return [finding(r.FindingCode.TOO_FEW_OBSERVATIONS, message)]


def _role(history: History, kind: str, tag: str) -> list[r.Observation]:
    return [o for o in history.observations() if o.role == f"{kind}/{tag}"]


def _judge_pair(
    history: History, oracle: Oracle, params: Mapping[str, Any], fact: Mapping[str, Any]
) -> identity.PairJudgement:
    tag = fact["tag"]
    roles = {kind: _role(history, kind, tag) for kind in ("foreign", "saver", "own", "cold", "native")}
    lacking = [kind for kind, requests in roles.items() if not requests]
    foreign = roles["foreign"][0] if roles["foreign"] else None
    delta = delta_of(history, foreign) if foreign else None
    if foreign is None or lacking or delta is None or not foreign.ok:
        text = f"{tag}: {', '.join(lacking) or 'the foreign request'} has no answer or no counters"
        return identity.PairJudgement([finding(r.FindingCode.TOO_FEW_OBSERVATIONS, text)], [], {})
    pair = identity.PairAnswers(
        tag=tag,
        saver_name=fact["saver"],
        reader_name=fact["reader"],
        foreign=foreign,
        reuse=identity.reuse_of(foreign, delta, counts_loads=counts_loads(engine_facts(history, foreign.engine))),
        cold=roles["cold"],
        native=roles["native"],
        own=roles["own"][0],
        saver_native=roles["saver"][0],
        own_recomputed=failed_loads(history, roles["own"][0]) > 0,
    )
    rule = identity.PairRule(bool(params["changes_answers"]), bool(params["must_isolate"]))
    result = identity.judge_pair(
        pair,
        rule,
        minimum_nat=ABSOLUTE_MINIMUM_NAT,
        native_noise=oracle.native,
        cold_noise=_cold_noise(history),
        cold_arm=oracle.cold_arm,
    )
    findings = [_with_keys(f, params, fact) for f in result.findings]
    return identity.PairJudgement(findings, result.notes, result.numbers)


def _cold_noise(history: History) -> answers.Floor:
    """How far the cold answers to one prompt are apart, over all pairs of the case."""
    groups: dict[str, list[r.Observation]] = {}
    for o in history.observations():
        if kind_of(o) == "cold":
            groups.setdefault(o.role, []).append(o)
    return answers.cold_floor([pair for group in groups.values() for pair in combinations(group, 2)])


def _with_keys(f: r.Finding, params: Mapping[str, Any], fact: Mapping[str, Any]) -> r.Finding:
    if f.code not in (r.FindingCode.WRONG_ANSWER, r.FindingCode.FOREIGN_REUSE):
        return f
    # The reader wrote no key of its own: every key it would have written was in the pool already, as the saver's.
    shared = fact["saver_keys"] if not fact["reader_keys"] else []
    more = {
        "setting": params["setting"],
        "shared_key_count": len(shared),
        "shared_keys": list(shared[:SHARED_KEYS_SHOWN]),
        "setting_that_avoids_it": params["avoid"],
    }
    return msgspec.structs.replace(f, evidence={**f.evidence, **more})


def _controls(history: History, pairs: Sequence[Mapping[str, Any]]) -> list[r.Finding]:
    """Rule 9: the same requests do hit where they may. Each finding is ``no-control``: isolation was not shown."""
    found: list[r.Finding] = []
    for fact in pairs:
        tag = fact["tag"]
        wanted = {"control": 2 if fact["equal"] else 1, "own": 1, "native": 2, "saver": 1}
        wanted["cold"] = max(2, len(_role(history, "cold", tag)))  # more samples of noise only help
        for kind, count in wanted.items():
            requests = _role(history, kind, tag)
            if len(requests) != count:
                text = f"{tag}: {len(requests)} requests in the role {kind!r}, {count} belong to a pair"
                found.append(finding(r.FindingCode.NO_CONTROL, text))
            for o in requests:
                found += _control(history, kind, o)
        if not fact["saver_keys"]:
            found.append(finding(r.FindingCode.NO_CONTROL, f"{tag}: the store lists no new key of {fact['saver']}"))
    return found


def _control(history: History, kind: str, o: r.Observation) -> list[r.Finding]:
    block = engine_facts(history, o.engine).block_tokens
    reusable = reusable_tokens(len(o.prompt_token_ids), block)
    external = reusable if kind in ("control", "own") else 0
    local = reusable if kind in ("native", "saver") else 0
    expected = hits.Expected(
        local_tokens=local,
        external_tokens=external,
        prompt_tokens=len(o.prompt_token_ids),
        block_tokens=block,
        at_most_tokens=local + external,
    )
    what = {
        "control": "blocks that were saved are not read back from the pool by their own kind",
        "own": "the reader does not read its own blocks from this pool",
        "cold": "the reader's own answer was not computed from nothing",
    }.get(kind, "a request for the engine's own cache did not come from it")
    return [
        finding(r.FindingCode.NO_CONTROL, f"{what}: {f.message}", **f.evidence)
        for f in hits.check_hits(o, delta_of(history, o), expected)
    ]


def _but_foreign(history: History) -> list[r.Observation]:
    """All measured requests but the foreign ones: what those claim is judged by itself."""
    return [o for o in measured(history) if kind_of(o) != "foreign"]


def _accounting(history: History) -> list[r.Finding]:
    found: list[r.Finding] = []
    for o in _but_foreign(history):
        found += sums_and_sources(engine_facts(history, o.engine), o, delta_of(history, o))
    return found


def _apart(pairs: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """What kept the sides apart, for pairs that were."""
    return tuple(
        f"{f['tag']}: keys differ in the {identity.told_apart_by(f['saver_keys'], f['reader_keys'])}"
        for f in pairs
        if f["reader_keys"]
    )


def _explanation(history: History, findings: Sequence[r.Finding], params: Mapping[str, Any]) -> dict[str, str]:
    if not findings:
        return {}
    shared = findings[0].code in (r.FindingCode.WRONG_ANSWER, r.FindingCode.FOREIGN_REUSE)
    if not shared:
        return {"next_command": f"pytest -m gates -k '{history.case.case_id}'"}
    return {
        "cause": f"no part of the key tells {params['setting']}: both sides use the same one. Avoid it: {params['avoid']}",
        "production": "invisible: both engines report healthy external hits",
        "next_command": f"pytest -m gates -k '{history.case.case_id}'; python -m fixtures.identity FLEET.toml",
    }
