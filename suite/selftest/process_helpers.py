"""What the selftests of the process runtime share: small runs, waits, and where they keep their state."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fixtures.runtimes.base import Launch
from fixtures.runtimes.proc import ProcessId
from fixtures.runtimes.process import ProcessRuntime, clean_dead_runs
from fixtures.runtimes.state import STATE_DIR_VARIABLE, state_dir
from fixtures.runtimes.unit import Unit
from fixtures.waiting import wait_for
from suite.selftest.runtime_programs import RUNNER

BOUND_S = 10.0
PROJECT = Path(__file__).resolve().parents[2]


@contextlib.contextmanager
def own_state_dir(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A state directory of the test's own with a path as short as the real one."""
    with tempfile.TemporaryDirectory(prefix="kvg-") as folder:
        monkeypatch.setenv(STATE_DIR_VARIABLE, folder)
        yield state_dir()
        clean_dead_runs(Path(folder))  # a failed test leaves no process either


@contextlib.contextmanager
def closing_runtime(folder: Path) -> Iterator[ProcessRuntime]:
    """A runtime without guardian that is closed at the end."""
    running = ProcessRuntime(folder, guard=False)
    yield running
    running.close(0.0)


def python_launch(folder: Path, program: str, name: str = "e0", **env: str) -> Launch:
    whole = {"PATH": os.environ["PATH"], **env}
    return Launch(name, "engine", (sys.executable, "-S", "-c", program), whole, folder / name)


def until(condition: Callable[[], object], what: str = "the selftest's condition") -> None:
    wait_for(what, lambda: bool(condition()), bound_s=BOUND_S, bound_source="selftest", poll_s=0.01)


def start(runtime: ProcessRuntime, folder: Path, program: str, name: str = "e0", **env: str) -> Unit:
    """Start a program that prints a line when it is up."""
    unit = runtime.start(python_launch(folder, program, name, **env))
    until(unit.log_tail, f"{name} to be up")
    return unit


def wait_dead(unit: Unit) -> None:
    until(lambda: not unit.alive(), f"{unit.launch.name} to die")


def wait_members(unit: Unit, count: int) -> None:
    until(lambda: len(unit.processes()) == count, f"{unit.launch.name} to have {count} processes")


def ids(unit: Unit) -> list[ProcessId]:
    return [ProcessId(p.pid, p.start_ticks) for p in unit.processes()]


@contextlib.contextmanager
def runner(
    folder: Path, guard: str = "alone", **programs: str
) -> Iterator[tuple[subprocess.Popen[str], dict[str, object]]]:
    """A small run in a process of its own, and what it says it made."""
    command = [sys.executable, "-c", RUNNER, str(folder), guard, json.dumps(programs)]
    with subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, json.loads(process.stdout.readline())
        finally:
            process.kill()


def processes_of(told: dict[str, object]) -> list[ProcessId]:
    listed = told["processes"]
    assert isinstance(listed, list)
    return [ProcessId(*pair) for pair in listed]


def shm_of(unit: Unit) -> set[str]:
    """Files of a unit that runs SHARER. (Other programs of the host make such files meanwhile.)"""
    return set(unit.log_tail()[0].split())


def shm_told(told: dict[str, object]) -> set[str]:
    logs = told["logs"]
    assert isinstance(logs, list)
    return set(logs[0][0].split())


@contextlib.contextmanager
def no_room_after(size_bytes: int) -> Iterator[None]:
    """Files cannot grow beyond a size: a write takes what fits and the next one fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
