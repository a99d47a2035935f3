"""How every cell of the fault matrix is collected: the same phases whatever is hurt.

========== ===========================================================================================================
phase      what is done
========== ===========================================================================================================
save       victims are saved by ``saver``; the store's own replica lists say which unit holds their blocks
baseline   the first beat of the fault's schedule with fresh prompts and nothing broken: what requests cost here
control    a saved prompt is read by ``reader`` from the pool, in full
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
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import httpx

from fixtures.errors import HarnessError
from fixtures.revive import join, revive
from suite.gates.arms import calibrate, settle_saves
from suite.gates.degrade_cells import ETCD, LEADER, OWNER, PEER, READER, Cell
from suite.gates.degrade_traffic import Traffic
from suite.workload.prompts import Prompt, PromptMaker

if TYPE_CHECKING:
    from fixtures.client import Pending
    from fixtures.faults import Fault
    from fixtures.stack import Stack

VICTIM_TOKENS = 2000
"""One prefill chunk of the tested release (2,048), in which cold and external answers agree to the last digit."""

SHORT_TOKENS = 200

GRACE_S = 5.0
"""On top of the client TTL, for a request's deadline: what waits for the master to drop a silent client is over with the
TTL, and a recomputation takes well under a second."""

HEAL_EARLY_SHARE = 0.5
"""A fault that is healed before the TTL lasts half of it."""

HEAL_LATE_S = GRACE_S + 1.0
"""A fault that is healed after the TTL lasts this much longer: beyond the deadline of the first requests, so that one which
waits for the heal is seen to get no answer."""

BEATS_S: dict[str, tuple[float, ...]] = {
    "before-ttl": (0.0, 0.25),
    "after-ttl": (0.0, 0.35, 0.75, 1.15),
    "none": (0.0, 0.35, 0.75, 1.15),
}
"""Heal -> when victims are asked for, in client TTLs since the fault. What a lost block costs changes when the TTL ends."""

AT_ONCE, AT_ONCE_IN_FLIGHT = 3, 6
"""Victims of the first beat; more where the fault is to hit some of them in their load."""

RETURNED = 2
"""Victims asked for only after the heal: are blocks that came back (or are still listed) right?"""

DOOMED = 3
"""Prompts that the engine that is hurt is loading meanwhile."""

HEALTH_EVERY_S = 1.5

FIRST_GOOD_BOUND_S = 20.0
"""Bound of the wait for a first good answer after the heal: twice the default client TTL."""

PROBE_DEADLINE_S = 8.0
"""Of requests of the recovery phase that are sent again and again; 40 times what they take on a well stack."""

EXTRA_HITS_S = 10.0
"""Hits must be back within twice the client TTL (once to drop the old client, once to be sure) and this much more."""

SHARE_VISIBLE_S = 3.0
"""Until a short prompt's blocks are listed; up to 0.3 s were measured on an idle host."""

KV_IDLE_BOUND_S = 10.0
"""An idle engine frees its blocks with the last request; cancelled ones end within a scheduler step."""

JOIN_BOUND_S = 120.0
"""An engine starts in 20 to 45 s on two cores."""


@dataclass
class Plan:
    """Who does what in a cell. ``unit`` is the name of the unit (or link) that is hurt."""

    cell: Cell
    unit: str
    saver: str
    reader: str
    survivors: list[str]
    ttl_s: float
    deadline_s: float
    victims: list[Prompt] = field(default_factory=list)
    victim_keys: list[tuple[str, ...]] = field(default_factory=list)
    returned: list[Prompt] = field(default_factory=list)
    doomed: list[Prompt] = field(default_factory=list)
    asked: int = 0
    resources: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    """What is open until the cell is over."""

    def unit_of(self, target: str) -> str:
        """Name of the unit that a target means on this stack."""
        return "owner0" if target == OWNER else self.unit if target == self.cell.target else target

    @property
    def in_flight(self) -> bool:
        """The fault is to hit requests on their way to or from the pool."""
        return self.cell.phase in ("lookup", "load")

    @property
    def first(self) -> int:
        """Victims of the first beat."""
        return AT_ONCE_IN_FLIGHT if self.in_flight and self.cell.target != READER else AT_ONCE

    @property
    def keys_of_first_beat(self) -> tuple[str, ...]:
        """Keys of the victims that are sent together, those that are sent last first: their loads begin last."""
        return tuple(key for keys in reversed(self.victim_keys[: self.first]) for key in keys)

    @property
    def beats_s(self) -> list[float]:
        """When beats are due, in seconds since the fault."""
        return [share * self.ttl_s for share in BEATS_S[self.cell.heal]]

    @property
    def lasts_s(self) -> float:
        """How long the fault is observed (and lasts, where it has to be healed)."""
        return self.ttl_s * HEAL_EARLY_SHARE if self.cell.heal == "before-ttl" else self.ttl_s + HEAL_LATE_S


