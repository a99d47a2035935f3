"""How bursts are judged: requests that overlap have no counters of their own, so bounds and sums take their place."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from reports import records as r
from reports.history import History
from suite.checks import answers, hits, liveness, logs
from suite.checks.base import finding, run, too_few
from suite.checks.pool_model import Expected, PoolModel
from suite.contract import Gate
from suite.gates.arms import REFERENCE
from suite.gates.judging import explanation, measured_checks, ordered, sums_and_sources, visible_findings
from suite.gates.judging_sequence import (
    check_answers,
    check_control,
    check_exact,
    forget,
    rules_of,
)
from suite.gates.oracle import Oracle
from suite.gates.selections import cold_pairs, measured

BURST = "burst"
"""Phase of the requests that overlap."""

SAVING = "saving"
"""Role of the request whose save the burst meets; it began before the burst's counters were read."""

OVERLAP = 3
"""At least so many requests of a burst must have been under way at one moment."""


def burst_label(engine: str, when: str) -> str:
    """Label of an engine's counters around the burst; ``when``: ``before`` or ``after``."""
    return f"{engine}:burst:{when}"


def bursting(history: History) -> list[r.Observation]:
    """The requests that overlap, without those that were sent alone in that phase (they have counters of their own)."""
    alone = {o.request_id for o in measured(history)}
    return [o for o in history.observations(phase=BURST) if o.request_id not in alone]


def replayed(history: History) -> tuple[list[tuple[r.Observation, Expected]], list[tuple[r.Observation, Expected]]]:
    """Expectations of the requests that were alone, and bounds of those that overlapped, each in order.

    A burst's request surely finds what was visible before the burst; at most it finds that and whatever the *other*
    requests of the burst leave.
    """
    model = PoolModel(rules_of(history))
    overlapping = bursting(history)
    ids = {o.request_id for o in overlapping}
    alone: list[tuple[r.Observation, Expected]] = []
    bounds: list[tuple[r.Observation, Expected]] = []
    earlier: list[r.Observation] = []
    for record in history:
        if isinstance(record, r.Fact):
            forget(model, record)
        if not isinstance(record, r.Observation) or record.case_id != history.case.case_id:
            continue
        if record.engine == REFERENCE:
            continue
        if record.request_id not in ids:
            alone.append((record, model.observe(record, visible=True)))
            earlier.append(record)
        elif not bounds:
            bounds = [(o, _bound(history, earlier, overlapping, o)) for o in overlapping]
            for o in overlapping:
                model.observe(o, visible=True)
    return alone, bounds


def _bound(
    history: History, earlier: Sequence[r.Observation], overlapping: Sequence[r.Observation], o: r.Observation
) -> Expected:
    model = PoolModel(rules_of(history))
    for before in earlier:
        model.observe(before, visible=True)
    for other in overlapping:
        if other.request_id != o.request_id:
            model.announce(other.engine, other.prompt_token_ids, other.cache_salt)
    return model.expected(o.engine, o.prompt_token_ids, o.cache_salt)


def check_overlap(overlapping: Sequence[r.Observation]) -> list[r.Finding]:
    """The burst was one: enough of its requests were under way together."""
    most = max((sum(a.sent_s <= o.sent_s < a.done_s for a in overlapping) for o in overlapping), default=0)
    if most >= OVERLAP:
        return []
    return [finding(r.FindingCode.NO_PRESSURE, f"at most {most} requests were under way together, {OVERLAP} needed")]


def check_sums(history: History, overlapping: Sequence[r.Observation]) -> list[r.Finding]:
    """Tokens by source, and bytes, over each engine's part of the burst."""
    found: list[r.Finding] = []
    for engine in sorted({o.engine for o in overlapping}):
        delta = history.delta(engine, burst_label(engine, "before"), burst_label(engine, "after"))
        own = [o for o in overlapping if o.engine == engine and o.role != SAVING]
        if delta is None:
            found += too_few(f"{engine}: no counters around the burst")
            continue
        if any(o.role == SAVING and o.engine == engine for o in overlapping):
            continue  # the saver's own request straddles the first scrape: no sum of this engine is exact
        found += sums_and_sources(history.engine(engine), own, delta)
    return found


def judge_burst(gate: Gate, history: History) -> r.Verdict:
    """Judge a burst and the requests before and after it."""
    oracle = Oracle.of(history)
    observed = history.observations()
    overlapping = bursting(history)
    alone, bounds = replayed(history)
    checks: dict[str, Callable[[], Sequence[r.Finding]]] = {
        "overlap": lambda: check_overlap(overlapping),
        "liveness": lambda: liveness.check_liveness(observed),
        "clock": lambda: liveness.check_clock(observed),
        "oracle": oracle.check,
        "same function": oracle.check_same_function,
        "answers at once": lambda: (
            answers.judge_cold(
                cold_pairs(history, overlapping), oracle.cold_limit_concurrent, min_pairs=OVERLAP
            ).findings
        ),
        "answers alone": lambda: check_answers(history, oracle),
        "bounds": lambda: hits.check_all_hits(bounds, mode="between", min_requests=OVERLAP),
        "hits": lambda: check_exact(history, alone),
        "control": lambda: check_control(history, alone),
        "sums": lambda: check_sums(history, overlapping),
        **measured_checks(history, measured(history)),
        "visible": lambda: visible_findings(history),
        "logs": lambda: logs.check_logs(history),
    }
    findings = ordered(run(checks))
    cached = [o.cached_tokens for o in overlapping]
    return gate.judged(
        history,
        findings,
        good=f"{len(overlapping)} requests at once, all right; cached {cached}",
        wanted=f"the cold answers; cached tokens {[(e.cached_tokens, e.at_most_tokens) for _, e in bounds]} (least, most)",
        numbers={**oracle.numbers(), "at_once": len(overlapping)},
        notes=tuple(answers.judge_cold(cold_pairs(history, overlapping), oracle.cold_limit_concurrent).notes),
        **explanation(history, findings),
    )
