"""How restarts are judged: the master says what is left, and so what must be read."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from reports import records as r
from reports.history import History
from suite.checks import answers, faults, hits, liveness, logs
from suite.checks.base import finding, run, too_few
from suite.checks.pool_model import Expected
from suite.contract import Gate
from suite.gates.judging import (
    delta_of,
    explanation,
    failed_loads,
    healthy_findings,
    measured_checks,
    ordered,
    visible_findings,
)
from suite.gates.oracle import Oracle
from suite.gates.selections import cold_pairs, kind_of, measured
from suite.workload.prompts import reusable_tokens

BACK, ANEW = "back", "anew"
HELD = "held-blocks"
"""Fact: ``{"engine": reader, "held": {key: [endpoint of each copy]}, "segments": [endpoint of each live segment]}``."""
NAMED_KEYS = "named-keys"
"""Fact: ``{"prompt": number, "keys": [key of its first block, of its second, ...]}``, "" where a key did not show."""


def held_before(history: History, o: r.Observation) -> frozenset[str]:
    """Keys with a copy in a live segment before this engine's reads began."""
    told = [f.value for f in history.facts(HELD) if f.value["engine"] == o.engine]
    if not told:
        return frozenset()
    live = set(told[-1]["segments"])
    return frozenset(key for key, endpoints in told[-1]["held"].items() if live & set(endpoints))


def blocks_left(history: History, o: r.Observation) -> int | None:
    """Leading blocks of an old prompt that were still held; None where a key is not known."""
    number = int(o.role.partition("/")[2])
    keys: list[str] = next((f.value["keys"] for f in history.facts(NAMED_KEYS) if f.value["prompt"] == number), [])
    if not keys or not all(keys):
        return None
    held = held_before(history, o)
    left = 0
    for key in keys:
        if key not in held:
            break
        left += 1
    return left


def wanted(history: History, o: r.Observation) -> Expected | None:
    """What a request after the restart must get; None where nobody can know."""
    block, tokens = history.engine(o.engine).block_tokens, len(o.prompt_token_ids)
    whole = reusable_tokens(tokens, block)
    kind = kind_of(o)
    if kind == "old":
        left = blocks_left(history, o)
        return None if left is None else Expected(0, left * block, tokens, block, left * block)
    local, external = (whole, 0) if kind == "native" else (0, whole) if kind == "external" else (0, 0)
    return Expected(local, external, tokens, block, local + external)


def after(history: History) -> list[r.Observation]:
    """The case's requests after the restart."""
    return [*history.observations(phase=BACK), *history.observations(phase=ANEW)]


def check_reads(history: History) -> list[r.Finding]:
    """Every request after the restart got exactly what was still there."""
    found: list[r.Finding] = []
    unknown = 0
    for o in after(history):
        expected = wanted(history, o)
        if expected is None:
            unknown += 1
        elif o.ok:
            found += hits.check_hits(o, delta_of(history, o), expected)
    if unknown:
        found += too_few(f"the keys of {unknown} requests' blocks did not show: what they must get is unknown")
    return found


def check_answers(history: History, oracle: Oracle) -> list[r.Finding]:
    """New prompts: external against native. Old and new ones: against the cold answer from before, or from the save."""
    new = history.observations(phase=ANEW)
    native = {o.prompt_token_ids: o for o in new if kind_of(o) == "native" and o.ok}
    pairs = [
        (o, native[o.prompt_token_ids])
        for o in new
        if kind_of(o) == "external"
        and o.ok
        and o.prompt_token_ids in native
        and o.cached_tokens == native[o.prompt_token_ids].cached_tokens
        and not failed_loads(history, o)
    ]
    found = answers.judge_external_vs_native(pairs, oracle.native) if new else []
    read = [o for o in after(history) if kind_of(o) in ("old", "external")]
    return found + answers.judge_cold(cold_pairs(history, read), oracle.cold_limit).findings


def check_control(history: History) -> list[r.Finding]:
    """New prompts were read from the pool; after an engine's restart some old ones had blocks left to be read."""
    hit = [o for o in history.observations(phase=ANEW) if kind_of(o) == "external" and o.cached_tokens]
    if len(hit) < 2:
        return [finding(r.FindingCode.NO_CONTROL, f"{len(hit)} of 2 prompts saved after the restart were read back")]
    if history.case.params["unit"] == "master":
        return []
    left = [blocks_left(history, o) for o in history.observations(phase=BACK)]
    if any(left):
        return []
    return [finding(r.FindingCode.NO_CONTROL, "no block from before the restart was left in the pool to be read")]


def judge_restart(gate: Gate, history: History) -> r.Verdict:
    """Judge what is read after a restart."""
    oracle = Oracle.of(history)
    observed = [o for o in history.observations() if o.role != "healthy"]
    read = [o for o in measured(history) if o.phase in (BACK, ANEW)]
    unwell = healthy_findings(history, "after the restart")
    checks: dict[str, Callable[[], Sequence[r.Finding]]] = {
        "restart": lambda: faults.check_faults(history.faults()),
        "health": lambda: unwell,
        "oracle": oracle.check,
        "clock": lambda: liveness.check_clock(observed),
        "liveness": lambda: liveness.check_liveness(observed),
        "visible": lambda: visible_findings(history),
        "logs": lambda: logs.check_logs(history),
    }
    if not unwell:  # else nothing was asked after the restart, and the complaint is the finding
        checks |= {
            "control": lambda: check_control(history),
            "answers": lambda: check_answers(history, oracle),
            "reads": lambda: check_reads(history),
            **measured_checks(history, read),
        }
    findings = ordered(run(checks))
    left = [blocks_left(history, o) for o in history.observations(phase=BACK)]
    return gate.judged(
        history,
        findings,
        good=f"{len(read)} requests read exactly what was left; blocks {left}",
        wanted="exactly the leading blocks that the pool still holds, right answers, full hits of what is saved anew",
        numbers={**oracle.numbers(), "old_blocks_left": left},
        **explanation(history, findings),
    )
