"""The answer oracle of a stack: its noise floors and its sensitivity, from the calibration that ``suite.gates.arms`` sent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from reports import records as r
from reports.history import History
from suite.checks import answers
from suite.checks.base import finding
from suite.checks.identity import ColdArm
from suite.gates.arms import CALIBRATION, NOT_PLANTED, planted_was_read, positions

ABSOLUTE_MINIMUM_NAT = 0.1
"""A planted wrong block must move a log probability by at least this much (nat), whatever the floor. The smallest shift
measured for a foreign block of 32 tokens was 0.28 nat (4,000 tokens, 36 layers), for zeros 0.30 (8,000 tokens, 4 layers):
`python -m fixtures.model_probe`."""

QUIET_NAT = 0.02
"""Honest noise that is assumed where the calibration saw less: a floor of zero from some dozens of samples does not
mean that the next sample is zero (4,000-token prompts on a CPU: 0 in most, 0.05 in some)."""

SEPARATION = 2.0
"""Planted wrong blocks must exceed the largest honest noise by this factor, or the cold arm cannot tell them apart."""

POSITIONS = tuple(positions(3))


def _everything(rec: r.Record) -> bool:
    return True


def calibration_records(history: History) -> tuple[r.Record, ...]:
    """All records from the newest start of the case's stack on, wherever in the run its calibration was made."""
    return history.since_stack(_everything)


def _of_calibration(rec: r.Record) -> bool:
    return (isinstance(rec, r.Observation) and rec.case_id == CALIBRATION) or (
        isinstance(rec, r.Fact) and rec.name in ("planted-block", NOT_PLANTED)
    )


def _limited(floor: answers.Floor, limit_nat: float) -> answers.Floor:
    """A limit with the sample that it rests on."""
    return replace(floor, kind="cold", max_nat=limit_nat, noise_nat=floor.max_nat)


def _halfway(noise_nat: float, damages_nat: Sequence[float]) -> float:
    """Between the largest noise and the least damage, on a logarithmic scale."""
    return math.sqrt(noise_nat * min(damages_nat))


