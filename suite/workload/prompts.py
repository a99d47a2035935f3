"""Prompts as token ids: fresh ones that nobody can have cached, and relatives of them with a known common prefix.

Token ids are drawn from a seeded generator, so a case's prompts can be made again from its label. Every fresh prompt
begins with a first block of its own (a nonce of ``block`` random tokens): it shares not a single block with any other.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

FIRST_TOKEN = 3
"""Ids below, and the last one, are left out: tokenizers put padding and end-of-text there."""

Prompt = tuple[int, ...]


@dataclass(frozen=True)
class PromptMaker:
    """Makes prompts. ``seed`` names the run (or stack) and case; ``vocab_size`` and ``block_tokens`` the model's."""

    seed: str
    vocab_size: int
    block_tokens: int

    def fresh(self, label: str, tokens: int) -> Prompt:
        """``tokens`` random token ids; the same label gives the same prompt, another label one that shares no block."""
        if tokens < 1:
            raise ValueError(f"a prompt has at least one token, not {tokens}")
        rng = random.Random(f"{self.seed}/{label}")
        return tuple(_ids(rng, FIRST_TOKEN, self.vocab_size - 1, tokens))

    def extended(self, prompt: Prompt, label: str, tokens: int) -> Prompt:
        """``prompt`` followed by fresh tokens up to ``tokens`` in all (the next turn of a conversation)."""
        if tokens < len(prompt):
            raise ValueError(f"cannot extend a prompt of {len(prompt)} tokens to {tokens}")
        return prompt + self.fresh(f"{label}/more", tokens - len(prompt)) if tokens > len(prompt) else prompt

    def branched(self, prompt: Prompt, at: int, label: str, tokens: int | None = None) -> Prompt:
        """A prompt equal to ``prompt`` up to token ``at`` and different from it *in* token ``at``.

        ``tokens`` is the new length (default: the old one).
        """
        length = len(prompt) if tokens is None else tokens
        if not 0 <= at < min(len(prompt), length):
            raise ValueError(f"token {at} is outside the common part of {len(prompt)} and {length} tokens")
        rest = list(self.fresh(f"{label}/branch{at}", length - at))
        if rest[0] == prompt[at]:
            rest[0] = FIRST_TOKEN + (rest[0] - FIRST_TOKEN + 1) % (self.vocab_size - 1 - FIRST_TOKEN)
        return prompt[:at] + tuple(rest)


def _ids(rng: random.Random, first: int, end: int, count: int) -> Iterator[int]:
    """What ``rng.randrange(first, end)`` gives ``count`` times, in a quarter of the time: prompts have tens of thousands of tokens."""
    span = end - first
    if span < 1:
        raise ValueError(f"no token ids from {first} up to {end}")
    bits = span.bit_length()
    draw = rng.getrandbits
    while count:
        value = draw(bits)
        if value < span:
            yield first + value
            count -= 1


def boundary_lengths(blocks: int, block_tokens: int) -> dict[str, int]:
    """Prompt lengths around a block boundary: ``{"k3-1": 95, "k3": 96, "k3+1": 97}`` for 3 blocks of 32.

    Lengths below 1 are left out.
    """
    edge = blocks * block_tokens
    named = {f"k{blocks}-1": edge - 1, f"k{blocks}": edge, f"k{blocks}+1": edge + 1}
    return {name: length for name, length in named.items() if length >= 1}


def reusable_tokens(prompt_tokens: int, block_tokens: int) -> int:
    """Most tokens of a prompt that can be reused: whole blocks, and never the last token (its logits are needed)."""
    return (prompt_tokens - 1) // block_tokens * block_tokens
