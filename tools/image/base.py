"""``make base-image``: a slim Debian base out of Debian packages, imported into the daemon; no image registry is asked."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import time

from tools.image.cli import DEADLINE_S, ImageError, docker, inspect, machine, say

SUITE = "bookworm"
PACKAGES = (
    "ca-certificates",
    "etcd-client",
    "etcd-server",  # elects a leader where a pool has several masters
    "g++",  # torch compiles its CPU kernels at the first request
    "libcurl4",
    "libibverbs1",
    "libnuma1",
    "libpython3.11-dev",
    "python3.11",
    "python3.11-venv",
)
"""What the wheels of vLLM and Mooncake link but do not carry (``tools.setup_env.LIBRARIES``), Python, and a compiler."""

LEFT_OUT = ("/usr/share/doc/*", "/usr/share/man/*", "/usr/share/locale/*", "/usr/share/info/*", "/var/cache/apt/*.bin")
MIRROR = "KVGATES_DEBIAN_MIRROR"
"""Environment variable: a mirror, or a file of sources, in place of mmdebstrap's default."""

MAKE_BOUND_S = 600.0
"""Took 60 s on two cores with a near mirror."""


def name() -> str:
    """The base's name: its tag is a digest of what goes into it, so that a changed list is another image."""
    parts = [SUITE, machine(), *PACKAGES, *LEFT_OUT]
    return f"kvgates-base:{SUITE}-{hashlib.sha256(chr(10).join(parts).encode()).hexdigest()[:12]}"


def command() -> list[str]:
    """mmdebstrap, writing a tar archive to standard output."""
    options = [f"--dpkgopt=path-exclude={pattern}" for pattern in LEFT_OUT if not pattern.startswith("/var")]
    mirror = [os.environ[MIRROR]] if os.environ.get(MIRROR) else []
    return [
        "mmdebstrap",
        "--quiet",
        "--variant=minbase",
        "--include=" + ",".join(PACKAGES),
        *options,
        "--aptopt=APT::Install-Recommends false",
        SUITE,
        "-",
        *mirror,
    ]


def ensure() -> str:
    """The base image's name; it is made when the daemon has none. Raises ImageError."""
    tag = name()
    if inspect(tag) is not None:
        say(f"nothing to do: {tag} is there")
        return tag
    if shutil.which("mmdebstrap") is None:
        raise ImageError("base image: mmdebstrap is not installed; on Debian: apt-get install mmdebstrap")
    if os.geteuid() != 0:
        raise ImageError("base image: mmdebstrap needs root here; run make base-image as root once")
    say(f"making {tag} from Debian packages; a minute with a near mirror")
    started = time.monotonic()
    made = subprocess.Popen(command(), stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
    change = ["--change", f'LABEL org.opencontainers.image.base.name="debian {SUITE}"', "--change", "ENV LANG=C.UTF-8"]
    try:
        imported = subprocess.run(
            ["docker", "import", *change, "-", tag],
            stdin=made.stdout,
            capture_output=True,
            text=True,
            timeout=MAKE_BOUND_S,
            check=False,
        )
        code = made.wait(timeout=DEADLINE_S)
    except subprocess.TimeoutExpired as exc:
        raise ImageError(f"base image: not made within {MAKE_BOUND_S:g} s", code=1) from exc
    finally:
        if made.poll() is None:
            made.terminate()
            made.wait()
    if code or imported.returncode:
        if inspect(tag) is not None:
            docker("image", "rm", tag)  # of half an archive
        raise ImageError(f"base image: mmdebstrap ended with {code}, import said {imported.stderr.strip()!r}", code=1)
    say(f"made {tag} in {time.monotonic() - started:.0f} s")
    return tag
