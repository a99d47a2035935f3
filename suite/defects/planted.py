"""Planted defects as gates: "gate G turns red on defect X, with the right finding".

A case runs the collection of an ordinary gate on a stack with the defect in it, and judges with that gate's own
``judge``: PASS means caught. So a run of defects is judged, recorded, resumed and judged again like any other run, and
its exit code means what it always means. The same case at rate 0 must be green: a connector that merely breaks proves
nothing. That something bad was really *read* is counted by the defect itself; none at all is HARNESS_ERROR.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from reports import records as r
from reports.history import History
from suite.contract import Case, Gate, outcome_of, safe_judge
from suite.defects.catalogue import K3, PARTED, SERVED, SHARE, SIZE, Catch, Defect
from suite.defects.client_gate import ClientOnTime
from suite.defects.switch import Remote, Setting, Told
from suite.gates import registry as gates_registry
from suite.gates.arms import calibrate

if TYPE_CHECKING:
    from fixtures.spec import StackSpec
    from fixtures.stack import Stack

TOLD = "defect.told"
"""Fact: what the defect really did in this case: ``{"lies", "read", "occasions", "unit"}``."""

ACK_BOUND_S = 5.0
"""Bound for all processes of the engines to act by a new setting; they look every ``switch.POLL_S``."""

REQUEST_S, VISIBLE_S = 15.0, 10.0
"""Bounds of a request and of a save on stacks with a lying connector: a planted hang lasts that long. Requests of the
cases in use take up to 1 s on two busy cores."""

SURVEY = (K3, SHARE, PARTED, SIZE, SERVED)
"""Cases that a defect is also put under where nobody asks them to see it (``--scope full``): the rest of the heat map."""

LEASE_MS = 30_000

LYING = {
    "connector": "custom",
    "connector_name": "LyingConnector",
    "connector_module_path": "suite.defects.lying_connector",
}


@functools.cache
def inner_gates() -> Mapping[str, Gate]:
    """The gates that defects are planted under, by id."""
    own = ClientOnTime()
    return {**gates_registry(), own.id: own}


@functools.cache
def inner_case(case_id: str) -> Case:
    """A case of the suite by id. KeyError when there is none."""
    gate = inner_gates()[Catch(case_id, ()).gate]
    for case in gate.cases():
        if case.id == case_id:
            return case
    raise KeyError(case_id)


def rate_text(rate: float) -> str:
    """``rate-1``, ``rate-0``, or ``1-in-50``."""
    return f"rate-{rate:g}" if rate in (0, 1) else f"1-in-{round(1 / rate)}"


class Planted(Gate):
    """One defect. Subclasses say how it is put in."""

    version = 1
    judges_deaths = True

    def __init__(self, defect: Defect) -> None:
        self.defect = defect
        self.id = f"defect.{defect.id}"  # type: ignore[misc]
        self.claim = f"planted defect, {defect.kind}: {defect.does}; it is caught"  # type: ignore[misc]
        self.proof = (defect.id,)  # type: ignore[misc]

    def cases(self) -> Iterable[Case]:
        for catch in self.defect.caught_by:
            for rate in self._rates():
                yield self._case(catch, rate)

    def _case(self, catch: Catch, rate: float, survey: bool = False) -> Case:
        inner = inner_case(catch.case)
        planted = {
            "defect": self.defect.id,
            "kind": self.defect.kind,
            "gate": catch.gate,
            "case": catch.case,
            "rate": rate,
            "wanted": [str(f) for f in catch.findings],
            "outcome": catch.outcome,
            "survey": survey,
        }
        return Case(
            f"{self.id}:{catch.case}:{'survey' if survey else rate_text(rate)}",
            {**inner.params, "planted": planted},
            needs=inner.needs,
            core=self.defect.core and catch.core and not survey,
            dirties=inner.dirties or (self.defect.breaks and rate > 0),
            variant=inner.variant,
        )

    def _rates(self) -> tuple[float, ...]:
        return self.defect.rates

    @staticmethod
    def _inner(case: Case) -> tuple[Gate, Case]:
        """The gate under proof, and its case under this case's id."""
        planted = case.params["planted"]
        inner = inner_case(planted["case"])
        return inner_gates()[planted["gate"]], dataclasses.replace(inner, id=case.id)

    def stack(self, base: StackSpec, case: Case) -> StackSpec:
        gate, inner = self._inner(case)
        return gate.stack(base, inner)

    # Judging --------------------------------------------------------------------------------------------------------
    def judge(self, history: History) -> r.Verdict:
        planted = history.case.params["planted"]
        inner = safe_judge(inner_gates()[planted["gate"]], history)
        fact = history.fact(TOLD)
        told: dict[str, Any] = dict(fact.value) if fact else {}
        findings = self._findings(planted, inner, told)
        wanted = " or ".join(planted["wanted"])
        rate = planted["rate"]
        return self.verdict(
            history,
            outcome_of(findings),
            findings=tuple(findings),
            got=f"{planted['case']}: {inner.outcome} {inner.finding}".rstrip() + f"; {_told_text(told)}",
            wanted=f"{planted['outcome']} {wanted}" if rate else "PASS, and no lie told",
            numbers={
                "planted": planted,
                "told": told,
                "inner": {"outcome": str(inner.outcome), "finding": inner.finding},
            },
            notes=(inner.got,) if inner.got else (),
            cause="the gate cannot see this" if findings else "",
            production="not a fault of the stack: a hole in the suite" if findings else "",
            next_command=f"pytest -m defects -k '{history.case.case_id}'",
        )

    def _findings(self, planted: dict[str, Any], inner: r.Verdict, told: dict[str, Any]) -> list[r.Finding]:
        evidence = {"inner": str(inner.outcome), "finding": inner.finding, "message": inner.got, "told": told}
        if not told:
            return [_finding(r.FindingCode.NO_PRESSURE, "nobody counted what the defect did", evidence)]
        if not planted["rate"]:
            (catch,) = (c for c in self.defect.caught_by if c.case == planted["case"])
            return self._control_findings(catch, inner, told, evidence)
        if not told["read"] and not planted["survey"]:
            text = f"nothing was planted: {told['occasions']} occasions, {told['lies']} lies, none of them read"
            return [_finding(r.FindingCode.NO_PRESSURE, text, evidence)]
        if planted["survey"]:
            return []  # nobody asks this gate to see it; the heat map shows whether it does
        if str(inner.outcome) == planted["outcome"] and inner.finding in planted["wanted"]:
            return []
        text = f"{planted['case']} came to {inner.outcome} {inner.finding}".rstrip()
        return [_finding(r.FindingCode.MISSED_DEFECT, f"{text} over {_told_text(told)}", evidence)]

    @staticmethod
    def _control_findings(
        catch: Catch, inner: r.Verdict, told: dict[str, Any], evidence: dict[str, Any]
    ) -> list[r.Finding]:
        if told["lies"]:
            return [_finding(r.FindingCode.NO_PRESSURE, f"{told['lies']} lies at rate 0", evidence)]
        if inner.outcome is r.Outcome.PASS:
            return []
        allowed = {str(code) for code in catch.control_may}
        if inner.outcome is r.Outcome.FAIL and {str(f.code) for f in inner.findings} <= allowed:
            return []
        text = f"at rate 0: {inner.outcome} {inner.finding}: {inner.got}"
        return [_finding(r.FindingCode.FALSE_ALARM, text, evidence)]


