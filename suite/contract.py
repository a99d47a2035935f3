"""The contract of a gate: ``collect`` gathers evidence, ``judge`` turns it into a verdict.

``collect`` talks to the stack in named phases and decides nothing. ``judge`` is a pure function of the case's history:
no I/O, no clock, no stack, so that every verdict can be given again from evidence, elsewhere and later.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from reports import records as r
from reports.history import History

if TYPE_CHECKING:
    from fixtures.spec import StackSpec
    from fixtures.stack import Stack


ENGINE_DIED = "engine.died"
"""Name of the fact (``{engine, words, log_tail}``) of a case whose stack came up and lost an engine at its first requests."""

HOST_PAUSED = "host.paused"
"""Name of the fact (list of ``{from_s, stall_s}``) of a case that the host's standing still may have touched (``fixtures.host_watch``)."""

TOUCHED_BY_A_PAUSE = frozenset(
    {
        r.FindingCode.FAILED_REQUEST,
        r.FindingCode.HANG,
        r.FindingCode.STUCK_BEHIND_HEALTH,
        r.FindingCode.SLOW_DEGRADE,
        r.FindingCode.SLOWER_THAN_RECOMPUTE,
        r.FindingCode.NEVER_READY,
        r.FindingCode.HITS_NOT_BACK,
        r.FindingCode.UNCLEAN_STOP,
        r.FindingCode.SAVE_NOT_VISIBLE,
        r.FindingCode.ZERO_HITS,
        r.FindingCode.FEWER_HITS,
        r.FindingCode.UNEXPLAINED_LOG,
    }
)
"""What a host that stood still can cause by itself: time limits that end, peers given up, their blocks dropped, and lines about it."""

UNITS_OF_TARGET = re.compile(r"[:|]")
"""Separates the units in the target of a fault: ``data:owner0`` (a link and its end), ``e0|e1`` (two that were parted)."""


