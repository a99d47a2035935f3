"""``python -m suite.workload {generate,analyse,convert,replay}``: make request traces, look into them, cut and scale
them, send them to engines.

Traces are JSONL in Mooncake's format (``suite.workload.trace``); ``-`` is standard input or output. What is told to people
goes to standard error where a trace goes to standard output. Exit code 4 with one line for bad input, 12 for a
replay that nothing answered.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from fixtures.errors import UsageError
from fixtures.models import resolve_model
from suite.workload import shape
from suite.workload.analyse import Analyser, Analysis
from suite.workload.arguments import Parser, at_least, run_command, tell
from suite.workload.datasets import TextReader, TextReading
from suite.workload.distributions import parse_arrivals
from suite.workload.generate_command import add_generate
from suite.workload.reader import TraceReader, told
from suite.workload.replay_command import add_replay
from suite.workload.rules import TraceRules
from suite.workload.tables import table
from suite.workload.text import FileTokenizer
from suite.workload.trace import MOONCAKE_BLOCK_TOKENS, TraceRequest, renumbered, write_trace


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    try:
        return run_command(_parser(), argv, _run)
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _run(options: argparse.Namespace) -> None:
    command: Callable[[argparse.Namespace], None] = options.command
    command(options)


def _parser() -> Parser:
    parser = Parser(prog="python -m suite.workload", description="Request traces.", allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="{generate,analyse,convert,replay}")
    for add in (add_generate, _add_analyse, _add_convert, add_replay):
        add(commands)
    return parser


def _some(requests: Iterable[TraceRequest], what: str) -> Iterator[TraceRequest]:
    """The same requests. Raises UsageError where there are none."""
    empty = True
    for request in requests:
        empty = False
        yield request
    if empty:
        raise UsageError(f"{what}: no request is left; widen --sample, --start-s, --end-s or --limit")


# analyse ------------------------------------------------------------------------------------------------------------
def _add_reading(command: argparse.ArgumentParser) -> None:
    command.add_argument("trace", metavar="FILE", help="- is standard input")
    command.add_argument(
        "--block-tokens",
        type=at_least(1),
        default=MOONCAKE_BLOCK_TOKENS,
        help=f"tokens of a block (default: {MOONCAKE_BLOCK_TOKENS}, Mooncake's)",
    )
    command.add_argument("--skip-bad", action="store_true", help="leave bad lines out and count them by reason")
    command.add_argument("--renumber", action="store_true", help="hash ids are any numbers, not counted up from 0")


def _add_analyse(commands: argparse._SubParsersAction[Parser]) -> None:
    command = commands.add_parser("analyse", help="lengths, arrivals and hit rates of a trace", allow_abbrev=False)
    command.set_defaults(command=_analyse)
    _add_reading(command)
    command.add_argument(
        "--engine-block-tokens", type=at_least(1), default=16, help="blocks of the engine, for `reusable` (default: 16)"
    )
    command.add_argument(
        "--pool", metavar="N,N,...", help="LRU pools, in blocks of the trace (default: the full one, halved six times)"
    )
    command.add_argument(
        "--model", metavar="NAME", help="tiny model or model directory: gives pool sizes in GiB and the longest request"
    )
    command.add_argument(
        "--max-model-len",
        type=at_least(2),
        help="most tokens of prompt and answer (default: the model's, if one is given)",
    )
    command.add_argument("--json", action="store_true", help="print JSON instead of a table")


def _analyse(options: argparse.Namespace) -> None:
    model = resolve_model(options.model) if options.model else None
    limit = options.max_model_len or (model.max_position if model else None)
    reader = TraceReader(options.trace, _rules(options, limit))
    analyser = Analyser(options.block_tokens, options.engine_block_tokens)
    sizes = _pool_sizes(options.pool)
    for request in reader:
        analyser.add(request)
    found = analyser.result(sizes or ())
    if sizes is None:
        found = analyser.result(_halved(found))
    if options.json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(found)).decode() + "\n")
    else:
        sys.stdout.write(table(found, model.kv_bytes_per_token() if model else None))
    if reader.skipped:
        tell(told(reader.skipped))


def _halved(found: Analysis) -> list[int]:
    return sorted({max(1, found.full_pool_blocks >> n) for n in range(7)}) if found.full_pool_blocks else []


def _pool_sizes(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(word) for word in text.split(",")]
    except ValueError as exc:
        raise UsageError(f"--pool {text}: give numbers of blocks, e.g. 1000,10000") from exc


def _rules(options: argparse.Namespace, limit: int | None) -> TraceRules:
    return TraceRules(
        block_tokens=options.block_tokens, max_model_tokens=limit, skip_bad=options.skip_bad, renumber=options.renumber
    )


# convert ------------------------------------------------------------------------------------------------------------
def _add_convert(commands: argparse._SubParsersAction[Parser]) -> None:
    command = commands.add_parser(
        "convert",
        help="read a trace or data set, cut and scale it, write a trace",
        epilog="In this order: sample, window, blocks, fit, speed. Ids of the result count up from 0.",
        allow_abbrev=False,
    )
    command.set_defaults(command=_convert)
    _add_reading(command)
    command.add_argument("-o", "--output", default="-", metavar="FILE", help="(default: standard output)")
    command.add_argument(
        "--from", dest="kind", choices=("mooncake", "custom", "sharegpt"), default="mooncake", help="format of FILE"
    )
    command.add_argument("--sample", type=float, metavar="PART", help="keep this part of the sessions, whole ones")
    command.add_argument("--seed", type=at_least(0), default=0, help="of the sample, and of drawn arrivals")
    command.add_argument("--start-s", type=at_least(0, float), default=0.0, help="first second to keep")
    command.add_argument("--end-s", type=at_least(0, float), default=float("inf"), help="second to end before")
    command.add_argument("--limit", type=at_least(1), help="most requests to keep")
    command.add_argument(
        "--to-block-tokens", type=at_least(1), help="scale blocks, prompts and answers to this size of a block"
    )
    command.add_argument(
        "--fit", type=at_least(2), metavar="TOKENS", help="cut requests to this many tokens of prompt and answer"
    )
    command.add_argument("--speed", type=float, help="play this many times faster")
    command.add_argument(
        "--with-sessions", action="store_true", help="write the field `session`; found by what prompts share if missing"
    )
    text = command.add_argument_group("data sets of text (custom, sharegpt)")
    text.add_argument("--model", metavar="NAME", help="whose tokenizer to use")
    text.add_argument(
        "--arrivals", default="poisson:1", metavar="PROCESS", help="of prompts or conversations (default: poisson:1)"
    )
    text.add_argument("--output-tokens", type=at_least(1), help="length of every answer (default: as the file has it)")
    text.add_argument(
        "--max-turns", type=at_least(1), help="turns of a conversation to take (1: what vLLM's benchmark takes)"
    )
    text.add_argument(
        "--think-s", type=at_least(0, float), default=10.0, help="seconds between a conversation's turns (default: 10)"
    )


def _convert(options: argparse.Namespace) -> None:
    source, requests = _source(options)
    block = options.block_tokens
    if options.sample is not None or options.with_sessions:
        requests = shape.with_sessions(requests, block)
    if options.sample is not None:
        requests = shape.sample_sessions(requests, options.sample, options.seed)
    requests = shape.window(requests, start_s=options.start_s, end_s=options.end_s, limit=options.limit)
    if options.to_block_tokens is not None:
        requests = shape.scale_tokens(requests, block, options.to_block_tokens)
        block = options.to_block_tokens
    if options.fit is not None:
        requests = shape.fit(requests, options.fit, block)
    if options.speed is not None:
        requests = shape.faster(requests, options.speed)
    requests = _some(requests if options.with_sessions else shape.without_sessions(requests), options.trace)
    count = write_trace(renumbered(requests), options.output)
    tell(f"{count} requests, blocks of {block} tokens" + (f"; {told(source.skipped)}" if source.skipped else ""))


def _source(options: argparse.Namespace) -> tuple[TraceReader | TextReader, Iterator[TraceRequest]]:
    rules = _rules(options, None)
    if options.kind == "mooncake":
        reader = TraceReader(options.trace, rules)
        return reader, iter(reader)
    if options.model is None:
        raise UsageError(f"--from {options.kind}: text has to be cut into tokens; add --model NAME")
    how = TextReading(
        rules=rules,
        arrivals=parse_arrivals(options.arrivals, "--arrivals"),
        output_tokens=options.output_tokens,
        think_s=options.think_s,
        max_turns=options.max_turns,
        seed=options.seed,
    )
    text = TextReader(options.trace, FileTokenizer(resolve_model(options.model).path), how)
    return text, text.custom() if options.kind == "custom" else text.sharegpt()


if __name__ == "__main__":
    sys.exit(main())
