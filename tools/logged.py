"""Run a step quietly into a log, show signs of life, and find the telling lines when it fails. Standard library only."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEARTBEAT_S = 15.0
"""Seconds between two signs of life: a person waits about that long before wondering."""

PIP_ACTIONS = ("Collecting", "Downloading", "Installing", "Requirement already satisfied")
"""Beginnings of the lines of pip's output that tell what it is at."""


def say(text: str) -> None:
    """One line of progress."""
    sys.stdout.write(f"setup: {text}\n")
    sys.stdout.flush()


def run_logged(what: str, command: Sequence[str], log_file: Path) -> int:
    """Run quietly into the log, with a sign of life every HEARTBEAT_S. Returns the exit status."""
    log_file.parent.mkdir(exist_ok=True)
    started = time.monotonic()
    say(f"{what} (log: {log_file.relative_to(ROOT)})")
    with log_file.open("a", encoding="utf-8") as log:
        log.write(f"\n$ {' '.join(command)}\n")
        log.flush()
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=ROOT)
        try:
            while True:
                try:
                    return process.wait(timeout=HEARTBEAT_S)
                except subprocess.TimeoutExpired:
                    say(f"  {what}: {time.monotonic() - started:.0f} s so far; {last_action(log_file)}")
        finally:
            if process.poll() is None:  # interrupted from the keyboard
                process.terminate()
                process.wait()


def last_action(log: Path) -> str:
    """The newest line of pip's log that names a package."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    named = [line.strip() for line in lines if line.lstrip().startswith(PIP_ACTIONS)]
    return named[-1][:100] if named else "starting"


def log_tail(log: Path, command_marker: str = "\n$ ", lines: int = 15) -> str:
    """The last lines of what the newest command wrote."""
    text = log.read_text(encoding="utf-8", errors="replace")
    return "\n".join(text[text.rfind(command_marker) :].strip().splitlines()[-lines:])
