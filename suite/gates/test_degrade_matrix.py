"""Family D, the fault matrix: one gate a target, one case a cell of ``suite.gates.degrade_cells``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

from reports import records as r
from reports.history import History
from suite.contract import Case, Gate
from suite.gates import degrade_cells as cells
from suite.gates import gate_cases
from suite.gates.degrade_cells import Cell
from suite.gates.judging_degrade_cells import judge_cell

if TYPE_CHECKING:
    from fixtures.spec import StackSpec
    from fixtures.stack import Stack


class CellGate(Gate):
    """A gate whose cases are the cells of one target; the subclasses say what each claims."""

    version = 4
    target: ClassVar[str]

    def __init_subclass__(cls) -> None:
        cls.id = f"D.{cls.target}"
        cls.claim = cells.CLAIMS[cls.target]

    def cases(self) -> Iterable[Case]:
        from suite.gates.degrade_faults import needs_of

        for cell in cells.cells_of(self.target):
            yield Case(
                cell.id,
                cell.params(),
                needs=needs_of(cell),
                core=cell.core,
                dirties=cell.left_broken or cell.topology == "rejoin",  # last on its stack: it was seen to spoil it
                variant=cell.variant,
            )

    def stack(self, base: StackSpec, case: Case) -> StackSpec:
        from suite.gates.degrade_faults import stack_of

        return stack_of(base, Cell.of(case.params)) if base.store is not None else base

    def collect(self, stack: Stack, case: Case) -> None:
        from suite.gates.degrade_collect import CellCollector

        CellCollector(stack, case.id, Cell.of(case.params)).collect()

    def judge(self, history: History) -> r.Verdict:
        return judge_cell(self, history)


class Master(CellGate):
    """Claim: while the master is gone, stuck or empty, requests are answered: 200, right, within budget; then hits return.

    How it can lie: nothing was stored, so nothing was looked up; the fault hit a wrapper; only victims are slow, or only
    bystanders; the health endpoint goes on saying 200; a request that hangs is given up by the client and forgotten.
    Oracle: the cold answer of each victim from before; TTFT against requests of the same shape before the fault; lookups
    counted; after the heal a fresh prompt is shared, the longest request admitted, KV usage zero, processes the same.
    Turns red: a client that waits for a silent master without a limit, or retries in the scheduler's way.
    """

    target = cells.MASTER


class Leader(CellGate):
    """Claim: when the leading master is lost, another takes over, and requests are answered: 200, right, within budget.

    How it can lie: the master that was hurt was no leader; the take-over happened before the first request.
    Oracle: as D.master; the leader is asked for before and after.
    Turns red: clients that keep to the old leader, a take-over that never ends.
    """

    target = cells.LEADER


class Etcd(CellGate):
    """Claim: while etcd is gone or stuck, requests are answered: 200, right, within budget.

    How it can lie: etcd is needed for elections alone, so a short loss shows nothing.
    Oracle: as D.master.
    Turns red: a master that stops serving, or a client that waits, when it cannot reach etcd.
    """

    target = cells.ETCD


class Owner(CellGate):
    """Claim: whatever befalls the process that owns blocks, requests for them are answered: 200, right, within budget.

    How it can lie: nothing lay on it; the reader answers from its own cache; the loss shows only before (or only after)
    the master has dropped the silent client; after a restart the old keys point into new memory.
    Oracle: the cold answer of each victim; TTFT against requests of the same shape before the fault. Proof: the store's
    own replica lists had every victim's blocks on the owner. Control: before the fault the reader read such blocks.
    Turns red: a load without a time limit, policy `fail`, blocks served from memory that is not theirs any more.
    """

    target = cells.OWNER


class Peer(CellGate):
    """Claim: whatever befalls an engine that owns blocks, other engines answer for them: 200, right, within budget.

    How it can lie: as D.owner; and where engines share a host, also by what else they share (the lookup channel).
    Oracle: as D.owner; the other engine's bystanders are judged apart, and its health asked meanwhile.
    Turns red: a scheduler that waits for its neighbour, a load without a time limit, policy `fail`.
    """

    target = cells.PEER


class Reader(CellGate):
    """Claim: an engine that dies or sticks while it reads from the pool harms no request of another engine.

    How it can lie: it was not reading at that moment; the other engine needed nothing of the pool.
    Oracle: requests under way on the engine when the fault came; the other engine's reads from the pool, before and after,
    against their cold answers; the engine comes back under its name and shares again.
    Turns red: leases or transfers of the dead reader that block others, a pool that loses blocks with it.
    """

    target = cells.READER


class ControlLink(CellGate):
    """Claim: with the way to the master cut or slow, requests are answered: 200, right, within budget.

    How it can lie: the connection was not used; the fault hit another one.
    Oracle: as D.master; the fault shows in what the proxy or the kernel counted.
    Turns red: lookups without a time limit, one round trip a block.
    """

    target = cells.CONTROL


class DataLink(CellGate):
    """Claim: with the way to a block's owner cut, requests for it are answered: 200, right, within budget.

    How it can lie: the block was read from memory of the reader's own; the fault hit another port.
    Oracle: as D.owner; the fault shows in what the kernel counted.
    Turns red: a transfer without a time limit, bytes of a half transfer used as a block.
    """

    target = cells.DATA


class Keys(CellGate):
    """Claim: blocks that vanish between lookup and load are recomputed: 200, right, within budget.

    How it can lie: the keys went before the lookup (a plain miss) or after the load.
    Oracle: the cold answer of each victim; keys listed before and gone after; requests under way meanwhile.
    Turns red: a load that fails the request, repeats itself without bound, or leaves a block unfilled.
    """

    target = cells.KEYS


class PoolPressure(CellGate):
    """Claim: a pool that is full, or evicts as fast as it can, costs reuse and nothing else.

    How it can lie: the pool was not full; nothing was evicted; nobody saved or read meanwhile.
    Oracle: what the store itself lists and counts; requests of all kinds within budget; hits return with the space.
    Turns red: saves that block the engine, refused saves that fail the request.
    """

    target = cells.POOL


class Disk(CellGate):
    """Claim: blocks that lay on the SSD tier alone, and are lost with it, are recomputed: 200, right, within budget.

    How it can lie: the blocks were in memory as well; nothing was ever written to the disk; nobody asked for them.
    Oracle: as D.keys. Proof: the store lists the victims' keys and names no copy in memory; the tier's folder had files, and
    has none.
    Turns red: a load that fails the request, repeats itself without bound, or takes other bytes for the lost ones.
    """

    target = cells.DISK


MASTER, LEADER, ETCD, OWNER, PEER = Master(), Leader(), Etcd(), Owner(), Peer()
READER, CONTROL, DATA, KEYS, POOL, DISK = Reader(), ControlLink(), DataLink(), Keys(), PoolPressure(), Disk()


@gate_cases(MASTER)
def test_master(run_case: Any, case: Case) -> None:
    run_case(MASTER, case)


@gate_cases(LEADER)
def test_leader(run_case: Any, case: Case) -> None:
    run_case(LEADER, case)


@gate_cases(ETCD)
def test_etcd(run_case: Any, case: Case) -> None:
    run_case(ETCD, case)


@gate_cases(OWNER)
def test_owner(run_case: Any, case: Case) -> None:
    run_case(OWNER, case)


@gate_cases(PEER)
def test_peer(run_case: Any, case: Case) -> None:
    run_case(PEER, case)


@gate_cases(READER)
def test_reader(run_case: Any, case: Case) -> None:
    run_case(READER, case)


@gate_cases(CONTROL)
def test_control_link(run_case: Any, case: Case) -> None:
    run_case(CONTROL, case)


@gate_cases(DATA)
def test_data_link(run_case: Any, case: Case) -> None:
    run_case(DATA, case)


@gate_cases(KEYS)
def test_keys(run_case: Any, case: Case) -> None:
    run_case(KEYS, case)


@gate_cases(POOL)
def test_pool(run_case: Any, case: Case) -> None:
    run_case(POOL, case)


@gate_cases(DISK)
def test_disk(run_case: Any, case: Case) -> None:
    run_case(DISK, case)
