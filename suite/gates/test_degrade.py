"""Family D: no fault yields a wrong or failed answer, a hang, or a slow fleet; it degrades to recompute."""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from fixtures.faults import Kill
from reports import records as r
from reports.history import History
from suite.contract import Case, Gate
from suite.gates import gate_cases
from suite.gates.arms import calibrate, owned_by
from suite.gates.judging_degrade import judge_degrade
from suite.workload.prompts import Prompt

if TYPE_CHECKING:
    from fixtures.spec import StackSpec
    from fixtures.stack import Stack

VICTIMS = 6
"""Prompts saved on the owner before it dies. Each is asked for once by the reader."""

AT_ONCE = 3
"""Victims asked for together right after the kill: what happens to one lost block is a race, so one try shows little.
The others follow, spread over twice the client TTL."""

VICTIM_TOKENS = 2000

BYSTANDER_TOKENS = 200

CONTROL_PROMPTS = 2


class OwnerKilled(Gate):
    """Claim: after the owner of stored blocks is killed, requests for them are answered: 200, right, within budget.

    How it can lie: nothing was stored on the dead process; the kill hit a wrapper; the reader answers from its own
    cache; only the first request is slow, or only bystanders are.
    Oracle: the cold answer of the same prompt from before (other shape: cold arm); TTFT against cold requests of the
    same length on the same engine; lookups counted. Proof: every pid of the owner is gone; the store's own replica
    list had the victim's blocks on the owner. Control: before the kill the reader did read such blocks.
    Turns red: policy `fail`, a connector that loses failures, one that retries for ever, a stuck scheduler.
    """

    id = "D.owner-killed"
    version = 2
    proof = ("unsafe-policy", "lost-failure", "idle-fault")
    claim = "after the owner of stored blocks is killed, requests for them are answered right, with 200, within budget"

    def cases(self) -> Iterable[Case]:
        yield Case(f"{self.id}.recompute", {"policy": "recompute"}, dirties=True, smoke=True)
        yield Case(f"{self.id}.default", {"policy": "upstream"}, dirties=True, variant="default-policy")

    def stack(self, base: StackSpec, case: Case) -> StackSpec:
        return base.with_all_engines(load_failure_policy=case.params["policy"])

    def collect(self, stack: Stack, case: Case) -> None:
        calibrate(stack)
        owner, reader = stack.names[0], stack.names[1]
        prompts = stack.prompts(case.id)
        victims = [prompts.fresh(f"victim/{i}", VICTIM_TOKENS) for i in range(VICTIMS)]
        with stack.phase(case.id, "settings"):
            stack.snapshot_processes(reader, "before")
        with stack.phase(case.id, "save"):
            for i, prompt in enumerate(victims):
                owned_by(stack, owner, partial(stack.save, owner, prompt, role=f"cold/{i}"), f"victim/{i}")
        with stack.phase(case.id, "baseline"):
            for i in range(3):
                stack.ask(reader, prompts.fresh(f"baseline/{i}", VICTIM_TOKENS), "baseline")
                stack.ask(reader, prompts.fresh(f"short/{i}", BYSTANDER_TOKENS), "short")
        with stack.phase(case.id, "control"):
            for i in range(CONTROL_PROMPTS):
                control = prompts.fresh(f"control/{i}", VICTIM_TOKENS)
                stack.save(owner, control, role=f"control-cold/{i}")
                stack.ask_measured(reader, control, f"control/{i}")
            stack.scrape(reader, "before-fault")
        with stack.phase(case.id, "fault"):
            fault = Kill(owner).inject(stack)
        with stack.phase(case.id, "degraded"):
            self._ask_victims(stack, reader, victims, prompts.fresh, fault.t_s)
        with stack.phase(case.id, "after"):
            stack.scrape(reader, "after-fault")
            stack.snapshot_processes(reader, "after")
            self._recover(stack, reader, prompts.fresh)
        stack.scan_logs(case.id)

    def _ask_victims(self, stack: Stack, reader: str, victims: list[Prompt], fresh: Any, killed_s: float) -> None:
        """The first ``AT_ONCE`` victims together, the others spread over twice the client TTL; a bystander beside each."""
        ttl_s = stack.spec.store.client_ttl_s if stack.spec.store else 10
        first = [
            stack.start(stack.request(reader, prompt, f"victim/{i}")) for i, prompt in enumerate(victims[:AT_ONCE])
        ]
        self._bystander(stack, reader, fresh, 0)
        for pending in first:
            pending.result()
        for i, prompt in enumerate(victims[AT_ONCE:], start=1):
            due_s = killed_s + i * 2 * ttl_s / (len(victims) - AT_ONCE)
            stack.wait(
                f"victim {AT_ONCE + i} of {len(victims)} to be due",
                partial(_past, due_s),
                bound_s=2 * ttl_s + 5,
                bound_source="spread over twice the client TTL",
            )
            victim = stack.start(stack.request(reader, prompt, f"victim/{AT_ONCE + i - 1}"))
            self._bystander(stack, reader, fresh, i)
            victim.result()

    @staticmethod
    def _bystander(stack: Stack, reader: str, fresh: Any, number: int) -> None:
        """A request that needs nothing of the dead owner, and the health endpoint, while victims are under way."""
        bystander = stack.start(stack.request(reader, fresh(f"bystander/{number}", BYSTANDER_TOKENS), "bystander"))
        stack.health(reader)
        bystander.result()

    def _recover(self, stack: Stack, reader: str, fresh: Any) -> None:
        """A maximum-length request must be admitted, and the KV cache must be given back."""
        longest = stack.engines[reader].facts.max_model_len - 8
        stack.ask(reader, fresh("maximum", longest), "maximum-length", max_tokens=8)
        stack.wait(
            "kv-usage-zero",
            lambda: stack.scrape(reader, "idle").values["kv_usage_ratio"] == 0.0,
            bound_s=10,
            bound_source="an idle engine frees its blocks with the last request",
            poll_s=0.5,
        )

    def judge(self, history: History) -> r.Verdict:
        return judge_degrade(self, history)


def _past(due_s: float) -> bool:
    return time.monotonic() >= due_s


OWNER_KILLED = OwnerKilled()


@gate_cases(OWNER_KILLED)
def test_owner_killed(run_case: Any, case: Case) -> None:
    run_case(OWNER_KILLED, case)
