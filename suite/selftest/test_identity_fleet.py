"""Who would read whose blocks: the key model beside the installed release and real keys, and fleets made by hand."""

from __future__ import annotations

import ast
import dataclasses
import http.server
import importlib.util
import json
import shutil
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fixtures.errors import UsageError
from fixtures.identity import deployed_of, main, read_fleet
from fixtures.identity_arguments import parse
from fixtures.identity_keys import RANDOM_SEED, Rank, block_hashes, effective_seed, key_prefix, ranks
from fixtures.identity_model import EngineIdentity, Relationship, compare_pair
from fixtures.identity_sources import Deployed, identity_of
from fixtures.identity_weights import effective_config, file_digest
from fixtures.models import ensure_model, resolve_model
from fixtures.spec import load_spec
from suite.gates.identity_settings import PROTECTIONS, SETTINGS, merged
from suite.gates.test_identity import OTHER_ENGINE

pytestmark = pytest.mark.selftest

GOLDEN = Path(__file__).parent / "golden" / "identity_keys.json"
MODEL = "/models/tiny"
TRANSFER = {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both"}
POOL = {"master_server_address": "10.0.0.1:50051"}


# The key model -------------------------------------------------------------------------------------------------------
def test_keys_that_a_real_store_listed_are_made_again() -> None:
    for known in json.loads(GOLDEN.read_text())["blocks"]:
        prefix = key_prefix("/any/where/tiny-base-99d80d42/")
        hashes = block_hashes(known["prompt_token_ids"], 32, "0", salt=known.get("salt"))
        assert f"{prefix}@{hashes[known['block']]}" == known["key"]


def test_salt_and_adapter_change_the_hash_and_are_told_apart() -> None:
    prompt = list(range(64))
    plain = block_hashes(prompt, 32, "0")
    salted = block_hashes(prompt, 32, "0", salt="alpha")
    adapted = block_hashes(prompt, 32, "0", adapter=("alpha", "/a"))
    moved = block_hashes(prompt, 32, "0", adapter=("alpha", "/b"))
    assert len({h for hashes in (plain, salted, adapted, moved) for h in hashes}) == 8
    assert block_hashes(prompt, 32, "1") != plain


def installed_vllm() -> Path:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


def upstream() -> dict[str, Any]:
    """``KeyMetadata`` and ``PoolKey`` of the installed release, run without importing vLLM (which takes ten seconds)."""
    root = installed_vllm()
    text = (root / "distributed/kv_transfer/kv_connector/v1/mooncake/store/data.py").read_text()
    nodes = [n for n in ast.parse(text).body if isinstance(n, ast.ClassDef) and n.name in ("KeyMetadata", "PoolKey")]
    future = ast.ImportFrom("__future__", [ast.alias("annotations")], 0)
    module = ast.fix_missing_locations(ast.Module([future, *nodes], []))
    names: dict[str, Any] = {"dataclass": dataclasses.dataclass, "__name__": "upstream"}
    sys.modules["upstream"] = type(sys)("upstream")  # dataclasses look their module up
    try:
        exec(compile(module, "data.py", "exec"), names)
    finally:
        del sys.modules["upstream"]
    return names


@pytest.mark.needs("cpu-stack")
def test_the_installed_release_makes_the_same_prefix() -> None:
    names = upstream()
    for prefix, namespace, rank in (("", "", Rank()), ("team-a", "@store_pp:1", Rank(3, 1, 0, 2))):
        meta = names["KeyMetadata"]("tiny", rank.tp, rank.pcp, rank.dcp, rank.pp, 1, prefix, namespace)
        theirs = names["PoolKey"].build_prefix(meta)
        assert theirs == key_prefix("/models/tiny", prefix, namespace, rank, 1)
        assert names["PoolKey"](meta, "ab").to_string() == f"{theirs}@ab"
    root = installed_vllm()
    worker = (root / "distributed/kv_transfer/kv_connector/v1/mooncake/store/worker.py").read_text()
    assert 'model_name=model_config.model.rstrip("/").split("/")[-1]' in worker
    hashing = (root / "v1/core/kv_cache_utils.py").read_text()
    assert 'DEFAULT_NONE_HASH_SEED = "vllm-none-hash"' in hashing
    assert 'return [("lora", lora_request.lora_name, lora_request.lora_path)]' in hashing


def test_seeds_and_ranks() -> None:
    assert effective_seed(None, "sha256") == effective_seed("vllm-none-hash", "sha256")
    assert effective_seed(None, "xxhash") == RANDOM_SEED
    assert len(ranks(2, 1, 1, 1, kv_heads=2)) == 2
    assert len(ranks(2, 1, 1, 1, kv_heads=1)) == 1, "replicas of one KV head share a key"
    assert len(ranks(2, 1, 2, 2, kv_heads=1)) == 4


# Pairs ---------------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two directories with one last name: equal configurations, other weights."""
    cache = tmp_path_factory.mktemp("cache")
    base = ensure_model("tiny-base", cache)
    sibling = ensure_model("tiny-sibling", cache, same_name_as="tiny-base")
    return {"base": str(base.path), "sibling": str(sibling.path)}


def deployed(name: str, model: str, *words: str, **changes: Any) -> Deployed:
    extra = changes.pop("extra", None)
    transfer = TRANSFER | changes.pop("transfer", {}) | ({"kv_connector_extra_config": extra} if extra else {})
    command = ["vllm", "serve", model, "--block-size", "32", "--kv-transfer-config", json.dumps(transfer), *words]
    changes.setdefault("env", {"PYTHONHASHSEED": "0"})
    changes.setdefault("store_config", POOL)
    return Deployed(name=name, source="fleet.toml", command=command, **changes)


def pair(a: Deployed, b: Deployed, *, tenants: bool = False) -> Relationship:
    return compare_pair(identity_of(a), identity_of(b), tenants=tenants)


def test_equal_engines_share(models: dict[str, str]) -> None:
    found = pair(deployed("a", models["base"]), deployed("b", models["base"]))
    assert (found.relation, found.directions) == ("shares", ("a <- b", "b <- a"))


def test_sibling_weights_are_unsafe_and_a_prefix_mends_it(models: dict[str, str]) -> None:
    found = pair(deployed("a", models["base"]), deployed("b", models["sibling"]))
    assert found.relation == "UNSAFE"
    assert [text.split(":")[0] for text in found.why] == ["weights"]
    assert "cache_prefix" in found.mend
    apart = pair(deployed("a", models["base"]), deployed("b", models["sibling"], extra={"cache_prefix": "b"}))
    assert (apart.relation, apart.directions) == ("apart", ())


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--dtype", "float16"), "dtype"),
        (("--kv-cache-dtype", "fp8"), "KV dtype"),
        (("--quantization", "fp8"), "quantisation"),
        (("--hf-overrides", '{"rope_parameters": {"rope_theta": 500000.0}}'), "config.rope_parameters"),
        (("--hf-overrides.rms_norm_eps", "0.001"), "config.rms_norm_eps"),
        (("--load-format=dummy",), "weights"),
        (("--speculative_config", '{"method": "eagle"}'), "speculative decoding"),
    ],
)
def test_whatever_changes_the_kv_and_not_the_key_is_unsafe(
    models: dict[str, str], words: tuple[str, ...], named: str
) -> None:
    found = pair(deployed("a", models["base"]), deployed("b", models["base"], *words))
    assert found.relation == "UNSAFE"
    assert any(text.startswith(f"{named}:") for text in found.why), found.why


