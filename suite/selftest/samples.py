"""Hand-made records for selftests of checkers: healthy by default, each defect one keyword away."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from reports import records as r

Top = tuple[tuple[int, float], ...]


def codes(findings: Sequence[r.Finding]) -> list[str]:
    """Codes of findings, in order."""
    return [str(f.code) for f in findings]


def observation(request_id: str = "q1", prompt: Sequence[int] = tuple(range(100)), **changes: Any) -> r.Observation:
    """A request answered with two tokens after 0.5 s."""
    fields: dict[str, Any] = {
        "request_id": request_id,
        "case_id": "X.case",
        "phase": "p",
        "engine": "e0",
        "prompt_token_ids": tuple(prompt),
        "output_token_ids": (7, 8),
        "http_status": 200,
        "finish_reason": "length",
        "usage_prompt_tokens": len(prompt),
        "cached_tokens": 0,
        "sent_s": 10.0,
        "first_token_s": 10.5,
        "token_s": (10.5, 10.6),
        "done_s": 11.0,
        "deadline_s": 60.0,
        "sampling": {"max_tokens": 2, "temperature": 0.0, "logprobs": 3},
    }
    fields.update(changes)
    return r.Observation(**fields)


def answer(request_id: str, tokens: Sequence[int], tops: Sequence[Top], **changes: Any) -> r.Observation:
    """An answer with top log probabilities for each token."""
    return observation(
        request_id,
        output_token_ids=tuple(tokens),
        top_logprobs=tuple(tops),
        token_s=tuple(10.5 + i / 10 for i in range(len(tokens))),
        done_s=20.0,
        **changes,
    )


def delta(prompt: float, local: float = 0, external: float = 0, **changes: float) -> dict[str, float]:
    """Counters that add up, at 10 bytes a token; keywords with ``__`` for dots change or add some."""
    values: dict[str, float] = {
        "prompt_tokens": prompt,
        "prompt_tokens.local": local,
        "prompt_tokens.external": external,
        "prompt_tokens.computed": prompt - local - external,
        "external_hits_tokens": external,
        "store.load_get.ok.bytes": external * 10,
        "store.load_get.ok.ops": 1,
        "store.lookup_exists.ok.ops": 1,
    }
    values.update({name.replace("__", "."): value for name, value in changes.items()})
    return values
