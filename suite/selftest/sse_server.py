"""A server that streams completions on a known schedule, misbehaves on request, and writes down when it did what.

It speaks vLLM's format (``/v1/completions``, checked against 0.32.0) but shares no code with the client that it is there to
check, and it runs in a process of its own: the client's interpreter lock must not blur the truth. A request says how it wants to
be served in the field ``behaviour`` (see ``Behaviour``). ``GET /log`` returns what happened, times on CLOCK_MONOTONIC, which all
processes of a host share.

Run it with ``python -m suite.selftest.sse_server``; the first line it prints is its port. It ends when its stdin closes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

ROOT = Path(__file__).parents[2]


@dataclass
class Behaviour:
    """How a request is served. Times in seconds."""

    connect_s: float = 0.0
    """Before the response's head."""
    first_s: float = 0.005
    """Between the head and the first token."""
    gap_s: float = 0.0
    per_chunk: int = 1
    """Tokens a chunk."""
    prelude: bool = False
    """Chunks without a token (keep-alive comment, empty text, role) right after the head."""
    dribble: bool = False
    """Send each event in two halves, apart by ``gap_s``."""
    cached: int | None = None
    fault: str = ""
    """One of the names that ``_spoil`` or ``_Connection.serve`` know."""
    after: int = 1
    """Tokens before a fault that ends the stream."""


@dataclass
class Served:
    """What the server did for one request."""

    request_id: str
    received_s: float
    head_s: float | None = None
    token_s: list[float] = field(default_factory=list)
    done_s: float | None = None
    gone_s: float | None = None
    """The client closed the connection before the answer was complete."""
    at_once: int = 0
    """Requests in service, this one included, when it came in."""
    salt: str | None = None
    path: str = ""


def token_ids(prompt: list[int], count: int) -> list[int]:
    """The answer to a prompt: known to the tests, and different for different prompts."""
    seed = sum((i + 1) * t for i, t in enumerate(prompt))
    return [(seed + 31 * i) % 512 for i in range(count)]


def logprobs_of(ids: list[int], top: int) -> dict[str, Any]:
    """Log probabilities in the server's order: the sampled token first, then the best others."""
    steps = [{f"token_id:{(t + 7 * k) % 512}": -0.5 - k for k in range(max(top, 1))} for t in ids]
    return {
        "text_offset": [0] * len(ids),
        "tokens": [f"token_id:{t}" for t in ids],
        "token_logprobs": [-0.5] * len(ids),
        "top_logprobs": steps,
    }


