"""Recovery (rule 7): back is not well. Hits return, KV usage returns to zero, the longest request fits, nothing grows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from statistics import median

from reports import records as r
from suite.checks.base import finding, too_few

GROWTH_FLOOR: Mapping[str, float] = {"sockets": 3.0, "threads": 3.0, "rss_bytes": float(64 << 20)}
"""Growth over all repetitions below which it is no leak: pools of sockets and threads fill lazily by a few, and an
allocator keeps tens of MB that it may reuse. Measured slack, not a law; gates may pass their own."""

STEADY = 0.7
"""Least Kendall tau (rises less falls, over all pairs of repetitions) of a growth. A single lasting jump among four or
more points reaches at most 2/3."""


def check_hits_back(wait: r.WaitRecord | None) -> list[r.Finding]:
    """Hits were seen again within the bound of the wait."""
    if wait is None:
        return too_few("nobody waited for hits to return")
    if wait.came_true and wait.elapsed_s <= wait.bound_s:
        return []
    state = f"only after {wait.elapsed_s:.1f} s" if wait.came_true else f"not within {wait.elapsed_s:.1f} s"
    return [
        finding(
            r.FindingCode.HITS_NOT_BACK,
            f"{wait.what}: {state} (bound {wait.bound_s:g} s{': ' + wait.bound_source if wait.bound_source else ''})",
            what=wait.what,
            elapsed_s=wait.elapsed_s,
            bound_s=wait.bound_s,
            came_true=wait.came_true,
        )
    ]


def check_first_good(wait: r.WaitRecord | None) -> list[r.Finding]:
    """After the heal, every engine answered a fresh request within the bound of the wait; else ``hang``."""
    if wait is None:
        return too_few("nobody asked the engines after the fault was healed")
    if wait.came_true:
        return []
    return [
        finding(
            r.FindingCode.HANG,
            f"{wait.elapsed_s:.1f} s after the fault was healed, not every engine answers a fresh request"
            f" (bound {wait.bound_s:g} s)",
            elapsed_s=wait.elapsed_s,
            bound_s=wait.bound_s,
        )
    ]


def check_nothing_left(snapshot: r.MetricsSnapshot | None) -> list[r.Finding]:
    """An engine that no client waits for has no request left: running or waiting ones hold KV for nobody (``kv-leak``)."""
    if snapshot is None:
        return too_few("no metrics of the idle engine")
    left = snapshot.values["running"] + snapshot.values["waiting"]
    if left == 0:
        return []
    return [
        finding(
            r.FindingCode.KV_LEAK,
            f"{snapshot.unit}: {left:g} requests are still in the engine, and no client waits for any",
            unit=snapshot.unit,
            running=snapshot.values["running"],
            waiting=snapshot.values["waiting"],
            kv_usage_ratio=snapshot.values["kv_usage_ratio"],
        )
    ]


def check_kv_released(snapshot: r.MetricsSnapshot | None, *, tolerance_ratio: float = 0.0) -> list[r.Finding]:
    """An idle engine uses no KV cache. ``kv_usage_ratio`` counts blocks that requests hold, not blocks kept for reuse.

    Requests still running or waiting make the snapshot useless: ``too-few-observations``.
    """
    if snapshot is None:
        return too_few("no metrics of the idle engine")
    values = snapshot.values
    for name in ("running", "waiting", "kv_usage_ratio"):
        if name not in values:
            raise KeyError(f"{snapshot.unit}: no {name!r} in snapshot {snapshot.label!r}")
    usage, busy = values["kv_usage_ratio"], values["running"] + values["waiting"]
    if busy > 0:
        return too_few(f"{snapshot.unit}: {busy:g} requests still in the engine at {snapshot.label!r}")
    if usage <= tolerance_ratio:  # false for a NaN, which is no zero
        return []
    return [
        finding(
            r.FindingCode.KV_LEAK,
            f"{snapshot.unit}: idle, and {usage:.2%} of the KV cache is still in use",
            unit=snapshot.unit,
            label=snapshot.label,
            kv_usage_ratio=usage,
            tolerance_ratio=tolerance_ratio,
        )
    ]


def check_at_rest(snapshot: r.MetricsSnapshot | None) -> list[r.Finding]:
    """An engine whose last request has ended comes to rest (else ``hang``: no client waits any more), and holds no KV."""
    if snapshot is None:
        return too_few("no metrics of the idle engine")
    running, waiting = snapshot.values["running"], snapshot.values["waiting"]
    if running + waiting == 0:
        return check_kv_released(snapshot)
    text = f"{snapshot.unit}: {running:g} running and {waiting:g} waiting requests where every request has ended"
    return [finding(r.FindingCode.HANG, text, unit=snapshot.unit, running=running, waiting=waiting)]


def check_admission(observation: r.Observation | None, max_model_len: int) -> list[r.Finding]:
    """A request of the engine's full length (prompt and max_tokens together) is admitted and answered."""
    if observation is None:
        return too_few("no request of full length was sent")
    o = observation
    asked = len(o.prompt_token_ids) + int(o.sampling.get("max_tokens", 0))
    if asked < max_model_len:
        return [
            finding(
                r.FindingCode.NO_PRESSURE,
                f"request {o.request_id} asks for {asked} of {max_model_len} tokens: that is not the longest request",
                request_id=o.request_id,
                asked_tokens=asked,
                max_model_len=max_model_len,
            )
        ]
    if o.ok and o.output_token_ids:
        return []
    why = "no answer in time" if o.timed_out else (o.error or "no token")
    return [
        finding(
            r.FindingCode.ADMISSION_REFUSED,
            f"request {o.request_id} of {asked} tokens on {o.engine}: status {o.http_status}, {why}",
            request_id=o.request_id,
            engine=o.engine,
            asked_tokens=asked,
            http_status=o.http_status,
            error=o.error,
            timed_out=o.timed_out,
        )
    ]


