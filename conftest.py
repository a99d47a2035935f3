"""Thin on purpose: all pytest mechanics live in ``fixtures.plugin``, which asks here what gates there are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from suite.contract import Gate

pytest_plugins = ["fixtures.plugin", "pytester"]


def pytest_kvgates_registry() -> Mapping[str, Gate]:
    from suite.gates import registry  # why here: only runs that judge need the gates

    return registry()
