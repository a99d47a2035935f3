"""Family I on hand-made histories: one that passes, and one for each way in which it must not."""

from __future__ import annotations

import contextlib
import math
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fixtures import identity_variants
from reports import records as r
from suite.checks.identity import told_apart_by
from suite.contract import safe_judge
from suite.gates import identity_arms
from suite.gates.oracle import Oracle
from suite.gates.test_identity import ADAPTER, OTHER_ENGINE, SALT
from suite.selftest import identity_samples
from suite.selftest.degrade_samples import calibration
from suite.selftest.identity_samples import MIXED, OURS, REUSABLE, THEIRS, Made
from suite.selftest.samples import Top

pytestmark = pytest.mark.selftest

CODE = r.FindingCode


def judged(made: Made) -> r.Verdict:
    return safe_judge(OTHER_ENGINE, made.history())


def shared(**changes: Any) -> Made:
    """The reader read the saver's blocks."""
    fields: dict[str, Any] = {"reused": REUSABLE, "reader_keys": (), "foreign_top": MIXED}
    return Made(**(fields | changes))


def test_isolation_with_its_controls_passes_and_says_what_kept_them_apart() -> None:
    verdict = judged(Made())
    assert verdict.outcome is r.Outcome.PASS, verdict.findings
    assert verdict.numbers["told_apart_by"] == {"forward": "hash"}
    assert verdict.numbers["pairs"]["forward"]["reused_tokens"] == 0


def test_foreign_blocks_that_change_the_answer_are_a_wrong_answer_with_all_a_person_needs() -> None:
    verdict = judged(shared())
    assert (verdict.outcome, verdict.finding) == (r.Outcome.FAIL, CODE.WRONG_ANSWER), verdict.findings
    evidence = verdict.findings[0].evidence
    assert evidence["setting"] == "the model's weights"
    assert evidence["shared_keys"] == ["tiny@tp_rank:0@group:0@aa"]
    assert (evidence["expected_tokens"], evidence["got_tokens"]) == ([8, 3], [9, 3])
    assert (evidence["prompt_tokens"], evidence["limit_nat"]) == (100, 0.0)
    assert evidence["answer_differs_nat"] > 1
    assert evidence["setting_that_avoids_it"] == "a cache_prefix"
    assert "no part of the key tells the model's weights" in verdict.cause


def test_a_slightly_other_answer_is_still_foreign_reuse() -> None:
    near = (THEIRS[0], (7, -1.95), THEIRS[2])
    assert judged(shared(foreign_top=near)).finding == CODE.FOREIGN_REUSE


def test_a_right_answer_over_foreign_blocks_proves_nothing_where_the_two_differ() -> None:
    verdict = judged(shared(foreign_top=THEIRS))
    assert (verdict.outcome, verdict.finding) == (r.Outcome.FAIL, CODE.FOREIGN_REUSE), verdict.findings


def test_reuse_between_engines_of_one_function_is_allowed_with_a_note() -> None:
    rule = {"changes_answers": False}
    verdict = judged(shared(foreign_top=OURS, reader_top=OURS, params=rule))
    assert verdict.outcome is r.Outcome.PASS, verdict.findings
    assert "rightly" in verdict.notes[0]
    # The same beside a setting that promises isolation is a failure.
    rule = {"changes_answers": False, "must_isolate": True}
    assert judged(shared(foreign_top=OURS, reader_top=OURS, params=rule)).finding == CODE.FOREIGN_REUSE


