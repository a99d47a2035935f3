"""Faults on a real master and a real process: each lands with a proof, each heals, and none outlives its stack."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from fixtures.errors import HarnessError
from fixtures.faults import Fault, Freeze, Kill, Restart, Stop
from fixtures.faults.base import Proof
from fixtures.healthy import prove_healthy
from fixtures.revive import changed_argv, revive
from fixtures.runtimes.proc import is_alive, process_state
from fixtures.stack import Stack
from reports import records as r
from suite.selftest.process_helpers import ids, own_state_dir, until
from suite.selftest.store_stack import store_stack

pytestmark = [pytest.mark.selftest, pytest.mark.needs("cpu-stack")]


@pytest.fixture
def stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stack]:
    with own_state_dir(monkeypatch), store_stack(tmp_path) as running:
        yield running


def records(stack: Stack) -> list[r.FaultRecord]:
    return [x for x in stack.notes["records"] if isinstance(x, r.FaultRecord)]


def test_a_freeze_stops_every_thread_and_its_heal_lets_the_master_answer_again(stack: Stack) -> None:
    assert stack.store is not None
    fault = Freeze("master")
    assert fault.heal(stack) is None  # nothing to heal yet
    frozen = fault.inject(stack)
    assert frozen.landed
    assert set(frozen.proof["states"].values()) == {"T"}
    assert stack.dirty
    assert stack.faults_active == [fault]
    healed = fault.heal(stack)
    assert healed is not None
    assert healed.landed
    assert stack.faults_active == []
    assert stack.store.admin.health()
    assert [(x.action, x.fault_id) for x in records(stack)] == [
        ("inject", "freeze:master:1"),
        ("heal", "freeze:master:1"),
    ]
    assert prove_healthy(stack, "case") == []
    assert not stack.dirty


def test_every_fault_is_healed_although_none_can_be_recorded(stack: Stack) -> None:
    def full(record: r.Record) -> None:
        raise OSError("no space left")

    for fault in (Freeze("master"), Freeze("master")):
        assert fault.inject(stack).landed
    stack.record = full
    with pytest.raises(OSError, match="no space"):
        stack.heal_all()
    assert stack.faults_active == []
    assert process_state(stack.handle("master").pid) != "T"


def test_a_kill_lands_and_a_revived_master_has_the_same_address(stack: Stack) -> None:
    assert stack.store is not None
    fault = Kill("master")
    before = ids(stack.store.handle)  # type: ignore[arg-type]
    killed = fault.inject(stack)
    assert killed.landed
    assert not any(is_alive(who) for who in before)
    assert not fault.healable
    assert fault.heal(stack) is None
    with pytest.raises(HarnessError, match="no process left"):
        Kill("master").inject(stack)
    assert prove_healthy(stack, "case") == ["master: not running (exit -9)"]
    assert stack.dirty
    attempt = revive(stack, "master")
    assert attempt.result == "ready"
    assert stack.store.admin.health()  # the old address
    with pytest.raises(HarnessError, match="still runs"):
        revive(stack, "master")


def test_a_stop_is_proven_by_the_end_of_every_process(stack: Stack) -> None:
    stopped = Stop("master").inject(stack)
    assert stopped.landed
    assert set(stopped.proof["states"].values()) <= {"gone", "Z"}
    assert stopped.proof["exit_code"] == 0
    with pytest.raises(HarnessError, match="no process left"):
        Stop("master").inject(stack)


def test_a_restart_is_proven_by_another_start_time(stack: Stack) -> None:
    restarted = Restart("master").inject(stack)
    assert restarted.landed
    assert restarted.proof["result"] == "ready"
    assert restarted.proof["before"] != restarted.proof["after"]
    again = Restart("master").inject(stack)
    assert again.landed
    assert again.proof["before"] == restarted.proof["after"]


def test_a_restart_with_other_settings_shows_them_on_the_new_command_line(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"--default_kv_lease_ttl": "7000"}
    restarted = Restart("master", changes).inject(stack)
    assert restarted.landed, restarted.proof
    assert "--default_kv_lease_ttl=7000" in stack.handle("master").launch.argv
    monkeypatch.setattr("fixtures.faults.signals.shown_cmdline", lambda pid: ("master", "--default_kv_lease_ttl=5000"))
    unchanged = Restart("master", changes).inject(stack)
    assert not unchanged.landed
    assert not unchanged.proof["changed"]


def test_flags_are_changed_in_the_form_that_they_have() -> None:
    argv = ("vllm", "--seqs", "64", "--lease=5")
    assert changed_argv(argv, {"--seqs": "8", "--lease": "9", "--new": "1"}) == (
        "vllm",
        "--seqs",
        "8",
        "--lease=9",
        "--new=1",
    )
    assert changed_argv(argv, {}) == argv
    assert changed_argv(argv, {}, "/second/python") == ("/second/python", *argv[1:])


def test_a_unit_comes_back_by_the_program_that_it_is_given(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same program under another path: a second release takes an environment of its own."""
    other = stack.directory / "other-release"
    other.symlink_to(stack.handle("master").launch.argv[0])
    Kill("master").inject(stack)
    assert revive(stack, "master", python=str(other)).result == "ready"
    assert stack.handle("master").processes()[0].cmdline[0] == str(other)


class Harmless(Fault):
    """An injector that does nothing."""

    name = "freeze"
    healable = True

    def _inject(self, stack: Stack) -> tuple[bool, Proof]:
        return process_state(stack.handle(self.target).pid) == "T", {}

    def _heal(self, stack: Stack) -> tuple[bool, Proof]:
        raise HarnessError("broken")


def test_a_signal_that_does_not_stop_anything_has_not_landed(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fixtures.faults.signals.LANDING_BOUND_S", 0.2)
    monkeypatch.setattr(Freeze, "signum", signal.SIGCONT)
    assert not Freeze("master").inject(stack).landed
    monkeypatch.setattr(Kill, "signum", signal.SIGCONT)
    assert not Kill("master").inject(stack).landed


def test_all_active_faults_are_healed_although_one_heal_fails(stack: Stack) -> None:
    freeze = Freeze("master")
    freeze.inject(stack)
    Harmless("master").inject(stack)
    assert stack.heal_all() == ["healing freeze:master:1: HarnessError: broken"]
    assert stack.faults_active == []
    assert process_state(stack.handle("master").pid) != "T"
    assert stack.dirty


def test_a_heal_that_nobody_saw_leaves_the_stack_dirty(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    freeze = Freeze("master")
    freeze.inject(stack)
    unseen = freeze._heal(stack)[1]
    monkeypatch.setattr(Freeze, "_heal", lambda self, stack: (False, unseen))
    (complaint,) = prove_healthy(stack, "case")
    assert complaint.startswith(f"healing {freeze.fault_id}: not seen to be undone: ")
    assert stack.dirty


def test_an_interrupt_in_the_middle_of_a_fault_leaves_it_to_be_healed(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: object, **more: object) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("fixtures.faults.signals.wait_states", interrupted)
        with pytest.raises(KeyboardInterrupt):
            Freeze("master").inject(stack)
    until(lambda: process_state(stack.handle("master").pid) == "T")
    assert stack.heal_all() == []
    until(lambda: process_state(stack.handle("master").pid) not in ("T", "gone"))


def test_a_frozen_master_that_was_killed_meanwhile_heals(stack: Stack) -> None:
    Freeze("master").inject(stack)
    os.kill(stack.handle("master").pid, signal.SIGKILL)
    until(lambda: not stack.handle("master").alive())
    assert stack.heal_all() == []
