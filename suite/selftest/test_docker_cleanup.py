"""Whatever ends a run with containers, nothing of it stays on the daemon, and nothing of anybody else's goes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fixtures.errors import HarnessError, UsageError
from fixtures.runtimes.docker_client import RUN_LABEL, connect, labelled
from fixtures.runtimes.docker_image import IMAGE_VARIABLE, image_name
from fixtures.runtimes.docker_unit import ContainerUnit
from fixtures.runtimes.process import clean_dead_runs
from fixtures.waiting import wait_for
from suite.selftest.process_helpers import PROJECT
from suite.selftest.store_stack import paused_run, store_stack

pytestmark = [pytest.mark.selftest, pytest.mark.slow, pytest.mark.needs("docker-image")]

RUNTIME = 'runtime = "docker"'


@pytest.fixture
def daemon() -> Iterator[Any]:
    client = connect()
    yield client
    client.close()


@pytest.fixture
def stranger(daemon: Any) -> Iterator[Any]:
    """A container of another run's."""
    made = daemon.containers.create(
        image_name("cpu"), ["true"], labels={RUN_LABEL: "somebody-else"}, network_mode="none"
    )
    yield made
    made.remove(force=True)


def left(daemon: Any, run: str) -> list[str]:
    """Names of what a run still has on the daemon."""
    found = daemon.containers.list(all=True, filters=labelled(run)) + daemon.networks.list(filters=labelled(run))
    return [one.name for one in found]


def test_a_run_in_order_leaves_nothing(state: Path, tmp_path: Path, daemon: Any) -> None:
    with store_stack(tmp_path, "", RUNTIME) as stack:
        master = stack.handle("master")
        assert isinstance(master, ContainerUnit)
        run = master.marker.partition("/")[0]
        assert len(left(daemon, run)) == 2
    assert left(daemon, run) == []
    assert (tmp_path / "master" / "log.txt").read_text(), "logs stay"


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_run_that_is_killed_or_interrupted_leaves_nothing(
    how: signal.Signals, state: Path, tmp_path: Path, daemon: Any, stranger: Any
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", paused_run(RUNTIME), str(tmp_path)],
        cwd=PROJECT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        assert len(left(daemon, told["run"])) == 2
        process.send_signal(how)
        process.wait()

    def clean() -> bool:
        clean_dead_runs(state)  # the next start; the guardian is at it as well
        return left(daemon, told["run"]) == []

    wait_for("the dead run's containers to go", clean, bound_s=60, bound_source="selftest", poll_s=0.1)
    stranger.reload()


def test_a_dead_container_ends_the_wait_with_its_last_words(state: Path, tmp_path: Path) -> None:
    with (
        pytest.raises(HarnessError, match=r"master exited with 1 .*last lines:\n(.*\n)*.*no-such-flag"),
        store_stack(tmp_path, 'master_args = ["--no-such-flag"]', RUNTIME),
    ):
        pass


def test_an_image_that_is_not_there_is_one_line(state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(IMAGE_VARIABLE, "kvgates-none:1")
    with (
        pytest.raises(UsageError, match="image kvgates-none:1: the daemon has none of that name; run make image"),
        store_stack(tmp_path, "", RUNTIME),
    ):
        pass
