"""The views of a history, against a plain second implementation that looks at every record."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reports import records as r
from reports.history import History
from suite.selftest.report_samples import observation

pytestmark = pytest.mark.selftest

CASES, STACKS = ("a", "b", "c"), ("s1", "s2")


def record(number: int, kind: str, case: str, stack: str) -> r.Record:
    if kind == "stack":
        return r.StackUp(stack_id=stack, t_s=number, spec={}, engines=())
    if kind == "start":
        return r.CaseStarted(case_id=case, gate="g", t_s=number, stack_id=stack, claim="", gate_version=1)
    if kind == "finish":
        return r.CaseFinished(case_id=case, t_s=number)
    if kind == "fact":
        return r.Fact(name="planted-block", t_s=number, value=number)
    return observation(number, case, role="x")


runs = st.lists(
    st.tuples(
        st.sampled_from(["stack", "start", "start", "finish", "fact", "ask", "ask"]),
        st.sampled_from(CASES),
        st.sampled_from(STACKS),
    ),
    max_size=40,
).map(lambda drawn: tuple(record(i, *parts) for i, parts in enumerate(drawn)))


def is_fact(rec: r.Record) -> bool:
    return isinstance(rec, r.Fact)


def bounds(records: tuple[r.Record, ...], case: str) -> tuple[int, int]:
    begin = max(i for i, rec in enumerate(records) if isinstance(rec, r.CaseStarted) and rec.case_id == case)
    for i, rec in enumerate(records):
        if i > begin and isinstance(rec, r.CaseFinished) and rec.case_id == case:
            return begin, i + 1
    return begin, len(records)


def newest_stack(records: tuple[r.Record, ...], begin: int, end: int) -> int | None:
    inside = [i for i in range(begin, end) if isinstance(records[i], r.StackUp)]
    case = records[begin]
    assert isinstance(case, r.CaseStarted)
    before = [i for i in range(begin) if isinstance(rec := records[i], r.StackUp) and rec.stack_id == case.stack_id]
    found = inside or before
    return found[-1] if found else None


@given(runs)
def test_views_are_what_a_look_at_every_record_gives(records: tuple[r.Record, ...]) -> None:
    history = History(records)
    started = list(dict.fromkeys(rec.case_id for rec in records if isinstance(rec, r.CaseStarted)))
    assert history.case_ids() == started
    for case in started:
        view = history.for_case(case)
        begin, end = bounds(records, case)
        assert (view.records, view.before) == (records[begin:end], records[:begin])
        stack = newest_stack(records, begin, end)
        assert view.stack is (None if stack is None else records[stack])
        up = None if stack is None else records[stack]
        since = 0
        for i in range(end):
            rec = records[i]
            if isinstance(rec, r.StackUp) and isinstance(up, r.StackUp) and rec.stack_id == up.stack_id:
                since = i
        assert view.since_stack(is_fact) == tuple(filter(is_fact, records[since:end]))
        own = max(
            (i for i in range(begin) if isinstance(r2 := records[i], r.StackUp) and r2.stack_id == view.case.stack_id),
            default=0,
        )
        assert view.earlier_observations() == [x for x in records[own:begin] if isinstance(x, r.Observation)]
        again = History(records[begin:end], before=records[:begin])
        assert (again.for_case(case).records, again.before, again.stack) == (view.records, view.before, view.stack)


@given(runs)
def test_a_case_that_never_started_has_no_view(records: tuple[r.Record, ...]) -> None:
    missing = set(CASES) - {rec.case_id for rec in records if isinstance(rec, r.CaseStarted)}
    for case in missing:
        with pytest.raises(KeyError):
            History(records).for_case(case)


def test_what_is_remembered_is_shared_by_the_views_of_one_run_only() -> None:
    calls: list[int] = []

    def compute() -> int:
        calls.append(1)
        return len(calls)

    start = [r.CaseStarted(case_id=c, gate="g", t_s=0, stack_id="", claim="", gate_version=1) for c in "ab"]
    one, other = History(start), History(start)
    assert [one.for_case("a").memo("k", compute), one.for_case("b").memo("k", compute)] == [1, 1]
    assert other.memo("k", compute) == 2


def test_a_delta_that_was_changed_by_its_reader_is_whole_for_the_next() -> None:
    shots = [
        r.MetricsSnapshot(unit="e0", label=label, t_s=0, values={"x": value})
        for label, value in (("1", 1.0), ("2", 5.0))
    ]
    history = History(shots)
    first = history.delta("e0", "1", "2")
    assert first == {"x": 4.0}
    first["x"] = 0.0
    assert history.delta("e0", "1", "2") == {"x": 4.0}
    assert history.delta("e0", "1", "3") is None