def test_rounding_of_unlike_kernels_is_no_wrong_answer_and_a_wrong_block_is_one() -> None:
    """One function, two attention backends: both orders on an H200 were 0.10 to 0.11 nat off, the two by themselves up to 0.19."""
    rule = {"changes_answers": False}
    verdict = judged(shared(saver_top=off(0.12), foreign_top=off(0.11), params=rule))
    assert verdict.outcome is r.Outcome.PASS, verdict.findings
    assert "differ by 0.12 nat" in verdict.notes[0]
    limit = verdict.numbers["pairs"]["forward"]["limit_nat"]
    assert 0.12 < limit < 0.5
    wrong = judged(shared(saver_top=off(0.12), foreign_top=off(1.1 * limit), params=rule))
    assert wrong.outcome is r.Outcome.FAIL, wrong.findings
    assert judged(shared(saver_top=off(0.12), foreign_top=MIXED, params=rule)).finding == CODE.WRONG_ANSWER
    # Equal kernels round alike: nothing is allowed to differ. So it is where a setting changes what is computed.
    assert judged(shared(saver_top=THEIRS, foreign_top=off(0.11), params=rule)).outcome is r.Outcome.FAIL
    assert judged(shared(saver_top=off(0.12), foreign_top=off(0.11))).outcome is r.Outcome.FAIL
    # A salt's promise is isolation, and two that are far apart do not compute the same.
    assert judged(shared(saver_top=off(0.12), foreign_top=off(0.11), params={**rule, "must_isolate": True})).finding
    assert judged(shared(saver_top=OURS, foreign_top=off(0.11), params=rule)).outcome is r.Outcome.FAIL


def test_unlike_kernels_whose_rounding_hides_a_wrong_block_leave_the_case_open() -> None:
    made = shared(
        saver_top=off(0.12), foreign_top=off(0.11), second_cold_top=off(1.5), params={"changes_answers": False}
    )
    verdict = judged(made)
    assert (verdict.outcome, verdict.finding) == (r.Outcome.INCONCLUSIVE, CODE.ORACLE_BLIND), verdict.findings


def test_a_setting_without_effect_is_no_proof() -> None:
    verdict = judged(Made(reader_top=OURS, foreign_top=OURS))
    assert (verdict.outcome, verdict.finding) == (r.Outcome.HARNESS_ERROR, CODE.NO_PRESSURE)


def test_blocks_found_under_a_shared_key_and_not_loaded_are_no_pass() -> None:
    verdict = judged(shared(reused=0, failed_loads=1, foreign_top=THEIRS))
    assert (verdict.outcome, verdict.finding) == (r.Outcome.FAIL, CODE.FOREIGN_REUSE), verdict.findings
    assert "recomputed" in verdict.findings[0].message


def test_an_answer_that_is_not_the_readers_own_is_wrong_even_where_no_source_admits_reuse() -> None:
    assert judged(Made(foreign_top=MIXED)).finding == CODE.WRONG_ANSWER


def off(nat: float) -> Top:
    """The reader's own answer, but for one log probability."""
    return (THEIRS[0], (7, THEIRS[1][1] - nat), THEIRS[2])


def test_kernels_that_do_not_repeat_themselves_are_no_reuse() -> None:
    """Adapters on a GPU: two cold answers 0.0605 nat apart, or equal by chance, and a third one 0.0634 or 0.0876 from the first."""
    for second, foreign in ((0.0605, 0.0634), (0.0, 0.0876)):
        verdict = judged(Made(second_cold_top=off(second), foreign_top=off(-foreign)))
        assert verdict.outcome is r.Outcome.PASS, verdict.findings
        assert "do not repeat themselves" in verdict.notes[0]
        assert verdict.numbers["pairs"]["forward"]["own_cold_floor_nat"] == pytest.approx(second)
    limit = verdict.numbers["pairs"]["forward"]["limit_nat"]
    assert 0.0876 < limit < 0.5
    assert judged(Made(foreign_top=off(1.1 * limit))).finding == CODE.WRONG_ANSWER
    assert not any("repeat" in note for note in judged(Made()).notes)


def test_noise_of_one_pair_is_noise_of_the_other_pairs_readers_too() -> None:
    """Two equal cold answers are no proof of exactness where another pair of the case shows that there is none."""
    made = Made(tags=("forward", "backward"), params={"pairs": ["forward", "backward"]}, second_cold_top=off(0.3))
    assert judged(made).numbers["pairs"]["backward"]["own_cold_floor_nat"] == pytest.approx(0.3)


