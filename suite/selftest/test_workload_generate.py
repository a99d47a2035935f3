"""The generator: exact lengths, the share that was asked for, the structure of conversations, its speed and its memory."""

from __future__ import annotations

import time
import tracemalloc
from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import pairwise

import numpy as np
import pytest
from msgspec.structs import replace

from fixtures.errors import UsageError
from suite.workload.analyse import analyse
from suite.workload.distributions import Arrivals, constant, parse, parse_arrivals
from suite.workload.prefix_repetition import PrefixRepetition
from suite.workload.presets import PRESETS
from suite.workload.rules import TraceChecker, TraceRules
from suite.workload.sessions import ANSWER_S_PER_TOKEN, SessionSpec, SessionTraffic, SharedPrompt, SystemPrompt
from suite.workload.target import CLOSE, with_hit_rate
from suite.workload.trace import TraceRequest

pytestmark = pytest.mark.selftest

LEAST_RATE = 50_000
"""Requests a second of processor time that the generator has to make (for each of its presets)."""


def shared(share: float, prompt: str = "2048", **changes: object) -> SessionSpec:
    spec = SessionSpec(
        requests=3000,
        opening=SharedPrompt(prompt=parse(prompt, "prompt"), share=share),
        output=constant(10),
        sessions=Arrivals(rate_per_s=10),
        block_tokens=32,
        groups=3,
    )
    return replace(spec, **changes)


def conversation(**changes: object) -> SessionSpec:
    spec = replace(PRESETS["agentic"](), requests=2000, block_tokens=64)
    return replace(spec, **changes)


def of_sessions(requests: Iterable[TraceRequest]) -> dict[int, list[TraceRequest]]:
    found: dict[int, list[TraceRequest]] = defaultdict(list)
    for r in requests:
        assert r.session is not None
        found[r.session].append(r)
    return found


@pytest.mark.parametrize("kind", PRESETS)
@pytest.mark.parametrize("block", [16, 512])
def test_what_is_generated_keeps_every_rule_of_a_trace(kind: str, block: int) -> None:
    spec = replace(PRESETS[kind](), requests=1500, block_tokens=block, max_tokens=20000)
    checker = TraceChecker(TraceRules(block_tokens=block, max_model_tokens=20000))
    assert sum(1 for r in SessionTraffic(spec) if checker.check(r) is r) == 1500


def test_the_same_seed_gives_the_same_trace_and_another_seed_another() -> None:
    first, again = (list(SessionTraffic(conversation(seed=7))) for _ in range(2))
    assert first == again
    assert first != list(SessionTraffic(conversation(seed=8)))
    assert first[:500] == list(SessionTraffic(conversation(seed=7, requests=500)))


@pytest.mark.parametrize("share", [0, 0.1, 0.5, 0.73, 0.9])
@pytest.mark.parametrize("prompt", ["2048", "1000", "lognormal:3000,0.7,min=400"])
def test_the_shared_part_of_prompts_is_what_was_asked_for(share: float, prompt: str) -> None:
    """An infinite pool hits exactly the shared part, but for the first use of each system prompt."""
    traffic = SessionTraffic(shared(share, prompt))
    found = analyse(traffic, block_tokens=32)
    assert traffic.system_tokens / traffic.first_tokens == pytest.approx(share, abs=0.005)
    first_use = found.input_tokens.greatest * 3 / found.infinite.tokens.out_of
    assert share - 0.005 - first_use <= found.infinite.tokens.rate <= share + 0.005
    if share == 0:
        assert found.infinite.blocks.hits == 0


def test_sessions_of_one_group_share_its_system_prompt_and_others_nothing() -> None:
    spec = conversation(opening=SystemPrompt(tokens=constant(1000)), groups=4, requests=600)
    firsts = [turns[0].hash_ids for turns in of_sessions(SessionTraffic(spec)).values()]
    whole = 1000 // 64
    assert len({tuple(ids[:whole]) for ids in firsts}) == 4
    assert len({ids[whole] for ids in firsts}) == len(firsts)


def test_every_turn_begins_with_the_whole_turn_before_it() -> None:
    sessions = of_sessions(SessionTraffic(conversation()))
    longest = max(len(turns) for turns in sessions.values())
    assert longest > 10
    for turns in sessions.values():
        for before, later in pairwise(turns):
            whole = before.input_tokens // 64
            assert later.hash_ids[:whole] == before.hash_ids[:whole]
            assert later.input_tokens > before.input_tokens + before.output_tokens
            if before.input_tokens % 64:  # the partial block has grown: it is another block now
                assert before.hash_ids[-1] not in later.hash_ids
            assert later.timestamp_ms >= before.timestamp_ms + int(before.output_tokens * ANSWER_S_PER_TOKEN * 1000)


