"""The air-gapped bundle: what goes in, what is cut, and that it installs from its parts and from nothing else."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import msgspec
import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name, parse_wheel_filename

from tools.bundle import __main__ as bundle
from tools.bundle import pack, slim
from tools.bundle.resolve import Fetch, resolve
from tools.bundle.target import BundleError, Target, TargetFile, load_target, with_releases

pytestmark = pytest.mark.selftest

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


def wheel(folder: Path, name: str, version: str, *needs: str, **files: bytes) -> Path:
    """A real wheel: metadata, and files named with ``__`` for the slash."""
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    requires = "".join(f"Requires-Dist: {need}\n" for need in needs)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}")
        archive.writestr(f"{name}/__init__.py", f"version = {version!r}\n")
        for member, data in files.items():
            archive.writestr(member.replace("__", "/"), data)
    return path


def target(have: dict[str, str] | None = None, **fields: object) -> Target:
    spec = msgspec.convert(
        {"name": "made-up", "python": PYTHON, "glibc": "2.31", "want": ["app"], **fields}, TargetFile
    )
    return Target(spec, {canonicalize_name(name): version for name, version in (have or {}).items()})


def from_folder(folder: Path) -> Fetch:
    """Fetch from wheels at hand, as pip would: the newest that fits."""

    def fetch(name: str, specifier: SpecifierSet) -> Path:
        fitting = [
            (parsed[1], path)
            for path in folder.glob("*.whl")
            if (parsed := parse_wheel_filename(path.name))[0] == name and specifier.contains(parsed[1])
        ]
        if not fitting:
            raise BundleError(f"no wheel of {name}{specifier} for the target: none")
        return max(fitting)[1]

    return fetch


def chosen(made: Target, folder: Path) -> set[str]:
    return {path.name.split("-py3")[0] for path in resolve(made, made.spec.want, from_folder(folder)).wheels.values()}


def test_closure_takes_the_newest_that_all_accept(tmp_path: Path) -> None:
    wheel(tmp_path, "app", "1.0", "lib", "other[fast]", "windows_only; sys_platform == 'win32'")
    for version in ("1.0", "2.0", "3.0"):
        wheel(tmp_path, "lib", version)
    wheel(tmp_path, "other", "1.0", "lib<3", "fastlib; extra == 'fast'", "slowlib; extra == 'slow'")
    wheel(tmp_path, "fastlib", "1.0", "other")
    assert chosen(target(), tmp_path) == {"app-1.0", "lib-2.0", "other-1.0", "fastlib-1.0"}
    wheel(tmp_path, "other", "1.1", "lib<3", "lib>5")
    with pytest.raises(BundleError, match="no wheel of lib<3,>5"):
        chosen(target(), tmp_path)


def test_another_release_of_what_is_wanted_is_brought_under_a_name_of_its_own(tmp_path: Path) -> None:
    for name in ("app", "other"):
        for version in ("1.0", "2.0"):
            wheel(tmp_path, name, version)
    made = target(want=["app==2.0", "other<3"])
    older = with_releases(made, ["app==1.0"])
    assert chosen(made, tmp_path) == {"app-2.0", "other-2.0"}
    assert chosen(older, tmp_path) == {"app-1.0", "other-2.0"}
    assert (made.spec.name, older.spec.name) == ("made-up", "made-up-app-1.0")
    assert with_releases(made, []) == made
    with pytest.raises(BundleError, match="--want lib==1: made-up wants no lib; it wants app, other"):
        with_releases(made, ["lib==1"])
    with pytest.raises(BundleError, match="no requirement"):
        with_releases(made, ["app=1"])
    for bad in (
        "app",
        "app>=1",
        "app==1.*",
        "app===0/../..",
        "app @ https://x/y.whl",
        "app[z]==1",
        "app==1; python_version>'3'",
    ):
        with pytest.raises(BundleError, match="wants NAME==VERSION"):
            with_releases(made, [bad])
    with pytest.raises(BundleError, match="once for each NAME"):
        with_releases(made, ["app==1.0", "App==2.0"])


def test_host_packages_are_used_only_where_they_fit_or_are_accepted(tmp_path: Path) -> None:
    wheel(tmp_path, "app", "1.0", "torch==2.11.0", "kernels")
    closure = resolve(
        target({"torch": "2.11.0+cu130"}, leave_out={"kernels": "not used"}), ["app"], from_folder(tmp_path)
    )
    assert set(closure.wheels) == {"app"}
    assert closure.left_out == {"kernels": "not used"}
    other = target({"torch": "2.10.0"}, leave_out={"kernels": "not used"})
    with pytest.raises(BundleError, match=r"the host has torch 2.10.0, asked for ==2.11.0 by app \(say why"):
        resolve(other, ["app"], from_folder(tmp_path))
    lenient = target({"torch": "2.10.0"}, leave_out={"kernels": "not used"}, accept={"torch": "tried"})
    assert resolve(lenient, ["app"], from_folder(tmp_path)).unmet == ["torch 2.10.0, asked for ==2.11.0 by app"]


def fat_binary(*entries: tuple[int, int, bytes]) -> bytes:
    """A fat binary of (kind, architecture, code)."""
    body = b""
    for kind, arch, code in entries:
        header = slim.FATBIN_ENTRY.pack(kind, 0x101, 64, len(code), 0, 0, 0, 0, arch)
        body += header + bytes(64 - len(header)) + code
    return slim.FATBIN_HEADER.pack(slim.FATBIN_MAGIC, 1, 16, len(body)) + body


def codes(data: bytes) -> list[list[tuple[int, int, bytes]]]:
    """What each fat binary holds, read by another way than the code under test: entry by entry with struct."""
    found, at = [], 0
    while (at := data.find(struct.pack("<I", slim.FATBIN_MAGIC), at)) >= 0:
        size = struct.unpack_from("<Q", data, at + 8)[0]
        here, entries = at + 16, []
        while here < at + 16 + size:
            kind, arch = struct.unpack_from("<H", data, here)[0], struct.unpack_from("<I", data, here + 28)[0]
            length = struct.unpack_from("<Q", data, here + 8)[0]
            entries.append((kind, arch, data[here + 64 : here + 64 + length]))
            here += 64 + length
        found.append(entries)
        at += 16
    return found


def test_gpu_code_of_other_architectures_is_cut_and_nothing_moves() -> None:
    both = fat_binary((2, 80, b"old" * 40), (2, 90, b"hopper00"), (2, 120, b"new" * 40), (1, 80, b"ptx80000"))
    only_ptx = fat_binary((1, 80, b"ptx80000"), (1, 120, b"ptxnew00"), (2, 80, b"oldold00"))
    neither = fat_binary((2, 100, b"blackwell" * 8), (2, 120, b"small000"))
    data = bytearray(b"head" + both + b"between" + only_ptx + b"then" + neither + b"tail")
    places = [data.find(text) for text in (b"between", b"then", b"tail")]
    before = len(data)
    saved = slim.cut_gpu_code(data, 90)
    assert len(data) == before
    assert [data.find(text) for text in (b"between", b"then", b"tail")] == places
    assert codes(bytes(data)) == [[(2, 90, b"hopper00")], [(1, 80, b"ptx80000")], [(2, 120, b"small000")]]
    assert saved == (64 + 120) * 2 + 72 + 72 * 2 + 64 + 72
    assert slim.cut_gpu_code(data, 90) == 0


def test_every_cut_is_listed_and_a_stale_one_refused(tmp_path: Path) -> None:
    made = wheel(
        tmp_path,
        "app",
        "1.0",
        app__big=b"x" * 99,
        **{"app-1.0.data__scripts__run": b"#!", "app-1.0.data__purelib__app__x": b"y"},
    )
    cuts = slim.unpack([made], tmp_path / "site", target(drop={"app/big": "too big"}))
    assert cuts.dropped == {"app/big": 99}
    found = {str(p.relative_to(tmp_path / "site")) for p in (tmp_path / "site").rglob("*") if p.is_file()}
    assert found == {"app/__init__.py", "app-1.0.dist-info/METADATA", "app/x"}
    with pytest.raises(BundleError, match=r"'app/gone' of \[drop\] or \[strip\] matches no file"):
        slim.unpack([made], tmp_path / "again", target(drop={"app/gone": "was there once"}))
    with pytest.raises(BundleError, match="leaves its folder"):
        slim.installed_place("app/../../etc/passwd")


def test_parts_have_the_chosen_size(tmp_path: Path) -> None:
    writer = pack.PartWriter(tmp_path, "p", 10)
    for chunk in (b"0123456", b"789abcdefghij", b"k"):
        writer.write(chunk)
    writer.close()
    assert [(part.name, part.size_bytes) for part in writer.parts] == [("p.000", 10), ("p.001", 10), ("p.002", 1)]
    assert b"".join((tmp_path / part.name).read_bytes() for part in writer.parts) == b"0123456789abcdefghijk"


@pytest.fixture
def made_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bundle of one wheel for this very interpreter, which stands for the host. Three parts or more."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    wheel(wheels, "app", "1.0", "pytest", app__noise=os.urandom(5000))
    base = tomllib.loads((bundle.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    host = dict.fromkeys((Requirement(line).name for line in base), "")
    made = target(host, checks=["import app, pytest; assert app.version == '1.0'"])
    monkeypatch.setattr(bundle, "pip_fetch", lambda *_: from_folder(wheels))
    monkeypatch.setattr(pack.PartWriter, "write", small_parts(pack.PartWriter.write))
    bundle.build(made, tmp_path / "bundle", wheels, part_mib=1)
    return tmp_path / "bundle"


def small_parts(write: object) -> object:
    """Parts of 2,000 bytes, so that a tiny bundle has several."""

    def limited(self: pack.PartWriter, data: bytes) -> None:
        self._limit = 2000
        write(self, data)  # type: ignore[operator]

    return limited


def install(bundle_dir: Path, prefix: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", bundle_dir / "install.sh", prefix, *options], env={"PYTHON": sys.executable, "PATH": "/usr/bin:/bin"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_installs_from_its_parts_and_resumes(made_bundle: Path, tmp_path: Path) -> None:
    prefix = tmp_path / "prefix"
    parts = sorted(made_bundle.glob("made-up.*"))
    assert len(parts) >= 3
    late = parts[1].rename(tmp_path / "late")
    first = install(made_bundle, prefix)
    assert (first.returncode, prefix.exists()) == (4, False)
    assert f"still missing in {made_bundle}: {parts[1].name}" in first.stderr
    good = late.read_bytes()
    parts[1].write_bytes(bytes([good[0] ^ 1]) + good[1:])
    assert f"bring again: {parts[1].name}" in install(made_bundle, prefix).stderr
    parts[1].write_bytes(good)
    before = set(tmp_path.iterdir())
    done = install(made_bundle, prefix)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert set(tmp_path.iterdir()) - before == {prefix}
    asked = subprocess.run(
        [prefix / "bin" / "python", "-c", "import app, pytest, sys; print(app.__file__, sys.prefix)"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert asked.stdout.split() == [str(next(prefix.rglob("app/__init__.py"))), str(prefix)]
    assert subprocess.run([prefix / "bin" / "pytest", "--version"], check=True, capture_output=True).returncode == 0
    parts[0].unlink()
    again = install(made_bundle, prefix)
    assert (again.returncode, "unpacked before" in again.stdout) == (0, True)


@pytest.mark.slow
def test_refuses_another_host_and_tells_what_is_missing(made_bundle: Path, tmp_path: Path) -> None:
    manifest = made_bundle / "manifest.json"
    said = json.loads(manifest.read_text(encoding="utf-8"))
    manifest.write_text(json.dumps(said | {"python": "3.9"}), encoding="utf-8")
    other = install(made_bundle, tmp_path / "prefix")
    assert (other.returncode, "this bundle is for Python 3.9" in other.stderr) == (4, True)
    said["demands"]["no-such-thing"] = {"specifier": ">=1", "by": "app"}
    said["checks"] = ["import no_such_thing"]
    manifest.write_text(json.dumps(said), encoding="utf-8")
    lacking = install(made_bundle, tmp_path / "prefix")
    assert lacking.returncode == 1
    assert "MISSING no-such-thing>=1, asked for by app" in lacking.stdout
    assert "ModuleNotFoundError: No module named 'no_such_thing'" in lacking.stdout
    assert "but 1 distributions are missing and 1 checks failed" in lacking.stdout
    occupied = tmp_path / "occupied"
    occupied.mkdir()
    (occupied / "precious").touch()
    assert "holds something else" in install(made_bundle, occupied).stderr


def addition(tmp_path: Path, version: str) -> Path:
    """A bundle of one more wheel, which goes onto ``made_bundle``."""
    wheels, made_dir = tmp_path / f"more-{version}", tmp_path / f"added-{version}"
    wheels.mkdir()
    wheel(wheels, "extra", version, "app", **{f"extra__only_in_{version[0]}.py": b""})
    made = target({"app": "1.0"}, want=[f"extra=={version}"], onto="made-up", checks=["import extra, app"])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(bundle, "pip_fetch", lambda *_: from_folder(wheels))
        bundle.build(made, made_dir, wheels, part_mib=1)
    return made_dir


def test_an_addition_wants_the_bundle_that_it_goes_onto(tmp_path: Path) -> None:
    prefix = tmp_path / "prefix"
    alone = install(addition(tmp_path, "1.0"), prefix)
    assert (alone.returncode, "has no bundle in it yet" in alone.stderr, prefix.exists()) == (4, True, False)


@pytest.mark.slow
def test_an_addition_goes_into_the_prefix_of_a_bundle_and_replaces_its_kind(made_bundle: Path, tmp_path: Path) -> None:
    prefix = tmp_path / "prefix"
    added = [addition(tmp_path, version) for version in ("1.0", "2.0")]
    assert install(made_bundle, prefix).returncode == 0
    for folder, own, other in ((added[0], "only_in_1.py", "only_in_2.py"), (added[1], "only_in_2.py", "only_in_1.py")):
        done = install(folder, prefix)
        assert (done.returncode, done.stderr) == (0, ""), done.stdout
        assert list(prefix.rglob(own))
        assert not list(prefix.rglob(other))
        assert [p.name for p in prefix.rglob("extra-*.dist-info")] == [
            f"extra-{folder.name.rpartition('-')[2]}.dist-info"
        ]
    assert "unpacked before" in install(added[1], prefix).stdout
    assert "unpacked before" in install(made_bundle, prefix).stdout


def test_ready_targets_are_well_formed() -> None:
    ready = load_target("h200-torch211")
    assert ready.platforms[0] == "manylinux_2_39_x86_64"
    assert ready.have[canonicalize_name("torch")] == "2.11.0"
    addition = load_target("h200-lmcache")
    assert addition.spec.onto == ready.spec.name
    assert addition.have.items() >= ready.have.items()
    with pytest.raises(BundleError, match="no such file; give a path or one of: h200-lmcache, h200-torch211"):
        load_target("no-such-target")
