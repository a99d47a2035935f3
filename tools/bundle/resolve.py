"""Which wheels the target lacks: the closure of what is wanted, given what the host has.

pip's own resolver cannot be told "this is there already, in a version that its neighbours were not written for, and it
works"; that is the normal case of a host with a torch of its own. So the closure is walked here: each distribution is
either on the host, left out with a reason, or fetched in the newest version that everything which asks for it accepts.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from email.parser import HeaderParser
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import NormalizedName, canonicalize_name, parse_wheel_filename

from tools.bundle.target import BundleError, Target, parse_requirement

MAX_ROUNDS = 20
"""Rounds until the chosen versions stop moving; real closures took three."""


@dataclass
class Demand:
    """Everything that asks for one distribution."""

    specifier: SpecifierSet = field(default_factory=SpecifierSet)
    extras: set[str] = field(default_factory=set)
    by: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Closure:
    """The outcome. ``wheels`` to bring; ``unmet`` what the host has in a version that somebody did not ask for."""

    wheels: dict[NormalizedName, Path]
    on_host: dict[NormalizedName, str]
    left_out: dict[NormalizedName, str]
    unmet: list[str]
    demands: dict[NormalizedName, Demand]


Fetch = Callable[[str, SpecifierSet], Path]
"""(distribution, specifier) -> the wheel of the newest version that fits."""


def resolve(target: Target, wanted: Iterable[str], fetch: Fetch) -> Closure:
    """Walk the closure. Raises BundleError when a host version is not accepted, or the versions do not settle."""
    roots = [parse_requirement(line, "want") for line in wanted]
    wheels: dict[NormalizedName, Path] = {}
    for _ in range(MAX_ROUNDS):
        demands = _demands(target, roots, wheels)
        chosen = {
            name: wheels[name] if _fits(wheels.get(name), demand) else fetch(name, demand.specifier)
            for name, demand in demands.items()
            if name not in target.have and name not in _names(target.spec.leave_out)
        }
        if chosen == wheels:
            return _closure(target, demands, wheels)
        wheels = chosen
    raise BundleError(f"{target.spec.name}: the versions do not settle after {MAX_ROUNDS} rounds; pin one in want")


def _names(table: Iterable[str]) -> set[NormalizedName]:
    return {canonicalize_name(name) for name in table}


def _fits(wheel: Path | None, demand: Demand) -> bool:
    return wheel is not None and demand.specifier.contains(parse_wheel_filename(wheel.name)[1], prereleases=True)


def _demands(
    target: Target, roots: list[Requirement], wheels: dict[NormalizedName, Path]
) -> dict[NormalizedName, Demand]:
    """Who asks for what, walking from the roots through the wheels at hand."""
    demands: dict[NormalizedName, Demand] = {}
    queue = [("want", root) for root in roots]
    walked: dict[NormalizedName, set[str]] = {}
    while queue:
        by, requirement = queue.pop()
        name = canonicalize_name(requirement.name)
        demand = demands.setdefault(name, Demand())
        demand.specifier &= requirement.specifier
        demand.extras |= requirement.extras
        demand.by.add(by)
        if name not in wheels or walked.get(name) == demand.extras:
            continue
        walked[name] = set(demand.extras)
        for need in requirements_of(wheels[name]):
            if any(_applies(need, target, extra) for extra in ("", *demand.extras)):
                queue.append((str(name), need))
    return demands


def _applies(need: Requirement, target: Target, extra: str) -> bool:
    return need.marker is None or need.marker.evaluate(target.environment | {"extra": extra})


def _closure(target: Target, demands: dict[NormalizedName, Demand], wheels: dict[NormalizedName, Path]) -> Closure:
    unmet: list[str] = []
    refused: list[str] = []
    on_host = {name: target.have[name] for name in demands if name in target.have}
    accepted = _names(target.spec.accept)
    for name, version in on_host.items():
        demand = demands[name]
        if version and not demand.specifier.contains(version, prereleases=True):
            line = f"{name} {version}, asked for {demand.specifier} by {', '.join(sorted(demand.by))}"
            (unmet if name in accepted else refused).append(line)
    if refused:
        raise BundleError(
            f"{target.spec.name}: the host has " + "; ".join(refused) + " (say why that is fine in [accept])"
        )
    reasons = {canonicalize_name(name): reason for name, reason in target.spec.leave_out.items()}
    left_out = {name: reasons[name] for name in demands if name in reasons}
    return Closure(wheels, on_host, left_out, unmet, demands)


def requirements_of(wheel: Path) -> list[Requirement]:
    """Requires-Dist of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        headers = HeaderParser().parsestr(archive.read(member).decode("utf-8"))
    return [Requirement(line) for line in headers.get_all("Requires-Dist") or []]


def pip_fetch(target: Target, wheelhouse: Path, say: Callable[[str], None]) -> Fetch:
    """Fetch with ``pip download`` for the target's platform, into a folder that later builds reuse."""
    wheelhouse.mkdir(parents=True, exist_ok=True)
    python = target.spec.python
    options = ["--no-deps", "--only-binary=:all:", "--python-version", python, "--implementation", "cp"]
    options += [f"--abi={abi}" for abi in (f"cp{python.replace('.', '')}", "abi3", "none")]
    options += [f"--platform={platform}" for platform in target.platforms]

    def fetch(name: str, specifier: SpecifierSet) -> Path:
        folder = wheelhouse / canonicalize_name(name)
        have = sorted(folder.glob("*.whl"), key=lambda p: parse_wheel_filename(p.name)[1], reverse=True)
        for wheel in have:
            if specifier.contains(parse_wheel_filename(wheel.name)[1], prereleases=True):
                return wheel
        say(f"fetching {name}{specifier}")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check"]
        done = subprocess.run(
            [*command, *options, "--dest", str(folder), f"{name}{specifier}"],
            capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        found = [p for p in folder.glob("*.whl") if p not in have]
        if done.returncode or not found:
            errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["pip said nothing"]
            raise BundleError(f"no wheel of {name}{specifier} for the target: {errors[-1]}")
        return found[0]

    return fetch
