"""Gates: one module a family. ``registry`` finds them all; ``gate_cases`` makes a pytest test of a gate's cases."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from suite.contract import Gate


def gate_cases(gate: Gate, family_marker: str = "gates") -> Callable[[Any], Any]:
    """Parametrise a test over the cases of a gate::

        @gate_cases(BOUNDARY)
        def test_boundary(run_case, case):
            run_case(BOUNDARY, case)

    Marks follow from the case: ``smoke``, ``needs``, and ``core`` where it belongs to ``make gates``.
    """
    params = []
    for case in gate.cases():
        if not case.id.startswith(gate.id):
            raise ValueError(f"case id {case.id!r} must begin with its gate's id {gate.id!r}")
        marks = [getattr(pytest.mark, family_marker)]
        if case.smoke:
            marks.append(pytest.mark.smoke)
        if case.core:
            marks.append(pytest.mark.core)
        if case.needs:
            marks.append(pytest.mark.needs(*case.needs))
        params.append(pytest.param(case, id=case.id, marks=marks))

    def decorate(function: Any) -> Any:
        return pytest.mark.gate(gate)(pytest.mark.parametrize("case", params)(function))

    return decorate


def registry() -> dict[str, Gate]:
    """Every gate of the suite by id. Raises ValueError for an id used twice."""
    return gates_in(f"{__name__}.{name}" for name in sorted(info.name for info in pkgutil.iter_modules(__path__)))


def gates_in(modules: Iterable[str]) -> dict[str, Gate]:
    """Gates that modules hold, by id. Raises ValueError for an id used twice."""
    found: dict[str, Gate] = {}
    for name in modules:
        for value in vars(importlib.import_module(name)).values():
            if isinstance(value, Gate):
                if found.get(value.id, value) is not value:
                    raise ValueError(f"two gates have the id {value.id}")
                found[value.id] = value
    return found
