"""Which engine a request goes to. Choices depend on the request alone, so a replay that is gone on with makes the same ones."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Literal

from suite.workload.trace import TraceRequest

Policy = Literal["round-robin", "sticky", "random"]
POLICIES: tuple[Policy, ...] = ("round-robin", "sticky", "random")

Route = Callable[[int, TraceRequest], str]
"""Index and request to the name of an engine."""


def route(policy: Policy, engines: Sequence[str], seed: int = 0) -> Route:
    """A policy over engines.

    round-robin: in turn. sticky: all requests of a session to one engine, sessions spread by a hash (a request without a session goes
    like a session of its own: see ``shape.with_sessions``). random: any engine, by the seed.
    """
    count = len(engines)
    if policy == "round-robin":
        return lambda index, _: engines[index % count]
    if policy == "sticky":
        return lambda index, request: engines[_hash(f"{seed}/{_session(index, request)}") % count]
    return lambda index, _: engines[_hash(f"{seed}/request {index}") % count]


def _session(index: int, request: TraceRequest) -> str:
    return f"alone {index}" if request.session is None else f"session {request.session}"


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
