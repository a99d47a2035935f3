"""The proof of health can fail: one thing is wrong in each case, and the stack stays dirty for exactly that.

The stack is a stand-in: two real engines take half a minute to come up, and each of these faults would have to be planted
in one. What it stands for is exercised on real servers in ``test_topologies`` and by every gate that shares a stack.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from fixtures.errors import HarnessError
from fixtures.healthy import prove_healthy
from reports import records as r

pytestmark = pytest.mark.selftest

REUSABLE = 992


def answer(**fields: Any) -> r.Observation:
    whole = {"http_status": 200, "output_token_ids": (1, 2), "cached_tokens": REUSABLE, **fields}
    return r.Observation(
        request_id="x", case_id="c", phase="healthy", engine="e0", prompt_token_ids=(1,), sent_s=0.0, done_s=1.0,
        deadline_s=60.0, **whole,
    )  # fmt: skip


@dataclass
class Well:
    """A stack on which everything is as it should be."""

    dirty: bool = True
    notes: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    joined: tuple[str, ...] = ()
    alive: bool = True
    store_healthy: bool = True
    heal_complaints: tuple[str, ...] = ()
    asked: r.Observation = field(default_factory=answer)
    saved: r.Observation = field(default_factory=answer)
    read: r.Observation = field(default_factory=answer)
    again: r.Observation = field(default_factory=answer)
    """What the saver says when it is asked for its own prompt once more."""
    read_tokens: float = REUSABLE
    usage: float = 0.0
    running: float = 0.0
    _external: float = 0.0

    def __post_init__(self) -> None:
        facts = SimpleNamespace(block_tokens=32, max_model_len=4096, connector="mooncake-store", settings={})
        self.engines = {n: SimpleNamespace(facts=facts) for n in ("e0", "e1", *self.joined)}
        self.names = list(self.engines)
        self.spec = SimpleNamespace(
            engines=[SimpleNamespace(name=n) for n in ("e0", "e1")],
            store=SimpleNamespace(client_ttl_s=10),
            external=None,
        )
        admin = SimpleNamespace(health=lambda: self.store_healthy, segment_list=lambda: ())
        self.store = SimpleNamespace(admin=admin, owners={}, masters={"master": None})

    @contextlib.contextmanager
    def phase(self, case_id: str, name: str) -> Iterator[None]:
        yield

    def heal_all(self) -> list[str]:
        return list(self.heal_complaints)

    def units(self) -> dict[str, Any]:
        return {"e0": SimpleNamespace(alive=lambda: self.alive, exit_code=lambda: -9)}

    def fact(self, name: str, value: Any) -> None:
        self.facts[name] = value

    def prompts(self, label: str, engine: str) -> Any:
        return SimpleNamespace(fresh=lambda name, tokens: (1,) * tokens)

    def ask(self, engine: str, prompt: Any, *args: Any, **more: Any) -> r.Observation:
        return self.again if len(prompt) > 100 else self.asked

    def save(self, *args: Any, **more: Any) -> r.Observation:
        return self.saved

    def ask_measured(self, *args: Any, **more: Any) -> r.Observation:
        self._external += self.read_tokens
        return self.read

    def scrape(self, engine: str, label: str) -> Any:
        values = {"kv_usage_ratio": self.usage, "running": self.running, "waiting": 0.0}
        return SimpleNamespace(values={**values, "external_hits_tokens": self._external})

    def wait(self, label: str, probe: Callable[[], Any], **more: Any) -> bool:
        return bool(probe())

    def reusable(self, engine: str, prompt: Any) -> int:
        return REUSABLE


def proven(**wrong: Any) -> tuple[list[str], Well]:
    stack = Well(**wrong)
    complaints = prove_healthy(stack, "case")  # type: ignore[arg-type]
    assert stack.dirty == bool(complaints)
    assert stack.facts["healthy"]["complaints"] == complaints
    return complaints, stack


def test_a_well_stack_is_clean_again() -> None:
    assert proven()[0] == []


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"alive": False}, "e0: not running (exit -9)"),
        ({"joined": ("e2",)}, "e2: joined in a case and is still there"),
        ({"heal_complaints": ("healing freeze:e0:1: broken",)}, "healing freeze:e0:1: broken"),
        ({"store_healthy": False}, "master: not healthy"),
        ({"asked": answer(http_status=500, error="boom")}, "e0: a fresh request ended with status 500 boom"),
        ({"usage": 0.1}, "e0: idle, and still holds requests or KV blocks after 10 s"),
        ({"running": 1.0}, "e0: idle, and still holds requests or KV blocks after 10 s"),
        ({"read": answer(http_status=500, error="boom")}, "e0 to e1: status 200 / 500 boom"),
        ({"read_tokens": 0.0}, "e0 to e1: 0 tokens read from the pool, the response says 992, 992 expected"),
        (
            {"read": answer(cached_tokens=960)},
            "e0 to e1: 992 tokens read from the pool, the response says 960, 992 expected",
        ),
        ({"read": answer(output_token_ids=(1, 3))}, "e0 to e1: another answer than the saver's"),
        ({"again": answer(http_status=500, error="boom")}, "e0, asked again: status 500 boom"),
        (
            {"again": answer(cached_tokens=0)},
            "e0, asked again: the response says 0 tokens, 992 expected",
        ),
    ],
)
def test_one_thing_wrong_is_one_complaint(wrong: dict[str, Any], complaint: str) -> None:
    assert proven(**wrong)[0][0] == complaint


def test_another_answer_to_the_whole_prompt_at_once_is_noise_of_its_shape() -> None:
    assert proven(saved=answer(output_token_ids=(7, 7), cached_tokens=0))[0] == []


def test_what_cannot_be_asked_is_a_complaint_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*args: Any) -> None:
        raise HarnessError("no answer")

    monkeypatch.setattr(Well, "scrape", refuses)
    assert proven()[0] == ["engines_idle: HarnessError: no answer"]
