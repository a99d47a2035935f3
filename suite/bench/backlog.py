"""What saves cost those who asked for none: a burst of long prompts, the blocks that are not listed yet, and bystanders meanwhile."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from reports import records as r
from reports.compare_runs import RESULTS
from reports.history import History
from suite.bench.sampler import remote_reader
from suite.checks import liveness, logs
from suite.checks.base import run, too_few
from suite.contract import Case, Gate, outcome_of
from suite.gates.arms import settle_saves
from suite.gates.judging import explanation, ordered, visible_findings
from suite.workload.summary import Spread

if TYPE_CHECKING:
    from fixtures.client import Pending
    from fixtures.spec import StackSpec
    from fixtures.stack import Stack

BURST, BYSTANDER = "burst", "bystander"
"""Roles of the requests."""

BURST_REQUESTS = 12
BURST_TOKENS = 2000
"""About 50 MB of the tiny model's KV in all: half a second and more over loopback TCP."""

BYSTANDER_TOKENS = 200
IDLE_ROUNDS = 12
"""Bystanders on each engine before the burst."""

SAMPLES = "backlog.samples"
"""Fact: ``{"block_tokens", "before": keys listed before the burst, "samples": [{"t_s", "answered", "listed"}]}``; ``answered``: requests of
any role answered since, in whole blocks of their prompts; ``listed``: keys that the store lists more than before, asked for right after ``t_s``."""

LEAST_SAMPLES = 5

LOOK_EVERY_S = 0.01

MOST_SENT = 2000
"""Bystanders after which nothing more is sent: a minute of them; the wait for the last blocks has its own bound."""


class Backlog(Gate):
    """Claim: after a burst of long prompts every saved block becomes visible in time, and no request fails meanwhile. How far saves lag
    behind the answers, and what a bystander waits meanwhile, is measured.

    How it can lie: saves go to the engine's own memory and lag behind nothing; bystanders are sent when all is over.
    Oracle: the store's own listing against the blocks of the prompts computed so far (their first token is there); the saver owns no memory of the pool, so that each
    block crosses the link; bystanders on both engines before, during and after the burst.
    Turns red: blocks that are never listed, a request that fails or hangs.
    """

    id = "B.backlog"
    version = 2
    claim = "after a burst of long prompts every block becomes visible in time, and no request fails meanwhile"
    proof = ()

    def cases(self) -> Iterable[Case]:
        yield Case(f"{self.id}.burst", {"requests": BURST_REQUESTS, "tokens": BURST_TOKENS})

    def stack(self, base: StackSpec, case: Case) -> StackSpec:
        return remote_reader(base)  # whose last engine gives no memory: what it saves has to go to another process

    def collect(self, stack: Stack, case: Case) -> None:
        burst = _Burst(stack, case)
        with stack.phase(case.id, "idle"):
            for i in range(IDLE_ROUNDS):
                for name in stack.names:
                    burst.bystander(name, f"idle/{i}")
            settle_saves(stack)
        with stack.phase(case.id, "burst"):
            burst.send()
            burst.watch()
        measured = measure(burst.observed, burst.seen())
        stack.fact(RESULTS, results(measured) if measured else [])
        stack.scan_logs(case.id)

    def judge(self, history: History) -> r.Verdict:
        observed = history.observations()
        fact = history.fact(SAMPLES)
        measured = measure(observed, fact.value) if fact is not None else None
        checks = {
            "liveness": lambda: liveness.check_liveness(observed),
            "visible": lambda: visible_findings(history),
            "pressure": lambda: _pressure(measured),
            "logs": lambda: logs.check_logs(history),
        }
        findings = ordered(run(checks))
        return self.verdict(
            history,
            outcome_of(findings),
            findings=findings,
            got=findings[0].message if findings or measured is None else measured.told(),
            wanted="all blocks listed in time, all requests answered; the rest is measured",
            numbers=measured.numbers() if measured else {},
            **explanation(history, findings),
        )


class _Burst:
    """Sends a case's requests and watches the store's listing. The saver is the engine without memory of its own in the pool."""

    def __init__(self, stack: Stack, case: Case) -> None:
        self.stack, self.case = stack, case
        self.saver = stack.names[-1]
        self.prompts = stack.prompts(case.id, self.saver)
        self.block_tokens = stack.engines[self.saver].facts.block_tokens
        self.tokens = min(int(case.params["tokens"]), stack.engines[self.saver].facts.max_model_len - 64)
        self.observed: list[r.Observation] = []
        self.samples: list[dict[str, float]] = []
        self.before = 0
        self._pending: list[Pending] = []
        self._answered = 0

    def bystander(self, engine: str, label: str) -> None:
        prompt = self.prompts.fresh(f"{label}/{engine}", BYSTANDER_TOKENS)
        self._answer(self.stack.ask(engine, prompt, BYSTANDER))

    def send(self) -> None:
        """All prompts at once, to one engine."""
        self.before = self.stack.key_count()
        self._answered = 0
        for i in range(int(self.case.params["requests"])):
            prompt = self.prompts.fresh(f"burst/{i}", self.tokens)
            self._pending.append(self.stack.start(self.stack.request(self.saver, prompt, BURST)))

    def watch(self) -> None:
        """A bystander under way on each engine, and looks at the listing, until the burst is answered and listed; then the wait
        that says whether it all was. A bystander of the saver waits behind the burst: looks must not wait with it."""
        meanwhile: dict[str, Pending] = {}
        sent = 0
        while self._pending or not self._listed():
            for name in self.stack.names:
                if name not in meanwhile and sent < MOST_SENT:
                    prompt = self.prompts.fresh(f"meanwhile/{sent}", BYSTANDER_TOKENS)
                    meanwhile[name] = self.stack.start(self.stack.request(name, prompt, BYSTANDER))
                    sent += 1
            self._collect(meanwhile)
            self._sample()
            if not self._pending and sent >= MOST_SENT:
                break
            time.sleep(LOOK_EVERY_S)  # why: looks at a fixed rate; looking without a pause takes the engines' cores
        for pending in meanwhile.values():
            self._answer(pending.result())
        self.stack.wait_keys(self.before + self._answered, f"visible:{self.case.id}")
        self._sample()
        self.stack.fact(SAMPLES, self.seen())

    def _collect(self, meanwhile: dict[str, Pending]) -> None:
        """Take in what has been answered."""
        for pending in [p for p in self._pending if p.done()]:
            self._pending.remove(pending)
            self._answer(pending.result())
        for name in [name for name, p in meanwhile.items() if p.done()]:
            self._answer(meanwhile.pop(name).result())

    def seen(self) -> dict[str, Any]:
        """The fact's value."""
        return {"block_tokens": self.block_tokens, "before": self.before, "samples": self.samples}

    def _answer(self, observation: r.Observation) -> None:
        self.observed.append(observation)
        if observation.ok:
            self._answered += len(observation.prompt_token_ids) // self.block_tokens

    def _sample(self) -> None:
        answered, at_s = self._answered, time.monotonic()
        listed = self.stack.key_count()  # asked for after that moment: what is missing was late then
        self.samples.append({"t_s": at_s, "answered": answered, "listed": listed - self.before})

    def _listed(self) -> bool:
        return bool(self.samples) and self.samples[-1]["listed"] >= self.samples[-1]["answered"]


