"""The soak: random faults from a seed, one after the other, under steady traffic, on one stack.

What single cells cannot show: that the tenth recovery is as good as the first. ``schedule`` is a pure function of the
seed, so a run is replayed by its seed; faults that a later version removes leave a tombstone in ``MENU``, so that old
seeds keep their meaning.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from reports import records as r
from reports.history import History
from suite.checks import answers, faults, liveness, recovery
from suite.checks.base import finding, run, too_few
from suite.contract import Gate
from suite.gates.degrade_cells import CONTROL, DATA, HEALS, MASTER, OWNER, POOL, Cell, Heal
from suite.gates.judging import explanation, ordered
from suite.gates.judging_degrade_cells import same_engine, twins, unexplained_logs, within_budget
from suite.gates.judging_degrade_pressure import check_landed, surviving
from suite.gates.oracle import Oracle
from suite.gates.rolling import touched_by_stalls
from suite.gates.stalls import StallWatch, stalled, stalls_of

if TYPE_CHECKING:
    from fixtures.stack import Stack
    from suite.gates.degrade_traffic import Traffic

MENU: tuple[tuple[str, str], ...] = (
    (MASTER, "kill"),
    (MASTER, "freeze"),
    (MASTER, "restart"),
    (OWNER, "kill"),
    (OWNER, "freeze"),
    (OWNER, "restart"),
    (CONTROL, "drop"),
    (DATA, "drop"),
    (DATA, "reset"),
    (POOL, "evict"),
)
"""(target, fault) that a soak draws from. Only append; replace what has to go with ("", ""). No engine is killed: it takes
40 s to come back, and cells of the matrix do that. A turn that this host cannot make is left out, and said."""

LASTS_S = (1.0, 14.0)
"""A fault lasts from a second, in which little is noticed, to beyond the default client TTL (10 s)."""

QUIET_S = (3.0, 8.0)
"""Between the proof of health after one fault and the next fault; traffic sent meanwhile has to be good."""

MIN_FAULTS, MIN_QUIET = 3, 20
"""Fewer faults, or fewer requests outside them, say nothing about lasting."""

MIN_REPETITIONS = 5
"""Snapshots (after one to warm up) below which growth is not judged."""

HARNESS = "harness"
"""Unit name of this process in the snapshots: the suite's own memory has to be bounded too."""


@dataclass(frozen=True)
class Turn:
    """One fault of a soak: what, how long, and how long it is quiet before it."""

    number: int
    target: str
    fault: str
    quiet_s: float
    lasts_s: float


def schedule(seed: int) -> Iterator[Turn]:
    """The faults of a seed, without end."""
    rng = random.Random(f"soak/{seed}")
    number = 0
    while True:
        target, fault = MENU[rng.randrange(len(MENU))]
        turn = Turn(number, target, fault, round(rng.uniform(*QUIET_S), 2), round(rng.uniform(*LASTS_S), 2))
        if target:
            yield turn
            number += 1


def replay_command(params: dict[str, Any]) -> str:
    """What repeats a soak."""
    return f"pytest -m gates -k D.soak --soak {params['duration_s']:g}s --soak-seed {params['seed']}"


# Collecting ---------------------------------------------------------------------------------------------------------


def collect_soak(stack: Stack, case_id: str, params: dict[str, Any]) -> None:
    """Faults until the time is over, or until the stack is not well any more. Decides nothing."""
    with StallWatch(stack):
        _collect(stack, case_id, params)


def _collect(stack: Stack, case_id: str, params: dict[str, Any]) -> None:
    from suite.gates.degrade_collect import CellCollector
    from suite.gates.degrade_traffic import Traffic

    until_s = time.monotonic() + float(params["duration_s"])
    collector = CellCollector(stack, case_id, Cell(MASTER, "freeze"))
    collector.prepare()
    plan = collector.plan
    stack.fact("soak.replay", replay_command(params))
    with Traffic(stack, case_id, collector.prompts, plan.survivors, "baseline", plan.deadline_s) as traffic:
        _wait_until(stack, time.monotonic() + QUIET_S[1], "the traffic's baseline")
        traffic.phase = "soak"
        for turn in takewhile(lambda _: time.monotonic() < until_s, schedule(int(params["seed"]))):
            if not _possible(turn):
                stack.fact("soak.left-out", {"number": turn.number, "target": turn.target, "fault": turn.fault})
                continue
            _wait_until(stack, time.monotonic() + turn.quiet_s, "the next fault")
            if not _turn(stack, case_id, turn, traffic):
                break
    stack.fact("traffic", {"sent": traffic.sent, "left_out": traffic.left_out})
    for name in plan.survivors:
        stack.snapshot_processes(name, f"after/{name}")
    stack.scan_logs(case_id)


