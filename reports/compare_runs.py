"""Reads runs for a comparison: their figures, and what has to be alike before figures may be compared.

A benchmark writes the fact ``bench.results``: a list of series, each with a name, unit, the better direction, and its values (one a
run, or one a sample). Values of series that were taken in turns with another run's carry the id of that interleaving and a
block number each; they are compared block by block.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Any, Literal

import msgspec

from reports import records as r
from reports.evidence import HISTORY_GLOB, LoadedRun, load_run

RESULTS = "bench.results"
"""Name of the fact; its value is a list of ``Series`` as plain data."""

KINDS = ("hardware", "model", "stack", "versions")
"""What runs may differ in; ``--allow`` names the difference that is the point."""


class Unlike(ValueError):  # noqa: N818 - one line of bad input
    """Runs that cannot be compared; the text names the difference and the option."""


class Series(r.Part, frozen=True, kw_only=True):
    """One benchmark of one run."""

    benchmark: str
    unit: str
    better: Literal["lower", "higher"]
    values: tuple[float, ...]
    blocks: tuple[int, ...] = ()
    interleaved: str = ""
    """Id of the interleaving that the values were taken in; "": in none."""

    @property
    def figure(self) -> float:
        """The run's own figure: the median of its values."""
        return median(self.values)

    def by_block(self) -> dict[tuple[str, int], float]:
        """Values by (interleaving, block); empty where they were taken in none."""
        if not self.interleaved or len(self.blocks) != len(self.values):
            return {}
        return {(self.interleaved, b): v for b, v in zip(self.blocks, self.values, strict=True)}


class BenchRun(r.Part, frozen=True, kw_only=True):
    """One run."""

    name: str
    wall_s: float
    likeness: dict[str, dict[str, str]]
    """Kind (``KINDS``) -> property -> value as text."""
    series: dict[str, Series]
    left_out: tuple[str, ...] = ()
    """Cases whose figures do not count, and why."""


class Side(r.Part, frozen=True, kw_only=True):
    """Runs of one stack or release."""

    name: str
    runs: tuple[BenchRun, ...]

    @property
    def benchmarks(self) -> dict[str, None]:
        """Names of all its benchmarks, in order."""
        return {name: None for run in self.runs for name in run.series}

    def series(self, benchmark: str) -> list[Series]:
        """A benchmark's series of every run that has it."""
        return [run.series[benchmark] for run in self.runs if benchmark in run.series]


def load_side(text: str) -> Side:
    """A side as named on the command line: the folder of a run, a folder of such folders, or several with commas.

    Raises Unlike (no runs, runs without figures, runs of one side that differ), and EvidenceError for what cannot be read.
    """
    folders = [folder for word in text.split(",") if word for folder in _run_folders(Path(word))]
    runs = tuple(sorted((read_run(load_run(f)) for f in folders), key=lambda x: x.wall_s))
    if not any(run.series for run in runs):
        raise Unlike(f"{text}: no figures of benchmarks in it; runs with `pytest -m bench` have some")
    side = Side(name=text.split(",")[0].rstrip("/").rsplit("/", 1)[-1] or text, runs=runs)
    for run in runs[1:]:
        for kind in KINDS:
            found = differences(runs[0], run, kind)
            if found:
                raise Unlike(f"{text}: its runs {runs[0].name} and {run.name} differ in {kind}: {found[0]}; split them")
    return side


def _run_folders(path: Path) -> list[Path]:
    if any(path.glob(HISTORY_GLOB)):
        return [path]
    found = sorted({p.parent for p in path.glob(f"*/{HISTORY_GLOB}")})
    if not found:
        raise Unlike(f"{path}: no run here; give the folder of a run, or a folder of such folders")
    return found


