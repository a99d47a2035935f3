"""Family P, conversations: every turn reuses exactly what the turns before it left, wherever they were served."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from reports import records as r
from reports.history import History
from suite.contract import Case, Gate
from suite.gates import gate_cases
from suite.gates.arms import calibrate
from suite.gates.judging_sequence import judge_sequence
from suite.gates.sequences import ask_cold, ask_native
from suite.workload.prompts import Prompt

if TYPE_CHECKING:
    from fixtures.stack import Stack

TURN_TOKENS = (20, 31, 64, 150, 333, 700)
"""New tokens of each turn's message. The first prompt is shorter than one block, and with 8 answer tokens between them no
turn ends at a block boundary: every shared prefix ends inside a block."""

ANSWER_TOKENS = 8

BRANCH_TOKENS = 75
"""Length of what a branch adds: ends in another block than the turn it leaves."""


class Conversation(Gate):
    """Claim: a conversation that grows, moves between engines and branches reuses exactly the whole blocks it shares with
    what was sent before, and answers like a cold request.

    How it can lie: blocks that hold generated tokens are keyed or saved otherwise than prompt blocks; a hit that is partly
    local and partly from the pool is counted twice, or its second part is loaded into the place of the first; a branch
    takes one block too many from the turn it left.
    Oracle: exact local and external tokens of every request from the model of pool and caches; external against native
    answers of the same cached length; cold answers under a salt. Control: the sequence reads the pool.
    Turns red: a block too many, another request's block, a key that leaves out tokens, blocks that are not saved.
    """

    id = "P.conversation"
    judges_lmcache = True
    version = 3
    claim = (
        "growing, moving and branching conversations reuse exactly the whole blocks they share, with the cold answer"
    )
    proof = ("foreign-block",)

    def cases(self) -> Iterable[Case]:
        yield Case(f"{self.id}.turns", {"what": "turns"}, smoke=True)
        yield Case(f"{self.id}.branches", {"what": "branches"})
        yield Case(f"{self.id}.edges", {"what": "edges"})

    def collect(self, stack: Stack, case: Case) -> None:
        calibrate(stack)
        collectors = {"turns": collect_turns, "branches": collect_branches, "edges": collect_edges}
        collectors[case.params["what"]](stack, case)
        stack.scan_logs(case.id)

    def judge(self, history: History) -> r.Verdict:
        return judge_sequence(self, history)


def converse(stack: Stack, case: Case, engines: list[str]) -> list[Prompt]:
    """A conversation whose turns are served by ``engines`` in turn; each prompt holds the answers given before it.

    Returns the prompts of the turns that were answered.
    """
    prompts = stack.prompts(case.id)
    turns: list[Prompt] = []
    prompt: Prompt = ()
    for i, tokens in enumerate(TURN_TOKENS):
        engine = engines[i % len(engines)]
        prompt = prompt + prompts.fresh(f"message/{i}", tokens)
        with stack.phase(case.id, f"turn-{i}"):
            ask_cold(stack, engine, prompt, f"turn-{i}")
            answer = stack.save(engine, prompt, role=f"turn/{i}", max_tokens=ANSWER_TOKENS)
        if not answer.ok:
            stack.dirty = True
            return turns
        turns.append(prompt)
        prompt = prompt + answer.output_token_ids
    return turns


def collect_turns(stack: Stack, case: Case) -> None:
    """Turns alternate between the engines (part local, part from the pool); then each engine replays all of them."""
    turns = converse(stack, case, stack.names)
    for engine in stack.names[:2]:
        with stack.phase(case.id, f"replay-{engine}"):
            stack.reset_local_cache(engine)
            for i, prompt in enumerate(turns):
                if not ask_native(stack, engine, prompt, f"{engine}-{i}"):
                    return


def collect_branches(stack: Stack, case: Case) -> None:
    """A conversation on one engine; from every turn of it a branch, on the other engine and back on the first."""
    saver, reader = stack.names[0], stack.names[1]
    turns = converse(stack, case, [saver])
    prompts = stack.prompts(case.id)
    for i, turn in enumerate(turns):
        branch = prompts.extended(turn, f"branch/{i}", len(turn) + BRANCH_TOKENS)
        first, second = (reader, saver) if i % 2 else (saver, reader)
        with stack.phase(case.id, f"branch-{i}"):
            ask_cold(stack, first, branch, f"branch-{i}")
            stack.reset_local_cache(first)
            if not ask_native(stack, first, branch, f"{first}-{i}") or not ask_native(
                stack, second, branch, f"{second}-{i}"
            ):
                return


def collect_edges(stack: Stack, case: Case) -> None:
    """The shortest and the longest: less than a block, a shared prefix that ends inside the first block, maximum length."""
    saver, reader = stack.names[0], stack.names[1]
    block = stack.engines[saver].facts.block_tokens
    longest = min(stack.engines[name].facts.max_model_len for name in stack.names) - ANSWER_TOKENS
    prompts = stack.prompts(case.id)
    whole = prompts.fresh("longest", longest)
    asked = {
        "one-token": prompts.fresh("one", 1),
        "below-a-block": prompts.fresh("below", block - 1),
        "longest": whole,
        "parts-in-first-block": prompts.branched(whole, block // 2, "early", 3 * block),
        "parts-in-last-block": prompts.branched(whole, (longest - 1) // block * block + 1, "late"),
        "beginning": whole[: longest // 2 // block * block + block // 2],
    }
    for name, prompt in asked.items():
        with stack.phase(case.id, name):
            ask_cold(stack, saver, prompt, name)
            if not ask_native(stack, saver, prompt, f"saver-{name}") or not ask_native(
                stack, reader, prompt, f"reader-{name}"
            ):
                return


CONVERSATION = Conversation()


@gate_cases(CONVERSATION)
def test_conversation(run_case: Any, case: Case) -> None:
    run_case(CONVERSATION, case)
