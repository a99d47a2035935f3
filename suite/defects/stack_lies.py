"""Stacks that lie: the same running stack under a class of its own, in which one method does not do what it says."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from fixtures.runtimes.base import Handle
from fixtures.stack import Stack
from suite.workload.prompts import Prompt, PromptMaker

StackT = TypeVar("StackT", bound=Stack)


def seen_as(stack: Stack, kind: type[StackT]) -> StackT:
    """The very same stack (one state, shared) with the methods of another class."""
    view = kind.__new__(kind)
    view.__dict__ = stack.__dict__
    return view


def with_phase_hook(stack: Stack, hook: Callable[[Stack, str], None]) -> Stack:
    """The stack, with ``hook(stack, phase name)`` called at the beginning of every phase."""

    class Hooked(Stack):
        @contextmanager
        def phase(self, case_id: str, name: str) -> Iterator[None]:
            with super().phase(case_id, name):
                hook(stack, name)
                yield

    return seen_as(stack, Hooked)


class _Deaf:
    """A unit that gets no signal, whatever is sent."""

    def __init__(self, handle: Handle, sent: list[str]) -> None:
        self._handle = handle
        self._sent = sent

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)

    def signal(self, signum: signal.Signals) -> list[int]:
        self._sent.append(signum.name)
        return [p.pid for p in self._handle.processes()]


def with_idle_faults(stack: Stack, sent: list[str]) -> Stack:
    """The stack, whose units claim to have got every signal and get none. ``sent`` gathers the signals."""

    class Untouched(Stack):
        def handle(self, unit: str) -> Handle:
            deaf: Any = _Deaf(super().handle(unit), sent)
            handle: Handle = deaf
            return handle

    return seen_as(stack, Untouched)


def with_stale_scrapes(stack: Stack, repeated: list[str]) -> Stack:
    """The stack, whose counters are read once an engine and shown again ever after."""
    first: dict[str, dict[str, float]] = {}

    class Stale(Stack):
        def _scrape_values(self, engine: str) -> dict[str, float]:
            if engine in first:
                repeated.append(engine)
            else:
                first[engine] = super()._scrape_values(engine)
            return dict(first[engine])

    return seen_as(stack, Stale)


def with_used_prompts(stack: Stack, used: list[str]) -> Stack:
    """The stack, whose fresh prompts were sent to every engine before anyone gets them."""

    class Used(Stack):
        def prompts(self, label: str, engine: str | None = None) -> PromptMaker:
            maker = super().prompts(label, engine)
            sender = self

            class Spent(PromptMaker):
                def fresh(self, label: str, tokens: int) -> Prompt:
                    prompt = super().fresh(label, tokens)
                    for name in sender.names:
                        sender.ask(name, prompt, "used-before")
                    used.append(label)
                    return prompt

            return Spent(maker.seed, maker.vocab_size, maker.block_tokens)

    return seen_as(stack, Used)


def tampered(stack: Stack, keys: list[str], others: list[str], how: dict[str, Any], seed: int) -> dict[str, Any]:
    """Change one of ``keys`` in the pool, with a store client of our own; what was done, with digests from outside.

    how: a step of ``fixtures.store_tool`` without its key; ``copy`` gets its source from ``others``.
    """
    rng = random.Random(seed)
    key = rng.choice(sorted(keys))
    step = dict(how)
    if step["op"] == "remove":
        (before,) = stack.store_tool([{"op": "digest", "keys": [key]}])
        (status,) = stack.store_tool([{**step, "keys": [key]}])
        return {"key": key, "before": before[key], "after": None, "status": status[key], "landed": status[key] == 0}
    if step.get("how") == "copy":
        step["source"] = rng.choice(sorted(others))
    (answer,) = stack.store_tool([{**step, "key": key}])
    landed = answer["put"] == 0 and answer["before"] != answer["after"]
    return {"key": key, **answer, "landed": landed}
