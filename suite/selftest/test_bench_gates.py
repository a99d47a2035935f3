"""Judges of family B on hand-made histories: what passes, and what each of them is red for."""

from __future__ import annotations

import math
from typing import Any

import pytest

from reports import records as r
from reports.history import History
from reports.judge import known_gates
from suite.bench.blocks import read_blocks
from suite.bench.break_even import BREAK_EVEN, break_even
from suite.bench.registry import registry
from suite.bench.replays import Cell
from suite.bench.statistics import decide
from suite.bench.sweep import LADDER_GATE, PROMISE, SWEEP
from suite.bench.ttft import TTFT
from suite.contract import safe_judge
from suite.selftest import bench_samples as samples

pytestmark = pytest.mark.selftest

CUDA = {"platform": "cuda"}
FAST = {"cold": 0.2, "native": 0.05, "external": 0.1}
SLOW = {"cold": 0.1, "native": 0.05, "external": 0.2}


def _judged(*args: Any, **kwargs: Any) -> tuple[str, str, r.Verdict]:
    verdict = safe_judge(TTFT, samples.ttft_history(*args, **kwargs))
    return str(verdict.outcome), verdict.finding, verdict


def test_a_pool_that_is_faster_than_computing_passes() -> None:
    outcome, _, verdict = _judged(lambda _: FAST, spec=CUDA)
    assert outcome == "PASS", verdict
    assert verdict.numbers["external_over_cold"][0] == pytest.approx(0.5)
    assert verdict.numbers["blocks"] == 12


def test_a_pool_that_is_slower_fails() -> None:
    assert _judged(lambda _: SLOW, spec=CUDA)[:2] == ("FAIL", "slower-than-recompute")


def test_a_threshold_of_the_spec_is_judged_on_a_cpu_too() -> None:
    spec = {"bench": {"external_over_cold": 0.4}}
    assert _judged(lambda _: FAST, spec=spec)[:2] == ("FAIL", "slower-than-recompute")
    assert _judged(lambda _: FAST, spec={"bench": {"external_over_cold": 0.6}})[0] == "PASS"


def test_without_a_threshold_a_slower_pool_is_reported_and_says_so() -> None:
    outcome, _, verdict = _judged(lambda _: SLOW)
    assert outcome == "PASS"
    assert "SLOWER than computing anew" in verdict.notes[0]
    assert verdict.claim != TTFT.claim, "a claim that was not judged may not be shown as one that holds"


def test_a_short_prompt_is_measured_and_never_judged() -> None:
    sources = {"cold": (0, 0), "native": (96, 0), "external": (0, 96)}
    case = "B.ttft.t128"
    records = [
        samples.stack_up(**CUDA),
        samples.started(case, "B.ttft", tokens=128, maximum=24),
        *samples.pool_records(),
    ]
    for block in range(10):
        records += samples.block_records(case, block, SLOW, 128, sources)
    verdict = safe_judge(TTFT, History([*records, *samples.closed(case)]).for_case(case))
    assert verdict.outcome is r.Outcome.PASS, verdict
    assert "SLOWER" in verdict.notes[0]


def test_what_is_near_the_threshold_is_inconclusive_and_says_how_much_is_missing() -> None:
    outcome, finding, verdict = _judged(
        lambda b: {"cold": 0.1, "native": 0.05, "external": 0.1 * (1.02 if b % 3 else 0.97)}, spec=CUDA
    )
    assert (outcome, finding) == ("INCONCLUSIVE", "too-few-observations")
    assert "more" in verdict.got


def test_too_few_blocks_are_inconclusive_with_and_without_a_threshold() -> None:
    for spec in (CUDA, {}):
        assert _judged(lambda _: FAST, blocks=6, spec=spec)[:2] == ("INCONCLUSIVE", "too-few-observations")


