"""Every gate of family B by id, so that a finished run can be judged again."""

from __future__ import annotations

from suite.contract import Gate
from suite.gates import gates_in

MODULES = (
    "suite.bench.ttft",
    "suite.bench.break_even",
    "suite.bench.offload",
    "suite.bench.sweep",
    "suite.bench.interleaved",
    "suite.bench.backlog",
)


def registry() -> dict[str, Gate]:
    """Gates by id. Raises ValueError for an id used twice."""
    return gates_in(MODULES)
