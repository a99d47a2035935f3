"""Whatever ends a run in the middle of its faults, nothing of them stays: processes, sockets, firewall rules, files."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from fixtures import netfilter
from fixtures.runtimes.proc import ProcessId, find_tree, is_alive
from fixtures.runtimes.process import clean_dead_runs
from suite.selftest.process_helpers import PROJECT, until

pytestmark = [pytest.mark.selftest, pytest.mark.slow, pytest.mark.needs("cpu-stack", "nft")]

RUN = """
import json, os, signal, sys, threading
from pathlib import Path
from fixtures.faults import DropLink, Freeze
from fixtures.runtimes.proc import scan
from fixtures.store_session import StoreSession
from fixtures.waiting import wait_for
from suite.selftest.store_stack import store_stack

with store_stack(Path(sys.argv[1]), 'mode = "standalone"\\nowners = 1') as stack:
    for fault in (DropLink("data", "owner0"), Freeze("owner0"), Freeze("master")):
        assert fault.inject(stack).landed
    before = set(scan())
    threading.Thread(target=StoreSession(stack, connect_bound_s=100.0).__enter__, daemon=True).start()
    children = lambda: [s.id for s in scan().values() if s.pid not in before and s.ppid == os.getpid()]
    helpers, _ = wait_for("the client", lambda: children() or None, bound_s=10.0, bound_source="selftest", poll_s=0.01)
    told = {
        "run": stack.handle("master").marker.partition("/")[0],
        "pids": [p.pid for unit in stack.units().values() for p in unit.processes()],
        "helpers": helpers,
        "ports": [port for unit in stack.units().values() for port in unit.launch.ports],
    }
    print(json.dumps(told), flush=True)
    while True:
        signal.pause()
"""
"""A run in small with three active faults and a store client of the suite's own that waits for the frozen master (it would for
more than a minute): RUN <folder>."""


def tables_of(told: dict[str, Any]) -> list[str]:
    return netfilter.tables(f"{netfilter.PREFIX}{told['run']}_")


def start(folder: Path) -> tuple[subprocess.Popen[str], dict[str, Any]]:
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, str(folder)],
        cwd=PROJECT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    told = json.loads(process.stdout.readline())
    assert isinstance(told, dict)
    return process, told


def left(state: Path, told: dict[str, Any]) -> list[str]:
    """Everything of the run that can still be seen."""
    found = [f"process {stat.pid} ({stat.comm}, {stat.state})" for stat in find_tree(told["run"])]
    found += [f"pid {pid}" for pid in told["pids"] if psutil.pid_exists(pid) and _is_ours(pid)]
    found += [f"helper {pid}" for pid, ticks in told["helpers"] if is_alive(ProcessId(pid, ticks))]
    found += [f"table {name}" for name in tables_of(told)]
    listening = {c.laddr.port for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    found += [f"port {port}" for port in told["ports"] if port in listening]
    found += [str(path.relative_to(state)) for part in ("runs", "ports", "s") for path in (state / part).iterdir()]
    return found


def _is_ours(pid: int) -> bool:
    try:
        return psutil.Process(pid).name() in ("mooncake_master", "mooncake_client") and not _zombie(pid)
    except psutil.NoSuchProcess:
        return False


def _zombie(pid: int) -> bool:
    return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_of_a_run_that_ends_within_its_faults(state: Path, tmp_path: Path, end: signal.Signals) -> None:
    process, told = start(tmp_path)
    try:
        assert len(tables_of(told)) == 1  # or there would be nothing to remove
        assert left(state, told)
        process.send_signal(end)
        process.wait(timeout=30)
        # After a kill the guardian does it, a moment later.
        until(lambda: left(state, told) == [], "the run's remains to go")
    finally:
        process.kill()
        process.communicate()
        clean_dead_runs(state)
    assert tables_of(told) == []
