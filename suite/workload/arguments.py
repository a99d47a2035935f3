"""What the commands of this package and of ``suite.bench`` share."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from fixtures.arguments import EXIT_USAGE
from fixtures.errors import HarnessError, UsageError

EXIT_HARNESS = 12


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, like the rest of the suite, instead of after a page of usage."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; --help lists the options")


def at_least(least: float, kind: type[int] | type[float] = int) -> Callable[[str], float]:
    """A type for argparse: numbers of ``least`` or more."""

    def number(text: str) -> float:
        value = kind(text)
        if not value >= least:  # the other way round it would let nan pass
            raise argparse.ArgumentTypeError(f"{text} is below {least:g}")
        return value

    number.__name__ = kind.__name__  # argparse names the type in its message
    return number


def tell(line: str) -> None:
    """A line for people, which must not end up in a trace on standard output."""
    sys.stderr.write(f"{line}\n")


def run_command(
    parser: Parser,
    argv: Sequence[str] | None,
    command: Callable[[argparse.Namespace], int | None],
    *bad_input: type[Exception],
) -> int:
    """Run a command; returns its exit code, 0 where it has none. 4 with one line for bad input (UsageError and ``bad_input``), 12 for HarnessError."""
    name = parser.prog.rpartition(".")[2]
    usage: tuple[type[Exception], ...] = (UsageError, *bad_input)
    try:
        try:
            options = parser.parse_args(argv)
        except SystemExit:  # --help; errors of usage are raised
            return 0
        return command(options) or 0
    except usage as exc:
        tell(f"{name}: {exc}")
        return EXIT_USAGE
    except HarnessError as exc:
        tell(f"{name}: {exc}")
        return EXIT_HARNESS
