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
    control_may: tuple[F, ...] = ()
    """Findings that the honest stack itself comes to on this case, so that rate 0 cannot be PASS."""
    core: bool = True
    """False where it costs a stack or an engine start of its own: in ``--scope full`` only."""

    @property
    def gate(self) -> str:
        """The gate's id: family and name."""
        return ".".join(self.case.split(".")[:2])


@dataclass(frozen=True)
class Defect:
    """One fault, put in on purpose.

    rates: probabilities per occasion at which it must be caught; every lying connector is also run at rate 0, where the
    same gate must pass. unit: what is counted as a wrong act. lying: positions of the engines that lie (None: all).
    breaks: the stack is rebuilt afterwards. stalls: the engine must be proven well afterwards.
    """

    id: str
    kind: Kind
    does: str
    caught_by: tuple[Catch, ...]
    rates: tuple[float, ...] = (1.0,)
    delay_s: float = 0.0
    unit: str = "blocks"
    lying: tuple[int, ...] | None = None
    breaks: bool = False
    stalls: bool = False
    core: bool = True


def _connector(id: str, does: str, *caught_by: Catch, **more: object) -> Defect:
    return Defect(id, "lying-connector", does, caught_by, **more)  # type: ignore[arg-type]


def _more(kind: Kind, id: str, does: str, *caught_by: Catch, **more: object) -> Defect:
    return Defect(id, kind, does, caught_by, **more)  # type: ignore[arg-type]


K3 = "P.boundary.k3+1"
K3_FULL = "P.boundary.k3"
"""A prompt of exactly three blocks: the last one may not be reused."""
SHARE = "H.share.forward"
PARTED = "P.divergent.last-block-full"
SIZE = "P.size.base.b16"
LONG = "P.size.base.b120"
BRANCHES = "P.conversation.branches"
BURST = "P.concurrent.after-save"
SAMPLED = "P.sampled.seeded"
SALTED = "I.salt.other"
KILLED = "D.owner-killed.recompute"
SERVED = "O.footprint.served"
CANCELLED = "O.footprint.cancelled"
LOCAL = "P.local.k3+1"
NO_MASTER = "O.no-master.refused"
CHANNEL = "O.lookup-channel.isolated"
WINDOWED = "P.families.sliding-window"
CHUNKED = "P.options.chunked"
EVICTING = "P.pressure.evicting"
DENSE = "P.shared-prefix.sliding-window-dense"
CUT_SHORT = "P.integrity.truncated"
"""The one damage that the honest stack notices, so the one case that a lie can turn red."""
RESTARTED = "P.restart.master"
PREFIXED = "I.engine.weights.prefix"
ADAPTED = "I.lora.other"
CLIENT = "client.on-time"
"""No gate: the client's own check against a server whose times are known (``suite.selftest.test_client``)."""

ONE_IN_50, ONE_IN_20 = 0.02, 0.05
K3_READER = (0,)
"""Position of the reader in ``P.boundary.k3*``: it saves on the engine whose position has the parity of the blocks."""

WRONG = (F.WRONG_ANSWER,)
GONE = (F.FAILED_REQUEST, F.ENGINE_DIED, F.HANG)
GONE_WHY = "a request that was in the dying engine may be cut off, refused or left without an answer"
FAILED_LOAD = (F.SILENT_FALLBACK, F.UNBOUNDED_LOOKUPS)
FAILED_LOAD_WHY = (
    "what could not be loaded is recomputed and reported as cached; which block it was says how often it is retried"
)

_lying = _connector

