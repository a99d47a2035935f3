"""Selftests of planted defects: the catalogue, judging, the heat map, false alarms."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest

from fixtures.spec import load_spec
from reports import records as r
from reports.history import History
from reports.render import heatmap
from suite.contract import ENGINE_DIED, Case, safe_judge
from suite.defects import false_alarms, planted
from suite.defects.catalogue import CATALOGUE, LYING_CONNECTOR, Catch, Defect
from suite.defects.client_gate import ClientOnTime
from suite.defects.planted_elsewhere import LyingStartGate, gates, registry
from suite.gates import registry as gates_registry
from suite.gates.arms import CALIBRATION
from suite.gates.judging import ordered
from suite.gates.oracle import Oracle
from suite.gates.test_pressure import LEASE_MS

pytestmark = pytest.mark.selftest


# The catalogue --------------------------------------------------------------------------------------------------------
def test_the_catalogue_is_whole() -> None:
    kinds = [d.kind for d in CATALOGUE]
    assert kinds.count("lying-connector") >= 16
    assert kinds.count("misconfiguration") >= 5
    assert kinds.count("lying-store") >= 4
    assert kinds.count("lying-harness") >= 3
    assert len({d.id for d in CATALOGUE}) == len(CATALOGUE)
    assert min(rate for d in CATALOGUE for rate in d.rates) <= 1 / 50
    for defect in CATALOGUE:
        assert defect.caught_by, defect.id
        for catch in defect.caught_by:
            assert len(catch.findings) == 1 or catch.why, f"{defect.id}: several findings need a reason"
            assert planted.inner_case(catch.case).id == catch.case


def test_every_lying_connector_is_run_at_rate_zero() -> None:
    for gate in gates():
        cases = list(gate.cases())
        rates = [c.params["planted"]["rate"] for c in cases]
        assert any(rates), gate.id
        if gate.defect.kind == "lying-connector":
            assert rates.count(0.0) == len(gate.defect.caught_by), gate.id


def test_case_ids_are_unique_and_gates_proofs_exist() -> None:
    ids = [case.id for gate in gates() for case in gate.cases()]
    assert len(ids) == len(set(ids))
    ids += [case.id for _, _, case in false_alarms.plan(gates_registry(), 100)]
    assert not [i for i in ids if set(i) & set("@/\\") or len(i) > 110], (
        "cases use their id in salts, which refuse these"
    )
    known = {d.id for d in CATALOGUE}
    for gate in gates_registry().values():
        assert set(gate.proof) <= known, gate.id


def test_a_gates_proof_is_what_the_catalogue_says() -> None:
    caught: dict[str, set[str]] = {}
    for defect in CATALOGUE:
        for catch in defect.caught_by:
            caught.setdefault(catch.gate, set()).add(defect.id)
    for gate in gates_registry().values():
        assert set(gate.proof) <= caught.get(gate.id, set()), f"{gate.id} names a proof that no defect run gives"


def test_the_engine_needs_no_harness_to_lie() -> None:
    """The engine imports the package of the connector: it may not pull in pytest, httpx or the suite's gates."""
    import subprocess

    code = (
        "import sys, suite.defects.switch; "
        "print([m for m in sys.modules if m.split('.')[0] in ('pytest', 'httpx', 'fixtures') or m.startswith('suite.g')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_variants_differ_from_the_base_and_connectors_lie() -> None:
    base = load_spec("cpu")
    for gate in gates():
        case = next(iter(gate.cases()))
        spec = gate.stack(base, case)
        if gate.defect.kind == "misconfiguration":
            assert spec.key() != base.key(), gate.id
        lies = [e.connector_name == "LyingConnector" for e in spec.engines]
        # A lie about the start is told by the engine that the gate starts, not by the stack.
        by_stack = gate.defect.kind == "lying-connector" and not isinstance(gate, LyingStartGate)
        assert lies == [by_stack] * len(spec.engines)


def test_registry_has_every_defect() -> None:
    assert set(registry()) == {f"defect.{d.id}" for d in CATALOGUE}


# Judging --------------------------------------------------------------------------------------------------------------
class Inner(ClientOnTime):
    """A gate whose verdict is a fact of the history."""

    def judge(self, history: History) -> r.Verdict:
        fact = history.fact("verdict")
        assert fact is not None
        outcome, code = fact.value
        findings = (r.Finding(code=r.FindingCode(code), message="seen"),) if code else ()
        return self.verdict(history, r.Outcome(outcome), findings=findings, got="got")


def judged(
    monkeypatch: pytest.MonkeyPatch,
    outcome: str,
    code: str,
    *,
    rate: float = 1.0,
    told: dict[str, Any] | None = None,
    defect: Defect = LYING_CONNECTOR[0],
    error: str = "",
    died: bool = False,
) -> r.Verdict:
    gate = planted.LyingConnectorGate(defect)
    case = next(
        c for c in gate.cases() if c.params["planted"]["rate"] == rate
    )  # of the real gates, so before they are replaced
    monkeypatch.setattr(planted, "inner_gates", lambda: {"P.boundary": Inner()})
    default = {"lies": 3 if rate else 0, "read": 3 if rate else 0, "occasions": 3, "unit": "blocks"}
    records: list[r.Record] = [
        r.CaseStarted(case_id=case.id, gate=gate.id, gate_version=1, claim="", params=case.params, t_s=0.0),
        r.Fact(name="verdict", t_s=0.0, value=(outcome, code)),
    ]
    if told != {}:
        records.append(r.Fact(name=planted.TOLD, t_s=0.0, value=told or default))
    if died:
        value = {"engine": "e0", "words": "RuntimeError: planted", "log_tail": [], "exit_code": 1, "in_case": True}
        records.append(r.Fact(name=ENGINE_DIED, t_s=0.5, value=value))
    records.append(r.CaseFinished(case_id=case.id, t_s=1.0, error=error))
    return safe_judge(gate, History(records).for_case(case.id))


CASES = [
    ("FAIL", "wrong-answer", 1.0, "PASS", ""),
    ("FAIL", "fewer-hits", 1.0, "FAIL", "missed-defect"),
    ("PASS", "", 1.0, "FAIL", "missed-defect"),
    ("INCONCLUSIVE", "oracle-blind", 1.0, "FAIL", "missed-defect"),
    ("HARNESS_ERROR", "no-pressure", 1.0, "FAIL", "missed-defect"),
    ("PASS", "", 0.0, "PASS", ""),
    ("FAIL", "wrong-answer", 0.0, "FAIL", "false-alarm"),
    ("INCONCLUSIVE", "oracle-blind", 0.0, "FAIL", "false-alarm"),
]


@pytest.mark.parametrize(("outcome", "code", "rate", "wanted", "finding"), CASES)
def test_verdicts_on_planted_defects(
    monkeypatch: pytest.MonkeyPatch, outcome: str, code: str, rate: float, wanted: str, finding: str
) -> None:
    verdict = judged(monkeypatch, outcome, code, rate=rate)
    assert (verdict.outcome, verdict.finding) == (wanted, finding)


@pytest.mark.parametrize(("may", "finding"), [(("slow-degrade",), ""), ((), "false-alarm")])
def test_a_control_may_come_to_what_the_honest_stack_does(
    monkeypatch: pytest.MonkeyPatch, may: tuple[str, ...], finding: str
) -> None:
    """Of that very case: what the honest stack does elsewhere excuses nothing."""
    codes = tuple(r.FindingCode(code) for code in may)
    other = Catch("P.size.base.b16", (r.FindingCode.WRONG_ANSWER,), control_may=(r.FindingCode.SLOW_DEGRADE,))
    own = Catch("P.boundary.k3+1", (r.FindingCode.WRONG_ANSWER,), control_may=codes)
    defect = dataclasses.replace(LYING_CONNECTOR[0], caught_by=(own, other))
    assert judged(monkeypatch, "FAIL", "slow-degrade", rate=0.0, defect=defect).finding == finding


def test_what_a_control_may_come_to_is_no_more_than_that(monkeypatch: pytest.MonkeyPatch) -> None:
    catch = Catch("P.boundary.k3+1", (r.FindingCode.WRONG_ANSWER,), control_may=(r.FindingCode.SLOW_DEGRADE,))
    defect = dataclasses.replace(LYING_CONNECTOR[0], caught_by=(catch,))
    assert judged(monkeypatch, "FAIL", "wrong-answer", rate=0.0, defect=defect).finding == "false-alarm"


def test_what_a_gate_sets_stays_under_a_lying_connector() -> None:
    """A long lease everywhere would keep P.pressure's blocks from being evicted: nothing would press."""
    base = load_spec("cpu")
    leases = {}
    for case in registry()["defect.foreign-block"].cases():
        store = registry()["defect.foreign-block"].stack(base, case).store
        assert store is not None
        leases[case.params["planted"]["case"]] = store.kv_lease_ttl_ms
    assert leases.pop("P.pressure.evicting") == LEASE_MS
    assert set(leases.values()) == {planted.LEASE_MS}


def test_what_costs_a_stack_of_its_own_is_no_part_of_the_core() -> None:
    cases = [case for gate in gates() for case in gate.cases()]
    assert {case.variant for case in cases if case.core} == {"", "seed"}
    assert any(case.variant for case in cases if not case.core)


def test_nothing_read_is_a_harness_error(monkeypatch: pytest.MonkeyPatch) -> None:
    none = {"lies": 3, "read": 0, "occasions": 3, "unit": "blocks"}
    for told in (none, {}):
        verdict = judged(monkeypatch, "FAIL", "wrong-answer", told=told)
        assert (verdict.outcome, verdict.finding) == ("HARNESS_ERROR", "no-pressure")


def test_a_lie_at_rate_zero_is_a_harness_error(monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = judged(monkeypatch, "PASS", "", rate=0.0, told={"lies": 1, "read": 1, "occasions": 1, "unit": "blocks"})
    assert verdict.outcome == "HARNESS_ERROR"


def test_a_collection_that_broke_is_no_catch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert judged(monkeypatch, "FAIL", "wrong-answer", error="Boom: no").outcome == "HARNESS_ERROR"


def test_an_engine_that_a_defect_ended_is_what_the_defect_is_about(monkeypatch: pytest.MonkeyPatch) -> None:
    caught = judged(monkeypatch, "FAIL", "wrong-answer", died=True)
    assert caught.outcome is r.Outcome.PASS, caught.findings
    quiet = judged(monkeypatch, "PASS", "", rate=0.0, died=True)  # the control's engine may not end
    assert (quiet.outcome, quiet.finding) == (r.Outcome.FAIL, "false-alarm")


# The heat map ---------------------------------------------------------------------------------------------------------
def verdicts(monkeypatch: pytest.MonkeyPatch) -> list[r.Verdict]:
    first, second = LYING_CONNECTOR[0], LYING_CONNECTOR[2]
    return [
        judged(monkeypatch, "FAIL", "wrong-answer", defect=first),
        judged(monkeypatch, "PASS", "", rate=0.0, defect=first),
        judged(monkeypatch, "PASS", "", defect=second),
    ]


def test_the_heat_map_shows_catches_and_misses(monkeypatch: pytest.MonkeyPatch) -> None:
    heat = heatmap.build(verdicts(monkeypatch), gates=["P.boundary", "D.other"])
    assert [c.state for c in heat.cells] == ["caught", "quiet", "missed"]
    assert heat.missed == ("zero-block",)
    assert heat.unproven == ("D.other",)
    assert heat.bad_acts_read == 6
    text = heatmap.to_text(heat)
    assert "1 of 2 defects caught" in text
    assert "missed: defect.zero-block:P.boundary.k3+1:rate-1: PASS" in text
    assert msgspec.json.decode(heatmap.to_json(heat), type=heatmap.HeatMap) == heat
    svg = ElementTree.fromstring(heatmap.to_svg(heat))
    titles = [e.text or "" for e in svg.iter("{http://www.w3.org/2000/svg}title")]
    assert any("zero-block" in t and "PASS" in t for t in titles)


def test_a_clean_heat_map_has_no_misses(monkeypatch: pytest.MonkeyPatch) -> None:
    heat = heatmap.build(verdicts(monkeypatch)[:2])
    assert not heat.missed
    assert "MISSED" not in heatmap.to_text(heat)
    assert heatmap.build([]).cells == ()


# False alarms ---------------------------------------------------------------------------------------------------------
def test_upper_bounds() -> None:
    assert false_alarms.upper_bound(0, 100) == pytest.approx(1 - 0.05 ** (1 / 100), rel=1e-6)
    assert false_alarms.upper_bound(0, 100) == pytest.approx(3 / 100, rel=0.02)
    assert false_alarms.upper_bound(1, 100) == pytest.approx(0.0466, abs=2e-4)  # printed tables of exact limits
    assert false_alarms.upper_bound(0, 0) == 1.0
    assert false_alarms.upper_bound(5, 5) == 1.0
    with pytest.raises(ValueError, match="6 alarms"):
        false_alarms.upper_bound(6, 5)


def test_the_plan_takes_every_case_in_turn() -> None:
    units = list(false_alarms.plan(gates_registry(), 100))
    assert len(units) == 100
    assert len({case.id for _, _, case in units}) == 100
    per_restart = [gate.id for restart, gate, _ in units if restart == 1]
    assert len(per_restart) == len(set(per_restart)) >= 4
    many = false_alarms.plan(gates_registry(), 15 * len(per_restart))
    boundary = [case.id.split(":")[1] for _, gate, case in many if gate.id == "P.boundary"]
    assert len(set(boundary[:15])) == 15, "every case before any comes again"
    assert not any(case.dirties or case.variant for _, _, case in units)


def test_what_the_tested_releases_fail_anyway_is_no_unit() -> None:
    gates = gates_registry()
    planned = {case.id for cases in false_alarms.healthy_cases(gates).values() for case in cases}
    all_cases = {case.id for gate in gates.values() for case in gate.cases()}
    for known in false_alarms.KNOWN_RED:
        of_it = {name for name in all_cases if name == known or name.startswith(f"{known}.")}
        assert of_it, f"{known} is no gate and no case"
        assert not of_it & planned
    assert "P.concurrent.after-save" in planned


def test_undecided_units_count_for_nothing() -> None:
    def verdict(restart: int, outcome: r.Outcome) -> r.Verdict:
        return r.Verdict(case_id=f"healthy.{restart}:P.x", gate="P.x", outcome=outcome, claim="c")

    given = [verdict(1, r.Outcome.PASS), verdict(2, r.Outcome.FAIL), verdict(3, r.Outcome.INCONCLUSIVE)]
    summary = false_alarms.summarise(given)
    assert (summary.units, summary.alarms, summary.undecided, summary.restarts) == (2, 1, 1, 2)
    text = false_alarms.to_text(summary)
    assert "1 alarms in 2 units" in text
    assert "healthy.3:P.x: INCONCLUSIVE" in text
    case = Case("P.x")
    assert case.core


def test_an_alarm_of_which_the_stacks_own_log_tells_is_counted_apart() -> None:
    def verdict(restart: int, *findings: r.Finding) -> r.Verdict:
        outcome = r.Outcome.FAIL if findings else r.Outcome.PASS
        return r.Verdict(case_id=f"healthy.{restart}:P.x", gate="P.x", outcome=outcome, claim="c", findings=findings)

    hits = r.Finding(code=r.FindingCode.ZERO_HITS, message="0 of 320")
    logs = {
        name: r.Finding(code=r.FindingCode.UNEXPLAINED_LOG, message=name, evidence={"category": name})
        for name in ("load-failure", "save-failure", "traceback")
    }
    given = [
        verdict(1, hits, logs["load-failure"]),
        verdict(2, logs["save-failure"]),
        verdict(3, hits, logs["traceback"]),
        verdict(4, hits),
        *(verdict(i) for i in range(5, 101)),
    ]
    summary = false_alarms.summarise(given)
    assert (summary.units, summary.alarms, summary.witnessed) == (100, 4, 2)
    assert summary.upper_bound == false_alarms.upper_bound(4, 100)
    assert summary.unwitnessed_upper_bound == false_alarms.upper_bound(2, 98)
    assert [text.endswith("(witnessed)") for text in summary.alarm_cases] == [True, True, False, False]


def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert false_alarms.main(["--units", "0"]) == 4
    assert capsys.readouterr().err == "false_alarms: --units 0: 1 or more\n"


# What planting defects taught the judges ------------------------------------------------------------------------------
def _answer(engine: str, n: int, nat: float, role: str = "floor-native") -> r.Observation:
    return r.Observation(
        request_id=f"{engine}#{n}",
        case_id=CALIBRATION,
        phase="floors",
        engine=engine,
        role=role,
        prompt_token_ids=(1, 2, 3),
        output_token_ids=(7,),
        top_logprobs=(((7, -0.1 - nat), (8, -3.0)),),
        token_logprobs=(-0.1 - nat,),
        http_status=200,
        sent_s=0.0,
        first_token_s=1.0,
        token_s=(1.0,),
        done_s=1.0,
        deadline_s=10.0,
        sampling={"logprobs": 2},
    )


@pytest.mark.parametrize(("apart_nat", "one"), [(0.0, True), (0.05, True), (0.5, False)])
def test_engines_of_two_functions_do_not_widen_the_floor(apart_nat: float, one: bool) -> None:
    """Other weights in one engine once made a native floor of 3.6 nat, within which every wrong answer was fine."""
    records: list[r.Record] = [
        r.CaseStarted(case_id="c", gate="g", gate_version=1, claim="", t_s=0.0),
        *(_answer("e0", n, 0.0) for n in range(2)),
        *(_answer("e1", n, apart_nat) for n in range(2)),
        r.CaseFinished(case_id="c", t_s=1.0),
    ]
    oracle = Oracle.of(History(records).for_case("c"))
    assert oracle.one_function is one
    assert oracle.native.max_nat == pytest.approx(apart_nat if one else 0.0)
    assert [f.code for f in oracle.check_same_function()] == ([] if one else ["foreign-reuse"])


def test_the_primary_finding_is_neither_inconclusive_nor_behind_our_own_error() -> None:
    codes = ["oracle-blind", "conservation", "wrong-answer", "no-pressure"]
    given = [r.Finding(code=r.FindingCode(code), message="") for code in codes]
    assert [f.code for f in ordered(given)] == ["no-pressure", "wrong-answer", "conservation", "oracle-blind"]
