"""One compressed stream, cut into parts of a chosen size, with the digest of each."""

from __future__ import annotations

import hashlib
import lzma
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import msgspec

CHUNK_BYTES = 1 << 20


class Part(msgspec.Struct, frozen=True):
    """One file to bring to the target."""

    name: str
    size_bytes: int
    sha256: str


class PartWriter:
    """A binary sink that starts a new file whenever the current one is full."""

    def __init__(self, folder: Path, stem: str, part_bytes: int) -> None:
        self.parts: list[Part] = []
        self._folder, self._stem, self._limit = folder, stem, part_bytes
        self._open: IO[bytes] | None = None
        self._digest = hashlib.sha256()
        self._written = 0

    def write(self, data: bytes) -> None:
        while data:
            if self._open is None:
                self._open = (self._folder / f"{self._stem}.{len(self.parts):03d}").open("wb")
                self._digest, self._written = hashlib.sha256(), 0
            head, data = data[: self._limit - self._written], data[self._limit - self._written :]
            self._open.write(head)
            self._digest.update(head)
            self._written += len(head)
            if self._written == self._limit:
                self.close()

    def close(self) -> None:
        if self._open is not None:
            self._open.close()
            self.parts.append(Part(Path(self._open.name).name, self._written, self._digest.hexdigest()))
            self._open = None


def pack(tree: Path, folder: Path, stem: str, part_bytes: int) -> list[Part]:
    """Write ``tree`` as ``stem.000``, ``stem.001``, ... (tar, xz). Deterministic for one tree and one compressor."""
    tar_path = folder / f"{stem}.unpacked"
    with tarfile.open(tar_path, "w", format=tarfile.PAX_FORMAT) as archive:
        for path in _by_kind(tree):
            info = archive.gettarinfo(path, str(path.relative_to(tree)))
            info.uid = info.gid = info.mtime = 0
            info.uname = info.gname = ""
            with path.open("rb") as file:
                archive.addfile(info, file)
    writer = PartWriter(folder, stem, part_bytes)
    with _compressed(tar_path) as stream:
        while chunk := stream.read(CHUNK_BYTES):
            writer.write(chunk)
    writer.close()
    tar_path.unlink()
    return writer.parts


def _by_kind(tree: Path) -> list[Path]:
    """Files with like ones side by side, where the compressor finds what they share."""
    return sorted((p for p in tree.rglob("*") if p.is_file()), key=lambda p: (p.suffix, p.name, str(p)))


@contextmanager
def _compressed(path: Path) -> Iterator[IO[bytes]]:
    """The file through xz: the program where there is one (it uses every core), else Python's own."""
    program = shutil.which("xz")
    if program is None:
        packed = path.with_suffix(".xz")
        with path.open("rb") as source, lzma.open(packed, "wb", preset=9) as sink:
            shutil.copyfileobj(source, sink, CHUNK_BYTES)
        with packed.open("rb") as stream:
            yield stream
        packed.unlink()
        return
    with subprocess.Popen([program, "-9", "--threads=0", "--stdout", str(path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield process.stdout
    if process.returncode:
        raise OSError(f"xz ended with {process.returncode}")
