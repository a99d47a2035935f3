"""Liveness, degrading, recovery, faults and parity: good and bad histories for each check."""

import math
import random
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reports import records as r
from reports.history import History
from suite.checks import degrade, faults, liveness, parity, recovery, run
from suite.contract import outcome_of
from suite.selftest.samples import codes, delta, observation

pytestmark = pytest.mark.selftest

FEW = ["too-few-observations"]

# Composition --------------------------------------------------------------------------------------------------------


def test_a_crashing_check_is_a_finding_and_the_others_still_run() -> None:
    found = run([partial(faults.no_pressure, "x", 0, 1), lambda: [][0], partial(faults.no_pressure, "y", 1, 1)])
    assert codes(found) == ["no-pressure", "checker-crashed"]
    assert "IndexError" in found[1].message
    assert "Traceback" in found[1].evidence["traceback"]
    assert outcome_of(found) is r.Outcome.HARNESS_ERROR


def test_a_check_that_returns_something_else_crashed() -> None:
    assert codes(run({"odd": lambda: ["fine"]})) == ["checker-crashed"]  # type: ignore[arg-type]
    assert codes(run({"none": lambda: None})) == ["checker-crashed"]  # type: ignore[arg-type]


def test_no_check_at_all_is_no_pass() -> None:
    assert codes(run([])) == ["no-pressure"]


# Liveness -----------------------------------------------------------------------------------------------------------


def test_answered_requests_pass() -> None:
    assert liveness.check_liveness([observation(), observation("q2", cancelled=True, finish_reason=None)]) == []


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"http_status": 500, "error": "boom"}, "failed-request"),
        ({"http_status": None, "error": "connection refused"}, "failed-request"),
        ({"error": "stream ended early"}, "failed-request"),
        ({"finish_reason": None}, "failed-request"),
        ({"finish_reason": "error"}, "failed-request"),
        ({"output_token_ids": ()}, "failed-request"),
        ({"sampling": {"max_tokens": 8}}, "failed-request"),  # it ended at its length, and is not that long
        ({"more_choices": (r.Choice(output_token_ids=(1,), finish_reason="length"),)}, "failed-request"),
        ({"timed_out": True, "http_status": None}, "hang"),
        ({"done_s": 200.0}, "hang"),  # nobody cut it off, but it is late all the same
    ],
)
def test_unanswered_requests_are_found(changes: dict[str, Any], code: str) -> None:
    found = liveness.check_liveness([observation(), observation("bad", **changes)])
    assert codes(found) == [code]
    assert found[0].evidence["request_id"] == "bad"


def test_victims_and_bystanders_are_told_apart() -> None:
    sent = [observation(f"v{i}", role="victim", http_status=500) for i in range(3)]
    sent += [observation("b0", role="bystander"), observation("b1", role="bystander", http_status=500)]
    found = liveness.check_liveness(sent)
    assert [(f.evidence["role"], f.evidence["count"], f.evidence["sent"]) for f in found] == [
        ("victim", 3, 3),
        ("bystander", 1, 2),
    ]


def test_no_request_is_no_liveness() -> None:
    assert codes(liveness.check_liveness([])) == FEW
    assert codes(liveness.check_liveness([observation(cancelled=True)])) == FEW
    assert codes(liveness.check_liveness([observation()], min_requests=2)) == FEW


def probe(t_s: float, engine: str = "e0", status: int | None = 200) -> r.HealthProbe:
    return r.HealthProbe(engine=engine, t_s=t_s, http_status=status, elapsed_s=0.01)


def test_health_beside_a_hanging_completion() -> None:
    hung = observation("h", timed_out=True, sent_s=10.0, done_s=70.0)
    assert codes(liveness.check_stuck([observation(), hung], [probe(30)])) == ["stuck-behind-health"]
    for p in (probe(30, "e1"), probe(30, status=503), probe(5), probe(71)):
        assert liveness.check_stuck([hung], [p]) == []
    assert liveness.check_stuck([observation()], [probe(10.2)]) == []
    assert codes(liveness.check_stuck([hung], [])) == FEW
    assert codes(liveness.check_stuck([], [probe(1)])) == FEW


