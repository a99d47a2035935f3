"""A server that streams tokens as fast as one core can, to measure load clients against. It computes nothing.

It answers ``POST /v1/completions`` in vLLM's format (0.32.0): one event a token, ``max_tokens`` of them, one every ``gap_s``; and
``GET /v1/models`` and ``/health``. Streams are served in turn, an equal part of them at each tick, so tokens leave evenly
spread. ``GET /stats`` tells what it sent, and how late its own ticks were: a server that is late offers less than it says.

Run it with ``python -m suite.bench.token_server GAP_S [CORE]``; the first line it prints is its port. It ends when its stdin closes.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

ROOT = Path(__file__).parents[2]
TICKS = 20
"""Parts that the streams are divided into."""

_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
_CHOICE = (
    b'{"id":"cmpl-0123456789abcdef","object":"text_completion","created":1700000000,"model":"served","choices":[{"index":0,'
    b'"text":" word","logprobs":null,"finish_reason":%b,"stop_reason":null,"prompt_token_ids":null,"token_ids":null}]'
)


class _Stop(msgspec.Struct):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class _Body(msgspec.Struct):
    prompt: msgspec.Raw = msgspec.Raw()
    max_tokens: int | None = None
    stream: bool = False
    stream_options: _Stop | None = None


_decode = msgspec.json.Decoder(_Body).decode


@dataclass
class Stats:
    """What a server did so far."""

    streams: int = 0
    """Answers begun."""
    open: int = 0
    most_open: int = 0
    tokens: int = 0
    ticks: int = 0
    latest_tick_s: float = 0.0
    """The most that a tick was late, since a stream was opened when none was."""
    last_token_s: float = 0.0
    """When the last token was sent, on CLOCK_MONOTONIC."""


class _Stream(asyncio.Protocol):
    """One connection."""

    transport: asyncio.Transport

    def __init__(self, server: TokenServer) -> None:
        self.server = server
        self.received = bytearray()
        self.left = 0
        self.sent = 0
        self.prompt_tokens = 0
        self.options = _Stop()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.received += data
        end = self.received.find(b"\r\n\r\n")
        if end < 0:
            return
        length = _LENGTH.search(self.received, 0, end)
        size = int(length[1]) if length else 0
        if len(self.received) >= end + 4 + size:
            head, body = bytes(self.received[:end]), bytes(self.received[end + 4 : end + 4 + size])
            del self.received[: end + 4 + size]
            self.answer(head.split(b" ", 2)[1], body)

    def answer(self, path: bytes, body: bytes) -> None:
        if path != b"/v1/completions":
            known = {
                b"/stats": self.server.stats,
                b"/v1/models": {"object": "list", "data": [{"id": "served", "object": "model"}]},
            }
            content = msgspec.json.encode(known.get(path, {}))
            self.transport.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
                % (len(content), content)
            )
            return
        request = _decode(body)
        self.left = request.max_tokens or 16
        self.options = request.stream_options or _Stop()
        self.prompt_tokens = bytes(request.prompt).count(b",") + 1
        self.transport.write(_HEAD)
        self.server.begin(self)

    def token(self) -> bool:
        """Send a token; returns whether it was the last."""
        self.left -= 1
        self.sent += 1
        usage = self.usage() if self.options.continuous_usage_stats else b""
        event = b"data: " + _CHOICE % (b"null" if self.left else b'"length"') + usage + b"}\n\n"
        if self.left:
            self.transport.write(b"%x\r\n%b\r\n" % (len(event), event))
            return False
        if self.options.include_usage:
            event += b'data: {"id":"cmpl-0","choices":[]' + self.usage() + b"}\n\n"
        event += b"data: [DONE]\n\n"
        self.transport.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(event), event))
        self.transport.close()
        return True

    def usage(self) -> bytes:
        return b',"usage":{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d}' % (
            self.prompt_tokens,
            self.prompt_tokens + self.sent,
            self.sent,
        )

    def connection_lost(self, exc: Exception | None) -> None:
        self.server.end(self)


class TokenServer:
    """Sends every open stream a token each ``gap_s``."""

    def __init__(self, gap_s: float) -> None:
        self.gap_s = gap_s
        self.stats = Stats()
        self.parts: list[dict[_Stream, None]] = [{} for _ in range(TICKS)]

    def begin(self, stream: _Stream) -> None:
        if not self.stats.open:
            self.stats.latest_tick_s = 0.0
        min(self.parts, key=len)[stream] = None
        self.stats.streams += 1
        self.stats.open += 1
        self.stats.most_open = max(self.stats.most_open, self.stats.open)

    def end(self, stream: _Stream) -> None:
        for part in self.parts:
            if stream in part:
                del part[stream]
                self.stats.open -= 1

    def tick(self, due_s: float) -> None:
        """Serve the next part, and come back when the one after it is due."""
        loop, stats = asyncio.get_running_loop(), self.stats
        stats.latest_tick_s = max(stats.latest_tick_s, loop.time() - due_s)
        part = self.parts[stats.ticks % TICKS]
        stats.tokens += len(part)
        if part:
            stats.last_token_s = loop.time()
        for stream in [s for s in part if s.token()]:
            self.end(stream)
        stats.ticks += 1
        following = due_s + self.gap_s / TICKS
        loop.call_at(following, self.tick, following)


async def _main(gap_s: float) -> None:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    server = TokenServer(gap_s)
    listening = await loop.create_server(lambda: _Stream(server), "127.0.0.1", 0, backlog=4096)
    print(listening.sockets[0].getsockname()[1], flush=True)  # noqa: T201 - this is how the parent learns it
    loop.call_soon(server.tick, loop.time())

    def wait_for_parent() -> None:
        sys.stdin.read()
        loop.call_soon_threadsafe(stop.set)

    threading.Thread(target=wait_for_parent, daemon=True).start()
    await stop.wait()


@dataclass(frozen=True)
class Running:
    """A server in a process of its own."""

    url: str
    pid: int

    def stats(self) -> Stats:
        """What it did so far."""
        import httpx  # why here: the server itself starts sooner without

        answer = httpx.get(f"{self.url}/stats", timeout=30, trust_env=False)
        return msgspec.convert(answer.json(), Stats)


@contextmanager
def running(gap_s: float, core: int | None = None) -> Iterator[Running]:
    """Start a server and stop it afterwards. core: the processor it keeps to; None: any."""
    argv = [sys.executable, "-m", "suite.bench.token_server", str(gap_s), *([] if core is None else [str(core)])]
    streams: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen(argv, cwd=ROOT, text=True, **streams)
    assert process.stdin
    assert process.stdout
    with process:
        try:
            yield Running(f"http://127.0.0.1:{int(process.stdout.readline())}", process.pid)
        finally:
            process.stdin.close()
            process.wait(timeout=10)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        os.sched_setaffinity(0, {int(sys.argv[2])})
    asyncio.run(_main(float(sys.argv[1])))
