"""The client against a server whose truth is known: what it reports, when it says it happened, and every way to fail.

The server runs in another process and writes down its own times on the same clock, so arrival minus sending is the client's
error, and it cannot be negative. On an idle machine the median error stays under 1 ms. On a busy one the median says more about
the machine: it is then compared with a plain blocking socket measured in turn with the client, and the smallest error of all,
which load does not move, carries the check: a client that is late by construction is late every time.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from fixtures.answer import AnswerReader
from fixtures.client import Client, Request, Target
from fixtures.errors import HarnessError
from fixtures.sse import SseError, SseParser
from fixtures.waiting import wait_for
from reports import records as r
from suite.selftest import sse_server
from suite.selftest.sse_server import Running, Served, token_ids

pytestmark = pytest.mark.selftest
alone = pytest.mark.alone
"""Of a test with an upper bound below a second, or one that reads what arrived apart from what arrived together."""

PROMPT = (5, 6, 7)
LIMIT_S = 0.001
"""Largest median error of a time to first token on an idle machine."""


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with sse_server.running() as running:
        yield running


@dataclass
class Bench:
    """A client on the server, and everything it recorded."""

    client: Client
    server: Running
    records: list[r.Record] = field(default_factory=list)

    def request(
        self, fault: str = "", *, prompt: tuple[int, ...] = PROMPT, behaviour: Any = None, **fields: Any
    ) -> Request:
        how = {"fault": fault} | (behaviour or {})
        extra = {"behaviour": how} | fields.pop("extra", {})
        return Request("e0", prompt, extra=extra, **fields)

    def send(self, fault: str = "", **fields: Any) -> r.Observation:
        return self.client.send(self.request(fault, **fields), case_id="case", phase="phase")

    def served(self, observation: r.Observation) -> Served:
        return self.server.log()[observation.request_id]


@pytest.fixture
def make(server: Running) -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def build(kind: type[Client] = Client) -> Bench:
        records: list[r.Record] = []
        bench = Bench(kind({"e0": Target(server.url, "m")}, records.append, 20.0), server, records)
        made.append(bench)
        return bench

    yield build
    for bench in made:
        bench.client.close()


@pytest.fixture
def bench(make: Callable[..., Bench]) -> Bench:
    return make()


# What it reports --------------------------------------------------------------------------------------------------------
def test_a_good_answer_is_reported_in_full(bench: Bench) -> None:
    behaviour = {"cached": 2}
    seen = bench.send(behaviour=behaviour, max_tokens=4, logprobs=3, cache_salt="s", role="cold", extra={"seed": 7})
    assert seen.ok, seen
    assert seen.prompt_token_ids == PROMPT
    assert seen.output_token_ids == tuple(token_ids(list(PROMPT), 4))
    first = seen.output_token_ids[0]
    assert seen.top_logprobs[0] == ((first, -0.5), ((first + 7) % 512, -1.5), ((first + 14) % 512, -2.5))
    assert len(seen.top_logprobs) == 4
    assert seen.token_logprobs == (-0.5,) * 4
    assert (seen.http_status, seen.finish_reason, seen.usage_prompt_tokens, seen.cached_tokens) == (200, "length", 3, 2)
    assert (seen.case_id, seen.phase, seen.engine, seen.role, seen.cache_salt) == ("case", "phase", "e0", "cold", "s")
    assert seen.sampling["seed"] == 7
    assert seen.sampling["temperature"] == 0.0
    assert "prompt" not in seen.sampling
    assert seen.deadline_s == 20.0
    assert len(seen.text) == 4
    assert bench.served(seen).salt == "s"
    assert bench.records == [seen]


def test_top_logprobs_are_sorted_best_first() -> None:
    # As for a sampled token that is not the likeliest one: the server lists it first all the same.
    reader = AnswerReader({"stream": True, "logprobs": 2, "return_token_ids": True})
    top = {"token_id:9": -3.0, "token_id:4": -0.1, "token_id:2": -0.1}
    logprobs = {"tokens": ["token_id:9"], "token_logprobs": [-3.0], "top_logprobs": [top]}
    choice = {"index": 0, "text": "", "token_ids": [9], "logprobs": logprobs, "finish_reason": "stop"}
    assert reader.feed(f"data: {json.dumps({'choices': [choice]})}\n\ndata: [DONE]\n\n".encode(), 1.0)
    reader.end()
    assert reader.error == ""
    assert reader.choices[0].top_logprobs == (((2, -0.1), (4, -0.1), (9, -3.0)),)


def test_chat_answers_have_another_shape() -> None:
    """Chunks as vLLM 0.32.0 sends them: a role first, log probabilities under ``content``, prompt ids beside the choices."""
    top = [{"token": "token_id:9", "logprob": -0.5}, {"token": "token_id:4", "logprob": -1.5}]
    step = {"token": "token_id:9", "logprob": -0.5, "top_logprobs": top}
    chunks: list[dict[str, Any]] = [
        {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}], "prompt_token_ids": [1, 2]},
        {
            "choices": [
                {
                    "index": 0,
                    "delta": {"content": "hi"},
                    "logprobs": {"content": [step]},
                    "finish_reason": "length",
                    "token_ids": [9],
                }
            ]
        },
        {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 1}},
    ]
    reader = AnswerReader({"stream": True, "stream_options": {"include_usage": True}, "logprobs": True})
    for at, chunk in enumerate(chunks):
        assert reader.feed(f"data: {json.dumps(chunk)}\n\n".encode(), float(at))
    assert reader.feed(b"data: [DONE]\n\n", 9.0)
    reader.end()
    assert reader.error == ""
    assert (reader.prompt_token_ids, reader.first_token_s) == ((1, 2), 1.0)
    assert reader.choices[0].output_token_ids == (9,)
    assert reader.choices[0].top_logprobs == (((9, -0.5), (4, -1.5)),)
    assert reader.choices[0].text == "hi"


@pytest.mark.parametrize("logprobs", [None, 0])
def test_fewer_logprobs_are_no_error(bench: Bench, logprobs: int | None) -> None:
    seen = bench.send(logprobs=logprobs)
    assert seen.ok, seen
    assert len(seen.output_token_ids) == 8
    assert len(seen.token_logprobs) == (0 if logprobs is None else 8)


@alone
def test_several_tokens_a_chunk_and_split_events(bench: Bench) -> None:
    seen = bench.send(behaviour={"per_chunk": 3, "dribble": True, "gap_s": 0.01}, max_tokens=7)
    assert seen.ok, seen
    assert seen.output_token_ids == tuple(token_ids(list(PROMPT), 7))
    assert len(seen.token_s) == 7
    assert len(set(seen.token_s)) == 3, "tokens of one chunk share a time"
    assert min(a - s for a, s in zip(seen.token_s, bench.served(seen).token_s, strict=True)) > 0.009, "half an event"


def test_no_stream(bench: Bench) -> None:
    seen = bench.send(stream=False, max_tokens=4)
    assert seen.ok, seen
    assert seen.output_token_ids == tuple(token_ids(list(PROMPT), 4))
    assert seen.first_token_s == seen.done_s
    assert seen.token_s == (seen.done_s,) * 4
    assert bench.send("wrong-usage", stream=False).error.startswith("mismatch: usage")


def test_further_choices_are_kept(bench: Bench) -> None:
    seen = bench.send(extra={"n": 2}, max_tokens=3)
    assert seen.ok, seen
    assert [len(c.output_token_ids) for c in seen.more_choices] == [3]
    assert seen.more_choices[0].output_token_ids != seen.output_token_ids
    assert len(seen.more_choices[0].top_logprobs) == 3


def test_secrets_of_a_target_do_not_enter_the_evidence(bench: Bench) -> None:
    target = Target(bench.server.url, "m", headers={"authorization": "Bearer hush"})
    bench.client.set_target("e0", target)
    assert bench.send().ok
    assert "hush" not in repr(bench.records) + repr(target)


def test_a_proxy_of_the_environment_is_not_used(make: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    assert make().send().ok


# When it says it happened -----------------------------------------------------------------------------------------------
def ttft_errors_s(bench: Bench, count: int) -> list[float]:
    """The client's time to first token minus the server's, for requests sent one after the other."""
    seen = [bench.send(max_tokens=1) for _ in range(count)]
    assert all(o.ok for o in seen), seen
    log = bench.server.log()
    return [(o.ttft_s or 0.0) - (log[o.request_id].token_s[0] - log[o.request_id].received_s) for o in seen]


def socket_errors_s(server: Running, count: int) -> list[float]:
    """The same, measured by the simplest client there is: a blocking socket."""
    address = urlsplit(server.url)
    sent: dict[str, float] = {}
    for i in range(count):
        name = f"socket-{os.getpid()}-{time.monotonic_ns()}-{i}"
        body = json.dumps({"prompt": PROMPT, "max_tokens": 1, "stream": True}).encode()
        with socket.create_connection((address.hostname or "", address.port or 0), timeout=10) as sock:
            started_s = time.monotonic()
            head = f"POST /v1/completions HTTP/1.1\r\nx-request-id: {name}\r\ncontent-length: {len(body)}\r\n\r\n"
            sock.sendall(head.encode() + body)
            data = b""
            while b"token_ids" not in data:
                data = sock.recv(65536)
                assert data
            sent[name] = time.monotonic() - started_s
    log = server.log()
    return [ttft - (log[name].token_s[0] - log[name].received_s) for name, ttft in sent.items()]


def assert_on_time(bench: Bench) -> None:
    """The check itself; the tests below show that it fails for clients that are late or early."""
    errors, plain = [], []
    for _ in range(4):  # in turn: both see the same machine
        errors += ttft_errors_s(bench, 6)
        plain += socket_errors_s(bench.server, 6)
    limit_s = max(LIMIT_S, 3 * statistics.median(plain))
    report = (
        f"time to first token, client minus server: min {min(errors) * 1e3:.2f}, median"
        f" {statistics.median(errors) * 1e3:.2f} ms (limits 0..{LIMIT_S * 1e3:g} and {limit_s * 1e3:.2f} ms)"
    )
    assert 0 <= min(errors) < LIMIT_S, report
    assert statistics.median(errors) < limit_s, report


class LateClient(Client):
    """Looks at the clock 5 ms after the bytes came."""

    def arrival_s(self) -> float:
        return super().arrival_s() + 0.005


class EarlyClient(Client):
    """Takes some earlier moment (the head, say) for the first token."""

    def arrival_s(self) -> float:
        return super().arrival_s() - 0.005


@alone
def test_time_to_first_token_is_right(bench: Bench) -> None:
    assert_on_time(bench)


@alone
@pytest.mark.parametrize("kind", [LateClient, EarlyClient])
def test_a_client_that_measures_wrong_is_caught(make: Callable[..., Bench], kind: type[Client]) -> None:
    with pytest.raises(AssertionError, match="time to first token"):
        assert_on_time(make(kind))


def test_head_and_empty_chunks_are_no_first_token(bench: Bench) -> None:
    seen = bench.send(behaviour={"prelude": True, "connect_s": 0.02, "first_s": 0.08})
    served = bench.served(seen)
    assert seen.ok, seen
    assert served.head_s is not None
    assert served.token_s[0] - served.head_s > 0.07, "else this test cannot tell them apart"
    assert seen.first_token_s is not None
    assert seen.first_token_s >= served.token_s[0]
    assert seen.token_s[0] == seen.first_token_s


@alone
def test_every_token_has_its_time(bench: Bench) -> None:
    seen = bench.send(behaviour={"gap_s": 0.01}, max_tokens=20)
    served = bench.served(seen)
    lag = [a - s for a, s in zip(seen.token_s, served.token_s, strict=True)]
    assert all(x >= 0 for x in lag), lag
    assert min(lag) < LIMIT_S, lag
    assert len(set(seen.token_s)) == 20, "each when it came, not when the answer was whole"
    assert seen.sent_s <= served.received_s
    assert served.done_s is not None
    assert seen.done_s >= max(served.done_s, *seen.token_s)


def plain_cost_s(server: Running, tokens: int, gap_s: float) -> float:
    """CPU seconds a token of the least that asyncio can do: read the bytes and drop them."""

    async def read() -> float:
        address = urlsplit(server.url)
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        body = json.dumps({"prompt": PROMPT, "max_tokens": tokens, "stream": True, "behaviour": {"gap_s": gap_s}})
        writer.write(f"POST /v1/completions HTTP/1.1\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode())
        before_s = time.thread_time()
        while b"[DONE]" not in await reader.read(65536):
            pass
        cost_s = (time.thread_time() - before_s) / tokens
        writer.close()
        await writer.wait_closed()
        return cost_s

    return asyncio.run(read())


def assert_cheap(bench: Bench) -> None:
    """At most 2% of a core at a token every 20 ms; waking up alone differs tenfold between machines, so where it is dear the
    client may cost four times what asyncio itself does (measured: 1.9 to 2.7). The best of three: load adds, it never takes away."""
    costs, plain = [], []
    for _ in range(3):
        request = bench.request(max_tokens=30, behaviour={"gap_s": 0.004})
        pending = bench.client.start(request, case_id="case", phase="phase")
        assert pending.wait_first_token(5.0)
        before_s = bench.client.cpu_s()
        assert pending.result(5.0).ok
        costs.append((bench.client.cpu_s() - before_s) / 30)
        plain.append(plain_cost_s(bench.server, 30, 0.004))
        limit_s = max(0.02 * 0.020, 4 * min(plain))
        if 0 < min(costs) < limit_s:
            return
    raise AssertionError(f"CPU time a token: {min(costs) * 1e6:.0f} us (limit: {limit_s * 1e6:.0f})")


class DearClient(Client):
    """Burns CPU for each piece that arrives."""

    def arrival_s(self) -> float:
        until_s = time.thread_time() + 0.002
        while time.thread_time() < until_s:
            pass
        return super().arrival_s()


@alone
def test_a_token_costs_little(bench: Bench) -> None:
    assert_cheap(bench)


@alone
def test_a_dear_client_is_caught(make: Callable[..., Bench]) -> None:
    with pytest.raises(AssertionError, match="CPU time a token"):
        assert_cheap(make(DearClient))


# How it fails -----------------------------------------------------------------------------------------------------------
FAILURES = [
    # fault, status, error
    ("reset-before-head", None, r"lost: ConnectionResetError: .*, before an answer began"),
    ("close-before-head", None, r"lost: RemoteProtocolError: .*, before an answer began"),
    ("http-400", 400, r"http 400: BadRequestError \(400\): no such luck"),
    ("http-500", 500, r"http 500: BadRequestError \(500\): no such luck"),
    ("html", 502, r"http 502: <html><body>Bad Gateway</body></html>"),
    ("reset", 200, r"lost: ConnectionResetError: .*, after 1 tokens"),
    ("close", 200, r"lost: RemoteProtocolError: .*, after 1 tokens"),
    ("orderly-end", 200, r"incomplete: the stream ended without \[DONE\], after 1 tokens"),
    ("no-done", 200, r"incomplete: the stream ended without \[DONE\], after 8 tokens"),
    ("inside-event", 200, r"incomplete: the stream ended inside an event, after 1 tokens"),
    ("early-done", 200, r"incomplete: no finish reason, after 1 tokens"),
    ("no-finish", 200, r"incomplete: no finish reason, after 8 tokens"),
    ("no-usage", 200, r"incomplete: no usage"),
    ("no-ids", 200, r"incomplete: token ids were asked for, .*"),
    ("bad-json", 200, r"malformed: JSON is malformed: .*"),
    ("bad-sse", 200, r"malformed: not a line of an event stream: Internal Server Error"),
    ("after-done", 200, r"malformed: an event after \[DONE\]: .*"),
    ("decoded-tokens", 200, r"malformed: a token is not written as token_id:N: .*"),
    ("other-choice", 200, r"malformed: choice 3 of 1"),
    ("error-event", 200, r"engine: BadRequestError \(500\): Internal server error"),
    ("abort", 200, r"aborted: the engine gave up \(finish reason abort\)"),
    ("wrong-usage", 200, r"mismatch: usage counts 9 generated tokens, 8 arrived"),
    ("missing-logprob", 200, r"mismatch: 1 token ids with 1 tokens, 0 log probabilities and 1 lists .*"),
    ("no-logprobs", 200, r"mismatch: 1 token ids with 0 tokens, .*"),
    ("other-token", 200, r"mismatch: token 0 is \d+ by its id and token_id:511 by its log probability"),
    ("two-values", 200, r"mismatch: token 0 has log probability -0.5 and, among the top ones, -0.25"),
    ("nan", 200, r"mismatch: a log probability of token 0 is not a number"),
    ("other-prompt", 200, r"mismatch: answers another prompt \(3 for 3 tokens\), from token 2 on"),
]


@pytest.mark.parametrize(("fault", "status", "error"), FAILURES, ids=[f[0] for f in FAILURES])
def test_every_failure_is_an_observation(bench: Bench, fault: str, status: int | None, error: str) -> None:
    seen = bench.send(fault)
    assert re.fullmatch(error, seen.error), seen.error
    assert seen.http_status == status
    assert not seen.ok
    assert not seen.timed_out
    assert not seen.cancelled
    assert seen.sent_s <= seen.done_s
    assert bench.records == [seen]


def test_refused_connection(bench: Bench) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))  # bound, not listening: nobody else gets it
        bench.client.set_target("e0", Target(f"http://127.0.0.1:{sock.getsockname()[1]}", "m"))
        seen = bench.send()
        probe = bench.client.health("e0", 1.0)
    assert seen.error == "connect: ConnectionRefusedError: Connection refused"
    assert (seen.http_status, seen.ok) == (None, False)
    assert probe.error == seen.error
    assert bench.records == [seen, probe]


def test_health(bench: Bench) -> None:
    probe = bench.client.health("e0", 5.0)
    assert (probe.engine, probe.http_status, probe.error) == ("e0", 200, "")
    assert bench.records == [probe]


@alone
@pytest.mark.parametrize(
    ("fault", "status", "tokens", "error"),
    [
        ("never-head", None, 0, "deadline: 0.15 s ran out before an answer began"),
        ("stall", 200, 1, "deadline: 0.15 s ran out after 1 tokens"),
    ],
)
def test_deadline(bench: Bench, fault: str, status: int | None, tokens: int, error: str) -> None:
    seen = bench.send(fault, deadline_s=0.15)
    assert (seen.timed_out, seen.ok, seen.http_status, seen.error) == (True, False, status, error)
    assert len(seen.output_token_ids) == tokens
    assert 0.1 < seen.duration_s < 1.0
    assert seen.deadline_s == 0.15
    assert gone(bench, seen)


def test_deadline_covers_the_connection(bench: Bench) -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        address = full.getsockname()
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:  # the queue of a server that accepts nothing: later connections get no answer
            filler.setblocking(False)
            filler.connect_ex(address)
        bench.client.set_target("e0", Target(f"http://127.0.0.1:{address[1]}", "m"))
        seen = bench.send(deadline_s=0.15)
        probe = bench.client.health("e0", 0.1)
        for filler in fillers:
            filler.close()
    assert seen.error == "deadline: 0.15 s ran out before the connection was made"
    assert seen.timed_out
    assert 0.15 <= seen.duration_s < 1.0
    assert probe.error == "deadline: no answer within 0.1 s"


def gone(bench: Bench, seen: r.Observation) -> bool:
    """The server has seen the client leave."""
    _, waited = wait_for(
        "the server to see the client leave",
        lambda: bench.served(seen).gone_s,
        bound_s=5.0,
        bound_source="loopback; far more than a close takes",
        poll_s=0.01,
    )
    return waited.elapsed_s < waited.bound_s


def test_cancel_closes_the_connection(bench: Bench) -> None:
    pending = bench.client.start(bench.request("stall"), case_id="case", phase="phase")
    assert pending.wait_first_token(5.0)
    assert not pending.done()
    pending.cancel()
    pending.cancel()
    seen = pending.result(5.0)
    assert (seen.cancelled, seen.timed_out, seen.ok) == (True, False, False)
    assert seen.error == "cancelled: after 1 tokens"
    assert len(seen.output_token_ids) == 1
    assert bench.records == [seen]
    assert gone(bench, seen)
    pending.cancel()  # nothing left to cancel


def test_cancel_before_it_began(bench: Bench) -> None:
    pending = bench.client.start(bench.request("stall"), case_id="case", phase="phase")
    pending.cancel()
    seen = pending.result(5.0)
    assert seen.cancelled
    assert bench.records == [seen]


def test_cancel_after_the_end_changes_nothing(bench: Bench) -> None:
    pending = bench.client.start(bench.request(), case_id="case", phase="phase")
    seen = pending.result(5.0)
    pending.cancel()
    assert seen.ok
    assert pending.result() is seen


def test_wait_first_token_says_no(bench: Bench) -> None:
    failing = bench.client.start(bench.request("http-500"), case_id="case", phase="phase")
    assert not failing.wait_first_token(5.0), "ended without one"
    stuck = bench.client.start(bench.request("never-head"), case_id="case", phase="phase")
    assert not stuck.wait_first_token(0.05)
    with pytest.raises(TimeoutError):
        stuck.result(0.01)
    stuck.cancel()
    assert stuck.result(5.0).cancelled


# Many at once -----------------------------------------------------------------------------------------------------------
@alone
@pytest.mark.parametrize(("concurrency", "first_s"), [(1, 0.005), (3, 0.03), (12, 0.2)])
def test_concurrency_is_bounded(bench: Bench, concurrency: int, first_s: float) -> None:
    requests = [bench.request(prompt=(i,), behaviour={"first_s": first_s}) for i in range(12)]
    seen = bench.client.send_all(requests, case_id="case", phase="phase", concurrency=concurrency)
    assert [o.prompt_token_ids for o in seen] == [(i,) for i in range(12)], "in the order of the requests"
    assert all(o.ok for o in seen)
    log = bench.server.log()
    assert max(log[o.request_id].at_once for o in seen) == concurrency


@alone
def test_a_deadline_starts_with_its_turn(bench: Bench) -> None:
    requests = [bench.request(behaviour={"first_s": 0.15}, deadline_s=0.4) for _ in range(3)]
    seen = bench.client.send_all(requests, case_id="case", phase="phase", concurrency=1)
    assert [o.timed_out for o in seen] == [False] * 3


@alone
def test_two_hundred_streams(bench: Bench) -> None:
    requests = [
        bench.request(prompt=(i, 1), max_tokens=5, behaviour={"first_s": 0.3, "gap_s": 0.02}) for i in range(200)
    ]
    seen = bench.client.send_all(requests, case_id="case", phase="phase", concurrency=200)
    assert [o.error for o in seen] == [""] * 200
    assert [o.output_token_ids for o in seen] == [tuple(token_ids([i, 1], 5)) for i in range(200)]
    log = bench.server.log()
    assert max(log[o.request_id].at_once for o in seen) > 100, "else they were not streams at one time"
    assert len({o.request_id for o in seen}) == 200
    assert sorted(bench.records, key=id) == sorted(seen, key=id)


def test_threads_share_a_client(bench: Bench) -> None:
    def work(start: int) -> None:
        for i in range(start, start + 5):
            assert bench.send(prompt=(i,)).output_token_ids == tuple(token_ids([i], 8))

    threads = [threading.Thread(target=work, args=(100 * n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(bench.records) == 40


# Misuse and the end -----------------------------------------------------------------------------------------------------
def test_misuse_raises(bench: Bench) -> None:
    with pytest.raises(HarnessError, match="no engine 'e7'; known: e0"):
        bench.client.send(Request("e7", PROMPT), case_id="case", phase="phase")
    with pytest.raises(HarnessError, match="needs extra="):
        bench.client.send(Request("e0", endpoint="chat"), case_id="case", phase="phase")
    with pytest.raises(HarnessError, match="concurrency 0"):
        bench.client.send_all([], case_id="case", phase="phase", concurrency=0)
    bench.client.close()
    bench.client.close()
    for call in (bench.send, lambda: bench.client.health("e0", 1.0), bench.client.cpu_s):
        with pytest.raises(HarnessError, match="closed"):
            call()
    assert bench.records == []


def test_a_record_that_cannot_be_written_is_not_swallowed(server: Running) -> None:
    def full(record: r.Record) -> None:
        raise OSError(28, "No space left on device")

    with Client({"e0": Target(server.url, "m")}, full, 5.0) as client, pytest.raises(OSError, match="No space"):
        client.send(Request("e0", PROMPT), case_id="case", phase="phase")


def test_close_leaves_nothing(server: Running) -> None:
    me = psutil.Process()
    before = (set(threading.enumerate()), len(me.net_connections()), me.num_fds())
    records: list[r.Record] = []
    client = Client({"e0": Target(server.url, "m")}, records.append, 30.0)
    bench = Bench(client, server, records)
    assert bench.send().ok
    pending = [client.start(bench.request("stall"), case_id="case", phase="phase") for _ in range(3)]
    assert all(p.wait_first_token(5.0) for p in pending)
    assert len(me.net_connections()) >= before[1] + 3, "else this test sees no sockets"
    client.close()
    assert all(p.result(0).cancelled for p in pending), "what was under way is recorded as cancelled"
    assert len(records) == 4
    assert (set(threading.enumerate()), len(me.net_connections()), me.num_fds()) == before


# Event streams ----------------------------------------------------------------------------------------------------------
STREAM = b': hello\r\ndata: {"a":\ndata: 1}\r\n\r\nevent: x\nid: 1\ndata:two\n\n\ndata: [DONE]\n\n'
EVENTS = [b'{"a":\n1}', b"two", b"[DONE]"]


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_events_do_not_depend_on_how_bytes_arrive(size: int) -> None:
    parser = SseParser()
    found = [event for at in range(0, len(STREAM), size) for event in parser.feed(STREAM[at : at + size])]
    assert found == EVENTS
    assert not parser.pending


@pytest.mark.parametrize("tail", [b"data: 1\n", b"dat", b"data: 1"])
def test_an_event_that_has_not_ended_is_seen(tail: bytes) -> None:
    parser = SseParser()
    assert parser.feed(b"data: 0\n\n" + tail) == [b"0"]
    assert parser.pending


@pytest.mark.parametrize("line", [b'{"error": {}}', b"Internal Server Error", b"dat: 1"])
def test_text_between_events_is_refused(line: bytes) -> None:
    with pytest.raises(SseError, match="not a line"):
        SseParser().feed(b"data: 0\n\n" + line + b"\n\n")