def _finding(code: r.FindingCode, message: str, evidence: dict[str, Any]) -> r.Finding:
    return r.Finding(code=code, message=message, evidence=evidence)


def _told_text(told: dict[str, Any]) -> str:
    if not told:
        return "not counted"
    return f"{told['read']} bad {told['unit']} read ({told['lies']} lies on {told['occasions']} occasions)"


class LyingConnectorGate(Planted):
    """A defect of the connector, switched on in running engines and off again afterwards."""

    def cases(self) -> Iterable[Case]:
        yield from super().cases()
        if self.defect.rates == (1.0,) and not (self.defect.stalls or self.defect.breaks):
            asked = {catch.case for catch in self.defect.caught_by}
            for case_id in SURVEY:
                if case_id not in asked:
                    yield self._case(Catch(case_id, ()), 1.0, survey=True)

    def _rates(self) -> tuple[float, ...]:
        return (*self.defect.rates, 0.0)

    def stack(self, base: StackSpec, case: Case) -> StackSpec:
        return lying_spec(super().stack(base, case), base)

    def collect(self, stack: Stack, case: Case) -> None:
        calibrate(stack)  # of the honest stack: a lie in the measured floor would hide itself
        generation = next_generation(stack)
        setting = Setting(
            generation=generation,
            defect=connector_defect(self.defect.id),
            rate=case.params["planted"]["rate"],
            delay_s=self.defect.delay_s,
            seed=zlib.crc32(case.id.encode()),  # the same lies in every run of the case
        )
        lying = None if self.defect.lying is None else [stack.names[i] for i in self.defect.lying]
        switch(stack, setting, lying)
        gate, inner = self._inner(case)
        try:
            gate.collect(stack, inner)
        finally:
            told = remote(stack).told(generation)
            stack.fact(TOLD, told_fact(told, self.defect.unit))
            switch(stack, Setting(generation=next_generation(stack)))
        if self.defect.stalls:
            _prove_well(stack, case.id)
        stack.scan_logs(case.id)


