"""The fault matrix of family D as a table: what is hurt, how, in which moment, and when it is healed.

``CORE`` holds the reviewed cells that ``make gates`` runs, each with the reason why it is in. ``full_matrix`` makes the
rest from target x fault x phase; ``make gates-full`` runs them. Plain data: judges read a cell back from a case's params.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

Phase = Literal["idle", "save", "lookup", "load", "busy"]
"""What is under way when the fault is injected.

``idle``: nothing. ``save``: prompts are being saved. ``lookup``: victims have just been sent. ``load``: the first of several
victims that were sent together has its first token, so that the others are being loaded. ``busy``: steady traffic on
all engines, from before the baseline until the end of the fault.
"""

Topology = Literal["standalone", "rejoin", "embedded", "ha", "proxied", "tiered", "volume"]
"""``standalone``: the pool's memory belongs to an owner process, so that an engine's death loses nothing. ``rejoin``: the same
on fixed ports, so that a restarted owner has its old name (upstream's default draws a new one). ``embedded``:
upstream's default, each engine owns a part. ``ha``: three masters with etcd, embedded pool. ``proxied``: standalone, with
a fault proxy between every client and the master (apart, because a proxy refuses and resets in other ways than a host).
``tiered``: standalone with an SSD tier behind the memory. ``volume``: the same on a small file system of its own, which only a
container has."""

Heal = Literal["none", "before-ttl", "after-ttl"]
"""When the fault is healed (thawed, restored, the dead unit started again): before the master has dropped a silent
client, or after it. ``none``: the fault is over by itself, or the stack is left broken and thrown away."""

MASTER, LEADER, ETCD, OWNER, PEER, READER = "master", "leader", "etcd", "owner", "peer", "reader"
CONTROL, DATA, KEYS, POOL, DISK = "control", "data", "keys", "pool", "disk"

CLAIMS: dict[str, str] = {
    MASTER: "while the master is gone, stuck or empty, requests are answered right, with 200, within budget",
    LEADER: "when the leading master is lost, another takes over, and requests are answered right, with 200, within budget",
    ETCD: "while etcd is gone or stuck, requests are answered right, with 200, within budget",
    OWNER: "whatever befalls the process that owns blocks, requests for them are answered right, with 200, within budget",
    PEER: "whatever befalls an engine that owns blocks, other engines answer for them right, with 200, within budget",
    READER: "an engine that dies or sticks while it reads from the pool harms no request of another engine",
    CONTROL: "with the way to the master cut or slow, requests are answered right, with 200, within budget",
    DATA: "with the way to a block's owner cut, requests for it are answered right, with 200, within budget",
    KEYS: "blocks that vanish between lookup and load are recomputed: right, 200, within budget",
    DISK: "an SSD tier that is full, or lost with the blocks that lay on it alone, costs reuse and nothing else: right, 200, within budget",
    POOL: "a pool that is full, or evicts as fast as it can, costs reuse and nothing else",
}
"""Target -> the claim of its gate. Also the list of targets."""


@dataclass(frozen=True)
class Cell:
    """One cell. ``why`` says why a core cell is in the core; ``note`` marks a variant in the id."""

    target: str
    fault: str
    phase: Phase = "idle"
    heal: Heal = "none"
    topology: Topology = "standalone"
    policy: Literal["recompute", "upstream"] = "recompute"
    isolate_lookup: bool = True
    option: Literal["", "load-sync", "lookup-async"] = ""
    """An option of the connector turned the other way: loads that hold up the step, lookups that do not hold up the scheduler."""
    joiner: bool = False
    """A further engine joins after the fault and must share."""
    second: str = ""
    """``<target>-<fault>``: a second fault, injected while the first lasts."""
    core: bool = False
    why: str = ""

    @property
    def id(self) -> str:
        """``D.<target>.<fault>.<phase>[.<variant>]``."""
        return ".".join(["D", self.target, self.fault, self.phase, *([self.variant] if self.variant else [])])

    @property
    def variant(self) -> str:
        """What differs from the plainest cell of target, fault and phase, in words."""
        parts = [
            f"and-{self.second}" if self.second else "",
            "" if self.heal == "none" else f"heal-{self.heal}",
            "" if self.topology == usual_topology(self.target, self.fault) else self.topology,
            "default-policy" if self.policy == "upstream" else "",
            "" if self.isolate_lookup else "default-lookup",
            self.option,
            "joiner" if self.joiner else "",
        ]
        return "-".join(part for part in parts if part)

    @property
    def parts(self) -> tuple[tuple[str, str], ...]:
        """(target, fault) in the order in which they are injected."""
        second = tuple(self.second.split("-", 1)) if self.second else ()
        return ((self.target, self.fault), *([(second[0], second[1])] if second else []))

    @property
    def second_after_s(self) -> float:
        """When the second fault follows the first: 0 to 3 s, drawn from the cell's own id, so that it is the same each time."""
        return round(random.Random(self.id).uniform(0.0, 3.0), 2)

    @property
    def left_broken(self) -> bool:
        """Nothing heals it: the stack is thrown away after it."""
        return self.heal == "none" and self.fault in HEALS

    def params(self) -> dict[str, Any]:
        """As recorded with the case."""
        return {name: value for name, value in asdict(self).items() if name != "core"}

    @classmethod
    def of(cls, params: dict[str, Any]) -> Cell:
        """The cell of a recorded case; fields that a later version added keep their defaults."""
        known = set(cls.__dataclass_fields__)
        return cls(**{name: value for name, value in params.items() if name in known})


PROXIED = ("slow", "limit", "blackhole", "cut")
"""Faults that the proxy of the control link makes; the others are rules of the host's firewall."""


def usual_topology(target: str, fault: str) -> Topology:
    """The topology that an id of this target and fault means when it names none."""
    if target == CONTROL and fault in PROXIED:
        return "proxied"
    if target == DISK and fault == "full":
        return "volume"
    usual: dict[str, Topology] = {PEER: "embedded", LEADER: "ha", ETCD: "ha", DISK: "tiered"}
    return usual.get(target, "standalone")


CORE: tuple[Cell, ...] = (
    Cell(MASTER, "kill", "busy", "after-ttl", core=True, why="every request was seen to wait 4.5 s for a dead master; under traffic such waits add up"),
    Cell(MASTER, "freeze", "idle", "before-ttl", core=True, why="a frozen master accepts connections and answers nothing: clients without a time limit wait"),
    Cell(MASTER, "restart", "idle", "none", joiner=True, core=True, why="comes back empty under the same address: engines must mount their memory again; an engine that joins then must share with those that saw it"),
    Cell(OWNER, "kill", "idle", "after-ttl", core=True, why="the master lists the lost blocks until the client TTL ends"),
    Cell(OWNER, "freeze", "idle", "after-ttl", core=True, why="requests for its blocks were seen to get no answer for 60 s; thawed after the master dropped it, its blocks must not be served from a stale listing"),
    Cell(OWNER, "freeze", "load", "before-ttl", core=True, why="a transfer stops in its middle and goes on 5 s later: what was waited for must be whole"),
    Cell(OWNER, "restart", "busy", "none", topology="rejoin", core=True, why="new memory under the old name: engines that remember where it was may read or write the wrong place, or nowhere"),
    Cell(PEER, "freeze", "idle", "after-ttl", topology="embedded", core=True, why="an engine that stalls (GC, debugger, overcommit) holds up its neighbours"),
    Cell(PEER, "freeze", "idle", "before-ttl", topology="embedded", policy="upstream", core=True, why="the same with upstream's default load-failure policy"),
    Cell(PEER, "kill", "idle", "none", topology="embedded", isolate_lookup=False, core=True, why="co-located engines with upstream's default lookup channel: the survivor's scheduler may wait for the dead one"),
    Cell(READER, "kill", "load", "after-ttl", core=True, why="a reader that dies in the middle of a load must not take pool or neighbours along"),
    Cell(CONTROL, "drop", "idle", "before-ttl", core=True, why="a dropped packet is not a refused connection: only a time limit ends the wait"),
    Cell(CONTROL, "slow", "busy", "before-ttl", topology="proxied", core=True, why="each lookup is a round trip; with 100 ms more each way the fleet must not crawl"),
    Cell(DATA, "drop", "load", "before-ttl", core=True, why="the master is fine and lists the block; only the bytes do not come"),
    Cell(DATA, "reset", "load", "before-ttl", core=True, why="twin of data.drop: a broken connection in the middle of a transfer"),
    Cell(KEYS, "delete", "lookup", "none", core=True, why="a lookup that hit, a load that finds nothing"),
    Cell(POOL, "full", "idle", "before-ttl", core=True, why="saves are refused; requests must not notice"),
    Cell(POOL, "evict", "idle", "none", core=True, why="blocks go while they are looked up and loaded"),
)  # fmt: skip

FAULTS: dict[str, tuple[str, ...]] = {
    MASTER: ("kill", "freeze", "restart"),
    LEADER: ("kill", "freeze"),
    ETCD: ("kill", "freeze"),
    OWNER: ("kill", "freeze", "stop", "restart"),
    PEER: ("kill", "freeze"),
    READER: ("kill", "freeze"),
    CONTROL: ("drop", "reset", *PROXIED),
    DATA: ("drop", "reset"),
    KEYS: ("delete",),
    POOL: ("full", "evict"),
    DISK: ("lose", "full"),
}

PHASES: tuple[Phase, ...] = ("idle", "save", "lookup", "load", "busy")

HEALS: dict[str, tuple[Heal, ...]] = {
    "kill": ("before-ttl", "after-ttl"),
    "freeze": ("before-ttl", "after-ttl"),
    "stop": ("after-ttl",),
    "drop": ("before-ttl", "after-ttl"),
    "blackhole": ("before-ttl", "after-ttl"),
    "slow": ("before-ttl",),
    "limit": ("before-ttl",),
    "cut": ("before-ttl", "after-ttl"),
    "reset": ("before-ttl",),
    "full": ("before-ttl",),
}
"""When a fault is healed; what is not here is over by itself (``delete``, ``evict``, ``restart``, ``lose``)."""


def full_matrix() -> Iterator[Cell]:
    """Target x fault x phase x heal that the core does not hold, and the variants worth a cell of their own."""
    have = {cell.id for cell in CORE}
    for target, faults in FAULTS.items():
        for fault in faults:
            for phase in _phases(target, fault):
                for heal in HEALS.get(fault, ("none",)):
                    cell = Cell(target, fault, phase, heal, topology=usual_topology(target, fault))
                    if cell.id not in have:
                        yield cell
    for fault in ("kill", "freeze"):
        for target in (MASTER, READER):
            yield Cell(target, fault, "idle", "after-ttl", topology="embedded")
            yield Cell(target, fault, "idle", "after-ttl", topology="embedded", policy="upstream")
        yield Cell(OWNER, fault, "idle", "after-ttl", policy="upstream")
        yield Cell(OWNER, fault, "idle", "after-ttl", joiner=True)
        yield Cell(OWNER, fault, "idle", "after-ttl", topology="rejoin")
    yield Cell(OWNER, "stop", "idle", "after-ttl", topology="rejoin")
    for situation in SITUATIONS:
        yield from (cell for cell in settings_of(situation)[1:] if cell.id not in have | VARIANTS_ABOVE)
    yield from pairs()


SITUATIONS = (
    Cell(OWNER, "kill", "idle", "after-ttl"),
    Cell(OWNER, "freeze", "idle", "after-ttl"),
    Cell(PEER, "kill", "idle", "after-ttl", topology="embedded"),
    Cell(KEYS, "delete", "lookup"),
)
"""Faults under which settings are compared: blocks that are lost, stuck, lost with a neighbour, and gone between lookup and load."""

VARIANTS_ABOVE = {Cell(OWNER, fault, "idle", "after-ttl", policy="upstream").id for fault in ("kill", "freeze")}
"""Variants of these situations that the matrix has anyway."""

SETTINGS: dict[str, dict[str, Any]] = {
    "recompute, isolated": {},
    "load failures as upstream": {"policy": "upstream"},
    "lookup channel as upstream": {"isolate_lookup": False},
    "synchronous load": {"option": "load-sync"},
    "asynchronous lookup": {"option": "lookup-async"},
}
"""What differs from the plainest cell -> changes of it. Upstream loads asynchronously and looks up synchronously (vLLM 0.32.0)."""


def settings_of(situation: Cell) -> list[Cell]:
    """One cell for each of ``SETTINGS``, in their order."""
    return [replace(situation, **changes) for changes in SETTINGS.values()]


PAIRED = (
    (MASTER, "kill"),
    (MASTER, "freeze"),
    (OWNER, "kill"),
    (OWNER, "freeze"),
    (CONTROL, "blackhole"),
    (DATA, "drop"),
)
"""Faults of which every two of unequal targets make a cell, in both orders."""


def pairs() -> Iterator[Cell]:
    """Two faults together: master and owner, owner and link, ..., each pair in both orders."""
    for target, fault in PAIRED:
        for other, second in PAIRED:
            if other != target:
                proxied = second in PROXIED and other == CONTROL
                topology = "proxied" if proxied else usual_topology(target, fault)
                yield Cell(target, fault, "idle", "after-ttl", topology=topology, second=f"{other}-{second}")


def _phases(target: str, fault: str) -> tuple[Phase, ...]:
    """Phases in which a target can be hurt: keys vanish under somebody, a reader is hurt while it reads.

    What takes seconds to inject (the proxy's faults measure the link first, a pool is filled) hits nothing in flight.
    """
    if target in (KEYS, READER):
        return ("lookup", "load")
    return ("idle", "busy") if fault in PROXIED or target in (POOL, DISK) else PHASES


def cells() -> tuple[Cell, ...]:
    """Every cell, core first. Ids are unique (a selftest holds it)."""
    return (*CORE, *full_matrix())


def cells_of(target: str) -> list[Cell]:
    """The cells of one gate."""
    return [cell for cell in cells() if cell.target == target]
