"""Time to first token of a prompt that is cold, in the engine's own cache, or only in the pool; and from what length a pool pays.

All requests of a block go to one engine, the *reader*. It gives the pool no memory (``EngineSpec.contributes``), so every block that
it reads lies in another process and crosses the transport. Blocks are prepared ahead, a few at a time: external prompts are
saved by the *saver* and wait until the store lists them; native prompts are sent to the reader once. Every prompt is new.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from reports import records as r
from reports.history import History
from suite.bench import thresholds
from suite.bench.blocks import ARMS, Blocks, lengths, percentile_ms, read_blocks, role_of
from suite.bench.statistics import METHOD, Decision, decide, fewest_blocks, order, sample
from suite.checks import conservation, liveness, logs
from suite.checks.base import finding, run, too_few
from suite.contract import Case, Gate, outcome_of
from suite.gates.arms import settle_saves
from suite.gates.judging import delta_of, explanation, ordered, visible_findings
from suite.gates.oracle import calibration_records

if TYPE_CHECKING:
    from fixtures.spec import StackSpec
    from fixtures.stack import Stack
    from suite.workload.prompts import Prompt, PromptMaker

PREPARED = 4
"""Blocks prepared at a time: settling of saves is waited for once for all of them."""

ANSWER_TOKENS = 2
"""Of a timed request. Never 1: the tested release does not save a prompt whose request ends with its first token."""

GIVE_UP_AFTER = 2

JUDGED_FROM_TOKENS = 2000
"""Shorter prompts are measured, for the break-even length, and never judged: no pool can beat computing a block or two."""

SEGMENTS = "pool"
"""Label of the store's listing and of the socket list that say whose memory the pool is."""

RESULTS = "bench.results"
"""Fact: what ``reports compare`` reads; a list of {benchmark, unit, better, values}; ``blocks`` and ``interleaved`` where values are paired."""


def remote_reader(base: StackSpec) -> StackSpec:
    """The stack of these gates: its last engine reads, and gives the pool no memory."""
    if base.store is None or len(base.engines) < 2:
        return base
    return base.with_engine(base.engines[-1].name, contributes=False)


class Sampler:
    """Sends blocks of one prompt length."""

    def __init__(self, stack: Stack, case_id: str, tokens: int) -> None:
        self.stack = stack
        self.case_id = case_id
        self.tokens = tokens
        self.saver, self.reader = stack.names[0], stack.names[-1]
        self.block_tokens = stack.engines[self.reader].facts.block_tokens
        self.prompts: PromptMaker = stack.prompts(case_id, self.reader)
        self.records: list[r.Record] = []
        self.unanswered = 0
        """Requests without a whole answer. From ``GIVE_UP_AFTER`` on nothing more is sent: each would wait for its deadline."""
        self._prepared = 0

    def prompt(self, arm: str, block: int, place: int) -> Prompt:
        """The prompt of one request: new, and the same each time it is asked for."""
        return self.prompts.fresh(role_of(arm, self.tokens, block, place), self.tokens)

    def warm_up(self) -> None:
        """Requests of this length and of these options, on both engines and from the pool, that are not measured."""
        with self.stack.phase(self.case_id, "warm-up"):
            for number in range(2):
                prompt = self.prompts.fresh(f"warm-up/{number}", self.tokens)
                self.stack.save(self.saver, prompt, role="warm-up", logprobs=None, max_tokens=ANSWER_TOKENS)
                for _ in range(2):
                    self.stack.ask(self.reader, prompt, "warm-up", logprobs=None, max_tokens=ANSWER_TOKENS)

    def prepare(self, first: int) -> None:
        """Bring the prompts of the next blocks into their state."""
        with self.stack.phase(self.case_id, "prepare"):
            settle_saves(self.stack)
            for block in range(first, first + PREPARED):
                for place in range(2):
                    if self.unanswered < GIVE_UP_AFTER:
                        self._prepare(block, place)
            settle_saves(self.stack)
        self._prepared = first + PREPARED

    def _prepare(self, block: int, place: int) -> None:
        tag = f"b{block}/{place}"
        external, native = self.prompt("external", block, place), self.prompt("native", block, place)
        saved = self.stack.save(self.saver, external, role=f"save/{tag}", logprobs=None)
        filled = self.stack.ask(self.reader, native, f"fill/{tag}", logprobs=None, max_tokens=ANSWER_TOKENS)
        self.unanswered += (not saved.ok) + (not filled.ok)

    def take(self, block: int) -> float | None:
        """Send one block; its log(external / cold), or None when it has to be thrown out."""
        if block >= self._prepared:
            self.prepare(block)
        with captured(self.stack) as records, self.stack.phase(self.case_id, f"block-{block}"):
            places = dict.fromkeys(ARMS, 0)
            for arm in order(ARMS, block):
                place, places[arm] = places[arm], places[arm] + 1
                if self.unanswered >= GIVE_UP_AFTER:
                    return None
                role = role_of(arm, self.tokens, block, place)
                prompt = self.prompt(arm, block, place)
                fields: dict[str, Any] = {"logprobs": None, "max_tokens": ANSWER_TOKENS}
                records.append(seen := self.stack.ask_measured(self.reader, prompt, role, **fields))
                self.unanswered += not seen.ok
        self.records += records
        blocks = read_blocks(records, self.tokens, self.block_tokens)
        return blocks.valid[0].log_ratio("cold", "external") if blocks.valid else None


