"""Was there any pressure? What has to be proven of a cell of the fault matrix before its requests say anything."""

from __future__ import annotations

from reports import records as r
from reports.history import History
from suite.checks import faults
from suite.checks.base import STORE_GET, store_ops, too_few
from suite.gates.degrade_cells import DATA, DISK, KEYS, OWNER, PEER, READER, Cell
from suite.gates.judging import visible_findings
from suite.gates.selections import kind_of

LOST_OWNER = (OWNER, PEER, DATA)
"""Targets that hold blocks themselves: every victim must have had some on it."""


def surviving(history: History) -> list[str]:
    """Engines whose processes were looked at before and after: all but the one that was hurt."""
    return [s.label.removeprefix("after/") for s in history.of(r.ProcessSnapshot) if s.label.startswith("after/")]


def check_landed(history: History) -> list[r.Finding]:
    """Every fault landed. One that shows in the stack's own traffic alone counts with its last proof."""
    last: dict[tuple[str, str], r.FaultRecord] = {(f.fault_id, f.action): f for f in history.faults()}
    return faults.check_faults(list(last.values()))


VANISH = ((KEYS, "delete"), (DISK, "lose"))
"""Faults that take blocks away which a load is about to read; a full disk takes none."""


def pressure(history: History, cell: Cell) -> list[r.Finding]:
    """The fault met what it was to meet: blocks of victims on a lost owner, requests under way, traffic that flowed."""
    begin = next((f for f in history.faults("inject")), None)
    if begin is None:
        return []  # check_landed says so
    degraded = history.observations(phase="degraded")
    victims = [o for o in degraded if kind_of(o) == "victim"]
    # By their end: in some phases they are under way when the fault comes.
    asked = [o for o in victims if not o.cancelled and o.done_s >= begin.t_s]
    found = faults.no_pressure("victims asked for after the fault", len(asked), 1)
    found += faults.no_pressure("engines that were not hurt and were looked at", len(surviving(history)), 1)
    owners = [f.value for f in history.facts("owners")]
    hurt = [f.target.rpartition(":")[2] for f in history.faults("inject")]  # of a link: the owner at its end
    lost = [unit for unit in hurt if any(unit in o["held_by"] for o in owners)]
    if any(target in LOST_OWNER for target, _ in cell.parts):
        held = sum(any(o["held_by"].get(unit, 0) > 0 for unit in lost) for o in owners)
        found += faults.no_pressure(f"victims with blocks on {hurt[-1]}", held, max(1, len(owners)))
    else:
        found += faults.no_pressure("victims with blocks in the pool", sum(o["blocks"] > 0 for o in owners), 1)
    if cell.phase in ("lookup", "load"):
        wanted = "doomed" if cell.target == READER else "victim"
        caught = [o for o in degraded if kind_of(o) == wanted and o.sent_s <= landed_s(begin) and o.done_s >= begin.t_s]
        found += faults.no_pressure(f"{wanted} requests under way when the fault came", len(caught), 1)
    if (cell.target, cell.fault) in VANISH and not failed_loads(history):
        found += too_few("no load met a block that had vanished: it went too early or too late")
    if cell.phase == "save":
        saving = [o for o in degraded if kind_of(o) == "saving" and o.sent_s <= begin.t_s]
        found += faults.no_pressure("saves under way when the fault came", len(saving), 1)
    if cell.phase == "busy":
        found += faults.no_pressure("requests of steady traffic", sum(kind_of(o) == "traffic" for o in degraded), 3)
    return found


def saved_before(history: History) -> list[r.Finding]:
    """Everything that was saved before the fault became visible. Saves after it are ``hits-back``'s business."""
    begin = next((f.t_s for f in history.faults("inject")), None)
    kept = [x for x in history.records if not isinstance(x, r.WaitRecord) or begin is None or x.t_s < begin]
    return visible_findings(History(kept, before=history.before))


def failed_loads(history: History) -> float:
    """Loads that failed, wholly or in part, on any engine between the snapshots around the fault."""
    deltas = [history.delta(name, "before-fault", "after-fault") or {} for name in surviving(history)]
    return sum(sum(store_ops(delta, STORE_GET, but_ok=True).values()) for delta in deltas)


def landed_s(fault: r.FaultRecord) -> float:
    """When the fault was in effect: its start and the time it took."""
    return fault.t_s + float(fault.proof.get("took_s", 0.0) or 0.0)
