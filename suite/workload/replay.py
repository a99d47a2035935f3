"""Sends a trace to engines and measures what comes back, built to carry thousands of streams on one core.

Open loop: requests are sent when the trace says, at ``speed`` times its pace, whether or not earlier ones have been answered.
Closed loop: a fixed number of requests is in flight, and the next one is due the moment one has ended. Either way latency counts from
the time a request was *due* (``ReplayResult.intended_s``), so a stall of client or server is in the result of every request
that it held up, not only in that of one.

``python -m suite.bench.client_ceiling`` measures how much this client carries; ``ReplayResult.sent_s - intended_s`` shows in every run whether it kept up.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from fixtures.connection import cause
from fixtures.errors import HarnessError, UsageError
from fixtures.request import Target
from fixtures.sse import excerpt
from suite.workload.bodies import Bodies
from suite.workload.exchange import Exchange, ProtocolError, look_up
from suite.workload.results import ReplayResult, ResultFile
from suite.workload.routing import Policy, route
from suite.workload.streams import StreamMeter
from suite.workload.trace import TraceRequest

GIVE_UP_AFTER = 100
"""Failed requests in a row after which the rest is not sent: what answers nothing is not measured by asking on."""
_READY_BODIES = 64
"""Bodies made ahead, so that making one does not make its request late."""
_TELL_EVERY_S = 1.0


@dataclass(frozen=True, kw_only=True)
class ReplaySettings:
    """How a trace is sent. Give ``concurrency`` for a closed loop; without it the loop is open. Times in seconds."""

    speed: float = 1.0
    """Open loop: times faster than the trace."""
    concurrency: int | None = None
    """Closed loop: requests in flight."""
    policy: Policy = "round-robin"
    seed: int = 0
    """Of the routing."""
    deadline_s: float = 600.0
    """Of one request, from its sending to its last token."""
    max_requests: int | None = None
    """Of the trace, those done in an earlier part included."""
    send_for_s: float | None = None
    """Nothing that is due later than this, after the first request, is sent."""
    max_in_flight: int = 8192
    """Open loop: most requests in flight; others wait, and their waiting counts as latency."""

    def checked(self) -> ReplaySettings:
        """Itself. Raises UsageError for settings that make no replay."""
        for name in ("speed", "concurrency", "deadline_s", "max_requests", "send_for_s", "max_in_flight"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UsageError(f"{name} {value}: give a number above 0")
        if self.concurrency is not None and self.speed != 1.0:
            raise UsageError("a closed loop has no clock to speed up: give a concurrency or a speed")
        return self


@dataclass
class ReplayState:
    """How far a replay is. Counts of requests."""

    skipped: int = 0
    """Done in an earlier part."""
    sent: int = 0
    ended: int = 0
    failed: int = 0
    """Of those that ended."""
    tokens: int = 0
    """Received, of requests that ended."""
    most_in_flight: int = 0
    elapsed_s: float = 0.0
    stopped: str = ""
    """Why sending ended before the trace did; empty if it did not."""
    first_error: str = ""

    @property
    def in_flight(self) -> int:
        return self.sent - self.ended

    def __str__(self) -> str:
        told = f"replay: {self.ended} ended, {self.in_flight} in flight, {self.failed} failed, {self.elapsed_s:.0f} s"
        return told + (f", {self.skipped} done before" if self.skipped else "")


@dataclass(frozen=True, slots=True)
class _Ready:
    index: int
    request: TraceRequest
    engine: str
    content: bytes


@dataclass
class Replay:
    """One replay; ``run`` it once.

    requests: the trace, in order of time. targets: engines by name. results: where every ended request is written at once; what it
    holds already is not sent again. keep: called with every result (e.g. a list's ``append``). tell: called about once
    a second.
    """

    requests: Iterable[TraceRequest]
    targets: Mapping[str, Target]
    bodies: Bodies
    settings: ReplaySettings
    results: ResultFile | None = None
    keep: Callable[[ReplayResult], None] | None = None
    tell: Callable[[ReplayState], None] | None = None
    state: ReplayState = field(default_factory=ReplayState)

    def run(self) -> ReplayState:
        """Send the trace and wait for all answers.

        Raises UsageError for a trace or settings that cannot be sent, HarnessError when nothing answers (``GIVE_UP_AFTER``
        failures in a row). Interrupted, it writes down nothing of what is in flight: to go on sends it again.
        """
        self.settings.checked()
        if not self.targets:
            raise UsageError("no engine to send to: give one URL or more")
        try:
            asyncio.run(self._run())
        except ExceptionGroup as exc:  # of workers that fell over one another; the first says why
            raise exc.exceptions[0] from exc
        return self.state

    # Inside the event loop ------------------------------------------------------------------------------------------
    async def _run(self) -> None:
        self._route = route(self.settings.policy, list(self.targets), self.settings.seed)
        self._ready: asyncio.Queue[_Ready | None] = asyncio.Queue(_READY_BODIES)
        self._failed_in_row = 0
        self._addresses = {n: await look_up(t.url, "/v1/completions", t.headers) for n, t in self.targets.items()}
        self._began_s = time.monotonic()
        if self.results is not None:
            self.results.begin(time.time())
        helpers = [asyncio.create_task(self._prepare()), asyncio.create_task(self._tell())]
        try:
            await (self._closed_loop() if self.settings.concurrency else self._open_loop())
            if helpers[0].done():
                helpers[0].result()  # a trace that cannot be sent
        finally:
            for task in helpers:
                task.cancel()
            await asyncio.gather(*helpers, return_exceptions=True)
            if self.results is not None:
                self.results.flush()
        if self._failed_in_row >= GIVE_UP_AFTER:
            raise HarnessError(f"replay: {self.state.stopped}; the first was {self.state.first_error}")

    def _todo(self) -> Iterator[tuple[int, TraceRequest]]:
        for index, request in enumerate(self.requests):
            if index == self.settings.max_requests:
                self.state.stopped = f"{index} requests, as many as were asked for"
                return
            if self.results is not None and self.results.is_done(index, request):
                self.state.skipped += 1
            else:
                yield index, request

    async def _prepare(self) -> None:
        """Make bodies ahead; the last is followed by None, also where the trace turns out to be bad."""
        try:
            for index, request in self._todo():
                engine = self._route(index, request)
                content = await self.bodies.make(request, self.targets[engine].served_model)
                await self._ready.put(_Ready(index, request, engine, content))
        except UsageError:
            await self._ready.put(None)
            raise
        await self._ready.put(None)

    async def _tell(self) -> None:
        while True:
            await asyncio.sleep(_TELL_EVERY_S)
            self._tell_now()

    def _tell_now(self) -> None:
        self.state.elapsed_s = self._now_s()
        if self.results is not None:
            self.results.flush()
        if self.tell is not None:
            self.tell(self.state)

    def _now_s(self) -> float:
        """Seconds since this part of the replay began."""
        return time.monotonic() - self._began_s

    async def _next(self) -> _Ready | None:
        """The next request; None when there is none, or none is to be sent any more."""
        if self._failed_in_row >= GIVE_UP_AFTER:
            self.state.stopped = f"{self._failed_in_row} requests failed in a row"
            return None
        ready = await self._ready.get()
        if ready is None:
            self._ready.put_nowait(None)  # for the other workers of a closed loop
        return ready

    async def _open_loop(self) -> None:
        slots = asyncio.Semaphore(self.settings.max_in_flight)
        first = await self._next()
        self._began_s = time.monotonic()
        async with _everything_sent() as start:
            ready = first
            while ready is not None:
                assert first is not None
                due_s = (ready.request.timestamp_ms - first.request.timestamp_ms) / 1000 / self.settings.speed
                if self._too_late(due_s):
                    return
                wait_s = due_s - self._now_s()
                if wait_s > 0:
                    await asyncio.sleep(wait_s)
                await slots.acquire()
                start(self._sent(ready, due_s), slots.release)
                ready = await self._next()

    async def _closed_loop(self) -> None:
        async def worker() -> None:
            while True:
                due_s = self._now_s()
                if self._too_late(due_s):
                    return
                ready = await self._next()
                if ready is None:
                    return
                await self._sent(ready, due_s)

        async with asyncio.TaskGroup() as workers:
            for _ in range(self.settings.concurrency or 0):
                workers.create_task(worker())

    def _too_late(self, due_s: float) -> bool:
        if self.settings.send_for_s is None or due_s < self.settings.send_for_s:
            return False
        self.state.stopped = f"sending was to take {self.settings.send_for_s:g} s"
        return True

    async def _sent(self, ready: _Ready, due_s: float) -> None:
        """Send one request and write down how it ended."""
        state = self.state
        state.sent += 1
        state.most_in_flight = max(state.most_in_flight, state.in_flight)
        meter = StreamMeter()
        sent_s = self._now_s()
        status, error = await self._exchange(ready, meter)
        result = ReplayResult(
            index=ready.index,
            engine=ready.engine,
            session=ready.request.session,
            input_tokens=ready.request.input_tokens,
            asked_tokens=ready.request.output_tokens,
            output_tokens=meter.tokens,
            cached_tokens=meter.cached_tokens,
            intended_s=due_s,
            sent_s=sent_s,
            first_s=None if meter.first_s is None else meter.first_s - self._began_s,
            last_s=None if meter.last_s is None else meter.last_s - self._began_s,
            done_s=self._now_s(),
            gaps_us=meter.gaps_us,
            status=status,
            error=error,
        )
        self._ended(result)

    def _ended(self, result: ReplayResult) -> None:
        state = self.state
        state.ended += 1
        state.tokens += result.output_tokens
        state.failed += bool(result.error)
        state.first_error = state.first_error or result.error
        self._failed_in_row = self._failed_in_row + 1 if result.error else 0
        if self.results is not None:
            self.results.add(result)
        if self.keep is not None:
            self.keep(result)

    async def _exchange(self, ready: _Ready, meter: StreamMeter) -> tuple[int | None, str]:
        """Status and error of one exchange; tokens go to the meter."""
        address = self._addresses[ready.engine]
        exchange = Exchange(address.request(ready.content), meter.feed)
        transport: asyncio.Transport | None = None
        try:
            async with asyncio.timeout(self.settings.deadline_s):
                transport, _ = await asyncio.get_running_loop().create_connection(
                    lambda: exchange, address.host, address.port, ssl=address.tls, server_hostname=address.server_name
                )
                await exchange.done
        except ProtocolError as exc:
            return exchange.status, f"stream: {exc}"
        except OSError as exc:
            if isinstance(exc, TimeoutError) and exc.errno is None:  # ours; the system's has a number
                return exchange.status, f"deadline: no whole answer within {self.settings.deadline_s:g} s"
            return exchange.status, f"{'connect' if transport is None else 'lost'}: {cause(exc)}"
        finally:
            if transport is not None:
                transport.abort()
        if exchange.status != 200:
            return exchange.status, f"http {exchange.status}: {excerpt(bytes(exchange.error_body))}"
        error = meter.finish_reading(ready.request.input_tokens)
        if not error and meter.tokens != ready.request.output_tokens:
            error = f"count: {ready.request.output_tokens} tokens were asked for, {meter.tokens} came"
        return exchange.status, error


Start = Callable[[Coroutine[Any, Any, None], Callable[[], None]], None]


@contextlib.asynccontextmanager
async def _everything_sent() -> AsyncIterator[Start]:
    """A task group whose tasks call back when they end."""
    async with asyncio.TaskGroup() as group:

        def start(work: Coroutine[Any, Any, None], then: Callable[[], None]) -> None:
            group.create_task(work).add_done_callback(lambda _: then())

        yield start