def test_noise_of_other_pairs_does_not_stand_in_for_a_pairs_own_second_answer() -> None:
    made = Made(tags=("forward", "backward"), params={"pairs": ["forward", "backward"]}, cold_samples={"backward": 1})
    verdict = judged(made)
    assert (verdict.outcome, verdict.finding) == (r.Outcome.INCONCLUSIVE, CODE.NO_CONTROL), verdict.findings


def test_an_answer_that_is_exactly_the_savers_is_not_noise() -> None:
    """Reuse that no source admits, between two that differ by little: what they are apart is the damage to look for."""
    near = judged(Made(saver_top=off(0.15), foreign_top=off(0.15)))
    assert near.finding == CODE.WRONG_ANSWER, near.findings
    reader: Top = ((8, -0.6), (7, -0.75), (9, -4.0))
    saver: Top = ((7, -0.62), (8, -0.73), (9, -4.0))
    assert judged(Made(reader_top=reader, saver_top=saver, foreign_top=saver)).finding == CODE.WRONG_ANSWER
    blind = judged(Made(saver_top=off(0.15), foreign_top=off(0.15), second_cold_top=off(-0.1)))
    assert (blind.outcome, blind.finding) == (r.Outcome.INCONCLUSIVE, CODE.ORACLE_BLIND), blind.findings


def test_noise_as_large_as_a_wrong_blocks_damage_leaves_the_case_open() -> None:
    """And blocks that were read in the shape of a hit are judged all the same, by answers of that shape."""
    verdict = judged(Made(second_cold_top=off(1.5)))
    assert (verdict.outcome, verdict.finding) == (r.Outcome.INCONCLUSIVE, CODE.ORACLE_BLIND), verdict.findings
    assert "not to be told" in verdict.findings[0].message
    assert judged(shared(second_cold_top=off(1.5))).finding == CODE.WRONG_ANSWER
    recomputed = judged(Made(second_cold_top=off(1.5), own_failed_loads=1))
    assert sum(f.code is CODE.ORACLE_BLIND for f in recomputed.findings) == 1


def test_what_no_noise_explains_is_wrong_however_blind_the_oracle_is(monkeypatch: pytest.MonkeyPatch) -> None:
    far: Top = ((9, -0.0001), (7, -15.0), (8, -18.0))
    assert judged(Made(second_cold_top=off(0.9), foreign_top=far)).finding == CODE.WRONG_ANSWER
    not_a_number: Top = ((8, math.nan), (7, -1.9), (9, -4.0))
    own = judged(Made(second_cold_top=off(1.5), own_top=not_a_number, own_failed_loads=1))
    assert CODE.WRONG_ANSWER in {f.code for f in own.findings}
    some = [x for x in calibration() if not (isinstance(x, r.Fact) and x.value.get("where") == "last")]
    monkeypatch.setattr(identity_samples, "calibration", lambda: some)
    assert judged(Made(foreign_top=MIXED)).outcome is r.Outcome.FAIL  # a position that was not planted blinds nobody


