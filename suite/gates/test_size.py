"""Family P, size: what small models and short prompts hide about loads."""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from reports import records as r
from reports.history import History
from suite.checks.base import finding, too_few
from suite.contract import Case, Gate
from suite.gates import gate_cases
from suite.gates.arms import calibrate, record_owners, reuse_arms, settle_saves
from suite.gates.judging_arms import judge_arms

if TYPE_CHECKING:
    from fixtures.spec import StackSpec
    from fixtures.stack import Stack
    from suite.workload.prompts import Prompt

DEEP_MODEL = "tiny-deep"
DEEP_MAX_LEN = 12288
"""Room for the largest load of the size axis: 36 layers x 2 x 278 blocks of 32 tokens are 20,016 slices."""


DEEP_REQUEST_S = 30.0
"""Deadline of a request of the core cases on the deep model: cold ones take up to 9 s on two cores, and Mooncake's own bound
for a transfer (60 s) is no help to somebody who waits for an answer."""

DEEP_SEGMENT_BYTES = 1536 << 20
"""An engine's share of the pool: calibration and all loads of the axis take 1 GiB (a block of 32 tokens 0.6 MB), and
nothing may be evicted: that would be another test."""


IDLE_S = 75.0
"""Longer than a minute, a usual limit of idle connections, and than fifteen leases of upstream's default of 5 s."""

LONE, SEVERAL = 1, 3
"""Owners of the pool's memory. In the other cases there are two: the engines themselves, each of which is near its own half."""


class LoadSize(Gate):
    """Claim: reuse is right at every load size, the first time and again, after an idle pause, from one owner and from several.

    How it can lie: small models and short prompts hide what large transfers do (batches split, buffers wrap, leases
    run out under way, a first connection behaves unlike a later one, one that rested unlike one in use).
    Oracle: as P.boundary, and the bytes that the store says it moved: tokens x bytes per token, exactly. How many units
    hold the blocks is read from the store's replica list and the kernel's sockets.
    Turns red: lost or swapped batches, a load that ends early, bytes booked that never moved.
    """

    id = "P.size"
    judges_lmcache = True
    version = 4
    claim = (
        "loads of one block to 20,000 slices, first and repeated, give the native answer and move exactly their bytes"
    )
    proof = (
        "foreign-block",
        "half-block",
        "repeated-block",
        "rare-foreign-block",
        "rare-zero-block",
        "rare-repeated-block",
        "rare-foreign-save",
        "rare-load-error",
        "zeroed-value",
        "flipped-value",
        "removed-value",
    )

    def cases(self) -> Iterable[Case]:
        for blocks in (1, 16, 120):
            yield Case(f"{self.id}.base.b{blocks}", {"blocks": blocks, "deep": False})
        for blocks in (1, 16, 64, 140, 280):
            # On two cores the largest load takes minutes, and the one before it shows the same fault of the pinned pair.
            core = blocks < 280
            yield Case(f"{self.id}.deep.b{blocks}", {"blocks": blocks, "deep": True}, variant="deep", core=core)
        rested = {"blocks": 120, "deep": False, "idle_s": IDLE_S}
        yield Case(f"{self.id}.base.idle", rested, core=False)
        for name, owners in (("one-owner", LONE), ("several-owners", SEVERAL)):
            params = {"blocks": 120, "deep": False, "owners": owners}
            yield Case(f"{self.id}.base.{name}", params, variant=name, core=False)
        parted = {"blocks": 140, "deep": True, "owners": SEVERAL}
        yield Case(f"{self.id}.deep.several-owners", parted, variant="deep-several-owners", core=False)

    def stack(self, base: StackSpec, case: Case) -> StackSpec:
        owners = case.params.get("owners")
        if owners and base.store is not None:
            base = base.with_store(mode="standalone", owners=owners)
        if not case.params["deep"]:
            return base
        spec = base.with_all_engines(model=DEEP_MODEL, max_model_len=DEEP_MAX_LEN)
        if case.core:
            request_s = min(spec.timeouts.request_s, DEEP_REQUEST_S)
            spec = spec.with_changes(timeouts=msgspec.structs.replace(spec.timeouts, request_s=request_s))
        if spec.store is None:
            return spec
        return spec.with_store(segment_bytes=max(spec.store.segment_bytes, DEEP_SEGMENT_BYTES))

    def collect(self, stack: Stack, case: Case) -> None:
        calibrate(stack, concurrent=False)
        saver, reader = stack.names[0], stack.names[1]
        tokens = case.params["blocks"] * stack.engines[saver].facts.block_tokens + 1
        prompt = stack.prompts(case.id).fresh("x", tokens)
        answered = self._arms_by_owner(stack, case, prompt)
        with stack.phase(case.id, "repeated"):
            for again in ("2", "3") if answered else ():
                stack.reset_local_cache(reader)
                stack.ask_measured(reader, prompt, f"external/again-{again}")
        if answered and (idle_s := case.params.get("idle_s")):
            with stack.phase(case.id, "idle"):
                rested = partial(_past, time.monotonic() + idle_s)
                stack.wait("the idle pause to end", rested, bound_s=idle_s + 5, bound_source="IDLE_S", poll_s=0.5)
            with stack.phase(case.id, "rested"):
                stack.reset_local_cache(reader)
                stack.ask_measured(reader, prompt, RESTED)
        stack.scan_logs(case.id)

    @staticmethod
    def _arms_by_owner(stack: Stack, case: Case, prompt: Prompt) -> bool:
        """``reuse_arms``; where the case is about owners, with the fact of where the blocks lie."""
        saver, reader = stack.names[0], stack.names[1]
        if not case.params.get("owners"):  # a pool of which nobody may ask that is judged by size all the same
            return reuse_arms(stack, case.id, prompt, saver, reader)
        settle_saves(stack)
        before = stack.keys()
        answered = reuse_arms(stack, case.id, prompt, saver, reader)
        record_owners(stack, saver, stack.keys() - before, case.id)
        return answered

    def judge(self, history: History) -> r.Verdict:
        extra = [*_owner_findings(history), *_idle_findings(history)]
        roles = ("cold", "native", "external", "native-2", "external/again-2", "external/again-3")
        return judge_arms(self, history, roles=roles, extra=extra, numbers=_slices(history))


