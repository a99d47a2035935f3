"""Records of a run: what was seen, what was done, and what it means.

Every fact that a verdict rests on is one of these frozen structs. They are a leaf: this module imports nothing of the
project, so that checks and judges can depend on it alone and a finished run can be judged on any machine.

Times named ``*_s`` are seconds on ``CLOCK_MONOTONIC`` of the host that ran the suite (one clock for all records of a
run); ``wall_s`` is Unix time. Token counts are counts of tokens, never of blocks.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, ClassVar, Literal

import msgspec

FORMAT_VERSION = 1
"""Version of the evidence format. Readers accept every version up to their own."""


class Outcome(StrEnum):
    """The five things a case can come to."""

    PASS = "PASS"
    FAIL = "FAIL"
    INCONCLUSIVE = "INCONCLUSIVE"
    """The evidence is not enough to say PASS or FAIL."""
    UNTESTABLE = "UNTESTABLE"
    """This host lacks something the case needs."""
    HARNESS_ERROR = "HARNESS_ERROR"
    """The suite itself failed: a fault did not land, a checker crashed, a precondition was not met."""


class FindingCode(StrEnum):
    """Stable codes for *why* a case did not pass. Codes are never renamed; retired ones stay as tombstones."""

    # Content
    WRONG_ANSWER = "wrong-answer"
    FOREIGN_REUSE = "foreign-reuse"
    UNDETECTED_CORRUPTION = "undetected-corruption"
    # Accounting
    ZERO_HITS = "zero-hits"
    FEWER_HITS = "fewer-hits"
    EXTRA_HITS = "extra-hits"
    CONSERVATION = "conservation"
    SOURCE_DISAGREEMENT = "source-disagreement"
    SAVE_NOT_VISIBLE = "save-not-visible"
    # Parity of configuration
    SEED_MISMATCH = "seed-mismatch"
    SHARED_LOOKUP_CHANNEL = "shared-lookup-channel"
    # Failure behaviour
    FAILED_REQUEST = "failed-request"
    HANG = "hang"
    STUCK_BEHIND_HEALTH = "stuck-behind-health"
    SLOW_DEGRADE = "slow-degrade"
    UNBOUNDED_LOOKUPS = "unbounded-lookups"
    ENGINE_DIED = "engine-died"
    NEVER_READY = "never-ready"
    SILENT_FALLBACK = "silent-fallback"
    # Recovery
    HITS_NOT_BACK = "hits-not-back"
    KV_LEAK = "kv-leak"
    ADMISSION_REFUSED = "admission-refused"
    RESOURCE_GROWTH = "resource-growth"
    # Operations
    UNEXPLAINED_LOG = "unexplained-log"
    MISLEADING_MESSAGE = "misleading-message"
    EXPOSED_PORT = "exposed-port"
    UNCLEAN_STOP = "unclean-stop"
    # Performance
    SLOWER_THAN_RECOMPUTE = "slower-than-recompute"
    # Planted defects
    MISSED_DEFECT = "missed-defect"
    """A gate stayed green over a planted defect, or turned red for another reason than it should."""
    FALSE_ALARM = "false-alarm"
    """A gate turned red where nothing was planted."""
    # INCONCLUSIVE
    TOO_FEW_OBSERVATIONS = "too-few-observations"
    ORACLE_BLIND = "oracle-blind"
    NO_CONTROL = "no-control"
    # HARNESS_ERROR
    FAULT_DID_NOT_LAND = "fault-did-not-land"
    NO_PRESSURE = "no-pressure"
    CHECKER_CRASHED = "checker-crashed"
    HARNESS_EXCEPTION = "harness-exception"
    INCOMPLETE_CASE = "incomplete-case"
    # UNTESTABLE
    MISSING_CAPABILITY = "missing-capability"


INCONCLUSIVE_CODES = frozenset({FindingCode.TOO_FEW_OBSERVATIONS, FindingCode.ORACLE_BLIND, FindingCode.NO_CONTROL})
HARNESS_CODES = frozenset(
    {
        FindingCode.FAULT_DID_NOT_LAND,
        FindingCode.NO_PRESSURE,
        FindingCode.CHECKER_CRASHED,
        FindingCode.HARNESS_EXCEPTION,
        FindingCode.INCOMPLETE_CASE,
    }
)


class Record(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """Base of every record that a history holds."""


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the structs inside a record."""


# --------------------------------------------------------------------------------------------------------------------
# Requests


