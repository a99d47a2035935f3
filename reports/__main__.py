"""``python -m reports {judge,render,compare} RUN...``: what finished runs say.

judge    judge the run's evidence again and list verdicts that differ from the recorded ones
render   show the run; write verdicts.json, report.md, report.html and missing reproductions into it
compare  benchmarks of runs against those of other runs

Exit code 4 with one line for bad input; ``reports.judge`` documents the others of ``judge``, ``reports.compare`` those of ``compare``.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from reports import compare as comparing
from reports import compare_render, reproduce
from reports import judge as judging
from reports import records as r
from reports.compare_runs import Unlike
from reports.compare_thresholds import ThresholdError
from reports.evidence import EvidenceError, LoadedRun, load_run
from reports.redact import Redactor, secrets_out
from reports.render import html, json, markdown, terminal
from reports.render.files import write_all
from reports.runinfo import run_info
from reports.scoreboard import Scoreboard, build
from suite.contract import Gate

EXIT_USAGE = 4
_STOPS_SHORT = "the run ended inside this case, or before its verdict"


class Usage(Exception):  # noqa: N818 - one line of bad input, not a fault of this program
    """Bad input: one line that names the place and the mend."""


def main(argv: Sequence[str] | None = None, gates: dict[str, Gate] | None = None) -> int:
    """Run a command. ``gates`` stands in for the suite's own (tests). Returns the exit code."""
    try:
        options = _parser().parse_args(argv)
    except SystemExit as exc:  # argparse has printed why
        return EXIT_USAGE if exc.code else 0
    command: Callable[[argparse.Namespace, dict[str, Gate] | None], int] = options.command
    try:
        return command(options, gates)
    except (Usage, EvidenceError, Unlike, ThresholdError) as exc:
        print(secrets_out(f"reports: {exc}"), file=sys.stderr)
        return EXIT_USAGE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m reports", description="What finished runs say.", allow_abbrev=False
    )
    commands = parser.add_subparsers(required=True, metavar="{judge,render,compare}")
    judge = commands.add_parser("judge", help="judge evidence again; list verdicts that differ from the recorded ones")
    judge.add_argument("--case", metavar="ID", help="only this case")
    judge.add_argument(
        "--write", metavar="DIR", help="write the verdicts given now (verdicts.json, report.md, report.html) into DIR"
    )
    judge.set_defaults(command=_judge)
    render = commands.add_parser("render", help="show a run; write its report files")
    render.add_argument(
        "--format",
        choices=("terminal", "json", "markdown", "html"),
        help="print one format and write nothing (default: print the scoreboard and write all files into the run)",
    )
    render.set_defaults(command=_render)
    comparing.add_command(commands).set_defaults(command=_compare)
    for command in (judge, render):
        command.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run, e.g. reports/out/<run>")
        command.add_argument("--width", type=int, help="columns of the scoreboard (default: those of the terminal)")
    return parser


def _judge(options: argparse.Namespace, gates: dict[str, Gate] | None) -> int:
    gates = judging.known_gates() if gates is None else gates
    codes = []
    if options.write and len(options.runs) > 1:
        raise Usage("--write takes one run at a time; give one RUN")
    for name in options.runs:
        run = _load(name)
        try:
            judgement = judging.judge_run(run, gates, only=options.case)
        except KeyError as exc:
            ids = [case for h in run.histories.values() for case in h.case_ids()]
            raise Usage(f"--case {options.case}: {name} has no such case; it has: {', '.join(ids) or 'none'}") from exc
        board = judgement.scoreboard(gates, run_info(run.histories.values()))
        _show(board, options.width)
        if options.write:
            _write_judged(board, run, Path(options.write))
        for line in [*judging.report_lines(judgement), *_skipped(run)]:
            print(secrets_out(line))
        codes.append(judgement.exit_code)
    return min((code for code in codes if code), default=0)


