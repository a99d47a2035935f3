"""Traffic with the parameters of vLLM's ``prefix_repetition`` data set: few long prefixes, each followed by many suffixes.

Parameters and defaults are those of ``vllm bench serve --dataset-name prefix_repetition`` (vLLM 0.32.0,
``vllm/benchmarks/datasets/datasets.py``, ``PrefixRepetitionRandomDataset``): ``num_prompts // num_prefixes`` prompts a prefix, a
remainder dropped, in shuffled order. There a prompt's length may miss the mark by what decoding and encoding again
changes; here lengths are exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import accumulate

import msgspec
import numpy as np

from fixtures.errors import UsageError
from suite.workload.distributions import Arrivals
from suite.workload.trace import TraceRequest, blocks_of


class PrefixRepetition(msgspec.Struct, frozen=True, kw_only=True):
    """vLLM's parameters (lengths in tokens), and what makes them a trace. Memory: 8 bytes a prompt, for the shuffle."""

    num_prompts: int
    prefix_len: int = 256
    suffix_len: int = 256
    num_prefixes: int = 10
    output_len: int = 128
    arrivals: Arrivals
    block_tokens: int = 16
    """vLLM's own default on GPUs; the prefix has to be whole blocks."""
    seed: int = 0

    def requests(self) -> Iterator[TraceRequest]:
        """The requests, in order of time. Raises UsageError for lengths that make no prompt."""
        if self.num_prefixes < 1 or self.num_prompts < self.num_prefixes:
            raise UsageError(
                f"{self.num_prompts} prompts of {self.num_prefixes} prefixes: give one prefix or more, and a prompt for each"
            )
        if min(self.prefix_len, self.suffix_len) < 0 or self.prefix_len + self.suffix_len < 1 or self.output_len < 1:
            raise UsageError(
                f"prefix {self.prefix_len}, suffix {self.suffix_len}, output {self.output_len} tokens:"
                " prompt and output take at least one each"
            )
        if self.prefix_len % self.block_tokens and self.suffix_len:
            raise UsageError(
                f"a prefix of {self.prefix_len} tokens is no whole number of blocks of {self.block_tokens}, and hash ids cannot say that"
                f" part of a block is shared; use blocks of {math.gcd(self.prefix_len, self.block_tokens)}"
            )
        return self._requests()

    def _requests(self) -> Iterator[TraceRequest]:
        order_rng, gap_rng = (np.random.default_rng(s) for s in np.random.SeedSequence(self.seed).spawn(2))
        order = np.repeat(np.arange(self.num_prefixes), self.num_prompts // self.num_prefixes)
        order_rng.shuffle(order)
        tokens = self.prefix_len + self.suffix_len
        shared = blocks_of(self.prefix_len, self.block_tokens)
        own = blocks_of(tokens, self.block_tokens) - shared
        prefixes: dict[int, range] = {}
        next_block = 0
        times_s = accumulate(self.arrivals.gaps_s(gap_rng), initial=0.0)
        for prefix, now_s in zip(order, times_s, strict=False):
            blocks = prefixes.get(int(prefix))
            if blocks is None:
                blocks = prefixes[int(prefix)] = range(next_block, next_block + shared)
                next_block += shared
            yield TraceRequest(
                timestamp_ms=round(now_s * 1000),
                input_tokens=tokens,
                output_tokens=self.output_len,
                hash_ids=[*blocks, *range(next_block, next_block + own)],
            )
            next_block += own
