"""Small real programs that the selftests of the process runtime start as units, and runners that they kill."""

from __future__ import annotations

ENDLESS = "import signal\nwhile True:\n    signal.pause()\n"
"""Does nothing, for ever; ends on SIGTERM."""

STUBBORN = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('up', flush=True)\n" + ENDLESS
"""Ignores SIGTERM."""

FAMILY = f"""
import os, subprocess, sys
# 1: a child in a session of its own without any environment: only its parent leads to it.
child = subprocess.Popen([sys.executable, "-S", "-c", {ENDLESS!r}], env={{}}, start_new_session=True)
# 2: reparented, in a session of its own: only the marker leads to it.
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv(sys.executable, [sys.executable, "-S", "-c", {ENDLESS!r}])
    os._exit(0)
os.wait()
# 3: reparented, without any environment: only the session leads to it.
if os.fork() == 0:
    if os.fork() == 0:
        os.execve(sys.executable, [sys.executable, "-S", "-c", {ENDLESS!r}], {{}})
    os._exit(0)
os.wait()
print("up", flush=True)
{ENDLESS}
"""
"""A first process with three descendants, each of which only one of parent, session and marker leads to."""

SHARER = f"""
from multiprocessing.shared_memory import SharedMemory
import multiprocessing
memory = SharedMemory(create=True, size=4096)
semaphore = multiprocessing.get_context("spawn").Semaphore()
print(memory.name, "sem." + semaphore._semlock.name.strip("/"), flush=True)
{ENDLESS}
"""
"""Holds a shared-memory segment and a named semaphore, and removes neither when it is killed. Prints their file names."""

LATE_SHARER = f"""
import signal
from multiprocessing.shared_memory import SharedMemory
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
print("up", flush=True)
signal.sigwait([signal.SIGUSR1])
memory = SharedMemory(create=True, size=4096)
print(memory.name, flush=True)
{ENDLESS}
"""
"""Makes its shared memory when SIGUSR1 arrives, and then prints its file name."""

STUBBORN_ORPHAN = f"""
import os
if os.fork() == 0:
    exec({STUBBORN!r})
{ENDLESS}
"""
"""A first process with a child that ignores SIGTERM."""

RUNNER = """
import json, os, signal, sys
from pathlib import Path
from fixtures.runtimes.base import Launch
from fixtures.runtimes.process import ProcessRuntime
from fixtures.waiting import wait_for

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job inherits it as ignored
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # and what nohup started this one
folder, guard = Path(sys.argv[1]), sys.argv[2] == "guard"
runtime = ProcessRuntime(folder, guard=guard)
programs = json.loads(sys.argv[3])
units = []
for name, program in programs.items():
    env = {"PATH": os.environ["PATH"], "TMPDIR": str(folder / name / "tmp")}
    argv = (sys.executable, "-S", "-c", program)
    units.append(runtime.start(Launch(name, "unit", argv, env, folder / name)))
for unit in units:
    wait_for("up", lambda: bool(unit.log_tail()), bound_s=10, bound_source="selftest", poll_s=0.01)
told = {
    "processes": [[p.pid, p.start_ticks] for unit in units for p in unit.processes()],
    "logs": [unit.log_tail() for unit in units],
    "short": str(runtime.short_dir("e0")),
    "port": runtime.lease_port(),
}
try:
    print(json.dumps(told), flush=True)
    while True:
        signal.pause()
finally:
    print("closing", flush=True)
    print(json.dumps(runtime.close()), flush=True)
"""
"""A run of the suite in small: RUNNER <folder> guard|alone <JSON name -> program>."""

FORKER = """
import os, signal, sys
from pathlib import Path
from fixtures.runtimes.process import ProcessRuntime

runtime = ProcessRuntime(Path(sys.argv[1]), guard=False)
port = runtime.lease_port()
if os.fork() == 0:
    try:
        runtime.close()
    finally:
        print(port, flush=True)
signal.pause()
"""
"""A run that forks; its child tries to close it: FORKER <folder>."""

LEASER = """
import json, sys
from pathlib import Path
from fixtures.runtimes.ports import PortLeases

leases = PortLeases(Path(sys.argv[1]))
print(json.dumps([leases.lease() for _ in range(int(sys.argv[2]))]), flush=True)
sys.stdin.readline()
leases.release_all()
"""
"""Leases ports and holds them until a line arrives: LEASER <state directory> <count>."""
