"""Fixtures that several selftests share, and how workers of xdist share the work of reading them."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from suite.selftest.process_helpers import own_state_dir

HERE = Path(__file__).parent


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Each worker of xdist begins to read at another file, and finds what the others compiled meanwhile.

    In a fresh clone they would all compile the same file at the same moment, one after the other: five seconds each.
    """
    report = yield
    worker, count = (os.environ.get(f"PYTEST_XDIST_{name}", "") for name in ("WORKER", "WORKER_COUNT"))
    if collector.path == HERE and report.passed and worker.startswith("gw"):
        first = len(report.result) * int(worker[2:]) // int(count)
        report.result = [*report.result[first:], *report.result[:first]]
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Workers of xdist have to have the same tests in the same order."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        ours = iter(sorted((i for i in items if HERE in i.path.parents), key=lambda item: item.path))
        items[:] = [next(ours) if HERE in item.path.parents else item for item in items]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is collected stays to the end. Looking at its half million objects again and again is a tenth of a worker's time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A state folder of the test's own: what other runs on this host have leased or left is not seen."""
    with own_state_dir(monkeypatch) as folder:
        yield folder


@pytest.fixture
def short_calibration(monkeypatch: pytest.MonkeyPatch) -> None:
    """For simulated stacks: the formula's answers have no noise, at no length, so what is measured of it may be short."""
    monkeypatch.setattr("suite.gates.arms.CALIBRATION_LENGTHS", (65, 130))
    monkeypatch.setattr("suite.gates.arms.PLANTED_PROMPT_TOKENS", 130)
