"""``python -m suite.bench.interleave OUT``: runs of two sides whose requests alternate, for ``python -m reports compare OUT/A OUT/B``.

Both sides are engines of one stack (the same one by default: A/A). Each session makes one run a side: cold prompts of one length in
blocks A B B A, every request through a proxy of its side. ``--slow 0.1`` makes side B's proxy hold each request up for a
tenth of the median TTFT: the proof that a slow-down of that size is found on this machine with so many blocks.
"""

from __future__ import annotations

import argparse
import contextlib
import secrets
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from fixtures.errors import HarnessError, UsageError
from fixtures.request import Target
from reports import records as r
from reports.compare_runs import RESULTS
from reports.evidence import EvidenceWriter
from suite.bench.delay_proxy import DelayProxy, running
from suite.bench.interleaved import CASE, INTERLEAVED, role_of
from suite.bench.sampler import ANSWER_TOKENS
from suite.bench.statistics import order
from suite.contract import safe_judge
from suite.workload.arguments import Parser, at_least, run_command, tell

if TYPE_CHECKING:
    from fixtures.stack import Stack

SIDES = ("A", "B")
WARM_UP = 8
"""Requests a side before anything counts; their median is what ``--slow`` is a part of."""


@dataclass
class Recorder:
    """Where records of the stack go: kept until there is a run, then to the side whose turn it is."""

    kept: list[r.Record] = field(default_factory=list)
    writer: EvidenceWriter | None = None

    def __call__(self, record: r.Record) -> None:
        if self.writer is None:
            self.kept.append(record)
        else:
            self.writer.write(record)


@dataclass(frozen=True)
class Plan:
    """What is to be done."""

    out: Path
    tokens: int
    sessions: int
    blocks: int
    slow: float
    engines: tuple[str, str]