def plan_cell(stack: Stack, cell: Cell) -> Plan:
    """Cast the parts of a cell on a stack of two engines or more."""
    first, second = stack.names[0], stack.names[1]
    hurt = {PEER: first, READER: second, OWNER: "owner0", ETCD: "etcd0"}.get(cell.target, cell.target)
    if cell.target == LEADER and stack.store is not None:
        hurt = stack.store.leader()
    saver, reader = (second, first) if cell.target == READER else (first, second)
    ttl_s = float(stack.spec.store.client_ttl_s) if stack.spec.store else 10.0
    survivors = [name for name in stack.names if name != hurt]
    return Plan(cell, hurt, saver, reader, survivors, ttl_s, ttl_s + GRACE_S)


class CellCollector:
    """Collects one cell. Decides nothing."""

    def __init__(self, stack: Stack, case_id: str, cell: Cell) -> None:
        self.stack = stack
        self.case_id = case_id
        self.plan = plan_cell(stack, cell)
        self.prompts: PromptMaker = stack.prompts(case_id)
        self.faults: list[Fault] = []
        self.pending: list[Pending] = []

    def collect(self) -> None:
        """All phases, in order."""
        with self.plan.resources:
            self._collect()

    def _collect(self) -> None:
        stack, cell = self.stack, self.plan.cell
        calibrate(stack)
        with stack.phase(self.case_id, "settings"):
            self._snapshot_all("before")
        self._phase_save()
        with self._traffic() as traffic:
            self._phase_baseline()
            self._phase_control()
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

    def mend(self) -> None:
        """Undo it."""
        self._confirm()
        self._heal()

    def wait_good(self) -> bool:
        """Wait until a fresh request is answered on every engine that was not hurt; whether it came true."""
        return self.stack.wait(
            "first-good",
            self._good_everywhere,
            bound_s=FIRST_GOOD_BOUND_S,
            bound_source="suite.gates.degrade_collect.FIRST_GOOD_BOUND_S",
            poll_s=0.5,
        )

    def wait_shared(self, engine: str) -> bool:
        """Wait until an engine and another read what the other saved, both ways; whether it came true."""
        other = next(name for name in self.stack.names if name != engine)
        return self.stack.wait(
            f"hits-back/{engine}",
            lambda: self._shared(other, engine) and self._shared(engine, other),
            bound_s=2 * self.plan.ttl_s + EXTRA_HITS_S,
            bound_source="2 x client TTL + suite.gates.degrade_collect.EXTRA_HITS_S",
            poll_s=0.5,
        )

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

        From the master's replica lists (address of the memory) and the kernel's socket list (who listens there). By port
        alone: the store lists the address a client advertises, the kernel the one it binds.
        """
        store = self.stack.store
        assert store is not None
        units = {x.rsplit(":", 1)[1]: x.split(" ", 1)[0] for x in self.stack.snapshot_sockets("owners").listening}
        for i, keys in enumerate(self.plan.victim_keys):
            held: dict[str, int] = {}
            for key in keys:
                for replica in store.admin.query_key(key):
                    unit = units.get(replica.endpoint.rsplit(":", 1)[-1], f"unknown {replica.endpoint}")
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
        stack, plan = self.stack, self.plan
        with stack.phase(self.case_id, "control"):
            prompt = self.prompts.fresh("control/0", VICTIM_TOKENS)
            self._save(plan.saver, prompt, "control-cold/0")
            stack.ask_measured(plan.reader, prompt, "control/0", deadline_s=plan.deadline_s)

    # While it lasts ---------------------------------------------------------------------------------------------------
    def _phase_degraded(self, traffic: Traffic | None) -> None:
        stack, plan = self.stack, self.plan
        with stack.phase(self.case_id, "degraded"):
            self._scrape("before-fault")
            if traffic:
                traffic.phase = "degraded"
            begin_s = self._inject()
            for beat, offset_s in enumerate(plan.beats_s):
                self._hold_until(begin_s + offset_s)
                self._beat(beat)
            self._hold_until(begin_s + plan.lasts_s)
            if plan.cell.left_broken:
                self._await_all()
                self._confirm()
                self._scrape("after-fault")

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

    def _confirm(self) -> None:
        """Ask faults whose effect shows in the stack's own traffic alone whether it has."""
        for fault in self.faults:
            fault.confirm(self.stack)

    # Afterwards -------------------------------------------------------------------------------------------------------
    def _phase_recovery(self, traffic: Traffic | None) -> None:
        stack, plan = self.stack, self.plan
        with stack.phase(self.case_id, "recovery"):
            self._confirm()
            self._heal()
            if traffic:
                traffic.phase = "recovery"
            self.wait_good()
            self._await_all()  # requests that the fault caught
            self._scrape("after-fault")
            for i, prompt in enumerate(plan.returned):
                self._start(plan.reader, prompt, f"returned/{len(plan.victims) + i}")
            self._await_all()
            bound_s = 2 * plan.ttl_s + EXTRA_HITS_S
            source = "2 x client TTL + suite.gates.degrade_collect.EXTRA_HITS_S"
            stack.wait(
                "hits-back",
                partial(self._shared, plan.saver, plan.reader),
                bound_s=bound_s,
                bound_source=source,
                poll_s=0.5,
            )
            if plan.cell.joiner:
                self._join(bound_s, source)

    def _heal(self) -> None:
        """Undo the fault: a dead unit is started again, everything else is healed by the fault itself."""
        for fault in self.faults:
            if fault.name in ("kill", "stop"):
                revive(self.stack, fault.target)
            fault.heal(self.stack)

    def _good_everywhere(self) -> bool:
        """A fresh short request is answered on every engine that was not hurt."""
        for name in self.plan.survivors:
            number = self._number("probe")
            prompt = self.prompts.fresh(f"probe/{number}", SHORT_TOKENS)
            if not self.stack.ask(name, prompt, "probe", deadline_s=PROBE_DEADLINE_S).ok:
                return False
        return True

    def _shared(self, saver: str, reader: str) -> bool:
        """A fresh prompt of one engine is read by another from the pool, in full."""
        stack = self.stack
        prompt = self.prompts.fresh(f"share/{self._number('share')}", SHORT_TOKENS)
        try:
            before = stack.keys()
            if not stack.ask(saver, prompt, "share", deadline_s=PROBE_DEADLINE_S).ok:
                return False
            blocks = len(prompt) // stack.engines[saver].facts.block_tokens
            wanted = len(before) + blocks
            stack.wait(
                "a short prompt to be listed",
                lambda: stack.key_count() >= wanted,
                bound_s=SHARE_VISIBLE_S,
                bound_source="suite.gates.degrade_collect.SHARE_VISIBLE_S",
                poll_s=0.05,
            )
        except HarnessError:  # why: a master that does not answer yet lists nothing, which is what is waited for
            return False
        answer = stack.ask(reader, prompt, "share", deadline_s=PROBE_DEADLINE_S)
        return answer.ok and answer.cached_tokens == stack.reusable(reader, prompt)

    def _number(self, what: str) -> int:
        """1, 2, ... for prompts that are made as they are needed."""
        key = f"{self.case_id}/{what}"
        number: int = self.stack.notes.get(key, 0) + 1
        self.stack.notes[key] = number
        return number

    def _join(self, bound_s: float, source: str) -> None:
        """A new engine joins, reads what the others saved, and leaves."""
        stack, plan = self.stack, self.plan
        name = "joiner"
        attempt = join(stack, name, like=plan.reader, bound_s=JOIN_BOUND_S)
        if attempt.result == "ready":
            stack.wait(
                f"hits-{name}",
                partial(self._shared, plan.saver, name),
                bound_s=bound_s,
                bound_source=source,
                poll_s=0.5,
            )
        handle = stack.handle(name)
        stack.runtime.stop(handle, stack.spec.timeouts.stop_s)
        stack.engines.pop(name, None)
        stack.extras.pop(name, None)

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
                    partial(self._idle, name),
                    bound_s=KV_IDLE_BOUND_S,
                    bound_source="suite.gates.degrade_collect.KV_IDLE_BOUND_S",
                    poll_s=0.25,
                )
                stack.snapshot_processes(name, f"after/{name}")

    def _idle(self, engine: str) -> bool:
        try:
            values = self.stack.scrape(engine, f"idle/{engine}").values
        except httpx.HTTPError:  # why: that an engine does not answer is for its requests to show, and to judge
            return False
        return values["kv_usage_ratio"] == 0.0 and values["running"] + values["waiting"] == 0.0

    def _leave(self) -> None:
        """Hand the stack on only where it is proven well; else the next case gets a new one."""
        from fixtures.healthy import prove_healthy

        if self.plan.cell.left_broken:
            self.stack.heal_all()
            self.stack.dirty = True
            return
        prove_healthy(self.stack, self.case_id)

    def _scrape(self, label: str) -> None:
        for name in self.plan.survivors:
            try:
                self.stack.scrape(name, label)
            except httpx.HTTPError as exc:
                self.stack.fact(
                    "scrape.failed", {"engine": name, "label": label, "error": f"{type(exc).__name__}: {exc}"}
                )


def _past(due_s: float) -> bool:
    return time.monotonic() >= due_s
