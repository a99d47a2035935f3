"""Records, history and the evidence format: what is written can be read, by this version and as far as possible by others."""

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from reports import records as r
from reports.evidence import EvidenceError, EvidenceWriter, load_run
from suite.contract import HOST_PAUSED, Gate, outcome_of, safe_judge
from suite.selftest.process_helpers import no_room_after

pytestmark = pytest.mark.selftest


@pytest.fixture(autouse=True)
def _close_writers() -> Iterator[None]:
    yield
    for writer in OPENED:
        writer.close()
    OPENED.clear()


OPENED: list[EvidenceWriter] = []


def opened(path: Path) -> EvidenceWriter:
    OPENED.append(EvidenceWriter(path))
    return OPENED[-1]


def case(case_id: str, t_s: float = 0.0) -> r.CaseStarted:
    return r.CaseStarted(case_id=case_id, gate="X.gate", gate_version=1, claim="holds", t_s=t_s)


def observation(request_id: str, case_id: str = "X.gate.a") -> r.Observation:
    return r.Observation(
        request_id=request_id,
        case_id=case_id,
        phase="p",
        engine="e0",
        prompt_token_ids=(1, 2, 3),
        output_token_ids=(4,),
        top_logprobs=(((4, -0.25), (5, -1.5)),),
        http_status=200,
        sent_s=1.0,
        first_token_s=1.5,
        done_s=2.0,
        deadline_s=9.0,
    )


def test_everything_written_is_read_back_equal(tmp_path: Path) -> None:
    writer = opened(tmp_path)
    written = [
        case("X.gate.a"),
        observation("1"),
        r.Fact(name="n", t_s=1.0, value={"a": [1, 2]}),
        r.CaseFinished(case_id="X.gate.a", t_s=2.0),
        r.Verdict(case_id="X.gate.a", gate="X.gate", outcome=r.Outcome.PASS, claim="holds"),
    ]
    for record in written:
        writer.write(record)
    assert list(load_run(tmp_path).history) == written


def test_a_metric_that_is_no_number_is_unknown_and_does_not_cost_the_run(tmp_path: Path) -> None:
    writer = opened(tmp_path)
    writer.write(r.MetricsSnapshot(unit="e0", label="x", t_s=0.0, values={"running": 1.0, "kv_usage_ratio": math.nan}))
    (read,) = load_run(tmp_path).history.of(r.MetricsSnapshot)
    assert read.values == {"running": 1.0}
    assert writer.history().of(r.MetricsSnapshot) == [read]


def test_a_line_cut_short_by_a_kill_loses_only_itself(tmp_path: Path) -> None:
    writer = opened(tmp_path)
    writer.write(observation("1"))
    with writer.path.open("ab") as file:
        file.write(b'{"kind":"observation","request_')
    run = load_run(tmp_path)
    assert [o.request_id for o in run.history.of(r.Observation)] == ["1"]
    assert run.skipped == {"cut short": 1}


def test_a_full_disk_tears_no_line(tmp_path: Path) -> None:
    """What is written after room was made must not follow half a line: nobody could read the file."""
    writer = opened(tmp_path)
    writer.write(case("X.gate.a"))
    with no_room_after(writer.path.stat().st_size + 10), pytest.raises(OSError, match="too large"):
        writer.write(observation("1"))
    writer.write(observation("2"))
    (history,) = load_run(tmp_path).histories.values()
    assert [x.request_id for x in history.of(r.Observation)] == ["2"]
    assert list(history) == list(writer.history())


def test_a_broken_line_in_the_middle_is_an_error_with_its_place(tmp_path: Path) -> None:
    writer = opened(tmp_path)
    with writer.path.open("ab") as file:
        file.write(b'{"kind":"observation"\n')
    writer.write(observation("1"))
    with pytest.raises(EvidenceError, match=r"history-main\.jsonl:1"):
        load_run(tmp_path)


def test_unknown_kinds_and_fields_of_newer_versions_are_skipped_and_counted(tmp_path: Path) -> None:
    writer = opened(tmp_path)
    with writer.path.open("ab") as file:
        file.write(b'{"kind":"from-the-future","x":1}\n')
        file.write(b'{"kind":"fact","name":"n","t_s":1.0,"value":2,"later":3}\n')
    run = load_run(tmp_path)
    assert run.skipped == {"unknown kind 'from-the-future'": 1}
    assert run.history.facts("n")[0].value == 2


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    writer = opened(tmp_path)
    newer = r.RunStarted(run_id="x", format_version=r.FORMAT_VERSION + 1, suite_version="9", wall_s=0.0, t_s=0.0)
    writer.write(newer)
    with pytest.raises(EvidenceError, match="newer than this version reads"):
        load_run(tmp_path)


def test_an_empty_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(EvidenceError, match="no history"):
        load_run(tmp_path)


