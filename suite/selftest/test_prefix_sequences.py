"""Conversations, bursts and sampled requests on a simulated stack: green where it is honest, red with the right finding."""

import msgspec
import pytest

from fixtures.answer import AnswerReader
from reports import records as r
from suite.checks.answers import Floor, judge_external_vs_native
from suite.contract import Gate
from suite.gates.judging_sampled import comparable, first_step
from suite.gates.test_concurrency import CONCURRENT
from suite.gates.test_conversation import CONVERSATION
from suite.gates.test_sampled import SAMPLED
from suite.selftest.samples import answer
from suite.selftest.simulated_stack import run_case

pytestmark = [pytest.mark.selftest, pytest.mark.usefixtures("short_calibration")]

F = r.FindingCode


GATES: tuple[Gate, ...] = (CONVERSATION, CONCURRENT, SAMPLED)
BY_ID = {gate.id: gate for gate in GATES}


def judged(case_id: str, *lies: str) -> r.Verdict:
    return run_case(BY_ID[".".join(case_id.split(".")[:2])], case_id, lies)


@pytest.mark.parametrize("case_id", [case.id for gate in GATES for case in gate.cases()])
def test_an_honest_stack_passes(case_id: str) -> None:
    verdict = judged(case_id)
    assert verdict.outcome is r.Outcome.PASS, verdict.findings


@pytest.mark.parametrize(
    ("case_id", "lie", "finding"),
    [
        ("P.conversation.turns", "foreign", F.WRONG_ANSWER),
        ("P.conversation.branches", "foreign", F.WRONG_ANSWER),
        ("P.conversation.edges", "foreign", F.WRONG_ANSWER),
        ("P.conversation.turns", "zero-hits", F.ZERO_HITS),
        ("P.conversation.branches", "extra", F.EXTRA_HITS),
        ("P.conversation.turns", "unsaved", F.SAVE_NOT_VISIBLE),
        ("P.conversation.turns", "booked-twice", F.SOURCE_DISAGREEMENT),
        ("P.conversation.edges", "crash", F.UNEXPLAINED_LOG),
        ("P.concurrent.before-save", "foreign", F.WRONG_ANSWER),
        ("P.concurrent.after-save", "foreign", F.WRONG_ANSWER),
        ("P.concurrent.after-save", "zero-hits", F.ZERO_HITS),
        ("P.concurrent.after-save", "extra", F.EXTRA_HITS),
        ("P.concurrent.after-save", "booked-twice", F.SOURCE_DISAGREEMENT),
        ("P.concurrent.in-a-row", "foreign", F.WRONG_ANSWER),
        ("P.concurrent.in-a-row", "zero-hits", F.ZERO_HITS),
        ("P.sampled.seeded", "foreign", F.WRONG_ANSWER),
        ("P.sampled.chat", "foreign", F.WRONG_ANSWER),
        ("P.sampled.several", "last-choice", F.WRONG_ANSWER),
        ("P.sampled.several", "zero-hits", F.ZERO_HITS),
        ("P.sampled.several", "silent-recompute", F.SILENT_FALLBACK),
        ("P.sampled.prompt-logprobs", "prompt", F.WRONG_ANSWER),
        ("P.sampled.whole", "booked-twice", F.SOURCE_DISAGREEMENT),
    ],
)
def test_a_lie_is_a_failure_with_its_name(case_id: str, lie: str, finding: r.FindingCode) -> None:
    verdict = judged(case_id, lie)
    assert (verdict.outcome, verdict.finding) == (r.Outcome.FAIL, finding), verdict.findings


def test_a_cold_request_that_hits_is_seen() -> None:
    verdict = judged("P.conversation.turns", "ignored-salt")
    extra = [f for f in verdict.findings if f.code is F.EXTRA_HITS]
    assert any(f.evidence["cache_salt"] for f in extra), verdict.findings


def test_requests_that_came_one_after_the_other_are_no_burst() -> None:
    verdict = judged("P.concurrent.during-save", "serial")
    assert (verdict.outcome, verdict.finding) == (r.Outcome.HARNESS_ERROR, F.NO_PRESSURE)


def test_a_request_for_choices_that_did_not_come_is_no_evidence() -> None:
    assert judged("P.sampled.several", "one-choice").outcome is r.Outcome.INCONCLUSIVE


def test_the_first_step_is_cut_to_the_tokens_that_were_asked_for() -> None:
    top = ((1, -0.1), (2, -2.5), (3, -4.0), (9, -9.0))  # the sampled token comes fourth
    cut = first_step(answer("a", (9, 1), (top, top), sampling={"logprobs": 3}))
    assert cut.top_logprobs == (top[:3],)
    assert cut.output_token_ids == (1,)


def test_samples_may_part_where_the_engine_has_noise_but_their_distributions_may_not() -> None:
    top, other = ((1, -0.1), (2, -2.5), (3, -4.0)), ((1, -0.1), (2, -3.5), (3, -4.0))
    hot = {"logprobs": 3, "temperature": 0.8}
    native = answer("n", (1, 1), (top, top), sampling=hot)
    flipped = answer("x", (2, 1), (top, other), sampling=hot)
    quiet, noisy = (Floor("native", nat, pairs=4, steps=8) for nat in (0.0, 0.01))
    assert judge_external_vs_native([comparable((flipped, native), quiet.max_nat)], quiet)
    assert not judge_external_vs_native([comparable((flipped, native), noisy.max_nat)], noisy)
    wrong = answer("w", (2, 1), (other, top), sampling=hot)
    assert judge_external_vs_native([comparable((wrong, native), noisy.max_nat)], noisy)


def whole_answer(**changes: object) -> bytes:
    choice = {
        "index": 0,
        "text": "ab",
        "token_ids": [7],
        "finish_reason": "length",
        "prompt_logprobs": [None, {"5": {"logprob": -0.5, "rank": 1}, "6": {"logprob": -0.25}}],
    }
    usage = {"prompt_tokens": 2, "completion_tokens": 1}
    return msgspec.json.encode({"choices": [choice | changes], "usage": usage})


def test_log_probabilities_of_the_prompt_are_read() -> None:
    reader = AnswerReader({"prompt": [4, 5], "prompt_logprobs": 1})
    reader.read(whole_answer(), 1.0)
    assert reader.error == ""
    assert reader.prompt_logprobs == (((6, -0.25), (5, -0.5)),)


@pytest.mark.parametrize("steps", [None, [None], [None, None], [None, {"5": {"logprob": None}}]])
def test_missing_log_probabilities_of_the_prompt_are_no_answer(steps: object) -> None:
    reader = AnswerReader({"prompt": [4, 5], "prompt_logprobs": 1})
    reader.read(whole_answer(prompt_logprobs=steps), 1.0)
    assert reader.error.startswith("mismatch:")
