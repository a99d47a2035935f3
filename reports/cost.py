"""What verdicts cost: seconds of each case, of bringing stacks up, and so GPU-minutes. From evidence alone."""

from __future__ import annotations

import math
from collections.abc import Iterable

from reports import records as r
from reports.evidence import LoadedRun


class Cost(r.Part, frozen=True, kw_only=True):
    """Of one run. Seconds; ``gpus``: different GPUs that its engines ran on (0: none)."""

    run_id: str
    gpus: int
    wall_s: float
    """From the first record to the last one, over workers one after the other."""
    stacks: int
    """Stacks that came up."""
    spans: tuple[tuple[float, float], ...] = ()
    """When each worker's file began and ended, in seconds since the epoch: runs that share a GPU overlap."""
    cases: dict[str, float] = {}
    """Case -> seconds from its first record to its last one; calibration of the oracle is in the first case of a stack."""

    @property
    def cases_s(self) -> float:
        """Seconds inside cases."""
        return sum(self.cases.values())

    @property
    def start_s(self) -> float:
        """Seconds outside of cases: stacks that start and stop."""
        return max(0.0, self.wall_s - self.cases_s)

    def gpu_minutes(self, seconds: float) -> float:
        """GPU-minutes that so many seconds of this run took."""
        return self.gpus * seconds / 60


def cost_of(run: LoadedRun) -> Cost:
    """The cost of a run. A case that was cut short has none (its verdict says so); one that was run again has its last."""
    cases: dict[str, float] = {}
    wall_s, stacks = 0.0, 0
    gpus: set[int] = set()
    run_id = ""
    spans: list[tuple[float, float]] = []
    for history in run.histories.values():
        started: dict[str, float] = {}
        times: list[float] = []
        began_s = 0.0
        for record in history:
            if isinstance(record, r.RunStarted):
                run_id, began_s = record.run_id, record.wall_s
            elif isinstance(record, r.StackUp):
                stacks += 1
                if record.spec.get("platform") == "cuda":
                    gpus |= {int(e.get("gpu") or 0) for e in record.spec.get("engines", [])}
            elif isinstance(record, r.CaseStarted):
                started[record.case_id] = record.t_s
            elif isinstance(record, r.CaseFinished) and record.case_id in started:
                cases[record.case_id] = round(record.t_s - started.pop(record.case_id), 2)
            if isinstance(at := getattr(record, "t_s", None), float):
                times.append(at)
        took_s = max(times) - min(times) if times else 0.0
        spans.append((round(began_s, 1), round(began_s + took_s, 1)))
        wall_s += took_s
    return Cost(
        run_id=run_id, gpus=len(gpus), wall_s=round(wall_s, 1), stacks=stacks, spans=tuple(sorted(spans)), cases=cases
    )


def covered_s(spans: Iterable[tuple[float, float]]) -> float:
    """Seconds during which at least one span lasted."""
    covered, end = 0.0, -math.inf
    for begin, stop in sorted(spans):
        covered += max(0.0, stop - max(begin, end))
        end = max(end, stop)
    return covered
