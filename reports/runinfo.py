"""What a run was: stacks, versions, deviations from upstream defaults, host. Drawn from evidence alone."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from reports import records as r
from reports.history import History

HOST_FIELDS = (
    "platform",
    "system",
    "kernel",
    "machine",
    "cpu",
    "cpu_model",
    "cpus",
    "cores",
    "memory_bytes",
    "gpus",
    "gpu",
    "python",
)
"""Fields of ``RunStarted.host`` that a report may show. Names and addresses of machines are not among them."""

TTFT_POINTS = 400
"""Most points kept a role; more would only paint over each other in a plot 600 pixels wide."""


class StackInfo(r.Part, frozen=True, kw_only=True):
    """One stack that came up in the run."""

    stack_id: str
    name: str = ""
    runtime: str = ""
    platform: str = ""
    transport: str = ""
    engines: tuple[r.EngineFacts, ...] = ()
    deviations: tuple[r.Deviation, ...] = ()
    start_s: dict[str, float] = {}


class RunInfo(r.Part, frozen=True, kw_only=True):
    """The run behind a scoreboard. Empty where nothing is known."""

    run_id: str = ""
    suite_version: str = ""
    wall_s: float = 0.0
    command: tuple[str, ...] = ()
    host: dict[str, Any] = {}
    stacks: tuple[StackInfo, ...] = ()
    complete: bool = True
    """False for a run that was cut short (no last record)."""
    requests: int = 0
    ttft_s: dict[str, tuple[float, ...]] = {}
    """Role -> time to first token of its requests in seconds, evenly thinned to ``TTFT_POINTS`` a role."""

    @property
    def versions(self) -> dict[str, str]:
        """Versions of every package that an engine of the run reported; several are joined by ``/``."""
        seen: dict[str, dict[str, None]] = {}
        for stack in self.stacks:
            for engine in stack.engines:
                for package, version in engine.versions.items():
                    seen.setdefault(package, {})[version] = None
        return {package: "/".join(versions) for package, versions in sorted(seen.items())}

    @property
    def deviations(self) -> tuple[r.Deviation, ...]:
        """Every deviation from upstream defaults, each once."""
        found = {(d.where, d.setting, d.ours): d for stack in self.stacks for d in stack.deviations}
        return tuple(found.values())


def run_info(histories: Iterable[History], complete: bool | None = None) -> RunInfo:
    """Gather what a run was from the histories of its workers.

    complete: whether the run came to its end; by default, whether its last record says so (a report made while the run
    is about to write that record passes True).
    """
    every = list(histories)
    started = [rec for h in every for rec in h.of(r.RunStarted)]
    first = started[0] if started else None
    ttft: dict[str, list[float]] = {}
    requests = 0
    for history in every:
        for o in history.of(r.Observation):
            requests += 1
            role = o.role.partition("/")[0] or "other"  # victim/0, victim/1, ... are one role
            if o.ttft_s is not None and o.ok and role != "warm-up":
                ttft.setdefault(role, []).append(o.ttft_s)
    return RunInfo(
        run_id=first.run_id if first else "",
        suite_version=first.suite_version if first else "",
        wall_s=first.wall_s if first else 0.0,
        command=first.command if first else (),
        host={k: first.host[k] for k in HOST_FIELDS if k in first.host} if first else {},
        stacks=tuple(_stack_info(up) for up in _stacks(every)),
        complete=any(h.last(r.RunFinished) for h in every) if complete is None else complete,
        requests=requests,
        ttft_s={role: _thinned(values) for role, values in sorted(ttft.items())},
    )


def _stacks(histories: list[History]) -> list[r.StackUp]:
    return list({up.stack_id: up for h in histories for up in h.of(r.StackUp)}.values())


def _stack_info(up: r.StackUp) -> StackInfo:
    return StackInfo(
        stack_id=up.stack_id,
        name=str(up.spec.get("name", "")),
        runtime=str(up.spec.get("runtime", "")),
        platform=str(up.spec.get("platform", "")),
        transport=str(up.spec.get("transport", "")),
        engines=up.engines,
        deviations=up.deviations,
        start_s=up.start_s,
    )


def _thinned(values: list[float]) -> tuple[float, ...]:
    step = max(1, math.ceil(len(values) / TTFT_POINTS))
    return tuple(values[::step])
