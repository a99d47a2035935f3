"""``python -m tools.campaign PLAN``: an ordered list of runs on a machine that is lent for minutes, cut anywhere, evidence kept.

A plan (``tools/plans/*.toml``) lists runs in order of worth; runs of one ``group`` that follow each other start together. Each has
a limit of its own. The call as a whole has a budget: what does not fit any more is not begun, what runs is interrupted in time to
clean up after itself, and everything is packed into files small enough to be carried away. The next call with the same ``--work``
goes on: finished runs are left alone, cut ones are resumed, so the verdicts that they have are kept.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path

import msgspec

from fixtures.arguments import Parser
from fixtures.endings import give_back, take_signals
from fixtures.errors import UsageError
from tools.named import read_named

ROOT = Path(__file__).resolve().parent.parent
PLANS = Path(__file__).parent / "plans"
DONE = "campaign.json"

STOP_S = 27.0
"""After the interrupt: pytest tears its stack down (engines get ``timeouts.stop_s``, 20 s) and writes its reports."""
PACK_S = 8.0
"""Kept free at the end of the budget for packing."""
PIECE_BYTES = 15 << 20
"""Largest file that is written; longer archives come in numbered pieces."""
POLL_S = 0.5
LONGEST_S = 7 * 86400.0
"""Largest budget that is taken for one: NaN and infinity are none."""
ENOUGH = signal.SIGTERM
"""The suite takes it like Ctrl-C, and unlike that one it is never inherited as ignored."""
RESUMABLE = "history"
"""Beginning of the evidence files of a run: where there is one, the run can be gone on with."""


class Run(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One run of a plan. Times in seconds."""

    name: str
    pytest: tuple[str, ...] = ()
    """Arguments of pytest; ``--evidence`` (and ``--resume``) are added."""
    module: tuple[str, ...] = ()
    """Or: a module of the suite and its arguments."""
    expected_s: float
    limit_s: float
    least_s: float | None = None
    """With less than this a run is not begun; ``expected_s`` where it is not given. Less is for runs that are worth being cut."""
    group: str = ""
    """Runs of one group that follow each other start together: none of them measures time."""


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    run: tuple[Run, ...]


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a run went, so far. ``exit_code``: the process's own; None: killed after it had not stopped."""

    name: str
    calls: int
    wall_s: float
    exit_code: int | None
    cut: bool


def load_plan(source: str) -> Plan:
    """A plan: a file, or the name of one in ``tools/plans``. Raises UsageError."""
    path, plan = read_named(source, PLANS, Plan, asked=f"plan {source}", error=UsageError)
    names_used = [run.name for run in plan.run]
    for run in plan.run:
        if names_used.count(run.name) > 1 or not run.name.replace("-", "").isalnum():
            raise UsageError(f"plan {path}: run {run.name!r}: names differ, and are made of letters, digits and '-'")
        if bool(run.pytest) == bool(run.module):
            raise UsageError(f"plan {path}: run {run.name!r}: either pytest = [...] or module = [...]")
    return plan


def command_of(run: Run, work: Path) -> list[str]:
    """The command line of a run, which goes on with what an earlier call left of it."""
    if run.module:
        return [sys.executable, "-m", *run.module]
    words = [sys.executable, "-m", "pytest", *run.pytest, "--evidence", str(work)]
    earlier = sorted(p.parent for p in work.glob(f"*/{RESUMABLE}*.jsonl"))
    return [*words, "--resume", str(earlier[-1])] if earlier else words


def earlier_outcome(work: Path) -> Outcome | None:
    """What earlier calls say of a run; None where it was never begun."""
    try:
        return msgspec.json.decode((work / DONE).read_bytes(), type=Outcome)
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError, msgspec.DecodeError) as exc:
        raise UsageError(
            f"--work {work.parent}: {work / DONE}: no outcome of a run can be read there: {exc}; give another folder,"
            " or remove the file to go on with the run"
        ) from exc


class Going:
    """A run that was started."""

    def __init__(self, run: Run, work: Path, end: float) -> None:
        self.run, self.work = run, work
        self.before = earlier_outcome(work)
        work.mkdir(parents=True, exist_ok=True)
        self.started = time.monotonic()
        self.stop_at = min(end, self.started + run.limit_s)
        self.cut = False
        self.ended: float | None = None
        with (work / "output.txt").open("ab") as log:
            self.process = subprocess.Popen(
                command_of(run, work),
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "PYTHONUNBUFFERED": "1", "COLUMNS": "160"},
            )

    def watch(self, now: float) -> bool:
        """Interrupt it at its limit, kill it when it does not stop. Returns whether it still runs."""
        if self.process.poll() is not None:
            self.ended = self.ended or now
            return False
        if now >= self.stop_at + STOP_S:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            return False
        if now >= self.stop_at and not self.cut:
            self.cut = True
            self.process.send_signal(ENOUGH)
        return True

    def interrupt(self) -> None:
        """End it before its time: it cleans up after itself, or is killed where it does not."""
        self.cut = True
        self.process.send_signal(ENOUGH)
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def outcome(self) -> Outcome:
        """How it went, written down beside its evidence."""
        before = self.before
        code = self.process.returncode
        found = Outcome(
            name=self.run.name,
            calls=1 + (before.calls if before else 0),
            wall_s=round((self.ended or time.monotonic()) - self.started + (before.wall_s if before else 0.0), 1),
            exit_code=None if code == -signal.SIGKILL else code,
            cut=self.cut,
        )
        (self.work / DONE).write_bytes(msgspec.json.encode(found))
        return found


