"""``collect`` and judge of B.offload on a model of an engine with a tier in host memory (a real one needs a GPU), and the stacks it runs on."""

from __future__ import annotations

from typing import Any

import pytest

from fixtures.errors import Untestable
from fixtures.models import SHAPES
from fixtures.pytest_support.run import check_stack
from fixtures.spec import load_spec
from reports import records as r
from reports.history import History
from suite.bench.offload import OFFLOAD, OFFLOAD_BREAK_EVEN
from suite.bench.sweep import LADDER_GATE
from suite.bench.ttft import LONG, TTFT
from suite.contract import Case, safe_judge
from suite.gates.test_connector_options import OPTIONS_GATE
from suite.gates.test_prefix import BOUNDARY
from suite.selftest import bench_samples as samples
from suite.selftest.test_bench_ttft import CASE as TTFT_CASE
from suite.selftest.test_bench_ttft import TIMES, TOKENS, ModelStack

pytestmark = pytest.mark.selftest

CASE = Case(f"B.offload.t{TOKENS}", {"tokens": TOKENS, "maximum": 24})


class TierStack(ModelStack):
    """One engine; ``pool`` is its tier. resets: whether a reset empties its own cache. tier: whether it keeps anything."""

    def __init__(self, times: dict[str, float], *, resets: bool = True, tier: bool = True) -> None:
        super().__init__(times, pool_works=tier)
        self.names = ["e0"]
        self.store: Any = None
        self.resets = resets
        self.records[:] = [
            samples.stack_up(platform="cuda"),
            samples.started(CASE.id, "B.offload", **CASE.params),
        ]

    def reset_local_cache(self, engine: str) -> int:
        if self.resets:
            self.caches[engine].clear()
        return 200

    def ask(self, engine: str, prompt: tuple[int, ...], role: str, **fields: Any) -> r.Observation:
        found = super().ask(engine, prompt, role, **fields)
        self.counted[engine]["store.load_get.ok.bytes"] = 0  # no pool
        return found


def _collected(**kwargs: Any) -> tuple[TierStack, r.Verdict]:
    stack: Any = TierStack(kwargs.pop("times", TIMES), **kwargs)
    OFFLOAD.collect(stack, CASE)
    records = [_as_of(CASE.id, rec) for rec in stack.records]
    records.append(r.CaseFinished(case_id=CASE.id, t_s=3.0))
    return stack, safe_judge(OFFLOAD, History(records).for_case(CASE.id))


def _as_of(case_id: str, rec: r.Record) -> r.Record:
    """The model writes its requests down under the pool's case."""
    if isinstance(rec, r.Observation) and rec.case_id == TTFT_CASE.id:
        return r.Observation(**{f: getattr(rec, f) for f in rec.__struct_fields__} | {"case_id": case_id})
    return rec


def test_it_finds_the_ratio_of_the_model() -> None:
    _, verdict = _collected()
    assert verdict.outcome is r.Outcome.PASS, verdict
    ratio, low, high = verdict.numbers["external_over_cold"]
    assert low <= 0.5 <= high
    assert ratio == pytest.approx(0.5, rel=0.1)
    assert verdict.numbers["thrown"] == {}
    assert verdict.claim == OFFLOAD.claim


def test_a_slow_tier_is_red() -> None:
    _, verdict = _collected(times={**TIMES, "external": 0.4})
    assert (verdict.outcome, verdict.finding) == (r.Outcome.FAIL, "slower-than-recompute")


def test_a_tier_that_keeps_nothing_is_red() -> None:
    _, verdict = _collected(tier=False)
    assert (verdict.outcome, verdict.finding) == (r.Outcome.FAIL, "fewer-hits")


def test_a_reset_that_does_nothing_never_becomes_a_figure_of_the_tier() -> None:
    _, verdict = _collected(resets=False)
    assert verdict.outcome is r.Outcome.INCONCLUSIVE
    assert verdict.numbers["thrown"] == {"external: partly from the engine's own cache": 24}


def test_it_runs_on_a_stack_that_offloads_and_on_no_other() -> None:
    base = load_spec("cpu-offload")
    for case in OFFLOAD.cases():
        assert OFFLOAD.stack(base, case) == base
    for name in ("native", "multi"):
        for gate, case in (
            (OFFLOAD, next(iter(OFFLOAD.cases()))),
            (OFFLOAD_BREAK_EVEN, Case("B.offload-break-even.x")),
        ):
            with pytest.raises(Untestable, match="cpu-offload"):
                gate.stack(load_spec(name), case)


@pytest.mark.parametrize("tokens", LONG)
def test_a_prompt_that_the_engines_do_not_take_is_no_verdict(tokens: int) -> None:
    case = Case(f"B.ttft.t{tokens}", {"tokens": tokens, "maximum": 12})
    assert TTFT.stack(load_spec("gpu-shapes"), case).engines[-1].contributes is False
    if tokens > 4096:
        with pytest.raises(Untestable, match="4096 tokens at most"):
            TTFT.stack(load_spec("cpu"), case)


@pytest.mark.parametrize("name", ["gpu-shapes", "cpu-offload", "lmcache"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_stacks_for_timing_hold_what_a_length_prepares(name: str, shape: str) -> None:
    """Caches, pool and tier against the prompts that are in play at the longest length."""
    from suite.bench.sampler import PREPARED_TOKENS

    spec, model = load_spec(name), SHAPES[shape]
    token = 2 * model.layers * model.kv_heads * model.head_dim * 2
    engine = spec.engines[-1]
    in_play = 6 * PREPARED_TOKENS * token  # native and cold and external, two places each
    assert engine.kv_cache_bytes > in_play
    if spec.store is not None:
        assert spec.store.segment_bytes * spec.store.eviction_high_watermark_ratio > 3 * 2 * PREPARED_TOKENS * token
        assert max(LONG) + 2 <= engine.max_model_len
    elif engine.lmcache is not None:
        assert engine.lmcache.local_cpu_bytes > in_play
    else:
        assert engine.kv_extra["cpu_bytes_to_use"] > in_play


def test_exact_hits_are_not_judged_where_a_tier_behind_the_pool_adds_to_them() -> None:
    """Seen on a GPU: the native arm of a prompt of 2,000 tokens had 2,000 cached ones, so it had another shape than the external one."""
    multi, shared = load_spec("multi"), load_spec("gpu-shared")
    with pytest.raises(Untestable, match="last block"):
        check_stack(BOUNDARY, multi, multi)
    check_stack(BOUNDARY, shared, shared)
    check_stack(LADDER_GATE, multi, multi)
    option = OPTIONS_GATE.stack(shared, next(c for c in OPTIONS_GATE.cases() if c.id == "P.options.multi"))
    check_stack(OPTIONS_GATE, option, option)
