"""The docker command line as the image tools use it, and one clear line for whatever keeps it from working."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

DEADLINE_S = 60.0
"""For a question to the daemon; each is answered within a second by one that is well."""

MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
"""What the kernel calls a machine -> what Docker and Debian call it."""


class ImageError(Exception):
    """A step failed. ``code`` is the exit code: 4 when the caller has to mend something, else 1."""

    def __init__(self, message: str, code: int = 4) -> None:
        super().__init__(message)
        self.code = code


def say(text: str) -> None:
    """One line of progress."""
    sys.stdout.write(f"image: {text}\n")
    sys.stdout.flush()


def machine() -> str:
    """This host's architecture in Docker's words."""
    return MACHINES.get(platform.machine(), platform.machine())


def complaint(words: str) -> str:
    """What docker said about its daemon, as one line with the mend."""
    low = words.lower()
    if "permission denied" in low:
        return "docker: this user may not talk to the daemon; add it to the group docker, or run as root"
    if any(
        sign in low
        for sign in (
            "cannot connect",
            "no such file",
            "connection refused",
            "failed to connect",
            "is the docker daemon running",
        )
    ):
        return "docker: no daemon answers; start dockerd, or set DOCKER_HOST to where one listens"
    return f"docker: {words.strip().splitlines()[-1] if words.strip() else 'failed without a word'}"


def docker(*arguments: str, deadline_s: float = DEADLINE_S) -> str:
    """Ask docker something; its standard output. Raises ImageError with one line."""
    program = shutil.which("docker")
    if program is None:
        raise ImageError("docker: not installed; on Debian: apt-get install docker.io")
    try:
        done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=deadline_s, check=False)
    except subprocess.TimeoutExpired as exc:
        raise ImageError(f"docker {arguments[0]}: no answer within {deadline_s:g} s") from exc
    if done.returncode:
        raise ImageError(complaint(done.stderr))
    return done.stdout


def require_daemon() -> None:
    """Raise ImageError unless a daemon answers."""
    docker("version", "--format", "{{.Server.Version}}")


def inspect(image: str) -> dict[str, Any] | None:
    """What the daemon knows about an image, or None when it has none of that name."""
    try:
        found = json.loads(docker("image", "inspect", image))
    except ImageError as exc:
        if "no such image" in str(exc).lower():
            return None
        raise
    assert isinstance(found, list)
    return dict(found[0])


def run(command: Sequence[str], what: str, *, deadline_s: float) -> None:
    """Run a long step with its output shown. Raises ImageError (code 1)."""
    try:
        code = subprocess.run(command, check=False, timeout=deadline_s, stdin=subprocess.DEVNULL).returncode
    except subprocess.TimeoutExpired as exc:
        raise ImageError(f"{what}: not done within {deadline_s:g} s", code=1) from exc
    if code:
        raise ImageError(f"{what}: exit status {code}; its own words are above", code=1)
