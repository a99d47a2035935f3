"""What a trace holds: lengths, arrivals, and the hit rate of an infinite pool and of any LRU pool, with its denominators.

Every hit rate comes in four countings, each with its own denominator:

============  ======================================================  ====================================
counting      a hit is                                                out of
============  ======================================================  ====================================
blocks        a hash id that is in the pool, partial last ones too    all hash ids of all prompts
tokens        a token of such a block                                 all prompt tokens
reusable      a token that an engine can take from the pool: whole    all prompt tokens
              blocks of the *engine's* size, never the last token
requests      a request with at least one hit block                   all requests
============  ======================================================  ====================================

Only the first request for a block misses in an infinite pool. A pool's size is counted in blocks of the trace; a partial block takes a
whole place. Blocks that an engine fills with its own answers are no part of a trace, and neither is time: every request finds what all
earlier ones brought, however close they came (see ``stack_distance`` for the order of touching).
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from fixtures.errors import UsageError
from suite.workload.stack_distance import PrefixStack, Run
from suite.workload.trace import MOONCAKE_BLOCK_TOKENS, TraceRequest

ENGINE_BLOCK_TOKENS = 16
"""vLLM's default block size on GPUs."""


class Share(msgspec.Struct, frozen=True):
    """Hits and what they are counted against."""

    hits: int
    out_of: int

    @property
    def rate(self) -> float:
        """hits / out_of; 0 of nothing is 0."""
        return self.hits / self.out_of if self.out_of else 0.0


class HitRates(msgspec.Struct, frozen=True, kw_only=True):
    """Hits of one pool, in the four countings of the module's table."""

    pool_blocks: int | None
    """Places of the pool; None: infinite."""
    blocks: Share
    tokens: Share
    reusable: Share
    requests: Share


class Lengths(msgspec.Struct, frozen=True, kw_only=True):
    """Spread of whole numbers. ``p50`` is the least value that half of all values do not exceed (nearest rank), and so on."""

    count: int
    mean: float
    least: int
    p50: int
    p90: int
    p99: int
    greatest: int

    @classmethod
    def of(cls, values: Counter[int]) -> Lengths:
        """The spread of a count of values; empty counts give zeros."""
        total = values.total()
        if not total:
            return cls(count=0, mean=0.0, least=0, p50=0, p90=0, p99=0, greatest=0)
        ordered = sorted(values)
        upto = np.cumsum([values[v] for v in ordered])
        p50, p90, p99 = (ordered[int(np.searchsorted(upto, math.ceil(q * total / 100)))] for q in (50, 90, 99))
        mean = sum(v * n for v, n in values.items()) / total
        return cls(count=total, mean=mean, least=ordered[0], p50=p50, p90=p90, p99=p99, greatest=ordered[-1])


class Analysis(msgspec.Struct, frozen=True, kw_only=True):
    """What ``analyse`` found."""

    requests: int
    block_tokens: int
    engine_block_tokens: int
    duration_s: float
    """From the first arrival to the last."""
    gap_cv: float
    """Standard deviation over mean of the times between arrivals: 1 for Poisson, above 1 for bursts."""
    longest_gap_s: float
    input_tokens: Lengths
    output_tokens: Lengths
    distinct_blocks: int
    """Blocks that an infinite pool ends with."""
    infinite: HitRates
    pools: tuple[HitRates, ...]
    """In the order asked for."""
    full_pool_blocks: int
    """The smallest LRU pool with the infinite pool's hits."""


