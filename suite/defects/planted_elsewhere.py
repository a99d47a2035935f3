"""Planted defects that are not in the connector: wrong settings, a store changed behind its master's back, a lying harness."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from fixtures.client import Client
from fixtures.errors import HarnessError
from fixtures.models import TINY, ensure_model, resolve_model
from suite.contract import Case, Gate
from suite.defects.catalogue import CATALOGUE, LYING_HARNESS, LYING_STORE, MISCONFIGURATION
from suite.defects.client_gate import ERRORS, LateClient, ttft_errors
from suite.defects.planted import LYING, REQUEST_S, TOLD, LyingConnectorGate, Planted, next_generation, told_fact
from suite.defects.stack_lies import (
    tampered,
    with_idle_faults,
    with_launcher_environment,
    with_phase_hook,
    with_spec,
    with_stale_scrapes,
    with_used_prompts,
)
from suite.defects.switch import Remote
from suite.gates.arms import calibrate

if TYPE_CHECKING:
    from fixtures.spec import StackSpec
    from fixtures.stack import Stack


def _told(stack: Stack, lies: int, unit: str, read: int | None = None, **more: Any) -> None:
    stack.fact(TOLD, {"lies": lies, "read": lies if read is None else read, "occasions": lies, "unit": unit, **more})


# Lying connector, where the lie is told before there is an engine to switch -------------------------------------------


TOLD_AT_START = ("endless-wait", "ignored-prefix")
"""Defects of a start: of the engine that the gate itself brings up."""


class LyingStartGate(LyingConnectorGate):
    """The engine that the inner gate starts has the defect from its first moment; the stack around it is honest."""

    def cases(self) -> Iterable[Case]:
        yield from Planted.cases(self)

    def stack(self, base: StackSpec, case: Case) -> StackSpec:
        return Planted.stack(self, base, case)

    def collect(self, stack: Stack, case: Case) -> None:
        gate, inner = self._inner(case)
        generation = next_generation(stack)  # the journal of an engine started before may lie in the same place
        extra = {"generation": generation, "defect": self.defect.id, "rate": case.params["planted"]["rate"]}
        lying = stack.spec.with_all_engines(**LYING, kv_extra=extra)
        gate.collect(with_spec(stack, lying), inner)
        directories = [d for d in stack.directory.iterdir() if d.name not in stack.engines]
        told = Remote({d.name: d for d in directories}).told(generation)
        stack.fact(TOLD, told_fact(told, self.defect.unit))


# Misconfiguration ----------------------------------------------------------------------------------------------------


def _sibling(spec: StackSpec) -> StackSpec:
    """The second engine gets other weights in a directory whose last name is that of the first engine's model."""
    first = spec.engines[0].model
    if first not in TINY:
        raise HarnessError(f"sibling weights are known for tiny models only, not for {first}")
    own = resolve_model(first)
    sibling = ensure_model("tiny-sibling", same_name_as=first)
    assert own.path.name == sibling.path.name
    return spec.with_engine(spec.engines[1].name, model=str(sibling.path), served_model_name="sibling")


SETTINGS: dict[str, Callable[[StackSpec], StackSpec]] = {
    "other-seed": lambda spec: spec.with_engine(spec.engines[1].name, hash_seed="4711"),
    "sibling-weights": _sibling,
    "other-dtype": lambda spec: spec.with_engine(spec.engines[1].name, dtype="float16"),
    "unsafe-policy": lambda spec: spec.with_all_engines(load_failure_policy="upstream"),
    "shared-lookup": lambda spec: spec.with_all_engines(isolate_lookup=False, isolate_tmp=False),
}


class MisconfiguredGate(Planted):
    """A wrong setting: the gate's own stack with that setting changed. Counted: settings found in force."""

    def stack(self, base: StackSpec, case: Case) -> StackSpec:
        return SETTINGS[self.defect.id](super().stack(base, case))

    def collect(self, stack: Stack, case: Case) -> None:
        gate, inner = self._inner(case)
        gate.collect(stack, inner)
        _told(stack, 1, "settings", spec=stack.spec.key())


# Lying store ---------------------------------------------------------------------------------------------------------

TAMPERING: dict[str, dict[str, Any]] = {
    "copied-value": {"op": "replace", "how": "copy"},
    "zeroed-value": {"op": "replace", "how": "zeros"},
    "flipped-value": {"op": "replace", "how": "flip", "offset": 4096, "count": 512},
    "truncated-value": {"op": "replace", "how": "truncate", "bytes": 32768},
    "removed-value": {"op": "remove"},
}


class LyingStoreGate(Planted):
    """Values of the pool are changed after the prompt was saved and before another engine reads it."""

    def stack(self, base: StackSpec, case: Case) -> StackSpec:
        spec = super().stack(base, case)
        return spec.with_changes(timeouts=msgspec.structs.replace(spec.timeouts, request_s=REQUEST_S))

    def collect(self, stack: Stack, case: Case) -> None:
        calibrate(stack)  # its keys are nobody's victims
        gate, inner = self._inner(case)
        before = stack.keys()
        done: list[dict[str, Any]] = []

        def hook(inside: Stack, phase: str) -> None:
            if phase != "external":
                return
            own = sorted(inside.keys() - before)
            rng = random.Random(case.id)
            done.extend(tampered(inside, own, sorted(before), TAMPERING[self.defect.id], rng))

        gate.collect(with_phase_hook(stack, hook), inner)
        landed = [d for d in done if d["landed"]]
        _told(stack, len(landed), self.defect.unit, changes=done)


# Lying harness -------------------------------------------------------------------------------------------------------

HARNESS: dict[str, Callable[[Stack, list[str]], Stack]] = {
    "idle-fault": with_idle_faults,
    "stale-scrape": with_stale_scrapes,
    "used-prompt": with_used_prompts,
    "launcher-environment": with_launcher_environment,
}


class LyingHarnessGate(Planted):
    """The harness itself does not do what it says."""

    def collect(self, stack: Stack, case: Case) -> None:
        calibrate(stack)
        gate, inner = self._inner(case)
        lies: list[str] = []
        gate.collect(HARNESS[self.defect.id](stack, lies), inner)
        _told(stack, len(lies), self.defect.unit)


class LateClientGate(Planted):
    """A client that looks at the clock too late, on the server whose times are known. The stack has no part in it."""

    def _rates(self) -> tuple[float, ...]:
        return (1.0, 0.0)

    def collect(self, stack: Stack, case: Case) -> None:
        kind = LateClient if case.params["planted"]["rate"] else Client
        found = ttft_errors(kind)
        stack.fact(ERRORS, found)
        errors = found["client_s"]
        late = len(errors) if kind is LateClient else 0
        stack.fact(TOLD, {"lies": late, "read": late, "occasions": len(errors), "unit": self.defect.unit})


def _gate_of(defect: Any) -> Planted:
    if defect in MISCONFIGURATION:
        return MisconfiguredGate(defect)
    if defect in LYING_STORE:
        return LyingStoreGate(defect)
    if defect in LYING_HARNESS:
        return LateClientGate(defect) if defect.id == "late-client" else LyingHarnessGate(defect)
    return LyingStartGate(defect) if defect.id in TOLD_AT_START else LyingConnectorGate(defect)


@functools.cache
def gates() -> tuple[Planted, ...]:
    """Every planted defect as a gate, in the order of the catalogue."""
    return tuple(_gate_of(defect) for defect in CATALOGUE)


def registry() -> dict[str, Gate]:
    """The same by id."""
    return {gate.id: gate for gate in gates()}
