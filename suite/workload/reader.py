"""Reads trace files: every bad line is named by file, line and cause, or left out and counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from fixtures.errors import UsageError
from suite.workload.rules import BadLine, TraceChecker, TraceRules, decode
from suite.workload.trace import TraceRequest, open_input, renumbered

_LINE_DECODER = msgspec.json.Decoder(TraceRequest)


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
            if exc.reason not in ("hash-id-gap", "other-prefix", "other-size"):  # those have seen to the ids themselves
                checker.lost(line)
            raise


def _because(skipped: Counter[str]) -> str:
    return f" ({told(skipped)})" if skipped else ""


def told(skipped: Counter[str]) -> str:
    """``3 bad line(s) skipped: negative-time 2, not-json 1``."""
    parts = ", ".join(f"{reason} {count}" for reason, count in sorted(skipped.items()))
    return f"{skipped.total()} bad line(s) skipped: {parts}"
