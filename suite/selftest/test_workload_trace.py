"""Reading and writing traces: what breaks a rule is named by line and reason, and what does not comes through unchanged."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fixtures.errors import UsageError
from suite.selftest.traces import plain, published, request
from suite.workload.reader import TraceReader
from suite.workload.rules import REASONS, TraceRules
from suite.workload.trace import TraceRequest, renumbered, write_trace

pytestmark = pytest.mark.selftest

GOOD = {"timestamp": 5, "input_length": 1000, "output_length": 7, "hash_ids": [0, 1]}


def line(**changes: Any) -> str:
    """A good first line with changes; a field set to None is left out."""
    return json.dumps({k: v for k, v in {**GOOD, **changes}.items() if v is not None})


def after(first: str, **changes: Any) -> str:
    """A good line, then another."""
    return f"{first}\n{line(**changes)}"


BAD = [
    ("not-json", '{"timestamp": 0,', 1, "not a JSON object"),
    ("not-json", "nonsense", 1, "not a JSON object"),
    ("wrong-type", "[1, 2]", 1, "Expected `object`"),
    ("not-json", '{"timestamp": NaN}', 1, "not a JSON object"),
    ("unknown-field", line(prompt="x"), 1, "unknown field `prompt`"),
    ("missing-field", line(hash_ids=None), 1, "`hash_ids`"),
    ("wrong-type", line(input_length="1000"), 1, "Expected `int`, got `str`"),
    ("wrong-type", line(hash_ids=[0, 1.5]), 1, "Expected `int`, got `float`"),
    ("wrong-type", line(output_length=True), 1, "Expected `int`, got `bool`"),
    ("negative-time", line(timestamp=-1), 1, "timestamp -1 is negative"),
    ("time-goes-back", after(line(), timestamp=4), 2, "timestamp 4 is before 5"),
    ("no-input", line(input_length=0, hash_ids=[]), 1, "input_length 0"),
    ("no-input", line(input_length=-3), 1, "input_length -3"),
    ("no-output", line(output_length=0), 1, "output_length 0"),
    ("block-count", line(input_length=1025), 1, "1025 tokens in blocks of 512 make 3 hash ids, not 2"),
    ("block-count", line(input_length=512), 1, "make 1 hash ids, not 2"),
    ("bad-hash-id", line(hash_ids=[0, -1]), 1, "hash id -1 is negative"),
    ("repeated-hash-id", line(hash_ids=[0, 0]), 1, "hash id 0 comes twice"),
    ("hash-id-gap", line(hash_ids=[0, 2]), 1, "hash id 2 appears before 1"),
    ("hash-id-gap", after(line(), hash_ids=[0, 9]), 2, "hash id 9 appears before 2"),
    ("hash-id-gap", line(hash_ids=[10**15, 10**15 + 1]), 1, f"hash id {10**15} appears before 0"),
    (
        "other-prefix",
        after(line(), hash_ids=[1, 2]),
        2,
        "hash id 1 comes as a first block here but came after 0 before",
    ),
    ("other-prefix", after(line(), hash_ids=[2, 1]), 2, "hash id 1 comes after 2 here but came after 0 before"),
    ("other-size", after(line(), input_length=999), 2, "hash id 1 stands for 487 tokens here but stood for 488 before"),
    (
        "other-size",
        after(line(), input_length=1025, hash_ids=[0, 1, 2]),
        2,
        "hash id 1 stands for 512 tokens here but stood for 488 before; a block that grew is another block",
    ),
    ("beyond-model", line(output_length=1048), 1, "1000 + 1048 tokens are more than the model's 2047"),
]

RULES = TraceRules(max_model_tokens=2047)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


@pytest.mark.parametrize(("reason", "text", "number", "says"), BAD)
def test_a_bad_line_is_named_by_file_line_and_cause(
    reason: str, text: str, number: int, says: str, trace: Path
) -> None:
    trace.write_text(text + "\n", encoding="utf-8")
    with pytest.raises(UsageError) as caught:
        list(TraceReader(trace, RULES))
    message = str(caught.value)
    assert message.startswith(f"{trace}:{number}: ")
    assert says in message
    assert "\n" not in message


@pytest.mark.parametrize(("reason", "text", "number", "says"), BAD)
def test_skipped_lines_are_counted_by_reason_and_good_ones_stay(
    reason: str, text: str, number: int, says: str, trace: Path
) -> None:
    good = line(timestamp=9, hash_ids=[0, 1])
    if reason in ("hash-id-gap", "other-prefix"):  # these bring ids of their own
        good = line(timestamp=9, input_length=512, hash_ids=[0])
    trace.write_text(f"{text}\n\n{good}\n", encoding="utf-8")
    reader = TraceReader(trace, TraceRules(max_model_tokens=2047, skip_bad=True))
    requests = list(reader)
    assert reader.skipped == {reason: 1}
    assert reader.good == len(requests) == number
    assert requests[-1].timestamp_ms == 9
    assert requests[0].hash_ids[0] == 0


def test_every_reason_has_a_bad_line() -> None:
    assert {reason for reason, *_ in BAD} == set(REASONS)


def test_one_lost_line_does_not_cost_the_lines_after_it(trace: Path) -> None:
    """The ids of an unreadable line are missing from then on; that is its fault alone, and the result has no gap."""
    lines = [
        line(),
        '{"broken',
        line(hash_ids=[0, 2, 4], input_length=1500),
        line(hash_ids=[0, 3]),
        line(hash_ids=[5, 6]),
    ]
    trace.write_text("\n".join(lines), encoding="utf-8")
    reader = TraceReader(trace, TraceRules(skip_bad=True))
    assert [r.hash_ids for r in reader] == [[0, 1], [0, 2, 3], [0, 4], [5, 6]]
    assert reader.skipped == {"not-json": 1}


def test_the_ids_of_a_skipped_line_are_not_a_gap(trace: Path) -> None:
    lines = [line(), line(hash_ids=[0, 2], output_length=0), line(hash_ids=[0, 2, 3], input_length=1500)]
    trace.write_text("\n".join(lines), encoding="utf-8")
    reader = TraceReader(trace, TraceRules(skip_bad=True))
    assert [r.hash_ids for r in reader] == [[0, 1], [0, 2, 3]]
    assert reader.skipped == {"no-output": 1}


def test_ids_of_any_kind_are_numbered_anew_when_asked(trace: Path) -> None:
    trace.write_text(f"{line(hash_ids=[10**15, 7])}\n{line(hash_ids=[10**15, 8])}\n", encoding="utf-8")
    assert [r.hash_ids for r in TraceReader(trace, TraceRules(renumber=True))] == [[0, 1], [0, 2]]


def test_an_id_under_two_prefixes_is_bad_however_ids_are_numbered(trace: Path) -> None:
    trace.write_text(f"{line(hash_ids=[90, 7])}\n{line(hash_ids=[80, 7])}\n", encoding="utf-8")
    with pytest.raises(UsageError, match=r"trace\.jsonl:2: hash id 1 comes after 2 here but came after 0"):
        list(TraceReader(trace, TraceRules(renumber=True)))


@pytest.mark.parametrize("text", ["", "\n\n", '{"x"\n'])
def test_a_file_without_a_request_is_bad_input(text: str, trace: Path) -> None:
    trace.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match="no request in it"):
        list(TraceReader(trace, TraceRules(skip_bad=True)))


def test_a_file_that_cannot_be_read_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nothing\.jsonl: No such file"):
        list(TraceReader(tmp_path / "nothing.jsonl"))
    with pytest.raises(UsageError, match="Is a directory"):
        list(TraceReader(tmp_path))


@pytest.mark.parametrize("name", ["conversation", "synthetic"])
def test_a_published_trace_comes_through_unchanged(name: str, tmp_path: Path) -> None:
    source, copy = published(name), tmp_path / "copy.jsonl"
    assert write_trace(TraceReader(source), copy) == sum(1 for _ in plain(source))
    assert list(plain(copy)) == list(plain(source))
    first = copy.read_text(encoding="utf-8").splitlines()[0]
    assert list(json.loads(first)) == ["timestamp", "input_length", "output_length", "hash_ids"]


def test_a_session_is_written_only_where_there_is_one(trace: Path) -> None:
    write_trace([request([0], session=3), request([1])], trace)
    assert ["session" in entry for entry in plain(trace)] == [True, False]
    assert [r.session for r in TraceReader(trace)] == [3, None]


def test_a_file_appears_only_when_it_is_complete(trace: Path) -> None:
    def broken() -> Iterator[TraceRequest]:
        yield request([0])
        raise UsageError("half way")

    trace.write_text("before", encoding="utf-8")
    with pytest.raises(UsageError, match="half way"):
        write_trace(broken(), trace)
    assert trace.read_text(encoding="utf-8") == "before"
    assert list(trace.parent.iterdir()) == [trace]


def test_a_trace_can_be_written_over_itself(trace: Path) -> None:
    write_trace((request([n], timestamp_ms=n) for n in range(1000)), trace)
    assert write_trace(TraceReader(trace), trace) == 1000
    assert [r.hash_ids for r in TraceReader(trace)] == [[n] for n in range(1000)]


def test_a_folder_that_is_not_there_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file or directory; give a file in a folder"):
        write_trace([request([0])], tmp_path / "no" / "trace.jsonl")


def test_numbering_anew_keeps_what_is_shared() -> None:
    given = [request([5, 9]), request([5, 2]), request([0]), request([5, 9, 1])]
    assert [r.hash_ids for r in renumbered(given)] == [[0, 1], [0, 2], [3], [0, 1, 4]]
