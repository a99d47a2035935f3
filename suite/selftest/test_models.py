"""Tiny models: equal bytes for equal seeds, a cache that heals and survives parallel builders, and weights that can see."""

from __future__ import annotations

import functools
import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import safetensors

from fixtures.errors import UsageError
from fixtures.model_architectures import CONVOLUTION
from fixtures.model_files import MANIFEST, broken_files, to_bfloat16
from fixtures.model_layers import weights
from fixtures.model_tokenizer import END_OF_TEXT, byte_characters, speakable
from fixtures.models import BUILDER_VERSION, TINY, ModelInfo, directory_name, ensure_model, resolve_model, spec_digest
from suite.selftest.numpy_decoder import Array, Decoder

pytestmark = pytest.mark.selftest

GOLDEN = (2, "b484ef18679b7073")
"""Builder version and the beginning of the digest of tiny-base's weights."""

replace = msgspec.structs.replace
ROOT = Path(__file__).parents[2]


@functools.cache
def drawn(name: str) -> dict[str, Array]:
    """The weights of a ready model, for tests that only read them."""
    return dict(weights(TINY[name]))


def digests(info: ModelInfo) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in info.path.iterdir()}


# Bytes and identity -----------------------------------------------------------------------------------------------------
def test_equal_specs_give_equal_bytes(tmp_path: Path) -> None:
    first, second = (ensure_model("tiny-base", tmp_path / side) for side in "ab")
    assert digests(first) == digests(second)
    assert first.digest == second.digest
    assert first.path.name == second.path.name


def test_bytes_changed_means_builder_version_changed(tmp_path: Path) -> None:
    """A cached directory of an older builder must not be taken for today's: raise BUILDER_VERSION, then update this."""
    assert (BUILDER_VERSION, digests(ensure_model("tiny-base", tmp_path))["model.safetensors"][:16]) == GOLDEN


def test_sibling_differs_in_weights_alone(tmp_path: Path) -> None:
    base, sibling = digests(ensure_model("tiny-base", tmp_path)), digests(ensure_model("tiny-sibling", tmp_path))
    assert {name for name in base if base[name] != sibling[name]} == {"model.safetensors", MANIFEST}


def test_changed_configuration_keeps_the_weights(tmp_path: Path) -> None:
    base = ensure_model("tiny-base", tmp_path)
    other = ensure_model(replace(TINY["tiny-base"], rope_theta=5e5, dtype="float16", config={"extra": 1}), tmp_path)
    assert {n for n in digests(base) if digests(base)[n] != digests(other)[n]} == {"config.json", MANIFEST}
    config = json.loads((other.path / "config.json").read_text())
    assert (config["rope_theta"], config["torch_dtype"], config["extra"]) == (5e5, "float16", 1)
    assert base.path.name != other.path.name, "unlike models must not share a name by accident"


def test_same_name_in_another_parent(tmp_path: Path) -> None:
    base = ensure_model("tiny-base", tmp_path)
    twin = ensure_model("tiny-sibling", tmp_path, same_name_as="tiny-base")
    assert twin.path.name == base.path.name == directory_name(TINY["tiny-base"])
    assert twin.path.parent != base.path.parent
    assert twin.digest == ensure_model("tiny-sibling", tmp_path).digest != base.digest
    assert digests(twin)["model.safetensors"] != digests(base)["model.safetensors"]


# Cache ------------------------------------------------------------------------------------------------------------------
def test_cache_hit_is_fast_and_writes_nothing(tmp_path: Path) -> None:
    info = ensure_model("tiny-base", tmp_path)
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    started = time.perf_counter()
    assert ensure_model("tiny-base", tmp_path) == info
    assert time.perf_counter() - started < 0.5  # measured: 5 ms; a build takes 50 ms or more
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")} == before


def _cut_short(path: Path) -> None:
    (path / "model.safetensors").write_bytes(b"half")


def _same_size(path: Path) -> None:
    file = path / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def _no_manifest(path: Path) -> None:
    (path / MANIFEST).unlink()


