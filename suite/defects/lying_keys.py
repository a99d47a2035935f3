"""The lying connector's keys: requests as they are keyed by a connector that leaves something out. Needs no vLLM.

Part of ``suite.defects.lying_connector``, whose scheduler's half asks for them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from typing import Any


class RequestView:
    """A request whose block hashes are others; everything else is the request's own."""

    def __init__(self, request: Any, block_hashes: list[bytes], **changes: Any) -> None:
        self._request = request
        self.block_hashes = block_hashes
        self.__dict__.update(changes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


def without(field: str, request: Any) -> Any:
    """The request as it would be keyed without this field (``cache_salt``, ``lora_request``); itself where it has none."""
    if not getattr(request, field):
        return request
    view = RequestView(request, [], **{field: None})
    view.block_hashes += request._block_hasher(view)
    return view


def with_short_keys(request: Any) -> Any:
    """The request with each block keyed by the blocks before it: its own tokens are not in its key (the first's are)."""
    own = list(request.block_hashes)
    short = [hashlib.sha256(b"next after" + before).digest() for before in own[:-1]]
    return RequestView(request, own[:1] + short)


KEYED: dict[str, Callable[[Any], Any]] = {
    "ignored-salt": partial(without, "cache_salt"),
    "ignored-adapter": partial(without, "lora_request"),
    "short-key": with_short_keys,
}
"""Lies about keys: the request as it is keyed then."""


def goes_on(prompt_tokens: int, found_tokens: int, block_tokens: int) -> bool:
    """A prompt has a whole reusable block (the last token is never reused) behind what was found of it."""
    return (prompt_tokens - 1) // block_tokens * block_tokens > found_tokens
