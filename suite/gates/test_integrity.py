"""Family P, integrity: a stored block whose bytes are not those that were saved is refused, not served."""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from fixtures.healthy import prove_healthy
from reports import records as r
from reports.history import History
from suite.contract import Case, Gate
from suite.gates import gate_cases
from suite.gates.arms import calibrate, settle_saves
from suite.gates.judging_integrity import CONTROL_TAG, CORRUPTION, EXPLAINS, judge_integrity
from suite.gates.sequences import ask_cold, at_rest, save_naming

if TYPE_CHECKING:
    from fixtures.stack import Stack

PROMPT_TOKENS = 2000
"""As in the calibration of the oracle, so that what a wrong block does to an answer of this length is known."""

FLIPPED_BYTES = 4096
"""Inverted from the middle of the value on: a page of memory, or a few TCP segments."""

READ_DEADLINE_S = 15.0
"""For a request over a block that cannot be loaded: recomputing 2,000 tokens takes 0.2 s, a lease or a client TTL 10 s."""

IDLE_BOUND_S = 15.0
"""For the reader to be idle once the damaged block is gone from the pool."""


class Integrity(Gate):
    """Claim: a block whose stored bytes changed after they were saved is not served: the request is recomputed, and right.

    How it can lie: the bytes did not change; the block was never read (a cached copy was); the answer is right by luck,
    as attention does not see the order of blocks.
    Oracle: the request's external tokens and failed loads say whether the stack used the block; the cold answer says what
    it did to the answer. Proof: the store's own digests of the value before and after. Control: an undamaged prompt,
    saved and read in the same way, is served from the pool with the right answer.
    Turns red: any stack without a checksum over stored values; a stack that refuses, but never recomputes.
    """

    id = "P.integrity"
    proof = ("lost-failure",)
    version = 3
    claim = "a stored block whose bytes changed is refused and recomputed, never served"

    def cases(self) -> Iterable[Case]:
        for how in ("flipped", "exchanged", "foreign"):
            yield Case(f"{self.id}.{how}", {"how": how, "first": False})
        for name, first in (("truncated", False), ("truncated-first", True)):
            # Where the first block of a load fails, nothing of it is left to go on with. Both end with a proof of health.
            yield Case(f"{self.id}.{name}", {"how": "truncated", "first": first})

    def collect(self, stack: Stack, case: Case) -> None:
        calibrate(stack)
        saver, reader = stack.names[0], stack.names[1]
        prompts = stack.prompts(case.id)
        victim, control = (prompts.fresh(name, PROMPT_TOKENS) for name in ("victim", "control"))
        blocks = PROMPT_TOKENS // stack.engines[saver].facts.block_tokens
        with stack.phase(case.id, "save"):
            settle_saves(stack)
            for name, prompt in (("victim", victim), (CONTROL_TAG, control)):
                ask_cold(stack, saver, prompt, name)
            keys = save_naming(stack, saver, victim, (0 if case.params["first"] else blocks // 2, blocks - 2))
            other = save_naming(stack, saver, control, (blocks // 2,))
        with stack.phase(case.id, "control"):
            stack.ask_measured(reader, control, f"ask/{CONTROL_TAG}")
        with stack.phase(case.id, "damage"):
            damaged = damage(stack, case.params["how"], keys, other)
        with stack.phase(case.id, "read"):
            stack.ask_measured(reader, victim, "ask/victim", deadline_s=READ_DEADLINE_S)
        with stack.phase(case.id, "after"):
            stack.store_tool([{"op": "remove", "keys": damaged}])
            _settle(stack, reader)
        if case.params["how"] == "truncated":
            prove_healthy(stack, case.id)
        stack.scan_logs(case.id)

    def judge(self, history: History) -> r.Verdict:
        return judge_integrity(self, history)


def damage(stack: Stack, how: str, keys: dict[int, str], other: dict[int, str]) -> list[str]:
    """Change stored bytes behind the master's back and record the proof. Returns the keys that were touched."""
    own = [keys[index] for index in sorted(keys)]
    if len(own) < 2 or not other:
        stack.fact(CORRUPTION, {"how": how, "keys": own, "answer": None})
        return own
    foreign = next(iter(other.values()))
    (size,) = stack.store_tool([{"op": "digest", "keys": own[:1]}])
    length = size[own[0]]["bytes"]
    step: dict[str, Any] = {
        "flipped": {"op": "replace", "key": own[0], "how": "flip", "offset": length // 2, "count": FLIPPED_BYTES},
        "foreign": {"op": "replace", "key": own[0], "how": "copy", "source": foreign},
        "truncated": {"op": "replace", "key": own[0], "how": "truncate", "bytes": length // 2},
        "exchanged": {"op": "exchange", "keys": own},
    }[how]
    touched = own if how == "exchanged" else own[:1]
    began = time.monotonic()
    (answer,) = stack.store_tool([step])
    landed = answer["put"] == 0 and answer["before"] != answer["after"] and bool(answer["after"])
    stack.fact(CORRUPTION, {"how": how, "keys": touched, "blocks": sorted(keys), "answer": answer})
    stack.record(
        r.FaultRecord(
            fault_id=f"damage:{how}",
            fault=f"damage-{how}",
            target="pool",
            action="inject",
            landed=landed,
            proof={"put": answer["put"], "before": answer["before"], "after": answer["after"]},
            t_s=began,
            explains=EXPLAINS,
        )
    )
    return touched


def _settle(stack: Stack, reader: str) -> None:
    """The damaged block is gone: the reader must come to rest, or the stack is not fit for another case."""
    if not stack.wait(
        "reader-idle",
        partial(at_rest, stack, reader, "idle"),
        bound_s=IDLE_BOUND_S,
        bound_source="suite.gates.test_integrity.IDLE_BOUND_S",
        poll_s=0.5,
    ):
        stack.dirty = True


INTEGRITY = Integrity()


@gate_cases(INTEGRITY)
def test_integrity(run_case: Any, case: Case) -> None:
    run_case(INTEGRITY, case)
