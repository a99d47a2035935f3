"""What judges of every family look up in a case's history."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from reports import records as r
from reports.history import History
from suite.checks.answers import Pair
from suite.gates.arms import REFERENCE

COLD = "cold"
"""Kind of a request whose prompt was nowhere."""


def kind_of(o: r.Observation) -> str:
    """The role of a request without its tag: ``turn`` of ``turn/3``."""
    return o.role.partition("/")[0]


def measured(history: History) -> list[r.Observation]:
    """Requests of the case whose engine's counters were read before them."""
    return [o for o in history.observations() if history.metrics(o.engine, f"{o.request_id}:before") is not None]


def cold_pairs(history: History, asked: Sequence[r.Observation]) -> list[Pair]:
    """(answer, cold answer) of each answered request whose prompt has a cold answer in this case."""
    cold = {o.prompt_token_ids: o for o in history.observations() if kind_of(o) in (COLD, REFERENCE)}
    return [(o, cold[o.prompt_token_ids]) for o in asked if o.ok and o.prompt_token_ids in cold]


def budget_of(history: History) -> dict[str, Any]:
    """``[budget]`` of the spec of the case's stack. ValueError where the case ran on none."""
    if history.stack is None:
        raise ValueError("the case ran on no stack")
    budget: dict[str, Any] = dict(history.stack.spec["budget"])
    return budget
