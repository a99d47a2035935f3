"""Every gate of family B by id, so that a finished run can be judged again."""

from __future__ import annotations

import importlib

from suite.contract import Gate

MODULES = ("suite.bench.ttft", "suite.bench.break_even", "suite.bench.sweep", "suite.bench.interleaved")


def registry() -> dict[str, Gate]:
    """Gates by id. Raises ValueError for an id used twice."""
    found: dict[str, Gate] = {}
    for name in MODULES:
        for value in vars(importlib.import_module(name)).values():
            if isinstance(value, Gate):
                if found.get(value.id, value) is not value:
                    raise ValueError(f"two gates have the id {value.id}")
                found[value.id] = value
    return found
