"""Token ids and text made from hash ids: lengths are exact, and prompts share exactly what the trace says."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from fixtures.errors import Untestable, UsageError
from fixtures.model_tokenizer import tokenizer_json
from fixtures.models import ModelInfo
from fixtures.pytest_support.skips import skip_untestable
from suite.selftest.traces import naive_hits, request
from suite.workload.materialise import Materialiser, digits_for
from suite.workload.presets import PRESETS
from suite.workload.prompts import FIRST_TOKEN
from suite.workload.sessions import SessionTraffic
from suite.workload.text import FileTokenizer, TextMaker, steady_words

pytestmark = pytest.mark.selftest


def model(path: Path, vocab_size: int = 512, max_position: int = 32768) -> ModelInfo:
    return ModelInfo(
        name="m",
        path=path,
        layers=1,
        kv_heads=1,
        head_dim=1,
        hidden=1,
        vocab_size=vocab_size,
        max_position=max_position,
        digest="d",
    )


def engine_hits(prompts: Sequence[Sequence[int]], block: int) -> int:
    """Tokens that an engine with an infinite prefix cache takes from it: whole blocks, hashed in a chain, never the last token."""
    held: set[bytes] = set()
    hits = 0
    for prompt in prompts:
        chain, keys = b"", []
        for start in range(0, len(prompt) - block + 1, block):
            chain = hashlib.sha256(chain + repr(list(prompt[start : start + block])).encode()).digest()
            keys.append(chain)
        usable = keys[: (len(prompt) - 1) // block]
        hits += block * next((n for n, key in enumerate(usable) if key not in held), len(usable))
        held.update(keys)
    return hits


@pytest.mark.parametrize("engine_block", [16, 32, 64])
def test_an_engine_sees_exactly_the_hits_that_the_trace_has(engine_block: int, tmp_path: Path) -> None:
    traffic = SessionTraffic(PRESETS["chat"]())
    requests = [r for _, r in zip(range(250), traffic, strict=False)]
    maker = Materialiser.for_model(model(tmp_path), 512)
    prompts = [maker.tokens(r) for r in requests]
    assert [len(p) for p in prompts] == [r.input_tokens for r in requests]
    assert {type(t) for t in prompts[0]} == {int}
    assert FIRST_TOKEN <= min(map(min, prompts)) <= max(map(max, prompts)) < 512
    wanted = naive_hits(requests, None, 512, engine_block)["reusable"]
    assert wanted > 50_000
    assert engine_hits(prompts, engine_block) == wanted


def test_prompts_part_in_the_first_tokens_of_the_first_block_that_differs(tmp_path: Path) -> None:
    maker = Materialiser.for_model(model(tmp_path), 64)
    for one, other in ((0, 1), (3, 3 + 509), (12, 12 + 509**7), (2**62, 2**62 + 1)):
        a, b = maker.tokens(request([5, one], block=64)), maker.tokens(request([5, other], block=64))
        assert a[:64] == b[:64]
        assert a[64:72] != b[64:72]


def test_tokens_follow_from_ids_alone(tmp_path: Path) -> None:
    maker = Materialiser.for_model(model(tmp_path), 64)
    whole = maker.tokens(request([4, 7], block=64))
    assert Materialiser.for_model(model(tmp_path), 64).tokens(request([4, 7], block=64)) == whole
    assert maker.tokens(request([4, 7], tokens=70)) == whole[:70]
    assert maker.tokens(request([7], block=64)) == whole[64:]


def test_the_tokens_of_an_id_are_those_of_earlier_releases(tmp_path: Path) -> None:
    """A pool filled by one release has to be hit by the next."""
    tokens = Materialiser.for_model(model(tmp_path), 64, nonce="n").tokens(request([1_000_000], block=64))
    assert tokens[:8] == [3 + 1_000_000 % 509, 3 + 1_000_000 // 509 % 509, 3 + 1_000_000 // 509**2, 3, 3, 3, 3, 3]
    digest = hashlib.shake_128(b"n/1000000").digest(4 * 56)
    assert tokens[8:] == [3 + int.from_bytes(digest[i : i + 4], "little") % 509 for i in range(0, 4 * 56, 4)]


def test_another_nonce_shares_no_block(tmp_path: Path) -> None:
    prompts = [
        Materialiser.for_model(model(tmp_path), 64, nonce=n).tokens(request([0, 1], block=64)) for n in ("a", "b")
    ]
    assert engine_hits(prompts, 16) == 0
    assert prompts[0][:8] == prompts[1][:8], "the digits do not depend on it"


@pytest.mark.parametrize(("base", "digits"), [(16, 16), (509, 8), (50_000, 5), (150_000, 4)])
def test_digits_reach_every_id(base: int, digits: int) -> None:
    assert digits_for(base) == digits
    assert base**digits > 2**63 - 1 >= base ** (digits - 1)


def test_what_cannot_be_made_is_refused(tmp_path: Path) -> None:
    maker = Materialiser.for_model(model(tmp_path, max_position=100), 64)
    cases = [
        (request([0], tokens=65), "a prompt of 65 tokens has 1 hash ids, which are not blocks of 64"),
        (request([0, 1], tokens=100, output_tokens=1), "100 . 1 tokens are more than the model's 100"),
        (request([2**63], block=64), "cannot spell it"),
        (request([-1], block=64), "cannot spell it"),
    ]
    for bad, says in cases:
        with pytest.raises(UsageError, match=says):
            maker.tokens(bad)
    with pytest.raises(UsageError, match="hash id 512: 1 tokens of this vocabulary cannot spell it"):
        Materialiser(range(512), 1).tokens(request([512], block=1))
    with pytest.raises(UsageError, match="an alphabet of 15 tokens"):
        Materialiser(range(15), 64)


def test_tokens_are_made_faster_than_any_client_sends_them(tmp_path: Path) -> None:
    maker = Materialiser.for_model(model(tmp_path, vocab_size=150_000, max_position=10**6), 512)
    best = 0.0
    for _ in range(3):
        began = time.process_time()
        count = sum(len(maker.tokens(request(range(n, n + 40)))) for n in range(10))
        best = max(best, count / (time.process_time() - began))
    assert best > 1_000_000


# Text -----------------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("tokenizers") is None:
        skip_untestable(str(Untestable("tokenizers", "the package cannot be imported", "pip install tokenizers")))
    directory = tmp_path_factory.mktemp("tokenizer")
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer_json(512)), encoding="utf-8")
    return directory


class Words:
    """A tokenizer with whole words, two of which merge where they meet, and with lone letters that all merge."""

    texts = ("", "ab", *(f" w{chr(97 + n // 26)}{chr(97 + n % 26)}" for n in range(60)), " wax wbb", *"xyz")

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        while text:
            best = max((t for t in self.texts if t and text.startswith(t)), key=len)
            ids.append(self.texts.index(best))
            text = text[len(best) :]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.texts[i] for i in ids)


def test_text_has_exactly_the_tokens_of_the_trace(tiny: Path) -> None:
    tokenizer = FileTokenizer(tiny)
    maker = TextMaker(tokenizer, model(tiny), 64, nonce="n")
    prompts = []
    for r in (
        request([0, 1, 2], tokens=150),
        request([0, 1], tokens=128),
        request([0, 3], tokens=65),
        request([9], tokens=1),
    ):
        text = maker.text(r)
        prompts.append(tokenizer.encode(text))
        assert len(prompts[-1]) == r.input_tokens
        assert prompts[-1] == maker.materialiser.tokens(r)
    assert engine_hits(prompts, 16) == 112 + 64


def test_words_of_the_tiny_tokenizer_do_not_merge(tiny: Path) -> None:
    tokenizer = FileTokenizer(tiny)
    words = steady_words(tokenizer, 512)
    assert len(words) > 40
    mixed = [words[(i * i + 3 * i) % len(words)] for i in range(2000)]
    assert tokenizer.encode(tokenizer.decode(mixed)) == mixed


def test_whole_words_are_preferred_to_lone_letters() -> None:
    words = steady_words(Words(), len(Words.texts))
    assert len(words) == 59, "of the two that merge, one"
    assert {Words.texts[i][:2] for i in words} == {" w"}


def test_a_tokenizer_that_merges_everything_is_refused() -> None:
    class Hopeless(Words):
        def encode(self, text: str) -> list[int]:
            return super().encode(text) if len(text) <= 4 else [1]

    with pytest.raises(UsageError, match="has only 0 tokens that survive decoding"):
        steady_words(Hopeless(), len(Words.texts))


def test_text_that_encodes_otherwise_is_never_handed_out(tmp_path: Path) -> None:
    class Fickle(Words):
        broken = False

        def encode(self, text: str) -> list[int]:
            ids = super().encode(text)
            return [*ids[:5], *ids[6:]] if self.broken else ids

    tokenizer = Fickle()
    maker = TextMaker(tokenizer, model(tmp_path, vocab_size=len(Words.texts)), 64)
    maker.text(request([0], block=64))
    tokenizer.broken = True
    with pytest.raises(UsageError, match="a prompt of 64 tokens encodes to 63 and parts at token"):
        maker.text(request([0], block=64))


def test_a_model_without_a_tokenizer_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"tokenizer\.json: no such file"):
        FileTokenizer(tmp_path)