class Choice(Part, frozen=True, kw_only=True):
    """One more answer to the same request (n > 1); the fields are those of ``Observation``."""

    output_token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    token_logprobs: tuple[float, ...] = ()
    finish_reason: str | None = None
    token_s: tuple[float, ...] = ()
    text: str = ""


class Observation(Record, frozen=True, kw_only=True, tag="observation"):
    """One request and everything the client saw of it. Written when the request ended, however it ended.

    ``http_status`` is None when no response header arrived. ``error`` is "" for a complete, well-formed answer.
    ``deadline_s`` is the time the request was given; ``timed_out`` says that this deadline ended it.
    ``cancelled`` says that the suite cancelled it on purpose.
    """

    request_id: str
    case_id: str
    phase: str
    engine: str
    role: str = ""
    """What the request is for: ``save``, ``cold``, ``native``, ``external``, ``victim``, ``bystander``, ``probe``, ..."""
    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    """One tuple a generated token: (token id, natural-log probability), best first. Empty when not asked for."""
    token_logprobs: tuple[float, ...] = ()
    """Log probability (nat) of each generated token."""
    http_status: int | None = None
    finish_reason: str | None = None
    usage_prompt_tokens: int | None = None
    cached_tokens: int | None = None
    """``usage.prompt_tokens_details.cached_tokens``: local and external together. None when not reported."""
    sent_s: float
    first_token_s: float | None = None
    token_s: tuple[float, ...] = ()
    """Arrival of each generated token; tokens that arrive in one chunk share a time."""
    done_s: float
    deadline_s: float
    timed_out: bool = False
    cancelled: bool = False
    error: str = ""
    cache_salt: str | None = None
    sampling: dict[str, Any] = {}
    """The request's other parameters as sent: max_tokens, temperature, seed, logprobs, n, ..."""
    text: str = ""
    more_choices: tuple[Choice, ...] = ()
    """Choices 1 to n-1 where n > 1; choice 0 is in the fields above."""
    prompt_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    """As ``top_logprobs``, for each prompt token from the second one on. Empty when not asked for."""

    @property
    def ttft_s(self) -> float | None:
        """Seconds from sending to the first generated token; None when none came."""
        return None if self.first_token_s is None else self.first_token_s - self.sent_s

    @property
    def duration_s(self) -> float:
        """Seconds from sending to the end, whatever the end was."""
        return self.done_s - self.sent_s

    @property
    def ok(self) -> bool:
        """A complete answer: status 200, no error, finished by itself."""
        return self.http_status == 200 and not self.error and not self.timed_out and not self.cancelled


# --------------------------------------------------------------------------------------------------------------------
# The stack


class ProcessFacts(Part, frozen=True, kw_only=True):
    """One process of a stack, as the kernel describes it (not as the launcher meant it)."""

    name: str
    """Launched unit it belongs to: ``e0``, ``master``, ``owner0``, ..."""
    title: str = ""
    """The process's own name or title, e.g. ``VLLM::EngineCore``."""
    pid: int
    ppid: int
    start_ticks: int
    """Field 22 of /proc/PID/stat: with the pid it identifies a process for ever."""
    cmdline: tuple[str, ...] = ()
    env: dict[str, str] = {}
    """Whitelisted variables read from /proc/PID/environ."""


class Deviation(Part, frozen=True, kw_only=True):
    """A setting of the stack that differs from what upstream does by default."""

    where: str
    setting: str
    upstream: str
    ours: str
    reason: str


class KvLayers(Part, frozen=True, kw_only=True):
    """Layers of a model that keep the same of the tokens before.

    kind: ``full`` (all of them), ``window`` (the last ``window_tokens``), or ``state`` (one state, whatever their number).
    """

    kind: str
    layers: int
    token_bytes: int
    """Bytes that a token which is kept takes in these layers together; 0 for a state."""
    window_tokens: int = 0