RESTED = "external/rested"


def _past(due_s: float) -> bool:
    return time.monotonic() >= due_s


def _owner_findings(history: History) -> list[r.Finding]:
    """The blocks lay with as many owners as the case is about, or it has judged something else."""
    wanted = history.case.params.get("owners")
    if not wanted:
        return []
    fact = history.fact("owners")
    held = fact.value["held_by"] if fact else {}
    if len(held) == wanted and not any(unit.startswith("unknown") for unit in held):
        return []
    text = ", ".join(f"{unit} {count}" for unit, count in held.items()) or "nobody"
    return [finding(r.FindingCode.NO_PRESSURE, f"the blocks lie with {text}: {wanted} owners were to hold them")]


def _idle_findings(history: History) -> list[r.Finding]:
    """Nothing was sent to any engine for as long as the case says, before the last load."""
    idle_s = history.case.params.get("idle_s")
    if not idle_s:
        return []
    observed = history.observations()
    last = [o for o in observed if o.role == RESTED]
    before = [o.done_s for o in observed if o.role != RESTED]
    if not last or not before:
        return too_few("no load after the idle pause")
    rested_s = last[0].sent_s - max(before)
    if rested_s >= idle_s:
        return []
    return [finding(r.FindingCode.NO_PRESSURE, f"the pause was {rested_s:.1f} s, {idle_s:g} belong to the case")]


def _slices(history: History) -> dict[str, Any]:
    stack = history.stack
    layers = stack.engines[0].layers if stack and stack.engines else 0
    return {"slices": layers * 2 * int(history.case.params["blocks"])}


LOAD_SIZE = LoadSize()


@gate_cases(LOAD_SIZE)
def test_load_size(run_case: Any, case: Case) -> None:
    run_case(LOAD_SIZE, case)
