"""The log oracle: what real logs hold, healthy and not, and what a fault explains."""

from typing import Any

import msgspec
import pytest

from fixtures.faults import PEER_LOSS_LOGS
from reports import records as r
from reports.history import History
from suite.checks.logs import BENIGN, PATTERNS, SCANNED, check_logs, classify
from suite.selftest.samples import codes

pytestmark = pytest.mark.selftest

# Lines of a healthy start, run and stop of a master and two engines (vLLM 0.32.0, Mooncake 0.3.13.post1, CPU).
HEALTHY = """\
WARNING: Logging before InitGoogleLogging() is written to STDERR
I1129 16:26:32.931749 16270 master_admin_service.cpp:301] Master Admin Metrics: role=leader, Failed: 0 / 0 errors
W1129 16:27:35.656006 16277 segment.cpp:228] segment_name=127.0.0.1:14088, warn=segment_already_exists
I1129 16:16:26.642222  9700 master_service.cpp:11036] client_id=2470692625746272378-2765085, action=client_expired
E1129 16:27:35.644773 16695 transfer_metadata.cpp:1098] Local segment descriptor not found
E1130 07:07:38.030169 20265 etcd_helper.cpp:75] key=mooncake-store/mooncake_cluster/master_view, error=key not found in etcd
I1129 16:27:35.644790 16695 tcp_transport.cpp:391] TcpTransport: listen on port 15195
(APIServer pid=1) WARNING 11-29 16:26:44 [system_utils.py:255] Found ulimit of 20000 and failed to automatically increase with error current limit exceeds maximum limit. This can cause fd limit errors like `OSError: [Errno 24] Too many open files`.
(APIServer pid=1) WARNING 11-29 16:26:58 [vllm.py:1703] Enforce eager set, disabling torch.compile, CUDAGraphs, and JIT kernel warmup.
(APIServer pid=1) WARNING 11-29 16:26:58 [cpu.py:224] Triton is not installed. triton-cpu is expected on x86 CPUs.
(EngineCore pid=2) INFO 11-29 16:27:12 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: kv_load_failure_policy='recompute', crash_dump=None, assertion failed text
(Worker pid=3) WARNING 11-29 16:27:33 [cpu_worker.py:114] libtcmalloc is not found in LD_PRELOAD.
(APIServer pid=1) INFO 11-29 16:27:36 [launcher.py:195] Route: /abort_requests, Methods: POST
(APIServer pid=1) INFO 11-29 16:28:17 [metrics.py:103] KV Transfer metrics: lookup_exists_failed_keys=0, load_get_failed_keys=0
INFO:     127.0.0.1:48094 - "POST /v1/completions HTTP/1.1" 200 OK
(APIServer pid=1) WARNING 11-29 16:28:25 [utils.py:653] [shutdown] Process manager: force killing remaining process EngineCore pid 16614
(Worker pid=3) INFO 11-29 16:28:25 [multiproc_executor.py:843] Parent process exited, terminating worker queues
""".splitlines()

