"""Thresholds of a comparison, from TOML: ``[default]`` and one table for each pattern of benchmark names."""

from __future__ import annotations

import math
import tomllib
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import msgspec

DEFAULT_FILE = Path(__file__).parent / "compare.toml"


class ThresholdError(ValueError):
    """A thresholds file that cannot be used; the text names file, table and mend."""


class Threshold(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of one benchmark."""

    tolerance: float = 0.05
    """Worse by more than this part is a regression."""


class Thresholds:
    """Finds the threshold of a benchmark. ``tables``: pattern -> threshold, in the order of the file."""

    def __init__(self, tables: dict[str, Threshold]) -> None:
        self.tables = tables

    def of(self, benchmark: str) -> Threshold:
        """The last table that matches; ``[default]`` where none does."""
        found = self.tables.get("default", Threshold())
        for pattern, threshold in self.tables.items():
            if pattern != "default" and fnmatchcase(benchmark, pattern):
                found = threshold
        return found

    def unused(self, benchmarks: list[str]) -> list[str]:
        """Patterns that match none of the names: a typing error, most likely."""
        return [p for p in self.tables if p != "default" and not any(fnmatchcase(b, p) for b in benchmarks)]


def load_thresholds(path: Path) -> Thresholds:
    """Read a file. Raises ThresholdError."""
    try:
        data: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as exc:
        raise ThresholdError(f"--thresholds {path}: cannot be read: {exc}") from exc
    except tomllib.TOMLDecodeError as exc:
        raise ThresholdError(f"--thresholds {path}: not valid TOML: {exc}") from exc
    tables: dict[str, Threshold] = {}
    for pattern, table in data.items():
        try:
            tables[pattern] = msgspec.convert(table, Threshold)
        except msgspec.ValidationError as exc:
            raise ThresholdError(
                f"--thresholds {path}: [{pattern}]: {exc}; a table has one key, tolerance (a part, e.g. 0.05)"
            ) from exc
        if not 0 < tables[pattern].tolerance < math.inf:
            raise ThresholdError(f"--thresholds {path}: [{pattern}]: tolerance must be above 0")
    return Thresholds(tables)
