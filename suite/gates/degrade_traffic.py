"""Steady traffic beside a fault: a request every so often, on each engine in turn, from a thread of its own."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from suite.workload.prompts import Prompt, PromptMaker

if TYPE_CHECKING:
    from fixtures.client import Pending
    from fixtures.stack import Stack

TRAFFIC = "traffic"
"""Role of its requests."""

TRAFFIC_TOKENS = 400

INTERVAL_S = 0.5
"""Two requests a second: well below what two engines on two cores answer (0.1 s each), so that traffic alone is no
overload, and what waits behind a fault shows."""

MAX_OPEN = 64
"""Most requests under way at once: while engines hang, a steady rate would pile up without bound. What is left out is
counted (``left_out``)."""

THREAD_END_S = 5.0
"""Bound for the thread to end: it does nothing longer than its own interval."""


class Traffic:
    """Sends until stopped. Every second prompt is the previous one on another engine, so that the pool is read too.

    engines: names; may be changed while it runs. phase: written into the observations; set it as the case goes on.
    """

    def __init__(
        self, stack: Stack, case_id: str, prompts: PromptMaker, engines: list[str], phase: str, deadline_s: float
    ) -> None:
        self.engines = list(engines)
        self.phase = phase
        self.sent = 0
        self.left_out = 0
        self._stack = stack
        self._case_id = case_id
        self._prompts = prompts
        self._deadline_s = deadline_s
        self._open: deque[Pending] = deque()
        self._stop = threading.Event()
        self._turn = threading.Lock()
        """Held while a request is sent, and while none may be."""
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="kvgates-traffic", daemon=True)

    def __enter__(self) -> Traffic:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing is sent inside; what was under way has ended before."""
        with self._turn:
            while self._open:
                self._open.popleft().result(self._deadline_s + THREAD_END_S)
            yield

    def stop(self) -> None:
        """Send nothing more and wait for what is under way (each request has its deadline). Raises what the thread raised."""
        self._stop.set()
        self._thread.join(THREAD_END_S)
        while self._open:
            self._open.popleft().result(self._deadline_s + THREAD_END_S)
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _run(self) -> None:
        last: Prompt = ()
        try:
            while not self._stop.is_set():
                started = time.monotonic()
                with self._turn:
                    last = self._tick(last)
                self._stop.wait(max(0.0, INTERVAL_S - (time.monotonic() - started)))
        except Exception as exc:  # noqa: BLE001 - why: it belongs to the case, which gets it from stop()
            self._error = exc

    def _tick(self, last: Prompt) -> Prompt:
        """One request. Returns its prompt where the next engine is to ask for the same, else ()."""
        while self._open and self._open[0].done():
            self._open.popleft().result()
        engines = self.engines
        if not engines or len(self._open) >= MAX_OPEN:
            self.left_out += 1
            return ()
        prompt = last or self._prompts.fresh(f"traffic/{self.sent}", TRAFFIC_TOKENS)
        request = self._stack.request(
            engines[self.sent % len(engines)],
            prompt,
            TRAFFIC,
            deadline_s=self._deadline_s,
            request_id=f"{self._case_id}#t{self.sent}",
        )
        self._open.append(self._stack.client.start(request, case_id=self._case_id, phase=self.phase))
        self.sent += 1
        return () if last else prompt