class EngineFacts(Part, frozen=True, kw_only=True):
    """What a judge needs to know of an engine. ``block_tokens`` is the KV block size in tokens."""

    name: str
    url: str
    model: str
    served_model: str
    connector: str
    block_tokens: int
    max_model_len: int
    load_failure_policy: str
    hash_seed: str | None
    versions: dict[str, str] = {}
    kv_bytes_per_token: int = 0
    """Bytes of KV (all layers, K and V) a token takes in the pool; 0 when unknown."""
    kv_layers: tuple[KvLayers, ...] = ()
    """What the layers keep; empty when unknown, or in evidence of a suite that knew full attention alone."""
    layers: int = 0
    settings: dict[str, Any] = {}

    @property
    def keeps_all(self) -> bool:
        """Every layer keeps every token: each whole block of a prompt is one key a rank, and a hit reads all of its bytes."""
        return all(layers.kind == "full" for layers in self.kv_layers)

    @property
    def caches_prefixes(self) -> bool:
        """The engine has a prefix cache of its own; without one it reads even what it saved itself from the pool."""
        return bool(self.settings.get("prefix_caching", True))


class StackUp(Record, frozen=True, kw_only=True, tag="stack-up"):
    """A stack became ready. Later records carry its ``stack_id``."""

    stack_id: str
    t_s: float
    spec: dict[str, Any]
    engines: tuple[EngineFacts, ...]
    processes: tuple[ProcessFacts, ...] = ()
    deviations: tuple[Deviation, ...] = ()
    start_s: dict[str, float] = {}
    """Seconds each unit took to become ready."""


class StackDown(Record, frozen=True, kw_only=True, tag="stack-down"):
    """A stack was stopped. ``leftovers`` names whatever was still there and had to be removed by force."""

    stack_id: str
    t_s: float
    reason: str = ""
    leftovers: tuple[str, ...] = ()


class StartAttempt(Record, frozen=True, kw_only=True, tag="start-attempt"):
    """A unit was started and watched: ``ready``, ``dead`` (it exited by itself) or ``neither`` within the bound."""

    unit: str
    t_s: float
    elapsed_s: float
    bound_s: float
    result: Literal["ready", "dead", "neither"]
    exit_code: int | None = None
    log_tail: tuple[str, ...] = ()


class ProcessSnapshot(Record, frozen=True, kw_only=True, tag="processes"):
    """Processes of a unit at one moment (to show that an engine is still the same engine, or what died)."""

    unit: str
    t_s: float
    label: str = ""
    processes: tuple[ProcessFacts, ...] = ()
    states: dict[str, str] = {}
    """pid (as text) -> state letter from /proc/PID/stat."""
    threads: int = 0
    sockets: int = 0
    rss_bytes: int = 0


class UnixSocket(Part, frozen=True, kw_only=True):
    """One line of the kernel's list of UNIX sockets: a bound path and the process that holds it."""

    path: str
    inode: int
    listening: bool
    pid: int | None = None
    unit: str = ""


class SocketSnapshot(Record, frozen=True, kw_only=True, tag="sockets"):
    """UNIX sockets of the stack's processes, from /proc/net/unix and /proc/PID/fd."""

    t_s: float
    label: str = ""
    unix: tuple[UnixSocket, ...] = ()
    listening: tuple[str, ...] = ()
    """``unit address:port`` of every listening TCP socket of the stack."""
    addresses: dict[str, str] = {}
    """unit -> its own address, where units have one each (containers): two of them may listen on ports of one number."""

    def unit_at(self, endpoint: str) -> str | None:
        """Unit that listens at an endpoint as the store lists it, or None.

        By port alone: the store lists the address that a client advertises, the kernel the one that it binds (all interfaces).
        """
        if exact := [line.partition(" ")[0] for line in self.listening if line.partition(" ")[2] == endpoint]:
            return exact[0]
        host, _, port = endpoint.rpartition(":")
        holders = [line.partition(" ")[0] for line in self.listening if line.rpartition(":")[2] == port]
        if host in self.addresses.values():
            holders = [unit for unit in holders if self.addresses.get(unit) == host]
        return next(iter(holders), None)


# --------------------------------------------------------------------------------------------------------------------
# Cases


class RunStarted(Record, frozen=True, kw_only=True, tag="run-started"):
    """First record of a run."""

    run_id: str
    format_version: int = FORMAT_VERSION
    suite_version: str
    wall_s: float
    t_s: float
    worker: str = ""
    command: tuple[str, ...] = ()
    host: dict[str, Any] = {}
    options: dict[str, Any] = {}


class RunFinished(Record, frozen=True, kw_only=True, tag="run-finished"):
    """Last record of a run that was not cut short."""

    t_s: float
    exit_code: int


class CaseStarted(Record, frozen=True, kw_only=True, tag="case-started"):
    """A case began. ``params`` is all that a judge needs to know of the case besides the history."""

    case_id: str
    gate: str
    gate_version: int
    claim: str
    params: dict[str, Any] = {}
    stack_id: str = ""
    t_s: float


