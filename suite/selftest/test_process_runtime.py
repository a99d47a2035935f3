"""The process runtime on real small processes: nothing of a unit survives, and nothing else is touched."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest

from fixtures.errors import HarnessError, UsageError
from fixtures.runtimes import proc
from fixtures.runtimes.base import Launch
from fixtures.runtimes.ports import lock_file, port_range
from fixtures.runtimes.proc import ProcessId, is_alive
from fixtures.runtimes.process import CLOSE_GRACE_S, ProcessRuntime, clean_dead_runs, snapshot, unix_sockets, wait_ready
from fixtures.runtimes.shm import own_files
from fixtures.runtimes.state import SOCKET_PATH_BYTES, STATE_DIR_VARIABLE, state_dir
from fixtures.runtimes.unit import Unit
from fixtures.waiting import wait_for
from suite.selftest.runtime_programs import ENDLESS, FAMILY, FORKER, LEASER, RUNNER, SHARER, STUBBORN

pytestmark = pytest.mark.selftest

BOUND_S = 10.0
PROJECT = Path(__file__).resolve().parents[2]


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A state directory of the test's own with a path as short as the real one."""
    with tempfile.TemporaryDirectory(prefix="kvg-") as folder:
        monkeypatch.setenv(STATE_DIR_VARIABLE, folder)
        yield state_dir()
        clean_dead_runs(Path(folder))  # a failed test leaves no process either


@pytest.fixture
def runtime(state: Path, tmp_path: Path) -> Iterator[ProcessRuntime]:
    running = ProcessRuntime(tmp_path / "run", guard=False)
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


def test_reparented_processes_are_found_by_somebody_who_never_saw_them(runtime: ProcessRuntime, tmp_path: Path) -> None:
    unit = start(runtime, tmp_path, FAMILY)
    wait_members(unit, 4)
    everyone = set(ids(unit))
    assert proc.send(ids(unit)[0], signal.SIGKILL)
    wait_dead(unit)
    found = {stat.id for stat in proc.find_tree(unit.marker)}
    assert len(found & everyone) == len(found) == 3
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


def test_shared_memory_of_a_killed_unit_is_removed_and_no_other(runtime: ProcessRuntime, tmp_path: Path) -> None:
    victim, other = (start(runtime, tmp_path, SHARER, name) for name in ("e0", "e1"))
    mine = SharedMemory(create=True, size=64)
    try:
        assert {name[:3] for name in shm_of(victim)} == {"psm", "sem"}
        victim.signal(signal.SIGKILL)
        wait_dead(victim)
        assert shm_of(victim) <= set(own_files()), "a killed unit leaves its shared memory"
        leftovers = runtime.stop(victim, BOUND_S)
        assert sorted(text.split()[3] for text in leftovers) == sorted(shm_of(victim))
        assert not shm_of(victim) & set(own_files())
        assert shm_of(other) <= set(own_files())
        runtime.close(0.0)
        assert not shm_of(other) & set(own_files())
        assert mine.name in own_files()
    finally:
        mine.close()
        mine.unlink()


def test_shared_memory_that_was_there_before_is_not_the_units(state: Path, tmp_path: Path) -> None:
    mine = SharedMemory(create=True, size=64)
    runtime = ProcessRuntime(tmp_path, guard=False)
    try:
        unit = start(runtime, tmp_path, f"file = open('/dev/shm/{mine.name}')\nprint('up', flush=True)\n{ENDLESS}")
        mine.close()
        unit.signal(signal.SIGKILL)
        assert runtime.close(0.0) == []
        assert mine.name in own_files()
    finally:
        runtime.close(0.0)
        mine.unlink()


def test_shared_memory_in_use_by_another_unit_is_removed_with_that_one(runtime: ProcessRuntime, tmp_path: Path) -> None:
    first = start(runtime, tmp_path, SHARER, "e0")
    (name,) = (name for name in shm_of(first) if name.startswith("psm_"))
    opened = f"file = open('/dev/shm/{name}')\nprint('up', flush=True)\n{ENDLESS}"
    second = start(runtime, tmp_path, opened, "e1")
    first.signal(signal.SIGKILL)
    runtime.stop(first, 0.0)
    assert name in own_files()
    runtime.stop(second, BOUND_S)
    assert name not in own_files()


def test_shared_memory_in_use_by_a_stranger_is_looked_at_again_at_the_end(
    runtime: ProcessRuntime, tmp_path: Path
) -> None:
    unit = start(runtime, tmp_path, SHARER)
    names = sorted(shm_of(unit))
    unit.signal(signal.SIGKILL)
    with (Path("/dev/shm") / names[0]).open():
        assert runtime.stop(unit, 0.0) == [f"e0: shared memory {names[1]} (32 bytes) was left behind"]
        assert names[0] in own_files()
    assert runtime.close() == [f"shared: shared memory {names[0]} (4096 bytes) was left behind"]
    assert names[0] not in own_files()


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
        until(lambda: proc.carries_marker(stray.pid, stray_marker))
        (leftover,) = runtime.close(BOUND_S)
        assert leftover.startswith(f"process {stray.pid} (")
        assert stray.wait() == -signal.SIGKILL


