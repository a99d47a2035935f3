"""From a cell of the fault matrix to the fault object and the stack it needs. The only place that knows both names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from fixtures import faults
from fixtures.errors import HarnessError, Untestable
from fixtures.faults import DeleteKeys, EvictionStorm, Fault, FullPool, LoseTier, links
from fixtures.faults.base import Proof
from fixtures.faults.docker_disk import FillDisk
from fixtures.store_session import StoreSession
from suite.gates.degrade_cells import CONTROL, DATA, DISK, KEYS, POOL, Cell

if TYPE_CHECKING:
    from fixtures.spec import StackSpec
    from fixtures.stack import Stack
    from suite.gates.degrade_plan import Plan

UNITS: dict[str, Callable[[str], Fault]] = {
    "kill": faults.Kill,
    "freeze": faults.Freeze,
    "stop": faults.Stop,
    "restart": faults.Restart,
}


SLOW_S = 0.1
"""A round trip of 200 ms more: two data centres on two continents, or a host that pages."""

LIMIT_BYTES_PER_S = 64_000
"""A lookup of 62 keys of about 120 bytes takes an eighth of a second."""

CONTROL_FAULTS: dict[str, Callable[[], Fault]] = {
    "drop": lambda: links.DropLink("control"),
    "reset": lambda: links.ResetLink("control"),
    "slow": lambda: links.SlowLink(SLOW_S),
    "limit": lambda: links.LimitLink(LIMIT_BYTES_PER_S),
    "blackhole": links.BlackholeLink,
    "cut": links.CutLink,
}

DATA_FAULTS: dict[str, Callable[[str], Fault]] = {
    "drop": lambda owner: links.DropLink("data", owner),
    "reset": lambda owner: links.ResetLink("data", owner),
}


POOL_FAULTS: dict[str, Callable[[], Fault]] = {"full": FullPool, "evict": EvictionStorm}


class DeleteUnderLookup(DeleteKeys):
    """As ``DeleteKeys``, at once: a client that is connected already, so that a lookup of a moment ago still counts.

    Landed: the store removed keys, and its listing lacks some of them. (Not all: engines save again what they had to compute, and
    some of it is back before the listing is read. That a load met a removed block is for the judge to ask.)
    """

    def __init__(self, session: StoreSession, keys: Sequence[str]) -> None:
        super().__init__(keys)
        self._session = session

    def _prepare(self, stack: Stack) -> None:
        """Everything else happens after the removal: seconds would let the loads end."""

    def _inject(self, stack: Stack) -> tuple[bool, Proof]:
        answers = self._session.step({"op": "remove", "keys": list(self.keys)}, REMOVE_BOUND_S)
        if not isinstance(answers, dict):
            raise HarnessError(f"delete-keys: no answer within {REMOVE_BOUND_S:g} s")
        left = set(self.keys) & stack.keys()
        removed = sum(status == 0 for status in answers.values())
        landed = removed > 0 and len(left) < removed
        return landed, {"keys": len(self.keys), "removed": removed, "listed_after": len(left)}


TIER_BYTES = 4 << 30
"""SSD tier of an owner, as it is named in ``store.ssd_bytes``: all of a case and of its storm, several times. Memory stays as it is: calibration
has to fit."""

VOLUME_BYTES = 64 << 20
"""File system of an owner's tier that is to be filled: sixteen of the victims' prompts."""

REMOVE_BOUND_S = 10.0
"""For some hundred removals; over loopback they take well under a second."""


OPTIONS: dict[str, dict[str, Any]] = {"load-sync": {"load_async": False}, "lookup-async": {"lookup_async": True}}
"""Option of a cell -> the connector's extra configuration (vLLM 0.32.0)."""


def make_faults(stack: Stack, plan: Plan) -> list[Fault]:
    """The faults of a cell in the order in which they are injected: one, or two. Raises HarnessError for unknown ones."""
    return [make_fault(stack, plan, target, fault) for target, fault in plan.cell.parts]


def make_fault(stack: Stack, plan: Plan, target: str, fault: str) -> Fault:
    """One fault, not injected yet. Raises HarnessError for one that this version cannot make."""
    if target == CONTROL:
        return CONTROL_FAULTS[fault]()
    if target == DATA:
        return DATA_FAULTS[fault]("owner0")
    if target == KEYS:
        return DeleteUnderLookup(plan.resources.enter_context(StoreSession(stack)), plan.keys_of_first_beat)
    if target == POOL:
        return POOL_FAULTS[fault]()
    if target == DISK and fault == "full":
        return FillDisk("owner0")
    if target == DISK:
        return LoseTier("owner0", plan.all_keys)
    if fault in UNITS:
        return UNITS[fault](plan.unit_of(target))
    raise HarnessError(f"{target}.{fault}: no such fault is built")


def stack_of(base: StackSpec, cell: Cell) -> StackSpec:
    """The stack a cell runs on, derived from the run's base."""
    spec = base
    if cell.topology == "standalone":
        spec = spec.with_store(mode="standalone", owners=1)
    elif cell.topology in ("rejoin", "proxied"):
        # One stack for both: ports matter to a restarted owner alone, and the proxy passes on what it is not told to hurt.
        spec = spec.with_store(mode="standalone", owners=1, fixed_ports=True, control_proxy=True)
    elif cell.topology == "ha":
        spec = spec.with_store(masters=3)
    elif cell.topology == "tiered":
        spec = spec.with_store(mode="standalone", owners=1, ssd_bytes=TIER_BYTES)
    elif cell.topology == "volume":
        if base.runtime != "docker":
            raise Untestable(
                "docker-runtime",
                "no file system that may be filled: a process writes to the host's own",
                "--runtime docker",
            )
        spec = spec.with_store(mode="standalone", owners=1, ssd_bytes=TIER_BYTES, ssd_volume_bytes=VOLUME_BYTES)
    if cell.policy != "recompute":
        spec = spec.with_all_engines(load_failure_policy=cell.policy)
    if not cell.isolate_lookup:
        spec = spec.with_all_engines(isolate_lookup=False, isolate_tmp=False)
    if cell.option:
        spec = spec.with_all_engines(kv_extra=OPTIONS[cell.option])
    return spec


def needs_of(cell: Cell) -> tuple[str, ...]:
    """What a cell needs of the host beyond a stack."""
    if cell.topology == "ha":
        return ("etcd",)
    rules = any(target in (CONTROL, DATA) and fault in ("drop", "reset") for target, fault in cell.parts)
    return ("nft",) if rules else ()
