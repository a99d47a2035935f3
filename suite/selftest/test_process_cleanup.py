"""Nothing of a run survives it, however it ends, and nothing of anybody else is touched."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest

from fixtures.runtimes import proc
from fixtures.runtimes.ports import lock_file
from fixtures.runtimes.proc import ProcessId, is_alive
from fixtures.runtimes.process import CLOSE_GRACE_S, ProcessRuntime, clean_dead_runs
from fixtures.runtimes.shm import own_files
from suite.selftest.process_helpers import (
    BOUND_S,
    PROJECT,
    closing_runtime,
    processes_of,
    runner,
    shm_of,
    shm_told,
    start,
    until,
    wait_dead,
)
from suite.selftest.runtime_programs import ENDLESS, FAMILY, FORKER, LATE_SHARER, SHARER, STUBBORN

pytestmark = pytest.mark.selftest


@pytest.fixture
def runtime(state: Path, tmp_path: Path) -> Iterator[ProcessRuntime]:
    with closing_runtime(tmp_path / "run") as running:
        yield running


# Shared memory ------------------------------------------------------------------------------------------------------
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
        for number in (
            signal.SIGSTOP,
            signal.SIGKILL,
        ):  # stopped first: the resource tracker tidies up after the others
            for who in processes_of(told):
                assert proc.send(who, number)
        until(lambda: not any(map(is_alive, processes_of(told))))
        assert shm_told(told) <= set(own_files())
        clean_dead_runs(state)
        assert not shm_told(told) & set(own_files())


def test_what_a_unit_made_after_its_run_was_killed_is_cleaned(state: Path, tmp_path: Path) -> None:
    with runner(tmp_path, e0=LATE_SHARER) as (run, told):
        run.kill()
        run.wait()
        assert proc.send(processes_of(told)[0], signal.SIGUSR1)
        log = tmp_path / "e0" / "log.txt"
        until(lambda: "psm_" in log.read_text())
        name = log.read_text().split()[-1]
        assert name in own_files()
        clean_dead_runs(state)
        assert name not in own_files()


def test_a_process_that_only_the_journal_knows_is_cleaned(state: Path, tmp_path: Path) -> None:
    with runner(tmp_path, e0=FAMILY) as (run, told):
        run.kill()
        run.wait()
        everyone = set(processes_of(told))

        def unmarked() -> set[ProcessId]:
            return {who for who in everyone if not Path(f"/proc/{who.pid}/environ").read_bytes()}

        until(lambda: len(unmarked()) == 2)  # the last one forked has its parent's environment until its exec
        left = unmarked()
        for who in everyone - left:
            assert proc.send(who, signal.SIGKILL)
        until(lambda: {who for who in everyone if is_alive(who)} == left)
        clean_dead_runs(state)
        assert not any(map(is_alive, left))


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


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
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
        try:
            assert forker.stdout is not None
            port = int(forker.stdout.readline())  # written by the child, after it tried to close
            assert (state / "ports" / str(port)).exists()
            assert len(list((state / "runs").iterdir())) == 2
            forker.kill()
            forker.wait()
            clean_dead_runs(state)
            assert not (state / "ports" / str(port)).exists()
            assert len(list((state / "runs").iterdir())) == 1, "only this test's own run is left"
        finally:
            os.killpg(forker.pid, signal.SIGKILL)
    assert unit.alive()
