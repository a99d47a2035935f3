"""Specs from TOML: good ones load, each kind of bad one is one clear error that names place and mend."""

from pathlib import Path

import pytest

from fixtures.errors import UsageError
from fixtures.spec import STACKS_DIR, load_spec, parse_spec, require_built

pytestmark = pytest.mark.selftest


@pytest.mark.parametrize("path", sorted(STACKS_DIR.glob("*.toml")), ids=lambda p: p.stem)
def test_every_ready_spec_loads_under_its_own_name(path: Path) -> None:
    assert load_spec(path.stem).name == path.stem


BAD = [
    ("x =", "not valid TOML"),
    ('name = "x"\nfoo = 1', "unknown field `foo`"),
    ('name = "x"\nengine_count = "2"', "engine_count: Expected `int"),
    ('name = "x"\n[engine]\nbloc = 1', "engine: .*unknown field `bloc`"),
    ('name = "x"\n[store]\nmode = "q"', "store.mode: Invalid enum value 'q'"),
    (
        'name = "x"\n[store]\nmode = "standalone"\nowners = 1\nssd_bytes = 1\nssd_volume_bytes = 1',
        "ssd_volume_bytes needs",
    ),
    (
        'name = "x"\nruntime = "docker"\n[store]\nmode = "standalone"\nowners = 1\nssd_volume_bytes = 1',
        "ssd_volume_bytes needs",
    ),
    ('name = "x"\n[engine]\nconnector = "mooncake-store"', r"needs a \[store\] table"),
    ('name = "x"\nengine_count = 2\n[[engines]]\n', "keep one of them"),
    ('name = "x"\nengine_count = 0', "1 to 256 engines"),
    ('name = "x"\n[engine]\nconnector = "native"\nblock_tokens = 16', "multiples of 32"),
    ('name = "x"\n[engine]\nconnector = "custom"', "needs connector_name and connector_module_path"),
    ('name = "x"\n[engine]\nconnector = "native"\ngpu = 0', "platform = 'cuda'"),
    ('name = "x"\ntransport = "rdma"\n[engine]\nconnector = "native"', "device"),
    ('name = "x"\n[engine]\nconnector = "native"\nhash_seed = "abc"', "hash_seed"),
    ('name = "x"\nruntime = "docker"\n[engine]\nconnector = "native"\ncpus = 0.1', "cpus = 0.1: at least 0.5"),
    ('name = "x"\n[engine]\nconnector = "native"\ncpus = 1.5', "limits a container"),
    ('name = "x"\nplatform = "cuda"\n[engine]\nconnector = "lmcache"', r"needs lmcache = \{ local_cpu_bytes"),
    ('name = "x"\n[engine]\nconnector = "native"\nlmcache = {}', "lmcache table is for"),
    ('name = "x"\n[engine]\nconnector = "lmcache"\nlmcache = {}', "no CPU path"),
    ('name = "x"\nplatform = "cuda"\n[store]\n[engine]\nconnector = "lmcache"\nlmcache = {}', "joins no pool"),
    (
        'name = "x"\nplatform = "cuda"\n[engine]\nconnector = "lmcache-mooncake"\nlmcache = {}',
        r"needs a \[store\] table",
    ),
    ('name = "x"\nplatform = "cuda"\n[engine]\nconnector = "lmcache"\nlmcache = {local_cpu = false}', "kept anywhere"),
    (
        'name = "x"\nplatform = "cuda"\n[engine]\nconnector = "lmcache"\nlmcache = {chunk_tokens = 40}',
        "no multiple of block_tokens",
    ),
    (
        'name = "x"\nplatform = "cuda"\n[engine]\nconnector = "lmcache"\nlmcache = {local_cpu_bytes = 0}',
        "must be positive",
    ),
    ('name = "x"\nplatform = "cuda"\n[engine]\nconnector = "lmcache"\nlmcache = {chunk = 1}', "unknown field `chunk`"),
    (
        'name = "x"\nplatform = "cuda"\n[store]\nmasters = 3\n[engine]\nconnector = "lmcache-mooncake"\nlmcache = {}',
        "store.masters = 1",
    ),
    ('name = "x"\n[engine]\nconnector = "cpu-offload"\nkv_extra = {cpu_bytes_to_use = 1}', "GPUs only"),
    ('name = "x"\nplatform = "cuda"\n[engine]\nconnector = "cpu-offload"', "cpu_bytes_to_use"),
    ('name = "x"\nplatform = "cuda"\n[engine]\nconnector = "multi"\nkv_extra = {cpu_bytes_to_use = 1}', "store"),
    ('name = "x"\n[engine]\nconnector = "native"\nmodel = "shape-8b"', "load_format"),
    ('name = "x"\n[store]\nmode = "standalone"', "owners = 1"),
    ('name = "x"\n[store]\nclient_ttl_s = 0', "must be positive"),
    (
        'name = "x"\n[[engines]]\nname = "a"\nconnector = "native"\n[[engines]]\nname = "a"\nconnector = "native"',
        "used twice",
    ),
]


@pytest.mark.parametrize(("text", "message"), BAD, ids=[m for _, m in BAD])
def test_bad_specs_are_one_clear_error(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        parse_spec(text, "bad.toml")
    assert str(caught.value).startswith("bad.toml: ")
    assert "\n" not in str(caught.value)


def test_a_missing_file_lists_the_ready_specs() -> None:
    with pytest.raises(UsageError, match=r"no such file.*cpu\.toml"):
        load_spec("nowhere")


def test_engine_overrides_merge_tables_and_replace_the_rest() -> None:
    spec = parse_spec(
        'name = "x"\n[engine]\nconnector = "native"\nenv = {A = "1", B = "1"}\n[[engines]]\n[[engines]]\nenv = {B = "2"}\n',
        "x.toml",
    )
    assert spec.engine("e1").env == {"A": "1", "B": "2"}
    assert spec.engine("e0").env == {"A": "1", "B": "1"}


def test_equal_specs_have_equal_keys_and_variants_differ() -> None:
    spec = load_spec("cpu")
    assert spec.key() == load_spec("cpu").key()
    assert spec.with_engine("e1", hash_seed="7").key() != spec.key()
    assert [e.name for e in spec.with_engine_count(3).engines] == ["e0", "e1", "e2"]


def test_a_variant_is_validated_too() -> None:
    with pytest.raises(UsageError, match="multiples of 32"):
        load_spec("cpu").with_all_engines(block_tokens=8)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('runtime = "external"', r"needs an \[external\] table"),
    ],
)
def test_what_is_not_built_is_refused_never_replaced(text: str, message: str) -> None:
    spec = parse_spec(f'name = "x"\n{text}\n[engine]\nconnector = "native"\n', "x.toml")
    with pytest.raises(UsageError, match=message):
        require_built(spec, where="x.toml")
    ready = load_spec("cpu")
    assert require_built(ready, where="cpu") is ready
