"""Three-source agreement (rule 2): external tokens as the response, the engine's counters and the bytes moved tell them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Literal

from reports import records as r
from suite.checks.base import (
    EXTERNAL,
    EXTERNAL_HITS,
    LOCAL,
    STORE_GET,
    counter,
    finding,
    store_counter,
    store_ops,
    too_few,
)

Source = Literal["response", "counters", "hits", "bytes"]

DEGRADED: frozenset[Source] = frozenset({"hits", "bytes"})
"""What may differ for a request whose load failed: every retried lookup is booked as a hit (measured on vLLM 0.32.0:
23,808 hits for one prompt of 2,000 tokens), and bytes of failed loads carry another status."""


def check_sources(
    observations: r.Observation | Sequence[r.Observation],
    delta: Mapping[str, float] | None,
    *,
    kv_bytes_per_token: int,
    may_differ: Collection[Source] = (),
) -> list[r.Finding]:
    """External tokens of one request, or of all requests between two snapshots of an engine, from independent sources.

    - ``response``: cached tokens of the responses, less what the engine counts as local;
    - ``counters``: prompt tokens by source, ``external``;
    - ``hits``: the external prefix cache's hit counter;
    - ``bytes``: bytes loaded from the store with status ``ok``, over kv_bytes_per_token (0: unknown, source left out).

    may_differ: sources that this phase's faults may bend (``DEGRADED``). At least two must remain. Loads that failed
    where ``bytes`` may not differ are a disagreement in themselves: a failed load delivers nothing and is booked.
    """
    requests = [observations] if isinstance(observations, r.Observation) else list(observations)
    answered = [o for o in requests if o.ok]
    if not answered:
        return too_few(f"none of {len(requests)} requests was answered: no source can speak")
    if delta is None:
        return too_few("no counters around these requests", first_request=requests[0].request_id)
    told = _told(requests, delta, kv_bytes_per_token)
    judged = {name: value for name, value in told.items() if name not in may_differ}
    if len(judged) < 2:
        return too_few(f"only {', '.join(judged) or 'no source'} can speak; two are needed", **told)
    found: list[r.Finding] = []
    if len(set(judged.values())) > 1:
        both = ", ".join(f"{name} {value:g}" for name, value in judged.items())
        found.append(_disagreement(f"external tokens differ between sources: {both}", requests, told))
    if "bytes" in judged:
        failed = store_ops(delta, STORE_GET, but_ok=True)
        if any(failed.values()):
            text = ", ".join(f"{count:g} {status}" for status, count in failed.items() if count)
            found.append(
                _disagreement(f"loads that failed ({text}) where no fault was to be felt", requests, {**told, **failed})
            )
    return found


def _told(requests: Sequence[r.Observation], delta: Mapping[str, float], kv_bytes_per_token: int) -> dict[str, float]:
    told: dict[str, float] = {}
    if all(o.ok and o.cached_tokens is not None for o in requests):
        told["response"] = sum(o.cached_tokens or 0 for o in requests) - counter(delta, LOCAL)
    told["counters"] = counter(delta, EXTERNAL)
    told["hits"] = counter(delta, EXTERNAL_HITS)
    if kv_bytes_per_token:
        told["bytes"] = store_counter(delta, STORE_GET, "ok", "bytes") / kv_bytes_per_token
    return told


def _disagreement(message: str, requests: Sequence[r.Observation], told: Mapping[str, float]) -> r.Finding:
    first = requests[0]
    return finding(
        r.FindingCode.SOURCE_DISAGREEMENT,
        message,
        first_request=first.request_id,
        engine=first.engine,
        requests=len(requests),
        **dict(told),
    )
