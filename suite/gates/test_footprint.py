"""Family O, footprint: what serving costs, and what it leaves behind."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from reports import records as r
from reports.history import History
from suite.checks import degrade, liveness, logs, recovery
from suite.checks.base import finding, run, too_few
from suite.contract import Case, Gate
from suite.gates import gate_cases
from suite.gates.arms import calibrate
from suite.gates.judging import explanation, ordered, visible_findings
from suite.gates.selections import budget_of
from suite.gates.sequences import at_rest
from suite.workload.prompts import reusable_tokens

if TYPE_CHECKING:
    from fixtures.stack import Stack

PROMPTS = 4
PROMPT_TOKENS = 2000

CANCEL_AFTER_S = (0.0, 0.005, 0.01, 0.02, 0.03, 0.05, 0.08, 0.12)
"""Moments at which a request is cancelled. Over TCP on two cores a lookup of 62 blocks takes 1 ms, their load 10 to 100."""

IDLE_BOUND_S = 10.0
"""Bound for an idle engine to give its KV back: blocks are freed with a request's last step, saves lag by a second."""


class Footprint(Gate):
    """Claim: a request served from the pool costs few lookups and no more time than the budget of a degraded one, and
    leaves no KV block behind, finished or cancelled.

    How it can lie: the counter is read while requests still run; no request was really cancelled under way; nothing was
    read from the pool.
    Oracle: lookups counted around all requests of the reader; TTFT against cold requests of the same length on the same
    engine; KV usage of the idle engine, which must be zero; afterwards a request of maximum length must be admitted.
    Control: the finished requests did hit in full; cancelled ones were cancelled before their end.
    Turns red: a connector that never reports a load or save as finished, retries its lookups, or loads slowly.
    """

    id = "O.footprint"
    version = 2
    claim = (
        "a request served from the pool costs few lookups and little time, and leaves no KV behind, cancelled or not"
    )
    proof = (
        "lookup-storm",
        "slow-load",
        "pinned-save",
        "leak-on-cancel",
    )

    def cases(self) -> Iterable[Case]:
        yield Case(f"{self.id}.served", {"cancel": False}, smoke=True)
        yield Case(f"{self.id}.cancelled", {"cancel": True})

    def collect(self, stack: Stack, case: Case) -> None:
        calibrate(stack)
        saver, reader = stack.names[0], stack.names[1]
        prompts = stack.prompts(case.id)
        cancel = case.params["cancel"]
        saved = [prompts.fresh(f"x/{i}", PROMPT_TOKENS) for i in range(len(CANCEL_AFTER_S) if cancel else PROMPTS)]
        with stack.phase(case.id, "save"):
            for i, prompt in enumerate(saved):
                stack.save(saver, prompt, role=f"cold/{i}")
        with stack.phase(case.id, "baseline"):
            for i in range(3):
                stack.ask(reader, prompts.fresh(f"baseline/{i}", PROMPT_TOKENS), "baseline")
        with stack.phase(case.id, "read"):
            stack.scrape(reader, "before-reads")
            for i, prompt in enumerate(saved):
                request = stack.request(reader, prompt, f"read/{i}")
                pending = stack.start(request)
                if cancel:
                    pending.wait_first_token(CANCEL_AFTER_S[i])
                    pending.cancel()
                pending.result()
        with stack.phase(case.id, "idle"):
            for engine in (saver, reader):
                stack.wait(
                    f"{engine} to be idle",
                    partial(at_rest, stack, engine, "idle"),
                    bound_s=IDLE_BOUND_S,
                    bound_source="suite.gates.test_footprint.IDLE_BOUND_S",
                )
            stack.scrape(reader, "after-reads")
        with stack.phase(case.id, "after"):
            longest = stack.engines[reader].facts.max_model_len - 8
            stack.ask(reader, prompts.fresh("maximum", longest), "maximum-length", max_tokens=8)
        stack.scan_logs(case.id)

    def judge(self, history: History) -> r.Verdict:
        reads = history.observations(phase="read")
        reader = reads[0].engine
        delta = history.delta(reader, "before-reads", "after-reads")
        cancel = history.case.params["cancel"]
        checks: dict[str, Callable[[], Sequence[r.Finding]]] = {
            "pressure": lambda: _cancelled(reads) if cancel else _read_in_full(history, reads, delta),
            "visible": lambda: visible_findings(history),
            "clock": lambda: liveness.check_clock(history.observations()),
            "liveness": lambda: liveness.check_liveness([o for o in history.observations() if not o.cancelled]),
            "lookups": lambda: degrade.check_lookups(reads, delta, max_lookups=budget_of(history)["max_lookups"]),
            "time": lambda: [] if cancel else _slow(history, reads),
            "kv": lambda: _released(history),
            "admission": lambda: _admission(history),
            "logs": lambda: logs.check_logs(history),
        }
        findings = ordered(run(checks))
        lookups = (delta or {}).get("store.lookup_exists.ok.ops", 0.0)
        ttft_ms = [round(o.ttft_s * 1000, 1) for o in reads if o.ttft_s is not None]
        cancelled = sum(o.cancelled for o in reads)
        return self.judged(
            history,
            findings,
            good=f"{lookups:g} lookups for {len(reads)} requests, no KV left",
            wanted=f"at most {budget_of(history)['max_lookups']:g} lookups a request, KV usage 0 when idle",
            numbers={"lookups": lookups, "reads": len(reads), "cancelled": cancelled, "ttft_ms": ttft_ms},
            **explanation(history, findings),
        )


