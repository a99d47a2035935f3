"""Family B: the baseline sweep, what the pool promises on it, and a concurrency ladder.

``pytest -m bench -k 'B.sweep or B.promise'`` measures the baseline; ``python -m suite.bench.baseline RUN`` makes its page.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from suite.bench.backlog import BACKLOG
from suite.bench.sweep import LADDER_GATE, PROMISE, SWEEP
from suite.gates import gate_cases

if TYPE_CHECKING:
    from suite.contract import Case


@gate_cases(BACKLOG, "bench")
def test_backlog(run_case: Any, case: Case) -> None:
    run_case(BACKLOG, case)


@gate_cases(LADDER_GATE, "bench")
def test_ladder(run_case: Any, case: Case) -> None:
    run_case(LADDER_GATE, case)


@gate_cases(SWEEP, "bench")
def test_sweep(run_case: Any, case: Case) -> None:
    run_case(SWEEP, case)


@gate_cases(PROMISE, "bench")
def test_promise(run_case: Any, case: Case) -> None:
    run_case(PROMISE, case)
