"""What the arms of a comparison must show: each check of it turns red on a record that was changed by hand."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from reports import records as r
from reports.history import History
from suite.contract import Gate, safe_judge
from suite.gates.test_concurrency import CONCURRENT
from suite.gates.test_connector_options import OPTIONS_GATE
from suite.gates.test_hash_parity import SEED_NAMED, SHARE
from suite.gates.test_prefix import BOUNDARY, DIVERGENT
from suite.gates.test_size import LOAD_SIZE
from suite.selftest.simulated_stack import SimulatedStack, run_case

pytestmark = [pytest.mark.selftest, pytest.mark.usefixtures("short_calibration")]

F, Out = r.FindingCode, r.Outcome
Change = Callable[[r.Record], r.Record | None]


def judged_again(gate: Gate, case_id: str, stack: SimulatedStack, change: Change) -> r.Verdict:
    records = [new for rec in stack.records if (new := change(rec)) is not None]
    return safe_judge(gate, History(records).for_case(case_id))


def more(rec: r.Record, label_end: str, **changes: float) -> r.Record:
    """The record; a scrape with such a label counted more."""
    if not isinstance(rec, r.MetricsSnapshot) or not rec.label.endswith(label_end):
        return rec
    added = {name.replace("__", "."): value for name, value in changes.items()}
    values = rec.values | {name: rec.values.get(name, 0.0) + value for name, value in added.items()}
    return msgspec.structs.replace(rec, values=values)


@pytest.fixture(scope="module")
def options() -> SimulatedStack:
    stack = SimulatedStack()
    assert run_case(OPTIONS_GATE, "P.options.chunked", stack=stack).outcome is Out.PASS
    return stack


def external_of(stack: SimulatedStack) -> r.Observation:
    return next(
        o for o in stack.records if isinstance(o, r.Observation) and o.role == "external/long" and o.case_id != ""
    )


def test_a_request_whose_counters_nobody_read_is_no_pass(options: SimulatedStack) -> None:
    lost = f"{external_of(options).request_id}:before"

    def forget(rec: r.Record) -> r.Record | None:
        return None if isinstance(rec, r.MetricsSnapshot) and rec.label == lost else rec

    verdict = judged_again(OPTIONS_GATE, "P.options.chunked", options, forget)
    assert verdict.outcome is Out.INCONCLUSIVE
    assert verdict.finding == F.TOO_FEW_OBSERVATIONS


@pytest.mark.parametrize("role", ["cold/long", "native/long", "native-2/long"])
def test_no_arm_goes_without_counters(options: SimulatedStack, role: str) -> None:
    """Engines whose metrics did not answer in time: whether the cold answer was one is not known."""
    one = next(o for o in options.records if isinstance(o, r.Observation) and o.role == role)
    labels = {f"{one.request_id}:{when}" for when in ("before", "after")}
    verdict = judged_again(
        OPTIONS_GATE,
        "P.options.chunked",
        options,
        lambda rec: None if isinstance(rec, r.MetricsSnapshot) and rec.label in labels else rec,
    )
    assert (verdict.outcome, verdict.finding) == (Out.INCONCLUSIVE, F.TOO_FEW_OBSERVATIONS)


def test_an_external_answer_without_a_native_one_is_no_pass(options: SimulatedStack) -> None:
    verdict = judged_again(
        OPTIONS_GATE,
        "P.options.chunked",
        options,
        lambda rec: None if isinstance(rec, r.Observation) and rec.role == "native/long" else rec,
    )
    assert (verdict.outcome, verdict.finding) == (Out.INCONCLUSIVE, F.TOO_FEW_OBSERVATIONS)
    assert "no answer to compare 1 external" in verdict.got


def moved(o: r.Observation, nat: float) -> r.Observation:
    """The answer, a log probability of its last step moved."""
    *tops, last = o.top_logprobs
    (token, value), *rest = last
    return msgspec.structs.replace(o, top_logprobs=(*tops, ((token, value - nat), *rest)))


def test_a_native_answer_that_tells_no_cached_tokens_is_compared_all_the_same(options: SimulatedStack) -> None:
    def change(rec: r.Record) -> r.Record:
        if isinstance(rec, r.Observation) and rec.role == "native/long":
            return msgspec.structs.replace(rec, cached_tokens=None)
        # Beyond the native floor (zero here), and far within the limit of the cold arm.
        return moved(rec, 0.05) if isinstance(rec, r.Observation) and rec.role == "external/long" else rec

    verdict = judged_again(OPTIONS_GATE, "P.options.chunked", options, change)
    assert (verdict.outcome, verdict.finding) == (Out.FAIL, F.WRONG_ANSWER), verdict.findings


def test_what_the_saver_reads_back_must_be_right_as_well() -> None:
    stack = SimulatedStack()
    run_case(SHARE, "H.share.forward", stack=stack)
    one_seed = with_seed({"e0": "0", "e1": "0"})

    def change(rec: r.Record) -> r.Record | None:
        return moved(rec, 1.0) if isinstance(rec, r.Observation) and rec.role == "control" else one_seed(rec)

    verdict = judged_again(SHARE, "H.share.forward", stack, change)
    assert (verdict.outcome, verdict.finding) == (Out.FAIL, F.WRONG_ANSWER), verdict.findings


@pytest.mark.parametrize(
    ("gate", "case_id", "role"),
    [
        (DIVERGENT, "P.divergent.last-block-full", "external/divergent"),
        (DIVERGENT, "P.divergent.last-block-full", "cold/divergent"),
        (DIVERGENT, "P.divergent.last-block-short", "native/divergent"),
        (DIVERGENT, "P.divergent.first-block", "external/control"),
        (BOUNDARY, "P.boundary.k3", "native-2"),
        (LOAD_SIZE, "P.size.base.b16", "external/again-3"),
    ],
)
def test_a_request_that_was_never_sent_is_no_pass(gate: Gate, case_id: str, role: str) -> None:
    stack = SimulatedStack()
    assert run_case(gate, case_id, stack=stack).outcome is Out.PASS
    verdict = judged_again(
        gate, case_id, stack, lambda rec: None if isinstance(rec, r.Observation) and rec.role == role else rec
    )
    assert (verdict.outcome, verdict.finding) == (Out.INCONCLUSIVE, F.TOO_FEW_OBSERVATIONS), verdict.findings


def test_answers_that_were_all_cut_alike_are_no_pass(options: SimulatedStack) -> None:
    def cut(rec: r.Record) -> r.Record:
        if not isinstance(rec, r.Observation):
            return rec
        return msgspec.structs.replace(
            rec, output_token_ids=rec.output_token_ids[:1], top_logprobs=rec.top_logprobs[:1], token_s=rec.token_s[:1]
        )

    verdict = judged_again(OPTIONS_GATE, "P.options.chunked", options, cut)
    assert (verdict.outcome, verdict.finding) == (Out.FAIL, F.FAILED_REQUEST), verdict.findings


def test_a_request_that_was_looked_up_again_and_again_fails(options: SimulatedStack) -> None:
    label = f"{external_of(options).request_id}:after"
    verdict = judged_again(
        OPTIONS_GATE, "P.options.chunked", options, lambda rec: more(rec, label, store__lookup_exists__ok__ops=50)
    )
    assert (verdict.outcome, verdict.finding) == (Out.FAIL, F.UNBOUNDED_LOOKUPS)


def with_seed(seeds: dict[str, str]) -> Change:
    """Every engine's environment, as /proc would show it."""

    def change(rec: r.Record) -> r.Record:
        if not isinstance(rec, r.ProcessSnapshot) or rec.unit not in seeds:
            return rec
        env = {"PYTHONHASHSEED": seeds[rec.unit]}
        return msgspec.structs.replace(rec, processes=tuple(msgspec.structs.replace(p, env=env) for p in rec.processes))

    return change


