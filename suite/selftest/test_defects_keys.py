"""Selftests of lies about keys: what a connector that leaves something out finds, and what it still tells apart."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from suite.defects.lying_keys import KEYED, goes_on

pytestmark = pytest.mark.selftest

BLOCK = 4


@dataclass
class Request:
    """As much of vLLM's request as its block hashes depend on, keyed with salt and adapter (the slow test has the real one)."""

    tokens: Sequence[int]
    cache_salt: str | None = None
    lora_request: str | None = None
    request_id: str = "r"
    block_hashes: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.block_hashes = self._block_hasher(self)

    @staticmethod
    def _block_hasher(request: Any) -> list[bytes]:
        hashes, before = [], b""
        for start in range(0, len(request.tokens) // BLOCK * BLOCK, BLOCK):
            text = repr((before, request.tokens[start : start + BLOCK], request.cache_salt, request.lora_request))
            before = hashlib.sha256(text.encode()).digest()
            hashes.append(before)
        return hashes


TOKENS = tuple(range(3 * BLOCK))
PLAIN = Request(TOKENS)
SALTED = Request(TOKENS, cache_salt="red")
ADAPTED = Request(TOKENS, lora_request="alpha")
OTHER = Request(TOKENS, lora_request="beta")


def test_an_ignored_field_is_in_no_key_and_all_others_are() -> None:
    adapter, salt = KEYED["ignored-adapter"], KEYED["ignored-salt"]
    assert ADAPTED.block_hashes != OTHER.block_hashes != PLAIN.block_hashes
    assert adapter(ADAPTED).block_hashes == adapter(OTHER).block_hashes == PLAIN.block_hashes
    assert salt(SALTED).block_hashes == PLAIN.block_hashes
    both = Request(TOKENS, cache_salt="red", lora_request="alpha")
    assert adapter(both).block_hashes == SALTED.block_hashes
    assert salt(both).block_hashes == ADAPTED.block_hashes


@pytest.mark.parametrize("defect", ["ignored-adapter", "ignored-salt"])
def test_a_request_without_the_field_is_keyed_as_it_is(defect: str) -> None:
    assert KEYED[defect](PLAIN) is PLAIN


def test_a_view_is_the_request_in_all_else() -> None:
    view = KEYED["ignored-adapter"](ADAPTED)
    assert (view.request_id, view.tokens, view.lora_request) == ("r", TOKENS, None)
    assert ADAPTED.lora_request == "alpha", "the engine's own request stays as it is"


def test_short_keys_leave_out_the_blocks_own_tokens() -> None:
    parted = Request((*TOKENS[:-1], 99))
    short = KEYED["short-key"]
    assert parted.block_hashes[-1] != PLAIN.block_hashes[-1]
    assert short(parted).block_hashes == short(PLAIN).block_hashes
    assert short(Request((99, *TOKENS[1:]))).block_hashes[0] != short(PLAIN).block_hashes[0]


@pytest.mark.parametrize(
    ("prompt", "found", "more"), [(65, 64, False), (65, 32, True), (64, 32, False), (96, 32, True), (2000, 1984, False)]
)
def test_a_prompt_goes_on_behind_what_was_found(prompt: int, found: int, more: bool) -> None:
    """The last token is never reused, so a prompt of whole blocks ends one block earlier."""
    assert goes_on(prompt, found, 32) is more


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, while vLLM is imported
@pytest.mark.slow
@pytest.mark.needs("cpu-stack")
def test_vllms_own_requests_are_keyed_that_way() -> None:
    """Slow: importing vLLM alone takes seconds."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request as Real

    from suite.defects import lying_connector

    init_none_hash(sha256)

    def request(adapter: str = "", salt: str | None = None) -> Any:
        lora = LoRARequest(adapter, 1, f"/adapters/{adapter}") if adapter else None
        return Real(
            request_id="r",
            prompt_token_ids=list(range(100)),
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            lora_request=lora,
            cache_salt=salt,
            block_hasher=get_request_block_hasher(32, sha256),
        )

    plain, alpha, beta, red = request(), request("alpha"), request("beta"), request(salt="red")
    assert len({tuple(x.block_hashes) for x in (plain, alpha, beta, red)}) == 4
    for real, defect in ((alpha, "ignored-adapter"), (beta, "ignored-adapter"), (red, "ignored-salt")):
        assert KEYED[defect](real).block_hashes == plain.block_hashes
    assert {*KEYED, "ignored-prefix", "lost-block", "whole-prompts"} <= lying_connector.DEFECTS