def lying_spec(spec: StackSpec, base: StackSpec) -> StackSpec:
    """The same stack with the lying connector in every engine, telling the truth until told otherwise.

    A long lease takes out a race of the honest stack: on busy cores loads outlive the default one and fail. Where the gate
    has set another lease than ``base`` has, it stays: what the gate is about may need it (under a lease nothing is evicted).
    """
    if spec.store is not None and base.store is not None and spec.store.kv_lease_ttl_ms == base.store.kv_lease_ttl_ms:
        spec = spec.with_store(kv_lease_ttl_ms=LEASE_MS)
    timeouts = msgspec.structs.replace(spec.timeouts, request_s=REQUEST_S, visible_s=VISIBLE_S)
    return spec.with_changes(timeouts=timeouts).with_all_engines(**LYING)


def connector_defect(defect_id: str) -> str:
    """Name of the connector's own defect: ``rare-foreign-block`` is ``foreign-block`` at another rate."""
    return defect_id.removeprefix("rare-")


def told_fact(told: Told, unit: str) -> dict[str, Any]:
    """As recorded."""
    return {"lies": told.lies, "read": told.read, "occasions": told.occasions, "unit": unit}


def remote(stack: Stack) -> Remote:
    """The hand on the switches of a stack's engines."""
    return Remote({name: engine.plan.launch.directory for name, engine in stack.engines.items()})


def next_generation(stack: Stack) -> int:
    """A number for the next setting of a stack's switches; none is used twice."""
    generation = int(stack.notes.get("defect.generation", 0)) + 1
    stack.notes["defect.generation"] = generation
    return generation


def switch(stack: Stack, setting: Setting, engines: list[str] | None = None) -> None:
    """Set the lie and wait until every process acts by it; a stack that does not follow is dirty."""
    hand = remote(stack)
    hand.set(setting, engines)
    came_true = stack.wait(
        f"engines to act by generation {setting.generation} ({setting.defect or 'the truth'})",
        functools.partial(hand.acknowledged, setting.generation),
        bound_s=ACK_BOUND_S,
        bound_source="suite.defects.planted.ACK_BOUND_S",
        poll_s=0.02,
    )
    if not came_true:
        stack.dirty = True


def _prove_well(stack: Stack, case_id: str) -> None:
    """After a stall: each engine answers again, or the stack is rebuilt."""
    prompts = stack.prompts(case_id)
    for name in stack.names:
        answer = stack.ask(name, prompts.fresh(f"well/{name}", 64), "well-again")
        if not answer.ok:
            stack.dirty = True