class Interleaving:
    """Runs of both sides on one stack."""

    def __init__(self, stack: Stack, plan: Plan, recorder: Recorder, proxies: dict[str, DelayProxy]) -> None:
        self.stack = stack
        self.plan = plan
        self.recorder = recorder
        self.proxies = proxies
        self.engine = dict(zip(SIDES, plan.engines, strict=True))
        self._before: dict[str, r.MetricsSnapshot] = {}
        self.prompts = stack.prompts(f"interleave/{plan.out.name}/{plan.slow}", plan.engines[0])
        for side in SIDES:
            served = stack.engines[self.engine[side]].facts.served_model
            stack.client.set_target(self._target(side), Target(proxies[side].url, served))

    def _target(self, side: str) -> str:
        return f"{self.engine[side]}@{side}"

    def ask(self, side: str, label: str, role: str) -> r.Observation:
        """A cold request of a side."""
        prompt = self.prompts.fresh(label, self.plan.tokens)
        return self.stack.ask(self._target(side), prompt, role, logprobs=None, max_tokens=ANSWER_TOKENS)

    def warm_up(self) -> float:
        """Requests that do not count; the median TTFT of side A in seconds."""
        times: list[float] = []
        for number in range(WARM_UP):
            for side in SIDES:
                seen = self.ask(side, f"warm-up/{side}/{number}", "warm-up").ttft_s
                if seen is None:
                    raise HarnessError("a warm-up request was not answered")
                if side == "A":
                    times.append(seen)
        return median(times[WARM_UP // 2 :])

    def session(self, number: int) -> None:
        """One run a side, in turns."""
        writers = {side: EvidenceWriter(self.plan.out / side / f"run-{number}") for side in SIDES}
        try:
            self._begin(writers, number)
            for block in range(self.plan.blocks):
                for place, side in enumerate(order(SIDES, block)):
                    self.recorder.writer = writers[side]
                    self.ask(side, f"{number}/{block}/{place}", role_of(block))
            self._end(writers, f"{self.stack.stack_id}-{number}-{secrets.token_hex(4)}")
        finally:
            self.recorder.writer = None
            for writer in writers.values():
                writer.close()

    def _begin(self, writers: dict[str, EvidenceWriter], number: int) -> None:
        from fixtures.pytest_support.run import SUITE_VERSION, host_facts  # why here: it loads pytest

        for side, writer in writers.items():
            self.recorder.writer = writer
            writer.write(
                r.RunStarted(
                    run_id=f"{side}-{number}",
                    suite_version=SUITE_VERSION,
                    wall_s=time.time(),
                    t_s=time.monotonic(),
                    worker="main",
                    host=host_facts(),
                    options={"interleaved": True, "engine": self.engine[side], "delay_s": self.proxies[side].delay_s},
                )
            )
            for record in self.recorder.kept:
                if isinstance(record, r.StackUp):
                    writer.write(record)
            writer.write(
                r.CaseStarted(
                    case_id=CASE,
                    gate=INTERLEAVED.id,
                    gate_version=INTERLEAVED.version,
                    claim=INTERLEAVED.claim,
                    params={"tokens": self.plan.tokens, "blocks": self.plan.blocks},
                    stack_id=self.stack.stack_id,
                    t_s=time.monotonic(),
                )
            )
            self._before[self.engine[side]] = self.stack.scrape(self.engine[side], "before")

    def _end(self, writers: dict[str, EvidenceWriter], interleaving: str) -> None:
        good = [INTERLEAVED.blocks(w.history().for_case(CASE)) for w in writers.values()]
        for side, writer in writers.items():
            self.recorder.writer = writer
            self.stack.scrape_booked(self.engine[side], self._before[self.engine[side]], "after", self._sent(side))
            blocks = INTERLEAVED.blocks(writer.history().for_case(CASE))
            both = [b for b in blocks if all(b in side_blocks for side_blocks in good)]
            series = {
                "benchmark": f"ttft/cold/{self.plan.tokens}",
                "unit": "s",
                "better": "lower",
                "values": [blocks[b] for b in both],
                "blocks": both,
                "interleaved": interleaving,
            }
            self.stack.fact(RESULTS, [series])
            writer.write(r.CaseFinished(case_id=CASE, t_s=time.monotonic()))
            writer.write(safe_judge(INTERLEAVED, writer.history().for_case(CASE)))
            writer.write(r.RunFinished(t_s=time.monotonic(), exit_code=0))

    def _sent(self, side: str) -> int:
        """Prompt tokens that a session sends to a side's engine: of both sides where that is one engine."""
        sides = sum(name == self.engine[side] for name in self.engine.values())
        return 2 * self.plan.blocks * self.plan.tokens * sides


def make(stack: Stack, plan: Plan, recorder: Recorder) -> None:
    """All sessions on a stack that is up."""
    with contextlib.ExitStack() as cleanup:
        proxies = {
            side: cleanup.enter_context(running(DelayProxy(stack.engines[name].url, 0.0)))
            for side, name in zip(SIDES, plan.engines, strict=True)
        }
        work = Interleaving(stack, plan, recorder, proxies)
        with stack.phase(CASE, "warm-up"):
            typical_s = work.warm_up()
        proxies["B"].delay_s = plan.slow * typical_s
        tell(
            f"median TTFT {typical_s * 1000:.1f} ms; side B is held up for {proxies['B'].delay_s * 1000:.1f} ms a request"
        )
        with stack.phase(CASE, "blocks"):
            for number in range(1, plan.sessions + 1):
                work.session(number)
                tell(f"session {number} of {plan.sessions}: {plan.blocks} blocks")


def main(argv: Sequence[str] | None = None) -> int:
    """Bring a stack up, make the runs, stop it. Exit code 0; 4 for bad usage; 12 when the stack did not come up or answer."""
    parser = Parser(prog="python -m suite.bench.interleave", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("out", type=Path, metavar="OUT", help="new folder; runs go to OUT/A and OUT/B")
    parser.add_argument("--stack", default="native", metavar="FILE", help="stack spec (default: native)")
    parser.add_argument("--engines", default="e0,e0", metavar="A,B", help="engine of each side (default: e0,e0)")
    parser.add_argument("--tokens", type=at_least(1), default=1000, help="of each prompt (default: 1000)")
    parser.add_argument("--sessions", type=at_least(1), default=3, help="runs a side (default: 3)")
    parser.add_argument("--blocks", type=at_least(1), default=40, help="of a session (default: 40)")
    parser.add_argument(
        "--slow", type=at_least(0, float), nargs="+", default=[0.0], metavar="PART",
        help="part by which side B is slowed down; several: one after another on one stack, in OUT/slow-PART",
    )  # fmt: skip
    return run_command(parser, argv, _interleave)


def _interleave(options: argparse.Namespace) -> None:
    plans = _plans(options)
    _run(plans, options.stack)
    for plan in plans:
        tell(f"compare them: python -m reports compare {plan.out / 'A'} {plan.out / 'B'}")


def _plans(options: argparse.Namespace) -> list[Plan]:
    names = options.engines.split(",")
    if len(names) != 2:
        raise UsageError(f"--engines {options.engines}: give two names with a comma, e.g. e0,e1")
    if options.out.exists() and any(options.out.iterdir()):
        raise UsageError(f"{options.out}: is not empty; give a new folder")
    several = len(options.slow) > 1
    return [
        Plan(
            options.out / f"slow-{slow:g}" if several else options.out,
            options.tokens,
            options.sessions,
            options.blocks,
            slow,
            (names[0], names[1]),
        )
        for slow in options.slow
    ]


def _run(plans: list[Plan], stack: str) -> None:
    from fixtures.progress import open_progress  # why here: a usage error needs no stack
    from fixtures.spec import load_spec
    from fixtures.stack_pool import StackPool

    spec = load_spec(stack)
    names = [engine.name for engine in spec.engines]
    if absent := [name for name in plans[0].engines if name not in names]:
        raise UsageError(f"--engines {absent[0]}: the stack has {', '.join(names)}")
    count = 1 + max(names.index(name) for name in plans[0].engines)
    recorder = Recorder()
    progress = open_progress(prefix="")
    pool = StackPool(plans[0].out / "stack", recorder, progress)
    try:
        running_stack = pool.acquire(spec.with_engine_count(count))
        for plan in plans:
            make(running_stack, plan, recorder)
    finally:
        pool.close()
        progress.close()


if __name__ == "__main__":
    sys.exit(main())
