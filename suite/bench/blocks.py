"""Reads TTFT blocks out of a history: which requests belong together, and which were in the state that they are to measure.

A block is one A B .. B A turn over the arms at one prompt length (``suite.bench.ttft`` sends it). Its requests carry the role
``<arm>/ttft-<prompt tokens>/b<block>/<place>``; counters around each say where its prompt tokens came from:

========  ==========================================  ==========================
arm       tokens from the engine's own cache          tokens from the pool
========  ==========================================  ==========================
cold      none                                        none
native    all that can be reused                      none
external  none                                        all that can be reused
========  ==========================================  ==========================

A block with a request in any other state is thrown out whole, and counted by what was wrong. Pure: sampler and judge share it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from reports import records as r
from reports.history import History
from suite.bench.statistics import block_log_ratio
from suite.checks.base import COMPUTED, EXTERNAL, LOCAL
from suite.workload.prompts import reusable_tokens

ARMS = ("cold", "native", "external")

_ROLE = re.compile(r"(?P<arm>cold|native|external)/ttft-(?P<tokens>\d+)/b(?P<block>\d+)/(?P<place>\d+)\Z")


def role_of(arm: str, tokens: int, block: int, place: int) -> str:
    """Role of one request of a block."""
    return f"{arm}/ttft-{tokens}/b{block}/{place}"


@dataclass(frozen=True)
class Block:
    """One valid block. ``ttft_s``: arm to its times in seconds, in the order in which they were taken."""

    number: int
    ttft_s: dict[str, tuple[float, ...]]

    def log_ratio(self, base: str, other: str) -> float:
        """log(other / base) of the block."""
        return block_log_ratio(self.ttft_s[base], self.ttft_s[other])


@dataclass(frozen=True)
class Blocks:
    """Blocks of one prompt length."""

    valid: tuple[Block, ...] = ()
    thrown: dict[str, int] = field(default_factory=dict)
    """What was wrong -> blocks thrown out for it (the first thing that was wrong in each)."""

    @property
    def taken(self) -> int:
        """Blocks taken, those thrown out included."""
        return len(self.valid) + sum(self.thrown.values())

    def log_ratios(self, base: str, other: str) -> list[float]:
        """One number a valid block."""
        return [b.log_ratio(base, other) for b in self.valid]

    def ttft_s(self, arm: str) -> list[float]:
        """All times of an arm."""
        return [t for b in self.valid for t in b.ttft_s[arm]]


def lengths(records: Iterable[r.Record]) -> list[int]:
    """Prompt lengths (tokens) that have blocks, ascending."""
    found = {int(m["tokens"]) for rec in records if isinstance(rec, r.Observation) and (m := _ROLE.match(rec.role))}
    return sorted(found)


def read_blocks(records: Iterable[r.Record], tokens: int, block_tokens: int, chunk_tokens: int = 0) -> Blocks:
    """Blocks of one prompt length. block_tokens: KV block size of the engine that answers; chunk_tokens: see ``chunk_of``."""
    requests: dict[int, list[tuple[str, r.Observation]]] = {}
    snapshots: dict[str, dict[str, float]] = {}
    for rec in records:
        if isinstance(rec, r.MetricsSnapshot):
            snapshots[rec.label] = rec.values
        elif isinstance(rec, r.Observation) and (m := _ROLE.match(rec.role)) and int(m["tokens"]) == tokens:
            requests.setdefault(int(m["block"]), []).append((m["arm"], rec))
    valid: list[Block] = []
    thrown: Counter[str] = Counter()
    for number, members in sorted(requests.items()):
        wrong = [w for arm, o in members if (w := complaint(arm, o, snapshots, block_tokens, chunk_tokens))]
        counts = Counter(arm for arm, _ in members)
        if not wrong and any(counts[arm] != 2 for arm in ARMS):
            wrong = ["not whole: a request is missing"]
        if wrong:
            thrown[wrong[0]] += 1
            continue
        times = {arm: tuple(o.ttft_s for a, o in members if a == arm and o.ttft_s is not None) for arm in ARMS}
        valid.append(Block(number, times))
    return Blocks(tuple(valid), dict(thrown))


def complaint(
    arm: str, o: r.Observation, snapshots: dict[str, dict[str, float]], block_tokens: int, chunk_tokens: int = 0
) -> str:
    """What keeps a request from being a sample of its arm; "" for a good one."""
    if not o.ok or o.ttft_s is None:
        return f"{arm}: not answered"
    before, after = snapshots.get(f"{o.request_id}:before"), snapshots.get(f"{o.request_id}:after")
    if before is None or after is None:
        return f"{arm}: no counters around it"
    local, external, computed = (round(after[name] - before[name]) for name in (LOCAL, EXTERNAL, COMPUTED))
    reusable = reusable_tokens(len(o.prompt_token_ids), block_tokens)
    if local + external + computed != len(o.prompt_token_ids):
        return f"{arm}: counters do not add up to its prompt"
    if arm == "cold":
        return "cold: was warm" if local or external else ""
    if arm == "native":
        return "" if (local, external) == (reusable, 0) else "native: not wholly from the engine's own cache"
    if local:
        return "external: partly from the engine's own cache"
    whole = reusable_tokens(len(o.prompt_token_ids), chunk_tokens or block_tokens)
    return "" if external == whole else "external: not wholly from the pool"


def block_tokens_of(history: History) -> int:
    stack = history.stack
    if stack is None or not stack.engines:
        raise ValueError("the history has no stack")
    return stack.engines[-1].block_tokens


def chunk_of(facts: r.EngineFacts) -> int:
    """Tokens that an engine's connector keeps and finds together: LMCache's chunk, else the KV block."""
    config = facts.settings.get("lmcache_config") or {}
    return int(config.get("chunk_size", facts.block_tokens))


def chunk_tokens_of(history: History) -> int:
    """``chunk_of`` the engine that answers. ValueError without a stack."""
    stack = history.stack
    if stack is None or not stack.engines:
        raise ValueError("the history has no stack")
    return chunk_of(stack.engines[-1])
