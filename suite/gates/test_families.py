"""Family P, model families: reuse is right whatever a model keeps of the tokens before."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from fixtures.errors import Untestable
from fixtures.installed import takes_argument, versions
from reports import records as r
from reports.history import History
from suite.checks.base import EXTERNAL, LOCAL
from suite.contract import Case, Gate
from suite.gates import gate_cases
from suite.gates.arms import calibrate, settle_saves, share_and_boundary
from suite.gates.judging import delta_of
from suite.gates.judging_arms import judge_arms

if TYPE_CHECKING:
    from fixtures.spec import StackSpec
    from fixtures.stack import Stack

RETENTION = "--prefix-cache-retention-interval"
"""vLLM's argument for how far apart the places are from which a window or a state can be taken up again; from 0.28 or so on the
default is 0, the end of each prompt alone (vllm-project/vllm#52216)."""


ALIGNED = ("--enable-prefix-caching", "--mamba-cache-mode", "align")
"""Prefixes of a model with states are cached where it is asked for, and states kept at ends of blocks of the attention's size. vLLM
0.25.1 and 0.26.0 do neither by default, and their connector refuses a state of one block a prompt."""


@dataclass(frozen=True)
class Family:
    """A case's stack: a tiny model and engine arguments; ``{block}`` stands for the block size of the spec."""

    model: str
    args: tuple[str, ...] = ()


WHOLE: dict[str, Family] = {
    "llama": Family("tiny-llama"),
    "multi-head": Family("tiny-mha"),
    "multi-query": Family("tiny-mqa"),
    "experts": Family("tiny-experts"),
    "latent": Family("tiny-latent"),
    "sliding-window": Family("tiny-window"),
    "interleaved": Family("tiny-interleaved"),
    "hybrid": Family("tiny-hybrid", ALIGNED),
    "interleaved-unified": Family("tiny-interleaved", ("--disable-hybrid-kv-cache-manager",)),
}
"""Case -> family. ``interleaved``: every other layer has a window of 512 tokens; ``hybrid``: every other layer is a short
convolution, which keeps a state; ``unified``: layers with a window keep every token, as if they had none."""

SHARED: dict[str, Family] = {
    "sliding-window": WHOLE["sliding-window"],
    "interleaved": WHOLE["interleaved"],
    "hybrid": WHOLE["hybrid"],
    "sliding-window-dense": Family("tiny-window", (RETENTION, "{block}")),
    "interleaved-dense": Family("tiny-interleaved", (RETENTION, "{block}")),
    "hybrid-dense": Family("tiny-hybrid", (*ALIGNED, RETENTION, "{block}")),
}
"""Case -> family. ``dense``: a window or a state can be taken up again at every block."""


MISCOMPUTED: dict[str, dict[str, str]] = {
    "tiny-latent": {"0.32.0": "8 to 13 nat"},
    "tiny-hybrid": {"0.32.0": "5 to 10 nat"},
}
"""Model -> releases whose CPU build answers it wrongly without any reuse, and how far its log probabilities are from those of
transformers and of the suite's own decoder, which agree to 0.0001 nat (docs/track-record.md). What is wrong already says nothing about reuse."""


def stack_of(base: StackSpec, family: Family) -> StackSpec:
    """The stack of a case. Raises Untestable where the installed release does not know one of its arguments, or where its
    CPU build computes the model wrongly by itself."""
    release = versions().get("vllm", "?")
    apart = MISCOMPUTED.get(family.model, {}).get(release)
    if base.platform == "cpu" and apart:
        raise Untestable(
            "right-answers",
            f"without any reuse, vLLM {release} on a CPU is {apart} from transformers on this model",
            "run on a GPU, or on another release",
        )
    block = str(base.engines[0].block_tokens)
    args = tuple(block if arg == "{block}" else arg for arg in family.args)
    for arg in args:
        if arg.startswith("--") and not takes_argument(arg):
            raise Untestable("engine-argument", f"vLLM {release} has no {arg}", "run on a release that has it")
    return base.with_all_engines(model=family.model, args=(*base.engines[0].args, *args))


class Families(Gate):
    """Claim: reuse is exact and right for every family of attention.

    How it can lie: layouts of keys and values differ by family (heads per group, windows, latent vectors, recurrent
    states), and a connector that copies whole blocks of one layout may copy half a block of another.
    Oracle: as P.boundary, with each family's own floors and planted blocks; the bytes that a hit must read, from what each
    family keeps. The long prompt is four windows long, so that most of its blocks lie outside.
    Turns red: a block copied in part, or into another place, for one layout alone.
    """

    id = "P.families"
    proof = ("foreign-block", "half-block")
    version = 4
    claim = "reuse is exact and answers are right for every family of attention that can be run here"
    may_be_refused = True

    def cases(self) -> Iterable[Case]:
        for name, family in WHOLE.items():
            yield Case(f"{self.id}.{name}", {"family": name, "model": family.model}, variant=name, core=False)

    def stack(self, base: StackSpec, case: Case) -> StackSpec:
        return stack_of(base, WHOLE[case.params["family"]])

    def collect(self, stack: Stack, case: Case) -> None:
        calibrate(stack, concurrent=False)
        share_and_boundary(stack, case.id)
        stack.scan_logs(case.id)

    def judge(self, history: History) -> r.Verdict:
        return judge_arms(self, history)


SHARED_TOKENS, PROMPT_TOKENS = 1000, 2000
"""Prompts of 2,000 tokens share their first 1,000, twice a window. Each goes on for about as long by itself: one that ended soon
behind the shared prefix would keep, as its own end, the very windows and states that are asked for."""

SIBLINGS = 3
"""Prompts that share the prefix before it is judged. The first cannot hit, and the second is what first shows an engine that
the prefix is shared at all (it may keep more of it from then on)."""


class SharedPrefix(Gate):
    """Claim: a prefix that prompts share is reused by another engine, however they go on behind it, in every family of attention.

    How it can lie: a model with windows or states can be taken up again only where somebody kept a window or a state, and
    where only ends of prompts are kept, a system prompt is nobody's prefix: repeated prompts hit, and a fleet that shares
    system prompts recomputes them each time.
    Oracle: the exact count of common whole blocks, and the cold answer. The engine that saved them is asked for them too, by a
    prompt of its own, so that the verdict tells a pool that holds less than its engine's cache from an engine that
    keeps nothing. Control: a whole prompt does hit.
    Turns red: a pool that keeps the end of each prompt alone.
    """

    id = "P.shared-prefix"
    version = 2
    proof = ("whole-prompts",)
    claim = "a prefix shared by prompts that part behind it is reused on another engine, whatever the model keeps of it"
    may_be_refused = True

    def cases(self) -> Iterable[Case]:
        for name, family in SHARED.items():
            variant = name if name.endswith("-dense") else ""
            yield Case(f"{self.id}.{name}", {"family": name, "model": family.model}, variant=variant, core=False)

    def stack(self, base: StackSpec, case: Case) -> StackSpec:
        return stack_of(base, SHARED[case.params["family"]])

    def collect(self, stack: Stack, case: Case) -> None:
        calibrate(stack, concurrent=False)
        saver, reader = stack.names[0], stack.names[1]
        block = stack.engines[saver].facts.block_tokens
        prompts = stack.prompts(case.id)
        shared = prompts.fresh("shared", SHARED_TOKENS)
        siblings = [prompts.extended(shared, f"sibling/{i}", PROMPT_TOKENS) for i in range(SIBLINGS)]
        probes = {name: prompts.extended(shared, f"probe/{name}", PROMPT_TOKENS) for name in (saver, reader)}
        with stack.phase(case.id, "save"):
            stack.save(saver, siblings[0], role="cold/control")
            for i, sibling in enumerate(siblings[1:]):
                stack.ask(saver, sibling, f"sibling/{i}")
            settle_saves(stack)
        with stack.phase(case.id, "shared"):
            stack.fact("divergent", {"at": SHARED_TOKENS, "common_tokens": SHARED_TOKENS // block * block})
            stack.ask_measured(saver, probes[saver], "native/divergent")
            stack.ask_measured(reader, probes[reader], "external/divergent")
            stack.ask_measured(saver, probes[reader], "cold/divergent", cache_salt=f"{case.id}.cold")
        with stack.phase(case.id, "control"):
            stack.reset_local_cache(reader)
            stack.ask_measured(saver, siblings[0], "native/control")
            stack.ask_measured(reader, siblings[0], "external/control")
        stack.scan_logs(case.id)

    def judge(self, history: History) -> r.Verdict:
        return judge_shared(self, history)


def judge_shared(gate: Gate, history: History) -> r.Verdict:
    """As any prompt through its arms; where the shared prefix was not reused, the verdict tells whose doing it is."""
    verdict = judge_arms(gate, history)
    arms = {o.role: o for o in history.observations() if o.role.endswith("/divergent")}
    fact = history.fact("divergent")
    if verdict.finding not in (r.FindingCode.ZERO_HITS, r.FindingCode.FEWER_HITS) or fact is None or len(arms) < 3:
        return verdict
    local = int((delta_of(history, arms["native/divergent"]) or {}).get(LOCAL, 0))
    external = int((delta_of(history, arms["external/divergent"]) or {}).get(EXTERNAL, 0))
    common = int(fact.value["common_tokens"])
    where = "the engine that saved the prefix" if local < common else "the pool"
    return msgspec.structs.replace(
        verdict,
        got=f"of {common} shared tokens the engine that saved them reuses {local}, another engine {external} from the pool",
        cause=(
            f"{where} has no place at which a window or a state can be taken up again at the end of the shared prefix: by"
            f" default only the end of each prompt is kept ({RETENTION} 0)"
        ),
        production="hit rates of repeated prompts are high, those of prompts that share a system prompt are zero",
    )


FAMILIES_GATE = Families()
SHARED_GATE = SharedPrefix()


@gate_cases(FAMILIES_GATE)
def test_families(run_case: Any, case: Case) -> None:
    run_case(FAMILIES_GATE, case)


@gate_cases(SHARED_GATE)
def test_shared_prefix(run_case: Any, case: Case) -> None:
    run_case(SHARED_GATE, case)