def _possible(turn: Turn) -> bool:
    """This host has what the fault needs."""
    from fixtures.capabilities import probe
    from suite.gates.degrade_faults import needs_of

    return all(probe(need).ok for need in needs_of(Cell(turn.target, turn.fault)))


def _turn(stack: Stack, case_id: str, turn: Turn, traffic: Traffic) -> bool:
    """One fault and its recovery. Returns whether the stack is well again."""
    from fixtures.healthy import prove_healthy
    from suite.gates.degrade_collect import CellCollector

    heal: Heal = "before-ttl" if turn.fault in HEALS else "none"
    collector = CellCollector(stack, case_id, Cell(turn.target, turn.fault, heal=heal))
    started_s = time.monotonic()
    with stack.phase(case_id, "turn"):
        collector.hurt()
        if heal != "none":
            _wait_until(stack, started_s + turn.lasts_s, "the end of the fault")
        collector.mend()
        good = collector.wait_good()
    with traffic.paused():  # the proof counts tokens: those of other requests would be taken for its own
        complaints = prove_healthy(stack, case_id)
    stack.fact(
        "soak.turn",
        {
            "number": turn.number,
            "target": turn.target,
            "fault": turn.fault,
            "lasts_s": turn.lasts_s,
            "started_s": started_s,
            "ended_s": time.monotonic(),
            "good": good,
            "complaints": complaints,
        },
    )
    for name in stack.names:
        stack.snapshot_processes(name, f"turn/{turn.number}")
    stack.record(harness_snapshot(f"turn/{turn.number}"))
    stack.scan_logs(case_id)
    return not complaints


def _wait_until(stack: Stack, due_s: float, what: str) -> None:
    stack.wait(
        what,
        partial(_past, due_s),
        bound_s=max(0.0, due_s - time.monotonic()) + 1,
        bound_source="the soak's schedule",
        poll_s=0.1,
    )


def _past(due_s: float) -> bool:
    return time.monotonic() >= due_s


def harness_snapshot(label: str) -> r.ProcessSnapshot:
    """Sockets, threads and memory of the suite's own process."""
    import os

    from fixtures.runtimes.proc import fd_targets, read_stat

    pid = os.getpid()
    stat = read_stat(pid)
    assert stat is not None
    facts = r.ProcessFacts(name=HARNESS, pid=pid, ppid=os.getppid(), start_ticks=stat.start_ticks)
    return r.ProcessSnapshot(
        unit=HARNESS,
        t_s=time.monotonic(),
        label=label,
        processes=(facts,),
        states={str(pid): stat.state},
        threads=stat.threads,
        sockets=sum(target.startswith("socket:") for target in fd_targets(pid)),
        rss_bytes=stat.rss_pages * os.sysconf("SC_PAGE_SIZE"),
    )


# Judging ------------------------------------------------------------------------------------------------------------


def judge_soak(gate: Gate, history: History) -> r.Verdict:
    """One verdict: outside faults all is good; after each all is well; nothing grows; no answer is ever wrong."""
    oracle = Oracle.of(history)
    turns = [fact.value for fact in history.facts("soak.turn")]
    traffic = [o for o in history.observations(phase="soak") if o.role == "traffic"]
    stalls = stalls_of(history) or []
    beside = [o for o in traffic if not _overlaps(o, turns)]
    quiet = [o for o in beside if not stalled(o, stalls)]
    checks = {
        "faults": lambda: check_landed(history),
        "pressure": lambda: _pressure(turns, quiet, surviving(history)),
        "oracle": oracle.check,
        "clock": lambda: liveness.check_clock(history.observations()),
        "answers": lambda: _answers(traffic, oracle),
        "quiet traffic": lambda: liveness.check_liveness(quiet),
        "touched": lambda: touched_by_stalls(history, beside, stalls),
        "budget": lambda: within_budget(history, quiet),
        "same engines": lambda: [f for name in surviving(history) for f in same_engine(history, name)],
        "well again": lambda: _well_again(turns),
        "growth": lambda: _growth(history, len(turns)),
        "logs": lambda: unexplained_logs(history),
    }
    findings = ordered(run(checks))
    inside = [o for o in traffic if _overlaps(o, turns)]
    replay = replay_command(history.case.params)
    why = {**explanation(history, findings), "next_command": replay} if findings else {}
    return gate.judged(
        history,
        findings,
        good=f"{len(turns)} faults, well after each; {len(quiet)} requests beside them good",
        wanted="traffic outside faults answered right and in time, the stack well after each fault, nothing grows",
        numbers={
            "faults": len(turns),
            "requests": len(traffic),
            "requests_outside_faults": len(quiet),
            "requests_while_the_host_stood_still": sum(stalled(o, stalls) for o in traffic),
            "failed_inside_faults": sum(not o.ok and not o.timed_out for o in inside),
            "unanswered_inside_faults": sum(o.timed_out for o in inside),
            "seed": history.case.params["seed"],
            **_memory(history),
        },
        notes=(f"replay: {replay}", *_growth_note(len(turns)), *_left_out(history)),
        **why,
    )


