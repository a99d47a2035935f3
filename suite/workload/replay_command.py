"""``python -m suite.workload replay``: send a trace to engines."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from fixtures.errors import UsageError
from fixtures.models import resolve_model
from fixtures.request import Target
from suite.workload.arguments import Parser, at_least, tell
from suite.workload.bodies import Bodies
from suite.workload.materialise import Materialiser
from suite.workload.reader import TraceReader, told
from suite.workload.results import ResultFile, read_results
from suite.workload.routing import POLICIES
from suite.workload.rules import TraceRules
from suite.workload.shape import with_sessions
from suite.workload.summary import Summariser, summarise, summary_table
from suite.workload.trace import MOONCAKE_BLOCK_TOKENS, TraceRequest

if TYPE_CHECKING:
    from suite.workload.replay import ReplaySettings, ReplayState


def add_replay(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the command."""
    command = commands.add_parser(
        "replay",
        help="send a trace to engines and measure the answers",
        epilog="With --results, the same command goes on where it was cut short. Latency counts from when a request was due.",
        allow_abbrev=False,
    )
    command.set_defaults(command=_replay)
    command.add_argument(
        "trace", metavar="FILE", help="in Mooncake's format, blocks scaled as the engines can take them"
    )
    command.add_argument("--url", action="append", required=True, metavar="[NAME=]URL", help="an engine; once for each")
    command.add_argument(
        "--model", required=True, metavar="NAME", help="tiny model or model directory: vocabulary and longest request"
    )
    command.add_argument(
        "--served-model", metavar="NAME", help="name that the engines serve it under (default: its directory)"
    )
    command.add_argument(
        "--block-tokens", type=at_least(1), default=MOONCAKE_BLOCK_TOKENS, help="of the trace (default: 512)"
    )
    command.add_argument(
        "--nonce", default="", help="another one makes every prompt a new one; the same one meets warm caches"
    )
    loop = command.add_mutually_exclusive_group()
    loop.add_argument("--speed", type=float, default=1.0, help="open loop: times faster than the trace (default: 1)")
    loop.add_argument("--concurrency", type=at_least(1), help="closed loop: requests in flight")
    command.add_argument("--policy", choices=POLICIES, default="round-robin", help="which engine a request goes to")
    command.add_argument("--seed", type=at_least(0), default=0, help="of the policy")
    command.add_argument("--deadline-s", type=float, default=600.0, help="of one request (default: 600)")
    command.add_argument("--max-requests", type=at_least(1))
    command.add_argument("--send-for-s", type=float, help="send nothing that is due later than this")
    command.add_argument("--ttft-limit-s", type=at_least(0, float), help="for goodput")
    command.add_argument(
        "--results", type=Path, metavar="FILE", help="write every result; go on with it if it is there"
    )
    command.add_argument(
        "--skip-bad", action="store_true", help="leave bad lines of the trace out and count them by reason"
    )
    command.add_argument("--json", action="store_true", help="print figures as JSON instead of a table")


def _replay(options: argparse.Namespace) -> None:
    try:
        from suite.workload.replay import Replay, ReplaySettings  # why here: httptools is an extra
    except ModuleNotFoundError as exc:
        raise UsageError(f"replay needs {exc.name}: install the extra `bench`") from exc
    model = resolve_model(options.model)
    settings = ReplaySettings(
        speed=options.speed,
        concurrency=options.concurrency,
        policy=options.policy,
        seed=options.seed,
        deadline_s=options.deadline_s,
        max_requests=options.max_requests,
        send_for_s=options.send_for_s,
    ).checked()
    targets = _targets(options.url, options.served_model or str(model.path))
    rules = TraceRules(
        block_tokens=options.block_tokens, max_model_tokens=model.max_position, skip_bad=options.skip_bad
    )
    reader = TraceReader(options.trace, rules)
    requests: Iterable[TraceRequest] = reader
    if options.policy == "sticky":
        requests = with_sessions(requests, options.block_tokens)
    bodies = Bodies(Materialiser.for_model(model, options.block_tokens, nonce=options.nonce))
    results = ResultFile(options.results, _plan(options, settings, list(targets))) if options.results else None
    if results is not None and results.done:
        tell(f"{options.results}: going on, {len(results.done)} requests are done already")
    summary = Summariser(options.ttft_limit_s)
    try:
        replay = Replay(requests, targets, bodies, settings, results, None if results else summary.add, _tell_state)
        state = replay.run()
    except KeyboardInterrupt:
        raise UsageError("interrupted" + ("; the same command goes on" if results else "")) from None
    finally:
        if results is not None:
            results.close()
    _tell_state(state)
    if state.stopped:
        tell(f"not the whole trace: {state.stopped}")
    if reader.skipped:
        tell(told(reader.skipped))
    found = summarise(read_results(options.results), options.ttft_limit_s) if results else summary.result()
    text = msgspec.json.format(msgspec.json.encode(found)).decode() + "\n" if options.json else summary_table(found)
    sys.stdout.write(text)


def _tell_state(state: ReplayState) -> None:
    tell(str(state))


def _targets(urls: list[str], served: str) -> dict[str, Target]:
    targets: dict[str, Target] = {}
    for number, text in enumerate(urls):
        name, equals, url = text.partition("=")
        if not equals or "/" in name:  # a URL with = in it
            name, url = f"e{number}", text
        if not url.startswith(("http://", "https://")):
            raise UsageError(f"--url {text}: give http://HOST:PORT, with NAME= before it if you like")
        if name in targets:
            raise UsageError(f"--url {text}: two engines are called {name}")
        targets[name] = Target(url.rstrip("/").removesuffix("/v1"), served)
    return targets


def _plan(
    options: argparse.Namespace, settings: ReplaySettings, engines: list[str]
) -> dict[str, str | int | float | None]:
    """What results depend on. Bounds are left out: a replay may be gone on with for longer."""
    return {
        "trace": Path(options.trace).name,
        "block_tokens": options.block_tokens,
        "model": options.model,
        "nonce": options.nonce,
        "engines": ",".join(engines),
        "speed": settings.speed if settings.concurrency is None else None,
        "concurrency": settings.concurrency,
        "policy": settings.policy,
        "seed": settings.seed,
        "skip_bad": int(options.skip_bad),
    }
