"""How many bytes a hit reads from the pool, by what the layers of a model keep of the tokens before."""

from __future__ import annotations

import math
from collections.abc import Mapping

from reports import records as r
from suite.checks.base import EXTERNAL, LOCAL, STORE_GET, counter, finding, store_counter


def blocks_of_window(window_tokens: int, block_tokens: int) -> int:
    """Whole blocks before a block boundary that a layer with this window looks at: the last ``window_tokens`` - 1 tokens."""
    return math.ceil((window_tokens - 1) / block_tokens)


def bytes_of_hit(engine: r.EngineFacts, external_tokens: int, local_tokens: int = 0) -> tuple[int, int]:
    """Least and most bytes that one request may have read for so many external tokens (a multiple of the block).

    Layers that keep everything: exactly those tokens. With a window: its blocks at the end of the hit must be read (of those that
    were local already any number need not), blocks before it may be. A state: one for each layer, of one byte at least and
    of one block of the other layers at most, as vLLM makes blocks no smaller than a state (0.26 to 0.32).
    """
    least = most = 0
    page = max((x.token_bytes // x.layers for x in engine.kv_layers if x.token_bytes), default=0) * engine.block_tokens
    for layers in engine.kv_layers:
        if layers.kind == "state":
            least, most = least + layers.layers, most + layers.layers * page
            continue
        needed = external_tokens
        if layers.kind == "window":
            inside = blocks_of_window(layers.window_tokens, engine.block_tokens) * engine.block_tokens
            needed = 0 if local_tokens else min(external_tokens, inside)
        least, most = least + needed * layers.token_bytes, most + external_tokens * layers.token_bytes
    return (least, most) if external_tokens else (0, 0)


def check_bytes_of_hit(o: r.Observation, delta: Mapping[str, float], engine: r.EngineFacts) -> list[r.Finding]:
    """The bytes that one request read, of a model whose layers do not all keep every token, against its external tokens."""
    external, local = int(counter(delta, EXTERNAL)), int(counter(delta, LOCAL))
    moved = store_counter(delta, STORE_GET, "ok", "bytes")
    least, most = bytes_of_hit(engine, external, local)
    if least <= moved <= most:
        return []
    wanted = f"{least}" if least == most else f"{least} to {most}"
    return [
        finding(
            r.FindingCode.CONSERVATION,
            f"{external} external tokens are {wanted} bytes in these layers, {moved:.0f} bytes were loaded",
            first_request=o.request_id,
            engine=engine.name,
            external_tokens=external,
            wanted_bytes=[least, most],
            loaded_bytes=moved,
        )
    ]