@pytest.mark.parametrize(
    ("words", "changes"),
    [
        (("--dtype", "bfloat16"), {}),
        (("--kv-cache-dtype", "auto"), {}),
        (("--hf-overrides", '{"rope_parameters": {"rope_theta": 10000}}'), {}),
        (("--max-model-len", "512", "--tokenizer", "/other"), {}),
        ((), {"env": {"PYTHONHASHSEED": "0", "HF_TOKEN": "secret"}}),
    ],
)
def test_what_changes_nothing_is_no_alarm(
    models: dict[str, str], words: tuple[str, ...], changes: dict[str, Any]
) -> None:
    found = pair(deployed("a", models["base"]), deployed("b", models["base"], *words, **changes))
    assert found.relation == "shares", found.why


@pytest.mark.parametrize(
    ("words", "changes", "named"),
    [
        (("--block-size", "64"), {}, "--block-size"),
        (("--prefix-caching-hash-algo", "sha256_cbor"), {}, "--prefix-caching-hash-algo"),
        ((), {"env": {"PYTHONHASHSEED": "7"}}, "PYTHONHASHSEED"),
        ((), {"store_config": {"master_server_address": "10.0.0.2:50051"}}, "another pool"),
        ((), {"extra": {"store_tp_size": 4}}, "store_tp_size"),
    ],
)
def test_what_is_in_the_key_keeps_apart(
    models: dict[str, str], words: tuple[str, ...], changes: dict[str, Any], named: str
) -> None:
    found = pair(deployed("a", models["base"]), deployed("b", models["sibling"], *words, **changes))
    assert (found.relation, found.directions) == ("apart", ())
    assert named in found.why[0]


