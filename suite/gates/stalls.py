"""Did the host stand still? A thread that wants to wake up many times a second, and notes when it could not.

Whatever takes a time (an answer, a recovery) is judged against the clock; where this process itself was given no core for a
second, no other process of the host can be blamed for being slow.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from fixtures.host_watch import HostWatch
from reports import records as r
from reports.history import History

if TYPE_CHECKING:
    from fixtures.stack import Stack

FACT = "host.stalls"
"""Fact: list of ``{"from_s": monotonic, "stall_s": seconds}``, each longer than ``STALL_S``."""

WAKE_S = 0.05

STALL_S = 1.0
"""Shorter ones stay below what budgets allow on top of a cold request (``[budget] ttft_extra_s``, 1 s)."""

KEPT = 100
"""Most stalls that are kept: a host that stands still more often than that has proven its point."""


class StallWatch:
    """A context: watches while it is open, and records the fact when it closes."""

    def __init__(
        self, stack: Stack, clock: Callable[[], float] = time.monotonic, wait: Callable[[float], bool] | None = None
    ) -> None:
        self._stack = stack
        self._watch = HostWatch(clock, wait, wake_s=WAKE_S, longer_than_s=STALL_S)

    def __enter__(self) -> StallWatch:
        self._watch.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._watch.stop()
        self._stack.fact(FACT, self._watch.pauses[:KEPT])


def stalls_of(history: History) -> list[dict[str, Any]] | None:
    """The stalls of a case; None where nobody watched (a run of an earlier version)."""
    facts = history.facts(FACT)
    return [stall for fact in facts for stall in fact.value] if facts else None


def without_stalls(o: r.Observation, stalls: list[dict[str, Any]]) -> r.Observation:
    """The request as if the time for which the host stood still had not passed: what it took besides is not the host's doing.

    Its text says nothing of when it was sent; a request that timed out stays one.
    """

    def lost_s(until_s: float) -> float:
        lost = 0.0
        for s in stalls:
            lost += max(0.0, min(s["from_s"] + s["stall_s"], until_s) - max(s["from_s"], o.sent_s))
        return lost

    first_s = None if o.first_token_s is None else o.first_token_s - lost_s(o.first_token_s)
    tokens_s = tuple(t - lost_s(t) for t in o.token_s)
    return msgspec.structs.replace(o, first_token_s=first_s, token_s=tokens_s, done_s=o.done_s - lost_s(o.done_s))


def stalled(o: r.Observation, stalls: list[dict[str, Any]]) -> bool:
    """The request was under way while the host stood still."""
    return any(o.sent_s <= s["from_s"] + s["stall_s"] and o.done_s >= s["from_s"] for s in stalls)