# One line or more for each category, in the shape in which its writer prints it.
SICK = {
    "segfault": [
        "!!!!!!! Segfault encountered !!!!!!!",
        "*** SIGSEGV (@0x0) received by PID 16695 (TID 0x7f) from PID 0; stack trace: ***",
        "*** Aborted at 1764400000 (unix time) try \"date -d @1764400000\" if you are using GNU date ***",
        "Fatal Python error: Aborted",
    ],
    "crash": [
        "(EngineCore pid=2) ERROR 11-29 10:00:00 [core.py:1512] EngineCore encountered a fatal error.",
        "(APIServer pid=1) ERROR 11-29 10:00:00 [multiproc_executor.py:315] Worker proc VllmWorker-0 died unexpectedly (exit code: -9), shutting down executor.",
        "terminate called after throwing an instance of 'std::bad_alloc'",
    ],
    "cuda": ["RuntimeError: CUDA error: an illegal memory access was encountered"],
    "traceback": ["(EngineCore pid=2) ERROR 11-29 10:00:00 [core.py:1512] Traceback (most recent call last):"],
    "assert": [
        "(EngineCore pid=2) ERROR 11-29 10:00:00 [core.py:1512] AssertionError: Mismatch in number of tokens",
        "F1129 10:00:00.000000 1 x.cpp:1] Check failed: inserted ",
    ],
    "load-failure": [
        "(EngineCore pid=2) WARNING 11-29 10:00:00 [scheduler.py:3426] Recovered from KV load failure: 1 request(s) rescheduled (1984 tokens affected).",
        "(EngineCore pid=2) ERROR 11-29 10:00:00 [scheduler.py:3417] Failing 1 request(s) due to KV load failure (failure_policy=fail, 1984 tokens affected). Request IDs: {'a'}",
        "(Worker pid=3) WARNING 11-29 10:00:00 [worker.py:1287] Failed to get 62 Mooncake keys from sub-batch (batch_keys=62, first_failures=[])",
        "(Worker pid=3) WARNING 11-29 10:00:00 [worker.py:1305] Failed to get Mooncake sub-batch ['k'], error: gone",
    ],
    "save-failure": [
        "(Worker pid=3) WARNING 11-29 10:00:00 [worker.py:956] batch_put failed: 3/62 keys failed (codes={-200}, batch_bytes=1), first_key=k",
        "(Worker pid=3) ERROR 11-29 10:00:00 [worker.py:942] Failed to put key ['k'], error: gone",
    ],
    "lookup-failure": [
        "(Worker pid=3) ERROR 11-29 10:00:00 [worker.py:2170] Remote connection failed in lookup: gone",
    ],
    "rejected-transfer": [
        "E1129 10:00:00.000000 1 tcp_transport.cpp:1] ClientSession: READ rejected by server, status 2",
        "E1129 10:00:00.000000 1 tcp_transport.cpp:1] ClientSession::readBody failed. Error: End of file",
        "E1129 10:00:00.000000 1 client_service.cpp:1] Transfer failed for key: k",
        "E1129 10:00:00.000000 1 transfer_engine_py.cpp:1] Sync data transfer timeout after 30 s",
        "W1129 18:23:34.133116 26651 tcp_transport_lane_impl.h:1330] TCP lane queue-full rejection count: 1",
    ],
    "connection": [
        "E1129 16:16:29.849189  9929 master_client.cpp:370] RPC call failed: End of file",
        "E1129 16:16:29.849236  9914 client_service.cpp:3450] Failed to unmount segment from master: RPC_FAIL",
        "E1129 10:00:00.000000 1 tcp_transport.cpp:1] TcpTransport::startTransfer failed to get connection to 127.0.0.1:1",
    ],
    "hash-fallback": [
        "(EngineCore pid=2) WARNING 11-29 10:00:00 [kv_cache_utils.py:165] Using a random per-process NONE_HASH seed because xxhash is not collision resistant.",
    ],
    "kernel-fallback": [
        "LMCache WARNING: lmcache.cuda_ops compiled extension not found; CudaDeviceOps stays on the torch baseline for all ops.",
    ],
    "transport-fallback": ["W1129 10:00:00.000000 1 topology.cpp:1] No RDMA devices found, falling back to TCP"],
    "thread-error": [
        "(Worker pid=3) ERROR 11-29 10:00:00 [worker.py:360] Error in KVCacheStoreRecvingThread (req=cmpl-1)",
    ],
    "close-failure": [
        "(Worker pid=3) WARNING 11-29 10:00:00 [worker.py:2284] Mooncake store t still has 2 in-flight requests at close; closing anyway.",
    ],
    "request-error": ['INFO:     127.0.0.1:48094 - "POST /v1/completions HTTP/1.1" 500 Internal Server Error'],
    "fatal": ["F1129 10:00:00.000000 1 x.cpp:1] no such thing"],
    "error-line": [
        "(EngineCore pid=2) ERROR 11-29 10:00:00 [new.py:1] something that this table has never seen",
        "E1129 10:00:00.000000 1 new.cpp:1] something that this table has never seen",
    ],
}  # fmt: skip


@pytest.mark.parametrize("line", HEALTHY)
def test_lines_of_a_healthy_stack_are_nothing(line: str) -> None:
    assert classify(line) is None


@pytest.mark.parametrize(("category", "line"), [(c, line) for c, lines in SICK.items() for line in lines])
def test_lines_of_a_sick_stack_are_named(category: str, line: str) -> None:
    assert classify(line) == category


def test_every_category_has_a_sample_and_every_pattern_a_reason() -> None:
    assert {p.category for p in PATTERNS} == set(SICK)
    assert all(p.why for p in (*PATTERNS, *BENIGN))
    assert all(not p.category for p in BENIGN)


# --------------------------------------------------------------------------------------------------------------------

RECOVERED = SICK["load-failure"][0]


def line(text: str = RECOVERED, unit: str = "e1", number: int = 7, t_s: float = 20.0, category: str = "") -> r.LogLine:
    return r.LogLine(unit=unit, line_number=number, text=text, category=category, t_s=t_s)


def kill(t_s: float = 10.0, landed: bool = True, **changes: Any) -> r.FaultRecord:
    fields: dict[str, Any] = {"explains": ("Recovered from KV load failure", r"Failed to get \d+ Mooncake keys")}
    fields.update(changes)
    return r.FaultRecord(
        fault_id="f", fault="kill", target="e0", action="inject", landed=landed, t_s=t_s, proof={"pid": 1}, **fields
    )


READ = r.Fact(name=SCANNED, t_s=30.0, value={"e0": 120, "e1": 118})


