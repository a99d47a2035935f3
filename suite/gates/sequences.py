"""What gates send and look at again and again beside the arms of ``suite.gates.arms``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reports import records as r
from suite.gates.arms import REFERENCE
from suite.workload.prompts import Prompt

if TYPE_CHECKING:
    from fixtures.stack import Stack


def ask_cold(stack: Stack, engine: str, prompt: Prompt, tag: str = "") -> r.Observation:
    """The cold answer to a prompt: from the reference engine where there is one, else under a salt of its own.

    The salted request's blocks are saved like any other's, and waited for: whoever counts keys later must not find them.
    """
    role = f"cold/{tag}" if tag else "cold"
    if REFERENCE in stack.engines:
        return stack.ask(REFERENCE, prompt, role)
    numbers = stack.notes.setdefault("cold-salts", [])
    numbers.append(len(numbers))
    return stack.save(engine, prompt, role=role, cache_salt=f"cold.{numbers[-1]}")


def ask_native(stack: Stack, engine: str, prompt: Prompt, tag: str) -> bool:
    """Ask twice: once as the caches are, then from the engine's own cache alone (same cached length after a full hit).

    Returns whether the first one was answered; if not, the second is not sent and the stack is dirty.
    """
    first = stack.save(engine, prompt, role=f"ask/{tag}")
    if first.ok:
        stack.ask_measured(engine, prompt, role=f"again/{tag}")
    else:
        stack.dirty = True
    return first.ok


def at_rest(stack: Stack, engine: str, label: str) -> bool:
    """The engine holds no request and no KV; its counters are recorded under ``label``."""
    values = stack.scrape(engine, label).values
    return values["running"] + values["waiting"] == 0 and values["kv_usage_ratio"] == 0


def save_naming(stack: Stack, engine: str, prompt: Prompt, indices: tuple[int, ...]) -> dict[int, str]:
    """Save a prompt so that the keys of some of its blocks become known: block index -> key.

    Without knowing how keys are made: save up to the block, then one block further, and see which key is new. A block
    whose key did not show is left out; the judge then finds that nothing was damaged.
    """
    block = stack.engines[engine].facts.block_tokens
    found: dict[int, str] = {}
    for index in sorted(indices):
        if index:
            stack.save(engine, prompt[: index * block + 1], role="save/prefix")
        before = stack.keys()
        stack.save(engine, prompt[: (index + 1) * block + 1], role="save/prefix")
        new = stack.keys() - before
        if len(new) == 1:
            found[index] = next(iter(new))
    stack.save(engine, prompt, role="save/whole")
    return found
