"""What the commands of this package share."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import NoReturn

from fixtures.errors import UsageError


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