@contextmanager
def captured(stack: Stack) -> Iterator[list[r.Record]]:
    """Records that the stack writes meanwhile; they go into the evidence as always."""
    before = stack.record
    found: list[r.Record] = []

    def both(record: r.Record) -> None:
        before(record)
        found.append(record)

    stack.record = both
    try:
        yield found
    finally:
        stack.record = before


class Ttft(Gate):
    """Claim: at a prompt length, the first token of a prompt that only the pool holds comes no later than the given part of the
    time that computing it takes. Where the platform has no such threshold the three arms are measured and reported.

    How it can lie: the cold prompt is warm, or the external one is in the engine's own cache, or its blocks lie in the
    reader's own memory; one arm is measured while the machine is busy; the first request pays for all; sampling stops
    when the numbers please.
    Oracle: counters around every request give its state, blocks in any other state are thrown out and counted; the store
    lists the saved blocks before they are read, and its segments belong to other processes; arms are interleaved there and
    back; the interval of the ratio holds at every look.
    Turns red: a pool that is slower than the threshold, one that gives no hits or part of them, failed requests.
    """

    id = "B.ttft"
    claim = (
        "the first token of a prompt from the pool comes within the threshold's part of the time that a cold one takes"
    )
    proof = ()

    def cases(self) -> Iterable[Case]:
        for tokens, core in ((128, False), (512, True), (2000, True), (3900, False)):
            yield Case(f"{self.id}.t{tokens}", {"tokens": tokens, "maximum": 24}, core=core)

    def stack(self, base: StackSpec, case: Case) -> StackSpec:
        return remote_reader(base)

    def collect(self, stack: Stack, case: Case) -> None:
        tokens = int(case.params["tokens"])
        sampler = Sampler(stack, case.id, tokens)
        stack.fact("bench.reader", {"reader": sampler.reader, "saver": sampler.saver})
        stack.list_store(SEGMENTS)
        stack.snapshot_sockets(SEGMENTS)
        sampler.warm_up()
        threshold = _threshold(stack.spec.to_dict(), tokens)
        sample(sampler.take, threshold or 1.0, maximum=int(case.params["maximum"]), minimum=fewest_blocks() + 1)
        blocks = read_blocks(sampler.records, tokens, sampler.block_tokens)
        stack.fact(RESULTS, results(tokens, blocks))
        stack.scan_logs(case.id)

    def judge(self, history: History) -> r.Verdict:
        tokens = int(history.case.params["tokens"])
        stack = history.stack
        spec: dict[str, Any] = stack.spec if stack else {}
        threshold = _threshold(spec, tokens)
        blocks = read_blocks(history, tokens, _block_tokens(history))
        decision = decide(blocks.log_ratios("cold", "external"), threshold or 1.0)
        checks = {
            "liveness": lambda: liveness.check_liveness(history.observations()),
            "visible": lambda: visible_findings(history),
            "remote": lambda: remote_findings(history),
            "accounting": lambda: _accounting(history),
            "state": lambda: _state(blocks),
            "ratio": lambda: _ratio(decision, threshold, blocks),
            "logs": lambda: logs.check_logs(history),
        }
        findings = ordered(run(checks))
        judged = threshold is not None
        return self.verdict(
            history,
            outcome_of(findings),
            claim=self.claim
            if judged
            else f"TTFT of a cold, a native and an external prompt of {tokens} tokens is known",
            findings=findings,
            got=findings[0].message if findings else f"external / cold {decision}",
            wanted=f"at most {threshold:g} times the cold one"
            if judged
            else "measured; this platform has no threshold",
            numbers=_numbers(history, blocks, decision),
            notes=() if judged else _notes(tokens, decision),
            cause="the pool's path costs more than computing anew" if findings else "",
            production="vllm:time_to_first_token_seconds of requests with external hits" if findings else "",
            next_command=f"pytest -m bench -k '{history.case.case_id}'" if findings else "",
        )