def _no_tokenizer(path: Path) -> None:
    (path / "tokenizer.json").unlink()


@pytest.mark.parametrize("damage", [_cut_short, _same_size, _no_manifest, _no_tokenizer])
def test_broken_directory_is_rebuilt(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    info = ensure_model("tiny-base", tmp_path)
    good = digests(info)
    damage(info.path)
    assert broken_files(info.path) is not None
    assert digests(ensure_model("tiny-base", tmp_path)) == good
    assert not list(tmp_path.rglob(".building-*"))


def test_parallel_builders_leave_one_intact_directory(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from fixtures.models import ensure_model;"
        "sys.stdin.readline(); print(ensure_model('tiny-base', Path(sys.argv[1])).path)"
    )
    builders = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)],
            cwd=ROOT,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for _ in range(3)
    ]
    for builder in builders:  # all are up to the starting line before the first may go
        assert builder.stdin is not None
        builder.stdin.write("go\n")
        builder.stdin.flush()
    paths = {builder.communicate(timeout=60)[0].strip() for builder in builders}
    assert [builder.returncode for builder in builders] == [0, 0, 0]
    (path,) = paths
    assert broken_files(Path(path)) is None
    assert sorted(p.name for p in Path(path).parent.iterdir()) == [".lock", Path(path).name]


def test_importing_needs_no_torch() -> None:
    code = "import sys, fixtures.models; print([m for m in ('torch', 'transformers', 'vllm', 'tokenizers') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


# Facts and errors -------------------------------------------------------------------------------------------------------
def test_facts_of_the_ready_models() -> None:
    base, sibling, deep = TINY["tiny-base"], TINY["tiny-sibling"], TINY["tiny-deep"]
    assert replace(base, name="x", seed=0) == replace(sibling, name="x", seed=0)
    assert (base.layers, base.hidden, base.vocab_size, base.heads, base.kv_heads, base.head_dim) == (
        4,
        256,
        512,
        4,
        2,
        64,
    )
    assert deep.layers == 36
    assert all(spec.max_position >= 32768 for spec in TINY.values())
    assert len({spec_digest(spec) for spec in TINY.values()}) == len(TINY)


def test_info_agrees_with_the_spec_and_with_a_directory(tmp_path: Path) -> None:
    info = ensure_model("tiny-base", tmp_path)
    read = resolve_model(str(info.path))
    fields = ("path", "layers", "kv_heads", "head_dim", "hidden", "vocab_size", "max_position")
    assert [getattr(info, f) for f in fields] == [getattr(read, f) for f in fields]
    assert info.kv_bytes_per_token() == 2 * 4 * 2 * 64 * 2
    assert info.kv_bytes_per_token(1) * 2 == info.kv_bytes_per_token()


def test_resolve_by_name_uses_the_cache_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVGATES_CACHE", str(tmp_path))
    assert resolve_model("tiny-sibling").path.is_relative_to(tmp_path)


def test_head_dim_and_kv_heads_default_as_in_transformers(tmp_path: Path) -> None:
    config = {
        "hidden_size": 96,
        "num_attention_heads": 6,
        "num_hidden_layers": 2,
        "vocab_size": 9,
        "max_position_embeddings": 8,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    info = resolve_model(str(tmp_path))
    assert (info.head_dim, info.kv_heads, info.name) == (16, 6, tmp_path.name)
    (tmp_path / "config.json").write_text(json.dumps({"text_config": config}))
    assert resolve_model(str(tmp_path)).head_dim == 16


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, ["no config.json", "tiny-base"]),
        ("{", ["cannot be read as JSON"]),
        ("[]", ["a JSON object is needed"]),
        ("{}", ["hidden_size = None", "positive whole number"]),
    ],
)
def test_bad_directory_is_one_line(tmp_path: Path, content: str | None, words: list[str]) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(UsageError) as caught:
        resolve_model(str(tmp_path))
    assert all(word in str(caught.value) for word in words)
    assert "\n" not in str(caught.value)


