"""What runs of one host must not take from each other, and what a run leaves that was killed just before it wrote that down."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from fixtures.errors import UsageError
from fixtures.runtimes.janitor import DRAFT_AGE_S
from fixtures.runtimes.journal import Directory, Members
from fixtures.runtimes.ports import PortLeases
from fixtures.runtimes.proc import ProcessId
from fixtures.runtimes.process import ProcessRuntime, clean_dead_runs
from suite.selftest.process_helpers import closing_runtime, no_room_after

pytestmark = pytest.mark.selftest


def test_runs_with_different_state_directories_are_not_given_the_same_port(tmp_path: Path) -> None:
    first, second = (PortLeases(tmp_path / name) for name in ("a", "b"))
    for name in ("a", "b"):
        (tmp_path / name / "ports").mkdir(parents=True)
    port = first.lease()
    try:
        assert not second._take(port)
        assert list((tmp_path / "b" / "ports").iterdir()) == []
        first.release_all()
        assert second._take(port)
    finally:
        first.release_all()
        second.release_all()


def test_what_a_killed_run_had_not_written_down_yet_is_swept_and_nothing_else(state: Path, tmp_path: Path) -> None:
    with closing_runtime(tmp_path) as live:
        mine = live.lease_port()
        (state / "ports" / "19999").touch()
        young, old = (state / "runs" / f"{name}.new" for name in ("young", "old"))
        for draft in (young, old):
            draft.touch()
        long_ago = time.time() - DRAFT_AGE_S - 1
        os.utime(old, (long_ago, long_ago))
        assert clean_dead_runs(state) == []
        assert [path.name for path in (state / "ports").iterdir()] == [str(mine)]
        assert not old.exists()
        assert young.exists()
        young.unlink()


def test_a_full_state_directory_is_one_clear_error_and_keeps_no_run_from_ending(state: Path, tmp_path: Path) -> None:
    runtime = ProcessRuntime(tmp_path, guard=False)
    journal = runtime._journal
    try:
        whole = journal.path.read_bytes()
        with no_room_after(len(whole) + 5):
            with pytest.raises(UsageError, match=r"state directory .*; make room there, or set KVGATES_STATE_DIR"):
                journal.write(Directory("/nowhere"))
            journal.note(Members("m", (ProcessId(1, 1),)))
            assert journal.path.read_bytes() == whole, "no torn line for others to follow"
            assert runtime.close() == []
    finally:
        runtime.close(0.0)
