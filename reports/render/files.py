"""Writes the report files of a run."""

from __future__ import annotations

from pathlib import Path

from reports.redact import Redactor
from reports.render import envelope, html, json, markdown
from reports.scoreboard import Scoreboard


def write_all(
    scoreboard: Scoreboard, run_dir: Path, redactor: Redactor | None = None, *, with_html: bool = True
) -> list[Path]:
    """Write ``verdicts.json``, ``report.md``, ``report.html`` and the envelopes of faults into a run. Raises OSError.

    Each file is replaced as a whole, so that a reader never sees half of one.
    """
    redactor = redactor or Redactor.of((), str(run_dir))
    texts = {run_dir / module.FILE_NAME: module.render(scoreboard, redactor) for module in (json, markdown)}
    if with_html:
        texts[run_dir / html.FILE_NAME] = html.render(scoreboard, redactor)
    for row in redactor.data(scoreboard).rows:
        if drawing := envelope.render(row.verdict):
            texts[run_dir / envelope.FOLDER / envelope.file_name(row.verdict.case_id)] = drawing
    for path, text in texts.items():
        path.parent.mkdir(exist_ok=True)
        part = path.with_suffix(path.suffix + ".part")
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    return list(texts)
