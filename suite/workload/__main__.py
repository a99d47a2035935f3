"""``python -m suite.workload {generate,analyse,convert}``: make request traces, look into them, cut and scale them.

Traces are JSONL in Mooncake's format (``suite.workload.trace``); ``-`` is standard input or output. What is told to people
goes to standard error where a trace goes to standard output. Exit code 4 with one line for bad input.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec
from msgspec.structs import replace

from fixtures.errors import UsageError
from fixtures.models import resolve_model
from suite.workload import shape
from suite.workload.analyse import Analyser, Analysis
from suite.workload.datasets import TextReader, TextReading
from suite.workload.distributions import Distribution, parse, parse_arrivals
from suite.workload.prefix_repetition import PrefixRepetition
from suite.workload.presets import PRESETS
from suite.workload.sessions import SessionSpec, SessionTraffic, SharedPrompt, SystemPrompt
from suite.workload.tables import table
from suite.workload.target import with_hit_rate
from suite.workload.text import FileTokenizer
from suite.workload.trace import (
    MOONCAKE_BLOCK_TOKENS,
    TraceReader,
    TraceRequest,
    TraceRules,
    renumbered,
    told,
    write_trace,
)

EXIT_USAGE = 4


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    try:
        options = _parser().parse_args(argv)
    except SystemExit as exc:  # argparse has printed why
        return EXIT_USAGE if exc.code else 0
    command: Callable[[argparse.Namespace], None] = options.command
    try:
        command(options)
    except UsageError as exc:
        sys.stderr.write(f"workload: {exc}\n")
        return EXIT_USAGE
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m suite.workload", description="Request traces.", allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="{generate,analyse,convert}")
    for add in (_add_generate, _add_analyse, _add_convert):
        add(commands)
    return parser


# generate -----------------------------------------------------------------------------------------------------------
_DISTRIBUTIONS = {
    "--turns": "requests of a session",
    "--user": "tokens of a user's message",
    "--tool": "tokens of a tool's output",
    "--answer": "tokens of an answer",
    "--think-s": "seconds from an answer to the user's next message",
    "--tool-s": "seconds from an answer to the tool's output",
}
_FIELDS = {"answer": "output"}


def _add_generate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "generate",
        help="make a trace",
        epilog="Lengths and times are N, uniform:MIN,MAX, exponential:MEAN, lognormal:MEAN,CV or gamma:MEAN,CV, with ,min= and"
        " ,max= to clip. The same options give the same trace.",
        allow_abbrev=False,
    )
    command.set_defaults(command=_generate)
    command.add_argument("kind", choices=[*PRESETS, "prefix-repetition"], help="what to begin with")
    command.add_argument("-o", "--output", default="-", metavar="FILE", help="(default: standard output)")
    command.add_argument("--requests", type=int, help="how many (default: 1000)")
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--block-tokens", type=int, help="tokens of a block")
    command.add_argument(
        "--arrivals", metavar="PROCESS", help="of sessions: poisson:RATE, gamma:RATE,CV or constant:RATE a second"
    )
    command.add_argument(
        "--with-sessions", action="store_true", help="add the field `session`, which Mooncake's traces lack"
    )
    traffic = command.add_argument_group("traffic of sessions")
    traffic.add_argument(
        "--prompt", metavar="LENGTHS", help="tokens of a session's first prompt, system prompt included"
    )
    traffic.add_argument("--share", type=float, help="part of it that is its group's system prompt, in whole blocks")
    traffic.add_argument(
        "--hit-rate", type=float, help="find the share that gives this hit rate of tokens in an infinite pool"
    )
    traffic.add_argument(
        "--system", metavar="LENGTHS", help="tokens of a group's system prompt, before a user's message"
    )
    for name, text in _DISTRIBUTIONS.items():
        traffic.add_argument(name, metavar="LENGTHS", help=text)
    traffic.add_argument("--tool-share", type=float, help="part of later turns that carry a tool's output")
    traffic.add_argument("--groups", type=int, help="how many system prompts there are")
    traffic.add_argument(
        "--max-tokens", type=int, help="most tokens of prompt and answer; a session ends before it outgrows them"
    )
    repetition = command.add_argument_group("prefix-repetition (vLLM's parameters)")
    for name, value in (("prefix-len", 256), ("suffix-len", 256), ("num-prefixes", 10), ("output-len", 128)):
        repetition.add_argument(f"--{name}", type=int, default=value, help=f"(default: {value})")


def _generate(options: argparse.Namespace) -> None:
    if options.kind == "prefix-repetition":
        spec = PrefixRepetition(
            num_prompts=1000 if options.requests is None else options.requests,
            prefix_len=options.prefix_len,
            suffix_len=options.suffix_len,
            num_prefixes=options.num_prefixes,
            output_len=options.output_len,
            arrivals=parse_arrivals(options.arrivals or "poisson:1", "--arrivals"),
            block_tokens=options.block_tokens or 16,
            seed=options.seed,
        )
        count = write_trace(spec.requests(), options.output)
        _tell(f"{count} requests of {spec.num_prefixes} prefixes, blocks of {spec.block_tokens} tokens")
        return
    traffic = SessionTraffic(_session_spec(options))
    count = write_trace(traffic if options.with_sessions else _without_sessions(traffic), options.output)
    _tell(
        f"{count} requests, blocks of {traffic.spec.block_tokens} tokens; system prompts are"
        f" {traffic.system_tokens / traffic.first_tokens:.1%} of {traffic.first_tokens} tokens of first prompts"
    )


def _session_spec(options: argparse.Namespace) -> SessionSpec:
    spec = PRESETS[options.kind]()
    changes: dict[str, Distribution | int | float] = {"seed": options.seed}
    for name in _DISTRIBUTIONS:
        field = name[2:].replace("-", "_")
        if (text := getattr(options, field)) is not None:
            changes[_FIELDS.get(field, field)] = parse(text, name)
    for field in ("requests", "groups", "max_tokens", "block_tokens", "tool_share"):
        if (value := getattr(options, field)) is not None:
            changes[field] = value
    spec = replace(spec, **changes, opening=_opening(options, spec))
    if options.arrivals is not None:
        spec = replace(spec, sessions=parse_arrivals(options.arrivals, "--arrivals"))
    return spec if options.hit_rate is None else with_hit_rate(spec, options.hit_rate)


def _opening(options: argparse.Namespace, spec: SessionSpec) -> SharedPrompt | SystemPrompt:
    shared = options.prompt, options.share, options.hit_rate
    if options.system is not None:
        if shared != (None, None, None):
            raise UsageError(
                "--system gives system prompts a length of their own; leave out --prompt, --share and --hit-rate"
            )
        return SystemPrompt(tokens=parse(options.system, "--system"))
    if options.share is not None and options.hit_rate is not None:
        raise UsageError("--hit-rate finds the share; leave out --share")
    if shared == (None, None, None):
        return spec.opening
    if options.prompt is None and not isinstance(spec.opening, SharedPrompt):
        raise UsageError("--share and --hit-rate need the length of a first prompt; add --prompt LENGTHS")
    prompt = spec.opening.prompt if isinstance(spec.opening, SharedPrompt) else None
    share = spec.opening.share if isinstance(spec.opening, SharedPrompt) else 0.5
    if options.prompt is not None:
        prompt = parse(options.prompt, "--prompt")
    assert prompt is not None
    return SharedPrompt(prompt=prompt, share=share if options.share is None else options.share)


def _without_sessions(requests: Iterable[TraceRequest]) -> Iterator[TraceRequest]:
    return (replace(r, session=None) for r in requests)


# analyse ------------------------------------------------------------------------------------------------------------
def _add_reading(command: argparse.ArgumentParser) -> None:
    command.add_argument("trace", metavar="FILE", help="- is standard input")
    command.add_argument(
        "--block-tokens",
        type=int,
        default=MOONCAKE_BLOCK_TOKENS,
        help=f"tokens of a block (default: {MOONCAKE_BLOCK_TOKENS}, Mooncake's)",
    )
    command.add_argument("--skip-bad", action="store_true", help="leave bad lines out and count them by reason")
    command.add_argument("--renumber", action="store_true", help="hash ids are any numbers, not counted up from 0")


def _add_analyse(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser("analyse", help="lengths, arrivals and hit rates of a trace", allow_abbrev=False)
    command.set_defaults(command=_analyse)
    _add_reading(command)
    command.add_argument(
        "--engine-block-tokens", type=int, default=16, help="blocks of the engine, for `reusable` (default: 16)"
    )
    command.add_argument(
        "--pool", metavar="N,N,...", help="LRU pools, in blocks of the trace (default: the full one, halved six times)"
    )
    command.add_argument(
        "--model", metavar="NAME", help="tiny model or model directory: gives pool sizes in GiB and the longest request"
    )
    command.add_argument(
        "--max-model-len", type=int, help="most tokens of prompt and answer (default: the model's, if one is given)"
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
        _tell(told(reader.skipped))


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
    if options.block_tokens < 1:
        raise UsageError(f"--block-tokens {options.block_tokens}: give a size of 1 or more")
    return TraceRules(
        block_tokens=options.block_tokens, max_model_tokens=limit, skip_bad=options.skip_bad, renumber=options.renumber
    )


# convert ------------------------------------------------------------------------------------------------------------
def _add_convert(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
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
    command.add_argument("--seed", type=int, default=0, help="of the sample, and of drawn arrivals")
    command.add_argument("--start-s", type=float, default=0.0, help="first second to keep")
    command.add_argument("--end-s", type=float, default=float("inf"), help="second to end before")
    command.add_argument("--limit", type=int, help="most requests to keep")
    command.add_argument(
        "--to-block-tokens", type=int, help="scale blocks, prompts and answers to this size of a block"
    )
    command.add_argument(
        "--fit", type=int, metavar="TOKENS", help="cut requests to this many tokens of prompt and answer"
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
    text.add_argument("--output-tokens", type=int, help="length of every answer (default: as the file has it)")
    text.add_argument("--max-turns", type=int, help="turns of a conversation to take (1: what vLLM's benchmark takes)")
    text.add_argument(
        "--think-s", type=float, default=10.0, help="seconds between a conversation's turns (default: 10)"
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
    count = write_trace(renumbered(requests if options.with_sessions else _without_sessions(requests)), options.output)
    _tell(f"{count} requests, blocks of {block} tokens" + (f"; {told(source.skipped)}" if source.skipped else ""))


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


def _tell(line: str) -> None:
    sys.stderr.write(f"{line}\n")


if __name__ == "__main__":
    sys.exit(main())
