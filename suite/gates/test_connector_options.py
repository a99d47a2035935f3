"""Family P, connector options: reuse is right under every setting the installed release offers."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from fixtures import telemetry
from fixtures.errors import Untestable
from fixtures.installed import versions
from reports import records as r
from reports.history import History
from suite.checks import faults
from suite.checks.base import finding
from suite.contract import Case, Gate, outcome_of
from suite.gates import gate_cases
from suite.gates.arms import SHARE_TOKENS, calibrate, reuse_arms, settle_saves, share_and_boundary
from suite.gates.judging_arms import judge_arms
from suite.gates.judging_sequence import judge_sequence, rules_of
from suite.gates.sequences import ask_cold

if TYPE_CHECKING:
    from fixtures.spec import StackSpec
    from fixtures.stack import Stack

CHUNK_TOKENS = 512
"""A prefill chunk far smaller than the hit of 1,984 tokens."""

MULTI = {
    "kv_connector": "MultiConnector",
    "kv_connector_extra_config": {
        "connectors": [{"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both"}],
    },
}

OPTIONS: dict[str, dict[str, Any]] = {
    "load-sync": {"kv_extra": {"load_async": False}},
    "lookup-async": {"kv_extra": {"lookup_async": True}},
    "save-decode": {"kv_extra": {"save_decode_cache": True}},
    "roles": {},
    "cache-off": {"prefix_caching": False},
    "cache-reset": {},
    "multi": {"kv_config": MULTI},
    "chunked": {"args": ("--max-num-batched-tokens", str(CHUNK_TOKENS))},
    "scheduling-async": {"args": ("--async-scheduling",)},
    "scheduling-sync": {"args": ("--no-async-scheduling",)},
    "speculative": {
        "args": (
            "--speculative-config",
            # One token to match: by default it takes several in a row, which prompts of random tokens hardly ever repeat.
            json.dumps(
                {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
            ),
        )
    },
}
"""Case -> changes of every engine's spec (vLLM 0.32.0: ``MooncakeStoreScheduler``, ``KVTransferConfig``, engine arguments)."""


UNKNOWN_TO = {"save-decode": ("0.26.0",)}
"""Case -> releases of vLLM that accept its option and read it nowhere (``mooncake/store/*.py``): a verdict would be one on the default."""


class Options(Gate):
    """Claim: loads and lookups that block or not, decode tokens that are saved, roles, engines without a prefix cache of their own or
    with one that was emptied, a connector inside MultiConnector, prefill chunks smaller than the hit, either way of
    scheduling, and speculation leave reuse exact and answers right.

    How it can lie: an option is spelled so that nothing changes; a path taken only under it is never entered.
    Oracle: as P.boundary, for one long prompt and around a block boundary; with saved decode tokens, the exact count
    over a next turn whose prefix holds them. Control: external hits in every case.
    Turns red: whatever turns P.boundary red, on a path that the defaults never take.
    """

    id = "P.options"
    proof = ("foreign-block",)
    version = 5
    claim = "under every option of the connector and the scheduler reuse stays exact and answers stay right"

    def cases(self) -> Iterable[Case]:
        for name in OPTIONS:
            yield Case(f"{self.id}.{name}", {"option": name}, variant=name, core=False)

    def stack(self, base: StackSpec, case: Case) -> StackSpec:
        if base.platform == "cpu" and case.params["option"].startswith("scheduling-"):
            # Either argument is accepted there, and neither changes anything: a verdict would be one on the default.
            raise Untestable(
                "asynchronous-scheduling",
                "vLLM's CPU platform always switches it off (vllm/platforms/cpu.py, 0.32.0)",
                "run on a GPU",
            )
        if versions().get("vllm", "") in UNKNOWN_TO.get(case.params["option"], ()):
            raise Untestable("connector-option", *_unknown(versions()["vllm"]))
        if case.params["option"] == "roles":
            first, second = base.engines[0].name, base.engines[1].name
            return base.with_engine(first, kv_role="kv_producer").with_engine(second, kv_role="kv_consumer")
        return base.with_all_engines(**OPTIONS[case.params["option"]])

    def collect(self, stack: Stack, case: Case) -> None:
        calibrate(stack, concurrent=False)
        speculates = case.params["option"] == "speculative"
        if speculates:
            note_drafts(stack, "before")
        if case.params["option"] == "save-decode":
            collect_decode(stack, case)
        elif case.params["option"] == "cache-reset":
            collect_reset(stack, case)
        else:
            share_and_boundary(stack, case.id)
        if speculates:
            note_drafts(stack, "after")
        stack.scan_logs(case.id)

    def judge(self, history: History) -> r.Verdict:
        option = history.case.params["option"]
        release = history.stack.engines[0].versions.get("vllm", "") if history.stack else ""
        if release in UNKNOWN_TO.get(option, ()):
            text, wanted = _unknown(release)
            missing = finding(r.FindingCode.MISSING_CAPABILITY, text)
            return self.verdict(history, outcome_of([missing]), findings=(missing,), got=text, wanted=wanted)
        if option == "save-decode":
            return judge_sequence(self, history, rules=rules_of(history, saves_outputs=True))
        return judge_arms(self, history, extra=check_drafts(history) if option == "speculative" else ())


