"""The pool of stacks, without a stack: how it names them."""

from __future__ import annotations

from pathlib import Path

import pytest

from fixtures.progress import open_progress
from fixtures.spec import load_spec
from fixtures.stack_pool import StackPool

pytestmark = pytest.mark.selftest


def test_no_stack_gets_the_directory_of_another(tmp_path: Path) -> None:
    """A second pool of one run (after a restart, or in a resumed run) begins to count anew."""
    spec = load_spec("cpu")
    progress = open_progress()
    try:
        for expected in ("s1", "s2", "s3"):
            pool = StackPool(tmp_path, lambda record: None, progress)
            name = pool._new_id(spec)
            assert name == f"{expected}-cpu-{spec.key()}"
            (tmp_path / "stacks" / name).mkdir(parents=True)
        assert pool._new_id(spec).startswith("s4-")
    finally:
        progress.close()
