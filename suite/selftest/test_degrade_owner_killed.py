"""D.owner-killed on a hand-made history: one that passes, and one for each way in which it must not."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from reports import records as r
from reports.history import History
from suite.contract import safe_judge
from suite.gates.degrade_cells import Cell
from suite.gates.test_degrade import OWNER_KILLED
from suite.selftest import degrade_samples as samples
from suite.selftest.degrade_samples import FAULT_S, WRONG, Change, added, hung, replaced

pytestmark = pytest.mark.selftest

F, Out = r.FindingCode, r.Outcome
CELL = Cell("peer", "kill", topology="embedded")
READER = "e1"


def plain_label(rec: r.Record) -> r.Record:
    """This gate has one reader: its labels name no engine."""
    if isinstance(rec, (r.ProcessSnapshot, r.MetricsSnapshot)) and rec.unit == READER:
        return msgspec.structs.replace(rec, label=rec.label.removesuffix(f"/{READER}"))
    if isinstance(rec, r.FaultRecord):
        return msgspec.structs.replace(rec, target="e0")
    return rec


def well() -> list[r.Record]:
    """The owner e0 was killed; e1 goes on."""
    gone = ("degraded", "after", "recovery")
    made = [plain_label(rec) for rec in samples.records(CELL)]
    return [
        rec
        for rec in made
        if not (isinstance(rec, r.Observation) and rec.engine == "e0" and rec.phase in gone)
        and not (isinstance(rec, r.HealthProbe) and rec.engine == "e0")
    ]


def judged(*changes: Change) -> r.Verdict:
    made = well()
    for change in changes:
        made = change(made)
    return safe_judge(OWNER_KILLED, History(made).for_case(CELL.id))


def asked(role: str, **changes: Any) -> Change:
    return replaced(
        lambda rec: (
            isinstance(rec, r.Observation) and rec.role == role and rec.phase in ("degraded", "after", "control")
        ),
        lambda rec: msgspec.structs.replace(rec, **changes),
    )


def late(role: str, ttft_s: float) -> Change:
    def slow(rec: r.Observation) -> r.Observation:
        first_s = rec.sent_s + ttft_s
        return msgspec.structs.replace(
            rec, first_token_s=first_s, token_s=(first_s, first_s + 0.01), done_s=first_s + 0.02
        )

    return replaced(lambda rec: isinstance(rec, r.Observation) and rec.role == role and rec.phase == "degraded", slow)


def snapshot(label: str, **changes: Any) -> Change:
    def more(rec: r.MetricsSnapshot) -> r.MetricsSnapshot:
        values = {name.replace("__", "."): value for name, value in changes.items()}
        return msgspec.structs.replace(rec, values=rec.values | values)

    return replaced(lambda rec: isinstance(rec, r.MetricsSnapshot) and rec.label == label and rec.unit == READER, more)


def dropped(match: Any) -> Change:
    return replaced(match, lambda rec: None)


def held_elsewhere() -> Change:
    return replaced(
        lambda rec: isinstance(rec, r.Fact) and rec.name == "owners" and rec.value["label"] == "victim/2",
        lambda rec: msgspec.structs.replace(rec, value=rec.value | {"held_by": {READER: 62}}),
    )


def other_process() -> Change:
    return replaced(
        lambda rec: isinstance(rec, r.ProcessSnapshot) and rec.unit == READER and rec.label == "after",
        lambda rec: plain_label(samples.processes(READER, "after", pid=8)),
    )


def killed_at(t_s: float) -> Change:
    """Another time of the fault: after everything that was to follow it, say."""
    return replaced(lambda rec: isinstance(rec, r.FaultRecord), lambda rec: msgspec.structs.replace(rec, t_s=t_s))


def every_victim(**changes: Any) -> Change:
    return replaced(
        lambda rec: isinstance(rec, r.Observation) and rec.role.startswith("victim/"),
        lambda rec: msgspec.structs.replace(rec, **changes),
    )


def test_a_fleet_that_degrades_to_recompute_passes() -> None:
    verdict = judged()
    assert verdict.outcome is Out.PASS, verdict.findings
    assert len(verdict.numbers["requests"]) == 6


@pytest.mark.parametrize(
    ("change", "outcome", "code"),
    [
        (asked("victim/1", top_logprobs=WRONG), Out.FAIL, F.WRONG_ANSWER),
        (asked("victim/1", http_status=500, error="http 500", output_token_ids=()), Out.FAIL, F.FAILED_REQUEST),
        (late("victim/2", 4.0), Out.FAIL, F.SLOW_DEGRADE),
        (late("bystander", 4.0), Out.FAIL, F.SLOW_DEGRADE),
        (snapshot("after-fault", store__lookup_exists__ok__ops=500.0), Out.FAIL, F.UNBOUNDED_LOOKUPS),
        (snapshot("idle", kv_usage_ratio=0.25), Out.FAIL, F.KV_LEAK),
        (
            asked("maximum-length", http_status=400, error="http 400", output_token_ids=()),
            Out.FAIL,
            F.ADMISSION_REFUSED,
        ),
        (other_process(), Out.FAIL, F.ENGINE_DIED),
        (held_elsewhere(), Out.HARNESS_ERROR, F.NO_PRESSURE),
        (killed_at(FAULT_S + 1000), Out.HARNESS_ERROR, F.NO_PRESSURE),
        (every_victim(cancelled=True), Out.HARNESS_ERROR, F.NO_PRESSURE),
        (asked("control/0", cached_tokens=0, error="x", http_status=500), Out.INCONCLUSIVE, F.NO_CONTROL),
        (dropped(lambda rec: isinstance(rec, r.HealthProbe)), Out.INCONCLUSIVE, F.TOO_FEW_OBSERVATIONS),
        (dropped(lambda rec: isinstance(rec, r.ProcessSnapshot)), Out.INCONCLUSIVE, F.TOO_FEW_OBSERVATIONS),
        (
            replaced(
                lambda rec: isinstance(rec, r.FaultRecord), lambda rec: msgspec.structs.replace(rec, landed=False)
            ),
            Out.HARNESS_ERROR,
            F.FAULT_DID_NOT_LAND,
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else "",
)
def test_each_defect_is_found(change: Change, outcome: r.Outcome, code: r.FindingCode) -> None:
    verdict = judged(change)
    assert (verdict.outcome, verdict.finding) == (outcome, code), verdict.findings


def test_a_victim_that_gets_no_answer_behind_a_healthy_endpoint_is_named_so() -> None:
    silent = hung("v9", "victim/3", "degraded", FAULT_S + 4.0, number=3, case_id=CELL.id)
    probe = r.HealthProbe(engine=READER, t_s=FAULT_S + 6.0, http_status=200, elapsed_s=0.01)
    verdict = judged(added(silent, probe))
    assert (verdict.outcome, verdict.finding) == (Out.FAIL, F.STUCK_BEHIND_HEALTH)
    assert F.HANG in {f.code for f in verdict.findings}
