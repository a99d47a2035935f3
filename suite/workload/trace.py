"""Request traces: the type, the rules that a trace has to keep, a reader that names what breaks them, a writer.

The format is that of Mooncake's FAST25 release (github.com/kvcache-ai/Mooncake, FAST25-release/traces): one JSON object a line with
``timestamp`` (ms since the trace began), ``input_length``, ``output_length`` (tokens) and ``hash_ids``, the blocks of the
prompt in prefix order. An id stands for a block *and everything before it*: two requests share an id exactly where they share
the whole prefix up to the end of that block. Ids count up from 0 in order of first appearance. The last block may be partial.
One optional field of our own, ``session``, names the conversation a request belongs to; without it the lines are Mooncake's.
The block size is not in the file: 512 tokens in the published traces.
"""

from __future__ import annotations

import os
import sys
import tempfile
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from fixtures.errors import UsageError

MOONCAKE_BLOCK_TOKENS = 512
"""Tokens a hash id stands for in the published traces (README of FAST25-release)."""

T = TypeVar("T")

ROOT = -1
"""Parent of a first block."""
_UNKNOWN = -2
"""Parent of an id that only a skipped line could have told of."""
_LINES_A_WRITE = 256
_WIDEST_GAP = 1 << 24
"""A jump over more ids than this is no missing line but another kind of id (a digest): no table is made for it."""


class TraceRequest(msgspec.Struct, frozen=True, kw_only=True, gc=False, forbid_unknown_fields=True, omit_defaults=True):
    """One request of a trace. Field names on disk are Mooncake's."""

    timestamp_ms: int | float = msgspec.field(name="timestamp")
    """Arrival, since the trace began."""
    input_tokens: int = msgspec.field(name="input_length")
    output_tokens: int = msgspec.field(name="output_length")
    hash_ids: list[int]
    """Blocks of the prompt, first to last; never change one that a generator handed out."""
    session: int | None = None


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
    "beyond-model",
)
"""Every reason for which a line is bad."""

_LINE_DECODER = msgspec.json.Decoder(TraceRequest)


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


