"""Readers of data sets that hold text, which make traces of them: vLLM's custom JSONL, and ShareGPT's JSON.

The text is encoded by the model's tokenizer and cut into blocks; equal blocks after equal prefixes get equal ids. What a trace then holds
is lengths and what is shared, not the text. Messages are strung together as they are, without a chat template: lengths
are those of the text alone. Such files have no times (custom lines may have one), so arrivals are drawn.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np

from fixtures.errors import UsageError
from suite.workload.distributions import Arrivals
from suite.workload.rules import BadLine, TraceChecker, TraceRules, decode
from suite.workload.text import Tokenizer
from suite.workload.trace import TraceRequest, open_input, renumbered

HUMAN = frozenset({"human", "user"})
MODEL = frozenset({"gpt", "assistant", "chatgpt", "bing", "bard"})
"""Names that ShareGPT files give to the two sides of a conversation; ``system`` counts as part of the next human message."""


class BlockNames:
    """Gives ids to blocks of token ids: the same id for the same block after the same prefix. Keeps 16 bytes and a number for each."""

    def __init__(self, block_tokens: int) -> None:
        self._block = block_tokens
        self._ids: dict[bytes, int] = {}

    def of(self, tokens: Sequence[int]) -> list[int]:
        """Ids of a prompt's blocks; a partial last block is a block of its own."""
        ids: list[int] = []
        parent = b""
        for start in range(0, len(tokens), self._block):
            content = np.asarray(tokens[start : start + self._block], dtype="<i8").tobytes()
            parent = hashlib.blake2b(parent + content, digest_size=16).digest()
            ids.append(self._ids.setdefault(parent, len(self._ids)))
        return ids


class _CustomLine(msgspec.Struct, forbid_unknown_fields=True):
    """A line of vLLM's custom data set (``CustomDataset``, vLLM 0.32.0); ``timestamp`` (ms) is an addition."""

    prompt: str
    output_tokens: int | None = None
    timestamp: float | None = None


class _Message(msgspec.Struct):
    said_by: str = msgspec.field(name="from")
    value: str


class _Conversation(msgspec.Struct):
    """One entry of a ShareGPT file; other fields (id, image, ...) are passed over."""

    conversations: list[_Message]


_CUSTOM = msgspec.json.Decoder(_CustomLine)
_CONVERSATION = msgspec.json.Decoder(_Conversation)


class TextReading(msgspec.Struct, frozen=True, kw_only=True):
    """How text becomes a trace."""

    rules: TraceRules
    arrivals: Arrivals
    """Of lines, or of conversations."""
    output_tokens: int | None = None
    """Length of answers; None: as the file has it."""
    think_s: float = 10.0
    """Between a conversation's turns."""
    max_turns: int | None = None
    """Turns of a conversation to take; 1 takes what vLLM's benchmark takes (the first pair)."""
    seed: int = 0


