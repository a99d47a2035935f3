"""Cutting and scaling a trace so that what its requests share stays what it was.

All functions take and give requests one at a time, in order of time. What they keep, and what not:

- ``window``, ``sample_sessions`` leave requests out. Those that stay share among themselves what they shared; a hit on a request that
  was left out is gone. Ids then have gaps: pass the result through ``trace.renumbered``.
- ``faster`` divides times. ``scale_tokens`` makes blocks smaller or larger and leaves ids as they are, so a request shares as
  many *blocks* as before, at every pool size counted in blocks.
- ``fit`` cuts the end of what is too long for a model. The shared part of a prompt is at its beginning, so cut prompts go on
  sharing it; only hits on what was cut off are gone.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator

from msgspec.structs import replace

from fixtures.errors import UsageError
from suite.workload.trace import TraceRequest, blocks_of


def window(
    requests: Iterable[TraceRequest], *, start_s: float = 0, end_s: float = math.inf, limit: int | None = None
) -> Iterator[TraceRequest]:
    """Requests that arrive in start_s <= t < end_s, at most ``limit`` of them; times then count from ``start_s``."""
    start_ms, end_ms = start_s * 1000, end_s * 1000
    kept = 0
    for request in requests:
        if request.timestamp_ms >= end_ms or kept == limit:
            return
        if request.timestamp_ms >= start_ms:
            kept += 1
            yield replace(request, timestamp_ms=_tidy(request.timestamp_ms - start_ms)) if start_ms else request


def faster(requests: Iterable[TraceRequest], factor: float) -> Iterator[TraceRequest]:
    """The same requests in ``1 / factor`` of the time (to the microsecond). Raises UsageError for a factor of 0 or below."""
    if not 0 < factor < math.inf:
        raise UsageError(f"speed {factor:g}: give a factor above 0 (2 plays the trace twice as fast)")
    return (replace(r, timestamp_ms=_tidy(r.timestamp_ms / factor)) for r in requests)


def _tidy(time_ms: float) -> int | float:
    rounded = round(time_ms, 3)
    return int(rounded) if rounded == int(rounded) else rounded


def scale_tokens(requests: Iterable[TraceRequest], from_block: int, to_block: int) -> Iterator[TraceRequest]:
    """Blocks of ``from_block`` tokens become blocks of ``to_block``; the number of blocks and their ids stay.

    Whole blocks stay whole. A partial last block of ``r`` tokens becomes one of ``ceil(r * to / from)``: never empty, and whole only
    where ``from_block`` tokens have no finer part in ``to_block`` (r = 511 of 512 makes 32 of 32). An answer of ``n`` tokens
    becomes ``n * to / from``, rounded, at least 1. With that a request keeps its number of blocks, and prompts and answers
    their proportion.
    """
    if min(from_block, to_block) < 1:
        raise UsageError(f"blocks of {from_block} to {to_block} tokens: give sizes of 1 or more")
    for request in requests:
        whole, rest = divmod(request.input_tokens, from_block)
        yield replace(
            request,
            input_tokens=whole * to_block + blocks_of(rest * to_block, from_block),
            output_tokens=max(1, round(request.output_tokens * to_block / from_block)),
        )


def fit(requests: Iterable[TraceRequest], max_tokens: int, block_tokens: int) -> Iterator[TraceRequest]:
    """Requests cut to ``max_tokens`` of prompt and answer: first the answer to half of them, then the prompt to whole blocks.

    Whole blocks, because an id stands for all tokens of its block. Raises UsageError where half of ``max_tokens`` is less than a
    block.
    """
    if max_tokens < 2 * block_tokens:
        raise UsageError(
            f"max tokens {max_tokens}: prompts are cut to whole blocks of {block_tokens}, so give {2 * block_tokens} or more,"
            " or make blocks smaller first"
        )
    for request in requests:
        if request.input_tokens + request.output_tokens <= max_tokens:
            yield request
            continue
        output = min(request.output_tokens, max(max_tokens // 2, max_tokens - request.input_tokens))
        if request.input_tokens + output <= max_tokens:
            yield replace(request, output_tokens=output)
            continue
        whole = (max_tokens - output) // block_tokens
        yield replace(
            request, input_tokens=whole * block_tokens, output_tokens=output, hash_ids=request.hash_ids[:whole]
        )


def with_sessions(requests: Iterable[TraceRequest], block_tokens: int) -> Iterator[TraceRequest]:
    """Requests without a session get one, by what they share. Keeps one entry a session.

    A request goes on with the session whose latest prompt its own prompt contains whole (to the last whole block), where that session
    was the first to have that block: a block that came from elsewhere is a system prompt, and says nothing. Any other request begins a
    session. (The very first prompt with a system prompt, if it is nothing else, cannot be told from a first turn: the next request with
    that system prompt is taken to go on with it.)
    """
    ends: dict[int, int] = {}
    seen_below = 0
    next_session = 0
    for request in requests:
        whole = request.input_tokens // block_tokens
        ids = request.hash_ids
        found = next((i for i in reversed(ids[:whole]) if i in ends), None)
        if found is None:
            session, next_session = next_session, next_session + 1
        else:
            session = ends.pop(found)
        if whole and (ids[whole - 1] >= seen_below or ids[whole - 1] == found):
            ends[ids[whole - 1]] = session
        seen_below = max(seen_below, max(ids) + 1)
        yield request if request.session is not None else replace(request, session=session)


def without_sessions(requests: Iterable[TraceRequest]) -> Iterator[TraceRequest]:
    """Requests as Mooncake's traces have them, without the field ``session``."""
    return (request if request.session is None else replace(request, session=None) for request in requests)


def sample_sessions(requests: Iterable[TraceRequest], part: float, seed: int = 0) -> Iterator[TraceRequest]:
    """About ``part`` of the sessions, whole ones, chosen by seed. Requests without a session stand for themselves: see ``with_sessions``."""
    if not 0 < part <= 1:
        raise UsageError(f"sample {part:g}: give a part above 0, up to 1")
    below = part * 2**64
    for number, request in enumerate(requests):
        name = f"{seed}/r{number}" if request.session is None else f"{seed}/{request.session}"
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        if int.from_bytes(digest, "big") < below:
            yield request
