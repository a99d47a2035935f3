"""The figures of a replay.

=========  ==============================================================================================================
TTFT       time to first token, from when the request was due
service    the same from when it was sent: what a measurement would say that lets a slow server slow down the questions
ITL        inter-token latency: time between arrivals of tokens, all arrivals of all answers together
TPOT       time per output token: of one answer, (last token - first token) / (tokens - 1)
E2E        from when the request was due to its last token
lag        from when a request was due to when it was sent: what the client itself is behind
goodput    requests a second that were answered whole, with a TTFT within the limit
=========  ==============================================================================================================

Percentiles are nearest-rank, over answers without an error; throughput and goodput count time from each part's first due request to its
last end. Failed requests are counted, and are no part of any percentile.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

import msgspec
import numpy as np
from numpy.typing import NDArray

from fixtures.errors import HarnessError
from suite.workload.results import ReplayHead, ReplayResult

LAG_LIMIT_S = 0.02
"""A client behind by more than this (at p99) has measured itself too. Ten ticks of the loop's clock, and below any TTFT of interest."""


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds, of ``count`` values."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    greatest: float

    @classmethod
    def of(cls, values_s: NDArray[np.float64] | list[float]) -> Spread | None:
        """Spread of values in seconds; None of none."""
        ordered = np.sort(np.asarray(values_s, dtype=np.float64)) * 1000
        count = len(ordered)
        if not count:
            return None
        p50, p90, p99 = (float(ordered[math.ceil(q * count / 100) - 1]) for q in (50, 90, 99))
        return cls(count=count, mean=float(ordered.mean()), p50=p50, p90=p90, p99=p99, greatest=float(ordered[-1]))