class _Connection:
    """One request on one connection."""

    def __init__(self, server: Server, writer: asyncio.StreamWriter, body: dict[str, Any], served: Served) -> None:
        self.server = server
        self.writer = writer
        self.body = body
        self.served = served
        self.behaviour = Behaviour(**body.get("behaviour", {}))
        self.prompt: list[int] = body.get("prompt") or []
        self.n = body.get("n") or 1

    async def serve(self) -> None:
        behaviour, fault = self.behaviour, self.behaviour.fault
        await asyncio.sleep(behaviour.connect_s)
        if fault == "reset-before-head":
            return self.reset()
        if fault == "close-before-head":
            return self.writer.close()
        if fault == "never-head":
            await asyncio.Event().wait()
        if fault.startswith("http-"):
            return self.plain(int(fault.removeprefix("http-")), self.error(int(fault[5:]), "no such luck"))
        if fault == "html":
            return self.plain(502, "<html><body>Bad\nGateway</body></html>")
        if not self.body.get("stream"):
            await asyncio.sleep(behaviour.first_s)
            return self.plain(200, json.dumps(self.whole()))
        self.served.head_s = time.monotonic()
        self.write_raw(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        await self.stream()
        return None

    async def stream(self) -> None:
        behaviour, fault = self.behaviour, self.behaviour.fault
        if behaviour.prelude:
            self.write(b": keep-alive\n\n")
            self.event({"choices": [{"index": 0, "text": "", "token_ids": []}]})
            self.event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        await asyncio.sleep(behaviour.first_s)
        sent = 0
        for chunk in self.chunks():
            if fault in _ENDINGS and sent >= behaviour.after:
                return await _ENDINGS[fault](self)
            if sent:
                await asyncio.sleep(behaviour.gap_s)
            now = time.monotonic()
            await self.send_event(chunk)
            new = len(chunk["choices"][0].get("token_ids") or [0])
            self.served.token_s += [now] * new
            sent += new
        if fault != "no-usage":
            self.event({"choices": [], "usage": self.usage(sent)})
        if fault != "no-done":
            self.served.done_s = time.monotonic()
            self.write(b"data: [DONE]\n\n")
        if fault == "after-done":
            self.event({"choices": []})
        self.write_raw(b"0\r\n\r\n")
        return None

    def chunks(self) -> Iterator[dict[str, Any]]:
        count, size = self.body["max_tokens"], self.behaviour.per_chunk
        for start in range(0, count, size):
            for index in range(self.n):
                ids = token_ids([*self.prompt, index] if index else self.prompt, count)[start : start + size]
                choice = self.choice(index, ids, last=start + size >= count)
                if start == 0:
                    choice["prompt_token_ids"] = self.prompt
                yield _spoil(self.behaviour.fault, {"id": "cmpl-0", "object": "text_completion", "choices": [choice]})

    def choice(self, index: int, ids: list[int], last: bool) -> dict[str, Any]:
        top = self.body.get("logprobs")
        return {
            "index": index,
            "text": "".join(chr(97 + t % 26) for t in ids),
            "logprobs": None if top is None else logprobs_of(ids, top),
            "finish_reason": "length" if last else None,
            "stop_reason": None,
            "token_ids": ids,
        }

    def usage(self, completion: int) -> dict[str, Any]:
        usage: dict[str, Any] = {
            "prompt_tokens": len(self.prompt),
            "total_tokens": len(self.prompt) + completion,
            "completion_tokens": completion + (self.behaviour.fault == "wrong-usage"),
        }
        if self.behaviour.cached is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self.behaviour.cached}
        return usage

    def whole(self) -> dict[str, Any]:
        count = self.body["max_tokens"]
        choices = [self.choice(0, token_ids(self.prompt, count), last=True)]
        return _spoil(self.behaviour.fault, {"choices": choices, "usage": self.usage(count)})

    def error(self, status: int, message: str) -> str:
        return json.dumps({"error": {"message": message, "type": "BadRequestError", "param": None, "code": status}})

    # Bytes ----------------------------------------------------------------------------------------------------------
    def plain(self, status: int, text: str) -> None:
        self.served.head_s = time.monotonic()
        head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(text.encode())}\r\n\r\n"
        self.write_raw(head.encode() + text.encode())

    async def send_event(self, payload: dict[str, Any]) -> None:
        data = f"data: {json.dumps(payload)}\n\n".encode()
        if self.behaviour.dribble:
            self.write(data[:20])
            await asyncio.sleep(self.behaviour.gap_s)
            data = data[20:]
        self.write(data)

    def event(self, payload: dict[str, Any]) -> None:
        self.write(f"data: {json.dumps(payload)}\n\n".encode())

    def write(self, data: bytes) -> None:
        self.write_raw(b"%x\r\n%b\r\n" % (len(data), data))

    def write_raw(self, data: bytes) -> None:
        self.writer.write(data)

    def reset(self) -> None:
        """Close so that the kernel sends RST."""
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    # Ways for a stream to end -----------------------------------------------------------------------------------------
    async def end_reset(self) -> None:
        await asyncio.sleep(0.02)  # what was sent has arrived: a reset may overtake it
        self.reset()

    async def end_close(self) -> None:
        self.writer.close()

    async def end_orderly(self) -> None:
        self.write_raw(b"0\r\n\r\n")

    async def end_inside_event(self) -> None:
        self.write(b'data: {"choices"')
        self.write_raw(b"0\r\n\r\n")

    async def end_done(self) -> None:
        self.write(b"data: [DONE]\n\n")
        self.write_raw(b"0\r\n\r\n")

    async def end_json(self) -> None:
        self.write(b'data: {"choices": [}\n\n')
        await self.end_done()

    async def end_sse(self) -> None:
        self.write(b"Internal Server Error\n\n")
        await self.end_done()

    async def end_error(self) -> None:
        self.write(b"data: " + self.error(500, "Internal server error").encode() + b"\n\n")
        await self.end_done()

    async def end_stall(self) -> None:
        await asyncio.Event().wait()


