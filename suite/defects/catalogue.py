"""Every planted defect: what it does, which gate must catch it, and with which finding. Data only.

The engine imports this package together with the lying connector, so nothing here imports more than evidence types.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from reports.records import FindingCode as F

Kind = Literal["lying-connector", "misconfiguration", "lying-store", "lying-harness"]


@dataclass(frozen=True)
class Catch:
    """A case that must turn red, and the primary finding it must come to (one of a few, then ``why`` says why)."""

    case: str
    findings: tuple[F, ...]
    why: str = ""
    outcome: Literal["FAIL", "HARNESS_ERROR"] = "FAIL"
    """HARNESS_ERROR where the defect is the harness's own: then it must not be blamed on the stack."""

    @property
    def gate(self) -> str:
        """The gate's id: family and name."""
        return ".".join(self.case.split(".")[:2])


@dataclass(frozen=True)
class Defect:
    """One fault, put in on purpose.

    rates: probabilities per occasion at which it must be caught; every lying connector is also run at rate 0, where the
    same gate must pass. unit: what is counted as a wrong act. lying: positions of the engines that lie (None: all).
    control_may: findings that the honest stack itself comes to on this gate, so that rate 0 cannot be PASS (reason
    in ``why`` of the catch). breaks: the stack is rebuilt afterwards. stalls: the engine must be proven well afterwards.
    """

    id: str
    kind: Kind
    does: str
    caught_by: tuple[Catch, ...]
    rates: tuple[float, ...] = (1.0,)
    delay_s: float = 0.0
    unit: str = "blocks"
    lying: tuple[int, ...] | None = None
    control_may: tuple[F, ...] = ()
    breaks: bool = False
    stalls: bool = False
    core: bool = True


def _connector(id: str, does: str, *caught_by: Catch, **more: object) -> Defect:
    return Defect(id, "lying-connector", does, caught_by, **more)  # type: ignore[arg-type]


K3 = "P.boundary.k3+1"
SHARE = "H.share.forward"
PARTED = "P.divergent.last-block-full"
SIZE = "P.size.base.b16"
LONG = "P.size.base.b120"
KILLED = "D.owner-killed.recompute"

ONE_IN_50 = 0.02

LYING_CONNECTOR: tuple[Defect, ...] = (
    # What is read
    _connector(
        "foreign-block",
        "a block of another request is loaded in place of this one",
        Catch(K3, (F.WRONG_ANSWER,)),
        Catch(SHARE, (F.WRONG_ANSWER,)),
        Catch(PARTED, (F.WRONG_ANSWER,)),
        Catch(SIZE, (F.WRONG_ANSWER,)),
    ),
    _connector(
        "rare-foreign-block",
        "one block in 50 is another request's",
        Catch(LONG, (F.WRONG_ANSWER,)),
        rates=(ONE_IN_50,),
    ),
    _connector("zero-block", "a block is zeros", Catch(K3, (F.WRONG_ANSWER,)), Catch(LONG, (F.WRONG_ANSWER,))),
    _connector(
        "stale-block",
        "one block in 50 keeps what an earlier request left in its memory",
        Catch(LONG, (F.WRONG_ANSWER,)),
        rates=(ONE_IN_50,),
    ),
    _connector("half-block", "only the first half of each block is loaded", Catch(SIZE, (F.WRONG_ANSWER,))),
    _connector("repeated-block", "a block is loaded twice, the one after it never", Catch(SIZE, (F.WRONG_ANSWER,))),
    _connector("skipped-layer", "one layer of each block is not loaded", Catch(K3, (F.WRONG_ANSWER,))),
    _connector("swapped-layers", "two layers of each block are in each other's place", Catch(K3, (F.WRONG_ANSWER,))),
    _connector("unloaded", "hits are claimed and booked, nothing is loaded", Catch(K3, (F.WRONG_ANSWER,))),
    _connector(
        "late-load",
        "a load is reported as finished half a second before it is",
        Catch(K3, (F.WRONG_ANSWER,)),
        delay_s=0.5,
    ),
    _connector("corrupt-save", "blocks are saved with an exponent bit inverted", Catch(K3, (F.WRONG_ANSWER,))),
    _connector("foreign-save", "another request's block is saved under a block's key", Catch(K3, (F.WRONG_ANSWER,))),
)