class BreakEven(Gate):
    """Claim: the prompt length from which the pool answers sooner than computing anew is known, with an interval.

    How it can lie: two lengths and a straight line; a length that was never decided counted on one side; each length with an
    error of its own, so that several together err more often.
    Oracle: the blocks of all lengths that the run measured on this stack (``B.ttft``), each decided with its share of the error.
    The interval reaches from the longest length that is surely slower to the shortest that is surely faster.
    Turns red: nothing measured, or lengths that contradict each other.
    """

    id = "B.break-even"
    claim = "the prompt length from which the pool answers sooner than computing anew is known within an interval"
    proof = ()

    def cases(self) -> Iterable[Case]:
        yield Case(f"{self.id}.tokens")

    def stack(self, base: StackSpec, case: Case) -> StackSpec:
        return remote_reader(base)

    def collect(self, stack: Stack, case: Case) -> None:
        with stack.phase(case.id, "nothing of its own"):
            stack.fact("bench.break-even", {"from": "blocks of B.ttft on this stack"})

    def judge(self, history: History) -> r.Verdict:
        records = calibration_records(history)
        measured = lengths(records)
        alpha = 0.05 / max(1, len(measured))
        ratios = {n: read_blocks(records, n, _block_tokens(history)).log_ratios("cold", "external") for n in measured}
        decisions = {n: decide(values, 1.0, alpha) for n, values in ratios.items() if values}
        findings: list[r.Finding] = []
        if len(decisions) < 2:
            text = f"{len(decisions)} prompt lengths were measured on this stack; run B.ttft in the same run"
            findings = [finding(r.FindingCode.NO_CONTROL, text)]
        low, high, estimate = break_even(decisions)
        if not findings and low >= high:
            text = f"{low} tokens are surely slower from the pool and {high} surely faster"
            findings = [finding(r.FindingCode.NO_CONTROL, text)]
        return self.verdict(
            history,
            outcome_of(findings),
            findings=findings,
            got=findings[0].message if findings else _break_even_text(low, high, estimate, decisions),
            wanted="two prompt lengths or more, and one crossing at most",
            numbers={
                "tokens_low": low,
                "tokens_high": None if math.isinf(high) else high,
                "tokens_estimate": estimate,
                "ratio": {str(n): [round(x, 4) for x in d.interval.ratio] for n, d in decisions.items()},
            },
        )


def break_even(decisions: dict[int, Decision]) -> tuple[float, float, float | None]:
    """Longest length surely slower from the pool (0: none), shortest surely faster (infinity: none), and the crossing of the
    estimates by interpolation in the logarithm of the length (None: they do not cross)."""
    slower = [n for n, d in decisions.items() if d.side == "above"]
    faster = [n for n, d in decisions.items() if d.side == "below"]
    points = sorted((n, d.interval.estimate) for n, d in decisions.items())
    estimate = None
    for (n0, y0), (n1, y1) in itertools.pairwise(points):
        if y0 > 0 >= y1:
            share = y0 / (y0 - y1)
            estimate = round(math.exp(math.log(n0) + share * (math.log(n1) - math.log(n0))))
            break
    return max(slower, default=0), min(faster, default=math.inf), estimate


def _break_even_text(low: float, high: float, estimate: float | None, decisions: dict[int, Decision]) -> str:
    longest, shortest = max(decisions), min(decisions)
    if math.isinf(high):
        return f"not reached: no length up to {longest} tokens is surely faster from the pool; surely slower at {low:g}"
    if low == 0 and high == shortest:
        return f"below {shortest} tokens, the shortest length measured"
    about = f", about {estimate}" if estimate else ""
    return f"between {low:g} and {high:g} tokens{about}"


# Results ------------------------------------------------------------------------------------------------------------
def results(tokens: int, blocks: Blocks) -> list[dict[str, Any]]:
    """What ``reports compare`` reads: one value a block and arm (the geometric mean of its two times), in seconds."""
    found = []
    for arm in ARMS:
        values = [math.exp(sum(map(math.log, b.ttft_s[arm])) / len(b.ttft_s[arm])) for b in blocks.valid]
        found.append(
            {
                "benchmark": f"ttft/{arm}/{tokens}",
                "unit": "s",
                "better": "lower",
                "values": values,
            }
        )
    return found


def _threshold(spec: dict[str, Any], tokens: int) -> float | None:
    """The threshold of a prompt length; None where it is only measured."""
    return thresholds.external_over_cold(spec) if tokens >= JUDGED_FROM_TOKENS else None


def _explained(history: History, findings: Sequence[r.Finding]) -> dict[str, str]:
    said = explanation(history, findings)
    if findings and findings[0].code is r.FindingCode.SLOWER_THAN_RECOMPUTE:
        said["cause"] = "the pool's path costs more than computing anew at this length, on this transport"
        said["production"] = "vllm:time_to_first_token_seconds of requests with external hits"
    if findings:
        said["next_command"] = f"pytest -m bench -k '{history.case.case_id}'"
    return said


