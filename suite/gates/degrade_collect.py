"""How every cell of the fault matrix is collected: the same phases whatever is hurt.

========== ===========================================================================================================
phase      what is done
========== ===========================================================================================================
save       victims are saved by ``saver``; the store's own replica lists say which unit holds their blocks
control    a saved prompt is read by ``reader`` from the pool, in full
baseline   the first beat of the fault's schedule with fresh prompts and nothing broken: what requests cost here
degraded   the fault; then beats: victims on ``reader``, a bystander on every engine that lives, health asked meanwhile
recovery   the fault is healed; first good answer, victims asked after it, hits, a joiner where the cell has one
after      longest request, idle KV cache, processes, sockets, threads, memory
========== ===========================================================================================================

Roles: ``cold/i`` (a victim's prompt at its saver), ``baseline``, ``short``, ``control/0``, ``victim/i``, ``bystander``,
``saving``, ``doomed`` (sent to the engine that is hurt), ``traffic``, ``probe``, ``returned/i`` (victims asked for after
the heal), ``share``, ``maximum-length``.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from suite.gates.arms import calibrate, settle_saves
from suite.gates.degrade_cells import READER, Cell
from suite.gates.degrade_plan import DOOMED, RETURNED, SHORT_TOKENS, VICTIM_TOKENS
from suite.gates.degrade_recovery import HITS_SOURCE, KV_IDLE_BOUND_S, Recovery
from suite.gates.degrade_traffic import Traffic
from suite.gates.stalls import StallWatch
from suite.workload.prompts import Prompt

if TYPE_CHECKING:
    from fixtures.client import Pending
    from fixtures.stack import Stack

HEALTH_EVERY_S = 1.5
"""How often every living engine's health is asked while a fault lasts."""


