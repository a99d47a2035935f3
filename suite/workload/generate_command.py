"""``python -m suite.workload generate``: options to specs."""

from __future__ import annotations

import argparse

from msgspec.structs import replace

from fixtures.errors import UsageError
from suite.workload.arguments import Parser, at_least, tell
from suite.workload.distributions import Distribution, parse, parse_arrivals
from suite.workload.prefix_repetition import PrefixRepetition
from suite.workload.presets import PRESETS
from suite.workload.sessions import SessionSpec, SessionTraffic, SharedPrompt, SystemPrompt
from suite.workload.shape import without_sessions
from suite.workload.target import with_hit_rate
from suite.workload.trace import write_trace

_DISTRIBUTIONS = {
    "--turns": "requests of a session",
    "--user": "tokens of a user's message",
    "--tool": "tokens of a tool's output",
    "--answer": "tokens of an answer",
    "--think-s": "seconds from an answer to the user's next message",
    "--tool-s": "seconds from an answer to the tool's output",
}
_FIELDS = {"answer": "output"}


def add_generate(commands: argparse._SubParsersAction[Parser]) -> None:
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
    command.add_argument("--requests", type=at_least(1), help="how many (default: 1000)")
    command.add_argument("--seed", type=at_least(0), default=0)
    command.add_argument("--block-tokens", type=at_least(1), help="tokens of a block")
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
    traffic.add_argument("--groups", type=at_least(1), help="how many system prompts there are")
    traffic.add_argument(
        "--max-tokens",
        type=at_least(2),
        help="most tokens of prompt and answer; a session ends before it outgrows them",
    )
    repetition = command.add_argument_group("prefix-repetition (vLLM's parameters)")
    for name, value in (("prefix-len", 256), ("suffix-len", 256), ("num-prefixes", 10), ("output-len", 128)):
        repetition.add_argument(f"--{name}", type=at_least(0), default=value, help=f"(default: {value})")


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
        tell(f"{count} requests of {spec.num_prefixes} prefixes, blocks of {spec.block_tokens} tokens")
        return
    traffic = SessionTraffic(_session_spec(options))
    count = write_trace(traffic if options.with_sessions else without_sessions(traffic), options.output)
    tell(
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
