"""The analyser against a pool that does the same thing the slow way, on the published traces and on random ones."""

from __future__ import annotations

import math
import random
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fixtures.errors import UsageError
from suite.selftest.traces import naive_hits, plain, published, request
from suite.workload.analyse import Analyser, Analysis, HitRates, analyse
from suite.workload.reader import TraceReader
from suite.workload.stack_distance import PrefixStack
from suite.workload.tables import table
from suite.workload.trace import TraceRequest

pytestmark = pytest.mark.selftest


def hits(pool: HitRates) -> dict[str, int]:
    return {name: getattr(pool, name).hits for name in ("blocks", "tokens", "reusable", "requests")}


def infinite_by_hand(path: Path) -> tuple[int, int, int, int, int, int]:
    """Hits and denominators of blocks, tokens and requests, counted straight from the file with a set of ids."""
    seen: set[int] = set()
    hit_blocks = blocks = hit_tokens = tokens = hit_requests = requests = 0
    for entry in plain(path):
        length, ids = entry["input_length"], entry["hash_ids"]
        sizes = [512] * (len(ids) - 1) + [length - 512 * (len(ids) - 1)]
        assert sum(sizes) == length
        known = [size for size, block in zip(sizes, ids, strict=True) if block in seen]
        seen.update(ids)
        hit_blocks += len(known)
        hit_tokens += sum(known)
        hit_requests += bool(known)
        blocks += len(ids)
        tokens += length
        requests += 1
    return hit_blocks, blocks, hit_tokens, tokens, hit_requests, requests


@pytest.mark.parametrize("name", ["conversation", "synthetic"])
def test_the_infinite_hit_rate_of_a_published_trace_is_that_of_an_independent_count(name: str) -> None:
    path = published(name)
    found = analyse(TraceReader(path)).infinite
    counted = (
        found.blocks.hits,
        found.blocks.out_of,
        found.tokens.hits,
        found.tokens.out_of,
        found.requests.hits,
        found.requests.out_of,
    )
    assert counted == infinite_by_hand(path)
    assert found.blocks.hits > 10_000, "a count of nothing would agree too"


@pytest.mark.parametrize("name", ["synthetic", "conversation"])
def test_lru_pools_of_a_published_trace_hit_as_a_real_lru_does(name: str) -> None:
    requests = list(TraceReader(published(name)))[:3000]
    sizes = (300, 5000)
    found = analyse(requests, pools=sizes)
    assert [hits(p) for p in found.pools] == [naive_hits(requests, size, 512, 16) for size in sizes]
    assert 0 < found.pools[0].blocks.hits < found.pools[1].blocks.hits < found.infinite.blocks.hits


