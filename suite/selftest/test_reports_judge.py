"""Judging again: the same, a planted difference, a run cut short, unknown gates, bad input, and the time it takes."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from reports import judge
from reports import records as r
from reports.__main__ import main
from reports.evidence import EvidenceWriter, load_run
from suite.contract import Gate
from suite.selftest.report_samples import Told, board, observation, write_case

pytestmark = pytest.mark.selftest

GATES: dict[str, Gate] = {Told.id: Told()}
PASS, FAIL, HANG = ("PASS", ""), ("FAIL", "hang"), ("FAIL", "hang")
KV_LEAK, BLIND = ("FAIL", "kv-leak"), ("INCONCLUSIVE", "oracle-blind")

JUDGE_BOUND_S = 5.0
"""Budget: 10,000 requests judged in 5 s on two cores."""


@pytest.mark.parametrize(
    ("judged", "recorded", "code"),
    [
        (PASS, PASS, judge.EXIT_SAME),
        (HANG, HANG, judge.EXIT_SAME),
        (HANG, PASS, judge.EXIT_FAIL),
        (HANG, KV_LEAK, judge.EXIT_FAIL),
        (PASS, HANG, judge.EXIT_DIFFERENT),
        (BLIND, PASS, judge.EXIT_DIFFERENT),
        (("HARNESS_ERROR", "no-pressure"), PASS, judge.EXIT_HARNESS),
        (("PASS", "hang"), PASS, judge.EXIT_HARNESS),  # a judge that contradicts itself
        (HANG, None, judge.EXIT_FAIL),
        (PASS, None, judge.EXIT_SAME),
    ],
)
def test_a_planted_difference_is_found(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    judged: tuple[str, str],
    recorded: tuple[str, str] | None,
    code: int,
) -> None:
    with EvidenceWriter(tmp_path) as writer:
        write_case(writer, "X.told.fine", PASS)
        write_case(writer, "X.told.a", judged, recorded=recorded)
    assert main(["judge", str(tmp_path), "--width", "100"], gates=GATES) == code
    out = capsys.readouterr().out
    differs = [line for line in out.splitlines() if line.startswith("DIFFERS")]
    assert [line.split()[1] for line in differs] == ([] if judged == recorded else ["X.told.a:"])
    assert out.splitlines()[-1] == f"2 judged again: {2 - len(differs)} as recorded, {len(differs)} different"


def test_a_revised_gate_with_the_same_verdict_is_listed_and_is_no_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with EvidenceWriter(tmp_path) as writer:
        write_case(writer, "X.told.a", HANG, version=1)
    assert main(["judge", str(tmp_path)], gates=GATES) == judge.EXIT_SAME
    assert "revised  X.told.a: recorded FAIL hang (version 1 of the gate)" in capsys.readouterr().out


def test_a_run_cut_short_is_judged_as_far_as_it_went(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writer = EvidenceWriter(tmp_path)
    write_case(writer, "X.told.a", PASS)
    write_case(writer, "X.told.b", PASS, recorded=None, finished=False)
    writer.close()
    with writer.path.open("ab") as file:
        file.write(b'{"kind":"fact","na')
    assert main(["judge", str(tmp_path)], gates=GATES) == judge.EXIT_HARNESS
    out = capsys.readouterr().out
    assert "X.told.b: recorded no verdict, judged HARNESS_ERROR incomplete-case" in out
    assert "note: 1 line(s) skipped: cut short" in out
    assert main(["judge", str(tmp_path), "--case", "X.told.a"], gates=GATES) == judge.EXIT_SAME
    assert main(["render", str(tmp_path)], gates=GATES) == 0
    assert "1 PASS, 1 NOT RUN" in capsys.readouterr().out
    assert "This run was cut short" in (tmp_path / "report.md").read_text()
    with EvidenceWriter(tmp_path, "later") as late:  # it was not dead after all: an early rendering is not believed
        write_case(late, "X.told.c", PASS)
    assert main(["render", str(tmp_path), "--format", "terminal"], gates=GATES) == 0
    assert "2 PASS, 1 NOT RUN" in capsys.readouterr().out


def test_a_verdict_from_before_the_last_start_of_a_case_does_not_count(tmp_path: Path) -> None:
    with EvidenceWriter(tmp_path) as writer:
        write_case(writer, "X.told.a", PASS)
        write_case(writer, "X.told.a", PASS, recorded=None)
    [case] = judge.judge_run(load_run(tmp_path), GATES).cases
    assert case.recorded is None


def test_of_a_resumed_run_the_newest_session_of_a_case_counts(tmp_path: Path) -> None:
    told = {"main": BLIND, "main-2": ("HARNESS_ERROR", "no-pressure"), "main-10": HANG}
    for worker, judged in told.items():
        with EvidenceWriter(tmp_path, worker) as writer:
            write_case(writer, "X.told.a", judged)
            write_case(writer, f"X.told.{worker}", PASS)
    assert list(load_run(tmp_path).histories) == ["history-main", "history-main-2", "history-main-10"]
    judgement = judge.judge_run(load_run(tmp_path), GATES)
    [case] = [c for c in judgement.cases if c.now.case_id == "X.told.a"]
    assert (case.history, case.now.outcome) == ("history-main-10", "FAIL")
    assert len(judgement.cases) == 4
    row = next(row for row in judgement.scoreboard(GATES).rows if row.verdict.case_id == "X.told.a")
    assert row.verdict.outcome == "FAIL"
    assert judgement.exit_code == judge.EXIT_SAME


def test_workers_are_judged_apart(tmp_path: Path) -> None:
    for worker, judged in (("gw0", PASS), ("gw1", HANG)):
        with EvidenceWriter(tmp_path, worker) as writer:
            write_case(writer, f"X.told.{worker}", judged)
    judgement = judge.judge_run(load_run(tmp_path), GATES)
    assert [(c.now.case_id, str(c.now.outcome)) for c in judgement.cases] == [
        ("X.told.gw0", "PASS"),
        ("X.told.gw1", "FAIL"),
    ]
    assert judgement.exit_code == judge.EXIT_SAME
    assert judgement.scoreboard(GATES).rows[1].evidence == "history-gw1.jsonl"


def test_unknown_gates_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with EvidenceWriter(tmp_path) as writer:
        write_case(writer, "X.told.a", PASS)
        write_case(writer, "Z.later.a", PASS, gate="Z.later")
    assert main(["judge", str(tmp_path)], gates=GATES) == judge.EXIT_DIFFERENT
    assert "unknown gate Z.later: not judged: Z.later.a" in capsys.readouterr().out
    assert main(["judge", str(tmp_path)], gates={}) == judge.EXIT_NOTHING


def test_verdicts_without_evidence_are_carried_and_nothing_judged_is_not_fine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with EvidenceWriter(tmp_path) as writer:
        writer.write(r.Verdict(case_id="X.told.a", gate=Told.id, outcome=r.Outcome.UNTESTABLE, claim="holds"))
    assert main(["judge", str(tmp_path)], gates=GATES) == judge.EXIT_NOTHING
    assert "carried  X.told.a: UNTESTABLE as recorded" in capsys.readouterr().out


@pytest.mark.parametrize("outcome", ["PASS", "FAIL", "INCONCLUSIVE"])
def test_a_verdict_whose_records_are_gone_does_not_stand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], outcome: str
) -> None:
    with EvidenceWriter(tmp_path) as writer:
        write_case(writer, "X.told.fine", PASS)
        writer.write(r.Verdict(case_id="X.told.a", gate=Told.id, outcome=r.Outcome(outcome), claim="holds"))
    assert main(["judge", str(tmp_path), "--width", "120"], gates=GATES) == judge.EXIT_HARNESS
    out = capsys.readouterr().out
    assert f"DIFFERS  X.told.a: recorded {outcome}" in out
    assert "1 PASS, 1 HARNESS_ERROR" in out


def untestable(writer: EvidenceWriter) -> None:
    writer.write(r.Verdict(case_id="X.told.a", gate=Told.id, outcome=r.Outcome.UNTESTABLE, claim="holds"))


@pytest.mark.parametrize(("first", "outcome"), [(True, "FAIL"), (False, "UNTESTABLE")])
def test_of_a_case_that_one_session_could_not_test_the_newest_counts_as_well(
    tmp_path: Path, first: bool, outcome: str
) -> None:
    for worker, able in (("main", not first), ("main-2", first)):
        with EvidenceWriter(tmp_path, worker) as writer:
            write_case(writer, "X.told.a", HANG) if able else untestable(writer)
    judgement = judge.judge_run(load_run(tmp_path), GATES)
    assert [str(row.verdict.outcome) for row in judgement.scoreboard(GATES).rows] == [outcome]


def test_a_case_that_found_out_in_its_collection_what_the_host_lacks_is_carried(tmp_path: Path) -> None:
    with EvidenceWriter(tmp_path) as writer:
        write_case(writer, "X.told.fine", PASS)
        write_case(writer, "X.told.a", PASS, recorded=("UNTESTABLE", "missing-capability"), finished=False)
    judgement = judge.judge_run(load_run(tmp_path), GATES)
    assert [v.outcome for v in judgement.carried] == ["UNTESTABLE"]
    assert judgement.exit_code == judge.EXIT_SAME


def newer(tmp_path: Path) -> list[str]:
    with EvidenceWriter(tmp_path) as writer:
        writer.write(
            r.RunStarted(run_id="x", format_version=r.FORMAT_VERSION + 1, suite_version="9", wall_s=0.0, t_s=0.0)
        )
    return ["judge", str(tmp_path)]


def missing(tmp_path: Path) -> list[str]:
    return ["judge", str(tmp_path / "nowhere")]


def empty(tmp_path: Path) -> list[str]:
    return ["render", str(tmp_path)]


def broken(tmp_path: Path) -> list[str]:
    (tmp_path / "history-main.jsonl").write_text("nonsense\n{}\n")
    return ["judge", str(tmp_path)]


def other_case(tmp_path: Path) -> list[str]:
    with EvidenceWriter(tmp_path) as writer:
        write_case(writer, "X.told.a", PASS)
    return ["judge", str(tmp_path), "--case", "X.told.zzz"]


def newer_verdicts(tmp_path: Path) -> list[str]:
    other_case(tmp_path)
    (tmp_path / "verdicts.json").write_text('{"schema": "kvgates.verdicts", "version": 99}')
    return ["render", str(tmp_path)]


def one_file(tmp_path: Path) -> list[str]:
    other_case(tmp_path)
    return ["render", str(tmp_path / "history-main.jsonl")]


@pytest.mark.parametrize("arrange", [newer, missing, empty, broken, other_case, newer_verdicts, one_file])
def test_bad_input_is_one_line_and_exit_4(tmp_path: Path, capsys: pytest.CaptureFixture[str], arrange: object) -> None:
    assert callable(arrange)
    assert main(arrange(tmp_path), gates=GATES) == 4
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert err.startswith("reports: ")
    assert "Traceback" not in err


@pytest.mark.parametrize("argv", [[], ["judge"], ["nonsense", "x"], ["render", "x", "--format", "pdf"]])
def test_bad_arguments_are_exit_4(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 4
    assert "usage" in capsys.readouterr().err


def test_render_prints_one_format_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with EvidenceWriter(tmp_path) as writer:
        write_case(writer, "X.told.a", HANG)
    before = sorted(tmp_path.rglob("*"))
    for name, begin in (("json", "{"), ("markdown", "# kvgates"), ("html", "<!DOCTYPE html>"), ("terminal", "X.told")):
        assert main(["render", str(tmp_path), "--format", name], gates=GATES) == 0
        assert capsys.readouterr().out.startswith(begin)
    assert sorted(tmp_path.rglob("*")) == before


def test_render_keeps_the_marks_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from reports.render.files import write_all

    with EvidenceWriter(tmp_path) as writer:
        write_case(writer, "X.told.a", HANG)
    write_all(board(), tmp_path)
    assert main(["render", str(tmp_path)], gates=GATES) == 0
    assert "2 FAIL (1 expected, 1 unexpected)" in capsys.readouterr().out


def test_ten_thousand_requests_are_judged_in_time(tmp_path: Path) -> None:
    """100 cases of 100 requests of 200 tokens each. Red: a judge that reads all observations for each request."""
    prompt = tuple(range(200))
    with EvidenceWriter(tmp_path) as writer:
        for case in range(100):
            requests = tuple(observation(i, f"X.told.{case}", prompt) for i in range(100))
            write_case(writer, f"X.told.{case}", PASS, requests=requests)
    begun = time.perf_counter()
    judgement = judge.judge_run(load_run(tmp_path), GATES)
    elapsed_s = time.perf_counter() - begun
    assert [c.now.numbers for c in judgement.cases] == [{"tokens": 100 * 200}] * 100
    assert elapsed_s < JUDGE_BOUND_S


def test_verdicts_given_now_can_be_written_elsewhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, out = tmp_path / "run", tmp_path / "published"
    with EvidenceWriter(run) as writer:
        write_case(writer, "X.told.a", HANG, recorded=PASS)
    assert main(["judge", str(run), "--write", str(out)], gates=GATES) == judge.EXIT_FAIL
    capsys.readouterr()
    assert '"FAIL"' in (out / "verdicts.json").read_text()
    assert "X.told.a" in (out / "report.md").read_text()
    assert sorted(p.name for p in run.iterdir()) == ["history-main.jsonl"]
    assert main(["judge", str(run), str(run), "--write", str(out)], gates=GATES) == 4
    assert "one run at a time" in capsys.readouterr().err
