"""Time to first token from an engine's own tier of host memory, beside cold and native: vLLM's KV offloading, or LMCache; no pool."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from fixtures.errors import Untestable
from reports import records as r
from reports.history import History
from suite.bench.break_even import BreakEven
from suite.bench.sampler import ANSWER_TOKENS, GIVE_UP_AFTER, Sampler
from suite.bench.ttft import Ttft, accounting, fitting, long_cases
from suite.contract import Case

if TYPE_CHECKING:
    from fixtures.spec import StackSpec
    from fixtures.stack import Stack

IDLE_BOUND_S = 1.0
"""Until an engine holds no KV block any more: what is copied into the tier is held meanwhile. A prompt of 32,768 tokens of an 8B
shape is 4.3 GB, some tenths of a second over PCIe."""


class TierSampler(Sampler):
    """Blocks whose ``external`` prompts lie in the tier: sent once, then thrown out of the engine's own cache by a reset, which
    leaves the tier alone. Whether it did is seen by the counters around the timed request, never by the reset's answer."""

    def warm_up(self) -> None:
        """Requests of this length from every source, that are not measured."""
        with self.stack.phase(self.case_id, "warm-up"):
            for number in range(2):
                prompt = self.prompts.fresh(f"warm-up/{number}", self.tokens)
                for _ in range(2):
                    self._fill(prompt, "warm-up")
                self._reset()
                self._fill(prompt, "warm-up")

    def prepare(self, first: int) -> None:
        """Send the tier's prompts of one block."""
        with self.stack.phase(self.case_id, "prepare"):
            for place in range(2):
                self._fill(self.prompt("external", first, place), f"save/b{first}/{place}")
        self._prepared = first + 1

    def ready(self, arm: str, block: int, place: int) -> None:
        """A native prompt is sent once more (each reset threw it out), an external one is thrown out of the engine's own cache."""
        if arm == "native":
            self._fill(self.prompt("native", block, place), f"fill/b{block}/{place}")
        if arm == "external":
            self._reset()
        else:
            self._idle()  # what was sent last is on its way into the tier: not while the next one is timed

    def _fill(self, prompt: tuple[int, ...], role: str) -> None:
        if self.unanswered < GIVE_UP_AFTER:
            seen = self.stack.ask(self.reader, prompt, role, logprobs=None, max_tokens=ANSWER_TOKENS)
            self.unanswered += not seen.ok

    def _reset(self) -> None:
        self._idle()
        self.stack.reset_local_cache(self.reader)

    def _idle(self) -> None:
        """Wait until no request runs and no block is held."""

        def idle() -> bool:
            values = self.stack.scrape(self.reader, "idle").values
            return not any(values.get(name) for name in ("running", "waiting", "kv_usage_ratio"))

        self.stack.wait(
            "no block to be held",
            idle,
            bound_s=IDLE_BOUND_S,
            bound_source="suite.bench.offload.IDLE_BOUND_S",
            poll_s=0.05,
        )


class OffloadTtft(Ttft):
    """Claim: at a prompt length, the first token of a prompt that only the engine's tier of host memory holds comes no later than
    the given part of the time that computing it takes. Where the platform has no such threshold the three arms are measured.

    How it can lie: the tier's prompt is still in the engine's own cache (a reset that did nothing); the copy of the prompt
    before runs while the next one is timed; one arm is measured while the machine is busy.
    Oracle: counters around every request give its state, blocks in any other state are thrown out and counted; a timed request is
    sent when no block is held; arms are interleaved there and back; the interval of the ratio holds at every look.
    Turns red: a tier that is slower than the threshold, one that gives no hits or part of them, failed requests.
    """

    id = "B.offload"
    judges_lmcache = True
    claim = "the first token of a prompt from the tier in host memory comes within the threshold's part of the time that a cold one takes"
    needs_pool = False
    min_engines = 1

    def cases(self) -> Iterable[Case]:
        return long_cases(self.id)

    def stack(self, base: StackSpec, case: Case) -> StackSpec:
        return fitting(offloading(base), case)

    def begin(self, stack: Stack, case: Case, tokens: int) -> Sampler:
        return TierSampler(stack, case.id, tokens)

    def own_checks(self, history: History) -> dict[str, Callable[[], list[r.Finding]]]:
        return {"accounting": lambda: accounting(history, pooled=False)}


class OffloadBreakEven(BreakEven):
    """Claim: the prompt length from which the tier in host memory answers sooner than computing anew is known, with an interval.

    How it can lie: as B.break-even does.
    Oracle: that of B.break-even, over the blocks of B.offload.
    Turns red: (inconclusive) what turns B.break-even red.
    """

    id = "B.offload-break-even"
    judges_lmcache = True
    claim = (
        "the prompt length from which the tier in host memory answers sooner than computing is known within an interval"
    )
    needs_pool = False
    min_engines = 1
    source = "B.offload"

    def stack(self, base: StackSpec, case: Case) -> StackSpec:
        return offloading(base)


def offloading(base: StackSpec) -> StackSpec:
    """The stack, where its last engine offloads to host memory and to nothing else. Raises Untestable."""
    connector = base.engines[-1].connector
    if connector not in ("cpu-offload", "lmcache"):
        raise Untestable(
            "cpu-offload",
            f"the connector of {base.name!r} is {connector!r}",
            "give a stack that offloads to host memory, e.g. --stack cpu-offload or lmcache",
        )
    return base


OFFLOAD = OffloadTtft()
OFFLOAD_BREAK_EVEN = OffloadBreakEven()
