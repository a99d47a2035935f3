"""Damaged blocks, pressure and restarts on a simulated stack: green where it is honest, red with the right finding."""

import time
from typing import Any, Literal

import pytest

from reports import records as r
from reports.history import History
from suite.checks.logs import explained
from suite.gates.judging_integrity import EXPLAINS
from suite.gates.judging_pressure import check_links
from suite.gates.judging_restart import HELD, held_before
from suite.gates.test_integrity import INTEGRITY
from suite.gates.test_pressure import PRESSURE
from suite.gates.test_readmission import READMISSION
from suite.gates.test_restart import RESTARTED
from suite.selftest.samples import observation
from suite.selftest.simulated_stack import DAMAGED, SimulatedStack, run_case

pytestmark = [pytest.mark.selftest, pytest.mark.usefixtures("short_calibration")]

F, Out = r.FindingCode, r.Outcome


# Damaged blocks -----------------------------------------------------------------------------------------------------


@pytest.fixture
def integrity(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a case of P.integrity. The proof of health needs live processes, which a simulation has none of."""
    monkeypatch.setattr("suite.gates.test_integrity.prove_healthy", lambda stack, case_id: None)
    return lambda how, *lies: run_case(INTEGRITY, f"P.integrity.{how}", lies)


@pytest.mark.parametrize("how", ["flipped", "exchanged", "foreign"])
def test_a_damaged_block_that_is_served_is_undetected_corruption(integrity: Any, how: str) -> None:
    verdict = integrity(how)
    assert (verdict.outcome, verdict.finding) == (Out.FAIL, F.UNDETECTED_CORRUPTION), verdict.findings
    assert "the answer is wrong" in verdict.got


@pytest.mark.parametrize("how", ["flipped", "exchanged", "foreign", "truncated", "truncated-first"])
def test_a_stack_that_refuses_and_recomputes_passes(integrity: Any, how: str) -> None:
    verdict = integrity(how, "checksum")
    assert verdict.outcome is Out.PASS, verdict.findings


def test_a_block_that_cannot_be_loaded_and_is_asked_for_without_end_is_a_hang(integrity: Any) -> None:
    verdict = integrity("truncated-first")
    assert [f.code for f in verdict.findings] == [F.HANG, F.UNBOUNDED_LOOKUPS]


def test_what_is_recomputed_must_be_right(integrity: Any) -> None:
    verdict = integrity("flipped", "checksum", "wrong-recompute")
    assert (verdict.outcome, verdict.finding) == (Out.FAIL, F.WRONG_ANSWER)


def test_damage_that_changed_nothing_is_our_fault(integrity: Any) -> None:
    assert integrity("flipped", "idle-damage").outcome is Out.HARNESS_ERROR


def test_a_block_that_was_never_read_proves_nothing(integrity: Any) -> None:
    verdict = integrity("foreign", "zero-hits")
    assert verdict.outcome is Out.HARNESS_ERROR
    assert {F.NO_PRESSURE, F.NO_CONTROL} <= {f.code for f in verdict.findings}


def test_a_refusal_that_leaves_blocks_in_use_is_a_leak(integrity: Any) -> None:
    assert integrity("flipped", "checksum", "leak").finding == F.KV_LEAK


def test_a_crash_is_not_explained_by_damage(integrity: Any) -> None:
    assert integrity("truncated", "crash").finding == F.UNEXPLAINED_LOG


def test_refusals_in_the_log_are_explained() -> None:
    text = "E1129 19:41:54.062835 30145 transfer_task.cpp:1513] handles len:32768, all_slice_len:65536"
    line = r.LogLine(unit="e1", line_number=1, text=text, category="", t_s=2.0)
    damage = r.FaultRecord(
        fault_id="d", fault="damage", target="pool", action="inject", landed=True, t_s=1.0, explains=EXPLAINS
    )
    assert explained(line, [damage])


# Pressure -----------------------------------------------------------------------------------------------------------


def test_pressure_that_does_no_harm_passes() -> None:
    verdict = run_case(PRESSURE, "P.pressure.evicting")
    assert verdict.outcome is Out.PASS, verdict.findings
    assert verdict.numbers["cancelled"] == 16


@pytest.mark.parametrize(
    ("lie", "outcome", "finding"),
    [
        ("foreign", Out.FAIL, F.WRONG_ANSWER),
        ("leak", Out.FAIL, F.KV_LEAK),
        ("died", Out.FAIL, F.ENGINE_DIED),
        ("stalls", Out.FAIL, F.HANG),
        ("refuses-long", Out.FAIL, F.FAILED_REQUEST),
        ("no-salt", Out.FAIL, F.EXTRA_HITS),
        ("crash", Out.FAIL, F.UNEXPLAINED_LOG),
        ("zero-hits", Out.INCONCLUSIVE, F.NO_CONTROL),
        ("calm", Out.HARNESS_ERROR, F.NO_PRESSURE),
    ],
)
def test_harm_under_pressure_is_named(lie: str, outcome: r.Outcome, finding: r.FindingCode) -> None:
    verdict = run_case(PRESSURE, "P.pressure.evicting", [lie])
    assert (verdict.outcome, verdict.finding) == (outcome, finding), verdict.findings


# Readmission --------------------------------------------------------------------------------------------------------


@pytest.fixture
def readmission(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the case of P.readmission."""
    monkeypatch.setattr("suite.gates.test_readmission.prove_healthy", well)
    return lambda *lies: run_case(READMISSION, "P.readmission.half-cache", lies)


def test_a_failed_load_that_is_recomputed_passes(readmission: Any) -> None:
    verdict = readmission("checksum")
    assert verdict.outcome is Out.PASS, verdict.findings
    assert verdict.numbers["failed_loads"] == 1


@pytest.mark.parametrize(
    ("lies", "outcome", "finding"),
    [
        ([], Out.FAIL, F.HANG),
        (["checksum", "starves"], Out.FAIL, F.HANG),
        (["checksum", "wrong-recompute"], Out.FAIL, F.WRONG_ANSWER),
        (["checksum", "ill"], Out.FAIL, F.HITS_NOT_BACK),
        (["checksum", "crash"], Out.FAIL, F.UNEXPLAINED_LOG),
        (["idle-damage"], Out.HARNESS_ERROR, F.FAULT_DID_NOT_LAND),
        (["zero-hits"], Out.HARNESS_ERROR, F.NO_PRESSURE),
        (["checksum", "late-failure"], Out.HARNESS_ERROR, F.NO_PRESSURE),
    ],
)
def test_harm_of_a_failed_load_is_named(
    readmission: Any, lies: list[str], outcome: r.Outcome, finding: r.FindingCode
) -> None:
    verdict = readmission(*lies)
    assert (verdict.outcome, verdict.finding) == (outcome, finding), verdict.findings


# Restarts -----------------------------------------------------------------------------------------------------------


class SimulatedRestart:
    """What a restart leaves behind in the simulation: an empty engine with half of the pool, or an empty pool."""

    def __init__(self, unit: str, changes: dict[str, str]) -> None:
        self.unit = unit
        self.changes = changes

    def inject(self, stack: SimulatedStack) -> None:
        if self.unit == "master":
            stack.pool.clear()
        else:
            stack.held[self.unit].local.clear()
            stack.pool = {key: value for key, value in stack.pool.items() if int(key[-1], 16) % 4}
        if "stale" in stack.lies:
            stack.pool = dict.fromkeys(stack.pool, DAMAGED)
        if "mute" in stack.lies:
            stack.lies.add("zero-hits")
        stack.record(
            r.FaultRecord(
                fault_id=f"restart:{self.unit}:1",
                fault="restart",
                target=self.unit,
                action="inject",
                landed="not-restarted" not in stack.lies,
                proof={"result": "ready"},
                t_s=time.monotonic(),
            )
        )


def well(stack: SimulatedStack, case_id: str) -> None:
    """The proof of health, which needs live processes: its fact alone."""
    complaints = ["e1: no hit"] if "ill" in stack.lies else []
    stack.dirty = bool(complaints)
    stack.fact("healthy", {"complaints": complaints})


@pytest.fixture
def restart(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a case of P.restart."""
    monkeypatch.setattr("suite.gates.test_restart.Restart", SimulatedRestart)
    monkeypatch.setattr("suite.gates.test_restart.prove_healthy", well)
    return lambda unit, *lies: run_case(RESTARTED, f"P.restart.{unit}", lies)


@pytest.mark.parametrize("unit", ["engine", "master", "engine-changed", "master-changed"])
def test_an_honest_restart_passes(restart: Any, unit: str) -> None:
    verdict = restart(unit)
    assert verdict.outcome is Out.PASS, verdict.findings


def test_a_block_whose_owner_is_gone_is_not_held() -> None:
    held = {"k1": ["e0:1"], "k2": ["old-e1:9"], "k3": []}
    started = r.CaseStarted(case_id="c", gate="P.restart", gate_version=1, claim="", t_s=0.0)
    fact = r.Fact(name=HELD, t_s=1.0, value={"engine": "e1", "held": held, "segments": ["e0:1", "e1:2"]})
    assert held_before(History([started, fact]), observation(engine="e1")) == {"k1"}


def test_a_restarted_engine_reads_some_old_blocks_and_misses_others(restart: Any) -> None:
    left = restart("engine").numbers["old_blocks_left"]
    assert {2, 0} <= set(left)


@pytest.mark.parametrize(
    ("unit", "lie", "outcome", "finding"),
    [
        ("engine", "stale", Out.FAIL, F.WRONG_ANSWER),
        ("engine-changed", "stale", Out.FAIL, F.WRONG_ANSWER),
        ("engine", "mute", Out.FAIL, F.ZERO_HITS),
        ("engine", "ill", Out.FAIL, F.HITS_NOT_BACK),
        ("master", "mute", Out.FAIL, F.ZERO_HITS),
        ("master", "not-restarted", Out.HARNESS_ERROR, F.FAULT_DID_NOT_LAND),
    ],
)
def test_harm_of_a_restart_is_named(
    restart: Any, unit: str, lie: str, outcome: r.Outcome, finding: r.FindingCode
) -> None:
    verdict = restart(unit, lie)
    assert (verdict.outcome, verdict.finding) == (outcome, finding), verdict.findings


def test_a_restart_after_which_nothing_is_read_has_no_control(restart: Any) -> None:
    assert F.NO_CONTROL in {f.code for f in restart("engine", "mute").findings}


def test_a_failed_load_beside_an_undamaged_prompt_that_is_not_read_has_no_control(readmission: Any) -> None:
    assert F.NO_CONTROL in {f.code for f in readmission("zero-hits").findings}


def throttle(action: Literal["inject", "heal"], *, landed: bool = True) -> r.FaultRecord:
    proof = {"packets_of_the_stack": 7}
    return r.FaultRecord(
        fault_id="t", fault="throttle-link", target="data:e0", action=action, landed=landed, proof=proof, t_s=1.0
    )


def limited(params: dict[str, int], *records: r.FaultRecord) -> list[str]:
    case_id = "P.pressure.slow-link"
    start = r.CaseStarted(
        case_id=case_id, gate="P.pressure", gate_version=2, claim="c", params=params, stack_id="s1", t_s=0.0
    )
    history = History([start, *records, r.CaseFinished(case_id=case_id, t_s=2.0)]).for_case(case_id)
    return [f.code for f in check_links(history)]


def test_a_limit_that_the_traffic_did_not_feel_is_no_slow_link() -> None:
    slow = {"bytes_per_s": 1}
    felt = (throttle("inject"), throttle("inject"), throttle("heal"))
    assert limited(slow, *felt) == []
    assert limited({}) == []
    assert limited(slow) == [F.NO_PRESSURE]
    assert limited(slow, felt[0], throttle("inject", landed=False), felt[2]) == [F.FAULT_DID_NOT_LAND]
    assert limited(slow, *felt[:2], throttle("heal", landed=False)) == [F.FAULT_DID_NOT_LAND]
