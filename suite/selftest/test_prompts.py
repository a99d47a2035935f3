"""Prompts: those of a label are the same for ever, since evidence and reproductions are compared across runs and releases."""

from __future__ import annotations

import random

import pytest

from suite.workload.prompts import FIRST_TOKEN, PromptMaker

pytestmark = pytest.mark.selftest


@pytest.mark.parametrize("vocab_size", [5, 260, 512, 516, 32_000, 151_936])
def test_ids_are_those_that_randrange_draws(vocab_size: int) -> None:
    rng = random.Random("run/label")
    wanted = tuple(rng.randrange(FIRST_TOKEN, vocab_size - 1) for _ in range(1000))
    assert PromptMaker("run", vocab_size, 32).fresh("label", 1000) == wanted


def test_a_label_names_a_prompt_and_a_longer_one_begins_with_it() -> None:
    maker = PromptMaker("run", 512, 32)
    assert maker.fresh("a", 40) == maker.fresh("a", 40) == maker.fresh("a", 90)[:40]
    others = [maker.fresh("b", 40), PromptMaker("other", 512, 32).fresh("a", 40)]
    assert all(other[:32] != maker.fresh("a", 40)[:32] for other in others)


@pytest.mark.parametrize(("vocab_size", "tokens"), [(4, 1), (3, 1), (512, 0)])
def test_what_makes_no_prompt_is_refused(vocab_size: int, tokens: int) -> None:
    with pytest.raises(ValueError, match=r"no token ids from 3|at least one token"):
        PromptMaker("run", vocab_size, 32).fresh("a", tokens)
