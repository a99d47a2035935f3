"""Reads a streamed answer for what a load test needs: when tokens came, how many, and why the answer ended.

Every event is decoded as JSON, but into the few fields that count (the rest is skipped, not built), and only once: about a
microsecond an event. A stricter and fuller reading, for verdicts, is ``fixtures.answer``'s.

How many tokens an event brought is taken, in this order, from: ``usage`` in the event itself (vLLM sends it when asked for
``continuous_usage_stats``), the event's ``token_ids``, or one for an event with text. Servers put several tokens into one event when
they are behind, so the last way is a guess; whichever way it is, the sum has to be what the final ``usage`` says.
"""

from __future__ import annotations

import msgspec

from fixtures.sse import SseError, SseParser, excerpt

_DONE = b"[DONE]"


class _Details(msgspec.Struct, gc=False):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Choice(msgspec.Struct, gc=False):
    text: str = ""
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Event(msgspec.Struct, gc=False):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw()


_decode = msgspec.json.Decoder(_Event).decode


class StreamMeter:
    """Feed it the bytes of one answer (completions endpoint, one choice) as they arrive, each with its time."""

    __slots__ = (
        "_last_s",
        "_parser",
        "cached_tokens",
        "ended",
        "error",
        "finish",
        "first_s",
        "gaps_us",
        "last_s",
        "prompt_tokens",
        "tokens",
        "usage_tokens",
    )

    def __init__(self) -> None:
        self._parser = SseParser()
        self.first_s: float | None = None
        """When the first token arrived."""
        self.last_s: float | None = None
        self.gaps_us: list[int] = []
        """Microseconds between arrivals, one for each arrival after the first. Tokens of one event, or of several events that were
        read at once, are one arrival."""
        self.tokens = 0
        self.usage_tokens: int | None = None
        """As the final usage has it."""
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.finish: str | None = None
        self.ended = False
        """The end marker was read."""
        self.error = ""

    def feed(self, data: bytes, now_s: float) -> None:
        """Bytes that were read at ``now_s``. What is wrong with them ends up in ``error``."""
        before = self.tokens
        try:
            if (
                data.startswith(b"data: ")
                and data.endswith(b"\n\n")
                and data.find(b"\n") == len(data) - 2
                and not self._parser.pending
            ):
                self._event(data[6:-2])  # nearly always: one event, whole, in one line
            else:
                for event in self._parser.feed(data):
                    self._event(event)
        except SseError as exc:
            self._fail(f"stream: {exc}")
        if self.tokens > before:
            if self.first_s is None:
                self.first_s = now_s
            else:
                assert self.last_s is not None
                self.gaps_us.append(round((now_s - self.last_s) * 1e6))
            self.last_s = now_s

    def finish_reading(self, asked_prompt_tokens: int) -> str:
        """Call at the end of the stream; returns ``error``, which is empty for a whole and consistent answer.

        asked_prompt_tokens: length of the prompt that was sent.
        """
        if not self.ended:
            self._fail("stream: it ended without its end marker")
        if self.finish is None:
            self._fail("stream: no finish reason")
        elif self.finish not in ("length", "stop"):
            self._fail(f"stream: the server ended the answer with {self.finish!r}")
        if self.usage_tokens is None:
            self._fail("count: the server sent no usage, so the tokens could not be verified")
        elif self.usage_tokens != self.tokens:
            self._fail(f"count: {self.tokens} tokens were read, the server says {self.usage_tokens}")
        if self.prompt_tokens is not None and self.prompt_tokens != asked_prompt_tokens:
            self._fail(
                f"count: a prompt of {asked_prompt_tokens} tokens was sent, the server says {self.prompt_tokens}"
            )
        return self.error

    def _event(self, data: bytes) -> None:
        if data == _DONE:
            self.ended = True
            return
        try:
            event = _decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            self._fail(f"stream: not an event of an answer ({exc}): {excerpt(data)}")
            return
        if event.error:
            self._fail(f"server: {excerpt(bytes(event.error))}")
            return
        usage = event.usage
        for choice in event.choices:
            if usage is not None:
                self.tokens = max(self.tokens, usage.completion_tokens)
            elif choice.token_ids is not None:
                self.tokens += len(choice.token_ids)
            elif choice.text:
                self.tokens += 1
            if choice.finish_reason is not None:
                self.finish = choice.finish_reason
        if usage is not None and not event.choices:
            self.usage_tokens, self.prompt_tokens = usage.completion_tokens, usage.prompt_tokens
            if usage.prompt_tokens_details is not None:
                self.cached_tokens = usage.prompt_tokens_details.cached_tokens

    def _fail(self, error: str) -> None:
        if not self.error:
            self.error = error
