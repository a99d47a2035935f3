"""``pytest -m defects``: every planted defect is caught by the gate that should, with the finding that should."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from suite.contract import Case, Gate
from suite.defects.planted_elsewhere import gates
from suite.gates import gate_cases


def _test_of(gate: Gate) -> Callable[..., None]:
    @gate_cases(gate, family_marker="defects")
    def test_planted(run_case: Any, case: Case) -> None:
        run_case(gate, case)

    made: Callable[..., None] = test_planted
    return made


for _gate in gates():
    globals()[f"test_{_gate.defect.id.replace('-', '_')}"] = pytest.mark.defects(_test_of(_gate))