def test_sharing_engines_have_one_seed_and_the_one_that_differs_is_named() -> None:
    stack = SimulatedStack()
    run_case(SHARE, "H.share.forward", stack=stack)
    case = "H.share.forward"
    assert judged_again(SHARE, case, stack, with_seed({"e0": "0", "e1": "0"})).outcome is Out.PASS
    other = judged_again(SHARE, case, stack, with_seed({"e0": "0", "e1": "1"}))
    assert (other.outcome, other.finding) == (Out.FAIL, F.SEED_MISMATCH)
    unread = judged_again(SHARE, case, stack, lambda rec: rec)
    assert unread.outcome is Out.INCONCLUSIVE


SEEDS = "H.seed.different"
APART = with_seed({"e0": "0", "e1": "1"})


@pytest.fixture(scope="module")
def seeded() -> SimulatedStack:
    """Two engines whose keys differ, as those of two seeds do."""
    stack = SimulatedStack(lies=["other-seed"])
    run_case(SEED_NAMED, SEEDS, stack=stack)
    return stack


def test_the_seed_gate_wants_the_seed_to_be_named(seeded: SimulatedStack) -> None:
    named = judged_again(SEED_NAMED, SEEDS, seeded, APART)
    assert named.outcome is Out.PASS, named.findings
    blind = judged_again(SEED_NAMED, SEEDS, seeded, with_seed({"e0": "0", "e1": "0"}))
    assert (blind.outcome, blind.finding) == (Out.FAIL, F.MISLEADING_MESSAGE)


