"""``verdicts.json``: the scoreboard as data, for other programs and for rendering again later.

The schema is ``reports.scoreboard.Scoreboard`` with ``schema`` and ``version`` first; readers ignore fields they do not
know. Secrets never enter it.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from reports.redact import Redactor
from reports.scoreboard import Scoreboard, decode

FILE_NAME = "verdicts.json"


def render(scoreboard: Scoreboard, redactor: Redactor | None = None) -> str:
    """JSON text, indented, with a last newline."""
    clean = (redactor or Redactor()).data(scoreboard)
    return msgspec.json.format(msgspec.json.encode(clean), indent=1).decode() + "\n"


def load(path: Path) -> Scoreboard:
    """Read a scoreboard back. Raises ValueError (one line with the path) for another or a newer format, OSError."""
    try:
        return decode(path.read_bytes())
    except ValueError as exc:
        raise ValueError(f"{path}: {exc}") from exc