def blocks_of(tokens: int, block_tokens: int) -> int:
    """Blocks that ``tokens`` tokens take, a partial last one included."""
    return -(-tokens // block_tokens)


class TraceChecker:
    """Holds every request against the rules, in order.

    Remembers the parent of each id: 8 bytes a distinct block, and nothing a request.
    """

    def __init__(self, rules: TraceRules) -> None:
        self._rules = rules
        self._last_ms: int | float = 0
        self._parents = array("q")
        self._new_ids: dict[int, int] = {}
        self._lost_ids = False

    def check(self, request: TraceRequest) -> TraceRequest:
        """The request, renumbered where the rules say so. Raises BadLine; a bad request's ids count as seen."""
        self._check_numbers(request)
        if self._rules.renumber:
            ids = [self._new_ids.setdefault(i, len(self._new_ids)) for i in request.hash_ids]
            request = msgspec.structs.replace(request, hash_ids=ids)
        self._check_chain(request.hash_ids)
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

    def _check_chain(self, ids: list[int]) -> None:
        """Ids are new in order, and follow the id that they always followed."""
        parents, known, previous = self._parents, len(self._parents), ROOT
        for position, block in enumerate(ids):
            if block < known:
                if parents[block] != previous:
                    self._check_parent(block, previous, position, ids)
            elif block == known:
                parents.append(previous)
                known += 1
            else:
                self._gap(block, ids)
                known = len(parents)
                parents[block] = previous
            previous = block

    def _check_parent(self, block: int, previous: int, position: int, ids: list[int]) -> None:
        if self._parents[block] == _UNKNOWN:
            self._parents[block] = previous
            return
        self._see(max(ids[position:]))
        was = self._parents[block]
        names = [f"after {i}" if i != ROOT else "as a first block" for i in (previous, was)]
        raise BadLine(
            "other-prefix",
            f"hash id {block} comes {names[0]} here but came {names[1]} before; an id stands for its whole prefix",
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


class TraceReader:
    """Iterate it once: requests of a trace file, one at a time.

    path: the file, or ``-`` for standard input. Raises UsageError ``FILE:LINE: problem`` at the first bad line, or leaves bad
    lines out with ``skip_bad``: ``skipped`` then counts them by reason, and ids are given anew so that none is missing.
    Blank lines are passed over. A file without a single good request is bad input too.
    """

    def __init__(self, path: Path | str, rules: TraceRules | None = None) -> None:
        self.path = str(path)
        self.rules = rules or TraceRules()
        self.skipped: Counter[str] = Counter()
        self.good = 0

    def __iter__(self) -> Iterator[TraceRequest]:
        with open_input(self.path) as stream:
            requests = self._read(stream)
            yield from renumbered(requests) if self.rules.skip_bad and not self.rules.renumber else requests

    def _read(self, stream: BinaryIO) -> Iterator[TraceRequest]:
        checker = TraceChecker(self.rules)
        for number, line in enumerate(stream, 1):
            if line.isspace():
                continue
            try:
                request = self._request(checker, line)
            except BadLine as exc:
                if not self.rules.skip_bad:
                    raise UsageError(f"{self.path}:{number}: {exc}") from exc
                self.skipped[exc.reason] += 1
            else:
                self.good += 1
                yield request
        if not self.good:
            raise UsageError(
                f"{self.path}: no request in it{_because(self.skipped)}; give a trace with one JSON object a line"
            )

    @staticmethod
    def _request(checker: TraceChecker, line: bytes) -> TraceRequest:
        try:
            return checker.check(decode(line, _LINE_DECODER))
        except BadLine as exc:
            if exc.reason not in ("hash-id-gap", "other-prefix"):  # those two have seen to the ids themselves
                checker.lost(line)
            raise


def _because(skipped: Counter[str]) -> str:
    return f" ({told(skipped)})" if skipped else ""


def told(skipped: Counter[str]) -> str:
    """``3 bad line(s) skipped: negative-time 2, not-json 1``."""
    parts = ", ".join(f"{reason} {count}" for reason, count in sorted(skipped.items()))
    return f"{skipped.total()} bad line(s) skipped: {parts}"


def renumbered(requests: Iterable[TraceRequest]) -> Iterator[TraceRequest]:
    """The same requests with ids counted up from 0 in order of first appearance. Keeps a table of all ids."""
    new: dict[int, int] = {}
    for request in requests:
        ids = [new.setdefault(i, len(new)) for i in request.hash_ids]
        yield msgspec.structs.replace(request, hash_ids=ids)


def write_trace(requests: Iterable[TraceRequest], path: Path | str) -> int:
    """Write a trace, ``-`` for standard output; returns how many requests it has.

    A file appears under its name only when it is complete, so reading and writing one file is safe.
    Raises UsageError when it cannot be written.
    """
    with open_output(str(path)) as stream:
        return write_lines(requests, stream)


def write_lines(requests: Iterable[TraceRequest], stream: BinaryIO) -> int:
    """Write requests, a line each; returns how many."""
    encode = msgspec.json.Encoder().encode
    count = 0
    lines: list[bytes] = []
    for request in requests:
        lines.append(encode(request))
        if len(lines) == _LINES_A_WRITE:
            count += len(lines)
            stream.write(b"\n".join(lines) + b"\n")
            lines.clear()
    stream.writelines(line + b"\n" for line in lines)
    return count + len(lines)


@contextmanager
def open_input(path: str) -> Iterator[BinaryIO]:
    """A file, or standard input for ``-``. Raises UsageError when it cannot be read."""
    if path == "-":
        yield sys.stdin.buffer
        return
    try:
        with Path(path).open("rb") as stream:
            yield stream
    except OSError as exc:
        raise UsageError(f"{path}: {exc.strerror}; give a file that can be read") from exc


@contextmanager
def open_output(path: str) -> Iterator[BinaryIO]:
    """A file that takes its name when all went well, or standard output for ``-``."""
    if path == "-":
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    target = Path(path)
    try:
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    except OSError as exc:
        raise UsageError(f"{path}: {exc.strerror}; give a file in a folder that can be written") from exc
    try:
        with os.fdopen(handle, "wb") as stream:
            yield stream
        Path(name).chmod(0o666 & ~_umask())  # mkstemp's files are private; a trace is an ordinary file
        Path(name).replace(target)
    except OSError as exc:
        raise UsageError(f"{path}: {exc.strerror}; give a file in a folder that can be written") from exc
    finally:
        Path(name).unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
