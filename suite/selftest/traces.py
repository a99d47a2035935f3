"""Traces for selftests: small ones made by hand, and the published ones where they are."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from fixtures.errors import Untestable
from fixtures.pytest_support.skips import skip_untestable
from suite.workload.trace import TraceRequest

PUBLISHED = Path(__file__).resolve().parents[3] / "shared" / "traces"
"""Where a checkout of Mooncake's FAST25 traces is looked for: beside the repository."""


def published(name: str) -> Path:
    """A published trace. Without it the test is untestable."""
    path = PUBLISHED / f"{name}_trace.jsonl"
    if not path.is_file():
        mend = "put the traces of Mooncake's FAST25 release into ../shared/traces beside the repository"
        skip_untestable(str(Untestable("traces", f"no {path.name} in ../shared/traces", mend)))
    return path


def request(ids: Iterable[int], *, tokens: int | None = None, block: int = 512, **fields: Any) -> TraceRequest:
    """A request of whole blocks, or of ``tokens`` tokens."""
    ids = list(ids)
    fields = {"timestamp_ms": 0, "output_tokens": 1, **fields}
    return TraceRequest(input_tokens=len(ids) * block if tokens is None else tokens, hash_ids=ids, **fields)


def plain(path: Path) -> Iterator[dict[str, Any]]:
    """A trace read without the suite's own reader."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)


class NaivePool:
    """An LRU pool that does what the words say, block by block; shares no code with the analyser.

    size: places; None: infinite. A request looks up all its blocks, then touches them from the last to the first.
    """

    def __init__(self, size: int | None) -> None:
        self.size = size
        self.held: OrderedDict[int, None] = OrderedDict()

    def ask(self, ids: list[int]) -> int:
        """Blocks at the prompt's beginning that the pool holds."""
        hits = 0
        for block in ids:
            if block not in self.held:
                break
            hits += 1
        for block in reversed(ids):
            self.held[block] = None
            self.held.move_to_end(block)
        while self.size is not None and len(self.held) > self.size:
            self.held.popitem(last=False)
        return hits


def naive_hits(requests: Iterable[TraceRequest], size: int | None, block: int, engine_block: int) -> dict[str, int]:
    """Hits of an LRU pool in the analyser's four countings."""
    pool = NaivePool(size)
    found = {"blocks": 0, "tokens": 0, "reusable": 0, "requests": 0}
    for r in requests:
        hits = pool.ask(r.hash_ids)
        known = min(hits * block, r.input_tokens)
        found["blocks"] += hits
        found["tokens"] += known
        found["reusable"] += min(known, r.input_tokens - 1) // engine_block * engine_block
        found["requests"] += hits > 0
    return found