@st.composite
def prefix_trees(draw: st.DrawFn) -> list[TraceRequest]:
    """Requests over a random tree of prefixes, ids in order of first appearance, some last blocks partial."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    requests: list[TraceRequest] = []
    paths: list[list[int]] = [[]]
    partial: dict[int, int] = {}
    fresh = 0
    for _ in range(draw(st.integers(1, 60))):
        base = rng.choice(paths)
        path = base[: rng.randint(0, len(base))]
        for _ in range(rng.choice([0, 0, 1, 2, 5])):
            path = [*path, fresh]
            fresh += 1
        if not path:
            path, fresh = [fresh], fresh + 1
        short = 0
        if path[-1] in partial or (path[-1] == fresh - 1 and path not in paths and rng.random() < 0.4):
            short = partial.setdefault(path[-1], rng.randint(1, 63))
        else:
            paths.append(path)
        requests.append(request(path, tokens=64 * len(path) - short))
    return requests


@settings(max_examples=40, deadline=None)
@given(prefix_trees())
def test_every_pool_size_of_any_trace_hits_as_a_real_lru_does(requests: list[TraceRequest]) -> None:
    distinct = len({i for r in requests for i in r.hash_ids})
    sizes = list(range(1, distinct + 2))
    found = analyse(requests, block_tokens=64, engine_block_tokens=16, pools=sizes)
    assert [hits(p) for p in found.pools] == [naive_hits(requests, size, 64, 16) for size in sizes]
    assert hits(found.infinite) == naive_hits(requests, None, 64, 16)
    assert found.distinct_blocks == distinct
    assert_the_full_pool_is_the_smallest(found, requests)


def assert_the_full_pool_is_the_smallest(found: Analysis, requests: list[TraceRequest]) -> None:
    full = found.full_pool_blocks
    if full:
        assert naive_hits(requests, full, 64, 16)["blocks"] == found.infinite.blocks.hits
        assert full == 1 or naive_hits(requests, full - 1, 64, 16)["blocks"] < found.infinite.blocks.hits
    else:
        assert found.infinite.blocks.hits == 0


@pytest.mark.parametrize(
    ("second", "tokens", "reusable"),
    [
        (request([0, 1, 2], tokens=150), 128, 128),  # two whole blocks are known
        (request([0, 1], tokens=128), 128, 112),  # all of it: the last token's engine block has to be computed
        (request([0, 1], tokens=129 - 16), 113, 112),  # a known partial block: whole engine blocks only
        (request([0], tokens=64), 64, 48),
        (request([2], tokens=64), 0, 0),
    ],
)
def test_known_and_reusable_tokens(second: TraceRequest, tokens: int, reusable: int) -> None:
    found = analyse([request([0, 1], block=64), second], block_tokens=64, engine_block_tokens=16).infinite
    assert (found.tokens.hits, found.reusable.hits) == (tokens, reusable)
    assert found.tokens.out_of == found.reusable.out_of == 128 + second.input_tokens


def test_lengths_and_arrivals() -> None:
    lengths = [3, 9, 1, 100, 5, 5, 5, 5, 5, 20]
    times = [0, 10, 20, 30, 1030, 1040, 1050, 1060, 1070, 1080]
    found = analyse(
        [
            request([n], tokens=n_tokens, timestamp_ms=t, output_tokens=2 * n_tokens)
            for n, (n_tokens, t) in enumerate(zip(lengths, times, strict=True))
        ]
    )
    spread = found.input_tokens
    assert (spread.count, spread.mean, spread.least, spread.greatest) == (10, 15.8, 1, 100)
    ordered = sorted(lengths)
    assert (spread.p50, spread.p90, spread.p99) == tuple(ordered[math.ceil(q * 10 / 100) - 1] for q in (50, 90, 99))
    assert found.output_tokens.p90 == 40
    assert (found.duration_s, found.longest_gap_s) == (1.08, 1.0)
    gaps = [b - a for a, b in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    assert found.gap_cv == pytest.approx(math.sqrt(sum((g - mean) ** 2 for g in gaps) / len(gaps)) / mean)


def test_an_analysis_can_go_on_after_a_look() -> None:
    analyser = Analyser()
    analyser.add(request([0]))
    assert analyser.result([1]).infinite.blocks.hits == 0
    for _ in range(3):
        analyser.add(request([0, 1]))
    assert analyser.result([1]).infinite.blocks.hits == 5
    assert analyser.result([1]).pools[0].blocks.hits == 3


def test_nothing_at_all_has_no_hits() -> None:
    found = Analyser().result([10])
    assert found.infinite.blocks.rate == 0
    assert found.input_tokens.count == found.full_pool_blocks == 0


@pytest.mark.parametrize("ids", [[1], [0, 2], [0, 0]])
def test_ids_out_of_order_are_refused(ids: list[int]) -> None:
    with pytest.raises(ValueError, match="is new, and the next new one"):
        PrefixStack().touch(ids)


def test_an_id_under_another_prefix_is_refused() -> None:
    stack = PrefixStack()
    stack.touch([0, 1, 2])
    with pytest.raises(ValueError, match="block 2 follows block 0 here, and followed 1 before"):
        stack.touch([0, 2])


def test_sizes_that_make_no_sense_are_bad_input() -> None:
    with pytest.raises(UsageError, match="engine blocks of 48 tokens do not divide"):
        Analyser(512, 48)
    with pytest.raises(UsageError, match="a pool of 0 blocks"):
        Analyser().result([0])


def test_the_table_states_denominators() -> None:
    text = table(analyse([request([0, 1]), request([0, 1, 2])], pools=[1]), token_bytes=1024)
    assert "out of: blocks 5 hash ids; tokens and reusable 2,560 prompt tokens; requests 2." in text
    assert "40.00%" in text  # 2 of 5 blocks
    assert "20.00%" in text  # 1 of 5 in a pool of one block
