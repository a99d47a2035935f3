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


# fmt: off
BENIGN: tuple[Pattern, ...] = (
    _pattern("", r"transfer_metadata\.cpp:\d+\] Local segment descriptor not found", "every healthy start of a Mooncake client: it asks before it registers"),
    _pattern("", r"warn=segment_already_exists", "every healthy mount: the master answers a repeated request"),
    _pattern("", r"etcd_helper\.cpp:\d+\] key=\S*/master_view, error=key not found in etcd", "every healthy start of masters with etcd: who leads is asked before anybody was elected; that nobody leads shows in requests"),
    _pattern("", r"Found ulimit of \d+ and failed to automatically increase", "vLLM at start; names OSError as an example"),
    _pattern("", r"Initializing a V1 LLM engine|non-default args|EngineArgs\(|kv_load_failure_policy\s*[=:']", "prints settings, whose names may hold any word"),
    _pattern("", r"\bRoute: /", "vLLM lists its HTTP routes"),
    _pattern("", r"KV Transfer metrics: ", "vLLM's periodic counters; names such as failed_keys"),
    _pattern("", r"Master Admin Metrics: |Master Metrics: ", "the master's periodic counters"),
    _pattern("", r"resource_tracker: There appear to be \d+ leaked", "Python at exit, after a stop that was asked for"),
    _pattern("", r"Failed to import from vllm\._\w+", "CPU builds carry other extension modules"),
    _pattern("", r"(?i)\btriton\b.*not installed|no (cuda|gpu)s? (is |are )?(available|detected|found)", "CPU platform"),
)

