"""Comparison of two answers to one prompt: token ids, and top log probabilities of every step.

All differences are in nat (natural log). Greedy sampling is assumed: the k listed ids of a step are its k most likely.
Two answers are comparable up to and including the first step whose tokens differ; later steps have other contexts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from reports import records as r

TopLogprobs = Sequence[tuple[int, float]]


@dataclass(frozen=True)
class Difference:
    """How two answers differ. ``a`` and ``b`` are the sides as given to ``compare``.

    steps: steps compared. first_step: first step (from 0) whose tokens differ, None where none does; a missing token is
    a difference. max_nat: largest |difference| of a log probability over all compared steps; for an id that one side
    does not list, the lower bound that follows from that side's least listed one. margin_nat: at the differing step, by
    how much a side preferred its token to the other's (the larger side; a lower bound where the other is not listed);
    None where it cannot be known. problem: why nothing (or nothing more) can be concluded; "" normally.
    corrupt: the problem is an answer that no healthy engine gives (log probabilities that are no numbers).
    """

    a_id: str
    b_id: str
    steps: int = 0
    first_step: int | None = None
    a_token: int | None = None
    b_token: int | None = None
    max_nat: float = 0.0
    max_step: int | None = None
    margin_nat: float | None = None
    problem: str = ""
    corrupt: bool = False

    @property
    def parted(self) -> bool:
        """Token ids differ."""
        return self.first_step is not None

    def evidence(self) -> dict[str, object]:
        """Both sides and the first place, as JSON data."""
        return {
            "a": self.a_id,
            "b": self.b_id,
            "first_step": self.first_step,
            "a_token": self.a_token,
            "b_token": self.b_token,
            "max_nat": self.max_nat,
            "max_step": self.max_step,
            "margin_nat": self.margin_nat,
            "steps": self.steps,
            "problem": self.problem,
        }

    def __str__(self) -> str:
        if self.problem:
            return self.problem
        where = f"largest difference {self.max_nat:.4g} nat" + (
            "" if self.max_step is None else f" at step {self.max_step}"
        )
        if self.parted:
            return f"tokens part at step {self.first_step} ({self.a_token} against {self.b_token}), {where}"
        return f"tokens equal, {where}"


def compare(a: r.Observation, b: r.Observation, *, logprobs: bool = True, same_prompt: bool = True) -> Difference:
    """Compare two answers. ValueError where the prompts differ (``same_prompt``): that is the harness's mistake.

    logprobs: they were asked for; a step without them is a problem, never silently equal.
    """
    if same_prompt and a.prompt_token_ids != b.prompt_token_ids:
        raise ValueError(f"{a.request_id} and {b.request_id} answer different prompts")
    problem, corrupt = _problem(a, logprobs)
    if not problem:
        problem, corrupt = _problem(b, logprobs)
    if problem:
        return Difference(a_id=a.request_id, b_id=b.request_id, problem=problem, corrupt=corrupt)
    return _steps(a, b, logprobs)


def _problem(o: r.Observation, logprobs: bool) -> tuple[str, bool]:
    who = f"request {o.request_id} on {o.engine}"
    if not o.ok:
        return f"{who} has no complete answer (status {o.http_status}, {o.error or 'cut short'})", False
    if not o.output_token_ids:
        return f"{who} generated no token", False
    for step, top in enumerate(o.top_logprobs):
        for token, value in top:
            if not math.isfinite(value):
                return f"{who}: log probability of token {token} at step {step} is {value}", True
    for step, value in enumerate(o.token_logprobs):
        if not math.isfinite(value):
            return f"{who}: log probability of the token at step {step} is {value}", True
    if logprobs:
        have = sum(bool(top) for top in o.top_logprobs)
        if have != len(o.output_token_ids) or len(o.top_logprobs) != len(o.output_token_ids):
            return f"{who}: log probabilities for {have} of {len(o.output_token_ids)} tokens", False
    return "", False


def _steps(a: r.Observation, b: r.Observation, logprobs: bool) -> Difference:
    most, most_step = 0.0, None
    shared = min(len(a.output_token_ids), len(b.output_token_ids))
    for step in range(shared):
        if logprobs:
            size = step_difference(a.top_logprobs[step], b.top_logprobs[step])
            if size > most:
                most, most_step = size, step
        if a.output_token_ids[step] != b.output_token_ids[step]:
            return _parted(a, b, step, step + 1, most, most_step, logprobs)
    if len(a.output_token_ids) != len(b.output_token_ids):
        return _parted(a, b, shared, shared, most, most_step, False)
    return Difference(a_id=a.request_id, b_id=b.request_id, steps=shared, max_nat=most, max_step=most_step)


def _parted(
    a: r.Observation, b: r.Observation, step: int, steps: int, most: float, most_step: int | None, logprobs: bool
) -> Difference:
    a_token = a.output_token_ids[step] if step < len(a.output_token_ids) else None
    b_token = b.output_token_ids[step] if step < len(b.output_token_ids) else None
    margin = None
    if logprobs and a_token is not None and b_token is not None:
        margins = (_margin(a.top_logprobs[step], a_token, b_token), _margin(b.top_logprobs[step], b_token, a_token))
        known = [m for m in margins if m is not None]
        margin = max(known) if len(known) == 2 else None
    return Difference(
        a_id=a.request_id,
        b_id=b.request_id,
        steps=steps,
        first_step=step,
        a_token=a_token,
        b_token=b_token,
        max_nat=most,
        max_step=most_step,
        margin_nat=margin,
    )


def step_difference(a: TopLogprobs, b: TopLogprobs) -> float:
    """Largest |difference| in nat of one step's log probabilities: exact for ids listed on both sides.

    An id that only one side lists is at most as likely as the other side's least listed one, which bounds its
    difference from below; the bound is 0 where it says nothing.
    """
    left, right = dict(a), dict(b)
    if left == right:
        return 0.0
    most = 0.0
    for one, other in ((left, right), (right, left)):
        least = min(other.values())
        for token, value in one.items():
            there = other.get(token)
            most = max(most, value - least if there is None else abs(value - there))
    return most


def _margin(top: TopLogprobs, own: int, other: int) -> float | None:
    """By how much a side preferred its own token; a lower bound where the other is not listed; None without its own."""
    values = dict(top)
    if own not in values:
        return None
    return values[own] - values.get(other, min(values.values()))
