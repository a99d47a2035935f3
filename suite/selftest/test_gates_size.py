"""P.size: an idle pause that was one, and owners as many as the case is about."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fixtures.spec import load_spec
from reports import records as r
from suite.gates import test_size
from suite.gates.test_size import LOAD_SIZE
from suite.selftest.simulated_stack import SimulatedStack, run_case

pytestmark = pytest.mark.selftest

CODE, Out = r.FindingCode, r.Outcome


class OwnedStack(SimulatedStack):
    """Whose blocks lie with these units, in turn; "": with nobody's."""

    listeners: Iterator[str]

    def store_tool(self, steps: list[dict[str, Any]]) -> list[Any]:
        if steps[0]["op"] != "owners":
            return super().store_tool(steps)
        return [{key: ["127.0.0.1:1"] for key in steps[0]["keys"]}]

    def snapshot_sockets(self, label: str) -> Any:
        return type("Sockets", (), {"unit_at": lambda _, endpoint: next(self.listeners)})()


def owned(*units: str) -> OwnedStack:
    stack = OwnedStack()
    stack.listeners = iter(units * 200)
    return stack


@pytest.mark.parametrize(
    ("case", "units", "finding"),
    [
        ("base.one-owner", ("owner0",), ""),
        ("base.one-owner", ("owner0", "owner1"), CODE.NO_PRESSURE),
        ("base.several-owners", ("owner0", "owner1", "owner2"), ""),
        ("base.several-owners", ("owner0", "owner1"), CODE.NO_PRESSURE),
        ("base.several-owners", ("owner0", "owner1", ""), CODE.NO_PRESSURE),
    ],
)
def test_blocks_lie_with_as_many_owners_as_the_case_is_about(case: str, units: tuple[str, ...], finding: str) -> None:
    verdict = run_case(LOAD_SIZE, f"P.size.{case}", stack=owned(*units))
    assert verdict.finding == finding, verdict.findings


def test_stacks_have_those_owners() -> None:
    cases = {case.id.removeprefix("P.size."): case for case in LOAD_SIZE.cases()}
    base = load_spec("cpu")
    for name, owners in (("base.one-owner", 1), ("base.several-owners", 3), ("deep.several-owners", 3)):
        store = LOAD_SIZE.stack(base, cases[name]).store
        assert store is not None
        assert (store.mode, store.owners) == ("standalone", owners)
    assert LOAD_SIZE.stack(base, cases["base.idle"]) is base
    deep = LOAD_SIZE.stack(base, cases["deep.several-owners"])
    assert deep.engines[0].model == test_size.DEEP_MODEL
    assert not any(case.core for name, case in cases.items() if "owner" in name or "idle" in name)


def test_a_load_after_a_rest_is_judged_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_size, "IDLE_S", 0.1)
    good = run_case(LOAD_SIZE, "P.size.base.idle")
    assert good.outcome is Out.PASS, good.findings
    assert good.got == "external tokens [3840, 3840, 3840, 3840], answers equal"
    assert run_case(LOAD_SIZE, "P.size.base.idle", ["foreign"]).finding == CODE.WRONG_ANSWER


def test_a_pause_that_was_none_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_size, "IDLE_S", 0.1)
    monkeypatch.setattr(test_size, "_past", lambda due_s: True)
    verdict = run_case(LOAD_SIZE, "P.size.base.idle")
    assert (verdict.outcome, verdict.finding) == (Out.HARNESS_ERROR, CODE.NO_PRESSURE), verdict.findings


def test_no_load_after_the_pause_says_nothing() -> None:
    history = SimpleNamespace(case=SimpleNamespace(params={"idle_s": 1.0}), observations=list)
    assert [f.code for f in test_size._idle_findings(cast(Any, history))] == [CODE.TOO_FEW_OBSERVATIONS]