def _overlaps(o: r.Observation, turns: Sequence[dict[str, Any]]) -> bool:
    """The request was under way during a fault or before the stack was proven well after it."""
    return any(o.sent_s <= turn["ended_s"] and o.done_s >= turn["started_s"] for turn in turns)


def _pressure(
    turns: Sequence[dict[str, Any]], quiet: Sequence[r.Observation], looked_at: Sequence[str]
) -> list[r.Finding]:
    found = faults.no_pressure("engines that were looked at before and after", len(looked_at), 1)
    if len(turns) < MIN_FAULTS and all(not turn["complaints"] for turn in turns):
        found += too_few(f"{len(turns)} faults, {MIN_FAULTS} needed: give the soak more time", faults=len(turns))
    if turns and not any(turn["complaints"] for turn in turns):
        found += faults.no_pressure("requests outside faults", len(quiet), MIN_QUIET if len(turns) >= MIN_FAULTS else 1)
    return found


def _answers(traffic: Sequence[r.Observation], oracle: Oracle) -> list[r.Finding]:
    pairs = twins(traffic)
    if not pairs:
        return too_few("no prompt of the traffic was answered by two engines")
    return answers.judge_cold(pairs, oracle.cold_limit_concurrent).findings


def _well_again(turns: Sequence[dict[str, Any]]) -> list[r.Finding]:
    for turn in turns:
        if turn["complaints"] or not turn["good"]:
            what = "; ".join(turn["complaints"]) or "no engine gave a good answer in time"
            return [
                finding(
                    r.FindingCode.HITS_NOT_BACK,
                    f"after fault {turn['number'] + 1} ({turn['fault']} of {turn['target']}, {turn['lasts_s']:g} s): {what}",
                    **turn,
                )
            ]
    return []


def _growth(history: History, turns: int) -> list[r.Finding]:
    if turns <= MIN_REPETITIONS:
        return []  # said in a note: a short soak may still be judged for everything else
    found: list[r.Finding] = []
    snapshots = [s for s in history.of(r.ProcessSnapshot) if s.label.startswith("turn/")]
    if not snapshots:
        return too_few("no process was looked at after any fault")
    for unit in dict.fromkeys(s.unit for s in snapshots):
        found += recovery.check_growth([s for s in snapshots if s.unit == unit], min_points=MIN_REPETITIONS)
    return found


def _growth_note(turns: int) -> tuple[str, ...]:
    if turns > MIN_REPETITIONS:
        return ()
    return (f"growth was not judged: {turns} faults, more than {MIN_REPETITIONS} needed",)


def _left_out(history: History) -> tuple[str, ...]:
    """What this host could not do."""
    names = sorted({f"{f.value['fault']} of {f.value['target']}" for f in history.facts("soak.left-out")})
    return (f"left out, as this host cannot do it: {', '.join(names)}",) if names else ()


def _memory(history: History) -> dict[str, Any]:
    """Resident memory of each unit, first and last, in MiB."""
    found: dict[str, Any] = {}
    for snapshot in history.of(r.ProcessSnapshot):
        if snapshot.label.startswith("turn/"):
            first, _ = found.get(f"rss_{snapshot.unit}_mib", (snapshot.rss_bytes >> 20, 0))
            found[f"rss_{snapshot.unit}_mib"] = (first, snapshot.rss_bytes >> 20)
    return {name: list(pair) for name, pair in found.items()}