@dataclass(frozen=True)
class Case:
    """One case of a gate: ``id`` is stable (``P.boundary.k3+1``); ``params`` is JSON data, recorded with the case.

    needs: requirements beyond a stack (``gpu``, ``rdma``, ``nft``, ...). core: part of ``make gates``.
    smoke: part of ``make smoke``. dirties: the stack must be proven healthy or rebuilt after it.
    """

    id: str
    params: dict[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    core: bool = True
    smoke: bool = False
    dirties: bool = False
    variant: str = ""
    """Which of the gate's stack variants it runs on; cases of one variant share a stack."""


class Gate:
    """One claim about the stack. Subclasses set the class attributes and implement the three methods."""

    id: ClassVar[str]
    """``P.boundary``: family, dot, name. Case ids begin with it."""
    version: ClassVar[int] = 1
    """Raised whenever ``judge`` may give another verdict on the same history."""
    claim: ClassVar[str]
    """One sentence that must hold."""
    needs_pool: ClassVar[bool] = True
    """The stack must have a store; without one every case is UNTESTABLE."""
    min_engines: ClassVar[int] = 2
    judges_deaths: ClassVar[bool] = False
    """An engine's end is what its cases are about: ``judge`` says what it means (planted defects)."""
    judges_lmcache: ClassVar[bool] = False
    """It can judge engines whose connector is LMCache: it needs requests, the engine's counters of prompt tokens by source and (with a
    pool) its listing of keys, and nothing of vLLM's own store connector: no counters of lookups, loads or bytes, no options."""
    may_be_refused: ClassVar[bool] = False
    """An engine that says at its start that it does not support what a case asks for makes the case UNTESTABLE, in its words.
    For gates whose cases bring models and arguments that not every platform and release takes; elsewhere it is our error."""
    proof: ClassVar[tuple[str, ...]] = ()
    """Planted defects that turn it red (ids in ``suite.defects``). Empty: shown as UNPROVEN."""

    def cases(self) -> Iterable[Case]:
        """All cases, each with a unique id that starts with the gate's id."""
        raise NotImplementedError

    def stack(self, base: StackSpec, case: Case) -> StackSpec:
        """The stack the case runs on, derived from the run's base spec. Default: the base itself."""
        return base

    def collect(self, stack: Stack, case: Case) -> None:
        """Gather evidence through ``stack`` (which records everything). Decides nothing."""
        raise NotImplementedError

    def judge(self, history: History) -> r.Verdict:
        """The verdict on a case view (``History.for_case``). Pure."""
        raise NotImplementedError

    # Helpers for judges ---------------------------------------------------------------------------------------------
    def verdict(self, history: History, outcome: r.Outcome, **fields: Any) -> r.Verdict:
        """A verdict on the case of ``history`` with this gate's id, claim and version filled in."""
        case = history.case
        fields.setdefault("claim", self.claim)
        return r.Verdict(case_id=case.case_id, gate=self.id, gate_version=self.version, outcome=outcome, **fields)

    def judged(self, history: History, findings: Sequence[r.Finding], *, good: str, **fields: Any) -> r.Verdict:
        """The verdict that findings, the primary one first, amount to. good: what was got where there are none."""
        got = findings[0].message if findings else good
        return self.verdict(history, outcome_of(findings), findings=tuple(findings), got=got, **fields)


def outcome_of(findings: Iterable[r.Finding]) -> r.Outcome:
    """PASS for none; else HARNESS_ERROR if any is ours, FAIL if any is the stack's, else INCONCLUSIVE.

    A harness error comes first: a verdict on the stack cannot rest on evidence that the harness spoiled.
    """
    codes = {f.code for f in findings}
    if not codes:
        return r.Outcome.PASS
    if codes & r.HARNESS_CODES:
        return r.Outcome.HARNESS_ERROR
    if codes - r.INCONCLUSIVE_CODES - {r.FindingCode.MISSING_CAPABILITY}:
        return r.Outcome.FAIL
    if codes & r.INCONCLUSIVE_CODES:
        return r.Outcome.INCONCLUSIVE
    return r.Outcome.UNTESTABLE


GRAVER_THAN_A_DEATH = frozenset(
    {r.FindingCode.WRONG_ANSWER, r.FindingCode.FOREIGN_REUSE, r.FindingCode.UNDETECTED_CORRUPTION}
)
"""What remains the first finding of a case in which an engine ended as well."""


def _death(died: dict[str, Any]) -> r.Finding:
    if died.get("in_case"):
        text = f"engine {died['engine']} ended by itself (exit code {died['exit_code']}): {died['words']}"
    else:
        text = f"engine {died['engine']} was ready and ended at one of its first requests: {died['words']}"
    return r.Finding(code=r.FindingCode.ENGINE_DIED, message=text, evidence=died)


def _also_died(verdict: r.Verdict, died: dict[str, Any]) -> r.Verdict:
    """A FAIL in a case in which an engine ended says so: first, but for what is graver. Else an engine's end would be taken for the
    failure that is known of the case (``--expect`` compares the first finding)."""
    if r.FindingCode.ENGINE_DIED in {f.code for f in verdict.findings}:
        return verdict
    graver = [f for f in verdict.findings if f.code in GRAVER_THAN_A_DEATH]
    rest = [f for f in verdict.findings if f.code not in GRAVER_THAN_A_DEATH]
    findings = (*graver, _death(died), *rest)
    return msgspec.structs.replace(verdict, findings=findings, got=verdict.got if graver else findings[0].message)


def _dead_engine(gate: Gate, history: History, died: dict[str, Any]) -> r.Verdict:
    """An engine that was ready ended by itself: at its first request (it took the case's settings), or in the case."""
    finding = _death(died)
    text = finding.message
    cause = "a setting is accepted at the start and kills the engine when it is first used"
    if died.get("in_case"):
        cause = "what the case sent is no fault, and a serving engine may not end at it; the log's last lines are in the evidence"
    return gate.verdict(
        history,
        r.Outcome.FAIL,
        findings=(finding,),
        got=text,
        wanted="an engine that serves, or that refuses at its start what it cannot do",
        cause=cause,
        production="the engine's exit; its log has the traceback",
        next_command=f"pytest -m gates -k '{history.case.case_id}'",
    )


def _died(gate: Gate, history: History) -> dict[str, Any] | None:
    """The engine that ended by itself, as far as the records can say: not one that the case hurt on purpose."""
    died = history.fact(ENGINE_DIED)
    if died is None or gate.judges_deaths:
        return None
    value: dict[str, Any] = died.value
    hurt = {unit for fault in history.faults("inject") for unit in UNITS_OF_TARGET.split(fault.target)}
    return None if value.get("in_case") and value["engine"] in hurt else value


def _paused(gate: Gate, history: History, verdict: r.Verdict) -> r.Verdict:
    """INCONCLUSIVE in place of a FAIL that the host may have caused by standing still; what was found is in its notes."""
    fact = history.fact(HOST_PAUSED)
    if (
        fact is None
        or verdict.outcome is not r.Outcome.FAIL
        or not {f.code for f in verdict.findings} <= TOUCHED_BY_A_PAUSE
    ):
        return verdict
    longest = max(float(pause["stall_s"]) for pause in fact.value)
    finding = r.Finding(
        code=r.FindingCode.NO_CONTROL,
        message=f"the host stood still for {longest:g} s in this case or within a minute before: no process ran, and what timed out is nobody's fault",
        evidence={"pauses": fact.value[:10]},
    )
    return gate.verdict(
        history,
        r.Outcome.INCONCLUSIVE,
        findings=(finding,),
        got=finding.message,
        wanted=verdict.wanted,
        numbers=verdict.numbers,
        notes=(*verdict.notes, *(f"not counted: {f.code}: {f.message}" for f in verdict.findings)),
        next_command=f"pytest -m gates -k '{history.case.case_id}'",
    )


def safe_judge(gate: Gate, history: History) -> r.Verdict:
    """Judge a case view; whatever goes wrong becomes HARNESS_ERROR, never PASS.

    A collection that was cut short or raised is HARNESS_ERROR whatever the records before it say; but for one that raised
    because an engine had ended by itself, which is the stack's doing. Nor is a case a PASS at whose end an engine is gone,
    nor a FAIL that keeps it to itself.
    """
    try:
        died = _died(gate, history) if history.complete else None
        if died is not None and (history.collect_error or not died.get("in_case")):
            return _dead_engine(gate, history, died)
        if history.collect_error:
            last = history.collect_error.strip().splitlines()[-1]
            finding = r.Finding(
                code=r.FindingCode.HARNESS_EXCEPTION, message=last, evidence={"traceback": history.collect_error}
            )
            return gate.verdict(
                history, r.Outcome.HARNESS_ERROR, findings=(finding,), got=last, wanted="the case runs to its end"
            )
        if not history.complete:
            finding = r.Finding(code=r.FindingCode.INCOMPLETE_CASE, message="the run ended inside this case")
            return gate.verdict(
                history,
                r.Outcome.HARNESS_ERROR,
                findings=(finding,),
                got=finding.message,
                wanted="the case runs to its end",
            )
        verdict = gate.judge(history)
        if died is not None and verdict.outcome in (r.Outcome.PASS, r.Outcome.INCONCLUSIVE):
            return _dead_engine(gate, history, died)
        if died is not None and verdict.outcome is r.Outcome.FAIL:
            verdict = _also_died(verdict, died)
        verdict = _paused(gate, history, verdict)
    except Exception:  # noqa: BLE001 - a crashed checker is unknown, never a pass; the traceback goes into the verdict
        text = traceback.format_exc()
        last = text.strip().splitlines()[-1]
        finding = r.Finding(code=r.FindingCode.CHECKER_CRASHED, message=last, evidence={"traceback": text})
        return r.Verdict(
            case_id=history.case.case_id,
            gate=gate.id,
            gate_version=gate.version,
            outcome=r.Outcome.HARNESS_ERROR,
            claim=gate.claim,
            findings=(finding,),
            got=last,
            wanted="a verdict",
        )
    if verdict.outcome is not outcome_of(verdict.findings):
        finding = r.Finding(
            code=r.FindingCode.CHECKER_CRASHED,
            message=f"{gate.id} judged {verdict.outcome} with findings that mean {outcome_of(verdict.findings)}",
        )
        return gate.verdict(
            history, r.Outcome.HARNESS_ERROR, findings=(finding, *verdict.findings), got=finding.message
        )
    return verdict
