"""Family H: engines that should share do share, exactly; engines that cannot are named, with the reason."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from reports import records as r
from reports.history import History
from suite.contract import Case, Gate
from suite.gates import gate_cases
from suite.gates.arms import calibrate, reuse_arms
from suite.gates.judging import judge_arms, parity_findings

if TYPE_CHECKING:
    from fixtures.spec import StackSpec
    from fixtures.stack import Stack

OTHER_SEED = "4711"


def collect_share(stack: Stack, case: Case) -> None:
    """Save on one engine, read on the other, with all that explains a miss: worker environments and sockets."""
    calibrate(stack)
    names = stack.names
    saver, reader = (names[0], names[1]) if case.params["direction"] == "forward" else (names[1], names[0])
    with stack.phase(case.id, "settings"):
        for engine in (saver, reader):
            stack.snapshot_processes(engine, "parity")
    prompt = stack.prompts(case.id).fresh("x", case.params["tokens"])
    reuse_arms(stack, case.id, prompt, saver, reader)
    with stack.phase(case.id, "control"):
        stack.reset_local_cache(saver)
        stack.ask_measured(saver, prompt, "control")
    stack.scan_logs(case.id)


class Share(Gate):
    """Claim: two engines over one pool share exactly the whole blocks of a common prefix, in both directions.

    How it can lie: zero hits look like a cold cache, and nobody is told; a hit rate above zero hides a rank or a group
    that never shares.
    Oracle: exact external tokens; response, counters and bytes agree; if nothing is shared, the environment of *every*
    worker (from /proc, not from the launcher) names the setting that differs. Control: the saver reads its own blocks
    back from the pool, so the pool itself works.
    Turns red: another hash seed, another algorithm, saves that never become visible, claimed hits without bytes.
    """

    id = "H.share"
    judges_lmcache = True
    version = 2
    claim = "engines over one pool share exactly the whole blocks of a common prefix, in both directions"
    proof = (
        "foreign-block",
        "other-seed",
        "sibling-weights",
        "other-dtype",
    )

    def cases(self) -> Iterable[Case]:
        for direction in ("forward", "backward"):
            yield Case(f"{self.id}.{direction}", {"direction": direction, "tokens": 2000}, smoke=True)

    def collect(self, stack: Stack, case: Case) -> None:
        collect_share(stack, case)

    def judge(self, history: History) -> r.Verdict:
        return judge_arms(self, history, extra=parity_findings(history))


class SeedNamed(Gate):
    """Claim: a hash seed that differs between engines is caught, and named as the cause.

    How it can lie: without this, H.share's silence about seeds would be worth nothing: it may be unable to see them.
    Oracle: H.share's own judgement of a stack in which one engine has another seed must be FAIL with ``seed-mismatch``
    first; the saver's own read-back (same stack, same prompt) is the positive control.
    Turns red: a parity check that reads the launcher's environment, or a release in which seeds no longer matter.
    """

    id = "H.seed"
    judges_lmcache = True
    claim = "a hash seed that differs between two engines is caught and named before anyone wonders about a hit rate"
    proof = ("launcher-environment",)

    def cases(self) -> Iterable[Case]:
        yield Case(f"{self.id}.different", {"direction": "forward", "tokens": 2000}, variant="seed")

    def stack(self, base: StackSpec, case: Case) -> StackSpec:
        return base.with_engine(base.engines[1].name, hash_seed=OTHER_SEED)

    def collect(self, stack: Stack, case: Case) -> None:
        collect_share(stack, case)

    def judge(self, history: History) -> r.Verdict:
        inner = SHARE.judge(history)
        got = f"H.share on this stack: {inner.outcome} {inner.finding}"
        wanted = f"FAIL {r.FindingCode.SEED_MISMATCH}, naming both seeds"
        if inner.outcome in (r.Outcome.HARNESS_ERROR, r.Outcome.INCONCLUSIVE):
            return self.verdict(history, inner.outcome, findings=inner.findings, got=got, wanted=wanted)
        if inner.finding == r.FindingCode.SEED_MISMATCH:
            named = inner.findings[0].message
            return self.verdict(history, r.Outcome.PASS, got=f"named: {named}", wanted=wanted, numbers=inner.numbers)
        finding = r.Finding(
            code=r.FindingCode.MISLEADING_MESSAGE,
            message=f"a different hash seed was not named: {got}",
            evidence={"inner": inner.finding},
        )
        return self.verdict(
            history,
            r.Outcome.FAIL,
            findings=(finding, *inner.findings),
            got=got,
            wanted=wanted,
            cause="the tested release no longer depends on the seed, or the parity check cannot see it",
            production="invisible",
        )


SHARE = Share()
SEED_NAMED = SeedNamed()


@gate_cases(SHARE)
def test_share(run_case: Any, case: Case) -> None:
    run_case(SHARE, case)


@gate_cases(SEED_NAMED)
def test_seed(run_case: Any, case: Case) -> None:
    run_case(SEED_NAMED, case)
