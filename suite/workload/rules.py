"""The rules that a trace has to keep, and what is said of a line that breaks one."""

from __future__ import annotations

from array import array
from collections import Counter
from typing import TypeVar

import msgspec

from suite.workload.trace import MOONCAKE_BLOCK_TOKENS, TraceRequest, blocks_of

T = TypeVar("T")

ROOT = -1
"""Parent of a first block."""
_UNKNOWN = -2
"""Parent of an id that only a skipped line could have told of."""
_WIDEST_GAP = 1 << 24
"""A jump over more ids than this is no missing line but another kind of id (a digest): no table is made for it."""


class TraceRules(msgspec.Struct, frozen=True, kw_only=True):
    """How a trace is read."""

    block_tokens: int = MOONCAKE_BLOCK_TOKENS
    max_model_tokens: int | None = None
    """Most tokens of prompt and answer together that the model can hold (``ModelInfo.max_position``); None: no limit."""
    skip_bad: bool = False
    """Leave bad lines out and count them by reason, instead of raising at the first one."""
    renumber: bool = False
    """The file's ids are any numbers (no gap is an error); hand out ids counted up from 0. Keeps a table of all ids."""


class BadLine(Exception):  # noqa: N818 - what a line is, raised and caught in this module
    """A line that breaks a rule. ``reason`` is a stable word, the text one line: what is wrong, and the mend."""

    def __init__(self, reason: str, problem: str) -> None:
        super().__init__(problem)
        self.reason = reason


REASONS = (
    "not-json",
    "unknown-field",
    "missing-field",
    "wrong-type",
    "negative-time",
    "time-goes-back",
    "no-input",
    "no-output",
    "block-count",
    "bad-hash-id",
    "repeated-hash-id",
    "hash-id-gap",
    "other-prefix",
    "other-size",
    "beyond-model",
)
"""Every reason for which a line is bad."""


class _AnyIds(msgspec.Struct):
    """As much of a bad line as tells which ids it brought."""

    hash_ids: list[int]


_IDS_DECODER = msgspec.json.Decoder(_AnyIds)


def decode(data: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """One JSON object. Raises BadLine for what is none, or of another kind."""
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as exc:
        text = str(exc)
        kinds = {"unknown field": "unknown-field", "missing required": "missing-field"}
        raise BadLine(next((r for words, r in kinds.items() if words in text), "wrong-type"), text) from exc
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise BadLine("not-json", f"not a JSON object: {exc}") from exc


class TraceChecker:
    """Holds every request against the rules, in order.

    Remembers parent and size of each id: 12 bytes a distinct block, and nothing a request.
    """

    def __init__(self, rules: TraceRules) -> None:
        self._rules = rules
        self._last_ms: int | float = 0
        self._parents = array("q")
        self._sizes = array("i")
        self._new_ids: dict[int, int] = {}
        self._lost_ids = False

    def check(self, request: TraceRequest) -> TraceRequest:
        """The request, renumbered where the rules say so. Raises BadLine; a bad request's ids count as seen."""
        self._check_numbers(request)
        if self._rules.renumber:
            ids = [self._new_ids.setdefault(i, len(self._new_ids)) for i in request.hash_ids]
            request = msgspec.structs.replace(request, hash_ids=ids)
        self._check_chain(request.hash_ids, request.input_tokens)
        self._last_ms = request.timestamp_ms
        return request

    def lost(self, line: bytes) -> None:
        """A line was skipped before its request was checked: take note of the ids that it brought, as far as it can be read."""
        try:
            ids = _IDS_DECODER.decode(line).hash_ids
        except (msgspec.DecodeError, UnicodeDecodeError):
            self._lost_ids = True
            return
        if not self._rules.renumber:
            self._see(max(ids, default=ROOT))

    def _check_numbers(self, request: TraceRequest) -> None:
        """Everything that can be said without earlier lines' ids."""
        time, tokens, output = request.timestamp_ms, request.input_tokens, request.output_tokens
        if time < 0:
            raise BadLine(
                "negative-time", f"timestamp {time} is negative; times are milliseconds since the trace began"
            )
        if time < self._last_ms:
            raise BadLine(
                "time-goes-back",
                f"timestamp {time} is before {self._last_ms} of an earlier line; sort the trace by time",
            )
        if tokens < 1:
            raise BadLine("no-input", f"input_length {tokens}: a prompt has at least one token")
        if output < 1:
            raise BadLine("no-output", f"output_length {output}: an answer has at least one token")
        self._check_ids(request)
        limit = self._rules.max_model_tokens
        if limit is not None and tokens + output > limit:
            raise BadLine(
                "beyond-model",
                f"{tokens} + {output} tokens are more than the model's {limit}; scale the trace (convert --to-block-tokens) or cut it (--fit)",
            )

    def _check_ids(self, request: TraceRequest) -> None:
        ids, block = request.hash_ids, self._rules.block_tokens
        want = blocks_of(request.input_tokens, block)
        if len(ids) != want:
            raise BadLine(
                "block-count",
                f"{request.input_tokens} tokens in blocks of {block} make {want} hash ids, not {len(ids)};"
                " give the trace's own block size (--block-tokens), or mend the line",
            )
        if min(ids) < 0:
            raise BadLine("bad-hash-id", f"hash id {min(ids)} is negative; ids count up from 0")
        if len(set(ids)) != len(ids):
            twice = next(i for i, n in Counter(ids).items() if n > 1)
            raise BadLine(
                "repeated-hash-id", f"hash id {twice} comes twice in one request; an id stands for its whole prefix"
            )

    def _check_chain(self, ids: list[int], tokens: int) -> None:
        """Ids are new in order, follow the id that they always followed, and stand for as many tokens as they always did."""
        parents, sizes, known, previous = self._parents, self._sizes, len(self._parents), ROOT
        size, last = self._rules.block_tokens, len(ids) - 1
        for position, block in enumerate(ids):
            if position == last:
                size = tokens - last * size
            if block < known:
                if parents[block] != previous or sizes[block] != size:
                    self._check_known(block, previous, size, ids[position:])
            elif block == known:
                parents.append(previous)
                sizes.append(size)
                known += 1
            else:
                self._gap(block, ids)
                known = len(parents)
                parents[block], sizes[block] = previous, size
            previous = block

    def _check_known(self, block: int, previous: int, size: int, rest: list[int]) -> None:
        was, was_size = self._parents[block], self._sizes[block]
        if was == _UNKNOWN:
            self._parents[block], self._sizes[block] = previous, size
            return
        self._see(max(rest))
        if was != previous:
            names = [f"after {i}" if i != ROOT else "as a first block" for i in (previous, was)]
            raise BadLine(
                "other-prefix",
                f"hash id {block} comes {names[0]} here but came {names[1]} before; an id stands for its whole prefix",
            )
        raise BadLine(
            "other-size",
            f"hash id {block} stands for {size} tokens here but stood for {was_size} before; a block that grew is another block",
        )

    def _gap(self, block: int, ids: list[int]) -> None:
        first = len(self._parents)
        self._see(max(ids))
        if self._lost_ids and block < len(self._parents):  # the missing ids were on a line that could not be read
            self._lost_ids = False
            return
        raise BadLine(
            "hash-id-gap",
            f"hash id {block} appears before {first}; new ids count up by one, so lines are missing"
            " (or the ids are of another kind: convert --renumber)",
        )

    def _see(self, highest: int) -> None:
        missing = highest + 1 - len(self._parents)
        if 0 < missing <= _WIDEST_GAP:
            self._parents.extend(array("q", [_UNKNOWN]) * missing)
            self._sizes.extend(array("i", [0]) * missing)
