"""The watch that notes when the host stood still, and the run that asks it."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fixtures import deaths
from fixtures.host_watch import AFTERMATH_S, HostWatch, lasting
from fixtures.pytest_support.run import WorkerRun
from fixtures.stack import Stack
from reports import records as r
from suite.contract import HOST_PAUSED, Case, Gate

pytestmark = pytest.mark.selftest


def watched(*times_s: float) -> HostWatch:
    """A watch that woke up at these times."""
    times = iter(times_s)
    waits = iter([False] * (len(times_s) - 2) + [True])
    watch = HostWatch(lambda: next(times), lambda _: next(waits))
    watch.start()
    watch.stop()
    return watch


def test_only_a_pause_is_noted() -> None:
    assert watched(0.0, 0.25, 0.5, 43.5, 43.75).pauses == [{"from_s": 0.5, "stall_s": 43.0}]
    assert watched(0.0, 0.25, 5.25, 5.5).pauses == []  # busy, not paused


def test_what_came_of_a_pause_may_come_a_minute_later() -> None:
    pause = {"from_s": 100.0, "stall_s": 40.0}
    assert lasting([pause], 140.0 + AFTERMATH_S) == [pause]
    assert lasting([pause], 140.0 + AFTERMATH_S + 1) == []
    assert lasting([pause], 50.0) == [pause]


def test_it_may_be_started_and_ended_twice() -> None:
    watch = HostWatch()
    watch.stop()
    watch.start()
    watch.start()
    watch.stop()
    watch.stop()
    assert watch.pauses == []


class Quiet(Gate):
    id = "X.quiet"
    claim = "holds"

    def collect(self, stack: Any, case: Case) -> None:
        pass


@pytest.mark.parametrize(("ago_s", "told", "dirty"), [(0.0, True, True), (30.0, True, False), (500.0, False, False)])
def test_a_case_is_told_of_a_pause_and_one_inside_it_costs_the_stack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ago_s: float, told: bool, dirty: bool
) -> None:
    monkeypatch.setattr(deaths, "engines_of", lambda stack: {})
    monkeypatch.setattr(deaths, "died", lambda *_: None)
    facts: list[tuple[str, Any]] = []
    stack = SimpleNamespace(
        stack_id="s1", dirty=False, heal_all=list, fact=lambda name, value: facts.append((name, value))
    )
    run = WorkerRun.__new__(WorkerRun)
    written: list[r.Record] = []
    run._watch = HostWatch()
    run._watch.pauses.append({"from_s": time.monotonic() - ago_s - 6.0, "stall_s": 6.1})
    run._writer = cast(Any, SimpleNamespace(write=written.append))
    run._collect(Quiet(), Case("X.quiet.a"), cast(Stack, stack))
    run._watch.stop()
    assert [name for name, _ in facts] == ([HOST_PAUSED] if told else [])
    assert stack.dirty is dirty
    assert isinstance(written[-1], r.CaseFinished)
