"""Bodies of completion requests, made from hash ids without building the prompt as a list.

A block's token ids are written as JSON once and kept, so a prompt that shares blocks with earlier ones costs little more than its
copy. Making a long body gives way to the event loop between blocks: the arrival of other requests' tokens is stamped meanwhile.
"""

from __future__ import annotations

import asyncio
from functools import lru_cache
from typing import Any

import msgspec

from suite.workload.materialise import Materialiser
from suite.workload.trace import TraceRequest

KEPT_BLOCKS = 8192
"""Blocks whose JSON is kept, about 2 KiB each at 512 tokens."""
_BLOCKS_AT_ONCE = 8
"""Blocks made between two looks at the event loop: less than a millisecond's work."""


class Bodies:
    """Makes bodies. extra: merged over each body, e.g. ``{"priority": 1}``; ``prompt`` cannot be set."""

    def __init__(self, materialiser: Materialiser, extra: dict[str, Any] | None = None) -> None:
        self.materialiser = materialiser
        self._extra = {k: v for k, v in (extra or {}).items() if k != "prompt"}
        self._whole = lru_cache(maxsize=KEPT_BLOCKS)(self._fragment)

    def _fragment(self, block_id: int, count: int) -> bytes:
        return msgspec.json.encode(self.materialiser.block(block_id, count))[1:-1]

    async def make(self, request: TraceRequest, served_model: str) -> bytes:
        """The body of a request: greedy, exactly ``output_tokens`` tokens, streamed, token counts in every event.

        Raises UsageError where ``Materialiser.tokens`` does.
        """
        self.materialiser.check(request)
        size = self.materialiser.block_tokens
        whole, rest = divmod(request.input_tokens, size)
        parts: list[bytes] = []
        for at in range(whole):
            parts.append(self._whole(request.hash_ids[at], size))
            if at % _BLOCKS_AT_ONCE == _BLOCKS_AT_ONCE - 1:
                await asyncio.sleep(0)
        if rest:
            parts.append(self._fragment(request.hash_ids[whole], rest))
        head = msgspec.json.encode(
            {
                "model": served_model,
                "max_tokens": request.output_tokens,
                "temperature": 0.0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True, "continuous_usage_stats": True},
                **self._extra,
            }
        )
        return b"".join((head[:-1], b',"prompt":[', b",".join(parts), b"]}"))
