"""Selftests of the planted defects: the switch, the lying store on plain memory, judging, the heat map, false alarms."""

from __future__ import annotations

import ctypes
import json
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest

from fixtures.spec import load_spec
from fixtures.waiting import wait_for
from reports import records as r
from reports.history import History
from reports.render import heatmap
from suite.contract import Case, safe_judge
from suite.defects import false_alarms, planted
from suite.defects.catalogue import CATALOGUE, LYING_CONNECTOR, Defect
from suite.defects.client_gate import ClientOnTime
from suite.defects.planted_elsewhere import gates, registry
from suite.defects.switch import CONTROL_NAME, Remote, Setting, Switch, read_journal
from suite.gates import registry as gates_registry

pytestmark = pytest.mark.selftest

KNOWN = frozenset({"zero-block", "foreign-block"})


# The switch -----------------------------------------------------------------------------------------------------------
@pytest.fixture
def make_switch(tmp_path: Path) -> Iterator[Callable[..., Switch]]:
    made: list[Switch] = []

    def make(role: str = "worker", **setting: Any) -> Switch:
        made.append(Switch(tmp_path, role, Setting(**setting), KNOWN))
        return made[-1]

    yield make
    for switch in made:
        switch.close()


def _wait(what: str, probe: Callable[[], Any]) -> None:
    wait_for(what, probe, bound_s=5, bound_source="a file is looked at every 50 ms", poll_s=0.01)


def test_both_processes_acknowledge_and_lies_are_counted(tmp_path: Path, make_switch: Callable[..., Switch]) -> None:
    scheduler, worker = make_switch("scheduler"), make_switch("worker")
    remote = Remote({"e0": tmp_path})
    remote.set(Setting(generation=1, defect="zero-block"))
    _wait("both to follow", lambda: remote.acknowledged(1))
    assert worker.lies("zero-block")
    assert scheduler.lies("zero-block")
    assert worker.choose(3) == [0, 1, 2]
    worker.told(3, blocks=[0, 1, 2])
    remote.set(Setting(generation=2))
    _wait("both to follow", lambda: remote.acknowledged(2))
    assert not worker.lies("zero-block")
    told = remote.told(1)
    assert (told.lies, told.read, told.occasions) == (3, 3, 3)
    assert remote.told(2).lies == 0


def test_one_process_that_does_not_follow_is_not_acknowledged(
    tmp_path: Path, make_switch: Callable[..., Switch]
) -> None:
    make_switch("worker", generation=1)
    assert not Remote({"e0": tmp_path}).acknowledged(1)


def test_other_engines_are_told_the_truth(tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in ("e0", "e1")}
    for folder in folders.values():
        folder.mkdir()
    Remote(folders).set(Setting(generation=4, defect="zero-block"), ["e1"])
    written = {name: json.loads((folder / CONTROL_NAME).read_text()) for name, folder in folders.items()}
    assert (written["e0"]["defect"], written["e1"]["defect"]) == ("", "zero-block")
    assert written["e0"]["generation"] == 4


def test_an_unknown_defect_is_refused(tmp_path: Path, make_switch: Callable[..., Switch]) -> None:
    switch = make_switch("worker")
    make_switch("scheduler")
    remote = Remote({"e0": tmp_path})
    remote.set(Setting(generation=1, defect="typo"))
    _wait("the refusal", lambda: any(e["event"] == "refused" for e in read_journal(tmp_path / "lying-worker.jsonl")))
    with pytest.raises(ValueError, match="typo"):
        remote.acknowledged(1)
    assert switch.now.generation == 0
    with pytest.raises(ValueError, match="known: foreign-block, zero-block"):
        Switch(tmp_path, "worker", Setting(defect="typo"), KNOWN)


def test_rates_and_seeds(make_switch: Callable[..., Switch]) -> None:
    assert make_switch(defect="zero-block", rate=0.0).choose(1000) == []
    first = make_switch(defect="zero-block", rate=0.02, seed=7)
    again = make_switch(defect="zero-block", rate=0.02, seed=7)
    drawn = first.choose(5000)
    assert drawn == again.choose(5000)
    assert 60 <= len(drawn) <= 140, "1 in 50 of 5,000 are 100, give or take 4 sigma"
    assert drawn != make_switch(defect="zero-block", rate=0.02, seed=8).choose(5000)


def test_a_decision_by_key_is_the_same_everywhere(make_switch: Callable[..., Switch]) -> None:
    one, other = make_switch("worker", rate=0.5), make_switch("scheduler", rate=0.5)
    keys = [str(i).encode() for i in range(200)]
    taken = [one.chosen_by(key) for key in keys]
    assert taken == [other.chosen_by(key) for key in reversed(keys)][::-1]
    assert 60 < sum(taken) < 140
    assert not any(make_switch(rate=0.0).chosen_by(key) for key in keys)