def pack(work: Path, out: Path) -> list[Path]:
    """Write ``out/NAME.tar.gz`` of a run's folder, or ``NAME.tar.gz.00`` and so on. Sockets and links stay behind."""
    archive = out / f"{work.name}.tar.gz"
    with tarfile.open(archive, "w:gz", compresslevel=6) as sink:
        sink.add(work, arcname=work.name, filter=lambda m: m if m.isfile() or m.isdir() else None)
    if archive.stat().st_size <= PIECE_BYTES:
        return [archive]
    pieces: list[Path] = []
    with archive.open("rb") as source:
        while data := source.read(PIECE_BYTES):
            pieces.append(out / f"{archive.name}.{len(pieces):02d}")
            pieces[-1].write_bytes(data)
    archive.unlink()
    return pieces


def carry_out(plan: Plan, work: Path, out: Path, budget_s: float, say: Callable[[str], None]) -> list[Outcome]:
    """Run what is left of a plan within ``budget_s`` and pack what was run. Raises UsageError for an unusable folder."""
    if not 0 < budget_s <= LONGEST_S:
        raise UsageError(f"--budget-s {budget_s:g}: seconds, more than 0 and at most {LONGEST_S:g}")
    end = time.monotonic() + budget_s - PACK_S - STOP_S
    for flag, folder in (("--work", work), ("--out", out)):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise UsageError(f"{flag} {folder}: cannot be made: {exc.strerror}; give another folder") from exc
    found: list[Outcome] = []
    left = [run for run in plan.run if (seen := earlier_outcome(work / run.name)) is None or seen.cut]
    for _, members in groupby(left, key=lambda run: run.group or run.name):
        runs = list(members)
        if time.monotonic() + max(_least_s(run) for run in runs) > end:
            continue
        going = [Going(run, work / run.name, end) for run in runs]
        say(f"{', '.join(g.run.name for g in going)}: about {max(g.run.expected_s for g in going):.0f} s")
        try:
            while sum(g.watch(time.monotonic()) for g in going):
                time.sleep(POLL_S)  # why: polls processes until each ends; bounded by stop_at and STOP_S
        finally:
            for one in going:
                if one.process.poll() is None:  # interrupted
                    one.interrupt()
                found.append(one.outcome())
                pack(one.work, out)
        for outcome in found[-len(going) :]:
            say(f"{outcome.name}: exit {outcome.exit_code}{', cut' if outcome.cut else ''}, {outcome.wall_s:.0f} s")
    begun = {outcome.name for outcome in found}
    say(f"not begun: {', '.join(run.name for run in left if run.name not in begun) or 'none'}")
    return found


def _least_s(run: Run) -> float:
    return run.expected_s if run.least_s is None else run.least_s


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 when all of the plan is done, 1 when something is left, 4 for bad input, 130 when it was interrupted."""
    parser = Parser(prog="python -m tools.campaign", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("plan", help="a TOML file, or the name of one in tools/plans")
    parser.add_argument("--work", type=Path, required=True, help="folder of the evidence; the next call goes on there")
    parser.add_argument("--out", type=Path, required=True, help="folder that the packed evidence of this call goes to")
    parser.add_argument(
        "--budget-s", type=float, default=540.0, help="seconds that this call may take, packing included"
    )
    parser.add_argument("--only", default="", help="names of runs, with commas")
    given = parser.parse_args(argv)
    # Runs are in sessions of their own, and would go on for hours without the one that ends them in time.
    taken = take_signals()
    try:
        plan = load_plan(given.plan)
        if given.only:
            names = given.only.split(",")
            for name in names:
                if name not in {run.name for run in plan.run}:
                    raise UsageError(f"--only {name}: the plan has {', '.join(run.name for run in plan.run)}")
            plan = Plan(run=tuple(run for run in plan.run if run.name in names))
        carry_out(plan, given.work, given.out, given.budget_s, lambda line: print(f"campaign: {line}", flush=True))  # noqa: T201 - a command's own output
    except UsageError as exc:
        sys.stderr.write(f"campaign: {exc}\n")
        return 4
    except KeyboardInterrupt:
        sys.stderr.write(f"campaign: interrupted; the next call with --work {given.work} goes on\n")
        return 130
    finally:
        give_back(taken)
    left = [run for run in plan.run if (seen := earlier_outcome(given.work / run.name)) is None or seen.cut]
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