def check(*records: r.Record, **options: Any) -> list[str]:
    return codes(check_logs(History([*records, READ]), **options))


def test_a_clean_log_that_was_read_passes() -> None:
    assert check() == []
    assert check(*(line(text) for text in HEALTHY)) == []


def test_an_unread_log_proves_nothing() -> None:
    assert codes(check_logs(History([]))) == ["too-few-observations"]
    empty = History([r.Fact(name=SCANNED, t_s=1, value={})])
    assert codes(check_logs(empty)) == ["too-few-observations"]
    assert check_logs(History([]), require_scan=False) == []
    assert codes(check_logs(History([line()]))) == ["too-few-observations", "unexplained-log"]


def test_one_log_that_could_not_be_read_proves_nothing_though_others_were() -> None:
    lost = r.Fact(name=SCANNED, t_s=31.0, value={"e0": 130, "e1": None})
    (found,) = check_logs(History([READ, lost]))
    assert codes([found]) == ["too-few-observations"]
    assert "the log of e1" in found.message
    again = r.Fact(name=SCANNED, t_s=32.0, value={"e0": 140, "e1": 150})
    assert check_logs(History([lost, again])) == [], "what was missed was read later, from where reading had ended"


def test_a_recovery_that_no_fault_explains_is_found() -> None:
    found = check_logs(History([line(number=9), line(number=12), READ]))
    assert codes(found) == ["unexplained-log"]
    assert (found[0].evidence["unit"], found[0].evidence["line_number"], found[0].evidence["count"]) == ("e1", 9, 2)
    assert found[0].evidence["category"] == "load-failure"


def test_units_and_categories_are_told_apart() -> None:
    traceback = SICK["traceback"][0]
    assert len(check(line(), line(unit="e0"), line(traceback), line(traceback))) == 3


def test_a_fault_explains_only_what_it_names_and_only_afterwards() -> None:
    assert check(kill(), line()) == []
    assert check(kill(t_s=25.0), line(t_s=20.0)) == ["unexplained-log"]
    assert check(kill(landed=False), line()) == ["unexplained-log"]
    assert check(kill(explains=()), line()) == ["unexplained-log"]
    assert check(kill(), line(), line(SICK["traceback"][0])) == ["unexplained-log"]


EXPLAINED = (
    "E1130 07:13:16.224263 21410 etcd_helper.cpp:81] key=mooncake-store/mooncake_cluster/master_view, error=context deadline exceeded",
    "E1130 07:13:16.300000 21410 master_service_supervisor.cpp:310] Master service stopped: 1",
    "E1130 07:13:17.000000 20626 master_client.cpp:341] Client not available",
    "(Worker pid=31) WARNING 11-30 07:11:05 [worker.py:930] Detected Mooncake CPU/disk offloading pressure (NO_AVAILABLE_HANDLE); skipping",
    "E1130 07:12:29.330983 21449 etcd_helper.cpp:279] lease_id=1364487518888899888, error=keep alive channel closed",
    "E1130 07:05:29.433512 18285 tcp_transport_session_impl.h:753] ClientSession::readBody failed. Attempt to read data 0x7fe8 using buffer 0x7fe8. Error: End of file",
    "E1130 07:02:00.409209 17281 master_service.cpp:4523] Illegal client 17099346934172656338-1307238 to PutEnd key k, was PutStart-ed by 12559871721780774383-17132",
    "E1130 07:02:00.413337 16027 client_service.cpp:2849] Failed to BatchPutEnd key k: ILLEGAL_CLIENT",
)


def test_what_comes_of_a_lost_peer_is_explained_by_its_loss_and_by_nothing_else() -> None:
    for text in EXPLAINED:
        assert check(kill(explains=PEER_LOSS_LOGS), line(text)) == []
        assert check(line(text)) == ["unexplained-log"]


def test_an_engine_that_was_told_to_stop_may_say_that_its_core_is_gone_and_no_other_may() -> None:
    text = "(APIServer pid=1) ERROR 11-30 07:22:45 [async_llm.py:906] AsyncLLM output_handler failed."
    stop = msgspec.structs.replace(kill(explains=()), fault="stop")
    assert check(stop, line(text, unit="e0")) == []
    assert check(stop, line(text, unit="e1")) == ["unexplained-log"]
    assert check(kill(explains=()), line(text, unit="e0")) == ["unexplained-log"]
    assert check(msgspec.structs.replace(stop, landed=False), line(text, unit="e0")) == ["unexplained-log"]
    assert check(stop, line(SICK["crash"][0], unit="e0")) == ["unexplained-log"]


def test_lines_are_judged_by_their_text_then_by_their_recorded_category() -> None:
    unknown = "a message of a later release"
    assert check(line(unknown, category="crash")) == ["unexplained-log"]
    assert check(line(unknown)) == []
    assert check(line(HEALTHY[4], category="error-line")) == []
