"""Who does what in a cell of the fault matrix, and when: the cast and the schedule that ``degrade_collect`` follows."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from suite.gates.degrade_cells import ETCD, LEADER, OWNER, PEER, READER, Cell
from suite.workload.prompts import Prompt

if TYPE_CHECKING:
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
    def all_keys(self) -> tuple[str, ...]:
        """Keys of every victim."""
        return tuple(key for keys in self.victim_keys for key in keys)

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
