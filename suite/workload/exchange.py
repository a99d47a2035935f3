"""One HTTP/1.1 exchange for the replay client: a request out, the answer's bytes in, each with its time, nothing in between.

Bytes go from the event loop straight to a callback: no task is woken for a token and no stream object stands between. With 2,000
streams this client took 18 to 23 us of processor time a token, connections included, and 44 to 51 us when it was built on aiohttp
(four runs of each, interleaved, two shared cores). That is no lead over other generators: ``vllm bench serve``, on aiohttp too, costs
about the same for each further token (``python -m suite.bench.client_ceiling``). httptools, the
parser that uvicorn uses, does the protocol. One connection a request: a kept one may be closed by the server at the moment of its
reuse. Proxies from the environment are never used.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

import httptools

from fixtures.errors import UsageError

_ERROR_BYTES = 4096
"""Kept of an answer that is not 200."""


class ProtocolError(Exception):
    """The server's bytes are no HTTP."""


class Exchange(asyncio.Protocol):
    """Write ``request`` once connected; call ``on_body(data, now_s)`` for the body of a 200; ``done`` when the answer is complete.

    ``done`` raises OSError when the connection breaks, ProtocolError for bytes that are no HTTP.
    """

    def __init__(self, request: tuple[bytes, bytes], on_body: Callable[[bytes, float], None]) -> None:
        self._request = request
        self._deliver = on_body
        self._parser = httptools.HttpResponseParser(self)
        self._now_s = 0.0
        self._framed = False
        """The answer says where it ends; another one ends with the connection."""
        self.status: int | None = None
        self.error_body = bytearray()
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    # asyncio's side -------------------------------------------------------------------------------------------------
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.writelines(self._request)

    def data_received(self, data: bytes) -> None:
        self._now_s = time.monotonic()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as exc:
            self._end(ProtocolError(f"not an HTTP answer: {exc}"))

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is None and self.status is not None and not self._framed:
            self._end(None)
        elif isinstance(exc, OSError):
            self._end(exc)
        else:
            self._end(ConnectionResetError(0, "the server closed the connection before the answer was complete"))

    # httptools' side ------------------------------------------------------------------------------------------------
    def on_header(self, name: bytes, value: bytes) -> None:
        self._framed |= name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200:  # 100 to 199 announce another head
            self.status = status

    def on_body(self, body: bytes) -> None:
        if self.status == 200:
            self._deliver(body, self._now_s)
        elif len(self.error_body) < _ERROR_BYTES:
            self.error_body += body

    def on_message_complete(self) -> None:
        if self.status is not None and self._framed:
            self._end(None)

    def _end(self, exc: Exception | None) -> None:
        if self.done.done():
            return
        if exc is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(exc)


@dataclass(frozen=True)
class Address:
    """Where an engine's endpoint is, looked up once: a lookup for each request would wait for a thread."""

    host: str
    port: int
    head: bytes
    """Of every request, up to and without the length."""
    tls: ssl.SSLContext | None
    server_name: str | None

    def request(self, body: bytes) -> tuple[bytes, bytes]:
        """Bytes of a request, in two parts so that the body need not be copied."""
        return self.head + b"content-length: %d\r\n\r\n" % len(body), body


async def look_up(url: str, path: str, headers: Mapping[str, str]) -> Address:
    """Find an engine. Of a name's addresses the first that accepts a connection is taken, or the first if none does.

    Raises UsageError for what is no URL of a server, and for a name that does not resolve.
    """
    try:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError as exc:
        raise UsageError(f"{url}: {exc}; give http://HOST:PORT") from exc
    if parts.scheme not in ("http", "https") or parts.hostname is None:
        raise UsageError(f"{url}: not the URL of a server; give http://HOST:PORT")
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(parts.hostname, port, type=1)  # 1: SOCK_STREAM
    except OSError as exc:
        raise UsageError(f"{url}: {exc.strerror}; give a host that this machine can find") from exc
    hosts = [str(info[4][0]) for info in found]
    lines = [
        f"POST {parts.path.rstrip('/')}{path} HTTP/1.1",
        f"host: {parts.netloc.rpartition('@')[2]}",
        "content-type: application/json",
        "accept-encoding: identity",
        "connection: close",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    return Address(
        host=await _first_open(hosts, port),
        port=port,
        head="".join(f"{line}\r\n" for line in lines).encode("latin-1"),
        tls=ssl.create_default_context() if parts.scheme == "https" else None,
        server_name=parts.hostname if parts.scheme == "https" else None,
    )


async def _first_open(hosts: list[str], port: int) -> str:
    for host in hosts:
        try:
            transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, host, port)
        except OSError:
            continue
        transport.abort()
        return host
    return hosts[0]