def test_a_seed_that_is_named_and_keeps_nothing_apart_is_no_cause() -> None:
    stack = SimulatedStack()
    run_case(SEED_NAMED, SEEDS, stack=stack)
    verdict = judged_again(SEED_NAMED, SEEDS, stack, APART)
    assert (verdict.outcome, verdict.finding) == (Out.FAIL, F.MISLEADING_MESSAGE), verdict.findings
    assert "1984 external tokens all the same" in verdict.got


def without(kind: str) -> Change:
    """The records less the requests of a kind."""
    return lambda rec: None if isinstance(rec, r.Observation) and rec.role == kind else APART(rec)


@pytest.mark.parametrize(("kind", "code"), [("external", F.TOO_FEW_OBSERVATIONS), ("control", F.NO_CONTROL)])
def test_the_seed_gate_proves_nothing_without_a_reader_or_a_control(
    seeded: SimulatedStack, kind: str, code: r.FindingCode
) -> None:
    verdict = judged_again(SEED_NAMED, SEEDS, seeded, without(kind))
    assert (verdict.outcome, verdict.finding) == (Out.INCONCLUSIVE, code), verdict.findings


def test_what_else_went_wrong_beside_other_seeds_is_no_pass(seeded: SimulatedStack) -> None:
    def crashed(rec: r.Record) -> r.Record | None:
        if isinstance(rec, r.Observation) and rec.role == "native" and rec.case_id == SEEDS:
            return msgspec.structs.replace(rec, http_status=500, error="http 500: gone")
        return APART(rec)

    verdict = judged_again(SEED_NAMED, SEEDS, seeded, crashed)
    assert (verdict.outcome, verdict.finding) == (Out.FAIL, F.FAILED_REQUEST), verdict.findings


@pytest.mark.parametrize("changed", ["prompt_tokens", "prompt_tokens__external"])
def test_a_burst_that_does_not_add_up_is_no_pass(changed: str) -> None:
    stack = SimulatedStack()
    assert run_case(CONCURRENT, "P.concurrent.after-save", stack=stack).outcome is Out.PASS
    verdict = judged_again(
        CONCURRENT, "P.concurrent.after-save", stack, lambda rec: more(rec, "e1:burst:after", **{changed: 32.0})
    )
    assert verdict.outcome is Out.FAIL, verdict.findings
    assert verdict.finding in (F.CONSERVATION, F.SOURCE_DISAGREEMENT)
