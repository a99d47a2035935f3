"""``python -m reports compare``: what it finds, what it refuses, and what it says."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reports import records as r
from reports.__main__ import main
from reports.compare import compare, compare_series
from reports.compare_render import html, markdown, svg
from reports.compare_runs import Series, Unlike, load_side
from reports.compare_thresholds import DEFAULT_FILE, ThresholdError, load_thresholds
from reports.records import Outcome
from suite.selftest import bench_samples as samples

pytestmark = pytest.mark.selftest

NAME = "ttft/cold/1000"


def _runs(base: Path, values: list[float], *, first_s: float = 0.0, **kwargs: Any) -> Path:
    for number, value in enumerate(values):
        samples.write_run(
            base / f"run-{number}", [samples.series(NAME, [value] * 3)], wall_s=first_s + 2 * number, **kwargs
        )
    return base


def _paired(base: Path, slower: float, noise: float = 0.05, blocks: int = 40) -> tuple[Path, Path]:
    """Three interleaved runs a side, on a machine that gets slower; side B by more."""
    rng = np.random.default_rng(4)
    for number in range(3):
        level = [0.1 * math.exp(0.01 * b) for b in range(blocks)]
        for side, factor in (("A", 1.0), ("B", 1 + slower)):
            values = [t * factor * math.exp(noise * rng.normal()) for t in level]
            one = samples.series(NAME, values, blocks=list(range(blocks)), interleaved=f"session {number}")
            samples.write_run(base / side / f"run-{number}", [one], wall_s=2 * number + (side == "B"))
    return base / "A", base / "B"


def _code(*arguments: Path | str) -> int:
    return main(["compare", *map(str, arguments)])


# What it finds
def test_an_interleaved_a_a_says_no_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _code(*_paired(tmp_path, 0.0)) == 0
    said = capsys.readouterr().out
    assert "no difference seen (from" in said
    assert "interleaved in blocks" in said
    assert "120 pairs" in said


def test_an_interleaved_slow_down_of_ten_percent_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _code(*_paired(tmp_path, 0.10)) == 10
    assert "surely by more than 5%" in capsys.readouterr().out


def test_a_slow_down_within_the_noise_is_inconclusive_not_passed(tmp_path: Path) -> None:
    assert _code(*_paired(tmp_path, 0.05, noise=0.3, blocks=10)) == 11


def test_runs_that_were_not_interleaved_are_compared_run_by_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = _runs(tmp_path / "A", [0.100, 0.101, 0.0995, 0.1005])
    worse = _runs(tmp_path / "B", [0.130, 0.131, 0.1295, 0.1305], first_s=100)
    assert _code(base, worse) == 10
    said = capsys.readouterr().out
    assert "NOT interleaved" in said
    assert "AAAABBBB" in said
    same = _runs(tmp_path / "C", [0.1002, 0.0998, 0.101, 0.0999], first_s=1)
    assert _code(base, same) == 0
    assert "NOT interleaved" not in capsys.readouterr().out


def test_two_runs_a_side_are_never_enough(tmp_path: Path) -> None:
    base = _runs(tmp_path / "A", [0.1, 0.1])
    assert _code(base, _runs(tmp_path / "B", [0.2, 0.2])) == 11
    assert _code(_paired(tmp_path / "P", 0.5)[0], tmp_path / "P" / "B" / "run-0") == 11


def test_better_is_what_the_benchmark_says(tmp_path: Path) -> None:
    def rate(name: str, values: list[float]) -> Path:
        for n, v in enumerate(values):
            one = samples.series("replay/x/throughput", [v], unit="requests/s", better="higher")
            samples.write_run(tmp_path / name / f"run-{n}", [one])
        return tmp_path / name

    low, high = rate("low", [10.0, 10.1, 9.9]), rate("high", [20.0, 20.1, 19.9])
    assert _code(low, high) == 0
    assert _code(high, low) == 10


def test_figures_of_zero_have_no_ratio() -> None:
    def row(base: list[float], other: list[float]) -> Outcome:
        one, two = (
            [Series(benchmark="hit", unit="share", better="higher", values=(v,)) for v in s] for s in (base, other)
        )
        return compare_series(one, two, 0.05).outcome

    assert row([0.0] * 3, [0.0] * 3) is Outcome.PASS
    assert row([0.5] * 3, [0.0] * 3) is Outcome.INCONCLUSIVE
    assert row([0.5] * 3, [0.5] * 3) is Outcome.PASS


def test_a_changed_unit_is_another_benchmark() -> None:
    one = [Series(benchmark="x", unit="s", better="lower", values=(1.0,))] * 3
    two = [Series(benchmark="x", unit="ms", better="lower", values=(1.0,))] * 3
    assert compare_series(one, two, 0.05).outcome is Outcome.INCONCLUSIVE


def test_vanished_and_new_benchmarks_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for n in range(3):
        samples.write_run(tmp_path / "A" / f"{n}", [samples.series(NAME, [0.1]), samples.series("old", [1.0])])
        samples.write_run(tmp_path / "B" / f"{n}", [samples.series(NAME, [0.1]), samples.series("fresh", [1.0])])
    assert _code(tmp_path / "A", tmp_path / "B") == 11
    said = capsys.readouterr().out
    assert "VANISHED: `old`" in said
    assert "new: `fresh`" in said


def test_figures_of_spoiled_cases_do_not_count(tmp_path: Path) -> None:
    _runs(tmp_path / "A", [0.1, 0.1, 0.1])
    spoiled = samples.write_run(tmp_path / "B", [samples.series(NAME, [0.1])], outcome=r.Outcome.HARNESS_ERROR)
    with pytest.raises(Unlike, match="no figures"):
        load_side(str(spoiled))


# What it refuses
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("hardware", {"host": {**samples.HOST, "cpu_model": "another CPU"}}),
        ("versions", {"host": {**samples.HOST, "python": "3.12"}}),
        ("stack", {"stack": samples.stack_up(transport="rdma")}),
    ],
)
def test_unlike_runs_are_refused_unless_that_is_the_point(
    tmp_path: Path, kind: str, changes: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    base = _runs(tmp_path / "A", [0.1, 0.1001, 0.0999])
    other = _runs(tmp_path / "B", [0.1, 0.1001, 0.0999], **changes)
    assert _code(base, other) == 4
    error = capsys.readouterr().err
    assert f"differ in {kind}" in error
    assert f"--allow {kind}" in error
    assert _code(base, other, "--allow", kind) == 0
    assert f"allowed difference: {kind}" in capsys.readouterr().out


def test_another_model_is_refused(tmp_path: Path) -> None:
    up = samples.stack_up()
    other = r.StackUp(stack_id="s1", t_s=0.0, spec=up.spec, engines=tuple(_renamed(e) for e in up.engines))
    base = _runs(tmp_path / "A", [0.1, 0.1, 0.1])
    assert _code(base, _runs(tmp_path / "B", [0.1, 0.1, 0.1], stack=other)) == 4


def _renamed(facts: r.EngineFacts) -> r.EngineFacts:
    return r.EngineFacts(**{f: getattr(facts, f) for f in facts.__struct_fields__} | {"model": "/models/large"})


def test_runs_of_one_side_have_to_be_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = _runs(tmp_path / "A", [0.1, 0.1, 0.1])
    samples.write_run(base / "run-9", [samples.series(NAME, [0.1])], host={**samples.HOST, "cpus": 64})
    assert _code(base, _runs(tmp_path / "B", [0.1, 0.1, 0.1])) == 4
    assert "split them" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["A"], "two sides"),
        (["A", "nowhere"], "no run here"),
        (["A", "B", "--allow", "colour"], "--allow colour: one of hardware"),
        (["A", "B", "--thresholds", "none.toml"], "cannot be read"),
        (["A", "B", "--markdown", "no/such/folder/x.md"], "cannot be written"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_4(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    _runs(tmp_path / "A", [0.1, 0.1, 0.1])
    _runs(tmp_path / "B", [0.1, 0.1, 0.1])
    monkeypatch.chdir(tmp_path)
    assert _code(*arguments) == 4
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_runs_with_nothing_in_common_are_refused(tmp_path: Path) -> None:
    for n in range(3):
        samples.write_run(tmp_path / "A" / f"{n}", [samples.series("a", [0.1])])
        samples.write_run(tmp_path / "B" / f"{n}", [samples.series("b", [0.1])])
    assert _code(tmp_path / "A", tmp_path / "B") == 4


# Thresholds
def test_thresholds_follow_the_last_pattern_that_matches(tmp_path: Path) -> None:
    file = tmp_path / "t.toml"
    file.write_text('[default]\ntolerance = 0.2\n["ttft/*"]\ntolerance = 0.5\n')
    found = load_thresholds(file)
    assert (found.of("ttft/cold/9").tolerance, found.of("other").tolerance) == (0.5, 0.2)
    assert load_thresholds(DEFAULT_FILE).of("replay/x").tolerance == 0.10
    base, worse = _runs(tmp_path / "A", [0.1, 0.1001, 0.0999]), _runs(tmp_path / "B", [0.13, 0.1301, 0.1299])
    assert (_code(base, worse), _code(base, worse, "--thresholds", file)) == (10, 0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[default\n", "not valid TOML"),
        ("[default]\ntolerance = 0\n", "above 0"),
        ("[default]\nlimit = 1\n", "limit"),
        ('default = "x"\n', "one key"),
    ],
)
def test_bad_thresholds_are_named(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "t.toml").write_text(text)
    with pytest.raises(ThresholdError, match=said):
        load_thresholds(tmp_path / "t.toml")


def test_a_pattern_that_matches_nothing_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t.toml").write_text('["tfft/*"]\ntolerance = 0.5\n')
    base = _runs(tmp_path / "A", [0.1, 0.1, 0.1])
    assert _code(base, _runs(tmp_path / "B", [0.1, 0.1, 0.1]), "--thresholds", tmp_path / "t.toml") == 4
    assert "matches no benchmark" in capsys.readouterr().err


# What it writes
def test_pages_and_pictures_hold_every_benchmark(tmp_path: Path) -> None:
    sides = [load_side(str(p)) for p in _paired(tmp_path, 0.1)]
    found = [compare(sides[0], sides[1], load_thresholds(DEFAULT_FILE))]
    for text in (markdown(found), html(found), svg(found)):
        assert NAME in text
        assert "FAIL" in text
    assert svg(found).count("<circle") == 1
    written = [tmp_path / f"x.{kind}" for kind in ("md", "html", "svg")]
    options = [f"--{k}={p}" for k, p in zip(("markdown", "html", "svg"), written, strict=True)]
    assert _code(tmp_path / "A", tmp_path / "B", *options) == 10
    assert all(p.stat().st_size for p in written)


def test_an_interval_without_ends_is_drawn_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _code(*_paired(tmp_path, 0.1, blocks=1), f"--svg={tmp_path / 'x.svg'}") == 11
    assert "[no end, no end]" in capsys.readouterr().out
    assert "nan" not in (tmp_path / "x.svg").read_text()


def test_several_sides_are_compared_with_the_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sides = [
        _runs(tmp_path / n, v)
        for n, v in (("A", [0.1, 0.1001, 0.0999]), ("B", [0.1, 0.1001, 0.0999]), ("C", [0.2, 0.2, 0.2001]))
    ]
    assert _code(*sides) == 10
    said = capsys.readouterr().out
    assert "B against A: PASS" in said
    assert "C against A: FAIL" in said