LYING_CONNECTOR: tuple[Defect, ...] = (
    # What is read
    _lying(
        "foreign-block",
        "a block of another request is loaded in place of this one",
        *(Catch(case, WRONG) for case in (K3, SHARE, PARTED, SIZE, BRANCHES, BURST, SAMPLED)),
        *(Catch(case, WRONG, core=False) for case in (WINDOWED, CHUNKED, EVICTING)),
    ),
    _lying("rare-foreign-block", "one block in 50 is another request's", Catch(LONG, WRONG), rates=(ONE_IN_50,)),
    _lying("zero-block", "a block is zeros", Catch(K3, WRONG)),
    _lying("rare-zero-block", "one block in 50 is zeros", Catch(LONG, WRONG), rates=(ONE_IN_50,)),
    _lying(
        "stale-block",
        "one block in 50 keeps what an earlier request left in its memory",
        Catch(LONG, WRONG),
        rates=(ONE_IN_50,),
    ),
    _lying(
        "half-block",
        "only the first half of each block is loaded",
        Catch(SIZE, WRONG),
        Catch(WINDOWED, WRONG, core=False),
    ),
    _lying("repeated-block", "a block is loaded twice, the one after it never", Catch(SIZE, WRONG)),
    _lying(
        "rare-repeated-block",
        "one block in 50 is loaded twice, the one after it never",
        Catch(LONG, WRONG),
        rates=(ONE_IN_50,),
    ),
    _lying("skipped-layer", "one layer of each block is not loaded", Catch(K3, WRONG)),
    _lying("swapped-layers", "two layers of each block are in each other's place", Catch(K3, WRONG)),
    _lying("unloaded", "hits are claimed and booked, nothing is loaded", Catch(K3, WRONG)),
    _lying("late-load", "a load is reported as finished half a second before it is", Catch(K3, WRONG), delay_s=0.5),
    _lying(
        "lost-failure",
        "blocks that could not be loaded are reported as loaded",
        Catch(KILLED, WRONG, control_may=(F.SLOW_DEGRADE, F.UNBOUNDED_LOOKUPS)),
        Catch(CUT_SHORT, (F.UNDETECTED_CORRUPTION,)),
    ),
    _lying(
        "lost-block",
        "blocks that the pool lost are still claimed, and are zeros",
        Catch(RESTARTED, WRONG, core=False),
    ),
    # What is saved, and under which key
    _lying("corrupt-save", "blocks are saved with an exponent bit inverted", Catch(K3, WRONG)),
    _lying("foreign-save", "another request's block is saved under a block's key", Catch(K3, WRONG)),
    _lying(
        "rare-foreign-save",
        "one block in 20 is saved with another request's content",
        Catch(LONG, WRONG),
        rates=(ONE_IN_20,),
    ),
    _lying(
        "spoiled-cache",
        "a block is zeroed in the engine's own cache after it was saved",
        Catch(LOCAL, WRONG),
    ),
    _lying("unsaved", "blocks are reported as saved and are not", Catch(K3, (F.SAVE_NOT_VISIBLE,))),
    _lying("short-key", "the key of a block leaves out the block's own tokens", Catch(PARTED, WRONG)),
    _lying(
        "ignored-salt",
        "the salt of a request is not in its keys",
        Catch(PARTED, (F.EXTRA_HITS,)),
        Catch(SALTED, (F.FOREIGN_REUSE,)),
    ),
    _lying("ignored-adapter", "the adapter of a request is not in its keys", Catch(ADAPTED, WRONG, core=False)),
    _lying("ignored-prefix", "the engine's own cache_prefix is not in its keys", Catch(PREFIXED, WRONG, core=False)),
    # What is claimed and booked
    _lying(
        "block-too-many",
        "the block after the last hit is claimed too, with another request's content",
        Catch(K3_FULL, WRONG),
        Catch(PARTED, WRONG),
    ),
    _lying("block-too-few", "the last block that is there is not claimed", Catch(K3, (F.FEWER_HITS,)), unit="requests"),
    _lying("denied-hit", "a prompt that is there is not found", Catch(K3, (F.ZERO_HITS,)), unit="requests"),
    _lying(
        "whole-prompts",
        "a prefix is found only by a prompt that ends with it",
        Catch(DENSE, (F.ZERO_HITS,), core=False),
        unit="requests",
    ),
    _lying(
        "doubled-bytes",
        "twice the bytes that moved are booked",
        Catch(K3, (F.CONSERVATION, F.SOURCE_DISAGREEMENT), "both sums are broken by it"),
        unit="loads",
    ),
    # How it fails
    _lying(
        "load-error",
        "no block that is there can be loaded",
        Catch(K3, (F.HANG,)),  # the honest scheduler looks up and loads again, for ever, if not one block came
        lying=K3_READER,
        stalls=True,
    ),
    _lying(
        "rare-load-error",
        "one block in 50 cannot be loaded",
        Catch(LONG, FAILED_LOAD, FAILED_LOAD_WHY),
        rates=(ONE_IN_50,),
    ),
    _lying(
        "never-finished",
        "a finished load is never reported",
        Catch(K3, (F.HANG,)),
        unit="requests",
        lying=K3_READER,
        stalls=True,
    ),
    _lying(
        "lookup-hang",
        "a lookup gets no answer",
        Catch(K3, (F.HANG,)),
        unit="requests",
        lying=K3_READER,
        stalls=True,
    ),
    _lying(
        "crash",
        "the worker dies inside a load",
        Catch(K3, GONE, GONE_WHY),
        unit="loads",
        lying=K3_READER,
        breaks=True,
    ),
    # What it costs and leaves behind
    _lying("lookup-storm", "one request is looked up 40 times", Catch(SERVED, (F.UNBOUNDED_LOOKUPS,)), unit="requests"),
    _lying(
        "slow-load",
        "each load takes 3 s longer",
        Catch(SERVED, (F.SLOWER_THAN_RECOMPUTE,)),
        unit="loads",
        delay_s=3.0,
    ),
    _lying(
        "pinned-save",
        "a finished save is never reported: its blocks stay in use",
        Catch(SERVED, (F.KV_LEAK,)),
        unit="saves",
    ),
    _lying(
        "leak-on-cancel",
        "the load of a cancelled request is never reported as finished: its blocks stay in use",
        Catch(CANCELLED, (F.KV_LEAK,)),
        unit="requests",
        delay_s=0.5,
    ),
    # How it starts
    _lying(
        "endless-wait",
        "a start without a reachable master waits for it without end (at rate 0 it fails at once and names it)",
        Catch(NO_MASTER, (F.NEVER_READY,)),
        unit="starts",
    ),
)

