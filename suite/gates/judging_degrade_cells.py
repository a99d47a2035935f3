"""How a cell of the fault matrix is judged: the same checks whatever was hurt; victims, bystanders and traffic apart.

Phases and roles are those of ``suite.gates.degrade_collect``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from reports import records as r
from reports.history import History
from suite.checks import answers, degrade, liveness, logs, recovery
from suite.checks.base import finding, run, too_few
from suite.contract import Gate
from suite.gates.degrade_cells import CONTROL, ETCD, LEADER, MASTER, OWNER, PEER, Cell
from suite.gates.degrade_envelope import envelope, healed_s
from suite.gates.judging import explanation, ordered
from suite.gates.judging_degrade import control
from suite.gates.judging_degrade_pressure import check_landed, pressure, saved_before, surviving
from suite.gates.oracle import Oracle
from suite.gates.selections import budget_of, cold_pairs, kind_of
from suite.gates.stalls import stalls_of, without_stalls

JUDGED = ("victim", "bystander", "saving", "traffic", "returned")
"""Kinds of requests that have to be answered right, in time and within budget, whatever was done to the stack."""

BASELINE = ("baseline", "short", "traffic")

NO_MASTER = (MASTER, LEADER, ETCD, CONTROL)
"""Targets without which nothing can be looked up: a lookup that was refused may be counted nowhere."""

EXPLAINED = (
    r"(?i)master (view )?(is )?(not|un)\w*",
    r"(?i)(un)?mount|remount|re-?regist|heartbeat|ping|client.{0,30}(expired|timeout|disconnect|not found)",
    r"\b(INVALID_|OBJECT_|SEGMENT_|RPC_|TRANSFER_|NO_AVAILABLE_|REPLICA_|CLIENT_|LEASE_)\w+",
    r"(?i)client not available|not available",
    r"(?i)\berror=(object|replica|segment|client|lease|invalid|no_available|transfer|rpc)_?\w*",
    r"Request \S+ failed with an internal error during generation",  # a request that fails is judged as such
    r"(?i)eject|evict|reconnect|retry|timed? ?out|unreachable|lease expired",
    r"(?i)batch.{0,20}(exist|put|get|query).{0,40}(fail|error)|Failed to (put|get|query|check|submit|remount|mount|ping)",
)
"""Log lines that any fault of this family explains, beside those that the fault names itself. Crashes, tracebacks, assertions and
signals are never among them."""

NEVER_EXPLAINED = ("segfault", "crash", "assert", "traceback", "fatal", "cuda")
"""Categories (``suite.checks.logs``) that no fault of *another* unit explains."""

PREFERRED_CAUSES: dict[tuple[str, str], str] = {
    (
        MASTER,
        r.FindingCode.HANG,
    ): "the client asks a silent master without a time limit of its own, inside the scheduler",
    (
        CONTROL,
        r.FindingCode.HANG,
    ): "the client asks a silent master without a time limit of its own, inside the scheduler",
    (MASTER, r.FindingCode.SLOW_DEGRADE): "every lookup waits for the connection to a dead master to be given up",
    (OWNER, r.FindingCode.HANG): "a load from a silent owner has no time limit",
    (PEER, r.FindingCode.HANG): "a load from a silent owner has no time limit",
}
"""(target, finding) -> likely cause, where the general one of ``suite.gates.judging`` would point elsewhere."""


def judge_cell(gate: Gate, history: History) -> r.Verdict:
    """Judge a cell: proof, pressure, control; statuses, answers, budget, lookups; recovery; logs."""
    cell = Cell.of(history.case.params)
    oracle = Oracle.of(history)
    judged = judged_requests(history)
    victims = [o for o in judged if kind_of(o) in ("victim", "returned")]
    survivors = surviving(history)
    checks: dict[str, Callable[[], Sequence[r.Finding]]] = {
        "faults": lambda: check_landed(history),
        "pressure": lambda: pressure(history, cell),
        "visible": lambda: saved_before(history),
        "control": lambda: control(history) + stood_still(history),
        "oracle": oracle.check,
        "clock": lambda: liveness.check_clock(history.observations()),
        "liveness": lambda: liveness.check_liveness(judged),
        "stuck": lambda: stuck(history, judged),
        "same engines": lambda: [f for name in survivors for f in same_engine(history, name)],
        "answers": lambda: answered_right(history, victims, judged, oracle),
        "budget": lambda: within_budget(history, judged),
        "lookups": lambda: [f for name in survivors for f in lookups(history, cell, name)],
        "recovery": lambda: recovered(history, cell),
        "admission": lambda: [f for name in survivors for f in admission(history, name)],
        "kv": lambda: [f for name in survivors for f in kv_returned(history, name)],
        "logs": lambda: unexplained_logs(history),
    }
    findings, unattributed = attributed(run(checks))
    shape = envelope(history, judged, baseline(history), budget_of(history))
    spec = budget_of(history)
    why = explanation(history, findings)
    if findings and (cause := PREFERRED_CAUSES.get((cell.target, findings[0].code))):
        why["cause"] = cause
    return gate.judged(
        history,
        findings,
        good=f"{len(judged)} requests answered right, 200, within budget; hits back",
        wanted=f"200, the cold answer, TTFT at most max({spec['ttft_factor']:g} x cold, cold +"
        f" {spec['ttft_extra_s']:g} s), and the stack well again",
        numbers={**shape, **resources(history), **oracle.numbers()},
        notes=(*unattributed, *notes(history, cell, victims, oracle)),
        **why,
    )


TIMED = frozenset(
    {
        r.FindingCode.SLOW_DEGRADE,
        r.FindingCode.HANG,
        r.FindingCode.STUCK_BEHIND_HEALTH,
        r.FindingCode.UNBOUNDED_LOOKUPS,
        r.FindingCode.HITS_NOT_BACK,
    }
)
"""What a host that is too busy to read from the pool in time looks like, without any fault."""


def attributed(found: Sequence[r.Finding]) -> tuple[tuple[r.Finding, ...], tuple[str, ...]]:
    """(findings in order, notes). Where the control failed, what is a matter of time cannot be laid at the fault's door."""
    if not any(f.code is r.FindingCode.NO_CONTROL for f in found):
        return ordered(found), ()
    kept = [f for f in found if f.code not in TIMED]
    return ordered(kept), tuple(f"without a control: {f.code}: {f.message}" for f in found if f.code in TIMED)


