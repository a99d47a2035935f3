"""Prompts as text whose token count is known: words that a tokenizer gives back as they were, in any order.

Most token ids do not survive being decoded and encoded again: neighbours merge. So a few are picked that do (whole words with
their leading space where the vocabulary has them, lone characters where it has not), prompts are made of those alone, and every
text is encoded again before it is handed out.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from fixtures.errors import UsageError
from fixtures.models import ModelInfo
from suite.workload.materialise import Materialiser
from suite.workload.trace import TraceRequest

MOST_WORDS = 512
"""Words to pick at most: more make prompts no better, and each costs a check."""
FEWEST_WORDS = 16
_COMPARED = 128
"""Words compared one by one where some of a kind merge."""
_SCANNED = 20000
"""Token ids looked at for words; vocabularies begin with the frequent ones."""


class Tokenizer(Protocol):
    """As much of a tokenizer as is needed here. Neither way adds or hides special tokens."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class FileTokenizer:
    """A model directory's ``tokenizer.json``, read by the tokenizers library (it comes with vLLM). Raises UsageError."""

    def __init__(self, directory: Path) -> None:
        try:
            import tokenizers  # why here: the harness alone runs without it
        except ImportError as exc:
            raise UsageError("text prompts need the package tokenizers: pip install tokenizers") from exc
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise UsageError(f"{path}: no such file; text prompts need a model directory with its tokenizer.json")
        self._tokenizer = tokenizers.Tokenizer.from_file(str(path))

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))


def steady_words(tokenizer: Tokenizer, vocab_size: int) -> list[int]:
    """Token ids that stay themselves beside any of their kind, in any order. Raises UsageError if a vocabulary has too few."""
    alone = [
        i
        for i in range(min(vocab_size, _SCANNED))
        if _plain(text := tokenizer.decode([i])) and tokenizer.encode(text) == [i]
    ]
    texts = {i: tokenizer.decode([i]) for i in alone}
    spaced = [i for i in alone if texts[i][0] == " " and texts[i][1:].isalpha()]
    lone = [i for i in alone if len(texts[i]) == 1 and texts[i] != " "]
    best: list[int] = []
    for kind in (spaced, lone):
        steady = _steady(tokenizer, kind[:MOST_WORDS])
        best = max(best, steady, key=len)
        if len(best) >= 4 * FEWEST_WORDS:
            break
    if len(best) < FEWEST_WORDS:
        raise UsageError(
            f"this tokenizer has only {len(best)} tokens that survive decoding; send token ids instead of text"
        )
    return best


def _plain(text: str) -> bool:
    return text.isascii() and text.isprintable() and bool(text)


def _steady(tokenizer: Tokenizer, kind: list[int]) -> list[int]:
    """The words of ``kind``, or a part of the first ones, of which no two merge."""
    if _keeps(tokenizer, _every_pair(kind)):
        return kind
    kept: list[int] = []
    for word in kind[:_COMPARED]:
        if _keeps(tokenizer, [word, word]) and all(_keeps(tokenizer, [word, w, word]) for w in kept):
            kept.append(word)
    return kept if _keeps(tokenizer, _every_pair(kept)) else []


def _every_pair(words: list[int]) -> list[int]:
    """A row in which every word has every word (itself too) for a right neighbour."""
    count = len(words)
    return [i for step in range(count) for at in range(count) for i in (words[at], words[(at + step) % count])]


def _keeps(tokenizer: Tokenizer, ids: list[int]) -> bool:
    return tokenizer.encode(tokenizer.decode(ids)) == ids


class TextMaker:
    """Makes prompts as text. ``materialiser`` makes the same prompts as token ids.

    A server that puts a token of its own before a text (BOS; vLLM does so for models that have one) counts that one more:
    send ``add_special_tokens=false``, or token ids.
    """

    def __init__(self, tokenizer: Tokenizer, model: ModelInfo, block_tokens: int, *, nonce: str = "") -> None:
        words = steady_words(tokenizer, model.vocab_size)
        self.materialiser = Materialiser(words, block_tokens, nonce=nonce, max_tokens=model.max_position)
        self._tokenizer = tokenizer

    def text(self, request: TraceRequest) -> str:
        """A prompt's text, which encodes to exactly ``materialiser.tokens(request)``. Raises UsageError if it does not."""
        ids = self.materialiser.tokens(request)
        text = self._tokenizer.decode(ids)
        back = self._tokenizer.encode(text)
        if back != ids:
            at = next((n for n, (a, b) in enumerate(zip(ids, back, strict=False)) if a != b), min(len(ids), len(back)))
            raise UsageError(
                f"a prompt of {len(ids)} tokens encodes to {len(back)} and parts at token {at}; send token ids instead of text"
            )
        return text
