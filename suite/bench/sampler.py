"""Sends the requests of TTFT blocks: prepares each prompt's state, then takes the arms there and back.

All requests of a block go to one engine, the *reader*. It gives the pool no memory (``EngineSpec.contributes``), so every block that
it reads lies in another process and crosses the transport. Blocks are prepared ahead, a few at a time: external prompts are
saved by the *saver* and wait until the store lists them; native prompts are sent to the reader once. Every prompt is new.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from reports import records as r
from suite.bench.blocks import ARMS, chunk_of, read_blocks, role_of
from suite.bench.statistics import order
from suite.gates.arms import make_room, settle_saves

if TYPE_CHECKING:
    from fixtures.spec import StackSpec
    from fixtures.stack import Stack
    from suite.workload.prompts import Prompt, PromptMaker

PREPARED = 4
"""Blocks prepared at a time, at most: settling of saves is waited for once for all of them."""

PREPARED_TOKENS = 32768
"""Tokens of one arm's prompts at one place that are prepared at a time, about: what is prepared has to fit into the pool, and into the
reader's own cache beside all that is sent meanwhile."""

ANSWER_TOKENS = 2
"""Of a timed request. Never 1: the tested release does not save a prompt whose request ends with its first token."""

GIVE_UP_AFTER = 2


def remote_reader(base: StackSpec) -> StackSpec:
    """The stack of these gates: its last engine reads, and gives the pool no memory."""
    if base.store is None or len(base.engines) < 2:
        return base
    return base.with_engine(base.engines[-1].name, contributes=False)


class Sampler:
    """Sends blocks of one prompt length."""

    def __init__(self, stack: Stack, case_id: str, tokens: int) -> None:
        self.stack = stack
        self.case_id = case_id
        self.tokens = tokens
        self.saver, self.reader = stack.names[0], stack.names[-1]
        self.block_tokens = stack.engines[self.reader].facts.block_tokens
        self.chunk_tokens = chunk_of(stack.engines[self.reader].facts)
        self.prompts: PromptMaker = stack.prompts(case_id, self.reader)
        self.records: list[r.Record] = []
        self.unanswered = 0
        """Requests without a whole answer. From ``GIVE_UP_AFTER`` on nothing more is sent: each would wait for its deadline."""
        self.ahead = min(PREPARED, max(1, PREPARED_TOKENS // tokens))
        """Blocks prepared at a time."""
        self._prepared = 0

    def prompt(self, arm: str, block: int, place: int) -> Prompt:
        """The prompt of one request: new, and the same each time it is asked for."""
        return self.prompts.fresh(role_of(arm, self.tokens, block, place), self.tokens)

    def warm_up(self) -> None:
        """Requests of this length and of these options, on both engines and from the pool, that are not measured."""
        with self.stack.phase(self.case_id, "warm-up"):
            for number in range(2):
                prompt = self.prompts.fresh(f"warm-up/{number}", self.tokens)
                self.stack.save(self.saver, prompt, role="warm-up", logprobs=None, max_tokens=ANSWER_TOKENS)
                for _ in range(2):
                    self.stack.ask(self.reader, prompt, "warm-up", logprobs=None, max_tokens=ANSWER_TOKENS)

    def prepare(self, first: int) -> None:
        """Bring the prompts of the next blocks into their state."""
        with self.stack.phase(self.case_id, "prepare"):
            settle_saves(self.stack)
            make_room(self.stack)
            for block in range(first, first + self.ahead):
                for place in range(2):
                    if self.unanswered < GIVE_UP_AFTER:
                        self._prepare(block, place)
            settle_saves(self.stack)
        self._prepared = first + self.ahead

    def ready(self, arm: str, block: int, place: int) -> None:
        """Called just before each timed request; whatever its arm's state still needs. Here nothing."""

    def _prepare(self, block: int, place: int) -> None:
        tag = f"b{block}/{place}"
        external, native = self.prompt("external", block, place), self.prompt("native", block, place)
        saved = self.stack.save(self.saver, external, role=f"save/{tag}", logprobs=None)
        filled = self.stack.ask(self.reader, native, f"fill/{tag}", logprobs=None, max_tokens=ANSWER_TOKENS)
        self.unanswered += (not saved.ok) + (not filled.ok)

    def take(self, block: int) -> float | None:
        """Send one block; its log(external / cold), or None when it has to be thrown out."""
        if block >= self._prepared:
            self.prepare(block)
        with captured(self.stack) as records, self.stack.phase(self.case_id, f"block-{block}"):
            places = dict.fromkeys(ARMS, 0)
            for arm in order(ARMS, block):
                place, places[arm] = places[arm], places[arm] + 1
                if self.unanswered >= GIVE_UP_AFTER:
                    return None
                self.ready(arm, block, place)
                role = role_of(arm, self.tokens, block, place)
                prompt = self.prompt(arm, block, place)
                fields: dict[str, Any] = {"logprobs": None, "max_tokens": ANSWER_TOKENS}
                records.append(seen := self.stack.ask_measured(self.reader, prompt, role, **fields))
                self.unanswered += not seen.ok
        self.records += records
        blocks = read_blocks(records, self.tokens, self.block_tokens, self.chunk_tokens)
        return blocks.valid[0].log_ratio("cold", "external") if blocks.valid else None


@contextmanager
def captured(stack: Stack) -> Iterator[list[r.Record]]:
    """Records that the stack writes meanwhile; they go into the evidence as always."""
    before = stack.record
    found: list[r.Record] = []

    def both(record: r.Record) -> None:
        before(record)
        found.append(record)

    stack.record = both
    try:
        yield found
    finally:
        stack.record = before
