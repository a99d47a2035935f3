"""One pass over a trace that gives the hit rate of every LRU pool size at once (Mattson et al. 1970, "Evaluation techniques for
storage hierarchies", IBM Systems Journal 9(2)).

The pool that is modelled holds blocks and forgets the least recently used one. A request first looks up its whole prompt, then
touches its blocks from the last to the first, as an engine does that frees a prompt's tail first: a block is therefore
never remembered longer than the blocks before it, and what the pool holds of a prompt is always a prefix.

A block is a hit in a pool of C blocks where fewer than C other blocks have been touched since (its *rank*). Mattson's
pass costs O(log n) for every block of every prompt. Here it is O(log n) for every *run*: blocks of a prompt that were last touched by the
same request. A prompt is a path, so the blocks which that request still owns are the end of its own path, and the rank
of a block in a run is its depth in the prompt plus the number of blocks touched by later requests off this path. A prompt has few runs
(the next turn of a conversation has about two), however long it is. Runs cost O(log n), blocks one look each.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Run:
    """``count`` neighbouring blocks of a prompt with neighbouring ranks: block ``depth + i`` has rank ``rank + i``."""

    depth: int
    count: int
    rank: int


class PrefixStack:
    """The recency stack of all blocks seen. Ids have to count up from 0 in order of first appearance, and an id has to follow
    always the same id (``trace.TraceChecker`` sees to both).

    Memory: 16 bytes a distinct block, about 100 a request.
    """

    def __init__(self) -> None:
        self._last_request = array("q")
        self._parents = array("q")
        self._tree: list[int] = [0]
        """Fenwick tree (Fenwick 1994) over requests: how many blocks each was the last to touch."""
        self._total = 0

    @property
    def distinct_blocks(self) -> int:
        """Blocks seen so far."""
        return len(self._last_request)

    def touch(self, ids: Sequence[int]) -> list[Run]:
        """Look up a prompt, then touch it. Returns the known blocks, which are the first ones, in runs.

        Raises ValueError for ids that are not in order of first appearance, or under another prefix than before.
        """
        runs: list[Run] = []
        last, parents, known, now = self._last_request, self._parents, len(self._last_request), len(self._tree)
        previous, depth, count = -1, 0, len(ids)
        while depth < count and ids[depth] < known:
            owner, start = last[ids[depth]], depth
            while depth < count and (block := ids[depth]) < known and last[block] == owner:
                if parents[block] != previous:
                    raise ValueError(
                        f"block {block} follows block {previous} here, and followed {parents[block]} before"
                    )
                last[block] = now
                previous = block
                depth += 1
            runs.append(Run(start, depth - start, start + self._total - self._up_to(owner)))
            self._add(owner, start - depth)
        for block in ids[depth:]:
            if block != len(last):
                raise ValueError(f"block {block} is new, and the next new one is {len(last)}; renumber the trace")
            last.append(now)
            parents.append(previous)
            previous = block
        self._append(count)
        return runs

    def _up_to(self, request: int) -> int:
        tree, total = self._tree, 0
        while request:
            total += tree[request]
            request &= request - 1
        return total

    def _add(self, request: int, blocks: int) -> None:
        tree, size = self._tree, len(self._tree)
        self._total += blocks
        while request < size:
            tree[request] += blocks
            request += request & -request

    def _append(self, blocks: int) -> None:
        """The next request, which is the last to touch ``blocks`` blocks."""
        number = len(self._tree)
        below = number - (number & -number)
        covered = self._total - self._up_to(below)
        self._tree.append(covered + blocks)
        self._total += blocks