def process(pid: int, start: int = 1, unit: str = "e0", **changes: Any) -> r.ProcessFacts:
    return r.ProcessFacts(name=unit, pid=pid, ppid=1, start_ticks=start, **changes)


def snapshot(*processes: r.ProcessFacts, unit: str = "e0", **changes: Any) -> r.ProcessSnapshot:
    return r.ProcessSnapshot(unit=unit, t_s=0.0, processes=processes, **changes)


def test_an_engine_is_the_same_only_with_pid_and_start_time() -> None:
    before = snapshot(process(1), process(2))
    assert liveness.check_same_processes(before, snapshot(process(2), process(1), process(3))) == []
    for after in (
        snapshot(process(1)),
        snapshot(process(1), process(2, start=9)),
        snapshot(process(1), process(2), states={"2": "Z"}),
        snapshot(),
    ):
        assert codes(liveness.check_same_processes(before, after)) == ["engine-died"]
    for missing in ((None, before), (before, None), (snapshot(), before)):
        assert codes(liveness.check_same_processes(*missing)) == FEW
    with pytest.raises(ValueError, match="two units"):
        liveness.check_same_processes(before, snapshot(process(1), unit="e1"))


def test_a_client_with_broken_times_is_our_fault() -> None:
    assert liveness.check_clock([observation()]) == []
    for bad in (
        {"first_token_s": 9.0, "token_s": ()},
        {"token_s": (10.6, 10.5)},
        {"token_s": (10.5,)},
        {"done_s": math.nan},
    ):
        found = liveness.check_clock([observation(**bad)])
        assert outcome_of(found) is r.Outcome.HARNESS_ERROR


# Degrading ----------------------------------------------------------------------------------------------------------


def timed(ttft_s: float | None, name: str = "d", **changes: Any) -> r.Observation:
    first = None if ttft_s is None else 10.0 + ttft_s
    return observation(name, first_token_s=first, token_s=(), done_s=10.0 + (ttft_s or 45.0), **changes)


budget = partial(degrade.check_budget, factor=3.0, extra_s=1.0)


@given(st.floats(0.001, 5.0), st.floats(0.001, 30.0))
@settings(max_examples=100, deadline=None)
def test_the_budget_is_the_larger_of_both_bounds(cold: float, took: float) -> None:
    slow = (10 + took) - 10 > max(3 * ((10 + cold) - 10), ((10 + cold) - 10) + 1)
    assert codes(budget([timed(took)], [timed(cold)])) == (["slow-degrade"] if slow else [])


def test_the_worst_request_is_named() -> None:
    found = budget([timed(1.3, "near"), timed(4.5, "worst"), timed(0.2, "good")], [timed(0.2)])
    assert found[0].evidence["request_id"] == "worst"
    assert found[0].evidence["count"] == 2
    assert found[0].evidence["budget_s"] == pytest.approx(1.2)


def test_a_request_without_a_first_token_is_slow_too() -> None:
    assert codes(budget([timed(None, timed_out=True)], [timed(0.2)])) == ["slow-degrade"]


def test_cold_requests_of_the_nearest_length_are_the_baseline() -> None:
    cold = [timed(0.1, "short", prompt=range(10)), timed(4.0, "long", prompt=range(1000))]
    assert budget([timed(6.0, prompt=range(900))], cold) == []
    assert codes(budget([timed(6.0, prompt=range(20))], cold)) == ["slow-degrade"]


def test_degrading_needs_requests_and_a_control() -> None:
    assert codes(budget([], [timed(0.2)])) == FEW
    assert codes(budget([timed(0.2, cancelled=True)], [timed(0.2)])) == FEW
    assert codes(budget([timed(0.2)], [])) == ["no-control"]
    assert codes(budget([timed(0.2)], [timed(None, http_status=500)])) == ["no-control"]


