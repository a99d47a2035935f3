"""Writes the report files of a run."""

from __future__ import annotations

from pathlib import Path

from reports.redact import Redactor
from reports.render import envelope, html, json, markdown
from reports.scoreboard import Scoreboard


def write_all(scoreboard: Scoreboard, run_dir: Path, redactor: Redactor | None = None) -> list[Path]:
    """Write ``verdicts.json``, ``report.md``, ``report.html`` and the envelopes of faults into a run. Raises OSError.

    Each file is replaced as a whole, so that a reader never sees half of one.
    """
    written = []
    redactor = redactor or Redactor.of((), str(run_dir))
    for module in (json, markdown, html):
        path = run_dir / module.FILE_NAME
        part = path.with_suffix(path.suffix + ".part")
        part.write_text(module.render(scoreboard, redactor), encoding="utf-8")
        part.replace(path)
        written.append(path)
    return written + envelope.write_envelopes(redactor.data(scoreboard), run_dir)