# Killed runs --------------------------------------------------------------------------------------------------------
def test_what_a_killed_run_left_is_cleaned_at_the_next_start_and_only_that(state: Path, tmp_path: Path) -> None:
    with runner(tmp_path / "live", e0=SHARER) as (_, live):
        with runner(tmp_path / "dead", e0=SHARER, e1=FAMILY) as (dead_run, dead):
            dead_run.kill()
            dead_run.wait()
        assert len(processes_of(dead)) >= 5
        assert all(map(is_alive, processes_of(dead))), "nobody cleaned yet"
        assert Path(str(dead["short"])).is_dir()
        assert (tmp_path / "dead" / "e0" / "tmp").is_dir()
        assert shm_told(dead) <= set(own_files())

        following = ProcessRuntime(tmp_path / "next", guard=False)
        following.close()

        assert not any(map(is_alive, processes_of(dead)))
        assert not Path(str(dead["short"])).exists()
        assert not (tmp_path / "dead" / "e0" / "tmp").exists()
        assert (tmp_path / "dead" / "e0" / "log.txt").exists()
        assert not shm_told(dead) & set(own_files())
        assert not (state / "ports" / str(dead["port"])).exists()
        assert len([line for line in following.cleaned if " process " in line]) >= 5
        assert all(map(is_alive, processes_of(live)))
        assert Path(str(live["short"])).is_dir()
        assert (tmp_path / "live" / "e0" / "tmp").is_dir()
        assert shm_told(live) <= set(own_files())
        assert (state / "ports" / str(live["port"])).exists()
        assert clean_dead_runs(state) == []
    clean_dead_runs(state)
    assert not any(map(is_alive, processes_of(live)))
    assert not shm_told(live) & set(own_files())


def test_a_dead_run_is_cleaned_even_if_its_units_are_dead_too(state: Path, tmp_path: Path) -> None:
    with runner(tmp_path, e0=SHARER) as (run, told):
        run.kill()
        run.wait()
        for who in processes_of(told):
            assert proc.send(who, signal.SIGKILL)
        until(lambda: not any(map(is_alive, processes_of(told))))
        assert shm_told(told) <= set(own_files())
        clean_dead_runs(state)
        assert not shm_told(told) & set(own_files())


def test_two_janitors_do_not_clean_the_same_run(state: Path, tmp_path: Path) -> None:
    with runner(tmp_path, e0="print('up', flush=True)\n" + ENDLESS) as (run, told):
        run.kill()
        run.wait()
        (journal,) = (state / "runs").iterdir()
        other = lock_file(journal)
        assert other is not None
        assert clean_dead_runs(state) == []
        assert all(map(is_alive, processes_of(told)))
        os.close(other)
        assert len(clean_dead_runs(state)) == 3, "a process and two directories"


def test_the_guardian_cleans_up_at_once(state: Path, tmp_path: Path) -> None:
    with runner(tmp_path, "guard", e0=SHARER, e1=FAMILY) as (run, told):
        assert len(processes_of(told)) >= 5
        run.kill()
        run.wait()
        until(lambda: not any(map(is_alive, processes_of(told))), "the guardian to end the units")
        until(lambda: not list((state / "runs").iterdir()), "the guardian to finish")
        assert not shm_told(told) & set(own_files())
        assert not Path(str(told["short"])).exists()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_cleans_up_in_order(state: Path, tmp_path: Path, signum: signal.Signals) -> None:
    with runner(tmp_path, "guard", e0="print('up', flush=True)\n" + ENDLESS) as (run, told):
        run.send_signal(signum)
        out, err = run.communicate(timeout=BOUND_S)
        assert out.splitlines() == ["closing", "[]"], "units do not get the terminal's signal and end in order"
        assert "KeyboardInterrupt" in err
        assert not any(map(is_alive, processes_of(told)))
        assert [path for path in state.rglob("*") if path.parent != state] == []


def test_a_second_interrupt_hastens_the_end(state: Path, tmp_path: Path) -> None:
    with runner(tmp_path, e0=STUBBORN, e1=STUBBORN) as (run, told):
        started = time.monotonic()
        run.send_signal(signal.SIGINT)
        assert run.stdout is not None
        assert run.stdout.readline() == "closing\n"
        run.send_signal(signal.SIGINT)
        _, err = run.communicate(timeout=BOUND_S)
        assert time.monotonic() - started < CLOSE_GRACE_S / 2, "two units that ignore SIGTERM take twice the grace else"
        assert "KeyboardInterrupt" in err
        assert not any(map(is_alive, processes_of(told)))
        assert list((state / "runs").iterdir()) == []


def test_a_torn_journal_is_read_as_far_as_it_goes(state: Path, tmp_path: Path) -> None:
    with runner(tmp_path, e0="print('up', flush=True)\n" + ENDLESS) as (run, told):
        run.kill()
        run.wait()
        (journal,) = (state / "runs").iterdir()
        with journal.open("ab") as file:
            file.write(b'{"entry":"direc')
        (state / "runs" / "ffff.jsonl").write_bytes(b'{"entry":"own')
        clean_dead_runs(state)
        assert not any(map(is_alive, processes_of(told)))
        assert list((state / "runs").iterdir()) == []


def test_a_forked_child_neither_closes_the_run_nor_keeps_its_locks(
    runtime: ProcessRuntime, state: Path, tmp_path: Path
) -> None:
    unit = start(runtime, tmp_path, "print('up', flush=True)\n" + ENDLESS)
    command = [sys.executable, "-c", FORKER, str(tmp_path / "forker")]
    with subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE, text=True, start_new_session=True) as forker:
        assert forker.stdout is not None
        port = int(forker.stdout.readline())  # written by the child, after it tried to close
        assert (state / "ports" / str(port)).exists()
        assert len(list((state / "runs").iterdir())) == 2
        forker.kill()
        forker.wait()
        clean_dead_runs(state)
        assert not (state / "ports" / str(port)).exists()
        assert len(list((state / "runs").iterdir())) == 1, "only this test's own run is left"
        os.killpg(forker.pid, signal.SIGKILL)
    assert unit.alive()


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
