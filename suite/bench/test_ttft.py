"""Family B: time to first token, cold, native and from the pool. ``pytest -m bench``.

The gates take interleaved blocks and decide (``suite.bench.ttft``); the plain timings below are ordinary pytest-benchmark tests, for
its tables and for trends with its own tools.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from suite.bench.blocks import ARMS
from suite.bench.break_even import BREAK_EVEN
from suite.bench.offload import OFFLOAD, OFFLOAD_BREAK_EVEN
from suite.bench.plain import PlainTtft
from suite.bench.sampler import remote_reader
from suite.bench.ttft import TTFT
from suite.gates import gate_cases

if TYPE_CHECKING:
    from suite.contract import Case

PLAIN_TOKENS = 2000
PLAIN_ROUNDS = 5


@gate_cases(TTFT, "bench")
def test_ttft(run_case: Any, case: Case) -> None:
    run_case(TTFT, case)


@gate_cases(BREAK_EVEN, "bench")
def test_break_even(run_case: Any, case: Case) -> None:
    run_case(BREAK_EVEN, case)


@gate_cases(OFFLOAD, "bench")
def test_offload(run_case: Any, case: Case) -> None:
    run_case(OFFLOAD, case)


@gate_cases(OFFLOAD_BREAK_EVEN, "bench")
def test_offload_break_even(run_case: Any, case: Case) -> None:
    run_case(OFFLOAD_BREAK_EVEN, case)


@pytest.mark.bench
@pytest.mark.parametrize("arm", ARMS)
def test_plain_ttft(benchmark: Any, kvgates_run: Any, arm: str) -> None:
    """Timed to the first token; the prompt is made new in setup, the rest of the answer is read in teardown."""
    stack = kvgates_run.pool.acquire(remote_reader(kvgates_run.spec))
    plain = PlainTtft(stack, arm, PLAIN_TOKENS)
    benchmark.group = f"TTFT, {PLAIN_TOKENS} tokens, {stack.spec.name}"
    benchmark.extra_info.update(plain.info())
    benchmark.pedantic(plain.first_token, setup=plain.setup, teardown=plain.drain, rounds=PLAIN_ROUNDS, warmup_rounds=1)
    assert plain.complaints == []
