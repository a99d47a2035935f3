"""Family P, sampled requests: reuse changes nothing of what a request with temperature, seed, n, logprobs or chat returns."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from reports import records as r
from reports.history import History
from suite.contract import Case, Gate
from suite.gates import gate_cases
from suite.gates.arms import calibrate, settle_saves
from suite.gates.judging_sampled import judge_sampled
from suite.workload.prompts import PromptMaker

if TYPE_CHECKING:
    from fixtures.stack import Stack

PROMPT_TOKENS = 1000
"""One prefill chunk: cold and native answers have one shape where the engine is deterministic at all."""

SEEDED = {"temperature": 0.8, "extra": {"seed": 11, "top_p": 0.95}}

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Looks a word up.",
            "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
        },
    }
]

OPTIONS: dict[str, dict[str, Any]] = {
    "seeded": SEEDED,
    "several": SEEDED | {"extra": {**SEEDED["extra"], "n": 3}},  # type: ignore[dict-item]
    "whole": SEEDED | {"stream": False},
    "prompt-logprobs": {"stream": False, "extra": {"prompt_logprobs": 2}},
    "chat": SEEDED | {"endpoint": "chat"},
    "tools": SEEDED
    | {"endpoint": "chat", "stream": False, "extra": {**SEEDED["extra"], "tools": TOOLS, "tool_choice": "none"}},  # type: ignore[dict-item]
}
"""Case -> fields of its requests (``fixtures.request.Request``)."""


class Sampled(Gate):
    """Claim: a request with temperature and seed, several choices, log probabilities of the prompt, or messages and tools
    returns the same from the pool as from the engine's own cache.

    How it can lie: such requests never touch the pool; greedy answers hide small differences that sampling shows; only
    the first of several choices reads the blocks that it should; a path of the API drops what it cannot reuse.
    Oracle: external against native of equal cached length, every choice, every step, sampled tokens included, within the
    native floor; the first step's distribution against the cold one. Exact external tokens; log probabilities of a prompt
    are never reused, so those requests must get no hit at all. Control: the prompt is read from the pool in full.
    Turns red: another request's block, a block too many, choices that share one another's blocks.
    """

    id = "P.sampled"
    judges_lmcache = True
    version = 3
    claim = (
        "sampled, multiple, non-streamed and chat requests return the same from the pool as from the engine's own cache"
    )
    proof = ("foreign-block",)

    def cases(self) -> Iterable[Case]:
        for name in OPTIONS:
            yield Case(f"{self.id}.{name}", {"options": name})

    def collect(self, stack: Stack, case: Case) -> None:
        calibrate(stack)
        saver, reader = stack.names[0], stack.names[1]
        fields = dict(OPTIONS[case.params["options"]])
        prompts = stack.prompts(case.id)
        prompt = prompts.fresh("x", PROMPT_TOKENS)
        if fields.get("endpoint") == "chat":
            fields["extra"] = {**fields["extra"], "messages": messages(prompts, tools="tools" in fields["extra"])}
            with stack.phase(case.id, "template"):  # what the messages become is the server's own answer
                told = stack.save(saver, (), role="template", cache_salt=f"{case.id}.template", **fields)
                settle_saves(stack)
            prompt = told.prompt_token_ids
        with stack.phase(case.id, "save"):
            stack.save(saver, prompt, role="cold", **fields)
        with stack.phase(case.id, "native"):
            stack.ask_measured(saver, prompt, "native", **fields)
        with stack.phase(case.id, "external"):
            answered = stack.ask_measured(reader, prompt, "external", **fields).ok
            if answered:
                stack.ask_measured(reader, prompt, "native-2", **fields)
        with stack.phase(case.id, "control"):
            stack.reset_local_cache(reader)
            stack.ask_measured(reader, prompt, "control")
        stack.dirty = stack.dirty or not answered
        stack.scan_logs(case.id)

    def judge(self, history: History) -> r.Verdict:
        return judge_sampled(self, history)


def messages(prompts: PromptMaker, *, tools: bool) -> list[dict[str, Any]]:
    """A transcript whose first message is fresh text; with ``tools``, one call and its result are part of it."""

    def words(label: str, letters: int) -> str:
        return "".join(chr(ord("a") + token % 26) for token in prompts.fresh(label, letters))

    call = {"id": "call-1", "type": "function", "function": {"name": "look_up", "arguments": '{"word": "prefix"}'}}
    called = [
        {"role": "assistant", "content": words("assistant", 90), "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call-1", "content": words("result", 200)},
    ]
    return [
        {"role": "user", "content": words("user", 700)},
        *(called if tools else [{"role": "assistant", "content": words("assistant", 200)}]),
        {"role": "user", "content": words("more", 151)},
    ]


SAMPLED = Sampled()


@gate_cases(SAMPLED)
def test_sampled(run_case: Any, case: Case) -> None:
    run_case(SAMPLED, case)
