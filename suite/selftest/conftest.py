"""Fixtures that several selftests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from suite.selftest.process_helpers import own_state_dir


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A state folder of the test's own: what other runs on this host have leased or left is not seen."""
    with own_state_dir(monkeypatch) as folder:
        yield folder


@pytest.fixture
def short_calibration(monkeypatch: pytest.MonkeyPatch) -> None:
    """For simulated stacks: the formula's answers have no noise, at no length, so what is measured of it may be short."""
    monkeypatch.setattr("suite.gates.arms.CALIBRATION_LENGTHS", (65, 130))
    monkeypatch.setattr("suite.gates.arms.PLANTED_PROMPT_TOKENS", 130)
