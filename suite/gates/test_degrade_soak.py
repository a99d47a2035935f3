"""Family D, the soak: random faults from a seed under steady traffic; one verdict."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import pytest

from fixtures.errors import UsageError
from reports import records as r
from reports.history import History
from suite.contract import Case, Gate
from suite.gates import gate_cases
from suite.gates.degrade_cells import MASTER, Cell
from suite.gates.degrade_soak import collect_soak, judge_soak

if TYPE_CHECKING:
    from fixtures.spec import StackSpec
    from fixtures.stack import Stack

DEFAULT_S = 120.0
"""Of `--scope full` without `--soak`: about five faults. `--soak 10m` is the one that says something about growth."""

LONGEST_S = 30 * 86400.0
"""Of `--soak`: more is a slip of the keyboard, and infinity is no time."""

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


class Soak(Gate):
    """Claim: after any number of faults the stack is as good as new: traffic beside them good, nothing grows.

    How it can lie: the faults did not land; no traffic flowed; it was too short for a growth to show; what fails inside
    a fault (which cells of the matrix judge) hides what fails outside.
    Oracle: each fault's proof; the proof of health after each; two engines' answers to one prompt; TTFT against the
    traffic's own baseline; sockets, threads and memory of every engine and of the suite itself after each fault.
    Turns red: a leak of connections or memory with each reconnect, a recovery that works once, a lost engine.
    """

    id = "D.soak"
    version = 3
    claim = "after any number of faults the stack is as good as new: traffic beside them is good, and nothing grows"

    def cases(self) -> Iterable[Case]:
        yield Case(f"{self.id}.random", {"seed": 1, "duration_s": DEFAULT_S}, core=False)

    def stack(self, base: StackSpec, case: Case) -> StackSpec:
        from suite.gates.degrade_faults import stack_of

        return stack_of(base, Cell(MASTER, "freeze")) if base.store is not None else base

    def collect(self, stack: Stack, case: Case) -> None:
        collect_soak(stack, case.id, case.params)

    def judge(self, history: History) -> r.Verdict:
        return judge_soak(self, history)


def duration_s(text: str) -> float:
    """``10m``, ``90s``, ``1h`` or plain seconds. Raises UsageError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip())
    found_s = float(match[1]) * _UNITS[match[2] or "s"] if match else 0.0
    if not 0 < found_s <= LONGEST_S:
        raise UsageError(f"--soak {text[:80]}: a time such as 10m, 90s or 1h, of at most 30 days")
    return found_s


def asked_for(case: Case, soak: str | None, seed: str | None) -> Case:
    """The case with the duration and seed of the command line. Raises UsageError."""
    params = dict(case.params)
    if soak:
        params["duration_s"] = duration_s(soak)
    if seed:
        if not (seed.isascii() and seed.isdigit() and len(seed) <= 18):
            raise UsageError(f"--soak-seed {seed[:80]}: a whole number of at most 18 digits")
        params["seed"] = int(seed)
    return dataclasses.replace(case, params=params)


SOAK = Soak()


@gate_cases(SOAK)
def test_soak(run_case: Any, case: Case, request: pytest.FixtureRequest) -> None:
    option = request.config.getoption
    run_case(SOAK, asked_for(case, option("kvgates_soak"), option("kvgates_soak_seed")))