def check_growth(
    snapshots: Sequence[r.ProcessSnapshot],
    *,
    warmup: int = 1,
    min_points: int = 5,
    floors: Mapping[str, float] = GROWTH_FLOOR,
) -> list[r.Finding]:
    """Sockets, threads and resident memory of one unit do not grow with repetitions of the same thing.

    snapshots: one after each repetition, in order; the first ``warmup`` ones are left out (caches and pools fill).
    Rule: Theil-Sen slope x repetitions and the rise from first to last above the floor, *and* a steady rise (Kendall
    tau), all still so whichever one point is left out: no single outlier makes a growth.
    """
    units = {s.unit for s in snapshots}
    if len(units) > 1:
        raise ValueError(f"snapshots of several units: {', '.join(sorted(units))}")
    points = list(snapshots)[warmup:]
    if len(points) < max(3, min_points):
        return too_few(f"{len(points)} repetitions after {warmup} to warm up, {max(3, min_points)} needed")
    found: list[r.Finding] = []
    for name, floor in floors.items():
        series = [float(getattr(s, name)) for s in points]
        if not any(series):
            found += too_few(f"{points[0].unit}: {name} was never recorded", resource=name)
            continue
        points_of = list(enumerate(series))
        kept = [points_of, *([p for p in points_of if p[0] != i] for i in range(len(series)))]
        slope, tau = min(map(theil_sen, kept)), min(map(kendall_tau, kept))
        rise = min(points_left[-1][1] - points_left[0][1] for points_left in kept)
        if min(slope * (len(series) - 1), rise) > floor and tau >= STEADY:
            found.append(
                finding(
                    r.FindingCode.RESOURCE_GROWTH,
                    f"{points[0].unit}: {name} grows by {slope:.4g} a repetition"
                    f" ({series[0]:g} to {series[-1]:g} over {len(series)})",
                    unit=points[0].unit,
                    resource=name,
                    slope_per_repetition=slope,
                    tau=tau,
                    series=series,
                    floor=floor,
                )
            )
    return found


def theil_sen(points: Sequence[tuple[int, float]]) -> float:
    """Median of the slopes of all pairs of (step, value). ValueError for fewer than two, or a value that is no number."""
    if len(points) < 2 or not all(math.isfinite(y) for _, y in points):
        raise ValueError("a slope needs two numbers or more")
    return median((yb - ya) / (xb - xa) for (xa, ya), (xb, yb) in combinations(points, 2))


def kendall_tau(points: Sequence[tuple[int, float]]) -> float:
    """Rises less falls over all pairs, divided by the number of pairs: 1 for a steady rise, about 0 for noise."""
    signs = [(b > a) - (b < a) for (_, a), (_, b) in combinations(points, 2)]
    return sum(signs) / len(signs)