def test_equal_engines_that_cannot_share_are_named_too(models: dict[str, str]) -> None:
    found = pair(deployed("a", models["base"]), deployed("b", models["base"], env={}))
    assert found.relation == "lost"
    assert "vllm-none-hash" in found.why[0]
    xx = [deployed(n, models["base"], "--prefix-caching-hash-algo", "xxhash", env={}) for n in "ab"]
    assert pair(*xx).relation == "lost"


def test_a_tenant_keeps_apart_only_where_the_master_does(models: dict[str, str]) -> None:
    a = deployed("a", models["base"])
    b = deployed("b", models["sibling"], store_config={**POOL, "tenant_id": "b"})
    assert pair(a, b).relation == "UNSAFE"
    assert pair(a, b, tenants=True).relation == "apart"


def test_roles_and_ranks_give_directions(models: dict[str, str]) -> None:
    writer = deployed("w", models["base"], transfer={"kv_role": "kv_producer"}, extra={"enable_lookup": False})
    reader = deployed("r", models["sibling"], transfer={"kv_role": "kv_consumer"})
    assert pair(writer, reader).directions == ("r <- w",)
    assert pair(writer, deployed("w2", models["sibling"], transfer={"kv_role": "kv_producer"}, extra={"enable_lookup": False})).relation == "apart"  # fmt: skip
    one, two = deployed("one", models["base"]), deployed("two", models["base"], "-tp", "2")
    found = pair(one, two)
    assert (found.relation, found.directions) == ("UNSAFE", ("one <- two",))
    staged = pair(one, deployed("two", models["base"], "--pipeline-parallel-size=2"))
    assert (staged.relation, staged.directions) == ("UNSAFE", ("one <- two",))


def test_a_connector_inside_another_is_found(models: dict[str, str]) -> None:
    inner = {**TRANSFER, "kv_connector_extra_config": {"cache_prefix": "p"}}
    several = {"kv_connector": "MultiConnector", "kv_role": "kv_both"}
    nested = deployed("n", models["base"], transfer=several, extra={"connectors": [{"kv_connector": "X"}, inner]})
    assert (identity_of(nested).cache_prefix, identity_of(nested).reads) == ("p", True)
    assert pair(nested, deployed("b", models["sibling"])).relation == "apart"
    assert pair(nested, deployed("b", models["sibling"], extra={"cache_prefix": "p"})).relation == "UNSAFE"
    other = identity_of(deployed("o", models["base"], transfer={"kv_connector": "OffloadingConnector"}))
    assert not other.reads
    assert "its keys are not known here" in other.notes[0]


def test_an_adapter_with_other_bytes_at_one_path(models: dict[str, str], tmp_path: Path) -> None:
    places = []
    for content in (b"one", b"two"):
        place = tmp_path / content.decode()
        place.mkdir()
        (place / "adapter_model.safetensors").write_bytes(content)
        places.append(str(place))
    words = ("--enable-lora", "--lora-modules", "s=/adapters/s", '{"name": "t", "path": "/adapters/t"}')
    a = deployed("a", models["base"], *words, adapter_dirs={"s": places[0], "t": places[0]})
    b = deployed("b", models["base"], *words, adapter_dirs={"s": places[1], "t": places[0]})
    found = pair(a, b)
    assert found.relation == "UNSAFE"
    assert found.why == ("adapter s (/adapters/s): other bytes at the same path",)
    assert "cache_prefix" not in found.mend
    moved = deployed("b", models["base"], "--lora-modules", "s=/adapters/s2", adapter_dirs={"s": places[1]})
    assert pair(a, moved).relation == "shares", "the path is in the hash"
    unread = deployed("b", models["base"], "--lora-modules", "s=/adapters/s")
    assert pair(a, unread).relation == "UNKNOWN"