class CellCollector(Recovery):
    """Collects one cell. Decides nothing."""

    def __init__(self, stack: Stack, case_id: str, cell: Cell) -> None:
        super().__init__(stack, case_id, cell)
        self.pending: list[Pending] = []
        self.well = False
        """Hits came back after the fault."""

    def collect(self) -> None:
        """All phases, in order."""
        with self.plan.resources, StallWatch(self.stack):
            self._collect()

    def _collect(self) -> None:
        stack, cell = self.stack, self.plan.cell
        calibrate(stack)
        with stack.phase(self.case_id, "settings"):
            self._snapshot_all("before")
        self._phase_save()
        self._phase_control()
        with self._traffic() as traffic:
            self._phase_baseline()
            self._phase_degraded(traffic)
            if not cell.left_broken:
                self._phase_recovery(traffic)
        self._phase_after()
        self._leave()
        stack.scan_logs(self.case_id)

    # For gates that hurt a stack more than once ---------------------------------------------------------------------------
    def prepare(self) -> None:
        """The oracle, the engines' processes, and what requests cost here."""
        calibrate(self.stack)
        with self.stack.phase(self.case_id, "settings"):
            self._snapshot_all("before")
        self._phase_baseline()

    def hurt(self) -> None:
        """Inject the cell's fault."""
        self._inject()

    def _snapshot_all(self, label: str) -> None:
        for name in self.stack.names:
            self.stack.snapshot_processes(name, f"{label}/{name}")

    @contextlib.contextmanager
    def _traffic(self) -> Iterator[Traffic | None]:
        if self.plan.cell.phase != "busy":
            yield None
            return
        plan = self.plan
        with Traffic(self.stack, self.case_id, self.prompts, plan.survivors, "baseline", plan.deadline_s) as traffic:
            yield traffic
        self.stack.fact("traffic", {"sent": traffic.sent, "left_out": traffic.left_out})

    # Before -----------------------------------------------------------------------------------------------------------
    def _phase_save(self) -> None:
        stack, plan = self.stack, self.plan
        with stack.phase(self.case_id, "save"):
            settle_saves(stack)
            count = plan.first + len(plan.beats_s) - 1
            for i in range(count + RETURNED):
                prompt = self.prompts.fresh(f"victim/{i}", VICTIM_TOKENS)
                plan.victim_keys.append(self._save(plan.saver, prompt, f"cold/{i}"))
                (plan.victims if i < count else plan.returned).append(prompt)
            if plan.in_flight and plan.cell.target == READER:
                for i in range(DOOMED):
                    plan.doomed.append(self.prompts.fresh(f"doomed/{i}", VICTIM_TOKENS))
                    self._save(plan.reader, plan.doomed[i], f"doomed-cold/{i}")
            self._record_owners()

    def _save(self, saver: str, prompt: Prompt, role: str) -> tuple[str, ...]:
        """Save a prompt and wait until it is listed; its keys."""
        stack = self.stack
        before = stack.keys()
        answer = stack.ask(saver, prompt, role)
        blocks = len(prompt) // stack.engines[saver].facts.block_tokens
        if answer.ok:
            stack.wait_keys(len(before) + blocks, f"visible:{answer.request_id}")
        return tuple(sorted(stack.keys() - before))

    def _record_owners(self) -> None:
        """Facts ``owners``: for each victim, how many of its blocks which unit holds.

        From the master's replica lists (address of the memory) and the kernel's socket list (who listens there).
        """
        store = self.stack.store
        assert store is not None
        sockets = self.stack.snapshot_sockets("owners")
        for i, keys in enumerate(self.plan.victim_keys):
            held: dict[str, int] = {}
            for key in keys:
                for replica in store.admin.query_key(key):
                    unit = sockets.unit_at(replica.endpoint) or f"unknown {replica.endpoint}"
                    held[unit] = held.get(unit, 0) + 1
            self.stack.fact(
                "owners", {"label": f"victim/{i}", "saver": self.plan.saver, "blocks": len(keys), "held_by": held}
            )

    def _phase_baseline(self) -> None:
        """Two beats with fresh prompts: as many at once as the first beat of the fault, then one."""
        stack, plan = self.stack, self.plan
        with stack.phase(self.case_id, "baseline"):
            for round_, count in enumerate((plan.first, 1)):
                for i in range(count):
                    self._start(plan.reader, self.prompts.fresh(f"baseline/{round_}/{i}", VICTIM_TOKENS), "baseline")
                self._bystanders("short", f"baseline/{round_}")
                self._await_all()

    def _phase_control(self) -> None:
        """Before any other request: whose saves are late would be taken for those of the control's prompt."""
        stack, plan = self.stack, self.plan
        with stack.phase(self.case_id, "control"):
            prompt = self.prompts.fresh("control/0", VICTIM_TOKENS)
            self._save(plan.saver, prompt, "control-cold/0")
            stack.ask_measured(plan.reader, prompt, "control/0", deadline_s=plan.deadline_s)

    # While it lasts ---------------------------------------------------------------------------------------------------
    def _phase_degraded(self, traffic: Traffic | None) -> None:
        stack, plan = self.stack, self.plan
        with stack.phase(self.case_id, "degraded"):
            self.scrape_all("before-fault")
            if traffic:
                traffic.phase = "degraded"
            begin_s = self._inject()
            for beat, offset_s in enumerate(plan.beats_s):
                self._hold_until(begin_s + offset_s)
                self._beat(beat)
            self._hold_until(begin_s + plan.lasts_s)
            if plan.cell.left_broken:
                self._await_all()
                self.confirm()
                self.scrape_all("after-fault")

    def _inject(self) -> float:
        """Inject the cell's faults, one after the other where it has two. Returns when the first was in effect."""
        from suite.gates.degrade_faults import make_faults

        self.faults = make_faults(self.stack, self.plan)
        self._before_fault()
        first = self.faults[0].inject(self.stack)
        begin_s = first.t_s + float(first.proof.get("took_s", 0.0))
        for fault in self.faults[1:]:
            self._hold_until(time.monotonic() + self.plan.cell.second_after_s)
            fault.inject(self.stack)
        return begin_s

    def _before_fault(self) -> None:
        """What has to be under way when the fault comes."""
        plan, phase = self.plan, self.plan.cell.phase
        if plan.in_flight and plan.cell.target == READER:
            sent = [self._start(plan.unit, prompt, "doomed") for prompt in plan.doomed]
        elif plan.in_flight:
            sent = self._victims(plan.first)
        elif phase == "save":
            sent = [
                self._start(name, self.prompts.fresh(f"saving/{name}/{i}", VICTIM_TOKENS), "saving")
                for i in range(2)
                for name in plan.survivors
            ]
        else:
            return
        if phase in ("load", "save"):
            sent[0].wait_first_token(plan.deadline_s)

    def _beat(self, beat: int) -> None:
        """Victims that are due, a bystander on every living engine, and their health."""
        if beat or not self.plan.in_flight or self.plan.cell.target == READER:
            self._victims(self.plan.first if beat == 0 else 1)
        self._bystanders("bystander", f"beat/{beat}")

    def _victims(self, count: int) -> list[Pending]:
        plan = self.plan
        first, plan.asked = plan.asked, plan.asked + count
        return [
            self._start(plan.reader, plan.victims[i], f"victim/{i}")
            for i in range(first, min(plan.asked, len(plan.victims)))
        ]

    def _bystanders(self, role: str, label: str) -> None:
        for name in self.plan.survivors:
            self._start(name, self.prompts.fresh(f"{label}/{name}", SHORT_TOKENS), role)

    def _start(self, engine: str, prompt: Prompt, role: str, **fields: float) -> Pending:
        fields.setdefault("deadline_s", self.plan.deadline_s)
        pending = self.stack.start(self.stack.request(engine, prompt, role, **fields))
        self.pending.append(pending)
        return pending

    def _await_all(self) -> None:
        """Every request that was started has ended: each has its own deadline."""
        while self.pending:
            self.pending.pop(0).result()

    def _hold_until(self, due_s: float) -> None:
        """Let time pass up to a moment of the schedule, asking every living engine's health meanwhile."""
        while (left_s := due_s - time.monotonic()) > 0:
            for name in self.plan.survivors:
                self.stack.health(name, deadline_s=1.0)
            step_s = time.monotonic() + min(HEALTH_EVERY_S, left_s)
            self.stack.wait(
                "the next beat",
                partial(_past, min(step_s, due_s)),
                bound_s=HEALTH_EVERY_S + 1,
                bound_source="suite.gates.degrade_collect.HEALTH_EVERY_S",
                poll_s=0.05,
            )

    # Afterwards -------------------------------------------------------------------------------------------------------
    def _phase_recovery(self, traffic: Traffic | None) -> None:
        stack, plan = self.stack, self.plan
        with stack.phase(self.case_id, "recovery"):
            self.confirm()
            self.heal()
            if traffic:
                traffic.phase = "recovery"
            self.wait_good()
            self._await_all()  # requests that the fault caught
            self.scrape_all("after-fault")
            for i, prompt in enumerate(plan.returned):
                self._start(plan.reader, prompt, f"returned/{len(plan.victims) + i}")
            self._await_all()
            self.well = stack.wait(
                "hits-back",
                partial(self.shared, plan.saver, plan.reader),
                bound_s=self.hits_bound_s,
                bound_source=HITS_SOURCE,
                poll_s=0.5,
            )
            if plan.cell.joiner:
                self.join_and_leave()

    def _phase_after(self) -> None:
        stack, plan = self.stack, self.plan
        with stack.phase(self.case_id, "after"):
            for name in plan.survivors:
                longest = stack.engines[name].facts.max_model_len - 8
                prompt = self.prompts.fresh(f"maximum/{name}", longest)
                stack.ask(name, prompt, "maximum-length", max_tokens=8, deadline_s=plan.deadline_s)
            for name in plan.survivors:
                stack.wait(
                    f"kv-usage-zero/{name}",
                    partial(self.idle, name),
                    bound_s=KV_IDLE_BOUND_S,
                    bound_source="suite.gates.degrade_recovery.KV_IDLE_BOUND_S",
                    poll_s=0.25,
                )
                stack.snapshot_processes(name, f"after/{name}")

    def _leave(self) -> None:
        """Hand the stack on only where it is proven well; else the next case gets a new one.

        Where hits did not come back, the proof could only fail, after many a wait.
        """
        from fixtures.healthy import prove_healthy

        if not self.well:
            self.stack.heal_all()
            self.stack.dirty = True
            return
        prove_healthy(self.stack, self.case_id)


def _past(due_s: float) -> bool:
    return time.monotonic() >= due_s
