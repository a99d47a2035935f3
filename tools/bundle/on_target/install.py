"""Install a bundle on the host it was made for. Standard library only; runs before anything is installed.

Verifies every part, makes an environment in PREFIX whose interpreter sees PREFIX first and then all that the host's own
interpreter sees, unpacks into it, links the shared libraries that the host lacks, and tries what the suite stands on.
An addition (``onto`` in the manifest) goes into a PREFIX that another bundle made, and takes the place of an addition of its name.
Exit codes: 0 ready, 1 installed but a check failed, 4 something to mend first.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
CHUNK_BYTES = 1 << 20
STAMP = "kvgates-bundle"
"""File of a prefix that says which bundle is in it."""
ADDED = "kvgates-added-{}"
"""File that lists what an addition put into site-packages."""


class InstallError(Exception):
    """One line: what is wrong and the mend."""


def say(text: str) -> None:
    """One line of progress."""
    sys.stdout.write(f"install: {text}\n")
    sys.stdout.flush()


class Parts(io.RawIOBase):
    """The parts as one stream."""

    def __init__(self, files: list[Path]) -> None:
        self._chunks = self._read_all(files)
        self._left = b""

    @staticmethod
    def _read_all(files: list[Path]) -> Iterator[bytes]:
        for file in files:
            with file.open("rb") as part:
                while chunk := part.read(CHUNK_BYTES):
                    yield chunk

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._left:
            self._left = next(self._chunks, b"")
        size = min(len(buffer), len(self._left))
        buffer[:size], self._left = self._left[:size], self._left[size:]
        return size


def check_host(manifest: dict[str, Any]) -> None:
    """The interpreter and the machine are those the bundle was made for. Raises InstallError."""
    want, have = manifest["python"], f"{sys.version_info[0]}.{sys.version_info[1]}"
    if have != want:
        raise InstallError(
            f"this bundle is for Python {want}, {sys.executable} is {have}; set PYTHON=/path/to/python{want}"
        )
    if os.uname().machine != manifest["machine"]:
        raise InstallError(f"this bundle is for {manifest['machine']}, this host is {os.uname().machine}")


def verified_parts(manifest: dict[str, Any], folder: Path) -> list[Path]:
    """All parts, each with the digest that the manifest gives. Raises InstallError that lists what is missing or broken."""
    missing, broken = [], []
    for part in manifest["parts"]:
        file = folder / part["name"]
        if not file.is_file():
            missing.append(part["name"])
            continue
        digest = hashlib.sha256()
        with file.open("rb") as stream:
            while chunk := stream.read(CHUNK_BYTES):
                digest.update(chunk)
        if digest.hexdigest() != part["sha256"]:
            broken.append(f"{part['name']} ({file.stat().st_size} of {part['size_bytes']} bytes)")
    if broken:
        raise InstallError(f"other bytes than the manifest says, bring again: {', '.join(broken)}")
    if missing:
        raise InstallError(f"still missing in {folder}: {', '.join(missing)}; run this again when they are here")
    return [folder / part["name"] for part in manifest["parts"]]


def make_environment(prefix: Path) -> Path:
    """An environment whose interpreter is the host's and sees the host's packages after its own. Returns site-packages."""
    venv.EnvBuilder(with_pip=False, symlinks=True, system_site_packages=False).create(prefix)
    site = site_of(prefix)
    host = [path for path in sys.path if path.endswith(("site-packages", "dist-packages")) and Path(path).is_dir()]
    lines = [f"import site; site.addsitedir({path!r})" for path in host]
    (site / "zz_host_packages.pth").write_text("\n".join(lines) + "\n", encoding="utf-8")
    pytest = prefix / "bin" / "pytest"
    pytest.write_text(f"#!{prefix}/bin/python\nimport sys\nimport pytest\nsys.exit(pytest.main())\n", encoding="utf-8")
    pytest.chmod(0o755)
    return site


def site_of(prefix: Path) -> Path:
    """Its site-packages."""
    return next((prefix / "lib").glob("python3*")) / "site-packages"


def open_addition(manifest: dict[str, Any], prefix: Path) -> Path:
    """Site-packages of a prefix that a bundle made, without what an earlier addition of this kind put there. Raises InstallError."""
    if not (prefix / STAMP).is_file():
        raise InstallError(
            f"{prefix} has no bundle in it yet, and this is an addition: install {manifest['onto']} there first"
        )
    site = site_of(prefix)
    listed = prefix / ADDED.format(manifest["onto"])
    files = [site / name for name in listed.read_text(encoding="utf-8").splitlines()] if listed.is_file() else []
    for file in files:
        file.unlink(missing_ok=True)
    folders = {parent for file in files for parent in file.parents if site in parent.parents}
    for folder in sorted(folders, key=lambda f: len(f.parts), reverse=True):
        if folder.is_dir() and all(entry.name == "__pycache__" for entry in folder.iterdir()):
            shutil.rmtree(folder)  # an empty .dist-info would still count as an installed release, of no version
    return site


def unpack(parts: list[Path], prefix: Path, site: Path) -> list[str]:
    """Unpack the stream: ``site/`` into site-packages, ``lib/`` beside it. Returns what went into site-packages."""
    written: list[str] = []
    tops = {"site": site, "lib": prefix / "carried-libraries"}
    with tarfile.open(fileobj=io.BufferedReader(Parts(parts), CHUNK_BYTES), mode="r|xz") as archive:
        for member in archive:
            top, _, rest = member.name.partition("/")
            if not member.isfile() or top not in tops or ".." in Path(rest).parts:
                raise InstallError(f"unexpected member {member.name!r}: this is no bundle of ours")
            source = archive.extractfile(member)
            assert source is not None  # a regular file
            path = tops[top] / rest
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as sink:  # not archive.extract: its safe filter is younger than some Python 3.11
                shutil.copyfileobj(source, sink, CHUNK_BYTES)
            path.chmod(member.mode & 0o755)
            written += [rest] if top == "site" else []
    return written


def link_libraries(manifest: dict[str, Any], prefix: Path, site: Path) -> None:
    """For each library that the host's loader does not find: the host's CUDA copy, else the carried one, where the
    bundle's binaries look for it. Raises InstallError when there is neither."""
    into = site / manifest["libraries_into"]
    for name, pattern in manifest["host_libraries"].items():
        if loads(name):
            continue
        found = [hit for path in sys.path if Path(path).is_dir() for hit in Path(path).glob(pattern)]
        if not found:
            raise InstallError(
                f"{name}: neither in the loader's cache nor at {pattern} of the host's packages; is its torch complete?"
            )
        link(into / name, found[0])
        say(f"{name}: from the host's {found[0]}")
    for name in manifest["libraries"]:
        if not loads(name):
            for carried in manifest["carried"]:  # with what it needs itself, from one and the same system
                link(into / carried, prefix / "carried-libraries" / carried)
            say(f"{name}: not on this host, carried one used (and {len(manifest['carried'])} beside it)")
            return