class CaseFinished(Record, frozen=True, kw_only=True, tag="case-finished"):
    """Collection of a case ended. Without this record the case was cut short and cannot be judged in full."""

    case_id: str
    t_s: float
    error: str = ""
    """Traceback of a collection that raised; "" when it ran to its end."""


class PhaseStarted(Record, frozen=True, kw_only=True, tag="phase"):
    """A named phase of a case's collection began."""

    case_id: str
    name: str
    t_s: float


class MetricsSnapshot(Record, frozen=True, kw_only=True, tag="metrics"):
    """Counters of one unit at one moment, under the suite's canonical names (``fixtures.telemetry``)."""

    unit: str
    label: str
    t_s: float
    values: dict[str, float]


class FaultRecord(Record, frozen=True, kw_only=True, tag="fault"):
    """Something was done to the stack on purpose. ``landed`` is True only with a proof from outside the injector."""

    fault_id: str
    fault: str
    """``kill``, ``freeze``, ``partition``, ..."""
    target: str
    action: Literal["inject", "heal"]
    landed: bool
    proof: dict[str, Any] = {}
    t_s: float
    explains: tuple[str, ...] = ()
    """Regular expressions of log lines that this fault explains (rule 11)."""


class StoreListing(Record, frozen=True, kw_only=True, tag="store-listing"):
    """What the store itself says it holds."""

    t_s: float
    label: str = ""
    key_count: int
    keys: tuple[str, ...] = ()
    segments: dict[str, Any] = {}


class WaitRecord(Record, frozen=True, kw_only=True, tag="wait"):
    """A wait with a bound: what for, how long it took, whether it came true, and where the bound comes from."""

    what: str
    t_s: float
    elapsed_s: float
    bound_s: float
    came_true: bool
    bound_source: str = ""


class HealthProbe(Record, frozen=True, kw_only=True, tag="health"):
    """The health endpoint's answer at one moment; never proof of liveness, only to be set beside a completion."""

    engine: str
    t_s: float
    http_status: int | None
    elapsed_s: float
    error: str = ""


class LogLine(Record, frozen=True, kw_only=True, tag="log"):
    """A suspicious log line of a unit of the stack (crash, traceback, rejected transfer, recovery)."""

    unit: str
    line_number: int
    text: str
    category: str
    case_id: str = ""
    t_s: float


class Fact(Record, frozen=True, kw_only=True, tag="fact"):
    """Any other observed fact a judge needs; ``name`` is dotted and documented by the gate that writes it."""

    name: str
    t_s: float
    value: Any = None


class Finding(Part, frozen=True, kw_only=True):
    """Why a case did not pass, with the smallest evidence that shows it."""

    code: FindingCode
    message: str
    evidence: dict[str, Any] = {}


class Verdict(Record, frozen=True, kw_only=True, tag="verdict"):
    """The verdict of one case: a pure function of the history.

    The text fields are what a person reads, in the order of the failure message: claim, got, wanted, finding,
    likely cause, visible in production, next command.
    """

    case_id: str
    gate: str
    outcome: Outcome
    claim: str
    got: str = ""
    wanted: str = ""
    findings: tuple[Finding, ...] = ()
    cause: str = ""
    production: str = ""
    """The metric or log that shows this in production, or ``invisible``. Empty for PASS."""
    next_command: str = ""
    numbers: dict[str, Any] = {}
    notes: tuple[str, ...] = ()
    """True and worth knowing, without bearing on the outcome."""
    gate_version: int = 1
    reproduction: str = ""
    """Path (relative to the run) of a minimal reproduction, when one was written."""

    SUMMARY_ORDER: ClassVar[tuple[str, ...]] = (
        "claim",
        "got",
        "wanted",
        "findings",
        "cause",
        "production",
        "next_command",
    )

    @property
    def finding(self) -> str:
        """Code of the primary finding, or ""."""
        return str(self.findings[0].code) if self.findings else ""


AnyRecord = (
    Observation
    | StackUp
    | StackDown
    | StartAttempt
    | ProcessSnapshot
    | SocketSnapshot
    | RunStarted
    | RunFinished
    | CaseStarted
    | CaseFinished
    | PhaseStarted
    | MetricsSnapshot
    | FaultRecord
    | StoreListing
    | WaitRecord
    | HealthProbe
    | LogLine
    | Fact
    | Verdict
)
