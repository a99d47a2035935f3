"""The process runtime on real small processes: starting, watching, signalling, stopping."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fixtures.errors import HarnessError, UsageError
from fixtures.runtimes import proc
from fixtures.runtimes.base import Launch
from fixtures.runtimes.proc import ProcessId, is_alive
from fixtures.runtimes.process import ProcessRuntime, snapshot, wait_ready
from suite.selftest.process_helpers import (
    BOUND_S,
    closing_runtime,
    ids,
    python_launch,
    start,
    until,
    wait_dead,
    wait_members,
)
from suite.selftest.runtime_programs import ENDLESS, FAMILY, STUBBORN, STUBBORN_ORPHAN

pytestmark = pytest.mark.selftest


@pytest.fixture
def runtime(state: Path, tmp_path: Path) -> Iterator[ProcessRuntime]:
    with closing_runtime(tmp_path / "run") as running:
        yield running


# Ready or dead ------------------------------------------------------------------------------------------------------
def test_ready(runtime: ProcessRuntime, tmp_path: Path) -> None:
    unit = runtime.start(python_launch(tmp_path, "print('up', flush=True)\n" + ENDLESS))
    attempt = wait_ready(unit, lambda: unit.log_tail() == ["up"], bound_s=BOUND_S, poll_s=0.01)
    assert (attempt.result, attempt.unit, attempt.exit_code, attempt.log_tail) == ("ready", "e0", None, ("up",))
    assert attempt.elapsed_s < BOUND_S


def test_dead_with_its_last_lines(runtime: ProcessRuntime, tmp_path: Path) -> None:
    program = (
        "import sys\nfor i in range(30): print('line', i, flush=True)\nprint('no config', file=sys.stderr)\nsys.exit(3)"
    )
    unit = runtime.start(python_launch(tmp_path, program))
    attempt = wait_ready(unit, lambda: False, bound_s=BOUND_S, poll_s=0.01)
    assert (attempt.result, attempt.exit_code) == ("dead", 3)
    assert "no config" in attempt.log_tail
    assert len(attempt.log_tail) == 20
    assert attempt.elapsed_s < BOUND_S


def test_dead_although_something_else_answers(runtime: ProcessRuntime, tmp_path: Path) -> None:
    unit = runtime.start(python_launch(tmp_path, "raise SystemExit(1)"))
    until(lambda: unit.exit_code() == 1)
    assert wait_ready(unit, lambda: True, bound_s=BOUND_S).result == "dead"


def test_neither(runtime: ProcessRuntime, tmp_path: Path) -> None:
    unit = runtime.start(python_launch(tmp_path, ENDLESS))
    attempt = wait_ready(unit, lambda: False, bound_s=0.1, poll_s=0.02)
    assert (attempt.result, attempt.exit_code) == ("neither", None)


def test_progress_tells_elapsed_and_expected(runtime: ProcessRuntime, tmp_path: Path) -> None:
    seen: list[tuple[str, float | None]] = []

    class Listener:
        def waiting(self, what: str, elapsed_s: float, expected_s: float | None, bound_s: float) -> None:
            seen.append((what, expected_s))

        def done(self, what: str, elapsed_s: float, came_true: bool) -> None:
            seen.append((what, None))

    unit = runtime.start(python_launch(tmp_path, ENDLESS))
    wait_ready(unit, lambda: False, bound_s=0.05, expected_s=35.0, poll_s=0.02, progress=Listener())
    assert ("engine e0 starting", 35.0) in seen


def test_a_second_start_shows_its_own_log_only(runtime: ProcessRuntime, tmp_path: Path) -> None:
    for text in ("first", "second"):
        unit = runtime.start(python_launch(tmp_path, f"print({text!r})"))
        wait_dead(unit)
    assert unit.log_tail() == ["second"]
    assert unit.log_path.read_text().split() == ["first", "second"]


# Starting -----------------------------------------------------------------------------------------------------------
def test_environment_is_the_launch_and_nothing_inherited(
    runtime: ProcessRuntime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEAK", "1")
    program = "import os\nprint(','.join(sorted(os.environ)), flush=True)\n" + ENDLESS
    unit = start(runtime, tmp_path, program, LC_CTYPE="C.UTF-8", TMPDIR=str(tmp_path / "e0" / "tmp"))
    assert unit.log_tail() == ["KVGATES_UNIT,LC_CTYPE,PATH,SPT_NOENV,TMPDIR"]
    assert (tmp_path / "e0" / "tmp").is_dir()
    runtime.close(0.0)
    assert not (tmp_path / "e0" / "tmp").exists()
    assert unit.log_path.exists()


def test_a_command_that_is_not_there_is_a_usage_error(runtime: ProcessRuntime, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^e0: cannot start no-such-program: No such file"):
        runtime.start(Launch("e0", "engine", ("no-such-program",), {"PATH": "/bin"}, tmp_path / "e0"))


def test_a_port_in_use_is_a_usage_error(runtime: ProcessRuntime, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(UsageError, match=rf"^e0: port {port} is in use"):
            runtime.start(Launch("e0", "engine", ("true",), {"PATH": "/bin"}, tmp_path / "e0", ports=(port,)))


def test_a_running_unit_is_not_started_twice(runtime: ProcessRuntime, tmp_path: Path) -> None:
    first = runtime.start(python_launch(tmp_path, ENDLESS))
    with pytest.raises(HarnessError, match="e0 is running already"):
        runtime.start(python_launch(tmp_path, ENDLESS))
    first.signal(signal.SIGKILL)
    wait_dead(first)
    assert runtime.start(python_launch(tmp_path, ENDLESS)).pid != first.pid


# Trees and signals --------------------------------------------------------------------------------------------------
def test_the_tree_is_found_by_parent_session_and_marker(runtime: ProcessRuntime, tmp_path: Path) -> None:
    unit = start(runtime, tmp_path, FAMILY)
    wait_members(unit, 4)
    processes = unit.processes()
    assert processes[0].pid == unit.pid
    assert sum(p.ppid == unit.pid for p in processes) == 1, "two were reparented"
    # The first process killed alone: its child is reparented too, all three must still be found.
    assert proc.send(ids(unit)[0], signal.SIGKILL)
    wait_dead(unit)
    assert {p.pid for p in unit.processes()} == {p.pid for p in processes[1:]}
    assert unit.exit_code() == -signal.SIGKILL


def test_the_marker_leads_to_reparented_processes_never_seen_before(runtime: ProcessRuntime, tmp_path: Path) -> None:
    unit = start(runtime, tmp_path, FAMILY)
    wait_members(unit, 4)
    everyone = set(ids(unit))
    assert {stat.id for stat in proc.find_tree(unit.marker)} == everyone
    assert proc.send(ids(unit)[0], signal.SIGKILL)
    wait_dead(unit)
    (found,) = proc.find_tree(unit.marker)
    assert found.id in everyone
    assert not proc.find_tree(unit.marker[:-1]), "a marker is not matched by its beginning"


def test_freeze_thaw_and_kill_reach_the_whole_tree(runtime: ProcessRuntime, tmp_path: Path) -> None:
    unit = start(runtime, tmp_path, FAMILY)
    wait_members(unit, 4)
    tree = ids(unit)
    assert sorted(unit.signal(signal.SIGSTOP)) == sorted(who.pid for who in tree)
    until(lambda: all(proc.process_state(who.pid) == "T" for who in tree))
    assert unit.alive()
    assert set(snapshot(unit).states.values()) == {"T"}
    unit.signal(signal.SIGCONT)
    until(lambda: all(proc.process_state(who.pid) in "SR" for who in tree))
    unit.signal(signal.SIGKILL)
    until(lambda: not any(map(is_alive, tree)))
    wait_dead(unit)
    assert unit.processes() == []


def test_a_recycled_pid_is_never_signalled(runtime: ProcessRuntime, tmp_path: Path) -> None:
    unit = start(runtime, tmp_path, "print('up', flush=True)\n" + ENDLESS)
    who = ids(unit)[0]
    impostor = ProcessId(who.pid, who.start_ticks - 1)
    assert not proc.send(impostor, signal.SIGKILL)
    assert not is_alive(impostor)
    assert proc.find_tree("no-such-run", [impostor]) == []
    assert is_alive(who)


# Stopping -----------------------------------------------------------------------------------------------------------
def test_an_orderly_stop_leaves_nothing_to_report(runtime: ProcessRuntime, tmp_path: Path) -> None:
    unit = start(runtime, tmp_path, "print('up', flush=True)\n" + ENDLESS)
    assert runtime.stop(unit, BOUND_S) == []
    assert unit.exit_code() == -signal.SIGTERM
    assert runtime.stop(unit, BOUND_S) == []


def test_a_frozen_unit_stops_in_order(runtime: ProcessRuntime, tmp_path: Path) -> None:
    unit = start(runtime, tmp_path, "print('up', flush=True)\n" + ENDLESS)
    unit.signal(signal.SIGSTOP)
    assert runtime.stop(unit, BOUND_S) == []
    assert unit.exit_code() == -signal.SIGTERM


@pytest.mark.parametrize("frozen", [False, True])
def test_what_ignores_the_stop_is_killed_and_named(runtime: ProcessRuntime, tmp_path: Path, frozen: bool) -> None:
    unit = start(runtime, tmp_path, STUBBORN)
    tree = ids(unit)
    comm = unit.processes()[0].title
    if frozen:
        unit.signal(signal.SIGSTOP)
    leftovers = runtime.stop(unit, 0.1)
    assert leftovers == [f"e0: process {unit.pid} ({comm}) did not end within 0.1 s: killed"]
    assert not any(map(is_alive, tree))


def test_orphans_of_a_dead_unit_are_stopped_and_named(
    runtime: ProcessRuntime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fixtures.runtimes.unit.OUTLIVE_S", 0.05)
    unit = start(runtime, tmp_path, FAMILY)
    wait_members(unit, 4)
    tree = ids(unit)
    _, *rest = unit.processes()
    assert proc.send(tree[0], signal.SIGKILL)
    leftovers = runtime.stop(unit, BOUND_S)
    assert leftovers == [f"e0: process {p.pid} ({p.title}) outlived the first one: SIGTERM" for p in rest]
    assert not any(map(is_alive, tree))


def test_what_ignores_both_requests_is_named_once(
    runtime: ProcessRuntime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fixtures.runtimes.unit.OUTLIVE_S", 0.05)
    unit = start(runtime, tmp_path, STUBBORN_ORPHAN)
    _, orphan = unit.processes()
    leftovers = runtime.stop(unit, 0.5)
    assert leftovers == [f"e0: process {orphan.pid} ({orphan.title}) did not end within 0.5 s: killed"]


def test_close_stops_everything_and_leaves_no_state(
    runtime: ProcessRuntime, state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fixtures.runtimes.unit.OUTLIVE_S", 0.05)
    units = [start(runtime, tmp_path, FAMILY, name) for name in ("e0", "e1")]
    for unit in units:
        wait_members(unit, 4)
    trees = [who for unit in units for who in ids(unit)]
    short = runtime.short_dir("e0")
    (short / "socket").touch()
    runtime.lease_port()
    leftovers = runtime.close(BOUND_S)
    assert not any(map(is_alive, trees))
    assert len(leftovers) == 6, "SIGTERM went to the first processes alone, and their descendants do not end with them"
    assert all("outlived the first one" in text for text in leftovers)
    assert [path for path in state.rglob("*") if path.parent != state] == []
    assert runtime.close() == []
    assert units[0].processes() == []
    with pytest.raises(HarnessError, match="closed"):
        runtime.lease_port()


def test_close_finds_a_process_that_no_handle_knows(runtime: ProcessRuntime, state: Path, tmp_path: Path) -> None:
    unit = start(runtime, tmp_path, "print('up', flush=True)\n" + ENDLESS)
    stray_marker = unit.marker.replace("/e0/1", "/e1/2")  # as an interrupt between fork and bookkeeping leaves it
    command = [sys.executable, "-S", "-c", ENDLESS]
    with subprocess.Popen(command, env={proc.MARKER: stray_marker}, start_new_session=True) as stray:
        try:
            until(lambda: proc.carries_marker(stray.pid, stray_marker))
            (leftover,) = runtime.close(BOUND_S)
            assert leftover.startswith(f"process {stray.pid} (")
            assert stray.wait(BOUND_S) == -signal.SIGKILL
        finally:
            stray.kill()


# Cost ---------------------------------------------------------------------------------------------------------------
def test_starting_and_looking_cost_little(runtime: ProcessRuntime, tmp_path: Path) -> None:
    def best_of_five(action: Callable[[int], object]) -> float:
        times = []
        for i in range(5):
            started = time.perf_counter()
            action(i)
            times.append(time.perf_counter() - started)
        return min(times)

    assert best_of_five(lambda i: runtime.start(python_launch(tmp_path, ENDLESS, f"e{i}"))) < 0.05
    unit = runtime.start(python_launch(tmp_path, ENDLESS, "looked-at"))
    assert best_of_five(lambda _: unit.processes()) < 0.05
    assert best_of_five(lambda _: unit.alive()) < 0.005