def test_a_cold_that_was_warm_is_thrown_out_and_counted() -> None:
    warm = {"sources": {**samples.SOURCES, "cold": (32, 0)}}
    outcome, _, verdict = _judged(lambda _: FAST, spoil=lambda b: warm if b < 2 else {})
    assert outcome == "PASS"
    assert verdict.numbers["thrown"] == {"cold: was warm": 2}
    assert verdict.numbers["blocks"] == 10


def test_mostly_warm_blocks_measure_nothing() -> None:
    warm = {"sources": {**samples.SOURCES, "cold": (32, 0)}}
    outcome, finding, _ = _judged(lambda _: FAST, blocks=24, spoil=lambda b: warm if b < 14 else {})
    assert (outcome, finding) == ("INCONCLUSIVE", "too-few-observations")


def test_a_pool_without_hits_is_the_stack_s_fault() -> None:
    missing = {"sources": {**samples.SOURCES, "external": (0, 0)}}
    assert _judged(lambda _: FAST, spoil=lambda _: missing)[:2] == ("FAIL", "fewer-hits")


def test_a_failed_request_fails() -> None:
    failed = {"http_status": 500, "error": "http 500: no"}
    outcome, finding, verdict = _judged(lambda _: FAST, spoil=lambda b: failed if b == 3 else {})
    assert (outcome, finding) == ("FAIL", "failed-request")
    assert "kv_load_failure_policy" in verdict.cause, "the cause is that of the finding"
    assert "the pool's path costs more" in _judged(lambda _: SLOW, spec=CUDA)[2].cause


def test_bytes_that_do_not_go_with_the_tokens_fail() -> None:
    history = samples.ttft_history(lambda _: FAST)
    spoiled = [
        r.MetricsSnapshot(unit=x.unit, label=x.label, t_s=x.t_s, values={**x.values, "store.load_get.ok.bytes": 7.0})
        if isinstance(x, r.MetricsSnapshot) and x.label.endswith("external/0:after")
        else x
        for x in history.records
    ]
    assert safe_judge(TTFT, History(spoiled, before=history.before)).finding == "conservation"


@pytest.mark.parametrize("holders", [("e0", "e1"), ("e1",), ("e0", "nobody"), ()])
def test_memory_of_the_reader_or_of_nobody_is_no_remote_pool(holders: tuple[str, ...]) -> None:
    assert _judged(lambda _: FAST, holders=holders)[:2] == ("INCONCLUSIVE", "no-control")


def test_a_save_that_was_never_listed_fails() -> None:
    history = samples.ttft_history(lambda _: FAST)
    late = r.WaitRecord(what="visible:x", t_s=1.0, elapsed_s=30.0, bound_s=30.0, came_true=False)
    records = [*history.records[:-1], late, history.records[-1]]
    assert safe_judge(TTFT, History(records, before=history.before)).finding == "save-not-visible"


def test_a_case_whose_logs_nobody_read_does_not_pass() -> None:
    history = samples.ttft_history(lambda _: FAST)
    records = [x for x in history.records if not (isinstance(x, r.Fact) and x.name == "logs.scanned")]
    assert safe_judge(TTFT, History(records, before=history.before)).outcome is not r.Outcome.PASS


def test_a_block_that_was_cut_short_does_not_count() -> None:
    records = samples.block_records("c", 0, FAST)
    assert read_blocks(records[:-3], samples.TOKENS, samples.BLOCK).thrown == {"not whole: a request is missing": 1}
    assert len(read_blocks(records, samples.TOKENS, samples.BLOCK).valid) == 1
    without_after = [x for x in records if not (isinstance(x, r.MetricsSnapshot) and x.label.endswith("cold/0:after"))]
    assert read_blocks(without_after, samples.TOKENS, samples.BLOCK).thrown == {"cold: no counters around it": 1}


# Break-even
def _decisions(ratios: dict[int, float], spread: float = 0.01, count: int = 20) -> dict[int, Any]:
    return {n: decide([math.log(x) + spread * math.sin(i) for i in range(count)], 1.0) for n, x in ratios.items()}


