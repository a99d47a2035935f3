"""The pages of results are what the published files give, and say what those say: newest verdicts, times, cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from reports import records as r
from reports.cost import Cost, cost_of, covered_s
from reports.evidence import LoadedRun
from reports.history import History
from reports.results import BRIEF, REPORT, brief, by_kind, main, published, report
from reports.results_releases import release_order, releases
from reports.results_tables import Published, table
from reports.runinfo import RunInfo, StackInfo
from reports.scoreboard import build
from suite.selftest import bench_samples as samples

pytestmark = pytest.mark.selftest


def test_the_committed_pages_are_what_the_published_files_give() -> None:
    runs = published()
    assert REPORT.read_text() == report(runs), "run: python -m reports.results"
    assert BRIEF.read_text() == brief(runs), "run: python -m reports.results"


def verdict(case: str, outcome: str = "PASS", **fields: Any) -> r.Verdict:
    gate = ".".join(case.split(".")[:2])
    return r.Verdict(case_id=case, gate=gate, outcome=r.Outcome(outcome), claim="c", **fields)


def run(
    name: str, wall_s: float, *verdicts: r.Verdict, model: str = "shape-8b-1234", cost: Cost | None = None
) -> Published:
    engine = samples.facts("e0")
    engine = r.EngineFacts(**{f: getattr(engine, f) for f in engine.__struct_fields__} | {"model": f"/m/{model}"})
    info = RunInfo(
        run_id=name,
        wall_s=wall_s,
        host={"gpu": "nvidia-smi: NVIDIA X, 1 MiB", "cpus": 4, "cpu_model": "C", "memory_bytes": 2**30},
        stacks=(StackInfo(stack_id="s", name="gpu-x", platform="cuda", engines=(engine,)),),
    )
    return Published(name=name, board=build(verdicts, run=info), cost=cost)


TIMES = {
    "ttft_ms": {arm: {"p50": ms, "p90": ms, "p99": ms} for arm, ms in (("cold", 100.0), ("native", 10.0), ("external", 50.0))},
    "external_over_cold": [0.5, 0.45, None],
    "blocks": 8,
    "thrown": {"cold: was warm": 2},
}  # fmt: skip


def test_times_of_every_source_and_length_are_shown_with_what_they_rest_on() -> None:
    page = report(
        [
            run("r", 0.0, verdict("B.ttft.t1000", numbers=TIMES), verdict("B.offload.t1000", "FAIL", numbers=TIMES)),
        ]
    )
    several = [verdict(f"B.ttft.t{n}", numbers=TIMES) for n in (1000, 2000, 4000)]
    assert brief([run("r", 0.0, *several)]).count("| shape-8b |") == 2, "the shortest and the longest"
    assert brief([run("r", 0.0, several[0])]).count("| shape-8b |") == 1
    assert "| shape-8b | 1,000 | pool | 100.0 | 10.0 | 50.0 | 0.50 [0.45, -] | 8 | 2 | PASS | `r` |" in page
    assert "| shape-8b | 1,000 | host memory | 100.0 | 10.0 | 50.0 | 0.50 [0.45, -] | 8 | 2 | FAIL | `r` |" in page


def test_the_break_even_length_lies_between_what_is_surely_slower_and_what_is_surely_faster() -> None:
    def at(tokens: int, low: float | None, high: float | None) -> r.Verdict:
        return verdict(f"B.ttft.t{tokens}", numbers={**TIMES, "external_over_cold": [1.0, low, high]})

    page = report([run("r", 0.0, at(500, 1.1, 3.0), at(1000, 1.2, None), at(2000, None, 1.5), at(4000, 0.2, 0.9))])
    assert "| shape-8b | pool | 500, 1,000, 2,000, 4,000 | 1,000 | 4,000 |" in page
    assert "| shape-8b | pool | 500 | none | none |" in report([run("r", 0.0, at(500, 0.9, 1.1))])


def test_of_a_case_that_ran_twice_the_newest_counts_and_both_are_shown() -> None:
    failed = verdict("P.x.a", "FAIL", got="bad", findings=(r.Finding(code=r.FindingCode.WRONG_ANSWER, message="bad"),))
    runs = [run("old", 0.0, failed), run("new", 86400.0, verdict("P.x.a"))]
    assert "1 cases, the newest verdict of each in the newest release that ran it: 1 PASS." in brief(runs)
    assert "1970-01-01 to 1970-01-02" in brief(runs)
    assert "| `P.x.a` | FAIL | `wrong-answer` | bad | `old` |" in report(runs)
    assert "| `P.x` | 1 FAIL | 1 PASS |" in report(runs)
    again = [run("old", 0.0, failed), run("new", 1.0, failed)]
    assert "| `P.x.a` | FAIL | `wrong-answer` | bad | `old`, `new` |" in report(again)
    assert "| `wrong-answer` | 1 | `P.x.a` |" in brief(again)


def test_a_case_that_was_cut_is_no_verdict() -> None:
    cut = verdict("P.x.b", "HARNESS_ERROR", findings=(r.Finding(code=r.FindingCode.INCOMPLETE_CASE, message="cut"),))
    runs = [run("r", 0.0, verdict("P.x.a"), cut)]
    assert "1 cases, the newest verdict of each in the newest release that ran it: 1 PASS." in brief(runs)
    page = report(runs)
    assert "P.x.b" not in page
    assert "| 1 |  |  |  |  | 1 |" in page, "one PASS, one cut"
    broken = verdict("P.x.b", "HARNESS_ERROR", findings=(r.Finding(code=r.FindingCode.HARNESS_EXCEPTION, message="x"),))
    assert "`P.x.b`" in report([run("r", 0.0, broken)])


def test_a_cell_cannot_break_its_table() -> None:
    assert table(("a",), [("x|y",)]) == ["| a |", "|---|", "| x\\|y |"]
    assert table(("a",), []) == []


def test_cost_is_the_time_in_cases_and_the_time_beside_them() -> None:
    records: list[r.Record] = [
        r.RunStarted(run_id="x", suite_version="0", wall_s=0.0, t_s=100.0),
        samples.stack_up(platform="cuda", engines=[{"name": "e0", "gpu": 0}, {"name": "e1", "gpu": 1}]),
    ]
    for case, begin, end in (("A.a.x", 110.0, 130.0), ("A.a.y", 130.0, 140.0), ("A.a.x", 150.0, 155.0)):
        records += [
            r.CaseStarted(case_id=case, gate="A.a", gate_version=1, claim="c", stack_id="s1", t_s=begin),
            r.CaseFinished(case_id=case, t_s=end),
        ]
    records.append(r.CaseStarted(case_id="A.a.cut", gate="A.a", gate_version=1, claim="c", stack_id="s1", t_s=158.0))
    records[1] = r.StackUp(**{f: getattr(records[1], f) for f in records[1].__struct_fields__} | {"t_s": 109.0})
    records.append(r.RunFinished(t_s=160.0, exit_code=0))
    found = cost_of(LoadedRun(path="x", histories={"history-main": History(records)}, skipped={}))
    assert (found.run_id, found.gpus, found.wall_s, found.stacks) == ("x", 2, 60.0, 1)
    assert found.spans == ((0.0, 60.0),)
    assert found.cases == {"A.a.x": 5.0, "A.a.y": 10.0}, "a case run again has its last time, a cut one none"
    assert found.gpu_minutes(found.cases_s) == pytest.approx(0.5)
    assert found.gpu_minutes(found.start_s) == pytest.approx(1.5)


def test_cost_is_shown_by_run_and_by_gate() -> None:
    cost = Cost(run_id="x", gpus=1, wall_s=120.0, stacks=2, cases={"P.x.a": 30.0, "B.ttft.t9": 30.0})
    page = report([run("r", 0.0, verdict("P.x.a"), cost=cost)])
    assert "| `r` | 1 | 2 | 2.0 | 1.0 | 1.0 | 30.0 |" in page
    assert "| `P.x` | 1 | 0.5 | 30.0 |" in page
    assert "| all | 1 | 0.5 |  |" in page


def test_runs_that_share_a_gpu_at_the_same_time_count_once() -> None:
    assert covered_s([(0.0, 60.0), (30.0, 90.0), (40.0, 50.0), (100.0, 130.0)]) == 120.0
    assert covered_s([]) == 0.0

    def part(begin: float, end: float) -> Cost:
        return Cost(run_id="x", gpus=1, wall_s=end - begin, stacks=1, spans=((begin, end),), cases={"P.x.a": 1.0})

    runs = [
        run("day/a", 0.0, verdict("P.x.a"), cost=part(0, 60)),
        run("day/b", 1.0, verdict("P.x.b"), cost=part(30, 90)),
    ]
    assert "| `day` | 2 | 2 | 2.0 | 1.5 | 1.5 |" in report(runs)


def test_publish_needs_a_run_and_a_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--publish", "x"]) == 4
    assert main(["--publish", str(tmp_path / "no"), "--into", str(tmp_path / "p")]) == 4
    assert "results: " in capsys.readouterr().err


def released(name: str, wall_s: float, vllm: str, mooncake: str, *verdicts: r.Verdict) -> Published:
    made = run(name, wall_s, *verdicts)
    stack = made.board.run.stacks[0]
    engine = msgspec.structs.replace(stack.engines[0], versions={"vllm": vllm, "mooncake": mooncake})
    info = msgspec.structs.replace(made.board.run, stacks=(msgspec.structs.replace(stack, engines=(engine,)),))
    return Published(name=name, board=build(verdicts, run=info))


def test_releases_stand_side_by_side_with_what_came_out_otherwise() -> None:
    newest_first = [
        released("a", 1.0, "0.10.0", "0.3.13.post1", verdict("P.x.1"), verdict("P.x.2"), verdict("P.x.3"), verdict("P.x.4", "UNTESTABLE")),
        released("b", 2.0, "0.9.1", "0.3.13.post1", verdict("P.x.1", "FAIL"), verdict("P.x.2"), verdict("B.ttft.t1", "FAIL")),
        released("c", 3.0, "0.9.1", "0.3.13.post1", verdict("P.x.1", "INCONCLUSIVE"), verdict("P.x.4", "FAIL")),
    ]  # fmt: skip
    lines = releases(newest_first)
    rows = [line for line in lines if line.startswith("|")]
    assert rows[0] == "| case | 0.9.1 / 0.3.13.post1, GPU | 0.10.0 / 0.3.13.post1, GPU |"
    assert rows[2:] == ["| `P.x.1` | FAIL | PASS |"], "the newest verdict that decided something"
    assert "2 cases ran in at least two of 2 columns; 1 came out alike" in lines[2]
    assert not releases(newest_first[:1])
    assert "3 PASS" in brief(newest_first)
    mixed = ["0.3.14", "0.3.13.post1", "0.10.0", "?", "0.3.14rc1", "0.3.13"]
    mixed.sort(key=lambda release: release_order((release, "1", "GPU", "")))
    assert mixed == ["?", "0.3.13", "0.3.13.post1", "0.3.14rc1", "0.3.14", "0.10.0"]


def test_what_went_through_lmcache_is_told_apart_and_what_merely_has_it_installed_is_not() -> None:
    def made(name: str, connector: str, outcome: str) -> Published:
        plain = released(name, 1.0, "0.26.0", "0.3.14", verdict("P.x.1", outcome))
        stack = plain.board.run.stacks[0]
        versions = {**stack.engines[0].versions, "lmcache": "0.5.3"}
        engine = msgspec.structs.replace(stack.engines[0], versions=versions, connector=connector)
        info = msgspec.structs.replace(plain.board.run, stacks=(msgspec.structs.replace(stack, engines=(engine,)),))
        return Published(name=name, board=build([row.verdict for row in plain.rows], run=info))

    plain, through = made("a", "mooncake-store", "PASS"), made("b", "lmcache-mooncake", "FAIL")
    assert (plain.lmcache, through.lmcache) == ("", "0.5.3")
    page = brief([plain, through])
    assert "## GPU\n" in page
    assert "## GPU, through LMCache\n" in page
    assert page.count("lmcache 0.5.3") == 1
    assert "| case | 0.26.0 / 0.3.14, GPU | 0.26.0 / 0.3.14, GPU, LMCache 0.5.3 |" in releases([plain, through])


def test_containers_are_a_place_of_their_own() -> None:
    plain = released("a", 1.0, "0.26.0", "0.3.14", verdict("P.x.1"))
    stack = msgspec.structs.replace(plain.board.run.stacks[0], runtime="docker")
    info = msgspec.structs.replace(plain.board.run, stacks=(stack,))
    inside = Published(name="b", board=build([verdict("P.x.1", "FAIL")], run=info))
    assert [title for title, found in by_kind([plain, inside]).items() if found] == ["GPU", "GPU, in containers"]
    assert "| case | 0.26.0 / 0.3.14, GPU | 0.26.0 / 0.3.14, GPU, in containers |" in releases([plain, inside])
