"""Plain TTFT timings for pytest-benchmark's pedantic mode: one arm, one prompt length."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from reports import records as r
from suite.bench.blocks import complaint
from suite.bench.sampler import ANSWER_TOKENS, Sampler

if TYPE_CHECKING:
    from fixtures.client import Pending
    from fixtures.request import Request
    from fixtures.stack import Stack


class PlainTtft:
    """What pytest-benchmark is handed: ``setup``, then ``first_token`` (the only timed part), then ``drain``.

    arm: ``cold``, ``native`` or ``external``. Requests are read to their end, never cancelled. What was not in the state that
    the arm is to measure is told in ``complaints``.
    """

    def __init__(self, stack: Stack, arm: str, tokens: int) -> None:
        self.stack = stack
        self.arm = arm
        self.tokens = tokens
        self.case_id = f"plain-ttft.{arm}.{tokens}"
        self.sampler = Sampler(stack, self.case_id, tokens)
        self.complaints: list[str] = []
        self._rounds = itertools.count()
        self._before: r.MetricsSnapshot | None = None
        self._pending: Pending | None = None

    def info(self) -> dict[str, Any]:
        """What the numbers depend on, for the benchmark's JSON."""
        facts = self.stack.engines[self.sampler.reader].facts
        return {
            "arm": self.arm,
            "prompt_tokens": self.tokens,
            "stack": self.stack.spec.name,
            "versions": facts.versions,
        }

    def setup(self) -> tuple[tuple[Request], dict[str, Any]]:
        """A new prompt, brought into its state."""
        stack, reader = self.stack, self.sampler.reader
        with stack.phase(self.case_id, "setup"):
            prompt = self.sampler.prompt(self.arm, next(self._rounds), 0)
            if self.arm == "external":
                stack.save(self.sampler.saver, prompt, logprobs=None)
            elif self.arm == "native":
                stack.ask(reader, prompt, "fill", logprobs=None, max_tokens=ANSWER_TOKENS)
            request = stack.request(reader, prompt, f"{self.arm}/plain", logprobs=None, max_tokens=ANSWER_TOKENS)
            self._before = stack.scrape(reader, f"{request.request_id}:before")
        return (request,), {}

    def first_token(self, request: Request) -> None:
        """Send, and wait for the first token."""
        with self.stack.phase(self.case_id, "timed"):
            self._pending = self.stack.start(request)
        self._pending.wait_first_token(self.stack.spec.timeouts.request_s)

    def drain(self, request: Request) -> None:
        """Read the rest, and look where the prompt's tokens came from."""
        assert self._pending is not None
        observation = self._pending.result()
        reader, prompt_tokens = self.sampler.reader, len(request.prompt_token_ids)
        after = self.stack.scrape_booked(reader, self._before, f"{request.request_id}:after", prompt_tokens)
        values = {seen.label: seen.values for seen in (self._before, after) if seen is not None}
        wrong = complaint(self.arm, observation, values, self.sampler.block_tokens)
        if wrong:
            self.complaints.append(wrong)
