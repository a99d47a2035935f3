"""Liveness: every request is answered in time, health endpoints are no proof, an engine stays the same engine."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

from reports import records as r
from suite.checks.base import finding, too_few

OVERRUN_S = 1.0
"""How far an answer may overrun its deadline before it counts as a hang although the client did not cut it off: one
scheduling hiccup of a loaded two-core host (seen: 0.3 s)."""

BAD_FINISH = frozenset({"error", "abort"})
"""Finish reasons with which vLLM ends a request that it did not complete."""


def check_liveness(observations: Sequence[r.Observation], *, min_requests: int = 1) -> list[r.Finding]:
    """Each request ended with status 200, a whole answer, within its deadline.

    Requests that the suite cancelled are left out. One finding a code and role (victims apart from bystanders), for the
    first such request, with the count.
    """
    judged = [o for o in observations if not o.cancelled]
    if len(judged) < min_requests:
        return too_few(f"{len(judged)} requests, {min_requests} needed", requests=len(judged), needed=min_requests)
    groups: dict[tuple[r.FindingCode, str], list[tuple[r.Observation, str]]] = {}
    for o in judged:
        complaint = _complaint(o)
        if complaint:
            groups.setdefault((complaint[0], o.role), []).append((o, complaint[1]))
    sent = {role: sum(o.role == role for o in judged) for role in {o.role for o in judged}}
    return [_group(code, role, items, sent[role]) for (code, role), items in groups.items()]


def _complaint(o: r.Observation) -> tuple[r.FindingCode, str] | None:
    if o.timed_out:
        return r.FindingCode.HANG, f"no complete answer within {o.deadline_s:g} s"
    if o.http_status != 200:
        status = "no HTTP status" if o.http_status is None else f"HTTP {o.http_status}"
        return r.FindingCode.FAILED_REQUEST, f"{status} after {o.duration_s:.2f} s: {o.error or 'no error text'}"
    if o.error:
        return r.FindingCode.FAILED_REQUEST, f"status 200, but {o.error}"
    if o.finish_reason is None or o.finish_reason in BAD_FINISH:
        return r.FindingCode.FAILED_REQUEST, f"status 200, but finish reason {o.finish_reason!r}"
    if not o.output_token_ids:
        return r.FindingCode.FAILED_REQUEST, "status 200, but no token was generated"
    if short := _cut_short(o):
        return r.FindingCode.FAILED_REQUEST, short
    if o.duration_s > o.deadline_s + OVERRUN_S:
        return r.FindingCode.HANG, f"answered after {o.duration_s:.2f} s, deadline {o.deadline_s:g} s"
    return None


def _cut_short(o: r.Observation) -> str:
    """An answer that ended at its length has that length; "" where it does (or asked for none). Two that were cut alike compare equal.

    vLLM refuses what does not fit into a context beside its ``max_tokens`` (400), so no answer ends there before.
    """
    asked = o.sampling.get("max_tokens")
    choices = [(o.finish_reason, o.output_token_ids), *((c.finish_reason, c.output_token_ids) for c in o.more_choices)]
    for number, (reason, tokens) in enumerate(choices):
        got = len(tokens)
        if isinstance(asked, int) and reason == "length" and got < asked:
            where = f" of choice {number}" if o.more_choices else ""
            return f"status 200, but finish reason 'length' after {got} of {asked} tokens{where}"
    return ""


def _group(code: r.FindingCode, role: str, items: list[tuple[r.Observation, str]], sent: int) -> r.Finding:
    first, why = items[0]
    who = f"{role} requests" if role else "requests"
    return finding(
        code,
        f"{len(items)} of {sent} {who}; first: {first.request_id} on {first.engine}: {why}",
        request_id=first.request_id,
        engine=first.engine,
        role=role,
        http_status=first.http_status,
        error=first.error,
        duration_s=first.duration_s,
        deadline_s=first.deadline_s,
        prompt_tokens=len(first.prompt_token_ids),
        count=len(items),
        sent=sent,
    )


def check_stuck(observations: Sequence[r.Observation], probes: Sequence[r.HealthProbe]) -> list[r.Finding]:
    """No engine says 200 on its health endpoint while a completion sent to it runs into its deadline.

    A probe belongs to a request when it was taken between sending and end. Without probes there is nothing to set
    beside a completion: ``too-few-observations``.
    """
    if not probes:
        return too_few("no health probe was taken beside the completions")
    if not observations:
        return too_few("no completion to set beside the health probes", probes=len(probes))
    for o in observations:
        if not o.timed_out:
            continue
        for probe in probes:
            if probe.engine == o.engine and probe.http_status == 200 and o.sent_s <= probe.t_s <= o.done_s:
                return [
                    finding(
                        r.FindingCode.STUCK_BEHIND_HEALTH,
                        f"{o.engine}: health said 200 at {probe.t_s - o.sent_s:.1f} s while request {o.request_id}"
                        f" got no answer in {o.deadline_s:g} s",
                        request_id=o.request_id,
                        engine=o.engine,
                        health_after_s=probe.t_s - o.sent_s,
                        deadline_s=o.deadline_s,
                        role=o.role,
                    )
                ]
    return []


def check_same_processes(before: r.ProcessSnapshot | None, after: r.ProcessSnapshot | None) -> list[r.Finding]:
    """Every process of the unit that lived before lives after: same pid *and* start time, neither zombie nor dead.

    New processes are allowed (helpers come and go); lost ones are ``engine-died``.
    """
    if before is None or after is None or not before.processes:
        return too_few("the processes of the unit were not recorded before and after")
    if before.unit != after.unit:
        raise ValueError(f"snapshots of two units: {before.unit} and {after.unit}")
    alive = {
        (p.pid, p.start_ticks) for p in after.processes if after.states.get(str(p.pid), "S") not in ("Z", "X", "x")
    }
    lost = [p for p in before.processes if (p.pid, p.start_ticks) not in alive]
    if not lost:
        return []
    first = lost[0]
    return [
        finding(
            r.FindingCode.ENGINE_DIED,
            f"{before.unit}: {len(lost)} of {len(before.processes)} processes are gone;"
            f" first: {first.title or first.name} (pid {first.pid})",
            unit=before.unit,
            pid=first.pid,
            title=first.title,
            lost=[{"pid": p.pid, "title": p.title} for p in lost],
            state_after=after.states.get(str(first.pid), "gone"),
        )
    ]


def check_clock(observations: Iterable[r.Observation]) -> list[r.Finding]:
    """The client's own times make sense (sent <= first token <= ... <= done, one time a token). Ours, not the stack's."""
    for o in observations:
        times = [o.sent_s, *(() if o.first_token_s is None else (o.first_token_s,)), *o.token_s, o.done_s]
        broken = not all(map(math.isfinite, times)) or any(a > b for a, b in itertools.pairwise(times))
        if not broken and o.token_s and o.ok and len(o.token_s) != len(o.output_token_ids):
            broken = True
        if broken:
            return [
                finding(
                    r.FindingCode.HARNESS_EXCEPTION,
                    f"request {o.request_id}: the client's times are out of order or incomplete",
                    request_id=o.request_id,
                    times_s=[t for t in times if math.isfinite(t)][:16],
                    tokens=len(o.output_token_ids),
                )
            ]
    return []
