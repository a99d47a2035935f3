"""The campaign: order, limits, budget, going on after a cut, and evidence that comes back whole. Runs are small real processes."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
import tomllib
from pathlib import Path

import msgspec
import pytest

from fixtures.errors import UsageError
from fixtures.spec import resolve_spec_path
from tools import campaign
from tools.campaign import Plan, Run, carry_out, command_of, earlier_outcome, load_plan, main, pack

pytestmark = pytest.mark.selftest

ROOMY_S = 1000.0


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of a selftest end within milliseconds: look often."""
    monkeypatch.setattr(campaign, "POLL_S", 0.02)


def run(name: str, *module: str, **changes: float | str) -> Run:
    return msgspec.structs.replace(Run(name=name, module=module, expected_s=1, limit_s=100), **changes)


def go(plan: list[Run], tmp_path: Path, budget_s: float = ROOMY_S) -> tuple[list[campaign.Outcome], list[str]]:
    said: list[str] = []
    found = carry_out(Plan(run=tuple(plan)), tmp_path / "work", tmp_path / "out", budget_s, said.append)
    return found, said


def test_runs_are_done_in_order_once_and_their_output_is_carried_away(tmp_path: Path) -> None:
    plan = [run("a", "this"), run("b", "no_such_module_anywhere")]
    found, _ = go(plan, tmp_path)
    assert [(o.name, o.exit_code, o.cut) for o in found] == [("a", 0, False), ("b", 1, False)]
    with tarfile.open(tmp_path / "out" / "a.tar.gz") as archive:
        assert set(archive.getnames()) == {"a", "a/output.txt", "a/campaign.json"}
        text = archive.extractfile("a/output.txt")
        assert text is not None
        assert b"Beautiful is better than ugly" in text.read()
    again, said = go(plan, tmp_path)
    assert again == []
    assert said == ["not begun: none"], "a finished run, also one that failed, is not run again"


def test_a_run_is_interrupted_at_its_limit_and_the_next_call_runs_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = ("timeit", "-n", "1", "-r", "1", "import signal; signal.pause()")
    found, _ = go([run("slow", *waits, limit_s=0.3)], tmp_path)
    assert [(o.cut, o.calls) for o in found] == [(True, 1)]
    assert found[0].exit_code != 0
    found, _ = go([run("slow", "this")], tmp_path)
    assert [(o.cut, o.calls, o.exit_code) for o in found] == [(False, 2, 0)]


def test_a_run_that_does_not_stop_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(campaign, "STOP_S", 0.5)
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()"
    found, _ = go([run("deaf", "timeit", "-n", "1", "-r", "1", deaf, limit_s=1.0)], tmp_path)
    assert [(o.cut, o.exit_code) for o in found] == [(True, None)]


def test_what_does_not_fit_is_not_begun_and_said(tmp_path: Path) -> None:
    budget_s = campaign.STOP_S + campaign.PACK_S + 50
    plan = [run("a", "this", expected_s=60), run("b", "this", expected_s=60, least_s=10), run("c", "this")]
    found, said = go(plan, tmp_path, budget_s)
    assert [o.name for o in found] == ["b", "c"], "a smaller run behind it may still fit"
    assert said[-1] == "not begun: a"


def test_runs_of_a_group_run_beside_each_other(tmp_path: Path) -> None:
    meet = (
        "import os, pathlib; from fixtures.waiting import wait_for\n"
        "p = pathlib.Path({!r}); (p / str(os.getpid())).touch()\n"
        "wait_for('both', lambda: len(list(p.iterdir())) == 2, bound_s=60, bound_source='two starts of Python', poll_s=0.02)"
    ).format(str(tmp_path / "meeting"))
    (tmp_path / "meeting").mkdir()
    words = ("timeit", "-n", "1", "-r", "1", meet)
    found, _ = go([run("a", *words, group="g"), run("b", *words, group="g")], tmp_path)
    assert [o.exit_code for o in found] == [0, 0]


