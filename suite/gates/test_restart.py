"""Family P, restarts: what an engine or a master left behind is read right or not at all, and new saves hit again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from fixtures.faults import Restart
from fixtures.healthy import prove_healthy
from reports import records as r
from reports.history import History
from suite.contract import Case, Gate
from suite.gates import gate_cases
from suite.gates.arms import calibrate, settle_saves
from suite.gates.judging_restart import ANEW, BACK, HELD, NAMED_KEYS, judge_restart
from suite.gates.sequences import ask_cold, save_naming
from suite.workload.prompts import Prompt

if TYPE_CHECKING:
    from fixtures.stack import Stack

OLD_PROMPTS = 8
"""Prompts from before the restart. Each block lies on one engine or the other at random; the chance that a restarted engine
took the first block of all of them with it is 1 in 256."""

OLD_BLOCKS = 2

NEW_TOKENS = 2000

CHANGES = {
    "reader": {"--max-num-batched-tokens": "512", "--max-num-seqs": "8"},
    "master": {"--default_kv_lease_ttl": "20000", "--eviction_ratio": "0.2"},
}
"""Settings that an operator changes with a restart and that change nothing of the KV: what the pool holds stays readable. (What
changes the KV is family I's.)"""


class Restarted(Gate):
    """Claim: an engine started again with the same identity reads exactly the blocks that the pool still holds, a master
    started again forgets, and new saves hit in both directions at once.

    How it can lie: the restarted process answers from a cache that survived; blocks whose memory died are still listed
    and read as whatever lies there now; hits return only for prompts that nobody had saved before.
    Oracle: the master says before each read how many leading blocks of a prompt have a copy in a live segment, and so
    exactly how many tokens must come from the pool; cold answers from before. Proof: other processes than before, same plan.
    Control: prompts saved after the restart are read in full, both ways.
    Turns red: stale blocks after a restart, an identity that changes with the process, hits that do not return.
    """

    id = "P.restart"
    version = 2
    proof = ("lost-block",)
    claim = (
        "after a restart exactly the blocks that are still listed are read, all answers are right, and new saves hit"
    )

    def cases(self) -> Iterable[Case]:
        # Both prove the stack healthy before they go on, so that it is fit for the next case where they succeed.
        # On a busy host the first load after the restart was seen to outlast its lease, and what is then
        # booked twice cannot be told from hits that are not back.
        yield Case(f"{self.id}.master", {"unit": "master"})
        yield Case(f"{self.id}.engine", {"unit": "reader"})
        for unit, changes in CHANGES.items():
            name = "engine" if unit == "reader" else unit
            yield Case(f"{self.id}.{name}-changed", {"unit": unit, "changes": changes}, core=False)  # costs a stack

    def collect(self, stack: Stack, case: Case) -> None:
        calibrate(stack)
        saver, reader = stack.names[0], stack.names[1]
        unit = reader if case.params["unit"] == "reader" else case.params["unit"]
        prompts = stack.prompts(case.id)
        block = stack.engines[reader].facts.block_tokens
        old = [prompts.fresh(f"old/{i}", OLD_BLOCKS * block + 1) for i in range(OLD_PROMPTS)]
        named = stack.notes[NAMED_KEYS] = []
        with stack.phase(case.id, "save"):
            settle_saves(stack)
            for i, prompt in enumerate(old):
                ask_cold(stack, saver, prompt, f"old-{i}")
                owner = stack.names[i % 2]  # half of them saved by the engine that is started again
                keys = save_naming(stack, owner, prompt, tuple(range(OLD_BLOCKS)))
                named.append([keys.get(block, "") for block in range(OLD_BLOCKS)])
                stack.fact(NAMED_KEYS, {"prompt": i, "keys": named[-1]})
        with stack.phase(case.id, "restart"):
            Restart(unit, case.params.get("changes", {})).inject(stack)
            prove_healthy(stack, case.id)
        if stack.dirty:
            stack.scan_logs(case.id)
            return
        read_back(stack, case, old, saver, reader)
        with stack.phase(case.id, ANEW):
            for i, (first, second) in enumerate(((saver, reader), (reader, saver))):
                prompt = prompts.fresh(f"new/{i}", NEW_TOKENS)
                stack.save(first, prompt, role=f"cold/new-{i}")
                stack.ask_measured(first, prompt, f"native/new-{i}")
                stack.ask_measured(second, prompt, f"external/new-{i}")
        stack.scan_logs(case.id)
        if "changes" in case.params:
            stack.dirty = True  # well, but not the stack of the specification any more

    def judge(self, history: History) -> r.Verdict:
        return judge_restart(self, history)


def read_back(stack: Stack, case: Case, old: list[Prompt], saver: str, reader: str) -> None:
    """Every prompt from before, on both engines with empty caches of their own; the master is asked just before."""
    with stack.phase(case.id, BACK):
        for engine in (reader, saver):
            settle_saves(stack)
            stack.reset_local_cache(engine)
            record_held(stack, engine)
            for i, prompt in enumerate(old):
                stack.ask_measured(engine, prompt, f"old/{i}")


def record_held(stack: Stack, engine: str) -> None:
    """What the master says of every named key: where its copies lie, and which segments live. Before ``engine`` reads."""
    if stack.store is None:
        return
    admin = stack.store.admin
    named = [key for keys in stack.notes[NAMED_KEYS] for key in keys if key]
    held = {key: [replica.endpoint for replica in admin.query_key(key)] for key in named}
    segments = [segment.endpoint for segment in admin.segment_list()]
    stack.fact(HELD, {"engine": engine, "held": held, "segments": segments})


RESTARTED = Restarted()


@gate_cases(RESTARTED)
def test_restarted(run_case: Any, case: Case) -> None:
    run_case(RESTARTED, case)
