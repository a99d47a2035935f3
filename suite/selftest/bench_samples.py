"""Hand-made histories of benchmarks: healthy by default, each defect one keyword away."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

from reports import records as r
from reports.evidence import EvidenceWriter
from reports.history import History
from suite.bench.blocks import ARMS, role_of
from suite.bench.replays import REPLAY, Cell, Measured
from suite.bench.statistics import order
from suite.bench.ttft import SEGMENTS
from suite.workload.summary import ReplaySummary, Spread

BLOCK = 32
TOKENS = 2000
KV = 10
"""Bytes of KV a token."""

HOST = {
    "machine": "x86_64",
    "cpu_model": "some CPU",
    "cpus": 2,
    "memory_bytes": 8 << 30,
    "kernel": "6",
    "python": "3.11",
}


def facts(name: str) -> r.EngineFacts:
    """An engine."""
    return r.EngineFacts(
        name=name,
        url="http://127.0.0.1:1",
        model="/models/tiny",
        served_model="tiny",
        connector="mooncake-store",
        block_tokens=BLOCK,
        max_model_len=4096,
        load_failure_policy="recompute",
        hash_seed="0",
        versions={"vllm": "0.32.0"},
        kv_bytes_per_token=KV,
        layers=4,
    )


def stack_up(**spec: Any) -> r.StackUp:
    """A stack of two engines; keywords change its spec."""
    plain: dict[str, Any] = {
        "name": "cpu",
        "platform": "cpu",
        "transport": "tcp",
        "bench": {},
        "engines": [{"name": "e0"}],
    }
    return r.StackUp(stack_id="s1", t_s=0.0, spec={**plain, **spec}, engines=(facts("e0"), facts("e1")))


def started(case_id: str, gate: str, **params: Any) -> r.CaseStarted:
    """A case began."""
    return r.CaseStarted(case_id=case_id, gate=gate, gate_version=1, claim="c", params=params, stack_id="s1", t_s=1.0)


SOURCES = {"cold": (0, 0), "native": (1984, 0), "external": (0, 1984)}
"""Arm -> (local, external) tokens of a prompt of ``TOKENS`` (62 whole blocks before the last token)."""


def block_records(
    case_id: str,
    block: int,
    ttft_s: dict[str, float],
    tokens: int = TOKENS,
    sources: dict[str, tuple[int, int]] = SOURCES,
    **changes: Any,
) -> list[r.Record]:
    """Requests of one block, each with its counters around it."""
    found: list[r.Record] = []
    places = dict.fromkeys(ARMS, 0)
    for arm in order(ARMS, block):
        place, places[arm] = places[arm], places[arm] + 1
        local, external = sources[arm]
        request_id = f"{case_id}#{tokens}/{block}/{arm}/{place}"
        zero = dict.fromkeys(
            ("prompt_tokens", "prompt_tokens.local", "prompt_tokens.external", "prompt_tokens.computed"), 0.0
        )
        zero |= {"external_hits_tokens": 0.0, "store.load_get.ok.bytes": 0.0, "local_hits_tokens": 0.0}
        after = {
            "prompt_tokens": float(tokens),
            "prompt_tokens.local": float(local),
            "prompt_tokens.external": float(external),
            "prompt_tokens.computed": float(tokens - local - external),
            "external_hits_tokens": float(external),
            "local_hits_tokens": float(local),
            "store.load_get.ok.bytes": float(external * KV),
        }
        fields: dict[str, Any] = {
            "request_id": request_id,
            "case_id": case_id,
            "phase": "p",
            "engine": "e1",
            "role": role_of(arm, tokens, block, place),
            "prompt_token_ids": tuple(range(tokens)),
            "output_token_ids": (1, 2),
            "http_status": 200,
            "finish_reason": "length",
            "usage_prompt_tokens": tokens,
            "cached_tokens": local + external,
            "sent_s": 10.0,
            "first_token_s": 10.0 + ttft_s[arm],
            "token_s": (10.0 + ttft_s[arm], 10.0 + ttft_s[arm]),
            "done_s": 12.0,
            "deadline_s": 60.0,
        }
        found.append(r.MetricsSnapshot(unit="e1", label=f"{request_id}:before", t_s=1.0, values=zero))
        found.append(r.Observation(**{**fields, **changes}))
        found.append(r.MetricsSnapshot(unit="e1", label=f"{request_id}:after", t_s=1.0, values=after))
    return found


def pool_records(holders: Iterable[str] = ("e0",)) -> list[r.Record]:
    """Whose memory the pool is."""
    ports = {name: str(100 + i) for i, name in enumerate(("e0", "e1"))}
    segments = {name: {"endpoint": f"127.0.0.1:{ports.get(name, '999')}"} for name in holders}
    return [
        r.Fact(name="bench.reader", t_s=1.0, value={"reader": "e1", "saver": "e0"}),
        r.StoreListing(t_s=1.0, label=SEGMENTS, key_count=0, segments=segments),
        r.SocketSnapshot(t_s=1.0, label=SEGMENTS, listening=tuple(f"{n} 0.0.0.0:{p}" for n, p in ports.items())),
    ]


def closed(case_id: str) -> list[r.Record]:
    """The end of a case whose logs were read."""
    scanned = r.Fact(name="logs.scanned", t_s=2.0, value={"e0": 10, "e1": 10})
    return [scanned, r.CaseFinished(case_id=case_id, t_s=3.0)]


def ttft_history(
    times: Callable[[int], dict[str, float]],
    blocks: int = 12,
    *,
    spec: dict[str, Any] | None = None,
    holders: Iterable[str] = ("e0",),
    spoil: Callable[[int], dict[str, Any]] = lambda _: {},
) -> History:
    """A case of B.ttft. times: block -> TTFT of each arm; spoil: block -> keywords of ``block_records``."""
    case_id = f"B.ttft.t{TOKENS}"
    records: list[r.Record] = [started(case_id, "B.ttft", tokens=TOKENS, maximum=24), *pool_records(holders)]
    for block in range(blocks):
        records += block_records(case_id, block, times(block), **spoil(block))
    return History([stack_up(**(spec or {})), *records, *closed(case_id)]).for_case(case_id)


# Replays ------------------------------------------------------------------------------------------------------------
def measured(cell: Cell, local: int = 0, external: int = 0, *, reusable: int = 1000, **changes: Any) -> r.Fact:
    """A replay of 40 requests and 10,000 prompt tokens, as a fact; keywords change its fields."""
    spread = Spread(count=40, mean=100, p50=100, p90=150, p99=200, greatest=220)
    summary = ReplaySummary(
        requests=40, failed=0, errors={}, parts=1, duration_s=10, ttft=spread, service_ttft=spread, itl=spread, tpot=spread,
        e2e=spread, lag=spread, client_behind=False, requests_per_s=4, input_tokens_per_s=1000, output_tokens_per_s=32,
        cached_tokens=local + external, input_tokens=10000, ttft_limit_s=0.5, goodput_per_s=4, within_limit=1,
    )  # fmt: skip
    counted = {
        "prompt_tokens": 10000.0,
        "prompt_tokens.local": float(local),
        "prompt_tokens.external": float(external),
        "prompt_tokens.computed": 10000.0 - local - external,
        "preemptions": 0.0,
    }
    found = Measured(
        cell=cell,
        requests=40,
        reusable_tokens=reusable,
        input_tokens=10000,
        by_engine={"e0": counted},
        sent_by_engine={"e0": 10000},
        summary=summary,
        settle_s=1.0,
        lines=[],
    )
    return r.Fact(name=REPLAY, t_s=1.0, value=msgspec.to_builtins(msgspec.structs.replace(found, **changes)))


# Runs ---------------------------------------------------------------------------------------------------------------
def write_run(
    folder: Path,
    series: list[dict[str, Any]],
    *,
    wall_s: float = 0.0,
    host: dict[str, Any] = HOST,
    stack: r.StackUp | None = None,
    outcome: r.Outcome = r.Outcome.PASS,
) -> Path:
    """A run with the figures of one case."""
    with EvidenceWriter(folder) as writer:
        writer.write(r.RunStarted(run_id=folder.name, suite_version="1", wall_s=wall_s, t_s=0.0, host=host))
        writer.write(stack or stack_up())
        writer.write(started("B.x.y", "B.x"))
        writer.write(r.Fact(name="bench.results", t_s=1.0, value=series))
        writer.write(r.CaseFinished(case_id="B.x.y", t_s=2.0))
        writer.write(r.Verdict(case_id="B.x.y", gate="B.x", outcome=outcome, claim="c"))
        writer.write(r.RunFinished(t_s=3.0, exit_code=0))
    return folder


def series(name: str, values: Iterable[float], **changes: Any) -> dict[str, Any]:
    """One benchmark of a run."""
    return {"benchmark": name, "unit": "s", "better": "lower", "values": list(values), **changes}