class Oracle:
    """Floors and sensitivity measured on the case's stack."""

    @classmethod
    def of(cls, history: History) -> Oracle:
        """The oracle of the case's calibration, measured once a calibration: a run may have thousands of cases on a stack."""
        records = history.since_stack(_of_calibration)
        return history.memo(("oracle", *map(id, records)), lambda: cls(records))

    def __init__(self, records: Sequence[r.Record]) -> None:
        seen = [x for x in records if isinstance(x, r.Observation)]
        self.between = self._between_engines(seen)
        """Native answers of different engines to one prompt. Engines whose answers differ for other reasons than noise
        (weights, dtypes) may not widen the floor by which their sharing is judged: see ``check_same_function``."""
        self.native = self._native(seen, "floor-native")
        """Requests alone on their engine, as the arms send them."""
        if self.one_function:
            self.native = self.native.merged(self.between)
        self.cold = self._cold(seen, "")
        self.native_concurrent = self.native.merged(self._native(seen, "floor-native-concurrent"))
        """Requests beside others: they share batches, whose shapes differ from run to run."""
        self.cold_concurrent = self.cold.merged(self._cold(seen, "-concurrent"))
        self.planted = self._planted(records, seen)
        self.contrast = self._contrast(seen)
        self.forbidden = any(isinstance(x, r.Fact) and x.name == NOT_PLANTED for x in records)

    @staticmethod
    def _groups(seen: Sequence[r.Observation], role: str) -> dict[tuple[int, ...], dict[str, list[r.Observation]]]:
        """Answers in a role: prompt -> engine -> answers."""
        groups: dict[tuple[int, ...], dict[str, list[r.Observation]]] = {}
        for o in seen:
            if o.role == role:
                groups.setdefault(o.prompt_token_ids, {}).setdefault(o.engine, []).append(o)
        return groups

    def _native(self, seen: Sequence[r.Observation], role: str) -> answers.Floor:
        own = [group for engines in self._groups(seen, role).values() for group in engines.values()]
        return answers.native_floor([(group[0], other) for group in own for other in group[1:]])

    def _between_engines(self, seen: Sequence[r.Observation]) -> answers.Floor:
        firsts = [[group[0] for group in engines.values()] for engines in self._groups(seen, "floor-native").values()]
        return answers.native_floor([(group[0], other) for group in firsts for other in group[1:]])

    @property
    def one_function(self) -> bool:
        """The engines answer alike, as far as noise goes: what one computes is of use to the other."""
        return self.between.max_nat < ABSOLUTE_MINIMUM_NAT

    def check_same_function(self) -> list[r.Finding]:
        """Engines that read each other's KV give one answer to one prompt when they share nothing."""
        if self.one_function:
            return []
        text = f"without any reuse, the engines' answers to one prompt differ by {self.between.max_nat:.3g} nat"
        message = f"{text}: they do not compute the same (weights, dtype, configuration), and share KV all the same"
        return [finding(r.FindingCode.FOREIGN_REUSE, message, **self.between.numbers())]

    def _cold(self, seen: Sequence[r.Observation], suffix: str) -> answers.Floor:
        natives = self._groups(seen, f"floor-native{suffix}")
        pairs = []
        for prompt, engines in self._groups(seen, f"floor-cold{suffix}").items():
            for engine, group in engines.items():
                # A reference engine has no native answers of its own: any engine's stand in.
                found = natives.get(prompt, {})
                native = found.get(engine) or next(iter(found.values()), [])
                pairs += [(cold, native[0]) for cold in group if native]
        return answers.cold_floor(pairs)

    @staticmethod
    def _contrast(seen: Sequence[r.Observation]) -> dict[str, answers.Difference]:
        reference = next((o for o in seen if o.role == "contrast-reference"), None)
        changed = {o.role.removeprefix("contrast/"): o for o in seen if o.role.startswith("contrast/")}
        if reference is None:
            return {}
        return {where: answers.compare(o, reference, same_prompt=False) for where, o in changed.items()}

    @staticmethod
    def _planted(records: Sequence[r.Record], seen: Sequence[r.Observation]) -> dict[str, answers.Difference]:
        """Differences by position; only blocks that were provably replaced and then read count as planted."""
        references = {o.prompt_token_ids: o for o in seen if o.role == "planted-reference"}
        answered = {o.request_id: o for o in seen if o.role == "planted"}
        found: dict[str, answers.Difference] = {}
        for fact in records:
            if not isinstance(fact, r.Fact) or fact.name != "planted-block":
                continue
            answer = answered.get(fact.value["request_id"])
            reference = references.get(answer.prompt_token_ids) if answer else None
            if answer and reference and planted_was_read(fact.value["replaced"], answer):
                found[fact.value["where"]] = answers.compare(answer, reference)
        return found

    @property
    def cold_limit(self) -> answers.Floor:
        """Limit of the cold arm for requests that were alone."""
        return self._between(self.cold)

    @property
    def cold_limit_of_twins(self) -> answers.Floor:
        """Limit of the cold arm for answers that their native twins confirm: the least that a planted block did, if that is more.

        An answer over the pool's blocks that is, to the native floor, the one over the saver's own cache shares its distance
        to the cold answer. Where that is beyond ``cold_limit`` it is the noise of the shape (seen on a GPU with chunks of 512
        tokens: 0.204 nat in both arms, beyond a limit of 0.194 from 6 pairs), unless it is as large as a wrong block's.
        """
        return _limited(self.cold, max([self.cold_limit.max_nat, *([min(self._damages())] if self._damages() else [])]))

    @property
    def cold_limit_concurrent(self) -> answers.Floor:
        """Limit of the cold arm for requests beside others."""
        return self._between(self.cold_concurrent)

    def cold_arm(self, own: answers.Floor, *, same_shape: bool, apart_nat: float | None) -> ColdArm:
        """The cold arm for answers whose noise is another than the calibration's, as those of an adapter are (``ColdArms``)."""
        noise = own if same_shape else self.cold.merged(own)
        noise_nat = max(noise.max_nat, QUIET_NAT)
        damages = [*self._damages(), *([] if apart_nat is None else [apart_nat])]
        if damages and min(damages) >= SEPARATION * noise_nat:
            return ColdArm(_limited(noise, _halfway(noise_nat, damages)))
        damage = f"{min(damages):.3g} nat" if damages else "an unknown amount"
        message = (
            f"cold answers to one prompt are up to {noise_nat:.3g} nat apart, and reuse of foreign blocks moves one by {damage}:"
            " one is not to be told from the other"
        )
        blind = finding(r.FindingCode.ORACLE_BLIND, message, noise_nat=noise_nat, damages_nat=damages)
        return ColdArm(_limited(noise, max([*damages, SEPARATION * noise_nat])), (blind,))

    def _damages(self) -> list[float]:
        return [d.max_nat for d in (self.planted or self.contrast).values() if not d.problem]

    def _between(self, floor: answers.Floor) -> answers.Floor:
        """A limit between two measured populations: halfway, on a logarithmic scale, from the largest honest noise to
        the smallest damage of a planted block.

        The floor alone would be no limit: the largest of as many samples again may exceed it (seen on a GPU: 0.17 nat
        after a floor of 0.09 from 6 pairs). Nothing escapes by this in the external arm, whose limit is the native floor.
        """
        damages = self._damages()
        noise = max(floor.max_nat, QUIET_NAT)
        if damages and min(damages) > noise:
            return _limited(floor, _halfway(noise, damages))
        # Blind, which ``check`` says. What is beyond all that noise and planted blocks did is still wrong; less is nothing.
        return _limited(floor, max([*damages, SEPARATION * noise]))

    def check(self, planted: bool = True) -> list[r.Finding]:
        """The oracle can see a planted wrong block at every position, beyond the limits that verdicts rest on.

        planted False: for a stack without a pool, where nothing can be planted; a prompt with one other block stands
        in (``contrast``), which shows that the model's answers depend on every block at all. So it does on a deployed
        pool in which nothing may be damaged (``NOT_PLANTED``).
        """
        widest = max(self.native_concurrent.max_nat, self.cold_concurrent.max_nat)
        floor = answers.Floor("native", widest, self.native.pairs, self.native.steps)
        seen = self.planted if planted and not self.forbidden else self.contrast
        return answers.check_sensitivity(seen, floor, ABSOLUTE_MINIMUM_NAT, factor=SEPARATION, at_least=len(POSITIONS))

    def numbers(self) -> dict[str, Any]:
        """As shown in a verdict."""
        return {
            "native_floor_nat": self.native.max_nat,
            "native_floor_pairs": self.native.pairs,
            "between_engines_nat": self.between.max_nat,
            "cold_floor_nat": self.cold.max_nat,
            "cold_floor_pairs": self.cold.pairs,
            "native_floor_concurrent_nat": self.native_concurrent.max_nat,
            "cold_floor_concurrent_nat": self.cold_concurrent.max_nat,
            "cold_limit_nat": self.cold_limit.max_nat,
            "contrast_nat": {where: d.max_nat for where, d in self.contrast.items()},
            "planted_nat": {where: d.max_nat for where, d in self.planted.items()},
        }