_ENDINGS = {
    "reset": _Connection.end_reset,
    "close": _Connection.end_close,
    "orderly-end": _Connection.end_orderly,
    "inside-event": _Connection.end_inside_event,
    "early-done": _Connection.end_done,
    "bad-json": _Connection.end_json,
    "bad-sse": _Connection.end_sse,
    "error-event": _Connection.end_error,
    "stall": _Connection.end_stall,
}


def _spoil(fault: str, answer: dict[str, Any]) -> dict[str, Any]:
    """An answer with the content fault of that name (other names: unchanged)."""
    choice = answer["choices"][0]
    logprobs = choice["logprobs"]
    if fault == "missing-logprob":
        logprobs["token_logprobs"].pop()
    elif fault == "no-logprobs":
        choice["logprobs"] = None
    elif fault == "other-token":
        logprobs["tokens"][0] = "token_id:511"
    elif fault == "nan":
        logprobs["token_logprobs"][0] = None
        logprobs["top_logprobs"][0] = dict.fromkeys(logprobs["top_logprobs"][0])
    elif fault == "two-values":
        logprobs["top_logprobs"][0][logprobs["tokens"][0]] = -0.25
    elif fault == "decoded-tokens":
        logprobs["tokens"] = list(choice["text"])
    elif fault == "no-ids":
        del choice["token_ids"]
    elif fault == "abort" and choice["finish_reason"]:
        choice["finish_reason"] = "abort"
    elif fault == "no-finish":
        choice["finish_reason"] = None
    elif fault == "other-choice":
        choice["index"] = 3
    elif fault == "other-prompt":
        choice["prompt_token_ids"] = [*choice.get("prompt_token_ids", [0])[:-1], 999]
    return answer


class Server:
    """Serves until it is cancelled."""

    def __init__(self) -> None:
        self.log: dict[str, Served] = {}
        self.in_service = 0

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await self._accept(reader, writer)
        writer.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in head[1:])}
        path = head[0].split()[1]
        raw = await reader.readexactly(int(headers.get("content-length", 0)))
        received_s = time.monotonic()
        body = json.loads(raw or b"{}")
        served = Served(headers.get("x-request-id", ""), received_s, salt=body.get("cache_salt"), path=path)
        connection = _Connection(self, writer, body, served)
        if path == "/log":
            connection.plain(200, json.dumps([asdict(s) for s in self.log.values()]))
        elif path == "/health":
            connection.plain(200, "")
        else:
            self.log[served.request_id] = served
            await self._watched(connection, reader)
        await writer.drain()

    async def _watched(self, connection: _Connection, reader: asyncio.StreamReader) -> None:
        """Serve, and note when the client goes away meanwhile."""
        self.in_service += 1
        connection.served.at_once = self.in_service
        serve = asyncio.ensure_future(connection.serve())
        gone = asyncio.ensure_future(reader.read(1))
        done, _ = await asyncio.wait({serve, gone}, return_when=asyncio.FIRST_COMPLETED)
        self.in_service -= 1
        if serve not in done:
            connection.served.gone_s = time.monotonic()
        for task in (serve, gone):
            task.cancel()
        await asyncio.gather(serve, gone, return_exceptions=True)


async def _main() -> None:
    server = await asyncio.start_server(Server().accept, "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)  # noqa: T201 - this is how the parent learns it
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def wait_for_parent() -> None:
        sys.stdin.read()
        loop.call_soon_threadsafe(stop.set)

    threading.Thread(target=wait_for_parent, daemon=True).start()
    await stop.wait()


# For tests ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Running:
    """A server in a process of its own."""

    url: str
    pid: int

    def log(self) -> dict[str, Served]:
        """What it did so far, by request id."""
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(self.url + "/log", timeout=10) as answer:
            entries = cast("list[dict[str, Any]]", json.load(answer))
        return {entry["request_id"]: Served(**entry) for entry in entries}


@contextmanager
def running() -> Iterator[Running]:
    """Start a server and stop it afterwards."""
    process = subprocess.Popen(
        [sys.executable, "-m", "suite.selftest.sse_server"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        text=True,
    )
    assert process.stdin
    assert process.stdout
    with process:
        try:
            yield Running(f"http://127.0.0.1:{int(process.stdout.readline())}", process.pid)
        finally:
            process.stdin.close()
            process.wait(timeout=10)


if __name__ == "__main__":
    asyncio.run(_main())