def test_tools_answer_the_part_of_turns_that_was_asked_for() -> None:
    spec = conversation(tool=constant(5000), user=constant(7), tool_share=0.75, output=constant(10), requests=3000)
    added = [
        later.input_tokens - before.input_tokens - before.output_tokens
        for turns in of_sessions(SessionTraffic(spec)).values()
        for before, later in pairwise(turns)
    ]
    assert set(added) == {7, 5000}
    assert added.count(5000) / len(added) == pytest.approx(0.75, abs=0.03)


def test_a_session_ends_before_it_outgrows_the_limit() -> None:
    spec = conversation(
        turns=constant(50), max_tokens=6000, opening=SystemPrompt(tokens=constant(3000)), output=constant(500)
    )
    requests = list(SessionTraffic(spec))
    assert max(r.input_tokens + r.output_tokens for r in requests) <= 6000
    assert max(r.input_tokens for r in requests) > 5000
    long_opening = replace(spec, opening=SystemPrompt(tokens=constant(7000)))
    assert {(r.input_tokens, r.output_tokens) for r in SessionTraffic(long_opening)} == {(5500, 500)}


@pytest.mark.parametrize(
    ("process", "cv"), [("poisson:20", 1.0), ("gamma:20,3", 3.0), ("gamma:20,0.3", 0.3), ("constant:20", 0.0)]
)
def test_arrivals_have_the_rate_and_the_burstiness_asked_for(process: str, cv: float) -> None:
    spec = shared(0, "64", requests=8000, sessions=parse_arrivals(process, "arrivals"))
    found = analyse(SessionTraffic(spec), block_tokens=32)
    assert found.requests / found.duration_s == pytest.approx(20, rel=0.02 + 0.04 * cv)
    assert found.gap_cv == pytest.approx(cv, rel=0.1, abs=0.02)


@pytest.mark.parametrize("text", ["300", "uniform:100,500", "exponential:300", "lognormal:300,0.5", "gamma:300,2"])
def test_distributions_have_the_mean_asked_for(text: str) -> None:
    found = parse(text, "x")
    values = found.draw(np.random.default_rng(1), 40000)
    assert values.mean() == pytest.approx(300, rel=0.05)
    assert parse(str(found), "x") == found
    if found.cv:
        assert values.std() / values.mean() == pytest.approx(found.cv, rel=0.1)


def test_clipping_keeps_values_inside() -> None:
    values = parse("lognormal:300,2,min=50,max=400", "x").draw(np.random.default_rng(1), 1000)
    assert (values.min(), values.max()) == (50, 400)


@pytest.mark.parametrize("rate", [0.2, 0.9])
def test_a_wanted_hit_rate_is_reached(rate: float) -> None:
    spec = with_hit_rate(shared(0.5, requests=1000), rate)
    assert analyse(SessionTraffic(spec), block_tokens=32).infinite.tokens.rate == pytest.approx(rate, abs=2 * CLOSE)


def test_a_hit_rate_out_of_reach_is_refused_with_the_range() -> None:
    spec = shared(0.5, turns=constant(8), user=constant(64), requests=1000)
    with pytest.raises(UsageError, match=r"hit rate 0.1: this traffic can have 0\.\d+ .* to 0\.\d+"):
        with_hit_rate(spec, 0.1)


def test_prefix_repetition_is_vllms() -> None:
    spec = PrefixRepetition(
        num_prompts=105, num_prefixes=10, prefix_len=64, suffix_len=40, output_len=9, arrivals=Arrivals(rate_per_s=5)
    )
    requests = list(spec.requests())
    assert len(requests) == 100
    assert {(r.input_tokens, r.output_tokens) for r in requests} == {(104, 9)}
    by_prefix: Counter[tuple[int, ...]] = Counter()
    for r in requests:
        by_prefix[tuple(r.hash_ids[:4])] += 1
    assert sorted(by_prefix.values()) == [10] * 10
    assert len({i for r in requests for i in r.hash_ids}) == 10 * 4 + 100 * 3
    assert [r.hash_ids[0] for r in requests] != sorted(r.hash_ids[0] for r in requests), "prompts are shuffled"
    checker = TraceChecker(TraceRules(block_tokens=16))
    assert all(checker.check(r) is r for r in requests)


