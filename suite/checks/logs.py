"""Log oracle (rule 11): a log of the stack must hold no crash, traceback, rejected transfer or recovery unexplained.

``PATTERNS`` and ``BENIGN`` are tables: first match wins, benign lines are looked at first. Texts are those of vLLM
0.32.0 and of the Mooncake 0.3.13 libraries; both write plain lines to stderr (``WARNING 11-29 10:00:00 [file.py:1] ...``
and glog's ``E1129 10:00:00.000000 123 file.cpp:1] ...``).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from reports import records as r
from reports.history import History
from suite.checks.base import finding, too_few

SCANNED = "logs.scanned"
"""Fact that says logs were read for a case: ``{unit: number of lines read}``. Without it silence proves nothing."""


@dataclass(frozen=True)
class Pattern:
    """A category (empty: benign), the expression that finds it, and why it belongs there."""

    category: str
    regex: re.Pattern[str]
    why: str


def _pattern(category: str, regex: str, why: str) -> Pattern:
    return Pattern(category, re.compile(regex), why)


BENIGN: tuple[Pattern, ...] = (
    _pattern("", r"resource_tracker: There appear to be \d+ leaked", "Python at exit, after a stop that we asked for"),
    _pattern("", r"Failed to import from vllm\._C\b", "CPU builds carry other extension modules"),
    _pattern("", r"(?i)no (cuda|gpu)s? (is |are )?(available|detected|found)", "CPU platform"),
    _pattern("", r"(?i)\b(triton|libcuda|nvml)\b.*not (installed|found|available)", "CPU platform"),
    _pattern("", r"(?i)assert(ion)?s? (is|are) (enabled|disabled)", "speaks of a setting"),
    _pattern(
        "",
        r"\bnon-default args\b|\bInitializing a V1 LLM engine\b|EngineArgs\(",
        "prints settings, whose names may hold any word",
    ),
    _pattern("", r"kv_load_failure_policy\s*[=:']", "prints a setting"),
)

PATTERNS: tuple[Pattern, ...] = (
    _pattern(
        "segfault",
        r"(?i)\bsegmentation fault\b|\bSIGSEGV\b|\bSIGBUS\b|\bSIGABRT\b|\*\*\* Aborted at|!!!!!!! Segfault",
        "a process died of a signal",
    ),
    _pattern("segfault", r"Fatal Python error", "faulthandler's first line"),
    _pattern(
        "crash",
        r"EngineCore (encountered a fatal error|failed to start)|EngineDeadError|EngineCore_?\S* died|engine core exited unexpectedly",
        "vLLM: the core process is lost",
    ),
    _pattern(
        "crash",
        r"Worker proc \S+ died unexpectedly|WorkerProc (failed|hit an exception)|AsyncLLM output_handler failed",
        "vLLM: a worker or the output loop is lost",
    ),
    _pattern(
        "crash",
        r"terminate called after throwing|std::terminate|\bcore dumped\b|(?i:\bout of memory\b|\bOOM-?kill)|\bstd::bad_alloc\b|\bMemoryError\b",
        "C++ abort or memory exhausted",
    ),
    _pattern(
        "cuda",
        r"(?i)\bCUDA error\b|device-side assert|illegal memory access|\bCUBLAS_STATUS_(?!SUCCESS)|\bXid\b",
        "GPU failure",
    ),
    _pattern(
        "traceback",
        r"Traceback \(most recent call last\)|Exception in thread|Task exception was never retrieved|Exception in ASGI application",
        "an exception that nobody handled, or one logged with its trace",
    ),
    _pattern(
        "assert",
        r"\bAssertionError\b|Assertion `|\bassertion failed\b|\bCheck failed:",
        "assertion in Python, C, or glog",
    ),
    _pattern(
        "load-failure",
        r"Recovered from KV load failure|Failing \d+ request\(s\) due to KV load failure|Failed to get \d+ Mooncake keys|Failed to get Mooncake sub-batch|Skipping Mooncake load for request",
        "a promised block was not loaded; the request was recomputed or failed",
    ),
    _pattern(
        "load-failure",
        r"failed_recving|invalid_block_ids|(?i:\bKV load (failed|failure|error))",
        "the same, other releases",
    ),
    _pattern(
        "save-failure",
        r"batch_put failed|Failed to put (key|boundary-state keys)|Boundary-state put failed|NO_AVAILABLE_HANDLE|Error in KVCacheStoreSendingThread",
        "a block was not saved",
    ),
    _pattern(
        "lookup-failure",
        r"Remote connection failed in lookup|Async Mooncake lookup failed|LookupKeyServer received unknown msg_type",
        "the pool could not be asked",
    ),
    _pattern(
        "rejected-transfer",
        r"(?i)transfer (request )?(was )?(rejected|refused|failed|timed? ?out)|rejected transfer|failed to (submit|complete) transfer|\bTRANSFER_FAIL\b|Transfer failed for task",
        "the transfer engine gave up on data",
    ),
    _pattern(
        "rejected-transfer",
        r"register_buffer failed|(?i:failed to register (memory|segment|local memory))",
        "memory the transfer engine may not touch",
    ),
    _pattern(
        "connection",
        r"(?i)(connection (reset|refused|closed by peer)|broken pipe|failed to connect|cannot connect|rpc (call )?(failed|timed? ?out)|\bRPC_FAIL\b|heartbeat (failed|timed? ?out)|ping (failed|timed? ?out))",
        "a peer was not there",
    ),
    _pattern(
        "hash-fallback",
        r"Using a random per-process NONE_HASH seed|(?i:(prefix.caching.)?hash algorithm.*(fall(ing)? ?back|not available|unavailable))",
        "engines will silently share nothing",
    ),
    _pattern(
        "transport-fallback",
        r"(?i)fall(ing|s)? ?back to (tcp|the existing)|no (available|usable) (rdma|hca)|rdma.*(not available|unavailable)",
        "the transport is not the one asked for",
    ),
    _pattern(
        "close-failure",
        r"still has \d+ in-flight requests at close|Error closing MooncakeDistributedStore",
        "work was lost at the stop",
    ),
    _pattern(
        "thread-error",
        r"Error in \S*(Sending|Recving)Thread\b|Error in KVCacheStore",
        "a transfer thread swallowed an exception",
    ),
    _pattern(
        "request-error",
        r"Unexpected error pre-processing request|grammar rejected tokens|Internal Server Error|HTTP/1\.1\" 5\d\d",
        "a request failed inside the engine",
    ),
    _pattern("fatal", r"^F\d{4} \d\d:\d\d:\d\d|\bCRITICAL\b \d\d-\d\d", "glog FATAL, Python CRITICAL"),
)


def classify(line: str) -> str | None:
    """Category of a log line, or None where it is none of ours (benign, or merely informative)."""
    for pattern in BENIGN:
        if pattern.regex.search(line):
            return None
    for pattern in PATTERNS:
        if pattern.regex.search(line):
            return pattern.category
    return None


def is_benign(line: str) -> bool:
    """The line is in the table of lines known to mean nothing."""
    return any(pattern.regex.search(line) for pattern in BENIGN)


def explained(line: r.LogLine, faults: Sequence[r.FaultRecord]) -> bool:
    """A landed fault (or its heal), done before the line was seen, says that it causes such lines."""
    return any(
        fault.landed and fault.t_s <= line.t_s and any(re.search(regex, line.text) for regex in fault.explains)
        for fault in faults
    )


def check_logs(history: History, *, require_scan: bool = True) -> list[r.Finding]:
    """Every suspicious line of the case is explained by a fault that landed before it.

    Lines are classified again from their text, so that a later version of the table judges old runs; a line that this
    table does not know keeps the category under which it was recorded. One finding a unit and category.
    require_scan: a case without the fact ``logs.scanned`` is ``too-few-observations``: nobody looked.
    """
    found = _scanned(history) if require_scan else []
    faults = history.faults()
    groups: dict[tuple[str, str], list[r.LogLine]] = {}
    for line in history.of(r.LogLine):
        category = classify(line.text) or ("" if is_benign(line.text) else line.category)
        if category and not explained(line, faults):
            groups.setdefault((line.unit, category), []).append(line)
    for (unit, category), lines in groups.items():
        first = lines[0]
        found.append(
            finding(
                r.FindingCode.UNEXPLAINED_LOG,
                f"{unit}: {len(lines)} x {category}; first at line {first.line_number}: {first.text.strip()[:300]}",
                unit=unit,
                category=category,
                line_number=first.line_number,
                text=first.text,
                count=len(lines),
                faults=[f"{f.fault} {f.target} landed={f.landed}" for f in faults],
            )
        )
    return found


def _scanned(history: History) -> list[r.Finding]:
    lines: dict[str, int] = {}
    for fact in history.facts(SCANNED):
        if isinstance(fact.value, dict):
            for unit, count in fact.value.items():
                lines[str(unit)] = lines.get(str(unit), 0) + int(count)
    if not lines:
        return too_few(f"no log of the stack was read for this case (no fact {SCANNED!r})")
    return []
