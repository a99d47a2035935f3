"""Answer oracle (rule 4): answers against measured floors, and the proof that the oracle could see a wrong one.

How two answers are compared, and in which unit, says ``suite.checks.comparison``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from reports import records as r
from suite.checks.base import finding, too_few
from suite.checks.comparison import Difference, compare, step_difference

__all__ = [
    "Difference",
    "Floor",
    "Judgement",
    "Pair",
    "check_sensitivity",
    "cold_floor",
    "compare",
    "judge_cold",
    "judge_external_vs_native",
    "native_floor",
    "step_difference",
]

Pair = tuple[r.Observation, r.Observation]


@dataclass(frozen=True)
class Floor:
    """Noise measured in this run: the largest differences of answers that ought to be equal.

    kind: ``native`` (native against native) or ``cold`` (cold against native). pairs, steps: sample sizes.
    parted: pairs whose tokens parted; margin_nat: largest margin at which they did (inf where it is unknown).
    unusable: pairs that could not be compared. They are in no other number.
    noise_nat: what was measured, where ``max_nat`` is a limit made of it (``suite.gates.oracle``); else None, and ``max_nat`` is it.
    """

    kind: str
    max_nat: float
    pairs: int
    steps: int
    parted: int = 0
    margin_nat: float = 0.0
    unusable: int = 0
    first_problem: str = ""
    noise_nat: float | None = None

    def words(self) -> str:
        """What an answer was held against."""
        if self.noise_nat is None:
            return f"floor {self.max_nat:.4g} nat from {self.pairs} pairs"
        return f"limit {self.max_nat:.4g} nat, noise {self.noise_nat:.4g} nat in {self.pairs} pairs"

    def merged(self, other: Floor) -> Floor:
        """Both samples together (sequential and concurrent ones, say). ValueError for floors of unequal kinds."""
        if self.kind != other.kind:
            raise ValueError(f"a {self.kind} floor and a {other.kind} floor are not one sample")
        return Floor(
            kind=self.kind,
            max_nat=max(self.max_nat, other.max_nat),
            pairs=self.pairs + other.pairs,
            steps=self.steps + other.steps,
            parted=self.parted + other.parted,
            margin_nat=max(self.margin_nat, other.margin_nat),
            unusable=self.unusable + other.unusable,
            first_problem=self.first_problem or other.first_problem,
        )

    def numbers(self) -> dict[str, object]:
        """As shown in a verdict."""
        return {"max_nat": self.max_nat, "pairs": self.pairs, "steps": self.steps, "parted": self.parted}


@dataclass(frozen=True)
class Judgement:
    """Findings, and notes that are true and worth knowing without bearing on the outcome."""

    findings: list[r.Finding]
    notes: list[str]


# --------------------------------------------------------------------------------------------------------------------


def native_floor(pairs: Sequence[Pair], *, logprobs: bool = True) -> Floor:
    """Floor of native against native answers. A floor of no usable pair has ``pairs == 0`` and supports no verdict."""
    return _floor("native", pairs, logprobs)


def cold_floor(pairs: Sequence[Pair], *, logprobs: bool = True) -> Floor:
    """Floor of cold against native answers."""
    return _floor("cold", pairs, logprobs)


def _floor(kind: str, pairs: Sequence[Pair], logprobs: bool) -> Floor:
    floor = Floor(kind=kind, max_nat=0.0, pairs=0, steps=0)
    for a, b in pairs:
        if a.request_id == b.request_id:
            raise ValueError(f"{a.request_id} compared with itself measures no noise")
        d = compare(a, b, logprobs=logprobs)
        if d.problem:
            one = Floor(kind=kind, max_nat=0.0, pairs=0, steps=0, unusable=1, first_problem=d.problem)
        else:
            margin = (math.inf if d.margin_nat is None else d.margin_nat) if d.parted else 0.0
            one = Floor(kind, d.max_nat, 1, d.steps, parted=int(d.parted), margin_nat=margin)
        floor = floor.merged(one)
    return floor


def judge_external_vs_native(
    pairs: Sequence[Pair], floor: Floor | None, *, logprobs: bool = True, min_pairs: int = 1, min_floor_pairs: int = 1
) -> list[r.Finding]:
    """Pairs (external answer, native answer) of equal cached length: any excess over the native floor is ``wrong-answer``.

    There is no escape by margin. Tokens may part only as native answers themselves were seen to part in this run.
    """
    found = _floor_findings(floor, "native", min_floor_pairs)
    differences = [compare(a, b, logprobs=logprobs) for a, b in pairs]
    found += _unusable(differences, min_pairs, "external against native")
    # Without a usable floor the claim is at most INCONCLUSIVE for small differences; corrupt answers are wrong anyhow.
    wrong = [d for d in differences if d.corrupt or (floor and floor.pairs and not d.problem and _exceeds(d, floor))]
    if wrong:
        found.insert(0, _wrong(wrong, len(pairs), "external against native", floor))
    return found


def _exceeds(d: Difference, floor: Floor) -> bool:
    if d.max_nat > floor.max_nat:
        return True
    if not d.parted:
        return False
    margin = math.inf if d.margin_nat is None else d.margin_nat
    return floor.parted == 0 or margin > floor.margin_nat or not math.isfinite(margin)


def judge_cold(
    pairs: Sequence[Pair], floor: Floor | None, *, logprobs: bool = True, min_pairs: int = 1, min_floor_pairs: int = 1
) -> Judgement:
    """Pairs (answer, cold answer) of unequal shape, against the cold floor.

    Tokens that part at a margin below the floor are numerics (a note). A larger margin, or a log probability that
    differs by more than the floor, is ``wrong-answer``; so is an answer cut short.
    """
    found = _floor_findings(floor, "cold", min_floor_pairs)
    differences = [compare(a, b, logprobs=logprobs) for a, b in pairs]
    found += _unusable(differences, min_pairs, "against cold")
    notes: list[str] = []
    wrong: list[Difference] = []
    for d in differences:
        if d.corrupt:
            wrong.append(d)
        elif floor and floor.pairs and not d.problem:
            if d.max_nat > floor.max_nat or (d.parted and not _numerics(d, floor)):
                wrong.append(d)
            elif d.parted:
                notes.append(
                    f"{d.a_id} and {d.b_id} part at step {d.first_step} at a margin of {d.margin_nat:.4g} nat,"
                    f" below the cold {floor.words()}: numerics"
                )
    if wrong:
        found.insert(0, _wrong(wrong, len(pairs), "against cold", floor))
    return Judgement(findings=found, notes=notes)


def _numerics(d: Difference, floor: Floor) -> bool:
    return d.margin_nat is not None and d.margin_nat < floor.max_nat


def _wrong(wrong: Sequence[Difference], pairs: int, arm: str, floor: Floor | None) -> r.Finding:
    first = wrong[0]
    limit = "no floor" if floor is None else floor.words()
    return finding(
        r.FindingCode.WRONG_ANSWER,
        f"{len(wrong)} of {pairs} answers {arm} are wrong; first: {first.a_id} against {first.b_id}: {first} ({limit})",
        **first.evidence(),
        arm=arm,
        count=len(wrong),
        pairs=pairs,
        limit_nat=None if floor is None else floor.max_nat,
        floor_pairs=0 if floor is None else floor.pairs,
    )


def _floor_findings(floor: Floor | None, kind: str, needed: int) -> list[r.Finding]:
    if floor is not None and floor.kind != kind:
        raise ValueError(f"a {floor.kind} floor where the {kind} floor belongs")
    pairs = 0 if floor is None else floor.pairs
    if pairs >= max(1, needed):
        return []
    why = floor.first_problem if floor is not None else ""
    return too_few(
        f"the {kind} floor rests on {pairs} pairs, {max(1, needed)} needed"
        + (f"; first problem: {why}" if why else ""),
        floor_pairs=pairs,
        needed=max(1, needed),
    )


def _unusable(differences: Sequence[Difference], needed: int, arm: str) -> list[r.Finding]:
    problems = [d for d in differences if d.problem and not d.corrupt]
    usable = len(differences) - len(problems)
    if problems:
        return too_few(
            f"{len(problems)} of {len(differences)} pairs {arm} cannot be compared; first: {problems[0].problem}",
            a=problems[0].a_id,
            b=problems[0].b_id,
            usable=usable,
        )
    if usable < max(1, needed):
        return too_few(f"{usable} pairs {arm}, {max(1, needed)} needed", usable=usable, needed=max(1, needed))
    return []


def check_sensitivity(
    planted: Sequence[Difference] | Mapping[str, Difference],
    floor: Floor | None,
    absolute_minimum_nat: float,
    *,
    factor: float = 3.0,
    at_least: int = 1,
) -> list[r.Finding]:
    """The oracle can see: answers over a planted wrong block differ by more than max(factor x floor, absolute minimum).

    planted: differences between an answer that read a wrong block and the right answer; ``at_least`` of them must exceed.
    absolute_minimum_nat must be positive: a floor of zero makes any factor meaningless. Else ``oracle-blind``.
    """
    if not absolute_minimum_nat > 0 or not factor > 0:
        raise ValueError("absolute_minimum_nat and factor must be positive")
    if floor is None or floor.pairs == 0:
        return too_few("sensitivity needs a floor measured in this run")
    named = list(planted.values()) if isinstance(planted, Mapping) else list(planted)
    limit = max(factor * floor.max_nat, absolute_minimum_nat)
    seen = [d for d in named if d.corrupt or (not d.problem and d.max_nat > limit)]
    if named and len(seen) >= max(1, at_least):
        return []
    best = max((d for d in named if not d.problem), key=lambda d: d.max_nat, default=None)
    message = (
        f"{len(seen)} of {len(named)} planted wrong blocks exceed {limit:.4g} nat, {max(1, at_least)} needed;"
        f" largest: {'none comparable' if best is None else str(best)}"
    )
    return [
        finding(
            r.FindingCode.ORACLE_BLIND,
            message,
            limit_nat=limit,
            floor_nat=floor.max_nat,
            absolute_minimum_nat=absolute_minimum_nat,
            planted=len(named),
            seen=len(seen),
            largest=None if best is None else best.evidence(),
        )
    ]
