"""Replays of a sweep against a local streaming server, and the page that is made of a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from fixtures.models import ensure_model
from reports import records as r
from reports.evidence import EvidenceWriter, load_run
from reports.history import History
from suite.bench import baseline, replays, token_server
from suite.bench.baseline_page import Baseline
from suite.bench.baseline_page import page as page_of
from suite.bench.replays import Cell
from suite.bench.sweep import SWEEP
from suite.contract import safe_judge
from suite.selftest import bench_samples as samples

pytestmark = pytest.mark.selftest

CASE = "B.sweep.native-e1"


class Counting:
    """The part of a stack that a replay uses. Its engine is the token server, which has no counters: here every prompt token that was
    asked for counts as computed."""

    def __init__(self, server: token_server.Running) -> None:
        facts = msgspec.structs.replace(samples.facts("e0"), max_model_len=2048)
        self.engines = {"e0": SimpleNamespace(url=server.url, facts=facts, model=ensure_model("tiny-base"))}
        self.names = ["e0"]
        self.stack_id = "s1"
        self.store = None
        self.records: list[r.Record] = []
        self.record: Callable[[r.Record], None] = self.records.append
        self._server = server

    @contextmanager
    def phase(self, case_id: str, name: str) -> Iterator[None]:
        yield

    def scrape(self, engine: str, label: str) -> r.MetricsSnapshot:
        asked = float(self._server.stats().streams * replays.PROMPT_TOKENS)
        values = {"prompt_tokens": asked, "prompt_tokens.computed": asked, "preemptions": 0.0}
        values |= {"prompt_tokens.local": 0.0, "prompt_tokens.external": 0.0}
        taken = r.MetricsSnapshot(unit=engine, label=label, t_s=time.monotonic(), values=values)
        self.record(taken)
        return taken

    def scrape_booked(
        self, engine: str, before: r.MetricsSnapshot, label: str, prompt_tokens: int
    ) -> r.MetricsSnapshot:
        found = self.scrape(engine, label)
        assert found.values["prompt_tokens"] - before.values["prompt_tokens"] == prompt_tokens
        return found

    def fact(self, name: str, value: Any) -> None:
        self.record(r.Fact(name=name, t_s=time.monotonic(), value=value))


def test_a_replay_is_measured_written_down_and_judged() -> None:
    cell = Cell(arm="native", cache="ample", engines=1, share=50, concurrency=2)
    with token_server.running(0.0005) as server:
        stack: Any = Counting(server)
        found = replays.measure(stack, CASE, cell, 12, ["e0"])
    assert found is not None
    assert (found.requests, len(found.lines), found.summary.failed) == (12, 12, 0)
    assert found.tokens("computed") == found.input_tokens == 12 * replays.PROMPT_TOKENS
    assert 0 < found.reusable_tokens < found.input_tokens
    records = [samples.stack_up(), samples.started(CASE, "B.sweep"), *stack.records, *samples.closed(CASE)]
    verdict = safe_judge(SWEEP, History(records).for_case(CASE))
    assert verdict.outcome is r.Outcome.PASS, verdict
    assert verdict.numbers[cell.name]["failed"] == 0
    assert replays.measured_in(stack.records) == [found]
    names = {x["benchmark"] for x in replays.results_of(found)}
    assert f"replay/{cell.name}/throughput" in names


@pytest.mark.parametrize("share", [0, 50, 90])
def test_every_stack_gets_the_same_trace(share: int) -> None:
    one, two = (replays.trace_of(share, 40, 32, 2048) for _ in range(2))
    assert one == two
    assert {q.input_tokens for q in one} == {replays.PROMPT_TOKENS}
    shared = len({i for q in one for i in q.hash_ids[:1]})
    assert (shared == len(one)) == (share == 0)


# The page
TOLD = r.Outcome.UNTESTABLE
"""Of verdicts that stand here without records of their own: any other outcome would not be taken over."""


def _run(folder: Path) -> Path:
    facts = [
        samples.measured(
            Cell(arm=arm, cache=cache, engines=1, share=90, concurrency=2), local=500, external=300 * (arm == "pool")
        )
        for arm in ("native", "pool")
        for cache in ("ample", "constrained")
    ]
    numbers = {
        "ttft_ms": {arm: {"p50": 10.0, "p90": 11.0, "p99": 12.0} for arm in ("cold", "native", "external")},
        "external_over_cold": [0.5, 0.4, None],
        "blocks": 12,
        "thrown": {"cold: was warm": 1},
        "visible_ms": {"p50": 100.0, "p99": 300.0},
    }
    verdicts = [
        r.Verdict(case_id=CASE, gate="B.sweep", outcome=r.Outcome.PASS, claim="c", got="4 replays"),
        r.Verdict(case_id="B.ttft.t512", gate="B.ttft", outcome=TOLD, claim="c", got="fast", numbers=numbers),
        r.Verdict(case_id="B.promise.s90-e1", gate="B.promise", outcome=TOLD, claim="c", got="hit rate so and so"),
        r.Verdict(case_id="B.break-even.tokens", gate="B.break-even", outcome=TOLD, claim="c", got="between a and b"),
    ]
    with EvidenceWriter(folder) as writer:
        writer.write(r.RunStarted(run_id="run-1", suite_version="1", wall_s=0.0, t_s=0.0, host=samples.HOST))
        writer.write(samples.stack_up())
        for record in (samples.started(CASE, "B.sweep"), *facts, *samples.closed(CASE), *verdicts):
            writer.write(record)
    return folder


def test_the_page_says_what_it_is_and_holds_every_figure(tmp_path: Path) -> None:
    base = baseline.baseline_of([load_run(_run(tmp_path / "run"))])
    page = page_of(base, "x.svg")
    assert "numbers of a CPU stack" in page
    for text in (
        "5.0%",
        "3.0%",
        "100 / 150 / 200",
        "0.50 [0.40, -]",
        "between a and b",
        "hit rate so and so",
        "| 1 | 90 % |",
    ):
        assert text in page, text
    assert page.count("| constrained |") == 2
    picture = baseline.heatmap(base.rows)
    assert picture.count("<title>") == 4
    assert "8%" in picture
    again = msgspec.json.decode(msgspec.json.encode(base), type=Baseline)
    assert page_of(again, "x.svg") == page


def test_runs_without_benchmarks_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert baseline.main([str(tmp_path)]) == 4
    with EvidenceWriter(tmp_path / "run") as writer:
        writer.write(samples.stack_up())
    assert baseline.main([str(tmp_path / "run")]) == 4
    with EvidenceWriter(tmp_path / "never up") as writer:
        writer.write(samples.started(CASE, "B.sweep"))
        writer.write(r.Verdict(case_id=CASE, gate="B.sweep", outcome=r.Outcome.HARNESS_ERROR, claim="c"))
    assert baseline.main([str(tmp_path / "never up")]) == 4
    assert baseline.main([str(_run(tmp_path / "good")), "--publish", str(tmp_path / "p")]) == 4
    assert "give a folder of the project" in capsys.readouterr().err


def test_the_committed_page_is_the_one_that_the_published_figures_give() -> None:
    published = sorted(p.parent for p in (baseline.ROOT / "reports" / "published").glob(f"baseline-*/{baseline.FILE}"))
    assert published, "no baseline is published"
    newest = published[-1]
    base = baseline.load([newest])
    assert baseline.PAGE.read_text(encoding="utf-8") == page_of(base, baseline.picture_of(newest))
    assert (
        not base.rows
        or not any(x.gate == "B.sweep" for x in base.rows)
        or (newest / baseline.PICTURE).read_text(encoding="utf-8") == baseline.heatmap(base.rows)
    )