def judged_requests(history: History) -> list[r.Observation]:
    """Requests that the claim is about, from the fault on, with the number taken off their roles."""
    found = [o for phase in ("degraded", "recovery") for o in history.observations(phase=phase) if kind_of(o) in JUDGED]
    return [msgspec.structs.replace(o, role=kind_of(o)) for o in found]


def baseline(history: History) -> list[r.Observation]:
    """What requests cost here with nothing broken. The time for which the host stood still is no cost: a baseline that holds it
    would allow every request after the fault three times as much."""
    stalls = stalls_of(history) or []
    return [without_stalls(o, stalls) for o in history.observations(phase="baseline") if kind_of(o) in BASELINE]


# How did requests fare? ---------------------------------------------------------------------------------------------


def stuck(history: History, judged: Sequence[r.Observation]) -> list[r.Finding]:
    """An engine that says it is healthy and answers *nothing*: judged by requests that need none of what was hurt.

    A victim that hangs on a healthy engine is a ``hang``; the engine is not stuck.
    """
    others = [o for o in judged if o.role in ("bystander", "traffic")]
    return liveness.check_stuck(others, history.of(r.HealthProbe))


def same_engine(history: History, name: str) -> list[r.Finding]:
    """The engine's processes are those from before the fault."""
    by_label = {s.label: s for s in history.of(r.ProcessSnapshot)}
    return liveness.check_same_processes(by_label.get(f"before/{name}"), by_label.get(f"after/{name}"))


