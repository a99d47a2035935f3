"""Programs that some cases need and no wheel carries: etcd (more than one master) and nft (faults of links).

None of them is a condition of the set-up: where one cannot be had, the cases that need it are UNTESTABLE, and say so.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from tools.logged import say

APT_BOUND_S = 300.0
"""For one call of apt-get; a minute is long where the mirror answers at all."""

Run = Callable[[list[str], Path], bool]


def run_quietly(command: list[str], folder: Path) -> bool:
    """Whether a command succeeded. Never raises for what it does."""
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=APT_BOUND_S,
            check=False,
            env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def provide(venv: Path, run: Run = run_quietly) -> list[str]:
    """Bring what is missing, where that is possible here. Returns one line for each program that stays missing."""
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin", str(venv / "bin")])
    missing: list[str] = []
    if shutil.which("etcd", path=path) is None and not unpack_etcd(venv, run):
        missing.append("no etcd: cases with more than one master are UNTESTABLE; put etcd 3.4 or newer on PATH")
    if shutil.which("nft", path=path) is None and not install_nft(run):
        missing.append("no nft: faults of links are UNTESTABLE; as root: apt-get install nftables")
    return missing


def unpack_etcd(venv: Path, run: Run) -> bool:
    """Take the program out of Debian's package into the environment: installing the package would start a service."""
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        return False
    with tempfile.TemporaryDirectory(prefix="kvgates-setup-") as scratch:
        folder = Path(scratch)
        folder.chmod(0o755)
        if not run(["apt-get", "download", "etcd-server"], folder) and not (
            os.geteuid() == 0
            and run(["apt-get", "update", "-q"], folder)
            and run(["apt-get", "download", "etcd-server"], folder)
        ):
            return False
        packages = [str(path) for path in folder.glob("etcd-server_*.deb")]
        if not packages or not run(["dpkg-deb", "-x", packages[0], "package"], folder):
            return False
        program = folder / "package" / "usr" / "bin" / "etcd"
        if not program.is_file():
            return False
        shutil.copy(program, venv / "bin" / "etcd")
    return True


def install_nft(run: Run) -> bool:
    """Install Debian's nftables as root (its service stays off). Without root nobody here could use it anyway."""
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        return False
    install = ["apt-get", "install", "-y", "-q", "--no-install-recommends", "nftables"]
    root = Path("/")
    return run(install, root) or (run(["apt-get", "update", "-q"], root) and run(install, root))


def tell_missing(venv: Path) -> None:
    """Provide, and say what stays missing."""
    for line in provide(venv):
        say(line)
