"""What follows a fault: undo it, and see whether the stack is well again. The half of a cell's collection that a soak shares."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import httpx

from fixtures.errors import HarnessError
from fixtures.revive import join, revive
from fixtures.stack_pool import stop_extra_engine
from suite.checks.base import STORE_GET, STORE_STATUSES
from suite.gates.degrade_cells import Cell
from suite.gates.degrade_plan import SHORT_TOKENS, plan_cell
from suite.gates.sequences import at_rest
from suite.workload.prompts import PromptMaker

if TYPE_CHECKING:
    from fixtures.faults import Fault
    from fixtures.stack import Stack

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

OK = STORE_STATUSES[0]
"""Status of a load that brought everything."""

HITS_SOURCE = "2 x client TTL + suite.gates.degrade_recovery.EXTRA_HITS_S"


class Recovery:
    """A stack with faults to undo. Decides nothing; what came true is in the wait records."""

    def __init__(self, stack: Stack, case_id: str, cell: Cell) -> None:
        self.stack = stack
        self.case_id = case_id
        self.plan = plan_cell(stack, cell)
        self.prompts: PromptMaker = stack.prompts(case_id)
        self.faults: list[Fault] = []

    @property
    def hits_bound_s(self) -> float:
        """Most seconds until hits are back."""
        return 2 * self.plan.ttl_s + EXTRA_HITS_S

    def mend(self) -> None:
        """Undo it."""
        self.confirm()
        self.heal()

    def wait_good(self) -> bool:
        """Wait until a fresh request is answered on every engine that was not hurt; whether it came true."""
        return self.stack.wait(
            "first-good",
            self._good_everywhere,
            bound_s=FIRST_GOOD_BOUND_S,
            bound_source="suite.gates.degrade_recovery.FIRST_GOOD_BOUND_S",
            poll_s=0.5,
        )

    def wait_shared(self, engine: str) -> bool:
        """Wait until an engine and another read what the other saved, both ways; whether it came true."""
        other = next(name for name in self.stack.names if name != engine)
        return self.stack.wait(
            f"hits-back/{engine}",
            lambda: self.shared(other, engine) and self.shared(engine, other),
            bound_s=self.hits_bound_s,
            bound_source=HITS_SOURCE,
            poll_s=0.5,
        )

    def confirm(self) -> None:
        """Ask faults whose effect shows in the stack's own traffic alone whether it has."""
        for fault in self.faults:
            fault.confirm(self.stack)

    def heal(self) -> None:
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

    def shared(self, saver: str, reader: str) -> bool:
        """A fresh prompt of one engine is read by another from the pool, in full, and no load failed meanwhile.

        The response alone would not do: tokens whose load failed and that were recomputed are reported as cached, too.
        """
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
                bound_source="suite.gates.degrade_recovery.SHARE_VISIBLE_S",
                poll_s=0.05,
            )
        except HarnessError:  # why: a master that does not answer yet lists nothing, which is what is waited for
            return False
        failed = self._failed_loads(reader)
        # Measured: that waits until the engine has booked the request, and what became of its load.
        answer = stack.ask_measured(reader, prompt, "share", deadline_s=PROBE_DEADLINE_S)
        in_full = answer.ok and answer.cached_tokens == stack.reusable(reader, prompt)
        return in_full and failed is not None and self._failed_loads(reader) == failed

    def _failed_loads(self, engine: str) -> float | None:
        """Loads of an engine that failed until now, wholly or in part; None where it does not answer."""
        try:
            values = self.stack.scrape(engine, "share").values
        except httpx.HTTPError:  # why: an engine that does not answer shares nothing, which is what is waited for
            return None
        return sum(
            value
            for name, value in values.items()
            if name.startswith(f"store.{STORE_GET}.") and name.endswith(".ops") and f".{OK}." not in name
        )

    def _number(self, what: str) -> int:
        """1, 2, ... for prompts that are made as they are needed."""
        key = f"{self.case_id}/{what}"
        number: int = self.stack.notes.get(key, 0) + 1
        self.stack.notes[key] = number
        return number

    def join_and_leave(self) -> None:
        """A new engine joins, reads what the others saved, and leaves."""
        stack, plan = self.stack, self.plan
        name = "joiner"
        attempt = join(stack, name, like=plan.reader, bound_s=JOIN_BOUND_S)
        if attempt.result == "ready":
            stack.wait(
                f"hits-{name}",
                partial(self.shared, plan.saver, name),
                bound_s=self.hits_bound_s,
                bound_source=HITS_SOURCE,
                poll_s=0.5,
            )
        stop_extra_engine(stack, name, stack.spec.timeouts.stop_s)

    def idle(self, engine: str) -> bool:
        try:
            return at_rest(self.stack, engine, f"idle/{engine}")
        except httpx.HTTPError:  # why: that an engine does not answer is for its requests to show, and to judge
            return False

    def scrape_all(self, label: str) -> None:
        for name in self.plan.survivors:
            try:
                self.stack.scrape(name, label)
            except httpx.HTTPError as exc:
                self.stack.fact(
                    "scrape.failed", {"engine": name, "label": label, "error": f"{type(exc).__name__}: {exc}"}
                )