def _cancelled(reads: Sequence[r.Observation]) -> list[r.Finding]:
    done = sum(o.cancelled for o in reads)
    if done < len(reads) // 2:
        return too_few(f"{done} of {len(reads)} requests were cancelled before their end, half are needed")
    return []


def _read_in_full(history: History, reads: Sequence[r.Observation], delta: dict[str, float] | None) -> list[r.Finding]:
    wanted = sum(reusable_tokens(len(o.prompt_token_ids), history.engine(o.engine).block_tokens) for o in reads)
    got = (delta or {}).get("prompt_tokens.external", 0.0)
    if got == wanted:
        return []
    return [
        finding(r.FindingCode.NO_CONTROL, f"{got:g} of {wanted} tokens came from the pool: this is no served request")
    ]


def _slow(history: History, reads: Sequence[r.Observation]) -> list[r.Finding]:
    """Hits that cost more than a degraded request may are worse than no pool.

    More than half of them: one stall of a second is what a busy two-core host does to any request (cold ones too), and
    a gate that fails on it would say nothing about the connector.
    """
    cold = history.observations(phase="baseline")
    budget = budget_of(history)
    found = degrade.check_budget(reads, cold, factor=budget["ttft_factor"], extra_s=budget["ttft_extra_s"])
    return [
        finding(r.FindingCode.SLOWER_THAN_RECOMPUTE, f.message, **f.evidence)
        if f.code is r.FindingCode.SLOW_DEGRADE
        else f
        for f in found
        if f.code is not r.FindingCode.SLOW_DEGRADE or 2 * f.evidence["count"] > len(reads)
    ]


def _released(history: History) -> list[r.Finding]:
    """Every engine came to rest and holds no block, at the last look."""
    last = {m.unit: m for m in history.of(r.MetricsSnapshot) if m.label == "idle"}
    return [f for unit in sorted(last) or [""] for f in recovery.check_at_rest(last.get(unit))]


def _admission(history: History) -> list[r.Finding]:
    asked = history.observations(phase="after")
    longest = history.engine(asked[-1].engine).max_model_len if asked else 0
    return recovery.check_admission(asked[-1] if asked else None, longest)


FOOTPRINT = Footprint()


@gate_cases(FOOTPRINT)
def test_footprint(run_case: Any, case: Case) -> None:
    run_case(FOOTPRINT, case)
