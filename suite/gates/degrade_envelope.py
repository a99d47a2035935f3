"""The degradation envelope of a cell as numbers: every request on the fault's own time axis, and what it all cost.

``reports.render.envelope`` draws it. Times are seconds since the fault was begun (negative: before it).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from reports import records as r
from reports.history import History
from suite.checks import degrade
from suite.gates.selections import kind_of

BEFORE = ("baseline", "short", "traffic")


def envelope(
    history: History, judged: Sequence[r.Observation], cold: Sequence[r.Observation], budget: Mapping[str, Any]
) -> dict[str, Any]:
    """Numbers of a verdict; {} where no fault was injected or nothing was answered before it.

    token_seconds_lost: over judged requests, prompt tokens x seconds beyond the baseline. good_again_s: first good
    answer after the last bad one, since the fault (0 where none was bad, absent where none was good again). hits_back_s: from
    the heal to the first hit across engines. envelope: what is drawn.
    """
    begin = next((f for f in history.faults("inject")), None)
    if begin is None or not any(o.ok and o.ttft_s is not None for o in cold):
        return {}
    factor, extra_s = float(budget["ttft_factor"]), float(budget["ttft_extra_s"])
    rows: list[dict[str, Any]] = []
    lost = 0.0
    for o in sorted([*cold, *judged], key=lambda o: o.sent_s):
        limit_s, base_s = degrade.limit_of(o, cold, factor=factor, extra_s=extra_s)
        after = o.sent_s >= begin.t_s or o.done_s >= begin.t_s
        if after:
            lost += degrade.lost_token_s(o, base_s)
        rows.append(_row(o, begin.t_s, limit_s, after))
    end_s = healed_s(history, begin)
    numbers = _counts([row for row in rows if row["after"]])
    hits = next((w for w in history.of(r.WaitRecord) if w.what == "hits-back"), None)
    return {
        "token_seconds_lost": round(lost),
        **numbers,
        **(
            {"hits_back_s": round(hits.t_s + hits.elapsed_s - (end_s or begin.t_s), 2)}
            if hits and hits.came_true
            else {}
        ),
        "envelope": {
            "fault": f"{begin.target} {history.case.params.get('fault', begin.fault)}",
            "healed_s": None if end_s is None else round(end_s - begin.t_s, 2),
            "budget": f"max({factor:g} x cold, cold + {extra_s:g} s)",
            "requests": rows,
        },
    }


def _row(o: r.Observation, begin_s: float, limit_s: float, after: bool) -> dict[str, Any]:
    return {
        "role": kind_of(o),
        "engine": o.engine,
        "at_s": round(o.sent_s - begin_s, 2),
        "took_s": round(o.ttft_s if o.ttft_s is not None else o.duration_s, 3),
        "limit_s": round(limit_s, 3),
        "fate": degrade.fate_of(o, limit_s),
        "after": after,
    }


def healed_s(history: History, begin: r.FaultRecord) -> float | None:
    """When the fault's end began: its heal, or the start of the dead unit; None where neither was."""
    heals = [f.t_s for f in history.faults("heal") if f.fault_id == begin.fault_id]
    starts = [a.t_s for a in history.of(r.StartAttempt) if a.unit == begin.target]
    times = [t for t in (*heals, *starts) if t >= begin.t_s]
    return min(times) if times else None


def _counts(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    fates = [row["fate"] for row in rows]
    numbers: dict[str, Any] = {f"{fate}_requests": fates.count(fate) for fate in ("good", "slow", "failed", "hang")}
    numbers["worst_ttft_s"] = max((row["took_s"] for row in rows), default=0.0)
    bad = [row for row in rows if row["fate"] != "good"]
    last_bad_s = max((row["at_s"] for row in bad), default=None)
    good = [
        row["at_s"] + row["took_s"]
        for row in rows
        if row["fate"] == "good" and (last_bad_s is None or row["at_s"] > last_bad_s)
    ]
    if last_bad_s is None:
        numbers["good_again_s"] = 0.0
    elif good:
        numbers["good_again_s"] = round(max(0.0, min(good)), 2)
    return numbers
