"""Pages that are generated say what the code says."""

from pathlib import Path

import pytest

from suite.gates import registry
from suite.gates.__main__ import page

pytestmark = pytest.mark.selftest

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_of_gates_is_the_one_the_gates_make() -> None:
    assert (ROOT / "docs" / "gates.md").read_text() == page(), "run: python -m suite.gates > docs/gates.md"


@pytest.mark.parametrize("gate", registry().values(), ids=lambda g: g.id)
def test_every_gate_says_its_claim_how_it_can_lie_its_oracle_and_what_turns_it_red(gate) -> None:  # type: ignore[no-untyped-def]
    text = type(gate).__doc__ or ""
    for part in ("Claim:", "How it can lie:", "Oracle:", "Turns red:"):
        assert part in text, f"{gate.id}: its docstring lacks {part!r}"


def test_case_ids_are_unique_in_the_whole_suite() -> None:
    ids = [case.id for gate in registry().values() for case in gate.cases()]
    assert len(ids) == len(set(ids))
