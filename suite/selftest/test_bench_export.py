"""Samples as pytest-benchmark's JSON, read by its own command; and benchmarks that would measure nothing are errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from suite.bench.export import main
from suite.selftest import bench_samples as samples

pytestmark = pytest.mark.selftest

ROOT = Path(__file__).parents[2]


def _run(folder: Path, value: float) -> Path:
    figures = [
        samples.series("ttft/cold/512", [value, value * 1.1, value * 1.2]),
        samples.series("replay/x/throughput", [4.0], unit="requests/s", better="higher"),
    ]
    return samples.write_run(folder, figures)


def test_stock_pytest_benchmark_compares_our_files(tmp_path: Path) -> None:
    files = []
    for name, value in (("one", 0.1), ("two", 0.2)):
        files.append(tmp_path / f"{name}.json")
        assert main([str(_run(tmp_path / name, value)), "--out", str(files[-1])]) == 0
    command = [sys.executable, "-m", "pytest_benchmark", "compare", *map(str, files), "--csv", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ttft/cold/512") == 2
    lines = (tmp_path / "out.csv").read_text().splitlines()
    assert len(lines) == 3
    assert "0.1" in lines[1]


def test_each_series_of_times_is_one_benchmark_with_its_samples(tmp_path: Path) -> None:
    folder = _run(tmp_path / "run", 0.1)
    assert main([str(folder)]) == 0
    (one,) = json.loads((folder / "bench.json").read_text())["benchmarks"]
    assert one["name"] == "ttft/cold/512"
    assert one["stats"]["data"] == pytest.approx([0.1, 0.11, 0.12])
    assert one["stats"]["median"] == pytest.approx(0.11)
    assert one["stats"]["rounds"] == 3


@pytest.mark.parametrize("what", ["nothing", "no times"])
def test_a_run_without_times_is_refused(tmp_path: Path, what: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    if what == "no times":
        samples.write_run(folder, [samples.series("x", [1.0], unit="share")])
    assert main([str(folder)]) == 4
    assert capsys.readouterr().err.startswith("export: ")


# Benchmarks that would measure nothing
TEST = """
import pytest

@pytest.mark.bench
def test_plain(benchmark):
    benchmark.pedantic(lambda: None, rounds=2)
"""


@pytest.mark.slow  # each a pytest of its own
@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ([], 0, "1 passed"),
        (["-n1"], 4, "measures nothing under xdist"),
        (["--benchmark-disable"], 4, "is switched off"),
        (["--benchmark-skip"], 4, "is switched off"),
    ],
)
def test_a_benchmark_that_would_measure_nothing_is_an_error(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int, said: str
) -> None:
    # The tests around this one may run in parallel; it does not.
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pytester.makeini("[pytest]\npythonpath = .\nmarkers =\n    bench: x\n    gate(x): x\n    core: x\n    needs(x): x")
    pytester.makeconftest("from suite.bench.conftest import pytest_runtest_setup")
    pytester.makepyfile(TEST)
    plugins = ["-p", "fixtures.plugin", "-p", "pytest_benchmark.plugin", "-p", "xdist.plugin", "-p", "no:cacheprovider"]
    done = pytester.runpytest_inprocess(*plugins, "--evidence=out", "-m", "bench", *arguments, no_reraise_ctrlc=True)
    text = done.stdout.str() + done.stderr.str()
    assert said in text, text
    assert done.ret == code, text
