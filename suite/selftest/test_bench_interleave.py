"""Interleaved runs through the real proxy, client and evidence; only the engine is a stand-in, which answers at a known pace.

A stand-in because what is proven here is that a delay in the request path is found: with an engine the truth would not be known.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from fixtures.client import Client, Target
from reports import records as r
from reports.__main__ import main as reports_main
from reports.evidence import load_run
from reports.judge import judge_run
from suite.bench.delay_proxy import DelayProxy, running
from suite.bench.interleave import Plan, Recorder, main, make
from suite.bench.interleaved import CASE, INTERLEAVED
from suite.selftest import bench_samples as samples
from suite.selftest import sse_server
from suite.workload.prompts import PromptMaker

pytestmark = [pytest.mark.selftest, pytest.mark.slow, pytest.mark.alone]

TOKENS = 40


class StandIn:
    """The part of ``fixtures.stack.Stack`` that an interleaving uses: a real client, and counters that believe it."""

    def __init__(self, url: str, recorder: Recorder, warm: bool = False) -> None:
        self.recorder = recorder
        self.client = Client({"e0": Target(url, "served")}, self._record, 30)
        self.stack_id = "s1"
        self.names = ["e0"]
        self.engines = {"e0": SimpleNamespace(url=url, facts=samples.facts("e0"))}
        self.sent = 0
        self.warm = warm
        self._phase = ("", "")
        recorder(samples.stack_up())

    def _record(self, record: r.Record) -> None:
        self.recorder(record)

    def prompts(self, label: str, engine: str) -> PromptMaker:
        return PromptMaker(f"{label}/{engine}", 500, 32)

    def ask(self, engine: str, prompt: tuple[int, ...], role: str, **fields: Any) -> r.Observation:
        from fixtures.request import Request

        self.sent += len(prompt)
        extra = {"behaviour": {"first_s": 0.01, "cached": 32 if self.warm else 0}}
        request = Request(engine=engine, prompt_token_ids=prompt, role=role, extra=extra, **fields)
        return self.client.send(request, case_id=CASE, phase="blocks")

    @contextmanager
    def phase(self, case_id: str, name: str) -> Iterator[None]:
        yield

    def scrape(self, engine: str, label: str) -> r.MetricsSnapshot:
        computed = self.sent // 2 if self.warm else self.sent
        values = {"prompt_tokens": float(self.sent), "prompt_tokens.computed": float(computed)}
        taken = r.MetricsSnapshot(unit=engine, label=label, t_s=time.monotonic(), values=values)
        self.recorder(taken)
        return taken

    def fact(self, name: str, value: Any) -> None:
        self.recorder(r.Fact(name=name, t_s=time.monotonic(), value=value))

    def scrape_booked(
        self, engine: str, before: r.MetricsSnapshot, label: str, prompt_tokens: int
    ) -> r.MetricsSnapshot:
        assert self.sent - before.values["prompt_tokens"] == prompt_tokens
        return self.scrape(engine, label)


@pytest.fixture(scope="module")
def server_url() -> Iterator[str]:
    with sse_server.running() as server:
        yield server.url


def _made(server_url: str, out: Path, slow: float, *, blocks: int, warm: bool = False) -> Path:
    recorder = Recorder()
    stack: Any = StandIn(server_url, recorder, warm)
    try:
        make(stack, Plan(out, TOKENS, 3, blocks, slow, ("e0", "e0")), recorder)
    finally:
        stack.client.close()
    return out


def test_a_delay_planted_in_the_request_path_is_found_by_compare(
    server_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = _made(server_url, tmp_path, 1.0, blocks=5)
    assert reports_main(["compare", str(out / "A"), str(out / "B")]) == 10
    assert "interleaved in blocks" in capsys.readouterr().out


def test_both_sides_record_their_own_requests_and_can_be_judged_again(server_url: str, tmp_path: Path) -> None:
    out = _made(server_url, tmp_path, 0.0, blocks=3)
    for side in "AB":
        run = load_run(out / side / "run-2")
        seen = [o for o in run.history.of(r.Observation) if o.role.startswith("cold/b")]
        assert len(seen) == 6
        assert {o.engine for o in seen} == {f"e0@{side}"}
        judgement = judge_run(run, {INTERLEAVED.id: INTERLEAVED})
        assert [str(c.now.outcome) for c in judgement.cases] == ["PASS"]
        assert judgement.exit_code == 0
    a, b = (load_run(out / side / "run-1").history.fact("bench.results") for side in "AB")
    assert a is not None
    assert b is not None
    assert a.value[0]["interleaved"] == b.value[0]["interleaved"] != ""
    assert a.value[0]["blocks"] == [0, 1, 2]


def test_warm_requests_give_no_figures(server_url: str, tmp_path: Path) -> None:
    out = _made(server_url, tmp_path, 0.0, blocks=2, warm=True)
    history = load_run(out / "A" / "run-1").history
    fact = history.fact("bench.results")
    assert fact is not None
    assert fact.value[0]["values"] == []
    verdict = history.of(r.Verdict)[-1]
    assert verdict.outcome is not r.Outcome.PASS
    assert {"conservation", "too-few-observations"} <= {str(f.code) for f in verdict.findings}


@pytest.mark.parametrize(
    "arguments",
    [
        ["{out}", "--engines", "e0"],
        ["{out}", "--engines", "e0,e9"],
        ["{full}"],
        ["{out}", "--stack", "nowhere"],
        ["{out}", "--slow", "-1"],
        ["{out}", "--blocks", "0"],
    ],
)
def test_bad_input_starts_nothing(tmp_path: Path, arguments: list[str]) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "something").touch()
    assert main([a.format(out=tmp_path / "out", full=full) for a in arguments]) == 4
    assert not (tmp_path / "out").exists()


# The proxy
def test_the_proxy_delays_each_connection_and_passes_everything_on(server_url: str) -> None:
    body = {"prompt": [1, 2, 3], "max_tokens": 3, "stream": False, "behaviour": {"first_s": 0.0}}
    with running(DelayProxy(server_url, 0.2)) as proxy:
        began = time.monotonic()
        slow = httpx.post(f"{proxy.url}/v1/completions", json=body, trust_env=False)
        took_s = time.monotonic() - began
        assert took_s >= 0.2
        proxy.delay_s = 0.0
        direct = httpx.post(f"{server_url}/v1/completions", json=body, trust_env=False)
        assert slow.json() == direct.json()
        assert proxy.route.counters.connections == 1


def test_a_proxy_of_nothing_refuses_and_leaves_nothing_behind() -> None:
    with running(DelayProxy("http://127.0.0.1:1", 0.0)) as proxy, pytest.raises(httpx.HTTPError):
        httpx.get(f"{proxy.url}/health", trust_env=False)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{proxy.url}/health", trust_env=False)


def test_the_command_makes_runs_of_both_sides_and_stops_its_stack(
    server_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    closed: list[str] = []

    class Pool:
        """Hands out the stand-in."""

        def __init__(self, run_dir: Path, record: Recorder, progress: object) -> None:
            self.stack = StandIn(server_url, record)

        def acquire(self, spec: Any) -> StandIn:
            assert [e.name for e in spec.engines] == ["e0"], "no more engines than the sides name"
            return self.stack

        def close(self) -> None:
            self.stack.client.close()
            closed.append("closed")

    monkeypatch.setattr("fixtures.stack_pool.StackPool", Pool)
    out = tmp_path / "out"
    assert main([str(out), "--tokens", "40", "--sessions", "1", "--blocks", "2", "--stack", "cpu"]) == 0
    assert closed == ["closed"]
    assert "python -m reports compare" in capsys.readouterr().err
    assert (load_run(out / "B" / "run-1").history.of(r.RunStarted)[0].host).keys() >= {"cpu_model", "cpus"}
    assert reports_main(["compare", str(out / "A"), str(out / "B")]) == 11, "one run a side is never enough"