def test_a_cut_run_of_gates_is_resumed(tmp_path: Path) -> None:
    gates = Run(name="g", pytest=("suite/gates",), expected_s=1, limit_s=1)
    assert command_of(gates, tmp_path)[-2:] == ["--evidence", str(tmp_path)]
    for name in ("20260101-000000-x-1", "20260102-000000-x-1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "history-main.jsonl").touch()
    assert command_of(gates, tmp_path)[-2:] == ["--resume", str(tmp_path / "20260102-000000-x-1")]


def test_a_large_archive_comes_in_pieces_that_make_one_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(campaign, "PIECE_BYTES", 1000)
    work = tmp_path / "run"
    work.mkdir()
    (work / "noise").write_bytes(os.urandom(3500))
    (work / "link").symlink_to("noise")
    out = tmp_path / "out"
    out.mkdir()
    pieces = pack(work, out)
    assert len(pieces) == 4
    assert [p.name for p in sorted(out.iterdir())] == [p.name for p in pieces], "sorted by name they are in order"
    with tarfile.open(fileobj=io.BytesIO(b"".join(p.read_bytes() for p in pieces))) as archive:
        assert set(archive.getnames()) == {"run", "run/noise"}
        noise = archive.extractfile("run/noise")
        assert noise is not None
        assert noise.read() == (work / "noise").read_bytes()


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("[[run]]\nname = 'a'\nexpected_s = 1\nlimit_s = 1", "either pytest"),
        ("[[run]]\nname = 'a b'\nmodule = ['x']\nexpected_s = 1\nlimit_s = 1", "names differ"),
        ("[[run]]\nname = 'a'\nmodul = ['x']\nexpected_s = 1\nlimit_s = 1", "modul"),
        ("run = ", "plan"),
    ],
)
def test_a_bad_plan_is_one_line(tmp_path: Path, text: str, wanted: str) -> None:
    (tmp_path / "p.toml").write_text(text)
    with pytest.raises(UsageError, match=wanted) as caught:
        load_plan(str(tmp_path / "p.toml"))
    assert "\n" not in str(caught.value)


def test_an_unknown_plan_and_an_unknown_run_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = ["--work", str(tmp_path / "w"), "--out", str(tmp_path / "o")]
    assert main(["nowhere", *folders]) == 4
    assert "h200" in capsys.readouterr().err
    assert main(["h200", *folders, "--only", "nothing"]) == 4
    assert not (tmp_path / "w").exists()
    assert earlier_outcome(tmp_path) is None


def test_the_ready_plans_name_stacks_that_are_there() -> None:
    for path in campaign.PLANS.glob("*.toml"):
        plan = load_plan(str(path))
        assert tomllib.loads(path.read_text())["run"]
        for one in plan.run:
            if "--stack" in one.pytest:
                resolve_spec_path(one.pytest[one.pytest.index("--stack") + 1])


@pytest.mark.parametrize("budget_s", [float("nan"), float("inf"), 0.0, -5.0])
def test_a_budget_without_an_end_is_refused(tmp_path: Path, budget_s: float) -> None:
    with pytest.raises(UsageError, match="--budget-s"):
        go([run("a", "this")], tmp_path, budget_s)
    assert not (tmp_path / "work").exists()


def test_folders_that_cannot_be_used_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "work").write_text("a file")
    with pytest.raises(UsageError, match=r"--work .*work: cannot be made"):
        go([run("a", "this")], tmp_path)


def test_what_an_earlier_call_left_unreadable_is_one_line_and_stays(tmp_path: Path) -> None:
    left = tmp_path / "work" / "a" / campaign.DONE
    left.parent.mkdir(parents=True)
    left.write_text("{")
    with pytest.raises(UsageError, match=r"a/campaign.json: no outcome of a run"):
        go([run("a", "this")], tmp_path)
    assert left.read_text() == "{"


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGHUP], ids=["TERM", "HUP"])
def test_a_campaign_that_is_ended_takes_its_runs_along(tmp_path: Path, signal_number: int) -> None:
    """They are in sessions of their own: nobody else would end them."""
    waits = ["timeit", "-n", "1", "-r", "1", "-s", "import os, pathlib, signal", f"pathlib.Path('{tmp_path}/pid').write_text(str(os.getpid())); signal.pause()"]  # fmt: skip
    plan = tmp_path / "plan.toml"
    plan.write_text(f'[[run]]\nname = "a"\nmodule = {json.dumps(waits)}\nexpected_s = 1\nlimit_s = 100\n')
    words = [str(plan), "--work", str(tmp_path / "work"), "--out", str(tmp_path / "out")]
    with subprocess.Popen(
        [sys.executable, "-m", "tools.campaign", *words], stderr=subprocess.PIPE, text=True
    ) as process:
        for _ in range(600):
            if process.poll() is not None or ((tmp_path / "pid").exists() and (tmp_path / "pid").read_text()):
                break
            time.sleep(0.05)  # why: polls for the run's first act, 30 s at most
        pid = int((tmp_path / "pid").read_text())
        try:
            process.send_signal(signal_number)
            _, said = process.communicate(timeout=30)
            assert process.returncode == 130
            assert said.splitlines() == [
                f"campaign: interrupted; the next call with --work {tmp_path / 'work'} goes on"
            ]
            assert not Path(f"/proc/{pid}").exists()
        finally:
            if Path(f"/proc/{pid}").exists():
                os.kill(pid, signal.SIGKILL)
