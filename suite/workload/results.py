"""What a replay writes down: a line for how it was run, then one for every request that ended. A replay can be gone on with."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from fixtures.errors import UsageError
from suite.workload.trace import TraceRequest

FORMAT = 1


class ReplayHead(msgspec.Struct, frozen=True, kw_only=True, tag="replay", tag_field="kind"):
    """How a replay is run; one more at each start. ``plan`` has to stay the same when a replay is gone on with."""

    format: int = FORMAT
    plan: dict[str, str | int | float | None]
    """Everything that results depend on: trace, mode, speed, routing, lengths of blocks, ..."""
    started_unix_s: float
    """When this part began, by the host's clock; times of its results count from here on a clock that never jumps."""
    skipped: int
    """Requests that were done already."""


class ReplayResult(
    msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True, tag="result", tag_field="kind"
):
    """One request of a replay. Times in seconds since this part of the replay began.

    Latency is counted from ``intended_s``, when the request was to be sent: a client or server that is behind makes that worse, and
    cannot hide it by sending less (coordinated omission). ``sent_s`` gives the time of service alone.
    """

    index: int
    """Place in the trace, from 0."""
    engine: str
    session: int | None = None
    input_tokens: int
    asked_tokens: int
    """Length that was asked for the answer."""
    output_tokens: int = 0
    """Length that came."""
    cached_tokens: int | None = None
    """Of the prompt, as the server reports it; None where it does not."""
    intended_s: float
    sent_s: float | None = None
    """None: never sent (the connection failed, or the replay was ended)."""
    first_s: float | None = None
    """First token."""
    last_s: float | None = None
    """Last token."""
    done_s: float
    """The answer was complete, or had failed."""
    gaps_us: list[int] = []
    """Microseconds between arrivals of tokens (tokens that arrive at once are one arrival)."""
    status: int | None = None
    error: str = ""
    """Empty for a whole, consistent answer; else one word for its kind, a colon, and what happened."""


_LINES = msgspec.json.Decoder(ReplayHead | ReplayResult)
_encode = msgspec.json.Encoder().encode


class ResultFile:
    """Appends to a results file. Opening one that exists goes on with it: ``done`` holds the results so far.

    path: the file. plan: see ``ReplayHead``. Raises UsageError for a file that is no results file, or that of another plan.
    A last line that was cut short, when its writer was killed, is taken off.
    """

    def __init__(self, path: Path, plan: dict[str, str | int | float | None]) -> None:
        self.path = path
        self.plan = plan
        self.done: dict[int, tuple[int, int]] = {}
        """Lengths (prompt, answer asked for) of the requests that have a result, by index."""
        try:
            self._stream: BinaryIO = path.open("r+b" if path.exists() else "w+b")
        except OSError as exc:
            raise UsageError(f"{path}: {exc.strerror}; give a file that can be written") from exc
        try:
            self._read()
        except BaseException:
            self._stream.close()
            raise

    def _read(self) -> None:
        whole = 0
        for number, line in enumerate(self._stream, 1):
            if not line.endswith(b"\n"):
                break
            whole += len(line)
            self._take(number, _decoded(self.path, number, line))
        self._stream.seek(whole)
        self._stream.truncate()

    def _take(self, number: int, entry: ReplayHead | ReplayResult) -> None:
        if isinstance(entry, ReplayResult):
            if number == 1:
                raise UsageError(f"{self.path}:1: a results file begins with how the replay was run; give a new file")
            self.done[entry.index] = (entry.input_tokens, entry.asked_tokens)
        elif entry.plan != self.plan:
            names = sorted(n for n in entry.plan.keys() | self.plan.keys() if entry.plan.get(n) != self.plan.get(n))
            was = ", ".join(f"{n} was {entry.plan.get(n)}, now {self.plan.get(n)}" for n in names)
            raise UsageError(f"{self.path}:{number}: these are results of another replay ({was}); give a new file")

    def begin(self, started_unix_s: float) -> None:
        """A new part begins."""
        self._write(ReplayHead(plan=self.plan, started_unix_s=started_unix_s, skipped=len(self.done)))
        self._stream.flush()

    def is_done(self, index: int, request: TraceRequest) -> bool:
        """This request has a result. Raises UsageError when that was of another length: the trace is not the same."""
        lengths = self.done.get(index)
        if lengths is not None and lengths != (request.input_tokens, request.output_tokens):
            raise UsageError(
                f"{self.path}: request {index} had {lengths[0]} and {lengths[1]} tokens, the trace says {request.input_tokens} and"
                f" {request.output_tokens}; results of another trace cannot be gone on with, give a new file"
            )
        return lengths is not None

    def add(self, result: ReplayResult) -> None:
        """A request ended. Reaches the disk when the buffer is full, or at ``close``."""
        self._write(result)

    def _write(self, entry: ReplayHead | ReplayResult) -> None:
        self._stream.write(_encode(entry) + b"\n")

    def flush(self) -> None:
        """Hand everything to the operating system."""
        self._stream.flush()

    def close(self) -> None:
        """Close the file, whole."""
        with self._stream:
            self._stream.flush()
            os.fsync(self._stream.fileno())


def _decoded(path: Path, number: int, line: bytes) -> ReplayHead | ReplayResult:
    try:
        entry = _LINES.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise UsageError(f"{path}:{number}: not a line of replay results: {exc}") from exc
    if isinstance(entry, ReplayHead) and entry.format != FORMAT:
        raise UsageError(f"{path}:{number}: results of format {entry.format}, this is format {FORMAT}; give a new file")
    return entry


def read_results(path: Path) -> Iterator[ReplayHead | ReplayResult]:
    """Lines of a results file. Raises UsageError for what is none; a last line that was cut short is left out."""
    try:
        with path.open("rb") as stream:
            for number, line in enumerate(stream, 1):
                if line.endswith(b"\n"):
                    yield _decoded(path, number, line)
    except OSError as exc:
        raise UsageError(f"{path}: {exc.strerror}; give a results file of a replay") from exc