def answered_right(
    history: History, victims: Sequence[r.Observation], judged: Sequence[r.Observation], oracle: Oracle
) -> list[r.Finding]:
    """Victims that were answered say what they said cold; traffic that two engines were asked for is answered alike."""
    pairs = [*cold_pairs(history, victims), *twins(judged)]
    if not pairs and not any(o.ok for o in victims):
        return []  # no victim was answered, which is ``liveness``'s business
    return answers.judge_cold(pairs, oracle.cold_limit_concurrent).findings


def twins(judged: Sequence[r.Observation]) -> list[answers.Pair]:
    """(answer, earlier answer) of equal prompts of the traffic."""
    first: dict[tuple[int, ...], r.Observation] = {}
    pairs: list[answers.Pair] = []
    for o in judged:
        if o.role != "traffic" or not o.ok:
            continue
        earlier = first.setdefault(o.prompt_token_ids, o)
        if earlier is not o:
            pairs.append((o, earlier))
    return pairs


def within_budget(history: History, judged: Sequence[r.Observation]) -> list[r.Finding]:
    """Answered requests kept the TTFT budget, against requests of the same shape before the fault."""
    answered = [o for o in judged if o.ok]
    if not answered:
        return []
    spec = budget_of(history)
    return degrade.check_budget(
        answered, baseline(history), factor=float(spec["ttft_factor"]), extra_s=float(spec["ttft_extra_s"])
    )


def lookups(history: History, cell: Cell, engine: str) -> list[r.Finding]:
    """Lookups of an engine between the snapshots around the fault, over the requests it got between them."""
    before, after = history.metrics(engine, "before-fault"), history.metrics(engine, "after-fault")
    if before is None or after is None:
        return too_few(f"{engine}: no counters around the fault", engine=engine)
    sent = [o for o in history.observations(engine=engine) if before.t_s <= o.sent_s <= after.t_s]
    found = degrade.check_lookups(
        sent, history.delta(engine, "before-fault", "after-fault"), max_lookups=int(budget_of(history)["max_lookups"])
    )
    if any(target in NO_MASTER for target, _ in cell.parts):
        found = [f for f in found if f.code is not r.FindingCode.NO_PRESSURE]
    return found


def resources(history: History) -> dict[str, Any]:
    """Sockets, threads and resident MiB of each survivor, before the fault and after the recovery; growth over many
    faults is the soak's to judge."""
    by_label = {s.label: s for s in history.of(r.ProcessSnapshot)}
    found = {}
    for name in surviving(history):
        before, after = by_label.get(f"before/{name}"), by_label.get(f"after/{name}")
        if before is not None and after is not None:
            found[name] = {
                "sockets": [before.sockets, after.sockets],
                "threads": [before.threads, after.threads],
                "rss_mib": [before.rss_bytes >> 20, after.rss_bytes >> 20],
            }
    return {"resources": found} if found else {}


def stood_still(history: History) -> list[r.Finding]:
    """The host had time for its processes from the fault on; else nothing that took long can be laid at the fault's door."""
    begin = next((f for f in history.faults("inject")), None)
    stalls = [s for s in stalls_of(history) or [] if begin is not None and s["from_s"] + s["stall_s"] >= begin.t_s]
    if not stalls:
        return []
    longest = max(stalls, key=lambda s: float(s["stall_s"]))
    return [
        finding(
            r.FindingCode.NO_CONTROL,
            f"the host stood still {len(stalls)} times, once for {longest['stall_s']:g} s: the suite itself was given no core",
            stalls=stalls[:10],
        )
    ]


# Is it well again? --------------------------------------------------------------------------------------------------


def waited(history: History, what: str) -> r.WaitRecord | None:
    """The wait of that name, or None."""
    return next((w for w in history.of(r.WaitRecord) if w.what == what), None)


