"""Cut and scaled traces share what they shared; text data sets become traces that share what the text shares; the command line."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from fixtures.errors import UsageError
from suite.selftest.traces import naive_hits, plain, published, request
from suite.workload import shape
from suite.workload.__main__ import main
from suite.workload.analyse import analyse
from suite.workload.datasets import BlockNames, TextReader, TextReading
from suite.workload.distributions import Arrivals
from suite.workload.presets import PRESETS
from suite.workload.reader import TraceReader
from suite.workload.rules import TraceChecker, TraceRules
from suite.workload.sessions import SessionTraffic
from suite.workload.trace import TraceRequest, renumbered

pytestmark = pytest.mark.selftest


@pytest.fixture(scope="module")
def conversation() -> list[TraceRequest]:
    return list(TraceReader(published("conversation")))[:3000]


def test_scaled_blocks_share_as_many_blocks_at_every_pool_size(conversation: list[TraceRequest]) -> None:
    scaled = list(shape.scale_tokens(conversation, 512, 32))
    checker = TraceChecker(TraceRules(block_tokens=32))
    assert all(checker.check(r) is r for r in scaled)
    assert [r.hash_ids for r in scaled] == [r.hash_ids for r in conversation]
    sizes = (100, 1000, 10000)
    before, after = analyse(conversation, pools=sizes), analyse(scaled, block_tokens=32, pools=sizes)
    assert [p.blocks for p in after.pools] == [p.blocks for p in before.pools]
    assert [p.requests for p in after.pools] == [p.requests for p in before.pools]
    assert after.infinite.tokens.rate == pytest.approx(before.infinite.tokens.rate, abs=0.002)
    assert after.input_tokens.mean * 16 == pytest.approx(before.input_tokens.mean, rel=0.005)
    assert after.output_tokens.mean * 16 == pytest.approx(before.output_tokens.mean, rel=0.01)


@pytest.mark.parametrize(
    ("tokens", "output", "scaled", "scaled_output"),
    [(512, 16, 32, 1), (513, 17, 33, 1), (1, 1, 1, 1), (511, 24, 32, 2), (496, 800, 31, 50), (1024 + 17, 8, 66, 1)],
)
def test_a_partial_block_keeps_its_proportion_and_never_vanishes(
    tokens: int, output: int, scaled: int, scaled_output: int
) -> None:
    ids = range(-(-tokens // 512))
    (found,) = shape.scale_tokens([request(ids, tokens=tokens, output_tokens=output)], 512, 32)
    assert (found.input_tokens, found.output_tokens, len(found.hash_ids)) == (scaled, scaled_output, -(-scaled // 32))


def test_scaling_up_and_down_again_changes_nothing(conversation: list[TraceRequest]) -> None:
    up = list(shape.scale_tokens(conversation[:200], 512, 1024))
    assert list(shape.scale_tokens(up, 1024, 512)) == conversation[:200]


def test_a_window_keeps_what_its_requests_share_among_themselves(conversation: list[TraceRequest]) -> None:
    cut = list(renumbered(shape.window(conversation, start_s=100, end_s=300, limit=500)))
    wanted = [r for r in conversation if 100_000 <= r.timestamp_ms < 300_000][:500]
    assert [r.timestamp_ms for r in cut] == [r.timestamp_ms - 100_000 for r in wanted]
    assert [(r.input_tokens, r.output_tokens) for r in cut] == [(r.input_tokens, r.output_tokens) for r in wanted]
    checker = TraceChecker(TraceRules())
    assert all(checker.check(r) is r for r in cut)
    assert naive_hits(cut, None, 512, 16) == naive_hits(wanted, None, 512, 16)
    assert naive_hits(cut, 700, 512, 16) == naive_hits(wanted, 700, 512, 16)
    assert naive_hits(cut, None, 512, 16)["blocks"] > 500


def test_a_faster_trace_is_the_same_in_less_time() -> None:
    times = [0, 1, 10, 1000]
    faster = shape.faster([request([n], timestamp_ms=t) for n, t in enumerate(times)], 8)
    assert [r.timestamp_ms for r in faster] == [0, 0.125, 1.25, 125]


@pytest.mark.parametrize(
    ("tokens", "output", "fitted"),
    [
        (300, 100, (300, 100)),
        (400, 100, (400, 100)),
        (400, 101, (384, 101)),
        (200, 400, (200, 300)),
        (900, 10, (448, 10)),
        (900, 900, (192, 250)),
        (100, 900, (100, 400)),
    ],
)
def test_what_is_too_long_is_cut_to_whole_blocks(tokens: int, output: int, fitted: tuple[int, int]) -> None:
    ids = list(range(-(-tokens // 64)))
    (found,) = shape.fit([request(ids, tokens=tokens, output_tokens=output)], 500, 64)
    assert (found.input_tokens, found.output_tokens) == fitted
    assert found.hash_ids == ids[: -(-fitted[0] // 64)]


def test_cut_prompts_go_on_sharing_their_beginning(conversation: list[TraceRequest]) -> None:
    cut = list(shape.fit(conversation, 4096, 512))
    assert max(r.input_tokens + r.output_tokens for r in cut) <= 4096
    checker = TraceChecker(TraceRules())
    renumbered_ = list(renumbered(cut))
    assert all(checker.check(r) is r for r in renumbered_)
    short = [request(r.hash_ids[: len(c.hash_ids)]) for r, c in zip(conversation, cut, strict=True)]
    assert naive_hits(cut, None, 512, 16)["blocks"] == naive_hits(short, None, 512, 16)["blocks"] > 1000


def test_sessions_are_found_again_by_what_prompts_share() -> None:
    """Against the truth of generated traffic, whose system prompts are no reason to join two sessions."""
    traffic = list(SessionTraffic(PRESETS["agentic"]()))[:800]
    found = list(shape.with_sessions(shape.without_sessions(traffic), 512))
    truth: dict[int | None, set[int | None]] = defaultdict(set)
    for true, guessed in zip(traffic, found, strict=True):
        truth[guessed.session].add(true.session)
    joined = sum(len(true) - 1 for true in truth.values())
    assert joined <= 4, (
        "sessions taken for one: where the first of a group was all system prompt, nothing tells the next from it"
    )
    sessions = len({r.session for r in traffic})
    assert sessions > 40
    assert len(truth) < 2 * sessions, "at most its first request, all system prompt, is not seen to be of a session"


def test_a_session_that_is_given_stays() -> None:
    assert [r.session for r in shape.with_sessions([request([0], session=9), request([1])], 512)] == [9, 1]


def test_a_sample_takes_whole_sessions() -> None:
    traffic = list(SessionTraffic(PRESETS["chat"]()))
    sampled = list(shape.sample_sessions(traffic, 0.3, seed=1))
    kept = {r.session for r in sampled}
    assert [r for r in traffic if r.session in kept] == sampled
    assert len(kept) / len({r.session for r in traffic}) == pytest.approx(0.3, abs=0.08)
    assert kept != {r.session for r in shape.sample_sessions(traffic, 0.3, seed=2)}
    assert list(shape.sample_sessions(traffic, 1)) == traffic


# Data sets of text ----------------------------------------------------------------------------------------------------
class Letters:
    """A tokenizer of one token a character."""

    def encode(self, text: str) -> list[int]:
        return [ord(c) for c in text]

    def decode(self, ids: object) -> str:
        raise AssertionError("reading text needs no decoding")


def text_reader(path: Path, *, skip_bad: bool = False, **how: Any) -> TextReader:
    rules = TraceRules(block_tokens=4, skip_bad=skip_bad)
    return TextReader(
        path, Letters(), TextReading(rules=rules, arrivals=Arrivals(rate_per_s=1, kind="constant"), **how)
    )


def write(path: Path, entries: list[Any]) -> Path:
    path.write_text(
        "\n".join(json.dumps(e) for e in entries) if path.suffix == ".jsonl" else json.dumps(entries), encoding="utf-8"
    )
    return path


def shape_of(requests: list[TraceRequest]) -> list[tuple[object, ...]]:
    return [(r.timestamp_ms, r.input_tokens, r.output_tokens, r.hash_ids, r.session) for r in requests]


def test_equal_text_after_equal_text_is_the_same_block() -> None:
    names = BlockNames(4)
    assert names.of([1, 2, 3, 4, 5]) == [0, 1]
    assert names.of([1, 2, 3, 4, 5, 6, 7, 8, 9]) == [0, 2, 3]
    assert names.of([9, 9, 9, 9, 1, 2, 3, 4]) == [4, 5], "the same block elsewhere is another one"
    assert names.of([1, 2, 3, 4, 5]) == [0, 1]


def test_a_custom_data_set_of_vllm_becomes_a_trace(tmp_path: Path) -> None:
    lines = [
        {"prompt": "hello world", "output_tokens": 5},
        {"prompt": "hello wally", "output_tokens": 6, "timestamp": 1500},
    ]
    found = list(text_reader(write(tmp_path / "c.jsonl", lines)).custom())
    assert shape_of(found) == [(0, 11, 5, [0, 1, 2], None), (1500, 11, 6, [0, 3, 4], None)]


def test_a_conversation_becomes_one_request_a_turn_with_all_that_went_before(tmp_path: Path) -> None:
    def said(*words: str) -> dict[str, object]:
        return {
            "id": "x",
            "conversations": [{"from": ("gpt", "human")[n % 2 == 0], "value": w} for n, w in enumerate(words)],
        }

    path = write(tmp_path / "s.json", [said("abcd", "ef", "ghij", "klm", "tail"), said("abcd", "xyz")])
    assert shape_of(list(text_reader(path, think_s=10).sharegpt())) == [
        (0, 4, 2, [0], 0),
        (1000, 4, 3, [0], 1),
        (10000, 10, 3, [0, 1, 2], 0),
    ]
    first_pairs = list(text_reader(path, max_turns=1, output_tokens=9).sharegpt())
    assert [(r.input_tokens, r.output_tokens) for r in first_pairs] == [(4, 9), (4, 9)]


BAD_TEXT = [
    ({"prompt": "x", "output_tokens": 1, "images": []}, "unknown-field", "unknown field `images`"),
    ({"output_tokens": 1}, "missing-field", "`prompt`"),
    ({"prompt": "x"}, "missing-field", "no output_tokens; add the field, or give a length for all"),
    ({"prompt": "", "output_tokens": 1}, "no-input", "the prompt is empty"),
    ({"prompt": "x", "output_tokens": 0}, "no-output", "output_length 0"),
    ({"prompt": 5, "output_tokens": 1}, "wrong-type", "Expected `str`"),
]


@pytest.mark.parametrize(("entry", "reason", "says"), BAD_TEXT)
def test_a_bad_line_of_text_is_named(entry: object, reason: str, says: str, tmp_path: Path) -> None:
    path = write(tmp_path / "c.jsonl", [{"prompt": "fine", "output_tokens": 1}, entry])
    with pytest.raises(UsageError, match=rf"c\.jsonl:2: .*{says}"):
        list(text_reader(path).custom())
    reader = text_reader(path, skip_bad=True)
    assert len(list(reader.custom())) == 1
    assert reader.skipped == {reason: 1}


def test_a_bad_conversation_is_named_by_its_place(tmp_path: Path) -> None:
    path = write(
        tmp_path / "s.json",
        [{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, {"id": 1}],
    )
    with pytest.raises(UsageError, match=r"s\.json:entry 1: .*missing required field `conversations`"):
        list(text_reader(path).sharegpt())
    reader = text_reader(path, skip_bad=True)
    assert len(list(reader.sharegpt())) == 1
    assert reader.skipped == {"missing-field": 1}
    path.write_text("{}", encoding="utf-8")
    with pytest.raises(UsageError, match="not a ShareGPT file"):
        list(text_reader(path).sharegpt())
    path.write_text("[]", encoding="utf-8")
    with pytest.raises(UsageError, match="no request in it"):
        list(text_reader(path).sharegpt())


# Command line ---------------------------------------------------------------------------------------------------------
def test_generate_convert_and_analyse_work_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made, cut = str(tmp_path / "made.jsonl"), str(tmp_path / "cut.jsonl")
    assert main(["generate", "agentic", "--requests", "400", "--seed", "3", "--turns", "constant:5", "-o", made]) == 0
    assert set(next(plain(Path(made)))) == {"timestamp", "input_length", "output_length", "hash_ids"}
    options = [
        "--sample",
        "0.5",
        "--end-s",
        "300",
        "--to-block-tokens",
        "32",
        "--fit",
        "2000",
        "--speed",
        "2",
        "--with-sessions",
    ]
    assert main(["convert", made, "-o", cut, *options]) == 0
    assert 20 < sum(1 for _ in plain(Path(cut))) < 350
    assert max(e["timestamp"] for e in plain(Path(cut))) < 150_000
    assert max(e["input_length"] + e["output_length"] for e in plain(Path(cut))) <= 2000
    capsys.readouterr()
    assert main(["analyse", cut, "--block-tokens", "32", "--pool", "10,100", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["infinite"]["blocks"]["out_of"] == sum(len(e["hash_ids"]) for e in plain(Path(cut)))
    assert [p["pool_blocks"] for p in found["pools"]] == [10, 100]


def test_the_command_line_reaches_every_part_of_a_spec(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = str(tmp_path / "made.jsonl")
    shared = ["--prompt", "256", "--share", "0.75", "--groups", "2", "--answer", "3", "--arrivals", "constant:2"]
    assert main(["generate", "shared-prefix", "--requests", "200", *shared, "-o", made]) == 0
    assert "200 requests, blocks of 32 tokens; system prompts are 75.0% of 51200" in capsys.readouterr().err
    entries = list(plain(Path(made)))
    assert {(e["input_length"], e["output_length"]) for e in entries} == {(256, 3)}
    assert [e["timestamp"] for e in entries[:3]] == [0, 500, 1000]
    assert main(["generate", "prefix-repetition", "--requests", "20", "--block-tokens", "64", "-o", made]) == 0
    assert {len(e["hash_ids"]) for e in plain(Path(made))} == {8}


def test_skipped_lines_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"timestamp":0,"input_length":5,"output_length":1,"hash_ids":[0]}\nnonsense\n', encoding="utf-8")
    assert main(["analyse", str(bad)]) == 4
    assert capsys.readouterr().err.startswith(f"workload: {bad}:2: not a JSON object")
    assert main(["analyse", str(bad), "--skip-bad"]) == 0
    assert "1 bad line(s) skipped: not-json 1" in capsys.readouterr().err
    assert main(["analyse", str(bad), "--skip-bad", "--max-model-len", "5"]) == 4
    assert "beyond-model 1, not-json 1" in capsys.readouterr().err


USAGE = [
    ([], "required"),
    (["generate", "poems"], "invalid choice"),
    (["generate", "chat", "--requests", "0"], "argument --requests: 0 is below 1"),
    (["generate", "chat", "--share", "0.5"], "add --prompt LENGTHS"),
    (["generate", "chat", "--system", "100", "--share", "0.5"], "leave out --prompt, --share and --hit-rate"),
    (["generate", "shared-prefix", "--share", "0.5", "--hit-rate", "0.5"], "leave out --share"),
    (["generate", "chat", "--user", "many"], "--user many: 'many' is no number"),
    (["generate", "chat", "-o", "/nowhere/at/all"], "/nowhere/at/all: No such file or directory"),
    (["analyse", "/nowhere/at/all"], "/nowhere/at/all: No such file or directory"),
    (["analyse", "x", "--pool", "big"], "--pool big: give numbers of blocks"),
    (["analyse", "x", "--model", "no-such-model"], "model no-such-model: no such directory"),
    (["convert", "x", "--from", "sharegpt"], "add --model NAME"),
    (["convert", "x", "--speed", "0"], "speed 0: give a factor above 0"),
    (["convert", "x", "--start-s", "nan"], "argument --start-s: nan is below 0"),
    (["convert", "x", "--fit", "1000"], "prompts are cut to whole blocks of 512, so give 1024 or more"),
    (["convert", "x", "--sample", "2"], "sample 2: give a part above 0, up to 1"),
]


@pytest.mark.parametrize(("argv", "says"), USAGE)
def test_bad_usage_ends_with_4_and_one_line(
    argv: list[str], says: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x").write_text('{"timestamp":0,"input_length":5,"output_length":1,"hash_ids":[0]}\n', encoding="utf-8")
    assert main(argv) == 4
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("workload: ")
    assert says in err
    assert err.count("\n") == 1


def test_a_window_without_requests_is_refused_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = tmp_path / "x", tmp_path / "y"
    source.write_text('{"timestamp":0,"input_length":5,"output_length":1,"hash_ids":[0]}\n', encoding="utf-8")
    assert main(["convert", str(source), "--start-s", "5", "-o", str(target)]) == 4
    assert "no request is left" in capsys.readouterr().err
    assert not target.exists()