def test_an_adapter_that_cannot_be_read_is_unknown(
    models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(directory: Path) -> str:
        raise PermissionError(f"{directory} is another's")

    monkeypatch.setattr("fixtures.identity_sources.weights_digest", refused)
    one = identity_of(deployed("a", models["base"], "--lora-modules", f"s={tmp_path}"))
    assert one.adapters == {"s": (str(tmp_path), "unknown")}
    assert any("weights of adapter s cannot be read" in note for note in one.notes)


def test_adapters_that_a_running_engine_lists_count(models: dict[str, str], tmp_path: Path) -> None:
    place = tmp_path / "s"
    place.mkdir()
    (place / "adapter_model.safetensors").write_bytes(b"one")
    long_ago, now = 1.0, time.time() + 60
    a, b = (deployed(n, models["base"], loaded={"s": str(place)}, started_s=now) for n in "ab")
    assert pair(a, b).relation == "shares"
    old = deployed("b", models["base"], loaded={"s": str(place)}, started_s=long_ago, model_dir=models["base"])
    found = pair(a, old)
    assert found.relation == "UNKNOWN"
    assert any(text.startswith("adapter s") for text in found.why)


def test_what_cannot_be_read_is_never_safe(models: dict[str, str]) -> None:
    hub = deployed("a", f"org/{Path(models['base']).name}")
    assert pair(hub, deployed("b", models["base"])).relation == "UNKNOWN"
    assert pair(hub, deployed("b", f"other-org/{Path(models['base']).name}")).relation == "UNKNOWN"
    commit = "a" * 40
    known = [deployed(n, "org/tiny", "--revision", commit, model_dir="") for n in "ab"]
    assert pair(*known).relation == "UNKNOWN", "its configuration is not known either"


# Parts ---------------------------------------------------------------------------------------------------------------
def test_command_lines_in_all_their_forms() -> None:
    text = "vllm serve /m --tensor_parallel_size=2 --kv-transfer-config.kv_connector X --kv-transfer-config.kv_connector_extra_config.cache_prefix p --enforce-eager"  # fmt: skip
    found = parse(text, "x")
    assert (found.model, found.get("tensor-parallel-size"), found.get("enforce-eager")) == ("/m", "2", "true")
    assert found.json("kv-transfer-config", "x") == {
        "kv_connector": "X",
        "kv_connector_extra_config": {"cache_prefix": "p"},
    }
    module = ["python", "-m", "vllm.entrypoints.openai.api_server", "--model", "/m", "-tp", "4", "--seed", "-1"]
    assert (parse(module, "x").model, parse(module, "x").get("tensor-parallel-size")) == ("/m", "4")
    assert parse(module, "x").get("seed") == "-1"
    with pytest.raises(UsageError, match=r"x: --config c.yaml is not read here"):
        parse("vllm serve --config c.yaml", "x")
    with pytest.raises(UsageError, match="not JSON"):
        parse("vllm serve /m --kv-transfer-config {", "x").json("kv-transfer-config", "x")


def test_rotary_settings_are_one_thing_in_all_releases() -> None:
    old = effective_config({"rope_theta": 10000.0, "rope_scaling": None}, {})
    new = effective_config({"rope_parameters": {"rope_type": "default", "rope_theta": 10000}}, {})
    assert old == new
    assert old != effective_config({"rope_theta": 10000.0, "rope_scaling": {"rope_type": "yarn", "factor": 4}}, {})


def test_a_hub_blob_is_known_by_its_name(tmp_path: Path) -> None:
    blob = tmp_path / ("ab" * 32)
    blob.write_bytes(b"never read")
    link = tmp_path / "model.safetensors"
    link.symlink_to(blob)
    assert file_digest(link) == "ab" * 32
    assert file_digest(blob) != "ab" * 32, "only where a link of the hub's cache says so"


# The command ---------------------------------------------------------------------------------------------------------
def fleet_file(path: Path, models: list[str]) -> str:
    rows = []
    for i, model in enumerate(models):
        command = ["vllm", "serve", model, "--block-size", "32", "--kv-transfer-config", json.dumps(TRANSFER)]
        rows += ["[[engine]]", f"name = 'e{i}'", f"command = {json.dumps(command)}", 'env = { PYTHONHASHSEED = "0" }']
        rows.append('store_config = { master_server_address = "10.0.0.1:1" }')
    path.write_text("\n".join(rows))
    return str(path)


def test_the_command_says_what_is_unsafe(
    tmp_path: Path, models: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    unsafe = fleet_file(tmp_path / "fleet.toml", [models["base"], models["base"], models["sibling"]])
    result = tmp_path / "result.json"
    assert main([unsafe, "--json", str(result)]) == 10
    text = capsys.readouterr().out
    assert text.count("UNSAFE") == 2
    assert "mend: merge into --kv-transfer-config of e2" in text
    data = json.loads(result.read_text())
    assert (data["safe"], len(data["pairs"])) == (False, 3)
    assert data["engines"][0]["key_prefix"].endswith("@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0")
    assert main([fleet_file(tmp_path / "safe.toml", [models["base"]] * 2), "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["safe"] is True


def test_a_stack_spec_is_a_fleet_too(models: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVGATES_CACHE", str(Path(models["base"]).parents[2]))
    engines, _ = read_fleet(["cpu"])
    assert [e.name for e in engines] == ["e0", "e1"]
    assert compare_pair(*engines).relation == "shares"
    assert main(["cpu", "--json", "-"]) == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[engine]]\nname = 'a'\n", "command"),
        (
            "[[engine]]\nname = 'a'\ncommand = 'vllm serve'\n[[engine]]\nname='b'\ncommand='vllm serve /m'\n",
            "no --model",
        ),
        ("[[engine]]\nname = 'a'\ncommand = 'vllm serve /m'\n", "two are needed"),
        ("[[engine]]\nname = 'a'\ncommand = 'vllm serve /m'\nseed = 1\n", "unknown field"),
        ("engine = [", "not valid TOML"),
    ],
)
def test_bad_input_is_one_line_and_exit_4(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text(text)
    assert main([str(path)]) == 4
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert main([str(tmp_path / "missing.toml")]) == 4


# A running engine ----------------------------------------------------------------------------------------------------
METRICS = (
    'vllm:cache_config_info{block_size="32",cache_dtype="auto",prefix_caching_hash_algo="sha256",engine="0"} 1.0\n'
)


class _Answers(http.server.BaseHTTPRequestHandler):
    """The three addresses of an engine that are asked for, as vLLM answers them (a real one takes half a minute to start)."""

    model = ""

    def do_GET(self) -> None:
        texts = {
            "/v1/models": json.dumps({"data": [{"id": "tiny", "root": self.model}]}),
            "/version": json.dumps({"version": "0.32.0"}),
            "/metrics": "# TYPE vllm:cache_config_info gauge\n" + METRICS,
        }
        text = texts.get(self.path)
        self.send_response(200 if text else 404)
        self.end_headers()
        self.wfile.write((text or "").encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Silent."""


@contextmanager
def serving(model: str) -> Iterator[str]:
    handler = type("Answers", (_Answers,), {"model": model})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def test_an_engine_elsewhere_is_never_called_safe(models: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fixtures.identity_live._process", lambda root: None)  # as for a process of another host
    with serving(models["base"]) as one, serving(models["base"]) as two:
        engines, _ = read_fleet([one, two + "/v1"])
        assert compare_pair(*engines).relation == "UNKNOWN"
        assert engines[0].block_tokens == "32"
        assert main([one, two]) == 10


def test_a_local_engine_is_read_from_its_process(models: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["vllm", "serve", Path(models["base"]).name, "--kv-transfer-config", json.dumps(TRANSFER)]
    env = {"PYTHONHASHSEED": "3", "API_KEY": "secret"}
    folder = str(Path(models["base"]).parent)
    monkeypatch.setattr("fixtures.identity_live._process", lambda root: (env, command, folder, time.time()))
    with serving(Path(models["base"]).name) as one, serving(Path(models["base"]).name) as two:
        engines, _ = read_fleet([one, two])
    assert compare_pair(*engines).relation == "shares"
    assert (engines[0].hash_seed, engines[0].block_tokens) == ("3", "32")
    assert "secret" not in repr(engines)
    # Files that changed after the start are not what the engine holds.
    monkeypatch.setattr("fixtures.identity_live._process", lambda root: (env, command, folder, 1.0))
    with serving(Path(models["base"]).name) as one, serving(Path(models["base"]).name) as two:
        engines, _ = read_fleet([one, two])
    found = compare_pair(*engines)
    assert (found.relation, found.why) == ("UNKNOWN", ("weights: unknown / unknown",))


def test_the_process_behind_a_port_is_found() -> None:
    from fixtures.identity_live import _process

    with serving("/m") as url:
        found = _process(url)
        assert _process(url.replace("127.0.0.1", "localhost")) == found
        # The same port of another host is another engine (192.0.2.0/24 is no host's: RFC 5737).
        assert _process(url.replace("127.0.0.1", "192.0.2.1")) is None
    assert found is not None
    assert found[1][0]  # this very process
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        assert main([f"http://127.0.0.1:{closed.getsockname()[1]}", "cpu"]) == 4


def test_identities_know_their_weights_by_content(models: dict[str, str], tmp_path: Path) -> None:
    copied = tmp_path / "elsewhere" / Path(models["base"]).name
    shutil.copytree(models["base"], copied)
    a, b = (identity_of(deployed("a", m)) for m in (models["base"], str(copied)))
    assert isinstance(a, EngineIdentity)
    assert a.content["weights"] == b.content["weights"]
    (copied / "model.safetensors").write_bytes(b"other")
    assert identity_of(deployed("b", str(copied))).content["weights"] != a.content["weights"]


# The gates' own table ------------------------------------------------------------------------------------------------
FORETOLD = {
    "weights.default": "UNSAFE",
    "weights.prefix": "apart",
    "weights.tenant": "UNSAFE",
    "position.default": "UNSAFE",
    "position.prefix": "apart",
    "dtype.default": "UNSAFE",
    "dtype.prefix": "apart",
    "kv-dtype.default": "UNSAFE",
    "kv-dtype.prefix": "apart",
    "quantization.default": "UNSAFE",
    "block-size.default": "lost",
    "hash-algorithm.default": "lost",
    "tokenizer.default": "shares",
    "tensor-parallel.default": "UNSAFE",
    "pipeline-parallel.default": "UNSAFE",
    "kv-layout.default": "UNSAFE",
    "kv-layout.prefix": "apart",
    "triton.default": "UNSAFE",
    "flashinfer.default": "UNSAFE",
    "flashinfer.prefix": "apart",
}
"""What the key model says of every case of ``I.engine`` that needs no second environment. What engines did: docs/track-record.md."""


def test_the_gates_cases_are_all_foretold() -> None:
    names = {c.id.removeprefix("I.engine.") for c in OTHER_ENGINE.cases() if "second-stack" not in c.needs}
    assert names == set(FORETOLD)


@pytest.mark.parametrize(("name", "relation"), FORETOLD.items())
def test_the_key_model_foretells_a_gates_case(
    name: str, relation: str, models: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVGATES_CACHE", str(Path(models["base"]).parents[2]))
    spec = load_spec("cpu")
    model = resolve_model(spec.engines[0].model)
    stack: Any = SimpleNamespace(spec=spec, names=["e0", "e1"], engines={"e0": SimpleNamespace(model=model)})
    key, protection = name.split(".")
    shield = PROTECTIONS[protection]
    changes = merged(spec.engine("e1"), {**SETTINGS[key].changes(stack), **shield.changes})
    changes.pop("kv_bytes_per_token", None)
    ours, theirs = deployed_of(spec.with_engine("e1", **changes), "cpu")
    if shield.tenant_id:
        theirs = dataclasses.replace(
            theirs, store_config={**(theirs.store_config or {}), "tenant_id": shield.tenant_id}
        )
    assert pair(ours, theirs).relation == relation