def test_lookups_are_bounded() -> None:
    sent = [observation("q1"), observation("q2", timed_out=True)]
    lookups = partial(degrade.check_lookups, sent, max_lookups=3)
    assert lookups(delta(100, store__lookup_exists__ok__ops=6)) == []
    many = delta(100, store__lookup_exists__ok__ops=5, store__lookup_exists__error__ops=2)
    assert codes(lookups(many)) == ["unbounded-lookups"]
    assert codes(lookups(delta(100, store__lookup_exists__ok__ops=0))) == ["no-pressure"]
    unanswered = [observation(q, timed_out=True, error="deadline") for q in ("q1", "q2")]
    none = delta(0, store__lookup_exists__ok__ops=0)
    assert codes(degrade.check_lookups(unanswered, none, max_lookups=3)) == FEW, (
        "a lookup that never ends is not counted"
    )
    assert codes(lookups(None)) == FEW
    assert codes(degrade.check_lookups([], delta(0), max_lookups=3)) == FEW
    renamed = {**none, "store.lookup_exists.timed_out.ops": 50.0}
    assert codes(degrade.check_lookups(sent, renamed, max_lookups=3)) == ["unbounded-lookups"]
    with pytest.raises(KeyError, match="store counters"):
        lookups({"prompt_tokens": 1.0})


# Recovery -----------------------------------------------------------------------------------------------------------


def wait(elapsed_s: float, came_true: bool) -> r.WaitRecord:
    return r.WaitRecord(what="hits return", t_s=0, elapsed_s=elapsed_s, bound_s=15, came_true=came_true)


def test_hits_are_back_in_time_or_not() -> None:
    assert recovery.check_hits_back(wait(12, True)) == []
    assert codes(recovery.check_hits_back(wait(15, False))) == ["hits-not-back"]
    assert codes(recovery.check_hits_back(wait(16, True))) == ["hits-not-back"]
    assert codes(recovery.check_hits_back(None)) == FEW


def idle(usage: float, running: float = 0.0, waiting: float = 0.0) -> r.MetricsSnapshot:
    values = {"kv_usage_ratio": usage, "running": running, "waiting": waiting}
    return r.MetricsSnapshot(unit="e0", label="idle", t_s=0, values=values)


def test_an_idle_engine_holds_no_blocks() -> None:
    assert recovery.check_kv_released(idle(0.0)) == []
    for usage in (0.001, 1.0, math.nan):
        assert codes(recovery.check_kv_released(idle(usage))) == ["kv-leak"]
    assert codes(recovery.check_kv_released(idle(0.5, running=1))) == FEW
    assert codes(recovery.check_kv_released(None)) == FEW
    with pytest.raises(KeyError, match="running"):
        recovery.check_kv_released(r.MetricsSnapshot(unit="e0", label="l", t_s=0, values={"kv_usage_ratio": 0.0}))


def test_an_engine_whose_last_request_has_ended_comes_to_rest() -> None:
    assert recovery.check_at_rest(idle(0.0)) == []
    assert codes(recovery.check_at_rest(idle(0.25))) == ["kv-leak"]
    assert codes(recovery.check_at_rest(idle(0.25, running=1))) == ["hang"]
    assert codes(recovery.check_at_rest(idle(0.0, waiting=2))) == ["hang"]
    assert codes(recovery.check_at_rest(None)) == FEW


def test_the_longest_request_is_admitted() -> None:
    longest = partial(observation, prompt=range(98))
    assert recovery.check_admission(longest(), 100) == []
    for bad in ({"http_status": 400}, {"timed_out": True}, {"output_token_ids": ()}):
        assert codes(recovery.check_admission(longest(**bad), 100)) == ["admission-refused"]
    assert codes(recovery.check_admission(longest(), 101)) == ["no-pressure"]
    assert codes(recovery.check_admission(None, 100)) == FEW