def test_prompts_that_are_all_prefix_are_all_equal() -> None:
    spec = PrefixRepetition(num_prompts=6, num_prefixes=1, prefix_len=40, suffix_len=0, arrivals=Arrivals(rate_per_s=5))
    assert {tuple(r.hash_ids) for r in spec.requests()} == {(0, 1, 2)}


BAD = [
    (lambda: SessionTraffic(shared(1.0)), "share 1: a part of each prompt between 0 and 1"),
    (lambda: SessionTraffic(shared(-0.1)), "share -0.1"),
    (
        lambda: SessionTraffic(shared(0.97, "100")),
        "share 0.97 of 100 tokens does not fit whole blocks of 32 .* the most is 0.96",
    ),
    (lambda: SessionTraffic(shared(0.5, "20")), "share 0.5 of 20 tokens .* the most is 0:"),
    (lambda: SessionTraffic(shared(0.5, requests=0)), "requests 0"),
    (lambda: SessionTraffic(shared(0.5, groups=0)), "groups 0"),
    (lambda: SessionTraffic(shared(0.5, tool_share=1.5)), "tool share 1.5"),
    (lambda: SessionTraffic(shared(0, max_tokens=1)), "max tokens 1"),
    (lambda: with_hit_rate(conversation(), 0.5), "--prompt instead of --system"),
    (lambda: with_hit_rate(shared(0.5), 1.0), "hit rate 1:"),
    (lambda: parse("lognormal:5", "--user"), "--user lognormal:5: not a distribution; give constant:N"),
    (lambda: parse("zipf:5", "--user"), "--user zipf:5"),
    (lambda: parse("constant:5,mean=2", "--user"), "not a distribution"),
    (lambda: parse("lognormal:5,0", "--user"), "mean and cv have to be above 0"),
    (lambda: parse("uniform:9,3", "--user"), "the least value 9 is above the greatest, 3"),
    (lambda: parse("constant:-5", "--user"), "'-5' is no number of 0 or above"),
    (lambda: parse("constant:nan", "--user"), "'nan' is no number"),
    (lambda: parse_arrivals("poisson:0", "--arrivals"), "--arrivals poisson:0: rate and cv have to be above 0"),
    (lambda: parse_arrivals("gamma:5", "--arrivals"), "not an arrival process"),
    (lambda: PrefixRepetition(num_prompts=3, arrivals=Arrivals(rate_per_s=1)).requests(), "3 prompts of 10 prefixes"),
    (
        lambda: PrefixRepetition(
            num_prompts=30, prefix_len=40, block_tokens=16, arrivals=Arrivals(rate_per_s=1)
        ).requests(),
        "a prefix of 40 tokens is no whole number of blocks of 16, .* use blocks of 8",
    ),
    (
        lambda: PrefixRepetition(num_prompts=30, output_len=0, arrivals=Arrivals(rate_per_s=1)).requests(),
        "at least one each",
    ),
]


@pytest.mark.parametrize(("make", "says"), BAD)
def test_what_cannot_be_generated_is_refused_with_the_mend(make: object, says: str) -> None:
    assert callable(make)
    with pytest.raises(UsageError, match=says) as caught:
        make()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", PRESETS)
def test_the_generator_is_fast(kind: str) -> None:
    """Processor time, the best of three: a busy machine slows the clock on the wall, and now and then this one too."""
    spec = replace(PRESETS[kind](), requests=5000)
    rates = []
    for _ in range(3):
        traffic = SessionTraffic(spec)
        began = time.process_time()
        assert sum(1 for _ in traffic) == 5000
        rates.append(5000 / (time.process_time() - began))
        if rates[-1] > LEAST_RATE:
            break
    assert max(rates) > LEAST_RATE


def test_memory_does_not_grow_with_the_number_of_requests() -> None:
    """Sessions in flight are all there is to remember; with 4 of them on average the peak is reached early."""
    spec = replace(
        conversation(turns=constant(4), think_s=constant(1), tool_s=constant(1)), sessions=Arrivals(rate_per_s=1)
    )
    peaks = []
    for requests in (1500, 6000):
        traffic = SessionTraffic(replace(spec, requests=requests))
        tracemalloc.start()
        try:
            for _ in traffic:
                pass
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    assert peaks[1] < peaks[0] * 1.2
