"""What the target host is and has: a TOML file in ``tools/bundle/targets``, checked key by key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import NormalizedName, canonicalize_name

from tools.named import read_named

TARGETS_DIR = Path(__file__).parent / "targets"

OLDEST_MANYLINUX = 5
"""glibc 2.5, of manylinux1: the first that wheels were ever tagged for."""


class BundleError(Exception):
    """One line: what is wrong, where, and the mend."""


class TargetFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file as written. Every choice that makes the bundle smaller names its reason."""

    name: str
    python: str
    """``3.12``: minor version of the interpreter that will run the suite."""
    glibc: str
    """``2.39``: highest manylinux level the host can load."""
    machine: str = "x86_64"
    want: tuple[str, ...]
    """Requirements to bring, beside the base dependencies of the suite."""
    onto: str = ""
    """Another target: this one is an addition to its bundle, and is installed into the same prefix. Whatever that target's host has
    is there; what its bundle brings belongs into ``have``. The suite's own dependencies are not brought again."""
    have: tuple[str, ...] = ()
    """What the host has: ``name==version``, or a bare name where the version is not known."""
    leave_out: dict[str, str] = {}
    """Distribution -> reason why the suite does without it, although something asks for it."""
    accept: dict[str, str] = {}
    """Distribution of ``have`` -> reason why its version is good enough, although something asks for another."""
    drop: dict[str, str] = {}
    """Glob of files inside the wheels -> reason why they are not needed on this host."""
    cuda_arch: int = 0
    """90 for Hopper: GPU code of other architectures is cut out of the libraries. 0 keeps all of it."""
    strip: dict[str, str] = {}
    """Glob of libraries -> reason why their debug symbols can go (binutils' ``strip``). Not for libraries whose wheel was
    edited by patchelf: strip may break those."""
    libraries: tuple[str, ...] = ()
    """Shared libraries that the wheels link and a host may lack: carried, and used only where the host has none."""
    libraries_into: str = ""
    """Folder of site-packages that the wheels' binaries search for libraries (their RPATH)."""
    host_libraries: dict[str, str] = {}
    """Library -> glob below the host's own site-packages where its CUDA runtime lies."""
    checks: tuple[str, ...] = ()
    """Statements to run on the target at the end; each has to succeed."""


@dataclass(frozen=True)
class Target:
    """A checked target."""

    spec: TargetFile
    have: dict[NormalizedName, str]
    """Distribution -> version, "" where it is not known."""

    @property
    def platforms(self) -> list[str]:
        """Platform tags that pip may choose from, the newest first."""
        newest = int(self.spec.glibc.partition(".")[2])
        machine = self.spec.machine
        modern = [f"manylinux_2_{level}_{machine}" for level in range(newest, OLDEST_MANYLINUX - 1, -1)]
        return [
            *modern,
            f"manylinux2014_{machine}",
            f"manylinux2010_{machine}",
            f"manylinux1_{machine}",
            f"linux_{machine}",
        ]

    @property
    def environment(self) -> dict[str, str]:
        """Values of environment markers on the target."""
        return {
            "implementation_name": "cpython",
            "implementation_version": f"{self.spec.python}.0",
            "os_name": "posix",
            "platform_machine": self.spec.machine,
            "platform_python_implementation": "CPython",
            "platform_release": "",
            "platform_system": "Linux",
            "platform_version": "",
            "python_full_version": f"{self.spec.python}.0",
            "python_version": self.spec.python,
            "sys_platform": "linux",
        }


def load_target(name: str) -> Target:
    """Read a target: a path, or the name of a ready one. Raises BundleError."""
    target = _read_target(name)
    return Target(target.spec, {**_read_target(target.spec.onto).have, **target.have}) if target.spec.onto else target


def _read_target(name: str) -> Target:
    path, spec = read_named(name, TARGETS_DIR, TargetFile, asked=f"TARGET={name}", error=BundleError)
    for label, text in (("python", spec.python), ("glibc", spec.glibc)):
        if not all(part.isdigit() for part in text.split(".")) or text.count(".") != 1:
            raise BundleError(f"{path}: {label} = {text!r}: wants major.minor, as in '3.12'")
    have: dict[NormalizedName, str] = {}
    for line in spec.have:
        requirement = parse_requirement(line, path.name)
        versions = [part.version for part in requirement.specifier if part.operator == "=="]
        if len(versions) != len(requirement.specifier):
            raise BundleError(f"{path}: have = {line!r}: wants name==version, or a bare name")
        have[canonicalize_name(requirement.name)] = versions[0] if versions else ""
    for table, names in (("accept", spec.accept), ("leave_out", spec.leave_out)):
        for entry, reason in names.items():
            if not reason.strip():
                raise BundleError(f"{path}: {table}.{entry}: wants a reason")
    return Target(spec, have)


def with_releases(target: Target, releases: Sequence[str]) -> Target:
    """The target with other releases of what it wants (``vllm==0.25.1``), named after them: two of them can lie on one host,
    a prefix each, and their verdicts side by side. Raises BundleError for what the target does not want anyway."""
    wanted = {canonicalize_name(parse_requirement(line, target.spec.name).name): line for line in target.spec.want}
    name = target.spec.name
    asked_for: set[str] = set()
    for line in releases:
        asked = parse_requirement(line, "--want")
        package = canonicalize_name(asked.name)
        versions = [part.version for part in asked.specifier if part.operator == "=="]
        plain = len(versions) == len(asked.specifier) == 1 and "*" not in versions[0]
        if not plain or asked.url or asked.marker or asked.extras or package in asked_for:
            raise BundleError(f"--want {line}: wants NAME==VERSION, once for each NAME")
        if package not in wanted:
            raise BundleError(f"--want {line}: {target.spec.name} wants no {asked.name}; it wants {', '.join(wanted)}")
        asked_for.add(package)
        wanted[package] = line
        name += f"-{package}-{versions[0]}"
    spec = msgspec.structs.replace(target.spec, name=name, want=tuple(wanted.values()))
    return Target(spec, target.have)


def parse_requirement(line: str, where: str) -> Requirement:
    """A requirement string. Raises BundleError."""
    try:
        return Requirement(line)
    except InvalidRequirement as exc:
        raise BundleError(f"{where}: {line!r} is no requirement: {str(exc).splitlines()[0]}") from exc