def _render(options: argparse.Namespace, gates: dict[str, Gate] | None) -> int:
    for name in options.runs:
        run = _load(name)
        board = _scoreboard(run, Path(name), gates)
        redactor = Redactor.of(run.histories.values(), name)
        if options.format in (None, "terminal"):
            _show(board, options.width)
        else:
            module = {"json": json, "markdown": markdown, "html": html}[options.format]
            print(module.render(board, redactor), end="")
        if options.format is None:
            _write(board, run, Path(name), redactor)
    return 0


def _compare(options: argparse.Namespace, gates: dict[str, Gate] | None) -> int:
    found, code = comparing.run_command(options)
    print(secrets_out(compare_render.markdown(found)), end="")
    for name, text in (
        ("markdown", compare_render.markdown),
        ("html", compare_render.html),
        ("svg", compare_render.svg),
    ):
        if path := getattr(options, name):
            try:
                Path(path).write_text(secrets_out(text(found)), encoding="utf-8")
            except OSError as exc:
                raise Usage(f"--{name} {path}: cannot be written: {exc}") from exc
    return code


def _load(name: str) -> LoadedRun:
    path = Path(name)
    try:
        if name and path.exists():
            run = load_run(path)
            if not any(record for history in run.histories.values() for record in history):
                raise Usage(f"{name}: no record of a run in it; nothing can be judged or shown")
            return run
    except OSError as exc:
        raise Usage(f"{name}: cannot be read: {exc}") from exc
    raise Usage(f"{name or 'an empty name'}: no such run; give the folder of a run, e.g. reports/out/<run>")


def _scoreboard(run: LoadedRun, run_dir: Path, gates: dict[str, Gate] | None) -> Scoreboard:
    """The scoreboard that the run wrote at its end; for a run that was cut short, one made of what it recorded."""
    written = run_dir / json.FILE_NAME
    if written.is_file():
        try:
            board = json.load(written)
        except (ValueError, OSError) as exc:
            raise Usage(str(exc)) from exc
        if board.run.complete:  # else it was rendered while the run still went on: look again
            return board
    verdicts: list[r.Verdict] = []
    unfinished: list[tuple[str, str]] = []
    evidence: dict[str, str] = {}
    for name, history in run.histories.items():
        recorded = judging.recorded_verdicts(history)
        verdicts += recorded.values()
        unfinished += [(case, _STOPS_SHORT) for case in history.case_ids() if case not in recorded]
        evidence.update(dict.fromkeys(history.case_ids(), f"{name}.jsonl"))
    return build(
        verdicts,
        not_run=unfinished,
        proofs=judging.proofs(judging.known_gates() if gates is None else gates),
        evidence=evidence,
        run=run_info(run.histories.values()),
    )


def _write(board: Scoreboard, run: LoadedRun, run_dir: Path, redactor: Redactor) -> None:
    if not run_dir.is_dir():
        raise Usage(f"{run_dir}: a single history file; give the run's folder, or --format to print only")
    try:
        board = reproduce.write_missing(board, run, run_dir)
        written = write_all(board, run_dir, redactor)
    except OSError as exc:
        raise Usage(f"{run_dir}: cannot be written: {exc}; use --format to print only") from exc
    for path in written:
        print(f"wrote {path}")


def _write_judged(board: Scoreboard, run: LoadedRun, folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in write_all(board, folder, Redactor.of(run.histories.values(), run.path)):
            print(f"wrote {path}")
    except OSError as exc:
        raise Usage(f"--write {folder}: cannot be written: {exc}") from exc


def _show(board: Scoreboard, width: int | None) -> None:
    colour = terminal.wants_colour(sys.stdout, os.environ)
    print(terminal.render(board, width=width or terminal.terminal_width(), colour=colour), end="")


def _skipped(run: LoadedRun) -> list[str]:
    return [f"note: {count} line(s) skipped: {reason}" for reason, count in run.skipped.items()]


if __name__ == "__main__":
    sys.exit(main())
