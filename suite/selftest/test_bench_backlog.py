"""The backlog of saves: what is measured and judged on hand-made records, and how it is watched."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from reports import records as r
from reports.history import History
from suite.bench.backlog import BACKLOG, BURST, BURST_REQUESTS, BYSTANDER, _Burst, measure, results
from suite.contract import Case, safe_judge
from suite.selftest.degrade_samples import Change, ask, engine, replaced, wait

pytestmark = pytest.mark.selftest

CASE = next(iter(BACKLOG.cases()))
SAVER, OTHER = "e1", "e0"


def at(name: str, role: str, sent_s: float, took_s: float, on: str, tokens: int = 200) -> r.Observation:
    return ask(name, role, "burst", sent_s, engine=on, tokens=tokens, took_s=took_s, case_id=CASE.id)


def records() -> list[r.Record]:
    """Idle bystanders take 0.03 s; a burst from 100 s on is answered at 102 s and listed at 103 s; bystanders of the saver take 0.2 s
    until 102 s and 0.06 s until 103 s."""
    out: list[r.Record] = [r.StackUp(stack_id="s1", t_s=0.0, spec={}, engines=(engine(OTHER), engine(SAVER)))]
    out.append(
        r.CaseStarted(
            case_id=CASE.id, gate=BACKLOG.id, gate_version=1, claim="c", params=CASE.params, stack_id="s1", t_s=50.0
        )
    )
    out += [at(f"i{i}{on}", BYSTANDER, 60.0 + i, 0.03, on) for i in range(4) for on in (SAVER, OTHER)]
    out += [at(f"b{i}", BURST, 100.0, 1.98, SAVER, 2000) for i in range(BURST_REQUESTS)]
    for i in range(6):
        out.append(at(f"m{i}", BYSTANDER, 100.5 + i / 2, 0.2 if i < 3 else 0.06, SAVER if i % 2 == 0 else OTHER))
    out.append(wait(f"visible:{CASE.id}", 103.0))
    samples = [
        {"t_s": 100.5, "answered": 0, "listed": 0},
        {"t_s": 101.5, "answered": 124, "listed": 62},
        {"t_s": 102.1, "answered": 744, "listed": 300},
        {"t_s": 102.6, "answered": 744, "listed": 700},
        {"t_s": 103.0, "answered": 744, "listed": 744},
    ]
    out.append(r.Fact(name="backlog.samples", t_s=104.0, value={"block_tokens": 32, "before": 10, "samples": samples}))
    out.append(r.Fact(name="logs.scanned", t_s=104.0, value={"e0": 5}))
    return [*out, r.CaseFinished(case_id=CASE.id, t_s=105.0)]


def judged(*changes: Change) -> r.Verdict:
    rows = records()
    for change in changes:
        rows = change(rows)
    return safe_judge(BACKLOG, History(rows).for_case(CASE.id))


def samples_with(change: Any) -> Change:
    return replaced(
        lambda rec: isinstance(rec, r.Fact) and rec.name == "backlog.samples",
        lambda rec: msgspec.structs.replace(rec, value={**rec.value, "samples": change(rec.value["samples"])}),
    )


def test_what_lagged_and_what_bystanders_waited_is_told() -> None:
    verdict = judged()
    assert verdict.outcome is r.Outcome.PASS, verdict.findings
    assert verdict.numbers["backlog_blocks"] == 12 * 62 + 4 * 6 - 300  # the burst, and the bystanders until then
    assert verdict.numbers["drain_s"] == pytest.approx(103.0 - 102.0, abs=0.05)
    ttft = verdict.numbers["bystander_ttft_ms"]
    assert ttft["idle/saver"] == {"count": 4, "p50": 30.0, "p90": 30.0}
    assert ttft["computing/saver"]["p50"] == pytest.approx(200.0)
    assert ttft["lagging/saver"]["p50"] == pytest.approx(60.0)
    assert ttft["lagging/other"]["count"] == 1
    assert "468 blocks behind" in verdict.got
    assert "60 ms while saves lagged" in verdict.got


def test_saves_that_keep_up_are_told_as_such() -> None:
    verdict = judged(samples_with(lambda rows: [{**row, "listed": 10_000} for row in rows]))
    assert verdict.outcome is r.Outcome.PASS
    assert verdict.numbers["backlog_blocks"] == 0
    assert verdict.numbers["drain_s"] < 0.2


def test_results_are_those_that_compare_reads() -> None:
    view = History(records()).for_case(CASE.id)
    fact = view.fact("backlog.samples")
    assert fact is not None
    measured = measure(view.observations(), fact.value)
    assert measured is not None
    found = {row["benchmark"]: row["values"] for row in results(measured)}
    assert found["backlog/drain"] == [pytest.approx(1.0, abs=0.05)]
    assert found["backlog/bystander/idle/other"] == [pytest.approx(0.03)]
    assert all(row["better"] == "lower" for row in results(measured))


RED: dict[str, tuple[Change, str]] = {
    "blocks that never came": (
        replaced(lambda rec: isinstance(rec, r.WaitRecord), lambda rec: msgspec.structs.replace(rec, came_true=False)),
        "save-not-visible",
    ),
    "a bystander lost": (
        replaced(
            lambda rec: isinstance(rec, r.Observation) and rec.request_id == "m2",
            lambda rec: msgspec.structs.replace(rec, http_status=500, error="x"),
        ),
        "failed-request",
    ),
    "no burst": (
        replaced(lambda rec: isinstance(rec, r.Observation) and rec.role == BURST, lambda _: None),
        "too-few-observations",
    ),
    "nobody was idle": (
        replaced(lambda rec: isinstance(rec, r.Observation) and rec.sent_s < 100, lambda _: None),
        "too-few-observations",
    ),
    "few looks": (samples_with(lambda rows: rows[-3:]), "too-few-observations"),
    "nobody read the logs": (
        replaced(lambda rec: isinstance(rec, r.Fact) and rec.name == "logs.scanned", lambda _: None),
        "too-few-observations",
    ),
    "nobody watched": (
        replaced(lambda rec: isinstance(rec, r.Fact) and rec.name == "backlog.samples", lambda _: None),
        "too-few-observations",
    ),
}


@pytest.mark.parametrize("name", RED)
def test_what_was_not_seen_is_no_pass(name: str) -> None:
    change, code = RED[name]
    verdict = judged(change)
    assert verdict.finding == code, [f.message for f in verdict.findings]


def test_the_watch_ends_when_every_block_of_every_answer_is_listed() -> None:
    """On a stand-in for the stack: a real one is the bench's own business; here its listing has to lag by exactly so much."""
    listed = iter([10, 10, 60, 1000, 1000])
    facts: dict[str, Any] = {}
    waits: list[tuple[int, str]] = []
    started: list[str] = []

    def start(request: tuple[str, str]) -> Any:
        name, role = request
        started.append(role)
        observed = at(f"r{len(started)}", role, 1.0, 0.1, name, 2000 if role == BURST else 200)
        looks = iter([False, True, True]) if role == BURST else iter([True] * 9)
        return SimpleNamespace(done=lambda: next(looks), result=lambda: observed)

    stack = SimpleNamespace(
        names=[OTHER, SAVER],
        prompts=lambda *_: SimpleNamespace(fresh=lambda label, tokens: (1,) * tokens),
        engines={SAVER: SimpleNamespace(facts=SimpleNamespace(block_tokens=32, max_model_len=4096))},
        key_count=lambda: next(listed),
        request=lambda name, prompt, role: (name, role),
        start=start,
        wait_keys=lambda count, label: waits.append((count, label)),
        fact=facts.__setitem__,
    )
    burst = _Burst(cast(Any, stack), Case(CASE.id, {**CASE.params, "requests": 2}))
    burst.send()
    burst.watch()
    taken = facts["backlog.samples"]
    assert started == [BURST] * 2 + [BYSTANDER] * 6, "a bystander on each engine at each look"
    assert taken["before"] == 10
    # Bystanders of 6 blocks are answered at once, the burst's 124 at the second look; at the third all is listed.
    assert [int(s["answered"]) for s in taken["samples"]] == [12, 148, 160, 160]
    assert [int(s["listed"]) for s in taken["samples"]] == [0, 50, 990, 990]
    assert waits == [(10 + 160, f"visible:{CASE.id}")]