class ReplaySummary(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a replay; see the module's table."""

    requests: int
    failed: int
    errors: dict[str, int]
    """Failed requests by kind of error, the word before its first colon."""
    parts: int
    """1, or more when the replay was gone on with; each began with caches as they were then."""
    duration_s: float
    ttft: Spread
    service_ttft: Spread
    itl: Spread | None
    tpot: Spread | None
    e2e: Spread
    lag: Spread
    client_behind: bool
    """The client was late by more than ``LAG_LIMIT_S`` at p99: latencies contain its own."""
    requests_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    cached_tokens: int | None
    """Prompt tokens that the servers took from a cache, as they report it; None where one did not say."""
    input_tokens: int
    """Prompt tokens of the whole answers: the denominator of ``cached_tokens``."""
    ttft_limit_s: float | None
    goodput_per_s: float | None
    within_limit: float | None
    """Part of all requests, failed ones included, that count as goodput."""


class Summariser:
    """Takes the lines of a replay one at a time. Keeps a few numbers a request, and four bytes for each arrival of tokens."""

    def __init__(self, ttft_limit_s: float | None = None) -> None:
        self._limit_s = ttft_limit_s
        self._times: dict[str, list[float]] = {n: [] for n in ("ttft", "service", "tpot", "e2e", "lag")}
        self._gaps: list[NDArray[np.uint32]] = []
        self._errors: Counter[str] = Counter()
        self._requests = self._good = self._input = self._output = self._cached = 0
        self._all_report_cached = True
        self._spans: list[tuple[float, float]] = []

    def add(self, entry: ReplayHead | ReplayResult) -> None:
        """Take the next line. A result before any head counts as of a first part."""
        if isinstance(entry, ReplayHead):
            self._spans.append((math.inf, -math.inf))
            return
        if not self._spans:
            self._spans.append((math.inf, -math.inf))
        first, last = self._spans[-1]
        self._spans[-1] = min(first, entry.intended_s), max(last, entry.done_s)
        self._requests += 1
        if entry.error or entry.first_s is None or entry.last_s is None or entry.sent_s is None:
            self._errors[entry.error.partition(":")[0] or "no-token"] += 1
            return
        self._whole(entry, entry.sent_s, entry.first_s, entry.last_s)

    def _whole(self, entry: ReplayResult, sent_s: float, first_s: float, last_s: float) -> None:
        times = self._times
        ttft_s = first_s - entry.intended_s
        times["ttft"].append(ttft_s)
        times["service"].append(first_s - sent_s)
        times["e2e"].append(last_s - entry.intended_s)
        times["lag"].append(sent_s - entry.intended_s)
        if entry.output_tokens > 1:
            times["tpot"].append((last_s - first_s) / (entry.output_tokens - 1))
        self._gaps.append(np.asarray(entry.gaps_us, dtype=np.uint32))
        self._input += entry.input_tokens
        self._output += entry.output_tokens
        self._all_report_cached &= entry.cached_tokens is not None
        self._cached += entry.cached_tokens or 0
        self._good += self._limit_s is not None and ttft_s <= self._limit_s

    def result(self) -> ReplaySummary:
        """The figures. Raises HarnessError when no request was answered whole: there is nothing to speak of."""
        ttft, service, tpot, e2e, lag = (Spread.of(v) for v in self._times.values())
        if ttft is None or service is None or e2e is None or lag is None:
            kinds = ", ".join(f"{kind} {count}" for kind, count in self._errors.most_common())
            raise HarnessError(f"of {self._requests} requests none was answered whole ({kinds or 'none was sent'})")
        duration_s = sum(max(last - first, 0.0) for first, last in self._spans if last > -math.inf)
        limited = self._limit_s is not None
        return ReplaySummary(
            requests=self._requests,
            failed=self._errors.total(),
            errors=dict(self._errors),
            parts=sum(last > -math.inf for _, last in self._spans),
            duration_s=duration_s,
            ttft=ttft,
            service_ttft=service,
            itl=Spread.of(np.concatenate(self._gaps) / 1e6),
            tpot=tpot,
            e2e=e2e,
            lag=lag,
            client_behind=lag.p99 > LAG_LIMIT_S * 1000,
            requests_per_s=ttft.count / duration_s,
            input_tokens_per_s=self._input / duration_s,
            output_tokens_per_s=self._output / duration_s,
            cached_tokens=self._cached if self._all_report_cached else None,
            input_tokens=self._input,
            ttft_limit_s=self._limit_s,
            goodput_per_s=self._good / duration_s if limited else None,
            within_limit=self._good / self._requests if limited else None,
        )


def summarise(entries: Iterable[ReplayHead | ReplayResult], ttft_limit_s: float | None = None) -> ReplaySummary:
    """The figures of a replay from its lines (``results.read_results``), or from results alone. Raises HarnessError for an empty one."""
    summariser = Summariser(ttft_limit_s)
    for entry in entries:
        summariser.add(entry)
    return summariser.result()


def summary_table(found: ReplaySummary) -> str:
    """The figures as lines of text."""
    errors = "".join(f", {kind} {count}" for kind, count in found.errors.items())
    lines = [
        f"{found.requests:,} requests in {found.duration_s:,.1f} s"
        + (f" and {found.parts} parts" if found.parts > 1 else "")
        + f"; {found.failed} failed{errors}",
        f"throughput {found.requests_per_s:,.2f} requests/s, {found.output_tokens_per_s:,.1f} tokens/s out, {found.input_tokens_per_s:,.1f} in",
        "prompt tokens from a cache: "
        + (
            "not reported"
            if found.cached_tokens is None
            else f"{found.cached_tokens / found.input_tokens:.2%} of {found.input_tokens:,}"
        ),
    ]
    if found.goodput_per_s is not None:
        lines.append(
            f"goodput {found.goodput_per_s:,.2f} requests/s with a TTFT of {found.ttft_limit_s:g} s or less ({found.within_limit:.1%} of all)"
        )
    lines += ["", f"{'ms':<14} {'count':>9} {'mean':>9} {'p50':>9} {'p90':>9} {'p99':>9} {'max':>9}"]
    rows = [
        ("TTFT", found.ttft),
        ("TTFT (service)", found.service_ttft),
        ("ITL", found.itl),
        ("TPOT", found.tpot),
        ("E2E", found.e2e),
        ("lag of client", found.lag),
    ]
    lines += [
        f"{name:<14} {s.count:>9,} {s.mean:>9,.1f} {s.p50:>9,.1f} {s.p90:>9,.1f} {s.p99:>9,.1f} {s.greatest:>9,.1f}"
        for name, s in rows
        if s is not None
    ]
    if found.client_behind:
        lines += [
            "",
            f"NOTE the client was behind by {found.lag.p99:.0f} ms at p99: these latencies are in part its own",
        ]
    return "\n".join(lines) + "\n"
