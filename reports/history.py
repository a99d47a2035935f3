"""The history of a run: an ordered, immutable view of its records, with the selections that judges need."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import TypeVar

from reports import records as r

RecordT = TypeVar("RecordT", bound=r.Record)
ValueT = TypeVar("ValueT")


class _Index:
    """Where things stand in a run's records; shared by all views of it, so that judging many cases stays linear."""

    def __init__(self, records: tuple[r.Record, ...]) -> None:
        self.records = records
        self.starts: dict[str, list[int]] = {}
        """case id -> positions of its starts."""
        self.stacks: list[int] = []
        self.memo: dict[Hashable, object] = {}
        for i, rec in enumerate(records):
            if isinstance(rec, r.CaseStarted):
                self.starts.setdefault(rec.case_id, []).append(i)
            elif isinstance(rec, r.StackUp):
                self.stacks.append(i)


class History:
    """Records in the order in which they were written.

    A judge gets the *case view* (``for_case``): the records of one case, with ``before`` holding everything that the
    run recorded earlier and ``stack`` the stack the case ran on.
    """

    def __init__(self, records: Iterable[r.Record], before: Iterable[r.Record] = ()) -> None:
        earlier = tuple(before)
        self.records: tuple[r.Record, ...] = tuple(records)
        self._begin = len(earlier)
        self._index = _Index((*earlier, *self.records) if earlier else self.records)
        self._deltas: dict[tuple[str, str, str], dict[str, float] | None] = {}

    @classmethod
    def _view(cls, index: _Index, begin: int, end: int) -> History:
        view = cls.__new__(cls)
        view.records = index.records[begin:end]
        view._begin = begin
        view._index = index
        view._deltas = {}
        return view

    @property
    def before(self) -> tuple[r.Record, ...]:
        """What the run recorded before the first record of this view."""
        return self._index.records[: self._begin]

    @property
    def _end(self) -> int:
        return self._begin + len(self.records)

    def memo(self, key: Hashable, compute: Callable[[], ValueT]) -> ValueT:
        """What ``compute`` gives, computed once for all views of a run. Only for pure functions of what ``key`` names."""
        known = self._index.memo
        if key not in known:
            known[key] = compute()
        found: ValueT = known[key]  # type: ignore[assignment]  # what compute returned under this key
        return found

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[r.Record]:
        return iter(self.records)

    def of(self, kind: type[RecordT]) -> list[RecordT]:
        """All records of one type, in order."""
        return [record for record in self.records if isinstance(record, kind)]

    def last(self, kind: type[RecordT]) -> RecordT | None:
        """The last record of a type, or None."""
        found = self.of(kind)
        return found[-1] if found else None

    # Cases ----------------------------------------------------------------------------------------------------------
    def case_ids(self) -> list[str]:
        """Ids of all cases that were started, in order, each once."""
        return list(dict.fromkeys(c.case_id for c in self.of(r.CaseStarted)))

    def for_case(self, case_id: str) -> History:
        """The view of one case: from its (last) start to its finish, or to the end where it was cut short."""
        starts = self._index.starts.get(case_id, [])
        inside = starts[bisect_left(starts, self._begin) : bisect_left(starts, self._end)]
        if not inside:
            raise KeyError(case_id)
        end = self._end
        for i in range(inside[-1], self._end):
            rec = self._index.records[i]
            if isinstance(rec, r.CaseFinished) and rec.case_id == case_id:
                end = i + 1
                break
        return self._view(self._index, inside[-1], end)

    @property
    def case(self) -> r.CaseStarted:
        """The case of a case view."""
        if not self.records or not isinstance(self.records[0], r.CaseStarted):
            raise ValueError("not the view of a case: History.for_case() makes one")
        return self.records[0]

    @property
    def complete(self) -> bool:
        """The case ran to its end (its collection may still have raised: see ``collect_error``)."""
        return bool(self.of(r.CaseFinished))

    @property
    def collect_error(self) -> str:
        """Traceback of the collection, or ""."""
        finished = self.last(r.CaseFinished)
        return finished.error if finished else ""

    @property
    def stack(self) -> r.StackUp | None:
        """The newest stack at the end of the case: one brought up inside the case, else the case's own."""
        position = self._stack_position()
        if position is None:
            return None
        found = self._index.records[position]
        assert isinstance(found, r.StackUp)
        return found

    def _stack_position(self) -> int | None:
        """Position of ``stack`` in the run's records."""
        stacks = self._index.stacks
        own, end = bisect_left(stacks, self._begin), bisect_left(stacks, self._end)
        if end > own:
            return stacks[end - 1]
        wanted = self.case.stack_id
        for position in reversed(stacks[:own]):
            rec = self._index.records[position]
            if isinstance(rec, r.StackUp) and (not wanted or rec.stack_id == wanted):
                return position
        return None

    def since_stack(self, select: Callable[[r.Record], bool]) -> tuple[r.Record, ...]:
        """The selected records from the newest start of the case's stack to the end of this view, earlier cases' too.

        The whole run where no stack is known. ``select`` must be a function (not a new lambda a call): what it selects
        is looked for once a stack.
        """
        stack = self.stack
        begin = 0
        for position in self._index.stacks[: bisect_left(self._index.stacks, self._end)]:
            rec = self._index.records[position]
            if isinstance(rec, r.StackUp) and stack is not None and rec.stack_id == stack.stack_id:
                begin = position
        records = self._index.records

        def look() -> list[int]:
            return [i for i in range(begin, len(records)) if select(records[i])]

        positions = self.memo(("since", begin, select), look)
        return tuple(records[i] for i in positions[: bisect_left(positions, self._end)])

    def engine(self, name: str) -> r.EngineFacts:
        """Facts of an engine of the case's stack. KeyError when there is no such engine."""
        stack = self.stack
        for facts in stack.engines if stack else ():
            if facts.name == name:
                return facts
        raise KeyError(name)

    # Selections -----------------------------------------------------------------------------------------------------
    def observations(
        self, *, phase: str | None = None, role: str | None = None, engine: str | None = None
    ) -> list[r.Observation]:
        """Requests, in the order in which they ended. A case view gives the case's own (not a calibration's inside it)."""
        own = self.records[0].case_id if self.records and isinstance(self.records[0], r.CaseStarted) else None
        return [
            o
            for o in self.of(r.Observation)
            if (own is None or o.case_id == own)
            and (phase is None or o.phase == phase)
            and (role is None or o.role == role)
            and (engine is None or o.engine == engine)
        ]

    def facts(self, name: str) -> list[r.Fact]:
        """Facts of one name, in order."""
        return [f for f in self.of(r.Fact) if f.name == name]

    def fact(self, name: str) -> r.Fact | None:
        """The last fact of a name, or None."""
        found = self.facts(name)
        return found[-1] if found else None

    def metrics(self, unit: str, label: str) -> r.MetricsSnapshot | None:
        """The last snapshot of a unit under a label, or None."""
        found = [m for m in self.of(r.MetricsSnapshot) if m.unit == unit and m.label == label]
        return found[-1] if found else None

    def delta(self, unit: str, first: str, second: str) -> dict[str, float] | None:
        """Counter differences between two labelled snapshots of a unit; None when either is missing.

        A name that is missing in the earlier one counts from zero (labelled counters appear with their first event).
        """
        key = (unit, first, second)
        if key not in self._deltas:  # several checks ask for the same request's
            self._deltas[key] = self._delta(unit, first, second)
        found = self._deltas[key]
        return None if found is None else dict(found)

    def _delta(self, unit: str, first: str, second: str) -> dict[str, float] | None:
        a, b = self.metrics(unit, first), self.metrics(unit, second)
        if a is None or b is None:
            return None
        return {name: value - a.values.get(name, 0.0) for name, value in b.values.items()}

    def faults(self, action: str | None = None) -> list[r.FaultRecord]:
        """Faults of the case, in order."""
        return [f for f in self.of(r.FaultRecord) if action is None or f.action == action]

    def earlier_observations(self, stack_id: str | None = None) -> list[r.Observation]:
        """Requests sent before this case since its stack came up (what its pool and caches may hold)."""
        wanted = stack_id if stack_id is not None else self.case.stack_id
        begin = 0
        for position in self._index.stacks[: bisect_left(self._index.stacks, self._begin)]:
            rec = self._index.records[position]
            if isinstance(rec, r.StackUp) and rec.stack_id == wanted:
                begin = position
        earlier = self._index.records[begin : self._begin]
        return [rec for rec in earlier if isinstance(rec, r.Observation)]
