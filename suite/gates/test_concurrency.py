"""Family P, concurrency: many requests with one prefix at once, beside prompts that only look like it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from fixtures.request import Request
from reports import records as r
from reports.history import History
from suite.contract import Case, Gate
from suite.gates import gate_cases
from suite.gates.arms import calibrate, settle_saves
from suite.gates.judging_concurrency import BURST, SAVING, burst_label, judge_burst
from suite.gates.judging_sequence import judge_sequence
from suite.gates.sequences import ask_cold
from suite.workload.prompts import Prompt

if TYPE_CHECKING:
    from fixtures.stack import Stack

SAME_AT_ONCE = 8
"""Requests with the very same prompt in one burst, half of them on each engine."""

PROMPT_TOKENS = 1003
"""31 whole blocks of 32 and a rest; one prefill chunk, so that cold and native answers have one shape."""

IN_A_ROW = 12

SAVER_FIRST_TOKEN_S = 30.0
"""Bound for the saver's first token; its prefill is computed by then, and its save is at most just begun."""


class Concurrent(Gate):
    """Claim: however many requests share a prefix at one moment, each is answered like a cold request, and none reuses
    more than the whole blocks it shares with some other.

    How it can lie: requests of one batch are handed each other's blocks; a block is read while its save is under way; a
    prompt that parts inside a block is taken for its neighbour; the burst was no burst.
    Oracle: cold answers under salts, within the floors measured under concurrency; cached tokens of every answer between
    what was surely there and what any order of saves and loads could give; sums of counters over the burst. Control:
    afterwards the reader, its own cache emptied, reads the prompt from the pool in full.
    Turns red: another request's block, a block too many, a load that is reported as finished before it is.
    """

    id = "P.concurrent"
    judges_lmcache = True
    version = 3
    claim = (
        "requests with one prefix at one moment, beside others, all get the cold answer and no block that is not theirs"
    )
    proof = ("foreign-block",)

    def cases(self) -> Iterable[Case]:
        for when in ("before-save", "during-save", "after-save"):
            # Two engines that save one prompt at once collide in the store now and then (docs/track-record.md): a race.
            yield Case(f"{self.id}.{when}", {"when": when})
        yield Case(f"{self.id}.in-a-row", {"when": "in-a-row"})

    def collect(self, stack: Stack, case: Case) -> None:
        calibrate(stack)
        if case.params["when"] == "in-a-row":
            collect_in_a_row(stack, case)
        else:
            collect_burst(stack, case)
        stack.scan_logs(case.id)

    def judge(self, history: History) -> r.Verdict:
        return (
            judge_sequence(self, history) if history.case.params["when"] == "in-a-row" else judge_burst(self, history)
        )


def canaries(stack: Stack, case: Case, same: Prompt) -> dict[str, Prompt]:
    """Prompts beside the shared one: strangers of other lengths, and siblings that part from it inside a block."""
    prompts = stack.prompts(case.id)
    block = stack.engines[stack.names[0]].facts.block_tokens
    return {
        "stranger-short": prompts.fresh("stranger/short", block + 1),
        "stranger": prompts.fresh("stranger/same-length", len(same)),
        "sibling-early": prompts.branched(same, 2 * block + block // 2, "early"),
        "sibling-late": prompts.branched(same, (len(same) - 1) // block * block - 1, "late"),
    }


def collect_burst(stack: Stack, case: Case) -> None:
    saver, reader = stack.names[0], stack.names[1]
    same = stack.prompts(case.id).fresh("same", PROMPT_TOKENS)
    others = canaries(stack, case, same)
    with stack.phase(case.id, "cold"):
        for name, prompt in {"same": same, **others}.items():
            ask_cold(stack, reader, prompt, name)
        settle_saves(stack)
    with stack.phase(case.id, BURST):
        requests = burst(stack, same, others)
        saving = _saving(stack, saver, same, case.params["when"])
        before = {name: stack.scrape(name, burst_label(name, "before")) for name in stack.names[:2]}
        answered = stack.send_all(requests, concurrency=len(requests))
        if saving is not None:
            answered.append(saving.result())
        for name in stack.names[:2]:
            booked = sum(len(o.prompt_token_ids) for o in answered if o.ok and o.engine == name and o.role != SAVING)
            stack.scrape_booked(name, before[name], burst_label(name, "after"), booked)
        settle_saves(stack)
    if not all(o.ok for o in answered):
        stack.dirty = True
        return
    with stack.phase(case.id, "control"):
        stack.reset_local_cache(reader)
        for role in ("ask/control", "again/control"):  # not saved again: the burst saved it
            stack.ask_measured(reader, same, role)


def _saving(stack: Stack, saver: str, same: Prompt, when: str) -> Any:
    """Bring the save where the burst must meet it: not begun, under way (its first token is out), or listed."""
    if when == "after-save":
        stack.save(saver, same, role="save/same")
    if when != "during-save":
        return None
    pending = stack.start(stack.request(saver, same, SAVING))
    pending.wait_first_token(SAVER_FIRST_TOKEN_S)
    return pending


def burst(stack: Stack, same: Prompt, others: dict[str, Prompt]) -> list[Request]:
    """The shared prompt on both engines in turn, a canary between every two of them."""
    left = list(others.items())
    requests = []
    for i in range(SAME_AT_ONCE):
        engine = stack.names[i % 2]
        requests.append(stack.request(engine, same, f"burst/same-{i}"))
        if i % 2 and left:
            name, prompt = left.pop(0)
            requests.append(stack.request(engine, prompt, f"burst/{name}"))
    return requests


def collect_in_a_row(stack: Stack, case: Case) -> None:
    """The same prompt again and again on the reader; every fourth time its own cache is emptied first."""
    saver, reader = stack.names[0], stack.names[1]
    prompt = stack.prompts(case.id).fresh("same", PROMPT_TOKENS)
    with stack.phase(case.id, "save"):
        ask_cold(stack, saver, prompt, "same")
        stack.save(saver, prompt, role="save/same")
    with stack.phase(case.id, "in-a-row"):
        for i in range(IN_A_ROW):
            if i % 4 == 0:
                stack.reset_local_cache(reader)
            if not stack.ask_measured(reader, prompt, f"ask/{i}").ok:
                stack.dirty = True
                return


CONCURRENT = Concurrent()


@gate_cases(CONCURRENT)
def test_concurrent(run_case: Any, case: Case) -> None:
    run_case(CONCURRENT, case)