def loads(name: str) -> bool:
    """Whether the host's loader finds a library, tried in a process of its own."""
    code = f"import ctypes; ctypes.CDLL({name!r})"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def link(at: Path, to: Path) -> None:
    """Make a symbolic link, again if need be."""
    at.unlink(missing_ok=True)
    at.symlink_to(to)


ASK_VERSIONS = """
import importlib.metadata, json, sys
found = {}
for name in json.load(sys.stdin):
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        found[name] = None
json.dump(found, sys.stdout)
"""
ASK_FITS = """
import json, sys
from packaging.specifiers import SpecifierSet
json.dump([SpecifierSet(s).contains(v, prereleases=True) for s, v in json.load(sys.stdin)], sys.stdout)
"""


def ask(python: Path, code: str, data: Any) -> Any:
    """Run code in the new environment, JSON in and out. Raises InstallError with its own words."""
    done = subprocess.run([python, "-c", code], input=json.dumps(data), capture_output=True, text=True, check=False)
    if done.returncode:
        raise InstallError(f"{python} cannot run: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout)


def compare_versions(manifest: dict[str, Any], python: Path) -> int:
    """Say what the host has otherwise than the bundle was resolved for. Returns how many distributions are missing."""
    demands: dict[str, dict[str, str]] = manifest["demands"]
    found = ask(python, ASK_VERSIONS, list(demands))
    absent = [name for name in demands if found[name] is None and name not in manifest["left_out"]]
    for name in absent:
        say(f"MISSING {name}{demands[name]['specifier']}, asked for by {demands[name]['by']}")
    if found.get("packaging") is None:
        return len(absent)  # nothing here can compare versions, and the suite cannot run without it anyway
    there = [name for name in demands if found[name] is not None]
    fits = ask(python, ASK_FITS, [[demands[name]["specifier"], found[name]] for name in there])
    for name, fit in zip(there, fits, strict=True):
        if not fit:
            reason = manifest["accepted"].get(name, "not foreseen")
            say(f"note: {name} {found[name]}, {demands[name]['by']} ask for {demands[name]['specifier']} ({reason})")
    return len(absent)


def run_checks(manifest: dict[str, Any], python: Path) -> int:
    """Try each check in a process of its own. Returns how many failed; the true words of a failure are printed."""
    failed = 0
    for check in manifest["checks"]:
        started = time.monotonic()
        done = subprocess.run(
            [python, "-c", check], capture_output=True, text=True, check=False, cwd=python.parent.parent
        )
        words = "ok" if done.returncode == 0 else (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]
        failed += done.returncode != 0
        say(
            f"{'ok    ' if done.returncode == 0 else 'FAILED'} {time.monotonic() - started:5.1f} s  {check}"
            + ("" if words == "ok" else f": {words}")
        )
    return failed


def install(prefix: Path, parts_folder: Path, force: bool) -> int:
    """All steps; those done already for this very bundle are skipped. Returns the exit code."""
    text = (HERE / "manifest.json").read_text(encoding="utf-8")
    manifest = json.loads(text)
    key = hashlib.sha256(text.encode()).hexdigest()
    onto = manifest.get("onto", "")
    stamp = prefix / (f"{STAMP}-onto-{onto}" if onto else STAMP)
    check_host(manifest)
    python = prefix / "bin" / "python"
    if force or not stamp.is_file() or stamp.read_text(encoding="utf-8") != key:
        parts = verified_parts(manifest, parts_folder)
        say(f"{len(parts)} parts verified; unpacking {manifest['unpacked_bytes'] >> 20} MiB into {prefix}")
        if prefix.exists() and any(prefix.iterdir()) and not (prefix / "pyvenv.cfg").is_file():
            raise InstallError(f"{prefix} holds something else; give an empty folder")
        site = open_addition(manifest, prefix) if onto else make_environment(prefix)
        written = unpack(parts, prefix, site)
        if onto:
            (prefix / ADDED.format(onto)).write_text("\n".join(written) + "\n", encoding="utf-8")
        subprocess.run(
            [python, "-m", "compileall", "-q", "-q", "-j", "0", str(site)], check=False
        )  # spares each engine it
        stamp.write_text(key, encoding="utf-8")
    else:
        site = site_of(prefix)
        say(f"unpacked before: {prefix}")
    link_libraries(manifest, prefix, site)
    missing = compare_versions(manifest, python)
    failed = run_checks(manifest, python)
    if missing or failed:
        say(f"installed in {prefix}, but {missing} distributions are missing and {failed} checks failed")
        return 1
    say(f"ready: VENV={prefix} tools/run smoke --stack ...")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="install.sh", description="Install this bundle into a folder of its own.")
    parser.add_argument("prefix", type=Path, help="folder to install into (made if need be)")
    parser.add_argument("--parts", type=Path, default=HERE, help="folder of the parts (default: beside this script)")
    parser.add_argument("--force", action="store_true", help="unpack again")
    given = parser.parse_args()
    try:
        return install(given.prefix.absolute(), given.parts.absolute(), given.force)
    except InstallError as exc:
        sys.stderr.write(f"install: {exc}\n")
        return 4


if __name__ == "__main__":
    sys.exit(main())
