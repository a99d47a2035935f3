"""Exact hits (rule 5): what each request got from each source, against what the model of the pool says it must get."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from reports import records as r
from suite.checks.base import EXTERNAL, LOCAL, counter, finding, too_few
from suite.checks.pool_model import Expected, PoolModel, Rules, replay

__all__ = ["Expected", "Mode", "PoolModel", "Rules", "check_all_hits", "check_hits", "replay"]

Mode = Literal["exact", "at-most", "between"]


def check_hits(
    observation: r.Observation, delta: Mapping[str, float] | None, expected: Expected, *, mode: Mode = "exact"
) -> list[r.Finding]:
    """Compare one request with what the model says it must get.

    delta: the engine's counter differences around exactly this request (``prompt_tokens.local`` and ``.external``);
    None where requests overlapped, or nobody read them: then only the response's own total is compared, and where it is as
    expected and more than nothing, ``exact`` is ``too-few-observations``: no one said which source it came from.
    mode: ``exact``; ``at-most`` (evictions are allowed: fewer is no finding, and more than ``at_most_tokens`` is);
    ``between`` (overlapping requests: from the expected total up to ``at_most_tokens``).
    """
    o = observation
    if not o.ok:
        return too_few(
            f"request {o.request_id} has no complete answer, so its hits say nothing", request_id=o.request_id
        )
    if len(o.prompt_token_ids) != expected.prompt_tokens:
        raise ValueError(f"request {o.request_id}: the expectation is for another prompt length")
    if delta is None and o.cached_tokens is None:
        return too_few(
            f"request {o.request_id}: neither counters nor cached_tokens of the response", request_id=o.request_id
        )
    if mode != "exact" or delta is None:
        got = o.cached_tokens
        if got is None:
            assert delta is not None
            got = int(counter(delta, LOCAL) + counter(delta, EXTERNAL))
        least = 0 if mode == "at-most" else expected.cached_tokens
        most = expected.cached_tokens if mode == "exact" else max(expected.cached_tokens, expected.at_most_tokens)
        found = _compare(o, "cached", got, least, most, expected)
        if mode == "exact" and got and not found:
            text = f"request {o.request_id}: {got} tokens cached, and no counters that tell whether they came from the pool"
            found = too_few(text, request_id=o.request_id)
        return found
    found = _compare(
        o, "external", int(counter(delta, EXTERNAL)), expected.external_tokens, expected.external_tokens, expected
    )
    found += _compare(o, "local", int(counter(delta, LOCAL)), expected.local_tokens, expected.local_tokens, expected)
    if o.cached_tokens is not None and not found:
        found += _compare(o, "cached", o.cached_tokens, expected.cached_tokens, expected.cached_tokens, expected)
    return found


def check_all_hits(
    pairs: Iterable[tuple[r.Observation, Expected]], *, mode: Mode = "exact", min_requests: int = 1
) -> list[r.Finding]:
    """Responses of many requests against their expectations: one finding a code, for its first request, with a count."""
    first: dict[r.FindingCode, r.Finding] = {}
    counts: dict[r.FindingCode, int] = {}
    judged = 0
    for observation, expected in pairs:
        judged += observation.ok
        for item in check_hits(observation, None, expected, mode=mode):
            first.setdefault(item.code, item)
            counts[item.code] = counts.get(item.code, 0) + 1
    if judged < min_requests:
        return too_few(f"{judged} answered requests, {min_requests} needed", answered=judged, needed=min_requests)
    return [
        r.Finding(code=code, message=item.message, evidence={**item.evidence, "requests": counts[code], "of": judged})
        for code, item in first.items()
    ]


def _compare(o: r.Observation, source: str, got: int, least: int, most: int, expected: Expected) -> list[r.Finding]:
    if least <= got <= most:
        return []
    wanted = least if got < least else most
    fewer = r.FindingCode.ZERO_HITS if got == 0 else r.FindingCode.FEWER_HITS
    code = r.FindingCode.EXTRA_HITS if got > most else fewer
    size = expected.block_tokens
    # The block at which both sides part: for local and cached tokens counted from the prompt's start, for external
    # tokens from where the engine's own cache ended.
    offset = expected.local_tokens if source == "external" else 0
    block = (offset + min(got, wanted)) // size
    return [
        finding(
            code,
            f"request {o.request_id} on {o.engine}: {got} {source} tokens, {wanted} expected"
            f" (of {expected.prompt_tokens}); they part at block {block}",
            request_id=o.request_id,
            engine=o.engine,
            source=source,
            got_tokens=got,
            wanted_tokens=wanted,
            prompt_tokens=expected.prompt_tokens,
            block_tokens=size,
            first_block=block,
            first_block_token_ids=list(o.prompt_token_ids[block * size : (block + 1) * size]),
            cache_salt=o.cache_salt,
        )
    ]
