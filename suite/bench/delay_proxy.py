"""A way to an engine through the fault proxy (``fixtures.tcp_proxy``): a slow-down of a known size that is planted on purpose.

The proxy runs in a thread here, not as a unit of the stack: what is slowed down is this client's way alone. With a delay of 0 it
is the control: what the proxy itself costs falls on both sides of a comparison.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from urllib.parse import urlsplit

from fixtures.tcp_proxy import Route

END_BOUND_S = 2.0
"""For connections that are open at the end; a reset takes one turn of the loop."""


class DelayProxy:
    """One listening port on loopback, once it runs. ``delay_s`` may be changed meanwhile."""

    def __init__(self, url: str, delay_s: float) -> None:
        parts = urlsplit(url)
        self.route = Route("engine", "127.0.0.1", 0, (parts.hostname or "127.0.0.1", parts.port or 80))
        self.delay_s = delay_s

    @property
    def delay_s(self) -> float:
        """How much later than without it each part of an answer comes: half of it on the way there, half on the way back."""
        return 2 * self.route.delay_s

    @delay_s.setter
    def delay_s(self, delay_s: float) -> None:
        self.route.delay_s = delay_s / 2

    @property
    def url(self) -> str:
        return f"http://{self.route.host}:{self.route.port}"

    async def serve(self, ready: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]]) -> None:
        """Pass on until the event that ``ready`` is given is set."""
        stop = asyncio.Event()
        try:
            await self.route.listen()
        except OSError as exc:
            ready.set_exception(exc)
            return
        ready.set_result((asyncio.get_running_loop(), stop))
        await stop.wait()
        self.route.stop()
        if others := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(others, timeout=END_BOUND_S)


@contextmanager
def running(proxy: DelayProxy) -> Iterator[DelayProxy]:
    """Run a proxy in a thread of its own, and stop it afterwards. Raises OSError where it cannot listen."""
    ready: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()
    thread = threading.Thread(target=lambda: asyncio.run(proxy.serve(ready)), name="kvgates-proxy", daemon=True)
    thread.start()
    loop, stop = ready.result()
    try:
        yield proxy
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