def test_break_even_lies_between_the_last_slower_and_the_first_faster_length() -> None:
    low, high, about = break_even(_decisions({128: 2.0, 512: 1.2, 2000: 0.6, 3900: 0.4}))
    assert (low, high) == (512, 2000)
    assert about is not None
    assert 512 < about < 2000


def test_an_undecided_length_widens_the_interval() -> None:
    assert break_even(_decisions({128: 2.0, 512: 1.001, 2000: 0.6}, spread=0.05))[:2] == (128, 2000)


def test_a_pool_that_never_pays_or_always_does() -> None:
    assert break_even(_decisions({128: 2.0, 512: 1.2})) == (512, math.inf, None)
    assert break_even(_decisions({128: 0.9, 512: 0.5})) == (0, 128, None)


def _break_even(ratios: dict[int, float]) -> r.Verdict:
    records: list[r.Record] = [samples.stack_up()]
    for tokens, ratio in ratios.items():
        sources = {"cold": (0, 0), "native": ((tokens - 1) // 32 * 32, 0), "external": (0, (tokens - 1) // 32 * 32)}
        for block in range(14):
            times = {"cold": 0.1, "native": 0.05, "external": 0.1 * ratio}
            records += samples.block_records(f"B.ttft.t{tokens}", block, times, tokens, sources)
    case = "B.break-even.tokens"
    records += [samples.started(case, "B.break-even"), r.CaseFinished(case_id=case, t_s=3.0)]
    return safe_judge(BREAK_EVEN, History(records).for_case(case))


def test_break_even_is_judged_from_the_other_cases_of_the_run() -> None:
    verdict = _break_even({128: 1.6, 512: 0.7})
    assert verdict.outcome is r.Outcome.PASS, verdict
    assert verdict.numbers["tokens_low"] == 128
    assert "between 128 and 512" in verdict.got
    assert "above 512" in _break_even({128: 1.6, 512: 1.2}).got
    assert "below 128" in _break_even({128: 0.8, 512: 0.6}).got


def test_break_even_needs_two_lengths_that_do_not_contradict_each_other() -> None:
    assert _break_even({512: 0.7}).outcome is r.Outcome.INCONCLUSIVE
    assert _break_even({128: 0.7, 512: 1.5}).outcome is r.Outcome.INCONCLUSIVE
    undecided = _break_even({128: 1.6, 512: 1.0})
    assert (undecided.outcome, undecided.finding) == (r.Outcome.INCONCLUSIVE, "too-few-observations")
    assert "open: no length up to 512 tokens is surely faster from the pool, surely slower up to 128" in undecided.got


# Replays
def _cell(arm: str = "native", cache: str = "ample", **changes: Any) -> Cell:
    return Cell(**{"arm": arm, "cache": cache, "engines": 2, "share": 90, "concurrency": 4, **changes})


def _replays(*facts: r.Fact, gate: Any = SWEEP) -> r.Verdict:
    case = f"{gate.id}.x"
    records = [samples.stack_up(), samples.started(case, gate.id), *facts, *samples.closed(case)]
    return safe_judge(gate, History(records).for_case(case))


def test_replays_that_add_up_pass() -> None:
    verdict = _replays(samples.measured(_cell(), local=800), samples.measured(_cell("pool"), local=300, external=700))
    assert verdict.outcome is r.Outcome.PASS, verdict
    assert verdict.numbers["pool-ample/e2/s90/c4"]["hit_external"] == 0.07


@pytest.mark.parametrize("gate", [SWEEP, LADDER_GATE])
def test_replays_are_red_for_each_thing(gate: Any) -> None:
    good = samples.measured(_cell(), local=800)
    summary = dict(good.value["summary"])
    failed = r.Fact(
        name=good.name, t_s=1.0, value={**good.value, "summary": {**summary, "failed": 2, "errors": {"lost": 2}}}
    )
    assert _replays(failed, gate=gate).finding == "failed-request"
    assert (
        _replays(samples.measured(_cell(), local=800, sent_by_engine={"e0": 9999}), gate=gate).finding == "conservation"
    )
    assert _replays(samples.measured(_cell(), local=800, external=300), gate=gate).finding == "extra-hits"
    assert _replays(gate=gate).finding == "too-few-observations"
    nothing = r.Fact(name="bench.replay-unanswered", t_s=1.0, value={"cell": "x", "errors": {"lost": 24}})
    assert _replays(good, nothing, gate=gate).finding == "failed-request"


def _promise(*facts: r.Fact, **spec: Any) -> r.Verdict:
    case = "B.promise.s90-e2"
    records = [samples.stack_up(**spec), *facts, samples.started(case, "B.promise", share=90, engines=2)]
    records += [r.CaseFinished(case_id=case, t_s=3.0)]
    return safe_judge(PROMISE, History(records).for_case(case))


def _three(ample: int, native: int, pool: tuple[int, int]) -> list[r.Fact]:
    return [
        samples.measured(_cell("native", "ample"), local=ample, reusable=8000),
        samples.measured(_cell("native", "constrained"), local=native, reusable=8000),
        samples.measured(_cell("pool", "constrained"), local=pool[0], external=pool[1], reusable=8000),
    ]


def test_the_promise_is_kept_or_broken() -> None:
    kept = _promise(*_three(7000, 2000, (2000, 4500)))
    assert kept.outcome is r.Outcome.PASS, kept
    assert kept.numbers["share"] == 0.9
    assert _promise(*_three(7000, 2000, (2000, 1000))).finding == "fewer-hits"
    assert _promise(*_three(7000, 2000, (2000, 0))).finding == "fewer-hits"
    assert _promise(*_three(7000, 2000, (2000, 1000)), bench={"recovered_share": 0.1}).outcome is r.Outcome.PASS


def test_no_promise_is_judged_where_nothing_was_lost_or_measured() -> None:
    assert _promise(*_three(2100, 2000, (2000, 0))).outcome is r.Outcome.INCONCLUSIVE
    assert _promise(*_three(7000, 2000, (2000, 4500))[:2]).finding == "no-control"
    assert _promise().outcome is r.Outcome.INCONCLUSIVE


@pytest.mark.parametrize("changes", [{"sent_by_engine": {"e0": 9999}}, {"reusable": 6000}])
def test_a_promise_does_not_rest_on_a_replay_that_does_not_add_up(changes: dict[str, Any]) -> None:
    ample, native, _ = _three(7000, 2000, (2000, 4500))
    spoiled = samples.measured(_cell("pool", "constrained"), local=2000, external=4500, **{"reusable": 8000, **changes})
    verdict = _promise(ample, native, spoiled)
    assert (verdict.outcome, verdict.finding) == (r.Outcome.INCONCLUSIVE, "no-control")


def test_the_newest_replay_of_a_cell_counts() -> None:
    old = samples.measured(_cell("pool", "constrained"), local=2000)
    assert _promise(old, *_three(7000, 2000, (2000, 4500))).outcome is r.Outcome.PASS


# The family
@pytest.mark.parametrize("gate", registry().values(), ids=lambda g: g.id)
def test_every_benchmark_says_its_claim_how_it_can_lie_its_oracle_and_what_turns_it_red(gate: Any) -> None:
    for part in ("Claim:", "How it can lie:", "Oracle:", "Turns red:"):
        assert part in (type(gate).__doc__ or ""), f"{gate.id}: its docstring lacks {part!r}"


def test_case_ids_begin_with_their_gate_and_are_used_once() -> None:
    ids = [(gate.id, case.id) for gate in registry().values() for case in gate.cases()]
    assert all(case.startswith(f"{gate}.") for gate, case in ids)
    assert len({case for _, case in ids}) == len(ids)


def test_a_finished_run_of_benchmarks_can_be_judged_again() -> None:
    assert set(registry()) <= set(known_gates())
