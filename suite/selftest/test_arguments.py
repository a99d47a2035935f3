"""Commands of the tree: an option that they do not know is one line and exit code 4, and nothing is done."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from fixtures.errors import UsageError
from reports import __main__ as reports_main
from reports.evidence import EvidenceError, read_history
from suite.workload.exchange import look_up

pytestmark = pytest.mark.selftest


@pytest.mark.parametrize(
    "words",
    [
        ("fixtures.capabilities", "nonsense"),
        ("suite.gates", "nonsense"),
        ("suite.gates.degrade_page", "nonsense"),
        ("tools.campaign", "h200", "--work", "w", "--out", "o", "--budget-s", "soon"),
        ("tools.bundle", "h200-torch211", "--part-mib", "nan"),
        ("tools.bundle", "h200-torch211", "--want", "!!"),
        ("tools.setup_env", "--nonsense"),
        ("tools.setup_env", "--venv", __file__),
    ],
    ids=" ".join,
)
def test_what_a_command_does_not_know_is_one_line_and_4(words: tuple[str, ...]) -> None:
    module, *options = words
    done = subprocess.run([sys.executable, "-m", module, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 4
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("name", ["", "x" * 300])
def test_a_run_whose_name_cannot_be_looked_at_is_one_line_and_4(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert reports_main.main(["judge", name], {}) == 4
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("text", ["", "x"])
def test_a_file_without_a_record_is_no_run(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "history-main.jsonl").write_text(text)
    assert reports_main.main(["render", str(tmp_path)], {}) == 4
    assert "no record of a run in it" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["history-main.jsonl"]


def test_a_record_nested_without_end_names_its_line(tmp_path: Path) -> None:
    path = tmp_path / "history-main.jsonl"
    path.write_text('{"kind":"fact","value":' + "[" * 100_000 + "\n")
    with pytest.raises(EvidenceError, match=r"history-main\.jsonl:1: not a record"):
        read_history(path)


def test_a_url_that_cannot_be_taken_apart_is_one_line() -> None:
    with pytest.raises(UsageError, match=r"^http://\[bad: .*give http://HOST:PORT"):
        asyncio.run(look_up("http://[bad", "/v1/completions", {}))


@pytest.mark.parametrize("source", ["fleet.toml", "x" * 300])
def test_a_fleet_that_is_not_there_is_named_without_an_option_that_is_not_there_either(source: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fixtures.identity", source], capture_output=True, text=True, check=False
    )
    assert done.returncode == 4
    assert done.stderr.startswith(f"usage: {source[:80]}")
    assert len(done.stderr.splitlines()) == 1
