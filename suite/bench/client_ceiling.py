"""How much the replay client carries on one core, beside other load generators in the same run.

``python -m suite.bench.client_ceiling [--json FILE]``. A token server (``suite.bench.token_server``) on one core streams to
each client on another. A client has ``streams`` requests in flight and gets a token for each every so often; the ladder of rates goes up until
it does not keep up. Three figures tell:

cost     processor time of the client for each further token: a second run with answers of two tokens takes off start-up (imports,
         tokenizer, prompts, connections). One over it is the most a core could ever carry. It depends little on what else
         the host does.
behind   seconds from the last token that the server sent to the end of the client, again without what they are after short answers.
         A client that does not keep up has tokens waiting in its sockets then. (What a client takes to work out its figures
         for so many tokens is in it too.)
busy     cost times rate. Near 1 a client still gets every token, several at a read, and stamps them late.

Other generators: ``vllm bench serve`` where vLLM is installed, guidellm where it is (extra ``bench-peers``); others are listed as
not installed. Each is told the same: that many requests at once, answers of that length, prompts of 32 tokens.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from fixtures.errors import HarnessError, UsageError
from fixtures.models import ModelInfo, ensure_model
from suite.bench import token_server
from suite.bench.load_clients import CLIENTS, OURS, Job, LoadClient
from suite.workload.arguments import Parser, at_least, run_command, tell

ROOT = Path(__file__).parents[2]
KEPT_UP_S = 1.0
"""A client that ends within this after the last token has kept up: at a quarter too much for 8 s it would be 2 s behind."""
TELLING = 0.2
"""Tokens have to take this part of what all else takes: start-up of the same client differs by some percent from run to run."""
BUSY = 0.9
"""A core that is busy more than this reads several tokens at once: cheaper, and each is stamped when its turn comes, not when it came."""
DEFAULT_RATES = (10_000, 20_000, 30_000, 40_000)
_SHORT = 2
"""Tokens of the answers of the run that tells what a client takes for everything but tokens."""
_PEER_TIMEOUT_S = 240
"""A generator that takes longer is given up; imports of the largest take half a minute on a busy host."""


class Rung(msgspec.Struct, frozen=True, kw_only=True):
    """One client at one offered rate."""

    client: str
    version: str
    streams: int
    """Requests in flight, as the server counted them at the most."""
    offered_tokens_per_s: float
    tokens: int
    """Received in all."""
    cost_us: float
    """Processor time of the client for each token, in microseconds."""
    ceiling_tokens_per_s: float
    """One over it: what one core could carry if it did nothing else."""
    busy: float
    """Part of the core's time that tokens took at this rate."""
    behind_s: float
    kept_up: bool
    server_late_s: float
    """The most that the server itself was late with a round of tokens."""