DRAFTED = "vllm:spec_decode_num_draft_tokens_total"
"""Counter of tokens that speculation proposed (vLLM 0.26 to 0.32); declared only where speculation is on."""


def note_drafts(stack: Stack, when: str) -> None:
    """Record how many tokens each engine's speculation has proposed so far: the fact ``drafted.<when>``, None where it has none."""
    stack.fact(
        f"drafted.{when}",
        {name: telemetry.read_counter(stack.engines[name].facts.url, DRAFTED) for name in stack.names},
    )


def check_drafts(history: History) -> list[r.Finding]:
    """Every engine's speculation proposed tokens in the case: answers without it say nothing about it."""
    facts = [history.fact(f"drafted.{when}") for when in ("before", "after")]
    before, after = (fact.value if fact is not None else {} for fact in facts)
    proposed = {name: (after[name] or 0) - (before.get(name) or 0) for name in after}
    return faults.no_pressure("tokens proposed by speculation", min(proposed.values(), default=0), 1)


def _unknown(release: str) -> tuple[str, str]:
    """What was seen, and the mend."""
    return f"vLLM {release} takes this option of the connector and reads it nowhere", "run on a release that knows it"


def collect_reset(stack: Stack, case: Case) -> None:
    """A prompt through its arms; then each engine's own cache is emptied, and the prompt is read from the pool again, twice."""
    saver, reader = stack.names[0], stack.names[1]
    prompt = stack.prompts(case.id).fresh("prompt", SHARE_TOKENS)
    if not reuse_arms(stack, case.id, prompt, saver, reader):
        return
    for i, engine in enumerate((reader, reader, saver)):
        with stack.phase(case.id, f"reset/{i}"):
            stack.reset_local_cache(engine)
            stack.ask_measured(engine, prompt, f"external/reset/{i}")


DECODED_TOKENS = 75
"""Two whole blocks and more, so that blocks of generated tokens alone are saved."""


def collect_decode(stack: Stack, case: Case) -> None:
    """A long answer on one engine; the next turn, which holds it, on the other."""
    saver, reader = stack.names[0], stack.names[1]
    block = stack.engines[saver].facts.block_tokens
    prompts = stack.prompts(case.id)
    first = prompts.fresh("first", 4 * block + block // 2)
    with stack.phase(case.id, "first"):
        answer = stack.save(saver, first, role="ask/first", max_tokens=DECODED_TOKENS)
        settle_saves(stack)  # blocks of generated tokens are nobody's new blocks, so nobody waited for them
    turn = prompts.extended(first + answer.output_token_ids, "next", len(first) + DECODED_TOKENS + block + 7)
    with stack.phase(case.id, "next"):
        stack.ask_measured(reader, turn, "ask/next")
        stack.ask_measured(reader, turn, "again/next")
        settle_saves(stack)
    with stack.phase(case.id, "cold"):
        ask_cold(stack, saver, turn, "next")
        settle_saves(stack)
    with stack.phase(case.id, "back"):
        stack.reset_local_cache(saver)
        stack.ask_measured(saver, turn, "ask/back")


OPTIONS_GATE = Options()


@gate_cases(OPTIONS_GATE)
def test_options(run_case: Any, case: Case) -> None:
    run_case(OPTIONS_GATE, case)