def series(values: Sequence[float], what: str = "sockets") -> list[r.ProcessSnapshot]:
    filler: dict[str, Any] = {"sockets": 1, "threads": 1, "rss_bytes": 1}
    return [snapshot(process(1), **{**filler, what: int(v)}) for v in values]


@given(st.integers(0, 10_000), st.integers(6, 12))
@settings(max_examples=100, deadline=None)
def test_noise_an_outlier_and_one_jump_are_no_growth(seed: int, count: int) -> None:
    rng = random.Random(seed)
    flat = [50 + rng.choice([-1, 0, 1]) for _ in range(count)]
    assert recovery.check_growth(series(flat)) == []
    spiked = [*flat]
    spiked[rng.randrange(count)] += 500
    assert recovery.check_growth(series(spiked)) == []
    jump = rng.randrange(count)
    assert recovery.check_growth(series([v + 500 * (i >= jump) for i, v in enumerate([50] * count)])) == []


@pytest.mark.parametrize(("what", "step"), [("sockets", 1), ("threads", 2), ("rss_bytes", 20 << 20)])
def test_steady_growth_is_found_through_noise(what: str, step: int) -> None:
    values = [100 * step + step * i + (step if i == 4 else 0) for i in range(9)]
    found = recovery.check_growth(series(values, what))
    assert codes(found) == ["resource-growth"]
    assert found[0].evidence["slope_per_repetition"] == pytest.approx(step, rel=0.3)


def test_filling_pools_at_the_start_are_no_growth() -> None:
    assert recovery.check_growth(series([10, 80, 80, 80, 81, 80, 80])) == []
    assert recovery.check_growth(series([80, 80, 81, 81, 82, 82])) == []


def test_growth_needs_repetitions_of_one_unit_with_numbers() -> None:
    assert codes(recovery.check_growth(series([1, 2, 3]))) == FEW
    assert codes(recovery.check_growth([])) == FEW
    assert codes(recovery.check_growth(series([0] * 7))) == FEW
    mixed = [*series([1] * 6), snapshot(unit="e1")]
    with pytest.raises(ValueError, match="several units"):
        recovery.check_growth(mixed)


# Faults -------------------------------------------------------------------------------------------------------------


def fault(landed: bool = True, action: Any = "inject", **changes: Any) -> r.FaultRecord:
    fields = {"proof": {"pid": "gone"}, "t_s": 5.0, **changes}
    return r.FaultRecord(fault_id="f1", fault="kill", target="e0", action=action, landed=landed, **fields)


def test_faults_land_with_a_proof() -> None:
    assert faults.check_faults([fault(), fault(action="heal")]) == []
    for bad in (fault(landed=False), fault(proof={}), fault(landed=False, action="heal")):
        assert codes(faults.check_faults([fault(), bad])) == ["fault-did-not-land"]
    assert codes(faults.check_faults([])) == ["no-pressure"]
    assert codes(faults.check_faults([fault(action="heal")])) == ["no-pressure"]
    assert codes(faults.no_pressure("reads", math.nan, 1)) == ["no-pressure"]


# Parity -------------------------------------------------------------------------------------------------------------


def envs(**engines: dict[str, str]) -> dict[str, list[r.ProcessFacts]]:
    return {name: [process(i, unit=name, env={"HOME": "/", **env})] for i, (name, env) in enumerate(engines.items())}


SEED = "PYTHONHASHSEED"