def recovered(history: History, cell: Cell) -> list[r.Finding]:
    """What was started again came up; a first good answer, and hits, within their bounds; a joiner shares."""
    found: list[r.Finding] = []
    for attempt in history.of(r.StartAttempt):
        if attempt.result != "ready":
            message = f"{attempt.unit} was started again and is {attempt.result} after {attempt.elapsed_s:.0f} s"
            found.append(finding(r.FindingCode.NEVER_READY, message, log_tail=list(attempt.log_tail)[-5:]))
    if cell.left_broken:
        return found
    found += recovery.check_first_good(waited(history, "first-good"))
    found += recovery.check_hits_back(waited(history, "hits-back"))
    if cell.joiner and not any(a.unit == "joiner" and a.result != "ready" for a in history.of(r.StartAttempt)):
        found += recovery.check_hits_back(waited(history, "hits-joiner"))
    return found


def admission(history: History, engine: str) -> list[r.Finding]:
    """A request of full length is admitted after the fault."""
    asked = [o for o in history.observations(phase="after", engine=engine) if o.role == "maximum-length"]
    return recovery.check_admission(asked[-1] if asked else None, history.engine(engine).max_model_len)


def kv_returned(history: History, engine: str) -> list[r.Finding]:
    """The engine has given back all KV, and holds no request that nobody waits for."""
    idle = history.metrics(engine, f"idle/{engine}")
    left = recovery.check_nothing_left(idle)
    return left or recovery.check_kv_released(idle)


def unexplained_logs(history: History) -> list[r.Finding]:
    """As ``checks.logs``, with what every fault of this family explains; crashes of the survivors stay unexplained."""
    wider = [
        msgspec.structs.replace(rec, explains=(*rec.explains, *EXPLAINED)) if isinstance(rec, r.FaultRecord) else rec
        for rec in history.records
    ]
    found = logs.check_logs(History(wider, before=history.before))
    plain = logs.check_logs(history)
    grave = [f for f in plain if f.evidence.get("category") in NEVER_EXPLAINED]
    return [*grave, *(f for f in found if f.evidence.get("category") not in NEVER_EXPLAINED)]


HEAL_SHOWS_S = 2.0
"""An answer this soon after the heal is taken for its consequence: a thawed master answers within milliseconds, and a
connection that was dropped is tried again within a second."""


def waited_for_heal(history: History, cold: Sequence[r.Observation]) -> int:
    """Requests that took longer than their budget and ended within ``HEAL_SHOWS_S`` of the heal."""
    begin = next((f for f in history.faults("inject")), None)
    end_s = healed_s(history, begin) if begin else None
    if end_s is None or not any(o.ok and o.ttft_s is not None for o in cold):
        return 0
    spec = budget_of(history)
    count = 0
    for o in judged_requests(history):
        limit_s, _ = degrade.limit_of(o, cold, factor=float(spec["ttft_factor"]), extra_s=float(spec["ttft_extra_s"]))
        first_s = o.first_token_s
        if first_s is not None and first_s - o.sent_s > limit_s and end_s <= first_s <= end_s + HEAL_SHOWS_S:
            count += 1
    return count


def notes(history: History, cell: Cell, victims: Sequence[r.Observation], oracle: Oracle) -> Iterable[str]:
    """True and worth knowing: numerics, what the stack's proof of health said, growth of the survivors."""
    yield from answers.judge_cold(cold_pairs(history, victims), oracle.cold_limit_concurrent).notes
    waiting = waited_for_heal(history, baseline(history))
    if waiting:
        yield f"{waiting} requests were answered only when the fault was healed: nothing else bounded their wait"
    healthy = history.fact("healthy")
    if healthy is not None and healthy.value["complaints"]:
        yield "not handed on: " + "; ".join(healthy.value["complaints"])
    traffic = history.fact("traffic")
    if traffic is not None and traffic.value["left_out"]:
        yield f"{traffic.value['left_out']} requests of the traffic were not sent: too many were under way"
    if cell.left_broken:
        yield "the fault was not healed: recovery was not judged"
