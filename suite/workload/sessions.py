"""A generator of multi-turn and agentic traffic: system prompts, turns, tool output, sessions that overlap in time.

A session belongs to one of ``groups``; all sessions of a group begin with the group's system prompt. Its first prompt is that
plus a message. Every later prompt is the one before, the answer to it, and one more message: a user's, or a tool's output. So
a prompt shares the group's system prompt with other sessions, and everything up to its last message with its own session.
Ids are given in order of first appearance, as in Mooncake's traces: of a block that grew from partial to whole, both are
new; the blocks that an engine fills while it *generates* are no part of a trace, so an answer counts as new in the next prompt.

Memory grows with the sessions in flight (arrival rate x how long a session lasts) and with the system prompts, never
with the number of requests. The same spec gives the same requests for one release of numpy (its generators may change).
A trace begins with no session in flight: the first ones are thinner than the rest, until a session's length has passed.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import numpy as np

from fixtures.errors import UsageError
from suite.workload.distributions import Arrivals, Distribution, constant, uniform01
from suite.workload.trace import MOONCAKE_BLOCK_TOKENS, TraceRequest

ANSWER_S_PER_TOKEN = 0.02
"""Time an answer is taken to need for each token (50 tokens/s, a usual speed of reading): the next turn cannot come before."""


class SharedPrompt(msgspec.Struct, frozen=True, kw_only=True, tag="shared"):
    """First prompts of ``prompt`` tokens, of which the part ``share`` is the group's system prompt.

    The shared part is whole blocks: ``share * prompt / block`` rounded up or down by chance, so that its mean is exact. At
    least one token is a session's own.
    """

    prompt: Distribution
    share: float


class SystemPrompt(msgspec.Struct, frozen=True, kw_only=True, tag="system"):
    """A system prompt of ``tokens`` tokens, drawn once a group, and then a user's message.

    Where the system prompt does not end on a block boundary, the block that holds its end is a session's own.
    """

    tokens: Distribution


class SessionSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Traffic to generate. Lengths in tokens, times in seconds."""

    requests: int
    opening: SharedPrompt | SystemPrompt
    output: Distribution
    sessions: Arrivals
    """Arrival of sessions; requests arrive at this rate times the mean of ``turns``."""
    turns: Distribution = constant(1)
    """Requests of a session."""
    user: Distribution = constant(100)
    tool: Distribution = constant(1000)
    tool_share: float = 0.0
    """Part of the later turns that carry a tool's output instead of a user's message."""
    think_s: Distribution = constant(10)
    """From the end of an answer to the user's next message."""
    tool_s: Distribution = constant(1)
    """From the end of an answer to the tool's output."""
    groups: int = 10
    max_tokens: int = 131072
    """Most tokens of prompt and answer together. A first prompt is cut to fit; a session that would outgrow it ends."""
    block_tokens: int = MOONCAKE_BLOCK_TOKENS
    seed: int = 0

    def checked(self) -> SessionSpec:
        """Itself. Raises UsageError for what cannot be generated."""
        for name in ("requests", "groups", "block_tokens"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} {getattr(self, name)}: give a number of 1 or more")
        if self.seed < 0:
            raise UsageError(f"seed {self.seed}: give a number of 0 or more")
        if not 0 <= self.tool_share <= 1:
            raise UsageError(f"tool share {self.tool_share:g}: a part lies between 0 and 1")
        if self.max_tokens < 2:
            raise UsageError(f"max tokens {self.max_tokens}: a prompt and its answer take at least 2")
        if isinstance(self.opening, SharedPrompt):
            self._check_share(self.opening)
        return self

    def _check_share(self, opening: SharedPrompt) -> None:
        share, mean = opening.share, min(opening.prompt.mean, self.max_tokens - 1)
        if not 0 <= share < 1:
            raise UsageError(f"share {share:g}: a part of each prompt between 0 and 1 (1 itself leaves nothing to ask)")
        most = (int(mean) - 1) // self.block_tokens * self.block_tokens
        if share * mean > most:
            raise UsageError(
                f"share {share:g} of {mean:g} tokens does not fit whole blocks of {self.block_tokens} with a token to spare;"
                f" the most is {max(most, 0) / mean:.3g}: use smaller blocks or longer prompts"
            )


@dataclass(slots=True)
class _Session:
    number: int
    blocks: list[int]
    """Whole blocks, so far."""
    tokens: int
    """Of the next prompt."""
    turns_left: int


