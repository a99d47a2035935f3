"""From hash ids to token ids: prompts that share exactly what the trace says they share, at a vocabulary's and engine's block size.

The tokens of a block follow from its id alone (and from the run's nonce): equal ids give equal tokens, and unequal ids differ in
the block's first tokens, which spell the id in digits to the base of the vocabulary. So two prompts have the same tokens up to
the end of the last block that they share, and differ within the next block's first few tokens: no engine block can be shared by
accident, whatever its size, as long as it holds those digits (8 tokens for a vocabulary of 509 or more). A partial block has
the first tokens of the whole one. Counts are exact by construction.

The digits are followed by SHAKE-128 (FIPS 202) of nonce and id, so the same trace gives the same tokens on every platform and in every
release. A new nonce makes a new prompt of every one: nothing that an earlier run left in a pool can be a hit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from fixtures.errors import UsageError
from fixtures.models import ModelInfo
from suite.workload.prompts import FIRST_TOKEN
from suite.workload.trace import TraceRequest, blocks_of

_LARGEST_ID = 2**63 - 1


def digits_for(base: int) -> int:
    """Digits to this base that spell any 63-bit id."""
    count, reach = 1, base
    while reach <= _LARGEST_ID:
        count, reach = count + 1, reach * base
    return count


class Materialiser:
    """Makes token ids of requests.

    alphabet: token ids that may be used, 16 of them at least. block_tokens: tokens of a block of the trace. nonce: of the run.
    max_tokens: most tokens of prompt and answer that the model takes; None: no limit.
    Raises UsageError for an alphabet or blocks too small to tell ids apart.
    """

    def __init__(
        self, alphabet: Sequence[int], block_tokens: int, *, nonce: str = "", max_tokens: int | None = None
    ) -> None:
        self.alphabet = np.asarray(alphabet, dtype=np.int64)
        self.block_tokens = block_tokens
        self.max_tokens = max_tokens
        self._nonce = nonce
        base = len(self.alphabet)
        if base < 16:
            raise UsageError(f"an alphabet of {base} tokens: 16 or more are needed to tell blocks apart")
        self.digits = min(digits_for(base), block_tokens)
        self._reach = min(base**self.digits, _LARGEST_ID + 1)

    @classmethod
    def for_model(cls, model: ModelInfo, block_tokens: int, *, nonce: str = "") -> Materialiser:
        """Of all token ids of a model from ``prompts.FIRST_TOKEN`` on."""
        return cls(range(FIRST_TOKEN, model.vocab_size), block_tokens, nonce=nonce, max_tokens=model.max_position)

    def tokens(self, request: TraceRequest) -> list[int]:
        """Token ids of a prompt, ``request.input_tokens`` of them.

        Raises UsageError for a prompt beyond the model, one whose ids do not go with its length, and an id out of reach.
        """
        count, block = request.input_tokens, self.block_tokens
        self.check(request)
        ids: list[int] = []
        for at, block_id in enumerate(request.hash_ids):
            ids += self.block(block_id, min(block, count - at * block))
        return ids

    def check(self, request: TraceRequest) -> None:
        """Raises UsageError for a prompt beyond the model, and for one whose ids do not go with its length."""
        count, block = request.input_tokens, self.block_tokens
        if len(request.hash_ids) != blocks_of(count, block):
            raise UsageError(
                f"a prompt of {count} tokens has {len(request.hash_ids)} hash ids, which are not blocks of {block};"
                " give the trace's own block size"
            )
        if self.max_tokens is not None and count + request.output_tokens > self.max_tokens:
            raise UsageError(
                f"{count} + {request.output_tokens} tokens are more than the model's {self.max_tokens}; scale or cut the trace"
            )

    def block(self, block_id: int, count: int) -> list[int]:
        """The first ``count`` token ids of a block. Raises UsageError for an id out of reach."""
        if not 0 <= block_id < self._reach:
            raise UsageError(
                f"hash id {block_id}: {self.digits} tokens of this vocabulary cannot spell it; renumber the trace"
            )
        base, head, rest = len(self.alphabet), min(self.digits, count), block_id
        places = np.empty(count, dtype=np.int64)
        for at in range(head):
            rest, places[at] = divmod(rest, base)
        if count > head:
            digest = hashlib.shake_128(f"{self._nonce}/{block_id}".encode()).digest(4 * (count - head))
            places[head:] = np.frombuffer(digest, dtype="<u4") % base
        return self.alphabet[places].tolist()  # type: ignore[no-any-return]
