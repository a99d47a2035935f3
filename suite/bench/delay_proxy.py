"""A TCP proxy in front of an engine that holds each connection up for a known time: a slow-down that is planted on purpose.

The delay falls between the client's first byte and the engine, once a connection; everything else passes through as it comes. With a
delay of 0 it is the control: what the proxy itself costs falls on both sides of a comparison.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

_CHUNK = 65536


class DelayProxy:
    """One listening port on loopback. ``delay_s`` may be changed while it runs; connections that are open keep theirs."""

    def __init__(self, url: str, delay_s: float) -> None:
        parts = urlsplit(url)
        self.delay_s = delay_s
        self.port = 0
        self.served = 0
        """Connections that were delayed and passed on."""
        self._upstream = (parts.hostname or "127.0.0.1", parts.port or 80)
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> asyncio.Server:
        """Listen; ``port`` is known afterwards."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        return server

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            first = await reader.read(_CHUNK)
            if self.delay_s > 0:
                await asyncio.sleep(self.delay_s)  # why: the delay is what is planted
            up_reader, up_writer = await asyncio.open_connection(*self._upstream)
        except OSError:
            writer.close()
            return
        up_writer.write(first)
        self.served += 1
        await asyncio.gather(_pass_on(reader, up_writer), _pass_on(up_reader, writer))


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One direction, until it ends or breaks; a broken direction is seen by whoever reads it."""
    with contextlib.suppress(OSError):
        while data := await reader.read(_CHUNK):
            writer.write(data)
            await writer.drain()
    with contextlib.suppress(OSError, RuntimeError):
        writer.close()


@contextmanager
def running(proxy: DelayProxy) -> Iterator[DelayProxy]:
    """Run a proxy in a thread of its own, and stop it afterwards."""
    loop = asyncio.new_event_loop()
    ready = threading.Event()
    stop = asyncio.Event()

    async def serve() -> None:
        server = await proxy.start()
        ready.set()
        await stop.wait()
        server.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), name="kvgates-proxy", daemon=True)
    thread.start()
    ready.wait()
    try:
        yield proxy
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()
