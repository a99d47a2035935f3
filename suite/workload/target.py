"""Finds the share of system prompts at which traffic has a wanted hit rate."""

from __future__ import annotations

from msgspec.structs import replace

from fixtures.errors import UsageError
from suite.workload.analyse import analyse
from suite.workload.sessions import SessionSpec, SessionTraffic, SharedPrompt

TRIAL_REQUESTS = 20000
"""Requests generated for a try; fewer where the spec asks for fewer."""
CLOSE = 0.002
"""A hit rate this near to the wanted one will do."""
_TRIES = 14
"""Halvings of the share: the last step is below a ten-thousandth."""


def with_hit_rate(spec: SessionSpec, rate: float) -> SessionSpec:
    """The spec with the share at which an infinite pool hits ``rate`` of all prompt tokens (counting ``tokens`` of ``analyse``).

    The rate is measured on the spec's own first requests, so what the first use of every system prompt costs is counted.
    Raises UsageError where the spec has no share, and where no share reaches the rate (the message gives the range).
    """
    opening = spec.opening
    if not isinstance(opening, SharedPrompt):
        raise UsageError(
            "a hit rate is reached by changing the share of shared prompts; give --prompt instead of --system"
        )
    if not 0 <= rate < 1:
        raise UsageError(f"hit rate {rate:g}: give a part from 0 up to, and without, 1")
    low, high = 0.0, _largest_share(spec, opening)
    lowest, highest = (_rate(spec, opening, share) for share in (low, high))
    if rate < lowest - CLOSE or rate > highest + CLOSE:
        raise UsageError(
            f"hit rate {rate:g}: this traffic can have {lowest:.3f} (nothing shared between sessions) to {highest:.3f};"
            " change turns, lengths, groups or block size"
        )
    share = low
    for _ in range(_TRIES):
        share = (low + high) / 2
        found = _rate(spec, opening, share)
        if abs(found - rate) <= CLOSE / 4:
            break
        low, high = (share, high) if found < rate else (low, share)
    return replace(spec, opening=replace(opening, share=share))


def _largest_share(spec: SessionSpec, opening: SharedPrompt) -> float:
    mean = min(opening.prompt.mean, spec.max_tokens - 1)
    return max(0, int(mean) - 1) // spec.block_tokens * spec.block_tokens / mean


def _rate(spec: SessionSpec, opening: SharedPrompt, share: float) -> float:
    trial = replace(spec, opening=replace(opening, share=share), requests=min(spec.requests, TRIAL_REQUESTS))
    found = analyse(SessionTraffic(trial), block_tokens=spec.block_tokens, engine_block_tokens=spec.block_tokens)
    return found.infinite.tokens.rate