def test_saved_lies_count_when_they_are_read(tmp_path: Path, make_switch: Callable[..., Switch]) -> None:
    switch = make_switch(generation=1, defect="zero-block")
    switch.told(2, saved_keys=["a", "b"])
    remote = Remote({"e0": tmp_path})
    assert (remote.told(1).lies, remote.told(1).read) == (2, 0)
    switch.write("load", keys=["b", "c"])
    assert remote.told(1).read == 1


def test_a_half_written_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "lying-worker.jsonl"
    path.write_text('{"event": "ack", "generation": 1}\n{"event": "li')
    assert len(read_journal(path)) == 1
    assert read_journal(tmp_path / "none.jsonl") == []


def test_a_switch_settles_before_it_acknowledges(tmp_path: Path) -> None:
    release = threading.Event()

    def settle() -> None:
        release.wait(5)

    switch = Switch(tmp_path, "worker", Setting(), KNOWN, settle)
    try:
        (tmp_path / CONTROL_NAME).write_text(json.dumps({"generation": 1}))
        assert not switch.changed.wait(0.3), "acknowledged while a load was under way"
        release.set()
        _wait("the change", lambda: switch.now.generation == 1)
    finally:
        switch.close()


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
        assert lies == [gate.defect.kind == "lying-connector"] * len(spec.engines)


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
) -> r.Verdict:
    monkeypatch.setattr(planted, "inner_gates", lambda: {"P.boundary": Inner()})
    gate = planted.LyingConnectorGate(defect)
    case = next(c for c in gate.cases() if c.params["planted"]["rate"] == rate)
    default = {"lies": 3 if rate else 0, "read": 3 if rate else 0, "occasions": 3, "unit": "blocks"}
    records: list[r.Record] = [
        r.CaseStarted(case_id=case.id, gate=gate.id, gate_version=1, claim="", params=case.params, t_s=0.0),
        r.Fact(name="verdict", t_s=0.0, value=(outcome, code)),
    ]
    if told != {}:
        records.append(r.Fact(name=planted.TOLD, t_s=0.0, value=told or default))
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
    boundary = [case.id.split(":")[1] for _, gate, case in units if gate.id == "P.boundary"]
    assert len(set(boundary)) == len(boundary)
    assert not any(case.dirties or case.variant for _, _, case in units)


def test_undecided_units_count_for_nothing() -> None:
    def verdict(restart: int, outcome: r.Outcome) -> r.Verdict:
        return r.Verdict(case_id=f"healthy.{restart}:P.x", gate="P.x", outcome=outcome, claim="c")

    given = [verdict(1, r.Outcome.PASS), verdict(2, r.Outcome.FAIL), verdict(3, r.Outcome.INCONCLUSIVE)]
    summary = false_alarms.summarise(given)
    assert (summary.units, summary.alarms, summary.undecided, summary.restarts) == (2, 1, 1, 2)
    text = false_alarms.to_text(summary)
    assert "1 false alarms in 2 units" in text
    assert "healthy.3:P.x: INCONCLUSIVE" in text
    case = Case("P.x")
    assert case.core


def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert false_alarms.main(["--units", "0"]) == 4
    assert capsys.readouterr().err == "false_alarms: --units 0: 1 or more\n"


