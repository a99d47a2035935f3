"""Connector options: their stacks, and their judges on a simulated stack."""

import msgspec
import pytest

from fixtures.errors import Untestable
from fixtures.spec import load_spec
from reports import records as r
from reports.history import History
from suite.contract import Case, Gate, safe_judge
from suite.gates.test_connector_options import OPTIONS_GATE
from suite.selftest.simulated_stack import SimulatedStack, run_case

pytestmark = [pytest.mark.selftest, pytest.mark.usefixtures("short_calibration")]

F, Out = r.FindingCode, r.Outcome


def case_of(gate: Gate, name: str) -> Case:
    return next(case for case in gate.cases() if case.id == f"{gate.id}.{name}")


@pytest.mark.parametrize("case", list(OPTIONS_GATE.cases()), ids=lambda case: case.id)
def test_every_option_makes_a_stack_of_its_own(case: Case) -> None:
    base = load_spec("cpu").with_changes(platform="cuda")
    own = OPTIONS_GATE.stack(base, case).key() != base.key()
    assert own is (case.params["option"] != "cache-reset"), "emptying a cache needs no engine of its own"
    assert not case.core


@pytest.mark.parametrize("name", ["scheduling-async", "scheduling-sync"])
def test_what_the_cpu_platform_ignores_is_untestable_there(name: str) -> None:
    with pytest.raises(Untestable, match="CPU platform"):
        OPTIONS_GATE.stack(load_spec("cpu"), case_of(OPTIONS_GATE, name))


def test_roles_are_one_producer_and_one_consumer() -> None:
    spec = OPTIONS_GATE.stack(load_spec("cpu"), case_of(OPTIONS_GATE, "roles"))
    assert [e.kv_role for e in spec.engines] == ["kv_producer", "kv_consumer"]


@pytest.mark.parametrize(
    ("name", "lies", "outcome", "finding"),
    [
        ("chunked", [], Out.PASS, ""),
        ("chunked", ["foreign"], Out.FAIL, F.WRONG_ANSWER),
        ("lookup-async", ["zero-hits"], Out.FAIL, F.ZERO_HITS),
        ("cache-reset", [], Out.PASS, ""),
        ("cache-reset", ["keeps-local"], Out.FAIL, F.ZERO_HITS),
        ("cache-reset", ["foreign"], Out.FAIL, F.WRONG_ANSWER),
        ("save-decode", ["saves-outputs"], Out.PASS, ""),
        ("save-decode", [], Out.FAIL, F.FEWER_HITS),
        ("save-decode", ["saves-outputs", "foreign"], Out.FAIL, F.WRONG_ANSWER),
    ],
)
def test_options_are_judged(name: str, lies: list[str], outcome: r.Outcome, finding: str) -> None:
    verdict = run_case(OPTIONS_GATE, f"P.options.{name}", lies)
    assert (verdict.outcome, verdict.finding) == (outcome, finding), verdict.findings


def test_an_option_that_a_release_reads_nowhere_is_no_verdict_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("suite.gates.test_connector_options.versions", lambda: {"vllm": "0.26.0"})
    base = load_spec("gpu-shared")
    with pytest.raises(Untestable, match=r"0\.26\.0"):
        OPTIONS_GATE.stack(base, case_of(OPTIONS_GATE, "save-decode"))
    OPTIONS_GATE.stack(base, case_of(OPTIONS_GATE, "lookup-async"))
    stack = SimulatedStack()
    run_case(OPTIONS_GATE, "P.options.save-decode", stack=stack)
    records = [
        rec
        if not isinstance(rec, r.StackUp)
        else msgspec.structs.replace(
            rec, engines=tuple(msgspec.structs.replace(e, versions={"vllm": "0.26.0"}) for e in rec.engines)
        )
        for rec in stack.records
    ]
    verdict = safe_judge(OPTIONS_GATE, History(records).for_case("P.options.save-decode"))
    assert (verdict.outcome, verdict.finding) == (Out.UNTESTABLE, F.MISSING_CAPABILITY)
