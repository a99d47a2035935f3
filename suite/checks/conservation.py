"""Conservation: local + external + computed = prompt tokens, crossed with the client's own lengths and with bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from reports import records as r
from suite.checks.base import COMPUTED, EXTERNAL, LOCAL, PROMPT, STORE_GET, counter, finding, store_counter, too_few


def check_conservation(
    observations: r.Observation | Sequence[r.Observation],
    delta: Mapping[str, float] | None,
    *,
    kv_bytes_per_token: int = 0,
    degraded: bool = False,
) -> list[r.Finding]:
    """The sums of one request, or of all requests of an engine between two snapshots.

    observations: exactly the requests that the engine got between the snapshots.
    delta: counter differences between them.
    kv_bytes_per_token: bytes of KV a token takes in the pool; 0 where unknown or where nothing is pooled: no byte check.
    degraded: loads failed on purpose; bytes and tokens may then differ (failed loads are booked too), the sums may not.
    """
    requests = [observations] if isinstance(observations, r.Observation) else list(observations)
    found = _responses(requests)
    if not any(o.ok for o in requests):
        return [*found, *too_few(f"none of {len(requests)} requests was answered: there is no sum to check")]
    if delta is None:
        return [*found, *too_few("no counters around these requests", first_request=requests[0].request_id)]
    values = {name: counter(delta, name) for name in (PROMPT, COMPUTED, LOCAL, EXTERNAL)}
    if any(not math.isfinite(v) or v < 0 for v in values.values()):
        return [*found, *too_few("counters went backwards: not one engine's life between the snapshots", **values)]
    found += _sums(requests, values)
    if kv_bytes_per_token and not degraded:
        found += _bytes(requests, delta, values[EXTERNAL], kv_bytes_per_token)
    return found


def _responses(requests: Sequence[r.Observation]) -> list[r.Finding]:
    """What the response alone must satisfy; the first offender of each kind."""
    for o in requests:
        n = len(o.prompt_token_ids)
        if o.usage_prompt_tokens is not None and o.usage_prompt_tokens != n:
            return [
                _broken(
                    f"request {o.request_id}: {n} prompt tokens sent, the response counts {o.usage_prompt_tokens}",
                    [o],
                    sent_tokens=n,
                    usage_prompt_tokens=o.usage_prompt_tokens,
                )
            ]
        if o.cached_tokens is not None and not 0 <= o.cached_tokens < max(n, 1):
            return [
                _broken(
                    f"request {o.request_id}: {o.cached_tokens} of {n} prompt tokens cached,"
                    " but the last one is always computed",
                    [o],
                    sent_tokens=n,
                    cached_tokens=o.cached_tokens,
                )
            ]
    return []


def _sums(requests: Sequence[r.Observation], values: Mapping[str, float]) -> list[r.Finding]:
    found: list[r.Finding] = []
    parts = values[LOCAL] + values[EXTERNAL] + values[COMPUTED]
    if parts != values[PROMPT]:
        found.append(
            _broken(
                f"local {values[LOCAL]:g} + external {values[EXTERNAL]:g} + computed {values[COMPUTED]:g}"
                f" = {parts:g}, prompt tokens {values[PROMPT]:g}",
                requests,
                **values,
            )
        )
    # A request that was not answered may or may not be counted, so it widens the range instead of spoiling the sum.
    least = sum(len(o.prompt_token_ids) for o in requests if o.ok)
    most = sum(len(o.prompt_token_ids) for o in requests)
    if not least <= values[PROMPT] <= most:
        wanted = str(least) if least == most else f"{least} to {most}"
        found.append(
            _broken(
                f"{len(requests)} requests with {wanted} prompt tokens sent, the engine counts {values[PROMPT]:g}",
                requests,
                sent_tokens_at_least=least,
                sent_tokens_at_most=most,
                **values,
            )
        )
    if all(o.ok and o.cached_tokens is not None for o in requests):
        cached = sum(o.cached_tokens or 0 for o in requests)
        if cached != values[LOCAL] + values[EXTERNAL]:
            found.append(
                _broken(
                    f"responses report {cached} cached tokens, the engine counts local {values[LOCAL]:g}"
                    f" + external {values[EXTERNAL]:g}",
                    requests,
                    response_cached_tokens=cached,
                    **values,
                )
            )
    return found


def _bytes(
    requests: Sequence[r.Observation], delta: Mapping[str, float], external: float, kv_bytes_per_token: int
) -> list[r.Finding]:
    moved = store_counter(delta, STORE_GET, "ok", "bytes")
    wanted = external * kv_bytes_per_token
    if moved == wanted:
        return []
    return [
        _broken(
            f"{external:g} external tokens are {wanted:.0f} bytes at {kv_bytes_per_token} bytes a token,"
            f" {moved:.0f} bytes were loaded",
            requests,
            external_tokens=external,
            wanted_bytes=wanted,
            loaded_bytes=moved,
            kv_bytes_per_token=kv_bytes_per_token,
        )
    ]


def _broken(message: str, requests: Sequence[r.Observation], **evidence: object) -> r.Finding:
    first = requests[0]
    return finding(
        r.FindingCode.CONSERVATION,
        message,
        first_request=first.request_id,
        engine=first.engine,
        requests=len(requests),
        **evidence,
    )