@dataclass(frozen=True)
class Measured:
    """Times in seconds. ``bystanders_s``: window -> engine's place (``saver``, ``other``) -> TTFTs; windows: ``idle``; ``computing``: a burst
    prompt is not answered yet; ``lagging``: all are, and not all of their blocks are listed."""

    requests: int
    samples: int
    backlog_blocks: int
    drain_s: float
    bystanders_s: dict[str, dict[str, list[float]]]

    def told(self) -> str:
        """One line."""
        idle, lagging = self.bystanders_s["idle"]["saver"], self.bystanders_s["lagging"]["saver"]
        meanwhile = f", {1000 * median(lagging):.0f} ms while saves lagged" if lagging else ""
        return (
            f"saves were up to {self.backlog_blocks} blocks behind what was computed, and the last was listed {self.drain_s:.2f} s after the"
            f" last answer; a bystander's first token took {1000 * median(idle):.0f} ms idle{meanwhile}"
        )

    def numbers(self) -> dict[str, Any]:
        """For the verdict; TTFTs in ms."""
        spread = {
            f"{window}/{place}": {"count": found.count, "p50": round(found.p50, 1), "p90": round(found.p90, 1)}
            for window, places in self.bystanders_s.items()
            for place, values in places.items()
            if (found := Spread.of(values)) is not None
        }
        return {
            "requests": self.requests,
            "backlog_blocks": self.backlog_blocks,
            "drain_s": round(self.drain_s, 3),
            "bystander_ttft_ms": spread,
        }


def measure(observed: Sequence[r.Observation], seen: dict[str, Any]) -> Measured | None:
    """What the records say; None where the burst or one of the bystanders' idle times is missing."""
    burst = [o for o in observed if o.role == BURST and o.ok]
    bystanders = [o for o in observed if o.role == BYSTANDER and o.ttft_s is not None]
    samples = seen["samples"]
    if not burst or not samples:
        return None
    saver, begin_s, last_s = burst[0].engine, min(o.sent_s for o in burst), max(o.done_s for o in burst)
    windows: dict[str, dict[str, list[float]]] = {
        name: {"saver": [], "other": []} for name in ("idle", "computing", "lagging")
    }
    drained_s = next(
        (s["t_s"] for s in samples if s["t_s"] >= last_s and s["listed"] >= s["answered"]), samples[-1]["t_s"]
    )
    for o in bystanders:
        window = "idle" if o.sent_s < begin_s else "computing" if o.sent_s < last_s else "lagging"
        if o.sent_s < drained_s and o.ttft_s is not None:
            windows[window]["saver" if o.engine == saver else "other"].append(o.ttft_s)
    if not windows["idle"]["saver"]:
        return None
    saved = sorted(
        (o.first_token_s, len(o.prompt_token_ids) // seen["block_tokens"])
        for o in observed
        if o.ok and o.sent_s >= begin_s and o.first_token_s is not None
    )
    behind = max(sum(blocks for at_s, blocks in saved if at_s <= s["t_s"]) - int(s["listed"]) for s in samples)
    return Measured(len(burst), len(samples), max(0, behind), max(0.0, drained_s - last_s), windows)


def results(measured: Measured) -> list[dict[str, Any]]:
    """What ``reports compare`` reads."""
    found = [{"benchmark": "backlog/drain", "unit": "s", "better": "lower", "values": [measured.drain_s]}]
    for window, places in measured.bystanders_s.items():
        for place, values in places.items():
            if values:
                name = f"backlog/bystander/{window}/{place}"
                found.append({"benchmark": name, "unit": "s", "better": "lower", "values": [median(values)]})
    return found


def _pressure(measured: Measured | None) -> list[r.Finding]:
    if measured is None:
        return too_few("no burst, or nobody watched it")
    if measured.requests < BURST_REQUESTS or measured.samples < LEAST_SAMPLES:
        return too_few(f"{measured.requests} prompts answered, {measured.samples} looks at the store's listing")
    return []


BACKLOG = Backlog()
