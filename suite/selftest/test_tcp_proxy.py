"""The fault proxy's bookkeeping, on real sockets of one event loop."""

from __future__ import annotations

import asyncio
import socket
import struct

import pytest

from fixtures.tcp_proxy import Route

pytestmark = pytest.mark.selftest

BOUND_S = 5.0


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1000):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass  # the client's reset, which the proxy passes on
    finally:
        writer.close()


async def _until_closed(route: Route) -> None:
    async with asyncio.timeout(BOUND_S):
        while route.counters.open:
            await asyncio.sleep(0.01)  # why: the other side of the proxy sees the end a moment later


@pytest.mark.parametrize("reset", [False, True])
def test_a_connection_that_ended_or_broke_is_not_open_any_more(reset: bool) -> None:
    async def scene() -> None:
        server = await asyncio.start_server(_echo, "127.0.0.1", 0)
        route = Route("one", "127.0.0.1", 0, server.sockets[0].getsockname()[:2])
        await route.listen()
        reader, writer = await asyncio.open_connection("127.0.0.1", route.port)
        writer.write(b"hello")
        assert await reader.readexactly(5) == b"hello"
        assert (route.counters.open, route.counters.up_bytes, route.counters.down_bytes) == (1, 5, 5)
        if reset:
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.close()
        await _until_closed(route)
        assert (route.counters.resets > 0) == reset
        route.stop()
        server.close()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", route.port)

    asyncio.run(scene())
