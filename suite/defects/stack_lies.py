"""Stacks that lie: the same running stack under a class of its own, in which one method does not do what it says."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec

from fixtures.runtimes.base import Handle
from fixtures.runtimes.sockets import snapshot
from fixtures.spec import StackSpec
from fixtures.stack import Stack
from reports import records as r
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


def with_spec(stack: Stack, spec: StackSpec) -> Stack:
    """The stack, said to be of another spec: what is started on it from now on follows that one."""

    class Respecified(Stack):
        pass

    Respecified.spec = property(lambda self: spec)  # type: ignore[assignment]  # it hides the attribute of the instance
    return seen_as(stack, Respecified)


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


def with_launcher_environment(stack: Stack, replaced: list[str]) -> Stack:
    """The stack, whose processes are all shown with the environment of the first engine, as a launcher would have it."""

    class Launcher(Stack):
        def snapshot_processes(self, unit: str, label: str) -> r.ProcessSnapshot:
            first = snapshot(self.handle(self.names[0]), label).processes[0].env
            taken = snapshot(self.handle(unit), label)
            shown = tuple(msgspec.structs.replace(p, env=first) for p in taken.processes)
            replaced.extend(str(p.pid) for p in taken.processes if p.env != first)
            taken = msgspec.structs.replace(taken, processes=shown)
            self.record(taken)
            return taken

    return seen_as(stack, Launcher)


def tampered(
    stack: Stack, keys: list[str], others: list[str], how: dict[str, Any], rng: random.Random
) -> list[dict[str, Any]]:
    """Change values in the pool with a store client of our own; what was done to each, with digests from outside.

    how: a step of ``fixtures.store_tool`` without its key; ``copy`` gets its source from ``others``. All ``keys`` are
    truncated (a load fails at its first bad block, so which one is bad would matter); of the others, one is changed.
    """
    chosen = sorted(keys) if how.get("how") == "truncate" else [rng.choice(sorted(keys))]
    if how["op"] == "remove":
        before, status, after = stack.store_tool([{"op": op, "keys": chosen} for op in ("digest", "remove", "digest")])
        return [
            {"key": k, "before": before[k], "after": after[k], "landed": status[k] == 0 and after[k] is None}
            for k in chosen
        ]
    source = {"source": rng.choice(sorted(others))} if how["how"] == "copy" else {}
    answers = stack.store_tool([{**how, **source, "key": key} for key in chosen])
    return [
        {"key": key, **answer, "landed": answer["put"] == 0 and answer["before"] != answer["after"]}
        for key, answer in zip(chosen, answers, strict=True)
    ]