class SessionTraffic:
    """Iterate it once: requests of a spec, in order of time, one at a time.

    ``system_tokens`` and ``first_tokens`` add up, over first prompts, their tokens in system prompts (whole blocks) and in all.
    """

    def __init__(self, spec: SessionSpec) -> None:
        self.spec = spec.checked()
        streams = iter(np.random.default_rng(s) for s in np.random.SeedSequence(spec.seed).spawn(12))
        self._gaps = spec.sessions.gaps_s(next(streams))
        self._turns = spec.turns.tokens(next(streams))
        self._output = spec.output.tokens(next(streams))
        self._user = spec.user.tokens(next(streams))
        self._tool = spec.tool.tokens(next(streams))
        self._think = spec.think_s.seconds(next(streams))
        self._tool_time = spec.tool_s.seconds(next(streams))
        self._is_tool = uniform01(next(streams))
        self._group = uniform01(next(streams))
        self._rounding = uniform01(next(streams))
        opening = next(streams)
        self._prompt = spec.opening.prompt.tokens(opening) if isinstance(spec.opening, SharedPrompt) else iter(())
        self._system = self._system_lengths(opening)
        self._system_blocks: list[list[int]] = [[] for _ in range(spec.groups)]
        self._next_block = 0
        self._started = 0
        self.system_tokens = 0
        self.first_tokens = 0

    def _system_lengths(self, rng: np.random.Generator) -> list[int]:
        if isinstance(self.spec.opening, SharedPrompt):
            return []
        lengths = self.spec.opening.tokens.tokens(rng)
        return [next(lengths) for _ in range(self.spec.groups)]

    def __iter__(self) -> Iterator[TraceRequest]:
        due: list[tuple[float, int, _Session]] = []
        pop, push = heapq.heappop, heapq.heappush
        arrival_s = 0.0
        is_tool, tool_share, max_tokens = self._is_tool, self.spec.tool_share, self.spec.max_tokens
        for _ in range(self.spec.requests):
            output = next(self._output)
            if due and due[0][0] <= arrival_s:
                now_s, _, session = pop(due)
            else:
                now_s, session = arrival_s, self._start(output)
                arrival_s += next(self._gaps)
            output = min(output, max_tokens - session.tokens)
            yield self._request(now_s, session, output)
            session.turns_left -= 1
            if session.turns_left <= 0:
                continue
            if next(is_tool) < tool_share:
                message, pause_s = next(self._tool), next(self._tool_time)
            else:
                message, pause_s = next(self._user), next(self._think)
            session.tokens += output + message
            if session.tokens < max_tokens:
                push(due, (now_s + output * ANSWER_S_PER_TOKEN + pause_s, session.number, session))

    def _request(self, now_s: float, session: _Session, output: int) -> TraceRequest:
        whole, rest = divmod(session.tokens, self.spec.block_tokens)
        blocks = session.blocks
        new = self._next_block + whole - len(blocks)
        blocks.extend(range(self._next_block, new))
        if rest:
            ids = [*blocks, new]
            new += 1
        else:
            ids = blocks.copy()
        self._next_block = new
        return TraceRequest(
            timestamp_ms=round(now_s * 1000),
            input_tokens=session.tokens,
            output_tokens=output,
            hash_ids=ids,
            session=session.number,
        )

    def _start(self, output: int) -> _Session:
        """A new session, whose first answer has ``output`` tokens at most."""
        block = self.spec.block_tokens
        group = int(next(self._group) * self.spec.groups)
        room = max(self.spec.max_tokens - output, 1)
        if isinstance(self.spec.opening, SharedPrompt):
            tokens = min(next(self._prompt), room)
            shared = int(self.spec.opening.share * tokens / block + next(self._rounding))
        else:
            tokens = min(self._system[group] + next(self._user), room)
            shared = self._system[group] // block
        shared = min(shared, (tokens - 1) // block)
        self.system_tokens += shared * block
        self.first_tokens += tokens
        self._started += 1
        return _Session(self._started - 1, self._shared_blocks(group, shared), tokens, next(self._turns))

    def _shared_blocks(self, group: int, count: int) -> list[int]:
        """The first blocks of a group's system prompt, made now where no session has used them yet."""
        blocks = self._system_blocks[group]
        missing = count - len(blocks)
        if missing > 0:
            blocks.extend(range(self._next_block, self._next_block + missing))
            self._next_block += missing
        return blocks[:count]
