"""Leases and directories between runs, and what of processes and sockets enters the evidence."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fixtures.errors import HarnessError, UsageError
from fixtures.runtimes.base import Launch
from fixtures.runtimes.ports import port_range
from fixtures.runtimes.process import ProcessRuntime, snapshot, unix_sockets
from fixtures.runtimes.state import SOCKET_PATH_BYTES, STATE_DIR_VARIABLE, state_dir
from suite.selftest.process_helpers import (
    BOUND_S,
    PROJECT,
    closing_runtime,
    python_launch,
    start,
    until,
)
from suite.selftest.runtime_programs import ENDLESS, LEASER

pytestmark = pytest.mark.selftest


@pytest.fixture
def runtime(state: Path, tmp_path: Path) -> Iterator[ProcessRuntime]:
    with closing_runtime(tmp_path / "run") as running:
        yield running


# Ports and directories ----------------------------------------------------------------------------------------------
def test_two_runs_never_lease_the_same_port(state: Path) -> None:
    command = [sys.executable, "-c", LEASER, str(state), "200"]
    with contextlib.ExitStack() as stack:
        leasers = [
            stack.enter_context(
                subprocess.Popen(command, cwd=PROJECT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
            for _ in range(2)
        ]
        leased: list[int] = []
        for leaser in leasers:
            assert leaser.stdout is not None
            leased += json.loads(leaser.stdout.readline())
        assert len(set(leased)) == 400
        assert set(leased) <= set(port_range())
        assert len(list((state / "ports").iterdir())) == 400
        for leaser in leasers:
            leaser.communicate("done\n", timeout=BOUND_S)
    assert list((state / "ports").iterdir()) == []


def test_a_port_that_somebody_listens_on_is_not_leased(
    runtime: ProcessRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        monkeypatch.setattr("fixtures.runtimes.ports.port_range", lambda: [taken])
        with pytest.raises(HarnessError, match="no free TCP port"):
            runtime.lease_port()


def test_short_directories_leave_room_for_socket_names(runtime: ProcessRuntime) -> None:
    folder = runtime.short_dir("e0")
    assert runtime.short_dir("e0") == folder != runtime.short_dir("e1")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(folder / ("x" * (SOCKET_PATH_BYTES - len(str(folder)) - 1))))
    assert len(str(folder)) < 45


def test_a_state_directory_with_a_long_path_is_a_usage_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STATE_DIR_VARIABLE, str(tmp_path / ("long" * 20)))
    runtime = ProcessRuntime(tmp_path, guard=False)
    with pytest.raises(UsageError, match="set KVGATES_STATE_DIR to a shorter one"):
        runtime.short_dir("e0")
    runtime.close()


def test_a_state_directory_that_others_can_write_to_is_a_usage_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "link").symlink_to(tmp_path)
    for name in ("open", "link"):
        monkeypatch.setenv(STATE_DIR_VARIABLE, str(tmp_path / name))
        with pytest.raises(UsageError, match="not a directory that only you can write to"):
            state_dir()


# What enters the evidence -------------------------------------------------------------------------------------------
def test_environment_in_evidence_is_whitelisted_and_holds_no_secret(runtime: ProcessRuntime, tmp_path: Path) -> None:
    secret = "hunter2"
    env = {
        "PYTHONHASHSEED": "0",
        "VLLM_RPC_TIMEOUT": "10",
        "MOONCAKE_MASTER": f"redis://user:{secret}@host:1",
        "MC_FORCE_TCP": "1",
        "VLLM_API_KEY": secret,
        "MC_REDIS_PASSWORD": secret,
        "VLLM_SECRET_SAUCE": secret,
        "HF_TOKEN": secret,
        "HOME": "/",
    }
    launch = python_launch(tmp_path, "print('up', flush=True)\n" + ENDLESS, **env)
    argv = (*launch.argv, "--api-key", secret, f"--hf-token={secret}", "--max-num-batched-tokens", "8")
    unit = runtime.start(Launch("e0", "engine", argv, launch.env, launch.directory))
    until(unit.log_tail)
    (facts,) = unit.processes()
    assert {name: facts.env[name] for name in facts.env if name != "PATH"} == {
        "PYTHONHASHSEED": "0",
        "VLLM_RPC_TIMEOUT": "10",
        "MOONCAKE_MASTER": "redis://***@host:1",
        "MC_FORCE_TCP": "1",
    }
    assert secret not in repr(facts)
    assert facts.cmdline[-5:] == ("--api-key", "***", "--hf-token=***", "--max-num-batched-tokens", "8")


def test_a_renamed_process_keeps_its_environment_and_shows_its_title(runtime: ProcessRuntime, tmp_path: Path) -> None:
    program = "import setproctitle\nsetproctitle.setproctitle('VLLM::EngineCore')\nprint('up', flush=True)\n" + ENDLESS
    launch = python_launch(tmp_path, program, PYTHONHASHSEED="7")
    argv = (sys.executable, "-c", program)
    unit = runtime.start(Launch("e0", "engine", argv, launch.env, launch.directory))
    until(unit.log_tail)
    (facts,) = unit.processes()
    assert facts.title == "VLLM::EngineCore"
    assert facts.env["PYTHONHASHSEED"] == "7"


def test_sockets_show_a_path_that_was_bound_twice(runtime: ProcessRuntime, tmp_path: Path) -> None:
    path = runtime.short_dir("shared") / "lookup"
    program = f"""
import os, socket
path = {str(path)!r}
if os.path.exists(path): os.unlink(path)
server = socket.socket(socket.AF_UNIX); server.bind(path); server.listen()
mailbox = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); mailbox.bind("\\0mailbox" + str(os.getpid()))
four = socket.create_server(("127.0.0.1", 0)); six = socket.create_server(("::1", 0), family=socket.AF_INET6)
client = socket.create_connection(four.getsockname()); accepted, _ = four.accept()
print(four.getsockname()[1], six.getsockname()[1], flush=True)
{ENDLESS}"""
    units = {name: start(runtime, tmp_path, program, name) for name in ("e0", "e1")}
    taken = unix_sockets(units, "doubled")
    abstract = [(f"@mailbox{unit.pid}", False) for unit in units.values()]
    assert sorted((s.path, s.listening) for s in taken.unix) == sorted([(str(path), True)] * 2 + abstract)
    doubled = [s for s in taken.unix if s.path == str(path)]
    assert {(s.unit, s.pid) for s in doubled} == {(name, unit.pid) for name, unit in units.items()}
    assert len({s.inode for s in doubled}) == 2
    wanted = []
    for name, unit in units.items():
        four, six = unit.log_tail()[0].split()
        wanted += [f"{name} 127.0.0.1:{four}", f"{name} [::1]:{six}"]
    assert sorted(taken.listening) == sorted(wanted)
    counted = snapshot(units["e0"], "now")
    assert (counted.sockets, counted.threads, counted.label, counted.unit) == (6, 1, "now", "e0")
    assert counted.rss_bytes > 1_000_000
