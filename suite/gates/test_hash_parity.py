"""Family H: engines that should share do share, exactly; engines that cannot are named, with the reason."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from reports import records as r
from reports.history import History
from suite.checks.base import EXTERNAL, finding, too_few
from suite.contract import Case, Gate
from suite.gates import gate_cases
from suite.gates.arms import calibrate, reuse_arms
from suite.gates.judging import delta_of, ordered, parity_findings, read_in_full
from suite.gates.judging_arms import judge_arms
from suite.gates.selections import kind_of

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
    version = 4
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
        roles = ("cold", "native", "external", "native-2", "control")
        return judge_arms(self, history, roles=roles, extra=parity_findings(history))


class SeedNamed(Gate):
    """Claim: a hash seed that differs between engines is caught, and named as the cause.

    How it can lie: without this, H.share's silence about seeds would be worth nothing: it may be unable to see them.
    Oracle: H.share's own judgement of a stack in which one engine has another seed must be FAIL with ``seed-mismatch``
    first, and the engines must indeed have shared nothing: a cause without its effect is no cause. The saver's own
    read-back (same stack, same prompt) is the positive control.
    Turns red: a parity check that reads the launcher's environment, or a release in which seeds no longer matter.
    """

    id = "H.seed"
    judges_lmcache = True
    version = 2
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
        wanted = f"FAIL {r.FindingCode.SEED_MISMATCH}, naming both seeds; no block shared"
        if inner.outcome in (r.Outcome.HARNESS_ERROR, r.Outcome.INCONCLUSIVE):
            return self.verdict(history, inner.outcome, findings=inner.findings, got=got, wanted=wanted)
        if inner.finding == r.FindingCode.SEED_MISMATCH:
            findings = ordered([*_effect(history), *_beside(inner)])
            named = f"named: {inner.findings[0].message}"
            return self.judged(
                history,
                findings,
                good=named,
                wanted=wanted,
                numbers=inner.numbers,
                next_command=f"pytest -m gates -k '{history.case.case_id}'" if findings else "",
            )
        unnamed = finding(
            r.FindingCode.MISLEADING_MESSAGE, f"a different hash seed was not named: {got}", inner=inner.finding
        )
        return self.verdict(
            history,
            r.Outcome.FAIL,
            findings=(unnamed, *inner.findings),
            got=got,
            wanted=wanted,
            cause="the tested release no longer depends on the seed, or the parity check cannot see it",
            production="invisible",
        )


def _effect(history: History) -> list[r.Finding]:
    """The seed that was named did keep the engines apart, on a pool that works: the saver reads its own blocks back."""
    asked = {
        kind: [o for o in history.observations() if kind_of(o) == kind and o.ok] for kind in ("external", "control")
    }
    if not asked["external"] or delta_of(history, asked["external"][0]) is None:
        return too_few("nobody saw what the reader got of the saver's blocks")
    if not any(read_in_full(history, o) for o in asked["control"]):
        return [finding(r.FindingCode.NO_CONTROL, "the saver did not read its own blocks back from the pool in full")]
    first = asked["external"][0]
    shared = int((delta_of(history, first) or {}).get(EXTERNAL, 0))
    if not shared and not first.cached_tokens:
        return []
    message = f"a seed that differs was named as the cause, and the reader got {shared} external tokens all the same"
    return [finding(r.FindingCode.MISLEADING_MESSAGE, message, request_id=first.request_id, external_tokens=shared)]


EFFECTS_OF_A_SEED = (r.FindingCode.SEED_MISMATCH, r.FindingCode.ZERO_HITS, r.FindingCode.ORACLE_BLIND)
"""What H.share finds where engines share nothing: no hit, and no planted block that the reader could have read."""


def _beside(inner: r.Verdict) -> list[r.Finding]:
    """What H.share found that a seed does not explain."""
    return [f for f in inner.findings if f.code not in EFFECTS_OF_A_SEED]


SHARE = Share()
SEED_NAMED = SeedNamed()


@gate_cases(SHARE)
def test_share(run_case: Any, case: Case) -> None:
    run_case(SHARE, case)


@gate_cases(SEED_NAMED)
def test_seed(run_case: Any, case: Case) -> None:
    run_case(SEED_NAMED, case)