class Ceiling(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured in one run."""

    host_cores: int
    load_average: float
    """Of the last minute, when the run began: other work on the host slows every client."""
    python: str
    rungs: tuple[Rung, ...]
    missing: dict[str, str]
    """Generators that are not part of the run, and why."""


class _TooShortError(HarnessError):
    """A run that was too short to tell what tokens cost."""


def measure(
    clients: Mapping[str, LoadClient],
    rates: Sequence[int],
    streams: int,
    seconds: float,
    progress: Callable[[str], None] = tell,
) -> Ceiling:
    """Measure clients, one after another at each rate.

    rates: tokens a second, over all streams, going up. seconds: time that an answer takes. A client is taken no higher after the
    first rate at which it does not keep up, and no further after it failed.
    """
    load = os.getloadavg()[0]
    missing: dict[str, str] = {}
    rungs: list[Rung] = []
    model = ensure_model("tiny-base")
    stopped: set[str] = set()
    with tempfile.TemporaryDirectory() as folder:
        for rate in rates:
            for name, client in clients.items():
                if name in stopped:
                    continue
                try:
                    rung = _rung(name, client, model, rate, streams, seconds, Path(folder))
                except _TooShortError as exc:  # at a higher rate there are more tokens
                    missing[name] = f"at {rate} tokens/s: {exc}"
                    continue
                except HarnessError as exc:
                    missing[name] = f"at {rate} tokens/s: {exc}"
                    stopped.add(name)
                    continue
                rungs.append(rung)
                progress(_line(rung))
                if not rung.kept_up:
                    stopped.add(name)
    return Ceiling(
        host_cores=os.cpu_count() or 1,
        load_average=load,
        python=sys.version.split()[0],
        rungs=tuple(rungs),
        missing=missing,
    )


def _rung(
    name: str, client: LoadClient, model: ModelInfo, rate: int, streams: int, seconds: float, folder: Path
) -> Rung:
    version = client.version()
    gap_s = streams / rate
    length = max(2 * _SHORT, round(seconds / gap_s))
    client_core, server_core = cores()
    with token_server.running(gap_s, server_core) as server:
        short = _run(client, Job(server.url, model, streams, _SHORT, folder), client_core, server)
        whole = _run(client, Job(server.url, model, streams, length, folder), client_core, server)
    for run, asked in ((short, streams * _SHORT), (whole, streams * length)):
        if run.tokens < asked:
            raise HarnessError(f"it was to take {asked} tokens and took {run.tokens}")
    tokens_took_s = whole.processor_s - short.processor_s
    if tokens_took_s < TELLING * short.processor_s:
        raise _TooShortError(
            f"tokens took {tokens_took_s:.1f} s of processor time, everything else {short.processor_s:.1f} s:"
            " too little to tell one from the other, give more --seconds"
        )
    cost_s = tokens_took_s / (whole.tokens - short.tokens)
    behind_s = max(0.0, whole.end_s - short.end_s)
    return Rung(
        client=name,
        version=version,
        streams=whole.stats.most_open,
        offered_tokens_per_s=rate,
        tokens=whole.tokens,
        cost_us=cost_s * 1e6,
        ceiling_tokens_per_s=1 / cost_s,
        busy=cost_s * rate,
        behind_s=behind_s,
        kept_up=behind_s <= KEPT_UP_S and cost_s * rate <= BUSY and whole.stats.most_open >= 0.95 * streams,
        server_late_s=whole.stats.latest_tick_s,
    )


@dataclass(frozen=True)
class _Run:
    """One run of a client."""

    processor_s: float
    end_s: float
    """From the last token that the server sent to the end of the client."""
    tokens: int
    stats: token_server.Stats


def _run(client: LoadClient, job: Job, core: int, server: token_server.Running) -> _Run:
    before = server.stats()
    used_s = _processor_s(client, job, core)
    ended_s = time.monotonic()
    after = server.stats()
    return _Run(used_s, ended_s - after.last_token_s, after.tokens - before.tokens, after)


def cores() -> tuple[int, int]:
    """A core for the client and one for the server; the same one where there is no second."""
    usable = sorted(os.sched_getaffinity(0))
    return usable[0], usable[-1]


def _processor_s(client: LoadClient, job: Job, core: int) -> float:
    """Processor time that a client takes, its children included. Raises HarnessError when it fails."""
    before = os.times()
    try:
        done = subprocess.run(
            [client.python, *client.command(job)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=_PEER_TIMEOUT_S,
            check=False,
            preexec_fn=lambda: os.sched_setaffinity(0, {core}),
            env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1"},
        )
    except subprocess.TimeoutExpired as exc:
        raise HarnessError(f"not done within {_PEER_TIMEOUT_S} s") from exc
    after = os.times()
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no output"]
        raise HarnessError(f"ended with {done.returncode}: {last[0]}")
    return after.children_user + after.children_system - before.children_user - before.children_system


def _line(rung: Rung) -> str:
    verdict = "kept up" if rung.kept_up else "did NOT keep up"
    return (
        f"{rung.client:<17} {rung.streams:>5,} streams, {rung.offered_tokens_per_s:>6,.0f} tokens/s: {rung.cost_us:>5.1f} us a token"
        f" (at most {rung.ceiling_tokens_per_s:>7,.0f} tokens/s a core), core {rung.busy:.0%} busy, {rung.behind_s:.1f} s behind, {verdict}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print. Exit code 0; 4 for bad usage; 10 when our own client did not keep up with the first rate; 12 when nothing could be measured with."""
    parser = Parser(prog="python -m suite.bench.client_ceiling", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--streams", type=at_least(1), default=2000, help="requests in flight (default: 2000)")
    parser.add_argument(
        "--rates", default=",".join(map(str, DEFAULT_RATES)), metavar="N,N,...", help="tokens/s to offer"
    )
    parser.add_argument("--seconds", type=at_least(1, float), default=8.0, help="length of each run (default: 8)")
    parser.add_argument("--clients", default=",".join(CLIENTS), metavar="NAME,...", help=f"of: {', '.join(CLIENTS)}")
    parser.add_argument(
        "--guidellm-python", metavar="FILE", help="interpreter of an environment with guidellm (default: this one)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    return run_command(parser, argv, _measure)


def _measure(options: argparse.Namespace) -> int:
    rates = _numbers(options.rates)
    clients = options.clients.split(",")
    if unknown := [c for c in clients if c not in CLIENTS]:
        raise UsageError(f"--clients {unknown[0]}: there are {', '.join(CLIENTS)}")
    chosen = {c: CLIENTS[c] for c in clients}
    if options.guidellm_python and "guidellm" in chosen:
        chosen["guidellm"] = replace(chosen["guidellm"], python=options.guidellm_python)
    found = measure(chosen, rates, options.streams, options.seconds)
    if options.json is not None:
        _write(found, options.json)
    ours = [r for r in found.rungs if r.client == OURS]
    sys.stdout.write(
        "\n".join([_line(r) for r in found.rungs] + [f"{n}: not measured: {why}" for n, why in found.missing.items()])
        + "\n"
    )
    return 0 if OURS not in clients or any(r.kept_up for r in ours) else 10


def _numbers(text: str) -> list[int]:
    try:
        rates = [int(w) for w in text.split(",")]
    except ValueError:
        rates = []
    if not rates or min(rates) < 1:
        raise UsageError(f"--rates {text}: give numbers of tokens a second, e.g. 10000,20000")
    return rates


def _write(found: Ceiling, path: Path) -> None:
    content: Any = {"measured_unix_s": round(time.time()), **msgspec.to_builtins(found)}
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(content)) + b"\n")
    except OSError as exc:
        raise UsageError(f"{path}: {exc.strerror}; give a file that can be written") from exc


if __name__ == "__main__":
    sys.exit(main())
