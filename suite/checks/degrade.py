"""Degrading within bounds (rule 8): time to first token of degraded requests, and lookups per request."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Literal

from reports import records as r
from suite.checks.base import OK, STORE_LOOKUP, finding, store_counter, store_ops, too_few


def budget_s(cold_ttft_s: float, *, factor: float, extra_s: float) -> float:
    """The most a degraded request may take to its first token: max(factor x cold, cold + extra)."""
    return max(factor * cold_ttft_s, cold_ttft_s + extra_s)


def check_budget(
    degraded: Sequence[r.Observation],
    cold: Sequence[r.Observation],
    *,
    factor: float,
    extra_s: float,
    min_requests: int = 1,
) -> list[r.Finding]:
    """Degraded requests (bystanders included) against cold ones of this run; ``slow-degrade`` names the worst.

    The baseline of a request is the median TTFT of the cold requests nearest to it in prompt length. A request that
    never got a first token is as slow as it is long: the time until it ended, or worse. No cold answer: ``no-control``.
    """
    judged = [o for o in degraded if not o.cancelled]
    if len(judged) < max(1, min_requests):
        return too_few(f"{len(judged)} degraded requests, {max(1, min_requests)} needed", requests=len(judged))
    controls = [o for o in cold if o.ok and o.ttft_s is not None]
    if not controls:
        return [finding(r.FindingCode.NO_CONTROL, f"none of {len(cold)} cold requests has a time to first token")]
    slow: list[tuple[float, float, float, r.Observation]] = []
    for o in judged:
        took = o.ttft_s if o.ttft_s is not None else o.duration_s
        base = _baseline(o, controls)
        limit = budget_s(base, factor=factor, extra_s=extra_s)
        if not math.isfinite(took) or took > limit:
            slow.append((took - limit, limit, base, o))
    if not slow:
        return []
    excess, limit, base, worst = max(slow, key=lambda item: item[0])
    return [
        finding(
            r.FindingCode.SLOW_DEGRADE,
            f"{len(slow)} of {len(judged)} requests exceed the budget; worst: {worst.request_id} on {worst.engine}"
            f" took {excess + limit:.2f} s to its first token, budget {limit:.2f} s (cold {base:.2f} s)",
            request_id=worst.request_id,
            engine=worst.engine,
            role=worst.role,
            ttft_s=excess + limit,
            budget_s=limit,
            cold_ttft_s=base,
            cold_requests=len(controls),
            prompt_tokens=len(worst.prompt_token_ids),
            count=len(slow),
            of=len(judged),
        )
    ]


def _baseline(o: r.Observation, controls: Sequence[r.Observation]) -> float:
    distance = min(abs(len(c.prompt_token_ids) - len(o.prompt_token_ids)) for c in controls)
    return median(
        c.ttft_s
        for c in controls
        if c.ttft_s is not None and abs(len(c.prompt_token_ids) - len(o.prompt_token_ids)) == distance
    )


def check_lookups(
    observations: Sequence[r.Observation], delta: Mapping[str, float] | None, *, max_lookups: int
) -> list[r.Finding]:
    """An engine looked up at most ``max_lookups`` times a request, whatever came of it.

    observations: all requests that the engine got between the snapshots of ``delta``. No lookup at all where requests
    were sent is ``no-pressure``: the store was never asked, so nothing was bounded. Unless none of them was answered: a lookup
    that never ends is in no counter, and what hangs is another check's to say.
    """
    if not observations:
        return too_few("no request was sent between the snapshots")
    if delta is None:
        return too_few("no counters around these requests", first_request=observations[0].request_id)
    store_counter(delta, STORE_LOOKUP, OK, "ops")  # an engine that counts none at all is not measured
    by_status = store_ops(delta, STORE_LOOKUP)
    lookups = sum(by_status.values())
    first = observations[0]
    if lookups == 0 and not any(o.ok for o in observations):
        return too_few(
            f"{first.engine}: none of {len(observations)} requests was answered, and no lookup has ended",
            first_request=first.request_id,
        )
    if lookups == 0:
        return [
            finding(
                r.FindingCode.NO_PRESSURE,
                f"{first.engine}: {len(observations)} requests, and the store was never looked up",
                first_request=first.request_id,
            )
        ]
    if lookups <= max_lookups * len(observations):
        return []
    return [
        finding(
            r.FindingCode.UNBOUNDED_LOOKUPS,
            f"{first.engine}: {lookups:g} lookups for {len(observations)} requests, at most {max_lookups} each",
            first_request=first.request_id,
            engine=first.engine,
            lookups=lookups,
            requests=len(observations),
            max_lookups=max_lookups,
            **by_status,
        )
    ]


Fate = Literal["good", "slow", "failed", "hang"]


def fate_of(o: r.Observation, limit_s: float) -> Fate:
    """What became of one request: answered within ``limit_s`` (good), later, with an error, or not within its deadline."""
    if o.timed_out:
        return "hang"
    if not o.ok or o.ttft_s is None:
        return "failed"
    return "good" if o.ttft_s <= limit_s else "slow"


def limit_of(o: r.Observation, cold: Sequence[r.Observation], *, factor: float, extra_s: float) -> tuple[float, float]:
    """(budget, baseline) of a request in seconds to its first token. ValueError where no cold request was answered."""
    controls = [c for c in cold if c.ok and c.ttft_s is not None]
    if not controls:
        raise ValueError("no cold request was answered: there is no baseline")
    base = _baseline(o, controls)
    return budget_s(base, factor=factor, extra_s=extra_s), base


def lost_token_s(o: r.Observation, base_s: float) -> float:
    """Token-seconds that a request lost: prompt tokens x seconds that its first token (or its end without one) came late.

    The measure of a fault's cost to users that adds up over requests of unequal length; never negative.
    """
    took = o.ttft_s if o.ttft_s is not None else o.duration_s
    return len(o.prompt_token_ids) * max(0.0, took - base_s)