def test_a_case_view_holds_its_own_records_and_what_came_before(tmp_path: Path) -> None:
    writer = opened(tmp_path)
    for name in ("X.gate.a", "X.gate.b"):
        writer.write(case(name))
        writer.write(observation(name, name))
        writer.write(r.CaseFinished(case_id=name, t_s=1.0))
    view = writer.history().for_case("X.gate.b")
    assert [o.request_id for o in view.observations()] == ["X.gate.b"]
    assert [o.request_id for o in view.earlier_observations("")] == ["X.gate.a"]
    assert view.complete


class Told(Gate):
    id = "X.gate"
    claim = "holds"
    outcome = r.Outcome.PASS
    findings: tuple[r.Finding, ...] = ()
    error: Exception | None = None

    def judge(self, history):  # type: ignore[no-untyped-def]
        if self.error:
            raise self.error
        return self.verdict(history, self.outcome, findings=self.findings)


def view_of(tmp_path: Path, *, finished: bool = True, error: str = ""):  # type: ignore[no-untyped-def]
    writer = opened(tmp_path)
    writer.write(case("X.gate.a"))
    if finished:
        writer.write(r.CaseFinished(case_id="X.gate.a", t_s=1.0, error=error))
    return writer.history().for_case("X.gate.a")


def test_a_crashing_checker_is_a_harness_error_never_a_pass(tmp_path: Path) -> None:
    gate = Told()
    gate.error = ZeroDivisionError("oops")
    verdict = safe_judge(gate, view_of(tmp_path))
    assert (verdict.outcome, verdict.finding) == (r.Outcome.HARNESS_ERROR, "checker-crashed")


def test_a_pass_with_findings_is_refused(tmp_path: Path) -> None:
    gate = Told()
    gate.findings = (r.Finding(code=r.FindingCode.WRONG_ANSWER, message="m"),)
    assert safe_judge(gate, view_of(tmp_path)).outcome is r.Outcome.HARNESS_ERROR


@pytest.mark.parametrize(
    ("finished", "error", "code"), [(False, "", "incomplete-case"), (True, "Boom", "harness-exception")]
)
def test_a_case_cut_short_is_never_judged_as_if_whole(tmp_path: Path, finished: bool, error: str, code: str) -> None:
    verdict = safe_judge(Told(), view_of(tmp_path, finished=finished, error=error))
    assert (verdict.outcome, verdict.finding) == (r.Outcome.HARNESS_ERROR, code)


@pytest.mark.parametrize(
    ("codes", "paused", "outcome"),
    [
        (["unexplained-log"], True, r.Outcome.INCONCLUSIVE),
        (["unexplained-log", "hang"], True, r.Outcome.INCONCLUSIVE),
        (["unexplained-log"], False, r.Outcome.FAIL),
        (["unexplained-log", "wrong-answer"], True, r.Outcome.FAIL),
        (["engine-died"], True, r.Outcome.FAIL),
        ([], True, r.Outcome.PASS),
        (["fault-did-not-land"], True, r.Outcome.HARNESS_ERROR),
    ],
)
def test_a_host_that_stood_still_is_not_the_stacks_failure(
    tmp_path: Path, codes: list[str], paused: bool, outcome: r.Outcome
) -> None:
    gate = Told()
    gate.findings = tuple(r.Finding(code=r.FindingCode(code), message=f"seen: {code}") for code in codes)
    gate.outcome = outcome_of(gate.findings)
    writer = opened(tmp_path)
    writer.write(case("X.gate.a"))
    if paused:
        writer.write(r.Fact(name=HOST_PAUSED, t_s=0.5, value=[{"from_s": 0.1, "stall_s": 43.0}]))
    writer.write(r.CaseFinished(case_id="X.gate.a", t_s=1.0))
    verdict = safe_judge(gate, writer.history().for_case("X.gate.a"))
    assert verdict.outcome is outcome
    if outcome is r.Outcome.INCONCLUSIVE:
        assert "43 s" in verdict.got
        assert verdict.notes == tuple(f"not counted: {code}: seen: {code}" for code in codes)


@pytest.mark.parametrize(
    ("codes", "outcome"),
    [
        ([], r.Outcome.PASS),
        ([r.FindingCode.WRONG_ANSWER], r.Outcome.FAIL),
        ([r.FindingCode.TOO_FEW_OBSERVATIONS], r.Outcome.INCONCLUSIVE),
        ([r.FindingCode.TOO_FEW_OBSERVATIONS, r.FindingCode.WRONG_ANSWER], r.Outcome.FAIL),
        ([r.FindingCode.FAULT_DID_NOT_LAND, r.FindingCode.WRONG_ANSWER], r.Outcome.HARNESS_ERROR),
        ([r.FindingCode.MISSING_CAPABILITY], r.Outcome.UNTESTABLE),
    ],
)
def test_findings_decide_the_outcome(codes: list[r.FindingCode], outcome: r.Outcome) -> None:
    assert outcome_of([r.Finding(code=code, message="m") for code in codes]) is outcome