class Analyser:
    """Takes requests one at a time. Memory: 24 bytes a distinct block, about 100 a request.

    block_tokens: of the trace. engine_block_tokens: of the engine for the ``reusable`` counting; has to divide the trace's.
    """

    def __init__(
        self, block_tokens: int = MOONCAKE_BLOCK_TOKENS, engine_block_tokens: int = ENGINE_BLOCK_TOKENS
    ) -> None:
        if min(block_tokens, engine_block_tokens) < 1 or block_tokens % engine_block_tokens:
            raise UsageError(
                f"engine blocks of {engine_block_tokens} tokens do not divide the trace's blocks of {block_tokens};"
                " give a size that does (--engine-block-tokens)"
            )
        self._block = block_tokens
        self._engine_block = engine_block_tokens
        self._stack = PrefixStack()
        self._edges = array("q", [0, 0])
        """Blocks by rank as differences: +1 where a run of ranks begins, -1 behind its end."""
        self._less_tokens: Counter[int] = Counter()
        """Tokens that the block hit at a rank falls short of a whole block, by rank."""
        self._less_reusable: Counter[int] = Counter()
        self._first_blocks: Counter[int] = Counter()
        """Rank of the first block of requests that have a hit at all."""
        self._inputs: Counter[int] = Counter()
        self._outputs: Counter[int] = Counter()
        self._looked_up = 0
        self._times = _Gaps()

    def add(self, request: TraceRequest) -> None:
        """Take the next request. Raises ValueError where its ids break the rules of ``trace.TraceChecker``."""
        runs = self._stack.touch(request.hash_ids)
        self._inputs[request.input_tokens] += 1
        self._outputs[request.output_tokens] += 1
        self._looked_up += len(request.hash_ids)
        self._times.add(request.timestamp_ms)
        if runs:
            self._count(request.input_tokens, runs)

    def _count(self, tokens: int, runs: Sequence[Run]) -> None:
        edges = self._edges
        if self._stack.distinct_blocks >= len(edges):
            edges.frombytes(bytes(edges.itemsize * 2 * self._stack.distinct_blocks))
        for run in runs:
            edges[run.rank] += 1
            edges[run.rank + run.count] -= 1
        self._first_blocks[runs[0].rank] += 1
        last = runs[-1]
        blocks, rank = last.depth + last.count, last.rank + last.count - 1
        whole = blocks * self._block
        known = min(whole, tokens)
        reusable = min(known // self._engine_block, (tokens - 1) // self._engine_block) * self._engine_block
        if known < whole:
            self._less_tokens[rank] += whole - known
        if reusable < whole:
            self._less_reusable[rank] += whole - reusable

    def result(self, pools: Sequence[int] = ()) -> Analysis:
        """What was found so far. pools: sizes of LRU pools, in blocks. May be called again."""
        for size in pools:
            if size < 1:
                raise UsageError(f"a pool of {size} blocks: give sizes of 1 or more")
        curve = self._curve()
        return Analysis(
            requests=self._inputs.total(),
            block_tokens=self._block,
            engine_block_tokens=self._engine_block,
            duration_s=self._times.span_ms / 1000,
            gap_cv=self._times.cv,
            longest_gap_s=self._times.longest_ms / 1000,
            input_tokens=Lengths.of(self._inputs),
            output_tokens=Lengths.of(self._outputs),
            distinct_blocks=self._stack.distinct_blocks,
            infinite=curve.at(None),
            pools=tuple(curve.at(size) for size in pools),
            full_pool_blocks=curve.full(),
        )

    def _curve(self) -> _Curve:
        blocks = np.cumsum(np.cumsum(np.frombuffer(self._edges, dtype=np.int64)))
        size = len(blocks)
        return _Curve(
            blocks=blocks,
            tokens=blocks * self._block - _summed(self._less_tokens, size),
            reusable=blocks * self._block - _summed(self._less_reusable, size),
            requests=_summed(self._first_blocks, size),
            out_of=(self._looked_up, sum(v * n for v, n in self._inputs.items()), self._inputs.total()),
        )


class _Gaps:
    """Times between arrivals: mean and spread in one pass (Welford 1962)."""

    def __init__(self) -> None:
        self.first_ms: float | None = None
        self.last_ms = 0.0
        self.longest_ms = 0.0
        self._count = 0
        self._mean = 0.0
        self._squares = 0.0

    def add(self, time_ms: float) -> None:
        if self.first_ms is None:
            self.first_ms = self.last_ms = time_ms
            return
        gap, self.last_ms = time_ms - self.last_ms, time_ms
        self._count += 1
        away = gap - self._mean
        self._mean += away / self._count
        self._squares += away * (gap - self._mean)
        self.longest_ms = max(self.longest_ms, gap)

    @property
    def span_ms(self) -> float:
        return self.last_ms - (self.first_ms or 0.0)

    @property
    def cv(self) -> float:
        return math.sqrt(self._squares / self._count) / self._mean if self._mean else 0.0


class _Curve(msgspec.Struct, frozen=True, kw_only=True):
    """Hits of a pool of ``i + 1`` blocks at index ``i``, in each counting."""

    blocks: NDArray[np.int64]
    tokens: NDArray[np.int64]
    reusable: NDArray[np.int64]
    requests: NDArray[np.int64]
    out_of: tuple[int, int, int]
    """Blocks looked up, prompt tokens, requests."""

    def at(self, size: int | None) -> HitRates:
        index = len(self.blocks) - 1 if size is None else min(size, len(self.blocks)) - 1
        blocks, tokens, requests = self.out_of
        return HitRates(
            pool_blocks=size,
            blocks=Share(int(self.blocks[index]), blocks),
            tokens=Share(int(self.tokens[index]), tokens),
            reusable=Share(int(self.reusable[index]), tokens),
            requests=Share(int(self.requests[index]), requests),
        )

    def full(self) -> int:
        return int(np.searchsorted(self.blocks, self.blocks[-1])) + 1 if self.blocks[-1] else 0


def _summed(by_rank: Counter[int], size: int) -> NDArray[np.int64]:
    values = np.zeros(size, dtype=np.int64)
    values[list(by_rank.keys())] = list(by_rank.values())
    return np.cumsum(values)


def analyse(
    requests: Iterable[TraceRequest],
    *,
    block_tokens: int = MOONCAKE_BLOCK_TOKENS,
    engine_block_tokens: int = ENGINE_BLOCK_TOKENS,
    pools: Sequence[int] = (),
) -> Analysis:
    """Analyse a whole trace in one pass: see ``Analyser``. pools: sizes of LRU pools, in blocks of the trace."""
    analyser = Analyser(block_tokens, engine_block_tokens)
    for request in requests:
        analyser.add(request)
    return analyser.result(pools)