def read_run(run: LoadedRun) -> BenchRun:
    """Figures and likeness of a run. Cases that were cut short or spoiled by the harness give no figures."""
    history = run.history
    started = history.of(r.RunStarted)
    series: dict[str, Series] = {}
    left_out: list[str] = []
    for one in run.histories.values():
        verdicts = {v.case_id: v for v in one.of(r.Verdict)}
        for case_id in one.case_ids():
            view = one.for_case(case_id)
            fact = view.fact(RESULTS)
            if fact is None:
                continue
            verdict = verdicts.get(case_id)
            if not view.complete or view.collect_error or verdict is None:
                left_out.append(f"{case_id}: cut short")
            elif verdict.outcome is r.Outcome.HARNESS_ERROR:
                left_out.append(f"{case_id}: {verdict.finding}")
            else:
                series |= {s.benchmark: s for s in _series(fact.value, run.path)}
    return BenchRun(
        name=started[0].run_id if started else run.path,
        wall_s=started[0].wall_s if started else 0.0,
        likeness=likeness(started[0] if started else None, history.of(r.StackUp)),
        series=series,
        left_out=tuple(left_out),
    )


def _series(value: Any, where: str) -> list[Series]:
    try:
        found = msgspec.convert(value, list[Series], strict=False)
    except msgspec.ValidationError as exc:
        raise Unlike(f"{where}: figures that this version cannot read: {exc}") from exc
    return [s for s in found if s.values and all(math.isfinite(v) for v in s.values)]


# Likeness -----------------------------------------------------------------------------------------------------------
def likeness(started: r.RunStarted | None, stacks: Iterable[r.StackUp]) -> dict[str, dict[str, str]]:
    """What figures depend on besides what is compared, by kind."""
    host = started.host if started else {}
    hardware = {k: str(host.get(k, "")) for k in ("machine", "cpu_model", "cpus", "gpu")}
    hardware["memory_gib"] = str(round(float(host.get("memory_bytes", 0)) / 2**30))
    versions = {k: str(host.get(k, "")) for k in ("kernel", "python")}
    versions |= {f"installed {k}": str(v) for k, v in dict(host.get("versions", {})).items()}
    versions["kvgates"] = started.suite_version if started else ""
    model: dict[str, str] = {}
    stack: dict[str, str] = {}
    for up in {_spec_text(up): up for up in stacks}.values():
        place = up.spec.get("name", "")
        for engine in up.engines:
            model[f"{place}.{engine.name}"] = f"{Path(engine.model).name}, {engine.layers} layers"
            versions |= {f"{engine.name} {k}": v for k, v in engine.versions.items()}
    texts = sorted({_spec_text(up) for up in stacks})
    for number, text in enumerate(texts):
        stack |= {f"stack {number}{k}": v for k, v in _flat(msgspec.json.decode(text)).items()}
    return {"hardware": hardware, "model": model, "stack": stack, "versions": versions}


def _spec_text(up: r.StackUp) -> str:
    """The spec as text, without what other kinds say and what bears on no figure."""
    spec = {k: v for k, v in up.spec.items() if k not in ("bench", "timeouts", "budget")}
    spec["engines"] = [{k: v for k, v in e.items() if k != "model"} for e in spec.get("engines", [])]
    return msgspec.json.encode(spec, order="sorted").decode()


def _flat(value: Any, path: str = "") -> dict[str, str]:
    if isinstance(value, Mapping):
        return {k: v for key, inner in value.items() for k, v in _flat(inner, f"{path}.{key}").items()}
    if isinstance(value, list) and value:
        return {k: v for i, inner in enumerate(value) for k, v in _flat(inner, f"{path}[{i}]").items()}
    return {path: str(value)}


def differences(a: BenchRun, b: BenchRun, kind: str) -> list[str]:
    """``property: one, other`` for every property of a kind in which two runs differ."""
    one, other = a.likeness[kind], b.likeness[kind]
    names = [n for n in {**one, **other} if one.get(n) != other.get(n)]
    return [f"{n.strip('.')}: {one.get(n, 'absent')} and {other.get(n, 'absent')}" for n in names]
