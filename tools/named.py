"""Files that are asked for by path, or by name where a ready one lies in a folder of the project."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TypeVar

import msgspec

FileT = TypeVar("FileT")


def read_named(
    source: str, folder: Path, kind: type[FileT], *, asked: str, error: type[Exception]
) -> tuple[Path, FileT]:
    """(where it lies, its content) of a TOML file: ``source`` is a path, or the name of one in ``folder`` without its ending.

    asked: what the user wrote, for the message. Raises ``error`` with one line where there is no such file, or it is none of ``kind``.
    """
    path = next((p for p in (Path(source), folder / f"{source}.toml") if p.is_file()), None)
    if path is None:
        ready = ", ".join(sorted(p.stem for p in folder.glob("*.toml")))
        raise error(f"{asked}: no such file; give a path or one of: {ready}")
    try:
        return path, msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), kind)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError, UnicodeDecodeError) as exc:
        raise error(f"{path}: {exc}") from exc
