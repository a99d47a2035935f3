"""The first requests of an engine: what their failure means."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from fixtures.errors import EngineDied, HarnessError
from fixtures.stack import Stack
from fixtures.warm_up import WARM_UP_TOKENS, warm_up
from suite.workload.prompts import PromptMaker

pytestmark = pytest.mark.selftest

LOG = (
    "WARNING OSError: too few file descriptors are allowed",
    "ERROR [core.py:1332] Traceback (most recent call last):",
    "ERROR [core.py:1332] AssertionError: not that way",
    "ERROR Traceback (most recent call last):",
    "ERROR EngineDeadError: see above",
)


def stack(*, ok: bool, alive: bool, log: tuple[str, ...] = LOG) -> Stack:
    """One engine that answers, or does not, or is gone: a real one takes half a minute to get there."""
    sent: list[Any] = []

    def send_all(requests: list[Any], **_: Any) -> list[Any]:
        sent.extend(requests)
        return [
            SimpleNamespace(ok=ok, engine=q.engine, http_status=500, error="engine: InternalServerError")
            for q in requests
        ]

    handle = SimpleNamespace(alive=lambda: alive, log_tail=lambda lines: list(log))
    made = SimpleNamespace(
        notes={},
        engines={"e0": SimpleNamespace(facts=SimpleNamespace(max_model_len=4096))},
        prompts=lambda *names: PromptMaker("-".join(names), 512, 32),
        stack_id="s1",
        client=SimpleNamespace(send_all=send_all),
        handle=lambda name: handle,
        sent=sent,
    )
    return cast(Stack, made)


def test_every_length_is_asked_once_and_a_second_start_asks_other_prompts() -> None:
    made = stack(ok=True, alive=True)
    warm_up(made, ["e0"])
    warm_up(made, ["e0"])
    sent = made.sent  # type: ignore[attr-defined]
    assert [len(q.prompt_token_ids) for q in sent] == [*WARM_UP_TOKENS, *WARM_UP_TOKENS]
    assert len({q.request_id for q in sent}) == len(sent)


def test_an_engine_that_ended_at_its_first_request_died_in_its_own_words() -> None:
    with pytest.raises(EngineDied, match=r"AssertionError: not that way$") as died:
        warm_up(stack(ok=False, alive=False), ["e0"])
    assert died.value.log_tail == LOG
    with pytest.raises(EngineDied, match="its log is empty"):
        warm_up(stack(ok=False, alive=False, log=()), ["e0"])


def test_a_request_that_failed_on_a_living_engine_is_no_death(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fixtures.deaths.DEATH_BOUND_S", 0.05)
    with pytest.raises(HarnessError, match="warm-up request failed: 500") as failed:
        warm_up(stack(ok=False, alive=True), ["e0"])
    assert not isinstance(failed.value, EngineDied)