class TextReader:
    """Iterate ``custom`` or ``sharegpt`` once. Bad lines (or entries) raise UsageError, or are counted in ``skipped``."""

    def __init__(self, path: Path | str, tokenizer: Tokenizer, how: TextReading) -> None:
        self.path = str(path)
        self.how = how
        self.skipped: Counter[str] = Counter()
        self._tokenizer = tokenizer
        self._names = BlockNames(how.rules.block_tokens)
        self._checker = TraceChecker(how.rules)
        self._gaps_s = how.arrivals.gaps_s(np.random.default_rng(how.seed))

    def custom(self) -> Iterator[TraceRequest]:
        """Requests of a JSONL file with ``prompt`` and ``output_tokens``."""
        return self._sound(self._custom())

    def sharegpt(self) -> Iterator[TraceRequest]:
        """Requests of a ShareGPT file: one for every human message that has an answer. The file is read as a whole."""
        return self._sound(self._sharegpt())

    def _sound(self, requests: Iterator[TraceRequest]) -> Iterator[TraceRequest]:
        count = 0
        for count, request in enumerate(renumbered(requests), 1):  # noqa: B007 - the last count is asked for below
            yield request
        if not count:
            raise UsageError(
                f"{self.path}: no request in it; give a file with at least one prompt and its answer's length"
            )

    def _bad(self, place: str, exc: BadLine) -> None:
        if not self.how.rules.skip_bad:
            raise UsageError(f"{self.path}:{place}: {exc}") from exc
        self.skipped[exc.reason] += 1

    # Custom JSONL ---------------------------------------------------------------------------------------------------
    def _custom(self) -> Iterator[TraceRequest]:
        now_s = 0.0
        with open_input(self.path) as stream:
            for number, line in enumerate(stream, 1):
                if line.isspace():
                    continue
                try:
                    request = self._custom_request(line, now_s)
                except BadLine as exc:
                    self._bad(str(number), exc)
                else:
                    now_s += next(self._gaps_s)
                    yield request

    def _custom_request(self, line: bytes, now_s: float) -> TraceRequest:
        entry = decode(line, _CUSTOM)
        output = self.how.output_tokens if self.how.output_tokens is not None else entry.output_tokens
        if output is None:
            raise BadLine(
                "missing-field", "no output_tokens; add the field, or give a length for all (--output-tokens)"
            )
        time_ms = round(now_s * 1000) if entry.timestamp is None else entry.timestamp
        return self._request(self._tokenizer.encode(entry.prompt), output, time_ms, None)

    def _request(self, tokens: Sequence[int], output: int, time_ms: float, session: int | None) -> TraceRequest:
        if not tokens:
            raise BadLine("no-input", "the prompt is empty; a prompt has at least one token")
        request = TraceRequest(
            timestamp_ms=time_ms,
            input_tokens=len(tokens),
            output_tokens=output,
            hash_ids=self._names.of(tokens),
            session=session,
        )
        return self._checker.check(request)

    # ShareGPT -------------------------------------------------------------------------------------------------------
    def _sharegpt(self) -> Iterator[TraceRequest]:
        """Conversations begin one after another and go on side by side."""
        due: list[tuple[float, int, Iterator[tuple[list[int], int]], list[int], int]] = []
        now_s = 0.0
        for number, turns in enumerate(self._conversations()):
            first = next(turns, None)
            while due and due[0][0] <= now_s:
                yield from self._turn(due)
            if first is not None:
                heapq.heappush(due, (now_s, number, turns, *first))
                now_s += next(self._gaps_s)
        while due:
            yield from self._turn(due)

    def _turn(
        self, due: list[tuple[float, int, Iterator[tuple[list[int], int]], list[int], int]]
    ) -> Iterator[TraceRequest]:
        at_s, number, turns, tokens, output = heapq.heappop(due)
        try:
            yield self._request(tokens, output, round(at_s * 1000), number)
        except BadLine as exc:
            self._bad(f"entry {number}", exc)
        following = next(turns, None)
        if following is not None:
            heapq.heappush(due, (at_s + self.how.think_s, number, turns, *following))

    def _conversations(self) -> Iterator[Iterator[tuple[list[int], int]]]:
        """Turns (prompt, length of its answer) of every conversation; an entry that is none gives an empty one."""
        with open_input(self.path) as stream:
            try:
                entries = msgspec.json.decode(stream.read(), type=list[msgspec.Raw])
            except (msgspec.DecodeError, UnicodeDecodeError) as exc:
                raise UsageError(f"{self.path}: not a ShareGPT file, which is one JSON list: {exc}") from exc
        for number, raw in enumerate(entries):
            try:
                yield self._turns(decode(bytes(raw), _CONVERSATION))
            except BadLine as exc:
                self._bad(f"entry {number}", exc)
                yield iter(())

    def _turns(self, conversation: _Conversation) -> Iterator[tuple[list[int], int]]:
        context: list[int] = []
        taken = 0
        for message, reply in pairwise(conversation.conversations):
            context = context + self._tokenizer.encode(message.value)
            if message.said_by in HUMAN and reply.said_by in MODEL:
                answer = len(self._tokenizer.encode(reply.value))
                yield context, answer if self.how.output_tokens is None else self.how.output_tokens
                taken += 1
                if taken == self.how.max_turns:
                    return
