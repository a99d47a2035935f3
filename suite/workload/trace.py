"""Request traces: the type, and how a trace is written (``reader`` and ``rules`` read one).

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
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import msgspec

from fixtures.errors import UsageError

MOONCAKE_BLOCK_TOKENS = 512
"""Tokens a hash id stands for in the published traces (README of FAST25-release)."""

_LINES_A_WRITE = 256


class TraceRequest(msgspec.Struct, frozen=True, kw_only=True, gc=False, forbid_unknown_fields=True, omit_defaults=True):
    """One request of a trace. Field names on disk are Mooncake's."""

    timestamp_ms: int | float = msgspec.field(name="timestamp")
    """Arrival, since the trace began."""
    input_tokens: int = msgspec.field(name="input_length")
    output_tokens: int = msgspec.field(name="output_length")
    hash_ids: list[int]
    """Blocks of the prompt, first to last; never change one that a generator handed out."""
    session: int | None = None


def blocks_of(tokens: int, block_tokens: int) -> int:
    """Blocks that ``tokens`` tokens take, a partial last one included."""
    return -(-tokens // block_tokens)


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