def test_unknown_names_list_the_known_ones(tmp_path: Path) -> None:
    calls: list[Callable[[], ModelInfo]] = [
        lambda: resolve_model("tiny-bse"),
        lambda: ensure_model("tiny-bse", tmp_path),
        lambda: ensure_model("tiny-base", tmp_path, same_name_as="tiny-bse"),
    ]
    for call in calls:
        with pytest.raises(UsageError, match=r"tiny-bse: no .*tiny-base, tiny-sibling, tiny-deep"):
            call()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kv_heads": 3}, "no multiple of kv_heads = 3"),
        ({"layers": 0}, "layers = 0 must be positive"),
        ({"vocab_size": 300}, "needs 512 or more"),
        ({"architecture": "rnn"}, "there are: qwen2"),
        ({"intermediate": 64}, "at least hidden = 256"),
        ({"architecture": "lfm2"}, "needs one for each layer"),
        ({"layer_kinds": ("conv",) * 4}, "qwen2 takes one of none"),
        ({"architecture": "llama", "layer_kinds": ("full_attention",)}, "for each of 4 layers"),
        ({"architecture": "llama", "layer_kinds": ("sliding_attention",) * 4}, "sliding_window is needed"),
        ({"latent_rank": 512}, "deepseek_v2 needs it"),
        ({"architecture": "deepseek_v2", "latent_rank": 512}, "latent_rope_dim = 0: deepseek_v2 needs it"),
        ({"experts": 2}, "mixtral needs it"),
    ],
)
def test_impossible_spec_is_refused(tmp_path: Path, changes: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        ensure_model(replace(TINY["tiny-base"], **changes), tmp_path)


def test_a_user_without_a_home_is_told_of_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("KVGATES_CACHE", raising=False)
    monkeypatch.setattr(Path, "home", nowhere)
    with pytest.raises(UsageError, match=r"home directory.*KVGATES_CACHE"):
        resolve_model("tiny-base")


def test_unwritable_cache_names_the_mend(tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file, not a folder")
    with pytest.raises(UsageError, match="KVGATES_CACHE"):
        ensure_model("tiny-base", tmp_path)


# Files ------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", [n for n in TINY if n != "tiny-deep"])
def test_weight_file_is_safetensors_with_the_values_drawn(tmp_path: Path, name: str) -> None:
    """Read back by the library, not by our own reader."""
    data = (ensure_model(name, tmp_path).path / "model.safetensors").read_bytes()
    entries: list[tuple[str, Any]] = safetensors.deserialize(data)  # type: ignore[no-untyped-call]
    found = {key: (entry["dtype"], entry["shape"], bytes(entry["data"])) for key, entry in entries}
    assert found == {k: ("BF16", list(v.shape), to_bfloat16(v).tobytes()) for k, v in drawn(name).items()}


def test_bfloat16_rounds_to_nearest_even() -> None:
    value = np.array([1.0, 1.0 + 2**-8, 1.0 + 3 * 2**-8, 1.0 + 2**-8 + 2**-20, -2.5, 0.0], np.float32)
    assert [f"{bits:04x}" for bits in to_bfloat16(value)] == ["3f80", "3f80", "3f82", "3f81", "c020", "0000"]


def test_tokenizer_round_trip(tmp_path: Path) -> None:
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError:  # pragma: no cover - the development set-up has it
        pytest.fail("needs tokenizers: the module is not installed; it comes with the cpu extra (make setup)")
    tokenizer = Tokenizer.from_file(str(ensure_model("tiny-base", tmp_path).path / "tokenizer.json"))
    text = "The atoll: naïve 日本語 🎉\n\ttabs\x00and <|endoftext|>"
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert END_OF_TEXT in ids
    assert any(256 <= i < END_OF_TEXT for i in ids), "some pairs merge"
    assert tokenizer.get_vocab_size() == 512
    assert [tokenizer.token_to_id(c) for c in byte_characters()] == list(range(256))
    spoken = {tokenizer.decode([i]) for i in speakable(512)}
    assert len(spoken) == len(speakable(512)) == 350, "each speakable id has a text of its own"
    assert all(text.isprintable() and text.isascii() for text in spoken)


# The oracle can see -----------------------------------------------------------------------------------------------------
BLOCK = 32
PROMPT = 256
SEEN_NAT = 0.5
"""A wrong block must move a top-5 logprob by this much in one step; `fixtures.model_probe` has the figures of real engines."""


def _shifts(decoder: Decoder, tail: int = BLOCK) -> dict[str, float]:
    """Largest change of a top-5 logprob of the next token, in nat, with the KV of one block wrong, for each kind of wrong.

    tail: tokens that follow what is cached.
    """
    random = np.random.default_rng(7)
    cached = PROMPT - BLOCK
    ids, other = (random.integers(0, END_OF_TEXT, cached + tail) for _ in range(2))
    _, right = decoder.run(ids[:cached])
    _, foreign = decoder.run(other[:cached])
    want, _ = decoder.run(ids[cached:], right)
    top = np.argsort(want[-1])[-5:]
    out = {}
    for block in (0, 6):
        span = slice(block * BLOCK, (block + 1) * BLOCK)
        wrong_by_kind = {"foreign": foreign, "zeros": [(0 * k, 0 * v) for k, v in right]}
        if block:
            mixed = np.concatenate([other[: span.start], ids[span]])
            wrong_by_kind["equal tokens behind another prefix"] = decoder.run(mixed)[1]
        for kind, wrong in wrong_by_kind.items():
            cache = [(k.copy(), v.copy()) for k, v in right]
            for mine, theirs in zip(cache, wrong, strict=True):
                for kept, planted in zip(mine, theirs, strict=True):
                    kept[:, span] = planted[:, span]
            got, _ = decoder.run(ids[cached:], cache)
            out[f"{kind}, block {block}"] = float(np.abs(want[-1] - got[-1])[top].max())
    return out


def test_one_wrong_block_is_seen() -> None:
    shifts = _shifts(Decoder(TINY["tiny-base"], drawn("tiny-base").items()))
    assert len(shifts) == 5
    assert {case: shift for case, shift in shifts.items() if shift < SEEN_NAT} == {}


@pytest.mark.parametrize("name", ["tiny-window", "tiny-interleaved", "tiny-latent", "tiny-experts", "tiny-hybrid"])
def test_one_wrong_block_is_seen_in_every_family(name: str) -> None:
    """By half as much at least, which is more than plain random weights see."""
    shifts = _shifts(Decoder(TINY[name], drawn(name).items()), tail=1)
    assert {case: shift for case, shift in shifts.items() if shift < SEEN_NAT / 2} == {}


def _with_foreign_states(decoder: Decoder, tail: int) -> float:
    """As ``_shifts``, with the states of another prompt and the right keys and values."""
    spec = decoder.spec
    random = np.random.default_rng(7)
    ids, other = (random.integers(0, END_OF_TEXT, 224 + tail) for _ in range(2))
    (_, right), (_, foreign) = decoder.run(ids[:224]), decoder.run(other[:224])
    states = [
        theirs if kind == CONVOLUTION else mine
        for kind, mine, theirs in zip(spec.layer_kinds, right, foreign, strict=True)
    ]
    want, got = decoder.run(ids[224:], right)[0][-1], decoder.run(ids[224:], states)[0][-1]
    return float(np.abs(want - got)[np.argsort(want)[-5:]].max())


def test_a_wrong_state_is_seen_where_one_token_follows_it() -> None:
    decoder = Decoder(TINY["tiny-hybrid"], drawn("tiny-hybrid").items())
    assert _with_foreign_states(decoder, tail=1) > SEEN_NAT


@pytest.mark.parametrize("name", [n for n in TINY if n != "tiny-deep"])
def test_what_is_cached_is_all_that_a_decoder_needs(name: str) -> None:
    """A prompt read in two parts gives the answer of one read at once: windows, latents and states included."""
    decoder = Decoder(TINY[name], drawn(name).items())
    ids = np.random.default_rng(3).integers(0, END_OF_TEXT, 100)
    whole, _ = decoder.run(ids)
    _, cache = decoder.run(ids[:64])
    assert np.abs(decoder.run(ids[64:], cache)[0][-1] - whole[-1]).max() < 1e-3


@pytest.mark.slow
@pytest.mark.needs("cpu-stack")
@pytest.mark.parametrize("name", ["tiny-base", "tiny-window", "tiny-latent", "tiny-hybrid", "tiny-experts"])
def test_transformers_reads_a_model_as_the_decoder_does(tmp_path: Path, name: str) -> None:
    """The reference of every architecture gives the same log probabilities, so configuration, names and layout are right.

    Not ``tiny-interleaved``: transformers' Llama knows no windows.
    """
    torch, auto = _transformers()
    path = str(ensure_model(name, tmp_path).path)
    model = auto.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    ids = np.random.default_rng(0).integers(0, END_OF_TEXT, 600)
    with torch.no_grad():
        theirs = torch.log_softmax(model(torch.tensor(ids[None])).logits[0, -1], -1).numpy()
    stored = ((key, _as_stored(value)) for key, value in weights(TINY[name]))
    ours, _ = Decoder(TINY[name], stored).run(ids)
    assert np.abs(ours[-1] - theirs).max() < 1e-3


def _transformers() -> tuple[Any, Any]:
    """torch and the class that loads a model. Imported late: it takes seconds, and the suite itself needs neither."""
    import torch
    from transformers import AutoModelForCausalLM

    return torch, AutoModelForCausalLM


def _as_stored(value: Any) -> Any:
    """Rounded to bfloat16 and back, as the file holds it."""
    return (to_bfloat16(value).astype(np.uint32) << 16).view(np.float32)


def test_a_window_hides_what_lies_before_it() -> None:
    spec = replace(TINY["tiny-window"], layers=1)
    decoder = Decoder(spec, weights(spec))
    ids = np.random.default_rng(3).integers(0, END_OF_TEXT, 600)
    near, far = ids.copy(), ids.copy()
    far[600 - 512 - 1], near[600 - 512] = (ids[600 - 512 - 1] + 1) % 256, (ids[600 - 512] + 1) % 256
    want, _ = decoder.run(ids)
    assert np.array_equal(decoder.run(far)[0][-1], want[-1])
    assert not np.array_equal(decoder.run(near)[0][-1], want[-1])


@pytest.mark.slow
def test_the_check_above_can_fail() -> None:
    """Plain random weights of the usual scale see next to nothing."""
    random = np.random.default_rng(0)
    spec = TINY["tiny-base"]
    plain = ((k, v if "norm" in k else random.normal(0, 0.02, v.shape).astype(np.float32)) for k, v in weights(spec))
    assert max(_shifts(Decoder(spec, plain)).values()) < SEEN_NAT / 2


@pytest.mark.slow
def test_quiet_tokens_are_far_from_the_top() -> None:
    decoder = Decoder(TINY["tiny-base"], drawn("tiny-base").items())
    logprobs, _ = decoder.run(np.random.default_rng(1).integers(0, END_OF_TEXT, 256))
    quiet = np.setdiff1d(np.arange(512), speakable(512))
    fifth = np.sort(logprobs, axis=1)[:, -5]
    assert (logprobs[64:, quiet].max(axis=1) < fifth[64:]).all()


@pytest.mark.parametrize(("name", "kv_bytes"), [("shape-3b", 36 << 10), ("shape-8b", 128 << 10)])
def test_a_shape_is_a_model_directory_without_weights(tmp_path: Path, name: str, kv_bytes: int) -> None:
    model = ensure_model(name, cache_dir=tmp_path)
    assert model.kv_bytes_per_token() == kv_bytes
    assert model.max_position >= 32768
    files = {p.name for p in model.path.iterdir()}
    assert {"config.json", "tokenizer.json"} <= files
    assert not [f for f in files if f.endswith(".safetensors")]
    assert ensure_model(name, cache_dir=tmp_path) == model