# The lying store on plain memory --------------------------------------------------------------------------------------
class Pool:
    """A store client on a dictionary, with the calls that the connector uses; memory is real, by address."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def batch_get_into_multi_buffers(self, keys: list[str], addrs: list[Any], sizes: list[Any]) -> list[int]:
        out = []
        for key, addresses, lengths in zip(keys, addrs, sizes, strict=True):
            data, at = self.values.get(key, b""), 0
            for address, length in zip(addresses, lengths, strict=True) if data else ():
                ctypes.memmove(address, data[at : at + length], length)
                at += length
            out.append(at if data else -704)
        return out

    def batch_put_from_multi_buffers(self, keys: list[str], addrs: list[Any], sizes: list[Any], _: Any) -> list[int]:
        for key, addresses, lengths in zip(keys, addrs, sizes, strict=True):
            self.values[key] = b"".join(ctypes.string_at(a, n) for a, n in zip(addresses, lengths, strict=True))
        return [0] * len(keys)

    def register_buffer(self, address: int, length: int) -> int:
        return 0


SEGMENT, BLOCKS = 64, 4


class Rig:
    """Four blocks of two segments (layers) in real memory, a pool that holds them, and the lying store between."""

    def __init__(self, tmp_path: Path, **setting: Any) -> None:
        import torch  # why here: the other selftests of this module need none

        from suite.defects.lying_store import CALLS, LOADS, SAVES, LyingStore

        known = frozenset({*LOADS, *CALLS, *SAVES})
        self.layers = [torch.zeros(BLOCKS * SEGMENT, dtype=torch.uint8) for _ in range(2)]
        self.pool = Pool()
        self.switch = Switch(tmp_path, "worker", Setting(generation=1, **setting), known)
        self.store = LyingStore(self.pool, self.switch)
        for layer in self.layers:
            self.store.memory.add(layer)
        self.keys = [f"k{i}" for i in range(BLOCKS)]
        for i, key in enumerate([*self.keys, "other"]):
            self.pool.values[key] = bytes([2 * i + 1]) * SEGMENT + bytes([2 * i + 2]) * SEGMENT

    def where(self) -> tuple[list[list[int]], list[list[int]]]:
        addrs = [[layer.data_ptr() + i * SEGMENT for layer in self.layers] for i in range(BLOCKS)]
        return addrs, [[SEGMENT, SEGMENT]] * BLOCKS

    def load(self) -> tuple[list[int], list[tuple[int, ...]]]:
        """What the get returned, and per block the first and last byte of each segment."""
        result = self.store.batch_get_into_multi_buffers(self.keys, *self.where())
        seen = []
        for i in range(BLOCKS):
            ends = [(int(x[i * SEGMENT]), int(x[(i + 1) * SEGMENT - 1])) for x in self.layers]
            seen.append(tuple(b for pair in ends for b in pair))
        return list(result), seen


RIGHT = [(2 * i + 1, 2 * i + 1, 2 * i + 2, 2 * i + 2) for i in range(BLOCKS)]
LOADED = {
    "zero-block": [(0, 0, 0, 0)] * BLOCKS,
    "foreign-block": [(9, 9, 10, 10)] * BLOCKS,
    "stale-block": [(0, 0, 0, 0)] * BLOCKS,
    "skipped-layer": [(a, a, 0, 0) for a, _, _, _ in RIGHT],
    "half-block": [(a, 0, b, 0) for a, _, b, _ in RIGHT],
    "repeated-block": [RIGHT[0]] * BLOCKS,
    "swapped-layers": [(b, b, a, a) for a, _, b, _ in RIGHT],
    "load-error": RIGHT,
    "unloaded": [(0, 0, 0, 0)] * BLOCKS,
    "lost-failure": RIGHT,
}
OK = [2 * SEGMENT] * BLOCKS


@pytest.fixture
def make_rig(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def make(**setting: Any) -> Rig:
        made.append(Rig(tmp_path, **setting))
        return made[-1]

    yield make
    for rig in made:
        rig.store.settle()
        rig.switch.close()


@pytest.mark.needs("cpu-stack")
@pytest.mark.parametrize("defect", sorted(LOADED))
def test_each_lie_of_a_load(make_rig: Callable[..., Rig], defect: str) -> None:
    rig = make_rig(defect=defect)
    rig.store._remember(["other"])
    result, seen = rig.load()
    assert seen == LOADED[defect]
    assert result == ([-800] * BLOCKS if defect == "load-error" else OK)
    honest = make_rig(defect=defect, rate=0.0)
    assert honest.load() == (OK, RIGHT)


@pytest.mark.needs("cpu-stack")
def test_a_lost_failure(make_rig: Callable[..., Rig], tmp_path: Path) -> None:
    rig = make_rig(defect="lost-failure")
    del rig.pool.values["k1"]
    result, seen = rig.load()
    assert result == OK
    assert seen == [RIGHT[0], (0, 0, 0, 0), *RIGHT[2:]]
    assert Remote({"e0": tmp_path}).told(1).lies == 1


@pytest.mark.needs("cpu-stack")
def test_a_late_load(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(defect="late-load", delay_s=0.05)
    result, seen = rig.load()
    assert (result, seen) == (OK, [(0, 0, 0, 0)] * BLOCKS)
    rig.store.settle()
    assert int(rig.layers[0][0]) == 1


@pytest.mark.needs("cpu-stack")
def test_lies_of_saves(make_rig: Callable[..., Rig], tmp_path: Path) -> None:
    for defect, wanted in (
        ("unsaved", None),
        ("corrupt-save", bytes([7, 6]) * SEGMENT),
        ("foreign-save", bytes([9]) * SEGMENT + bytes([10]) * SEGMENT),
    ):
        for rate in (1.0, 0.0):
            rig = make_rig(defect=defect, rate=rate)
            rig.store._remember(["other"])
            for layer in rig.layers:
                layer.fill_(7)
            assert rig.store.batch_put_from_multi_buffers(["new"], [rig.where()[0][0]], [[SEGMENT] * 2], None) == [0]
            assert rig.pool.values.get("new") == (wanted if rate else bytes([7]) * 2 * SEGMENT), (defect, rate)
            assert int(rig.layers[0][0]) == 7, "the engine's own KV stays right"


def test_registry_has_every_defect() -> None:
    assert set(registry()) == {f"defect.{d.id}" for d in CATALOGUE}
