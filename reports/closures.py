"""Which settings close which hole: situations that were judged with upstream's defaults and with other settings.

Cases whose ids differ in their last part alone are one situation; the one that ends in ``default`` has upstream's defaults
(``I.engine.weights.default``, ``I.engine.weights.prefix``; ``O.lookup-channel.default``, ``O.lookup-channel.isolated``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from reports import records as r

DEFAULT = "default"
HEADS = ("situation", "with upstream's defaults", "closed by", "not closed by")
UNDECIDED = (r.Outcome.INCONCLUSIVE, r.Outcome.UNTESTABLE, r.Outcome.HARNESS_ERROR)


@dataclass(frozen=True)
class Hole:
    """A situation that fails with upstream's defaults. ``others``: last part of the id -> verdict; empty where nothing else ran."""

    situation: str
    default: r.Verdict
    others: dict[str, r.Verdict]

    @property
    def closed_by(self) -> list[str]:
        """Settings under which it passes."""
        return [name for name, verdict in self.others.items() if verdict.outcome is r.Outcome.PASS]

    def row(self) -> tuple[str, str, str, str]:
        """In the order of ``HEADS``. What decided nothing is in neither column."""
        still = {name: v for name, v in self.others.items() if v.outcome is r.Outcome.FAIL}
        return (
            f"`{self.situation}`",
            _words(self.default),
            ", ".join(f"`{name}`" for name in self.closed_by) or "nothing that ran",
            ", ".join(f"`{name}` ({_words(verdict)})" for name, verdict in still.items()),
        )


def holes(verdicts: Iterable[r.Verdict]) -> list[Hole]:
    """Situations that fail with upstream's defaults, in the order in which they came. Of several verdicts of a case the last
    counts; one that decided nothing only where there is no other."""
    last: dict[str, r.Verdict] = {}
    for verdict in verdicts:
        if verdict.outcome not in UNDECIDED or last.get(verdict.case_id, verdict).outcome in UNDECIDED:
            last[verdict.case_id] = verdict
    situations: dict[str, dict[str, r.Verdict]] = {}
    for case_id, verdict in last.items():
        situation, _, setting = case_id.rpartition(".")
        situations.setdefault(situation, {})[setting] = verdict
    return [
        Hole(situation, found[DEFAULT], {name: v for name, v in found.items() if name != DEFAULT})
        for situation, found in situations.items()
        if DEFAULT in found and found[DEFAULT].outcome is r.Outcome.FAIL
    ]


def _words(verdict: r.Verdict) -> str:
    return f"{verdict.outcome} `{verdict.finding}`"