PATTERNS: tuple[Pattern, ...] = (
    _pattern("segfault", r"(?i)\bsegmentation fault\b|\bSIG(SEGV|BUS|ABRT|ILL|FPE)\b|\*\*\* Aborted at", "a process died of a signal (glog prints it so)"),
    _pattern("segfault", r"!!!!!!! Segfault|Fatal Python error", "first lines of vLLM's and of Python's own handlers"),
    _pattern("crash", r"EngineCore (encountered a fatal error|failed to start)|EngineDeadError|EngineCore\S* died|engine core exited unexpectedly", "vLLM: the core process is lost"),
    _pattern("crash", r"Worker proc \S+ died unexpectedly|WorkerProc (failed|hit an exception)|AsyncLLM output_handler failed", "vLLM: a worker or the output loop is lost"),
    _pattern("crash", r"terminate called (after throwing|without an active)|\bcore dumped\b|(?i:\bout of memory\b|\boom-?kill)|\bstd::bad_alloc\b|\bMemoryError\b", "C++ abort, or memory exhausted"),
    _pattern("cuda", r"(?i:\bCUDA (error|driver error)\b|device-side assert|illegal memory access)|\bCUBLAS_STATUS_(?!SUCCESS)|\bNVRM: Xid\b", "GPU failure"),
    _pattern("traceback", r"Traceback \(most recent call last\)|Exception in thread|Task exception was never retrieved|Exception in ASGI application", "an exception that nobody handled, or one logged with its trace"),
    _pattern("assert", r"\bAssertionError\b|Assertion [`']|(?i:\bassert(ion)? failed\b)|\bCheck failed:", "assertions of Python, C, Mooncake and glog"),
    _pattern("load-failure", r"Recovered from KV load failure|Failing \d+ request\(s\) due to KV load failure", "vLLM: a promised block was not loaded; recomputed, or failed"),
    _pattern("load-failure", r"Failed to get \d+ Mooncake keys|Failed to get Mooncake sub-batch|Skipping Mooncake load for request", "the connector: the same, seen at its cause"),
    _pattern("load-failure", r"transfer_read(_range)?_failed|BatchGet failed|Batch get \w+( \w+)? failed|\(lease expired\)", "Mooncake client: the same, one level down"),
    _pattern("save-failure", r"batch_put failed|Failed to put (key|boundary-state keys)|Boundary-state put failed|NO_AVAILABLE_HANDLE|BatchPut\w* failed", "a block was not saved"),
    _pattern("lookup-failure", r"Remote connection failed in lookup|Async Mooncake lookup failed|unknown msg_type|Batch isExist failed|BatchExistKey failed", "the pool could not be asked"),
    _pattern("rejected-transfer", r"(READ|WRITE) rejected by server|(?i:\b(read|write|transfer)\b.{0,40}\b(rejected|refused)\b|\brejected transfer\b)", "the owner's transfer server refused a range"),
    _pattern("rejected-transfer", r"malformed (READ|WRITE) \w+ frame|(Client|Server)Session::\w+ failed|failed to read (READ|WRITE) \w+ frame", "the transfer protocol broke"),
    _pattern("rejected-transfer", r"\bTransfer (failed|submission failed)|Failed to submit all transfers|submitTransfer failed|TRANSFER_FAIL\b|(?i:\bdata transfer timeout)|scatter transfer .*(failed|timed out)", "the transfer engine gave up on data"),
    _pattern("rejected-transfer", r"queue-full rejection count|lane failure totals: queue_full=[1-9]", "the TCP transport turned away what its queue for one peer does not hold"),
    _pattern("rejected-transfer", r"register_buffer failed|(?i:failed to register .*memory)|(?i:corrupted segment descriptor)", "memory that the transfer engine may not touch"),
    _pattern("connection", r"TcpTransport::\w+ failed|(?i:failed to ping master|heartbeat failed|ping failed)|Failed to remount segments", "a peer was not there, or was given up"),
    _pattern("connection", r"RPC call failed|\bRPC_FAIL\b|(?i:connection (reset|refused|closed by peer|timed out)|broken pipe|failed to connect)", "a peer was not there"),
    _pattern("load-failure", r"batch_get_into (failed|threw)|batch_get_buffer failed|Buffer \d+ is None for key|Failed to process buffer \d+|[Bb]locking timeout|Error occurred in (batched_)?get_blocking|number of retrieved tokens is less than", "LMCache: a chunk that was promised did not come"),
    _pattern("save-failure", r"Timeout (during batch_put_from|when putting key)|Put task failed for key|Failed to allocate memory .*not be stored", "LMCache: a chunk was not saved"),
    _pattern("lookup-failure", r"Connection is None in |Failed to initialize/re-establish remote connection|LMCache is unhealthy|Remote connection failed in", "LMCache goes on without its pool, and says so in a warning"),
    _pattern("kernel-fallback", r"stays on the torch baseline for all ops", "LMCache: its compiled kernels did not load; it is another, slower program then"),
    _pattern("hash-fallback", r"Could not load '(?!builtin')\w+' from vLLM", "LMCache: the hash algorithm asked for is not there (its default is Python's own, which vLLM never has)"),
    _pattern("error-line", r"LMCache (ERROR|CRITICAL):", "as the last line of this table, in LMCache's own format"),
    _pattern("hash-fallback", r"Using a random per-process NONE_HASH seed|(?i:hash algorithm.*(fall(ing)? ?back|not available|unavailable))", "engines will silently share nothing"),
    _pattern("transport-fallback", r"(?i:fall(ing|s)? ?back to (tcp|the existing|rdma)|\brdma\b.*(not available|unavailable|unusable))", "the transport is not the one asked for"),
    _pattern("thread-error", r"Error in \S+ \(req=", "a transfer thread of the connector swallowed an exception"),
    _pattern("close-failure", r"in-flight requests at close|Error closing MooncakeDistributedStore", "work was lost at the stop"),
    _pattern("request-error", r"Unexpected error pre-processing request|grammar rejected tokens|Internal Server Error|HTTP/1\.1\" 5\d\d", "a request failed inside the engine"),
    _pattern("fatal", r"^F\d{4} \d\d:\d\d:\d\d|\bCRITICAL \d\d-\d\d", "glog FATAL, Python CRITICAL"),
    _pattern("error-line", r"^E\d{4} \d\d:\d\d:\d\d|\bERROR \d\d-\d\d", "any other line that its writer calls an error: an unknown one passes only with a reason in BENIGN"),
)
# fmt: on


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


OWN_STOP = re.compile(r"\[async_llm\.py:\d+\]")
"""Lines of an engine that was told to stop and did: its API server may find the core process gone first, and says so as it does of
a crash, with a traceback (vLLM 0.32.0, about one stop in four; exit code 0). Of any other engine they are a crash."""


def explained(line: r.LogLine, faults: Sequence[r.FaultRecord]) -> bool:
    """A landed fault (or its heal), done before the line was seen, says that it causes such lines."""
    return any(
        fault.landed
        and fault.t_s <= line.t_s
        and (any(re.search(regex, line.text) for regex in fault.explains) or _of_its_own_stop(line, fault))
        for fault in faults
    )


def _of_its_own_stop(line: r.LogLine, fault: r.FaultRecord) -> bool:
    told = fault.fault == "stop" and fault.action == "inject" and fault.target == line.unit
    return told and OWN_STOP.search(line.text) is not None


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
    last: dict[str, int | None] = {}
    for fact in history.facts(SCANNED):
        if isinstance(fact.value, dict):
            last |= fact.value
    if not last:
        return too_few(f"no log of the stack was read for this case (no fact {SCANNED!r})")
    unread = [unit for unit, lines in last.items() if lines is None]
    return too_few(f"the log of {', '.join(unread)} could not be read: what it tells is not known") if unread else []