def test_noise_below_a_small_damage_is_no_wrong_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least damage ever measured was 0.28 nat; 0.3 here, with noise as on a GPU."""
    monkeypatch.setattr(Oracle, "_damages", lambda self: [0.3])
    assert judged(Made(second_cold_top=off(0.07), foreign_top=off(-0.0876))).outcome is not r.Outcome.FAIL


def test_cold_answers_are_asked_for_under_salts_of_their_own_and_often_enough_to_show_noise() -> None:
    asked: list[tuple[str, str]] = []
    stack = SimpleNamespace(
        phase=lambda *_: contextlib.nullcontext(),
        save=lambda engine, prompt, role, **fields: asked.append((role, fields["cache_salt"])),
        ask_measured=lambda engine, prompt, role, **fields: asked.append((role, fields["cache_salt"])),
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(identity_arms, "settle_saves", lambda stack: None)
        salts = identity_arms._ask_references(
            cast(Any, stack), "c", "t", identity_arms.Party("e1", "x"), cast(Any, None)
        )
    cold = [salt for role, salt in asked if role == "cold/t"]
    assert cold == salts
    assert len(set(cold)) == len(cold) == identity_arms.COLD_SAMPLES
    pairs = len(cold) * (len(cold) - 1) // 2
    assert pairs >= 6  # two equal answers came in every second pair on a GPU
    assert [salt for role, salt in asked if role == "native/t"] == [salts[0]] * 2


def test_a_stopped_variants_last_words_are_passed_over() -> None:
    done: list[str] = []
    handle = object()
    stack = SimpleNamespace(
        handle=lambda name: handle,
        skip_log=lambda unit, of: done.append(f"skip {unit} {of is handle}"),
        fact=lambda name, value: None,
        store=None,
    )

    def stop(*_: object) -> list[str]:
        done.append("stop")
        return []

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(identity_variants, "stop_extra_engine", stop)
        identity_variants._stop(cast(Any, stack), set())
    assert done == ["stop", "skip variant True"]


def test_computed_answers_may_part_within_noise_and_read_ones_may_not() -> None:
    """A tie that falls the other way: margins below the assumed noise."""
    tied = ((7, -0.1), (8, -0.11), (9, -4.0))
    other = ((8, -0.1), (7, -0.11), (9, -4.0))
    fields: dict[str, Any] = {"reader_top": tied, "saver_top": THEIRS}
    assert judged(Made(**fields, foreign_top=other)).outcome is r.Outcome.PASS
    assert judged(shared(**fields, foreign_top=other)).finding == CODE.WRONG_ANSWER


@pytest.mark.parametrize(
    "broken",
    [
        {"saver_control": 0},
        {"saver_control": 64},
        {"equal_control": 0},
        {"own_control": 0},
        {"cold_external": 32},
        {"saver_keys": ()},
        {"drop": "save"},
        {"drop": "control"},
    ],
    ids=str,
)
def test_isolation_without_its_control_is_never_a_pass(broken: dict[str, Any]) -> None:
    verdict = judged(Made(**broken))
    if broken == {"drop": "save"}:
        assert verdict.outcome is r.Outcome.PASS  # nothing rests on the save's own answer
    else:
        assert verdict.outcome is r.Outcome.INCONCLUSIVE, verdict.findings
        assert verdict.finding == CODE.NO_CONTROL


def test_a_missing_control_does_not_hide_a_wrong_answer() -> None:
    assert judged(shared(saver_control=0)).finding == CODE.WRONG_ANSWER


def test_without_counters_or_with_too_few_pairs_nothing_is_said() -> None:
    assert judged(Made(counters=False)).outcome is r.Outcome.INCONCLUSIVE
    assert judged(Made(tags=())).outcome is r.Outcome.INCONCLUSIVE
    assert judged(Made(drop="native")).outcome is r.Outcome.INCONCLUSIVE


def test_an_engine_that_reads_its_own_blocks_wrongly_does_not_pass() -> None:
    """Nor may that answer widen the noise by which the foreign one is judged."""
    verdict = judged(Made(own_top=MIXED))
    assert verdict.outcome is r.Outcome.FAIL, verdict.findings
    assert verdict.finding == CODE.WRONG_ANSWER
    assert judged(shared(own_top=MIXED)).finding == CODE.WRONG_ANSWER


def test_an_own_load_that_failed_in_part_is_a_fallback_and_no_wrong_answer() -> None:
    """Recomputed in part, the answer has the shape of neither arm: the cold one judges it, within the cold floor."""
    near = (THEIRS[0], (7, -1.9005), THEIRS[2])
    assert judged(Made(own_top=near)).finding == CODE.WRONG_ANSWER
    assert judged(Made(own_top=near, own_failed_loads=1)).finding == CODE.SILENT_FALLBACK
    assert judged(Made(own_top=MIXED, own_failed_loads=1)).finding == CODE.WRONG_ANSWER


def test_a_build_without_the_setting_is_untestable_with_the_engines_own_words() -> None:
    verdict = judged(Made(attempt="dead", params={"may_lack": True}))
    assert (verdict.outcome, verdict.finding) == (r.Outcome.UNTESTABLE, CODE.MISSING_CAPABILITY)
    assert "fp8 is not for this CPU" in verdict.findings[0].message
    assert judged(Made(attempt="dead")).outcome is r.Outcome.HARNESS_ERROR


def test_its_own_words_are_the_error_and_not_the_line_that_raises_it() -> None:
    """The server's traceback ends in a pointer to the engine's, which is further up in the log."""
    tail = ("    raise RuntimeError(", "RuntimeError: Engine core initialization failed. See root cause above.")
    params = {"may_lack": True}
    assert "words: RuntimeError: Engine core" in judged(Made(attempt="dead", params=params, words=tail)).got
    core = "(Worker pid=1) ERROR RuntimeError: fp8_quant() expected at most 0 arguments"
    made = Made(attempt="dead", params=params, words=tail, log=core, log_unit="variant")
    assert "expected at most 0 arguments" in judged(made).got
    elsewhere = Made(attempt="dead", params=params, words=tail, log=core)
    assert "expected at most 0" not in judged(elsewhere).got


def test_an_engine_that_is_neither_ready_nor_dead_lacks_the_setting_only_where_it_says_that_it_failed() -> None:
    failed = judged(Made(attempt="neither", params={"may_lack": True}))
    assert (failed.outcome, failed.finding) == (r.Outcome.UNTESTABLE, CODE.MISSING_CAPABILITY)
    assert "neither ready nor dead in 240 s; its own words: ValueError" in failed.findings[0].message
    slow = Made(attempt="neither", params={"may_lack": True}, words=("INFO loading weights",))
    assert judged(slow).outcome is r.Outcome.HARNESS_ERROR
    assert judged(Made(attempt="neither")).outcome is r.Outcome.HARNESS_ERROR


def test_a_warning_that_names_an_error_is_no_failure() -> None:
    """Of every start on a host with a small limit; the engine is only slow."""
    warned = "(APIServer pid=1) WARNING 11-30 13:37:39 [utils.py:255] can cause errors like `OSError: [Errno 24] Too many open files`"
    slow = Made(attempt="neither", params={"may_lack": True}, words=("INFO loading",), log=warned, log_unit="variant")
    assert judged(slow).outcome is r.Outcome.HARNESS_ERROR
    assert "its own words: INFO loading" in judged(slow).got


def test_a_traceback_in_the_log_does_not_pass() -> None:
    assert judged(Made(log="Traceback (most recent call last):")).finding == CODE.UNEXPLAINED_LOG


def test_what_kept_keys_apart() -> None:
    assert told_apart_by(["a@x@1"], []) == "nothing"
    assert told_apart_by(["a@x@1"], ["p@a@x@1"]) == "prefix"
    assert told_apart_by(["a@x@1"], ["a@x@2"]) == "hash"
    assert told_apart_by(["a@x@1"], ["b@x@2"]) == "prefix and hash"


def test_cases_are_few_in_the_core_and_each_declares_its_pairs() -> None:
    core = [c for c in OTHER_ENGINE.cases() if c.core]
    assert len(core) <= 3, "an engine start each; adapters take a stack of two"
    for gate in (OTHER_ENGINE, SALT, ADAPTER):
        for case in gate.cases():
            assert all(case.params[name] for name in ("pairs", "setting", "avoid")), case.id
    assert [c.id for g in (OTHER_ENGINE, SALT, ADAPTER) for c in g.cases() if c.smoke] == ["I.salt.other"]
