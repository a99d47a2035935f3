"""The replay client against servers of known timing: what it measures, what it refuses, how it goes on."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import time
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fixtures.errors import HarnessError, Untestable, UsageError
from fixtures.pytest_support.skips import skip_untestable
from fixtures.request import Target
from suite.bench import token_server
from suite.selftest import sse_server
from suite.selftest.traces import request
from suite.workload.__main__ import main
from suite.workload.bodies import Bodies
from suite.workload.materialise import Materialiser
from suite.workload.results import ReplayHead, ReplayResult, ResultFile, read_results
from suite.workload.routing import POLICIES, route
from suite.workload.streams import StreamMeter
from suite.workload.summary import Summariser, summarise, summary_table
from suite.workload.trace import TraceRequest, write_trace

pytestmark = [pytest.mark.selftest, pytest.mark.timeout(60)]
alone = pytest.mark.alone
"""Of a test of rates or costs, or one in which a client that is held up reads as one what arrived apart."""

GAP_S = 0.005
LATE_S = 0.9
"""More than this a busy machine does not hold up the client, and no test depends on less."""


@pytest.fixture(scope="module", autouse=True)
def httptools_is_here() -> None:
    if importlib.util.find_spec("httptools") is None:
        skip_untestable(str(Untestable("httptools", "the package cannot be imported", "install the extra bench")))


@pytest.fixture(scope="module")
def server() -> Iterator[sse_server.Running]:
    with sse_server.running() as running:
        yield running


@pytest.fixture(scope="module")
def tokens() -> Iterator[token_server.Running]:
    with token_server.running(GAP_S) as running:
        yield running


def bodies(**behaviour: Any) -> Bodies:
    extra = {"behaviour": behaviour, "return_token_ids": True, "stream_options": {"include_usage": True}}
    return Bodies(Materialiser(range(3, 512), 32), extra if behaviour else None)


def trace(count: int, *, every_ms: float = 0, output: int = 3) -> list[TraceRequest]:
    return [
        request([n], block=32, timestamp_ms=n * every_ms, output_tokens=output, session=n // 3) for n in range(count)
    ]


def replay(
    requests: list[TraceRequest],
    url: str,
    maker: Bodies,
    *,
    file: ResultFile | None = None,
    engines: int = 1,
    **settings: Any,
) -> tuple[list[ReplayResult], Any]:
    from suite.workload.replay import Replay, ReplaySettings  # why here: needs httptools

    found: list[ReplayResult] = []
    targets = {f"e{n}": Target(url, "served") for n in range(engines)}
    state = Replay(requests, targets, maker, ReplaySettings(**settings), file, found.append).run()
    return sorted(found, key=lambda r: r.index), state


# Open loop ------------------------------------------------------------------------------------------------------------
def test_an_open_loop_sends_when_the_trace_says(server: sse_server.Running) -> None:
    found, state = replay(trace(12, every_ms=40), server.url, bodies(first_s=0.01, gap_s=0.002), speed=2)
    assert [r.error for r in found] == [""] * 12
    assert [r.intended_s for r in found] == pytest.approx([0.02 * n for n in range(12)])
    assert all(0 <= r.sent_s - r.intended_s < LATE_S for r in found if r.sent_s is not None)
    assert (state.sent, state.ended, state.failed, state.in_flight, state.tokens) == (12, 12, 0, 0, 36)


@alone
def test_times_are_those_of_the_server(server: sse_server.Running) -> None:
    """Its own log tells when each token left, on the same clock."""
    from suite.workload.replay import Replay, ReplaySettings

    found: list[ReplayResult] = []
    target = {"e0": Target(server.url, "served", {"X-Request-Id": "timed"})}
    run = Replay(trace(1, output=6), target, bodies(first_s=0.05, gap_s=0.03), ReplaySettings(), keep=found.append)
    run.run()
    truth = server.log()["timed"]
    (result,) = found
    assert result.first_s is not None
    assert result.last_s is not None
    assert result.output_tokens == 6
    begun = run._began_s
    assert 0 <= begun + result.first_s - truth.token_s[0] < LATE_S
    assert 0 <= begun + result.last_s - truth.token_s[-1] < LATE_S
    assert len(result.gaps_us) == 5
    assert sum(result.gaps_us) == pytest.approx((result.last_s - result.first_s) * 1e6, abs=10)


def test_a_stall_of_the_server_is_in_the_latency_of_every_request_that_it_held_up() -> None:
    """Coordinated omission: a server that takes one request at a time, 100 ms each, asked every 10 ms.

    The last of ten waits for nine others. Seen from when each was sent alone, a client that waits for answers would never know.
    """
    with one_at_a_time(0.1) as url:
        found, _ = replay(trace(10, every_ms=10), url, bodies(), max_in_flight=1)
    ttft = [r.first_s - r.intended_s for r in found if r.first_s is not None]
    service = [r.first_s - r.sent_s for r in found if r.first_s is not None and r.sent_s is not None]
    assert len(ttft) == 10
    assert min(ttft[-3:]) > 0.6, "the wait before sending counts"
    assert min(service) < 0.5, "and is no part of the service"
    found_summary = summarise(found)
    assert found_summary.ttft.p90 > 3 * found_summary.service_ttft.p50
    assert found_summary.client_behind


@alone
def test_all_is_sent_at_once_where_it_is_due_at_once(tokens: token_server.Running) -> None:
    _, state = replay(trace(60, output=20), tokens.url, bodies())
    assert state.most_in_flight == 60


@alone
def test_the_token_server_keeps_its_rate(tokens: token_server.Running) -> None:
    """What it offers is what clients are measured by; where a tick is late the next ones make up for it."""
    ((result,), _) = replay(trace(1, output=80), tokens.url, bodies())
    assert result.first_s is not None
    assert result.last_s is not None
    assert (result.last_s - result.first_s) / 79 == pytest.approx(GAP_S, rel=0.3)


@alone
def test_a_token_costs_the_client_little(tokens: token_server.Running) -> None:
    """20,000 tokens/s on one core: processor time, the best of three, for more streams than a pool of connections likes."""
    costs = []
    for _ in range(3):
        began = time.process_time()
        _, state = replay(trace(200, output=50), tokens.url, bodies(), concurrency=200)
        assert state.tokens == 10_000
        costs.append((time.process_time() - began) / state.tokens)
        if costs[-1] < 1 / 20_000:
            break
    assert min(costs) < 1 / 20_000


# Closed loop ----------------------------------------------------------------------------------------------------------
def test_a_closed_loop_keeps_its_number_in_flight(server: sse_server.Running) -> None:
    before = len(server.log())
    found, state = replay(trace(24), server.url, bodies(first_s=0.02), concurrency=4)
    assert state.most_in_flight == 4
    assert len(found) == 24
    assert len(server.log()) >= before
    assert not any(r.error for r in found)
    ends = sorted(r.done_s for r in found)
    for nth, due in enumerate(sorted(r.intended_s for r in found)[4:]):
        assert due >= ends[nth] - 0.001, "a request is due when one before it has ended"


# Tokens ---------------------------------------------------------------------------------------------------------------
@alone
def test_tokens_are_counted_right_however_they_are_packed(server: sse_server.Running) -> None:
    for per_chunk in (1, 3, 7):
        ((result,), _) = replay(trace(1, output=10), server.url, bodies(first_s=0.0, per_chunk=per_chunk, gap_s=0.03))
        assert (result.error, result.output_tokens) == ("", 10)
        assert len(result.gaps_us) == -(-10 // per_chunk) - 1


def test_a_server_that_says_otherwise_is_found_out(server: sse_server.Running) -> None:
    cases = {
        "wrong-usage": "count: 3 tokens were read, the server says 4",
        "no-usage": "count: the server sent no usage",
        "no-ids": "",
        "no-done": "stream: it ended without its end marker",
        "no-finish": "stream: no finish reason",
        "abort": "stream: the server ended the answer with 'abort'",
        "error-event": "server: {",
        "bad-json": "stream: not an event of an answer",
        "bad-sse": "stream: not a line of an event stream",
        "reset": "lost: ",
        "close": "lost: ",
        "orderly": "",
        "http-503": 'http 503: {"error": {"message": "no such luck"',
        "stall": "deadline: no whole answer within 0.3 s",
        "reset-before-head": "lost: ",
    }
    for fault, error in cases.items():
        deadline_s = 0.3 if fault == "stall" else 20.0
        ((result,), state) = replay(trace(1), server.url, bodies(fault=fault), deadline_s=deadline_s)
        assert result.error.startswith(error), fault
        assert bool(result.error) == bool(error), fault
        assert state.failed == bool(error)


def test_an_answer_of_another_length_than_asked_for_is_an_error(server: sse_server.Running) -> None:
    maker = bodies(first_s=0.0)
    maker._extra["max_tokens"] = 2
    ((result,), _) = replay(trace(1), server.url, maker)
    assert result.error == "count: 3 tokens were asked for, 2 came"


def test_usage_in_every_event_counts_tokens_and_a_wrong_prompt_length_is_found() -> None:
    meter = StreamMeter()
    for count, now in ((1, 1.0), (4, 1.5), (4, 1.6)):
        usage = {"prompt_tokens": 9, "completion_tokens": count}
        event = {
            "choices": [{"index": 0, "text": "", "finish_reason": "length" if now == 1.6 else None}],
            "usage": usage,
        }
        meter.feed(b"data: " + json.dumps(event).encode() + b"\n\n", now)
    final = {
        "choices": [],
        "usage": {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 8}},
    }
    data = b"data: " + json.dumps(final).encode() + b"\n\ndata: [DONE]\n\n"
    meter.feed(data[:30], 1.7)
    meter.feed(data[30:], 1.8)
    assert (meter.tokens, meter.first_s, meter.last_s, meter.gaps_us, meter.cached_tokens) == (
        4,
        1.0,
        1.5,
        [500_000],
        8,
    )
    assert meter.finish_reading(9) == ""
    assert meter.finish_reading(10) == "count: a prompt of 10 tokens was sent, the server says 9"


def test_every_way_of_cutting_a_stream_into_reads_counts_the_same() -> None:
    events: list[Any] = [{"choices": [{"text": "x", "token_ids": [n], "finish_reason": None}]} for n in range(4)]
    events[-1]["choices"][0]["finish_reason"] = "stop"
    events.append({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 4}})
    stream = b"".join(b"data: " + json.dumps(e).encode() + b"\n\n" for e in events) + b": alive\n\ndata: [DONE]\n\n"
    one = stream.index(b"\n\n") + 2
    for first in range(1, one + 10):
        for size in (len(stream), one, 7):
            meter = StreamMeter()
            cuts = [0, first, *range(first + size, len(stream), size), len(stream)]
            for a, b in pairwise(cuts):
                meter.feed(stream[a:b], 1.0)
            assert (meter.finish_reading(1), meter.tokens, meter.finish) == ("", 4, "stop"), (first, size)


def test_what_only_looks_like_one_whole_event_is_not_taken_for_it() -> None:
    meter = StreamMeter()
    meter.feed(b'data: {"choices": [{"token_ids": [1], "text": "', 1.0)
    meter.feed(b'data: y", "finish_reason": null}]}\n\n', 1.0)
    assert (meter.error, meter.tokens) == ("", 1)
    meter.feed(b"data: [DONE]\nX", 1.0)
    meter.feed(b"YZ\n\n", 1.0)
    assert meter.error == "stream: not a line of an event stream: XYZ"


def test_bodies_hold_exactly_the_tokens_of_the_trace() -> None:
    maker = bodies()
    for r in (request(range(40), tokens=40 * 32 - 5, block=32), request([7], tokens=1, block=32)):
        body = json.loads(asyncio.run(maker.make(r, "name")))
        assert body["prompt"] == maker.materialiser.tokens(r)
        assert (body["model"], body["max_tokens"], body["stream"]) == ("name", r.output_tokens, True)


# Bounds ---------------------------------------------------------------------------------------------------------------
def test_a_replay_is_bounded_in_requests_and_in_time(server: sse_server.Running) -> None:
    found, state = replay(trace(50, every_ms=10), server.url, bodies(first_s=0.0), max_requests=5)
    assert len(found) == 5
    assert "as many as were asked for" in state.stopped
    found, state = replay(trace(50, every_ms=10), server.url, bodies(first_s=0.0), send_for_s=0.1)
    assert [r.index for r in found] == list(range(10))
    assert state.stopped == "sending was to take 0.1 s"


def test_what_answers_nothing_is_given_up(unused_port: int) -> None:
    with pytest.raises(HarnessError, match=r"1\d\d requests failed in a row; the first was connect: .*refused"):
        replay(trace(500), f"http://127.0.0.1:{unused_port}", bodies(), concurrency=10)


def test_a_trace_that_cannot_be_sent_ends_the_replay_with_its_cause(server: sse_server.Running) -> None:
    bad = [*trace(3), request([0, 1], tokens=5, block=32)]
    loops: list[dict[str, Any]] = [{}, {"concurrency": 2}]
    for settings in loops:
        with pytest.raises(UsageError, match="a prompt of 5 tokens has 2 hash ids"):
            replay(bad, server.url, bodies(first_s=0.0), **settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"speed": 0},
        {"concurrency": 0},
        {"deadline_s": -1},
        {"send_for_s": 0},
        {"speed": float("nan")},
        {"speed": 2, "concurrency": 3},
    ],
)
def test_settings_that_make_no_replay_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"give a number above 0|give a concurrency or a speed"):
        replay(trace(1), "http://127.0.0.1:1", bodies(), **settings)


# Routing --------------------------------------------------------------------------------------------------------------
def test_policies_spread_as_they_say() -> None:
    names = ["a", "b", "c"]
    requests = trace(3000)
    chosen = {p: [route(p, names, 1)(n, r) for n, r in enumerate(requests)] for p in POLICIES}
    assert chosen["round-robin"] == names * 1000
    by_session = {(r.session, engine) for r, engine in zip(requests, chosen["sticky"], strict=True)}
    assert len(by_session) == 1000
    for policy in POLICIES:
        assert min(Counter(chosen[policy]).values()) > 850
        assert chosen[policy] == [route(policy, names, 1)(n, r) for n, r in enumerate(requests)]
    assert len({(a == b) for a, b in pairwise(chosen["random"])}) == 2
    for policy in ("sticky", "random"):
        assert chosen[policy] != [route(policy, names, 2)(n, r) for n, r in enumerate(requests)]


def test_requests_go_to_the_engine_that_the_result_names(server: sse_server.Running) -> None:
    found, _ = replay(trace(6), server.url, bodies(first_s=0.0), engines=2)
    assert [r.engine for r in found] == ["e0", "e1"] * 3
    assert [r.session for r in found] == [0, 0, 0, 1, 1, 1]


# Going on -------------------------------------------------------------------------------------------------------------
PLAN: dict[str, str | int | float | None] = {"trace": "x", "speed": 1.0}


def test_a_replay_goes_on_where_it_was_cut_short(server: sse_server.Running, tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    requests = trace(10, every_ms=30)
    first = ResultFile(path, PLAN)
    replay(requests, server.url, bodies(first_s=0.0), file=first, max_requests=4)
    first.close()
    with path.open("ab") as stream:
        stream.write(b'{"kind":"result","ind' + 5000 * b" ")  # the writer was killed
    ResultFile(path, PLAN).close()
    assert path.read_bytes().endswith(b"}\n"), "the cut line is gone, even where nothing is written after it"
    second = ResultFile(path, PLAN)
    assert sorted(second.done) == [0, 1, 2, 3]
    found, state = replay(requests, server.url, bodies(first_s=0.0), file=second)
    second.close()
    assert (state.skipped, [r.index for r in found]) == (4, [4, 5, 6, 7, 8, 9])
    assert [r.intended_s for r in found] == pytest.approx([0.03 * n for n in range(6)]), "the clock begins anew"
    lines = list(read_results(path))
    assert [line.skipped for line in lines if isinstance(line, ReplayHead)] == [0, 4]
    assert sorted(line.index for line in lines if isinstance(line, ReplayResult)) == list(range(10))
    assert summarise(lines).parts == 2


def test_results_of_another_replay_are_not_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    file = ResultFile(path, PLAN)
    file.begin(0.0)
    file.add(result(0, 0, 0.1, 0.2))
    file.close()
    with pytest.raises(UsageError, match=r"results.jsonl:1: .*speed was 1.0, now 2.0"):
        ResultFile(path, {**PLAN, "speed": 2.0})
    again = ResultFile(path, PLAN)
    with pytest.raises(UsageError, match="request 0 had 32 and 3 tokens, the trace says 64 and 3"):
        again.is_done(0, request([0, 1], block=32, output_tokens=3))
    again.close()
    path.write_bytes(b"nonsense\n")
    with pytest.raises(UsageError, match=r"results.jsonl:1: not a line of replay results"):
        ResultFile(path, PLAN)


# Figures --------------------------------------------------------------------------------------------------------------
def result(index: int, intended: float, sent: float, first: float, **changes: Any) -> ReplayResult:
    made = ReplayResult(
        index=index,
        engine="e0",
        input_tokens=32,
        asked_tokens=3,
        output_tokens=3,
        intended_s=intended,
        sent_s=sent,
        first_s=first,
        last_s=first + 0.2,
        done_s=first + 0.2,
        gaps_us=[50_000, 150_000],
        status=200,
    )
    return msgspec.structs.replace(made, **changes)


def test_figures_by_hand() -> None:
    lines = [result(n, n, n, n + (n + 1) / 100, cached_tokens=16) for n in range(100)]
    lines.append(result(100, 100, 100, 100.5, error="http 500: x"))
    found = summarise(lines, ttft_limit_s=0.5)
    assert (found.requests, found.failed, found.errors, found.parts) == (101, 1, {"http 500": 1}, 1)
    assert [found.ttft.p50, found.ttft.p90, found.ttft.p99, found.ttft.greatest] == pytest.approx([500, 900, 990, 1000])
    assert found.itl is not None
    assert found.itl.count == 200
    assert [found.itl.p50, found.itl.p90] == pytest.approx([50, 150])
    assert found.tpot is not None
    assert found.tpot.mean == pytest.approx(100)
    assert found.e2e.p50 == pytest.approx(700)
    assert found.duration_s == pytest.approx(100.7)
    assert found.output_tokens_per_s == pytest.approx(300 / 100.7)
    assert found.goodput_per_s == pytest.approx(50 / 100.7)
    assert found.within_limit == pytest.approx(50 / 101)
    assert (found.cached_tokens, found.input_tokens) == (1600, 3200)
    assert not found.client_behind
    assert "50.00% of 3,200" in summary_table(found)


def test_a_late_client_is_told() -> None:
    found = summarise([result(n, n, n + 0.03, n + 0.1) for n in range(10)])
    assert found.client_behind
    assert "NOTE the client was behind by 30 ms" in summary_table(found)
    assert found.service_ttft.p50 == pytest.approx(70)


def test_nothing_has_no_figures() -> None:
    with pytest.raises(HarnessError, match=r"of 0 requests none was answered whole \(none was sent\)"):
        Summariser().result()
    with pytest.raises(HarnessError, match=r"of 1 requests none was answered whole \(connect 1\)"):
        summarise([result(0, 0, 0, 1, error="connect: no")])


# Command line ---------------------------------------------------------------------------------------------------------
def test_replay_on_the_command_line(
    tokens: token_server.Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    config = {
        "vocab_size": 512,
        "max_position_embeddings": 4096,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "hidden_size": 8,
    }
    (model / "config.json").write_text(
        json.dumps({"architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 1, **config})
    )
    (model / "model.safetensors").write_bytes(b"")
    file, results = str(tmp_path / "t.jsonl"), str(tmp_path / "r.jsonl")
    write_trace(trace(9), file)
    common = [
        "replay",
        file,
        "--url",
        tokens.url,
        "--url",
        f"b={tokens.url}/v1",
        "--model",
        str(model),
        "--block-tokens",
        "32",
    ]
    assert main([*common, "--results", results, "--max-requests", "5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["requests"] == 5
    assert main([*common, "--results", results, "--policy", "sticky"]) == 4
    assert "policy was round-robin, now sticky" in capsys.readouterr().err
    assert main([*common, "--results", results, "--ttft-limit-s", "5"]) == 0
    out, err = capsys.readouterr()
    assert "going on, 5 requests are done already" in err
    assert "9 requests in" in out
    assert "and 2 parts" in out
    assert "(100.0% of all)" in out
    for argv, says in (
        ([*common[:2], "--url", "localhost", *common[6:]], "--url localhost: give http://HOST:PORT"),
        ([*common[:2], "--url", "a=http://x", "--url", "a=http://y", *common[6:]], "two engines are called a"),
    ):
        assert main(argv) == 4
        assert says in capsys.readouterr().err


# Servers of this module -----------------------------------------------------------------------------------------------
@pytest.fixture
def unused_port() -> int:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


class one_at_a_time:  # noqa: N801 - used like a function
    """A server that answers one request after another, each after ``service_s``; in a thread, as its times need no precision."""

    def __init__(self, service_s: float) -> None:
        import http.server
        import threading

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["content-length"]))
                time.sleep(service_s)  # why: the known service time is this server's whole purpose
                usage = {"prompt_tokens": 32, "completion_tokens": 3}
                body = {"choices": [{"text": "x", "finish_reason": "length"}], "usage": usage}
                final = {"choices": [], "usage": usage}
                self.send_response(200)
                self.end_headers()
                self.wfile.write(f"data: {json.dumps(body)}\n\ndata: {json.dumps(final)}\n\ndata: [DONE]\n\n".encode())

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        self.server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True)

    def __enter__(self) -> str:
        self.thread.start()
        return f"http://127.0.0.1:{self.server.server_port}"

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()