def _block_tokens(history: History) -> int:
    stack = history.stack
    if stack is None or not stack.engines:
        raise ValueError("the history has no stack")
    return stack.engines[-1].block_tokens


def _state(blocks: Blocks) -> list[r.Finding]:
    """A stack that mostly gives something else than its arm measures nothing; an external arm without hits is the stack's."""
    thrown = sum(blocks.thrown.values())
    if thrown <= len(blocks.valid):
        return []
    worst = max(blocks.thrown, key=lambda reason: blocks.thrown[reason])
    text = f"{thrown} of {blocks.taken} blocks had to be thrown out, most often: {worst} ({blocks.thrown[worst]})"
    code = r.FindingCode.TOO_FEW_OBSERVATIONS
    if worst.startswith("external: not wholly"):
        code = r.FindingCode.FEWER_HITS
    return [finding(code, text, thrown=blocks.thrown)]


def _ratio(decision: Decision, threshold: float | None, blocks: Blocks) -> list[r.Finding]:
    if decision.blocks < fewest_blocks():
        return too_few(f"{decision.blocks} valid blocks of {blocks.taken}; {fewest_blocks()} at least are needed")
    if threshold is None or decision.side == "below":
        return []
    text = f"external / cold {decision}"
    if decision.side == "above":
        return [finding(r.FindingCode.SLOWER_THAN_RECOMPUTE, text, threshold=threshold)]
    return too_few(text, needed=decision.needed)


def remote_findings(history: History) -> list[r.Finding]:
    """The pool's memory belongs to known processes, and none of it to the reader."""
    listing = next((s for s in history.of(r.StoreListing) if s.label == SEGMENTS), None)
    sockets = next((s for s in history.of(r.SocketSnapshot) if s.label == SEGMENTS), None)
    reader = history.fact("bench.reader")
    if listing is None or sockets is None or reader is None or not listing.segments:
        return [finding(r.FindingCode.NO_CONTROL, "nobody looked whose memory the pool is")]
    units = {line.rsplit(":", 1)[1]: line.split(" ", 1)[0] for line in sockets.listening}
    ports = [str(segment["endpoint"]).rsplit(":", 1)[-1] for segment in listing.segments.values()]
    holders = sorted({units.get(port, f"unknown (port {port})") for port in ports})
    if any(name.startswith("unknown") or name == reader.value["reader"] for name in holders):
        text = (
            f"memory of the pool belongs to {', '.join(holders)}: the reader {reader.value['reader']} may read its own"
        )
        return [finding(r.FindingCode.NO_CONTROL, text)]
    return []


def _accounting(history: History) -> list[r.Finding]:
    found: list[r.Finding] = []
    for o in history.observations():
        if o.role.partition("/")[0] in ARMS:
            per_token = history.engine(o.engine).kv_bytes_per_token
            found += conservation.check_conservation(o, delta_of(history, o), kv_bytes_per_token=per_token)
    return found


def _notes(tokens: int, decision: Decision) -> tuple[str, ...]:
    said = {
        "below": f"at {tokens} tokens the pool answers sooner than computing anew: {decision}",
        "above": f"at {tokens} tokens the pool is SLOWER than computing anew: {decision}",
        "undecided": f"at {tokens} tokens nobody can say which is sooner: {decision}",
    }
    return (said[decision.side],)


def _numbers(history: History, blocks: Blocks, decision: Decision) -> dict[str, Any]:
    ratio, low, high = decision.interval.ratio
    visible = [w.elapsed_s for w in history.of(r.WaitRecord) if w.what.startswith("visible:") and w.came_true]
    native = decide(blocks.log_ratios("cold", "native"), 1.0).interval.ratio if blocks.valid else None
    return {
        "ttft_ms": {arm: _spread(blocks.ttft_s(arm)) for arm in ARMS if blocks.valid},
        "external_over_cold": [_plain(x) for x in (ratio, low, high)],
        "native_over_cold": [_plain(x) for x in native] if native else None,
        "blocks": len(blocks.valid),
        "thrown": blocks.thrown,
        "needed": decision.needed,
        "visible_ms": _spread(visible) if visible else None,
        "method": METHOD,
    }


def _plain(value: float) -> float | None:
    return None if math.isinf(value) else round(value, 4)


def _spread(values_s: Sequence[float]) -> dict[str, float]:
    return {f"p{q}": percentile_ms(values_s, q) for q in (50, 90, 99)}


TTFT = Ttft()
BREAK_EVEN = BreakEven()
