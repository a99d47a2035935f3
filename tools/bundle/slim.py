"""From wheels to the tree that the target gets: unpacked, without what the target file says is not needed there.

Every cut is a choice of the target file, and each is listed in the manifest with its reason and size.
"""

from __future__ import annotations

import fnmatch
import shutil
import struct
import subprocess
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from tools.bundle.target import BundleError, Target

FATBIN_MAGIC = 0xBA55ED50
FATBIN_HEADER = struct.Struct("<IHHQ")
"""magic, version, size of this header, size of the entries: read off ``fatbinary``'s output (CUDA 12 and 13)."""
FATBIN_ENTRY = struct.Struct("<HHIQIIHHI")
"""kind, version, size of this header, padded size of the code, (four fields not needed), architecture as in sm_90."""
KIND_PTX, KIND_MACHINE_CODE = 1, 2


@dataclass
class Cuts:
    """What was left out. Bytes are those on disk, before compression."""

    dropped: dict[str, int] = field(default_factory=dict)
    gpu_code: dict[str, int] = field(default_factory=dict)
    symbols: dict[str, int] = field(default_factory=dict)
    used_globs: set[str] = field(default_factory=set)


def unpack(wheels: Iterable[Path], site: Path, target: Target) -> Cuts:
    """Unpack into a site-packages folder, as an installer would, minus the cuts. Raises BundleError."""
    cuts = Cuts()
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for info in archive.infolist():
                place = installed_place(info.filename)
                if info.is_dir() or place is None:
                    continue
                glob = next((g for g in target.spec.drop if fnmatch.fnmatchcase(place, g)), None)
                if glob is not None:
                    cuts.used_globs.add(glob)
                    cuts.dropped[place] = info.file_size
                    continue
                _write(archive, info, site / place)
    for library in sorted(p for p in site.rglob("*") if p.is_file() and _is_elf(p)):
        _slim_library(library, str(library.relative_to(site)), target, cuts)
    unused = sorted({*target.spec.drop, *target.spec.strip} - cuts.used_globs)
    if unused:
        raise BundleError(
            f"{target.spec.name}: {unused[0]!r} of [drop] or [strip] matches no file of any wheel; remove it"
        )
    return cuts


def installed_place(member: str) -> str | None:
    """Where a wheel's member goes below site-packages; None for scripts, headers and data, which the suite never uses."""
    first, *rest = PurePosixPath(member).parts
    if ".." in rest or first in ("..", "/"):
        raise BundleError(f"wheel member {member!r} leaves its folder")
    if not first.endswith(".data"):
        return member
    return str(PurePosixPath(*rest[1:])) if rest and rest[0] in ("purelib", "platlib") else None


def _write(archive: zipfile.ZipFile, info: zipfile.ZipInfo, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with archive.open(info) as source, path.open("wb") as sink:
        shutil.copyfileobj(source, sink, 1 << 20)
    mode = (info.external_attr >> 16) & 0o111
    path.chmod(0o755 if mode else 0o644)


def _is_elf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"


def _slim_library(path: Path, name: str, target: Target, cuts: Cuts) -> None:
    if target.spec.cuda_arch:
        data = bytearray(path.read_bytes())
        saved = cut_gpu_code(data, target.spec.cuda_arch)
        if saved:
            path.write_bytes(data)
            cuts.gpu_code[name] = saved
    before = path.stat().st_size
    glob = next((g for g in target.spec.strip if fnmatch.fnmatchcase(name, g)), None)
    if glob is not None:
        cuts.used_globs.add(glob)
        done = subprocess.run(["strip", "--strip-debug", str(path)], capture_output=True, text=True, check=False)
        if done.returncode:
            raise BundleError(f"strip {name}: {done.stderr.strip()}")
        if path.stat().st_size < before:
            cuts.symbols[name] = before - path.stat().st_size


def cut_gpu_code(data: bytearray, arch: int) -> int:
    """Remove code for other architectures from every fat binary, in place and without moving anything else.

    A fat binary that holds machine code for ``arch`` keeps that alone. One that does not keeps the PTX that the driver
    can compile for ``arch``; one that has neither keeps its smallest entry, because an empty one is not defined.
    The freed bytes become zeros. Returns how many there are.
    """
    saved = at = 0
    magic = FATBIN_MAGIC.to_bytes(4, "little")
    while (at := data.find(magic, at)) >= 0:
        if len(data) - at < FATBIN_HEADER.size:
            break
        _, version, header, size = FATBIN_HEADER.unpack_from(data, at)
        if version != 1 or header != FATBIN_HEADER.size or at + header + size > len(data):
            at += len(magic)
            continue
        start, end = at + header, at + header + size
        entries = _entries(data, start, end)
        kept = [data[begin:stop] for begin, stop in _kept(entries, arch)]
        body = b"".join(kept)
        data[start:end] = body + bytes(size - len(body))
        FATBIN_HEADER.pack_into(data, at, FATBIN_MAGIC, version, header, len(body))
        saved += size - len(body)
        at = end
    return saved


def _entries(data: bytearray, start: int, end: int) -> list[tuple[int, int, int, int]]:
    """(kind, architecture, begin, end) of each entry. Raises BundleError when the sizes do not add up."""
    found = []
    at = start
    while at < end:
        kind, _, header, size, _, _, _, _, arch = FATBIN_ENTRY.unpack_from(data, at)
        found.append((kind, arch, at, at + header + size))
        at += header + size
    if at != end:
        raise BundleError("a fat binary whose entries do not add up to its size: unknown format; set cuda_arch = 0")
    return found


def _kept(entries: list[tuple[int, int, int, int]], arch: int) -> list[tuple[int, int]]:
    fitting = [e for e in entries if e[0] == KIND_MACHINE_CODE and e[1] == arch]
    fitting = fitting or [e for e in entries if e[0] == KIND_PTX and e[1] <= arch]
    fitting = fitting or sorted(entries, key=lambda e: e[3] - e[2])[:1]
    return [(begin, end) for _, _, begin, end in fitting]
