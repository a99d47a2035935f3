"""A run with ``-m bench`` judges benchmarks: they are the gates of that run.

A benchmark that was asked for and does not measure is an error, never a silent pass.

pytest-benchmark turns itself off under xdist, and by option, and then runs each function once: such a test would pass without a
number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pytest

from fixtures.errors import UsageError
from fixtures.pytest_support.selection import marks_asked

if TYPE_CHECKING:
    from suite.contract import Gate


@pytest.hookimpl(tryfirst=True)
def pytest_kvgates_registry(config: pytest.Config) -> Mapping[str, Gate] | None:
    if not marks_asked(config, ("bench",)):
        return None
    from suite.bench.registry import registry  # why here: only a run of benchmarks needs them

    return registry()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if "benchmark" not in getattr(item, "fixturenames", ()):
        return
    session: Any = getattr(item.config, "_benchmarksession", None)
    if session is None:
        raise UsageError("pytest-benchmark is switched off (-p no:benchmark): this benchmark would measure nothing")
    why = ""
    if session.xdist_warning or session.xdist_worker:
        why = "pytest-benchmark measures nothing under xdist; run benchmarks without -n"
    elif session.disabled or session.skip:
        why = "pytest-benchmark is switched off (--benchmark-disable or --benchmark-skip); take the option away"
    if why:
        raise UsageError(f"{item.name}: {why}")


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    """The machine's name is no part of what numbers depend on."""
    machine_info["node"] = ""


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_compare_machine_info(
    config: pytest.Config, benchmarksession: Any, machine_info: dict[str, Any], compared_benchmark: dict[str, Any]
) -> None:
    """pytest-benchmark itself only warns when times of another machine are compared."""
    theirs = compared_benchmark["machine_info"]
    for name in ("machine", "processor", "cpu"):
        if machine_info.get(name) != theirs.get(name):
            raise UsageError(f"--benchmark-compare: those times are of another machine ({name} differs)")