@pytest.mark.parametrize(
    ("a", "b", "algorithms", "shares"),
    [
        ({SEED: "0"}, {SEED: "0"}, {}, True),
        ({SEED: "0"}, {SEED: "1"}, {}, False),
        ({SEED: "0"}, {}, {}, False),
        ({}, {}, {}, True),  # sha256 has a fixed default
        ({}, {}, {"a": "xxhash", "b": "xxhash"}, False),
        ({SEED: "0"}, {SEED: "0"}, {"a": "xxhash", "b": "xxhash"}, True),
        ({SEED: "0"}, {SEED: "0"}, {"a": "xxhash"}, False),
        ({SEED: "random"}, {SEED: "random"}, {}, True),  # taken as a text
    ],
)
def test_seeds(a: dict[str, str], b: dict[str, str], algorithms: dict[str, str], shares: bool) -> None:
    found = parity.check_seed_parity(envs(a=a, b=b), algorithms)
    assert codes(found) == ([] if shares else ["seed-mismatch"])
    if found:
        assert found[0].evidence["engines"] == ["a", "b"]
        assert "a (" in found[0].message
        assert "b (" in found[0].message


def test_releases_with_a_random_default_share_nothing_when_unset() -> None:
    assert codes(parity.check_seed_parity(envs(a={}, b={}), fixed_default=None)) == ["seed-mismatch"]


def test_one_worker_of_an_engine_with_another_seed_is_found() -> None:
    processes = envs(a={SEED: "0"}, b={SEED: "0"})
    processes["b"].append(process(9, unit="b", title="Worker", env={SEED: "7"}))
    found = parity.check_seed_parity(processes)
    assert ["b", "b"] in [f.evidence["engines"] for f in found]
    assert ["a", "b"] in [f.evidence["engines"] for f in found]


def test_unread_environments_are_no_parity() -> None:
    assert codes(parity.check_seed_parity({"a": [process(1)], "b": [process(2, env={SEED: "0"})]})) == FEW
    assert codes(parity.check_seed_parity(envs(a={}))) == FEW
    assert codes(parity.check_stack_seeds(None)) == FEW


def test_snapshots_of_engines_are_compared() -> None:
    def taken(seed: str, unit: str) -> r.ProcessSnapshot:
        return snapshot(process(1, unit=unit, env={SEED: seed}), unit=unit)

    assert parity.check_seed_parity([taken("0", "e0"), taken("0", "e1")]) == []
    assert codes(parity.check_seed_parity([taken("0", "e0"), taken("1", "e1")])) == ["seed-mismatch"]
    assert codes(parity.check_seed_parity([])) == FEW


def unix(path: str, inode: int, unit: str, listening: bool = True) -> r.UnixSocket:
    return r.UnixSocket(path=path, inode=inode, listening=listening, pid=inode, unit=unit)


def socket_history(*sockets: r.UnixSocket) -> History:
    return History([r.SocketSnapshot(t_s=0.0, unix=sockets)])


@pytest.mark.parametrize(
    ("sockets", "expected"),
    [
        ([unix("a/lookup", 1, "e0"), unix("b/lookup", 2, "e1")], []),
        ([unix("a/lookup", 1, "e0"), unix("a/lookup", 2, "e1")], ["shared-lookup-channel"]),
        # an accepted connection carries the listener's path, and a child inherits the descriptor
        ([unix("a/lookup", 1, "e0"), unix("a/lookup", 3, "e0", False), unix("b/lookup", 2, "e1")], []),
        ([unix("a/lookup", 1, "e0"), unix("a/lookup", 1, "e0"), unix("b/lookup", 2, "e1")], []),
        ([unix("a/lookup", 1, "e0")], ["no-control"]),
        ([unix("a/lookup", 1, "e0"), unix("a/lookup", 2, "")], ["shared-lookup-channel", "no-control"]),
        ([], ["too-few-observations", "no-control"]),
    ],
)
def test_lookup_channels(sockets: list[r.UnixSocket], expected: list[str]) -> None:
    assert codes(parity.check_lookup_channels(socket_history(*sockets), ["e0", "e1"])) == expected


def test_lookup_channels_need_engines_and_a_list() -> None:
    assert codes(parity.check_lookup_channels(socket_history(unix("a/lookup", 1, "e0")), [])) == ["no-control"]
    assert codes(parity.check_lookup_channel(None)) == FEW