MISCONFIGURATION: tuple[Defect, ...] = (
    _more("misconfiguration", "other-seed", "one engine hashes from another seed", Catch(SHARE, (F.SEED_MISMATCH,))),
    _more(
        "misconfiguration",
        "sibling-weights",
        "one engine has other weights, in a directory of the same name",
        Catch(SHARE, WRONG),
    ),
    _more(
        "misconfiguration",
        "other-dtype",
        "one engine computes in float16 instead of bfloat16",
        Catch(SHARE, WRONG),
        core=False,  # a stack of its own, 70 s; the weights above show the same to the same gate
    ),
    _more(
        "misconfiguration",
        "unsafe-policy",
        "kv_load_failure_policy is left at its default",
        Catch(KILLED, (F.FAILED_REQUEST,)),
    ),
    _more(
        "misconfiguration",
        "shared-lookup",
        "all engines of the host share one lookup channel",
        Catch(CHANNEL, (F.SHARED_LOOKUP_CHANNEL,)),
    ),
)

LYING_STORE: tuple[Defect, ...] = (
    _more("lying-store", "copied-value", "a block's value is replaced by another block's", Catch(SIZE, WRONG)),
    _more("lying-store", "zeroed-value", "a block's value is replaced by zeros", Catch(SIZE, WRONG)),
    _more("lying-store", "flipped-value", "512 bytes of a block's value are inverted", Catch(SIZE, WRONG)),
    _more(
        "lying-store",
        "truncated-value",
        "the values of a saved prompt are cut to half their length",
        Catch(
            SIZE,
            (F.HANG, F.UNBOUNDED_LOOKUPS),
            "the honest scheduler looks up and loads again, hundreds of times, until the deadline or until they are gone",
        ),
    ),
    _more(
        "lying-store",
        "removed-value",
        "one block of a saved prompt is gone",
        Catch(SIZE, (F.ZERO_HITS, F.FEWER_HITS), "which block it was says how much of the prefix is left"),
    ),
)

LYING_HARNESS: tuple[Defect, ...] = (
    _more(
        "lying-harness",
        "idle-fault",
        "a kill that kills nothing",
        Catch(KILLED, (F.FAULT_DID_NOT_LAND,), outcome="HARNESS_ERROR"),
        unit="faults",
        breaks=True,
    ),
    _more(
        "lying-harness",
        "stale-scrape",
        "counters are read once and shown again and again",
        Catch(K3, (F.CONSERVATION,)),
        unit="scrapes",
    ),
    _more(
        "lying-harness",
        "used-prompt",
        "prompts that ought to be fresh were sent before",
        Catch(K3, (F.EXTRA_HITS, F.SAVE_NOT_VISIBLE), "what is in the pool already hits, and adds no key"),
        unit="prompts",
    ),
    _more(
        "lying-harness",
        "launcher-environment",
        "the environment of processes is taken from the launcher, not from the kernel",
        Catch("H.seed.different", (F.MISLEADING_MESSAGE,)),
        unit="processes",
    ),
    _more(
        "lying-harness",
        "late-client",
        "the client looks at the clock 5 ms after the bytes came",
        Catch(CLIENT, (F.HARNESS_EXCEPTION,), outcome="HARNESS_ERROR"),
        unit="requests",
    ),
)

CATALOGUE: tuple[Defect, ...] = (*LYING_CONNECTOR, *MISCONFIGURATION, *LYING_STORE, *LYING_HARNESS)
