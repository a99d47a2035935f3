"""Family P: reused KV is the KV of exactly this prefix, or it is not reused."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from reports import records as r
from reports.history import History
from suite.contract import Case, Gate
from suite.gates import gate_cases
from suite.gates.arms import calibrate, other_engine, reuse_arms
from suite.gates.judging_arms import judge_arms
from suite.workload.prompts import boundary_lengths

if TYPE_CHECKING:
    from fixtures.stack import Stack


CORE_BLOCKS = (1, 2, 3, 16, 62)
FURTHER_BLOCKS = (0, 4, 8, 32, 64, 100, 127)
"""Whole blocks of a prompt. 127 of 32 tokens are the most that fit into the 4,096 tokens of the ready stacks beside an answer; of 0
there is one length, a single token, of which nothing can be reused."""


class Boundary(Gate):
    """Claim: at every prompt length around a block boundary, an external hit covers exactly the whole blocks before the
    last token, and the answer is that of the engine's own cache.

    How it can lie: a rounding error at the boundary serves one block too many (the last token's logits are then those
    of another prompt) or skips the tail; counters look right either way.
    Oracle: exact token counts from prompt length and block size; external against native, cold as second arm.
    Turns red: one block too many, a foreign or stale block, zeros, a load that claims hits without loading.
    """

    id = "P.boundary"
    judges_lmcache = True
    version = 4
    claim = "around every block boundary an external hit covers exactly the whole blocks, and answers like a native hit"
    proof = (
        "foreign-block",
        "zero-block",
        "skipped-layer",
        "swapped-layers",
        "unloaded",
        "late-load",
        "corrupt-save",
        "foreign-save",
        "unsaved",
        "block-too-many",
        "block-too-few",
        "doubled-bytes",
        "load-error",
        "lookup-hang",
        "crash",
        "stale-scrape",
        "used-prompt",
    )

    def cases(self) -> Iterable[Case]:
        for blocks in (*CORE_BLOCKS, *FURTHER_BLOCKS):
            for name, length in boundary_lengths(blocks, 32).items():
                params = {"blocks": blocks, "offset": length - 32 * blocks}
                yield Case(f"{self.id}.{name}", params, smoke=blocks == 3, core=blocks in CORE_BLOCKS)

    def collect(self, stack: Stack, case: Case) -> None:
        calibrate(stack)
        saver = stack.names[case.params["blocks"] % len(stack.names)]
        block = stack.engines[saver].facts.block_tokens
        tokens = case.params["blocks"] * block + case.params["offset"]
        reuse_arms(stack, case.id, stack.prompts(case.id).fresh("x", tokens), saver, other_engine(stack, saver))
        stack.scan_logs(case.id)

    def judge(self, history: History) -> r.Verdict:
        return judge_arms(self, history, roles=("cold", "native", "external", "native-2"))


class Local(Gate):
    """Claim: an engine's own prefix cache covers exactly the whole blocks, and answers like the cold request.

    The baseline of everything else: where this fails, reuse from a pool would be blamed for what the engine does alone.
    How it can lie: as P.boundary, without a pool.
    Oracle: exact local token counts; native against cold, within the cold floor.
    Turns red: a prefix cache that serves one block too many, or another prompt's block.
    """

    id = "P.local"
    judges_lmcache = True
    version = 4
    claim = "the engine's own prefix cache covers exactly the whole blocks of a prompt, and answers like a cold request"
    needs_pool = False
    min_engines = 1
    proof = ("spoiled-cache",)

    def cases(self) -> Iterable[Case]:
        for blocks in (1, 3, 62):
            for name, length in boundary_lengths(blocks, 32).items():
                yield Case(f"{self.id}.{name}", {"blocks": blocks, "offset": length - 32 * blocks}, smoke=blocks == 3)

    def collect(self, stack: Stack, case: Case) -> None:
        calibrate(stack)
        engine = stack.names[case.params["blocks"] % len(stack.names)]
        tokens = case.params["blocks"] * stack.engines[engine].facts.block_tokens + case.params["offset"]
        prompt = stack.prompts(case.id).fresh("x", tokens)
        with stack.phase(case.id, "local"):
            stack.save(engine, prompt, role="cold")
            stack.ask_measured(engine, prompt, "native")
        stack.scan_logs(case.id)

    def judge(self, history: History) -> r.Verdict:
        return judge_arms(self, history, arm="native")


class Divergent(Gate):
    """Claim: a prompt that leaves another one inside a block reuses the blocks before that one, and no more.

    How it can lie: a key that covers too little (a hash cut short, a block looked up by position) gives the other
    prompt's block: fluent, fast, wrong.
    Oracle: the exact count of common whole blocks; the answer of the engine's own cache with the same cached length
    (``short``: the prompt ends inside the parting block, so that block can be in no cache) or the cold answer (``full``).
    Positive control: the undivided prompt does hit in full.
    Turns red: a connector that ignores the last block's tokens, one block too many, another request's block.
    """

    id = "P.divergent"
    judges_lmcache = True
    version = 4
    claim = "a prompt that parts from a saved one inside a block reuses only the whole blocks before it"
    proof = (
        "foreign-block",
        "short-key",
        "ignored-salt",
        "block-too-many",
    )

    def cases(self) -> Iterable[Case]:
        for name, at, short in (
            ("first-block", 5, False),
            ("last-block-short", 7, True),
            ("last-block-full", -1, False),
        ):
            yield Case(f"{self.id}.{name}", {"offset": at, "short": short, "last": name != "first-block"}, smoke=short)

    def collect(self, stack: Stack, case: Case) -> None:
        calibrate(stack)
        saver, reader = stack.names[0], stack.names[1]
        block = stack.engines[saver].facts.block_tokens
        blocks = 8
        prompts = stack.prompts(case.id)
        original = prompts.fresh("x", blocks * block + 1)
        parting = ((blocks - 1) * block if case.params["last"] else 0) + case.params["offset"] % block
        tokens = parting + 9 if case.params["short"] else len(original)
        with stack.phase(case.id, "save"):
            stack.save(saver, original, role="cold/control")
            stack.ask_measured(saver, original, "native/control")
        sibling = prompts.branched(original, parting, "y", tokens)
        with stack.phase(case.id, "divergent"):
            stack.fact("divergent", {"at": parting, "common_tokens": parting // block * block})
            if case.params["short"]:
                stack.ask_measured(saver, sibling, "native/divergent")
            else:
                stack.ask_measured(saver, sibling, "cold/divergent", cache_salt=f"{case.id}.cold")
            stack.ask_measured(reader, sibling, "external/divergent")
        with stack.phase(case.id, "control"):
            stack.reset_local_cache(reader)  # it holds the common blocks by now
            stack.ask_measured(reader, original, "external/control")
        stack.scan_logs(case.id)

    def judge(self, history: History) -> r.Verdict:
        first = "native" if history.case.params["short"] else "cold"
        return judge_arms(self, history, roles=(f"{first}/divergent", "external/divergent", "external/control"))


BOUNDARY = Boundary()
LOCAL = Local()
DIVERGENT = Divergent()


@gate_cases(BOUNDARY)
def test_boundary(run_case: Any, case: Case) -> None:
    run_case(BOUNDARY, case)


@gate_cases(LOCAL)
def test_local(run_case: Any, case: Case) -> None:
    run_case(LOCAL, case)


@gate_cases(DIVERGENT)
def test_divergent(run_case: Any, case: Case) -> None:
    run_case(DIVERGENT, case)
