"""The pool's servers: a real master and a real owner, started from their plans, and what the admin interface says of them."""

import os
import re
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest

from fixtures import stores
from fixtures.errors import HarnessError, UsageError
from fixtures.runtimes.base import Launch
from fixtures.runtimes.proc import thread_states
from fixtures.spec import StackSpec, parse_spec
from fixtures.store_admin import Segment, StoreAdmin, store_ready
from fixtures.stores import MASTER_DEFAULTS, StorePlan, plan_master, plan_owner
from fixtures.waiting import wait_for

pytestmark = [pytest.mark.selftest, pytest.mark.needs("cpu-stack")]

GOLDEN = Path(__file__).parent / "golden"
KEY = "tiny-base@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@00ff"


def stack(store: str = "") -> StackSpec:
    return parse_spec(f'name = "x"\n[store]\nsegment_bytes = 16777216\n{store}\n[engine]\n', "x.toml")


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[Launch], subprocess.Popen[bytes]]]:
    """Starts a plan as it stands: its command line, its environment, nothing else."""
    running: list[subprocess.Popen[bytes]] = []

    def begin(launch: Launch) -> subprocess.Popen[bytes]:
        launch.directory.mkdir(parents=True, exist_ok=True)
        with (launch.directory / launch.log_name).open("wb") as log:
            unit = subprocess.Popen(launch.argv, env=launch.env, stdout=log, stderr=log, cwd=launch.directory)
        running.append(unit)
        return unit

    yield begin
    for unit in reversed(running):
        if unit.poll() is None:
            os.kill(unit.pid, signal.SIGCONT)
            unit.terminate()
        try:
            unit.wait(timeout=5)
        except subprocess.TimeoutExpired:
            unit.kill()
            unit.wait()


def master(tmp_path: Path, spec: StackSpec | None = None) -> StorePlan:
    return plan_master(spec or stack(), rpc_port=free_port(), admin_port=free_port(), directory=tmp_path / "master")


def up(admin: StoreAdmin, unit: subprocess.Popen[bytes]) -> None:
    wait_for(
        "the master to answer",
        admin.health,
        bound_s=10,
        bound_source="it takes 0.1 s on two cores",
        poll_s=0.02,
        dead=lambda: f"it exited with {unit.returncode}" if unit.poll() is not None else None,
    )


@pytest.mark.slow
def test_a_real_master_and_owner_come_up_from_their_plans(
    tmp_path: Path, start: Callable[[Launch], subprocess.Popen[bytes]]
) -> None:
    plan = master(tmp_path)
    with StoreAdmin(plan.admin_url) as admin:
        assert not admin.health()
        unit = start(plan.launch)
        up(admin, unit)
        assert store_ready(plan.admin_url)
        assert admin.status()["role"] == "leader"
        assert (admin.keys(), admin.key_count(), admin.segments()) == ([], 0, {})
        assert admin.query_key(KEY) == ()
        assert admin.metrics()["master_total_capacity_bytes"] == 0
        listening = {c.laddr for c in psutil.Process(unit.pid).net_connections("tcp") if c.status == "LISTEN"}
        assert listening == {("127.0.0.1", port) for port in plan.launch.ports}

        owner = plan_owner(
            stack(),
            name="owner0",
            port=free_port(),
            master_address=plan.address,
            directory=tmp_path / "owner0",
        )
        owner_unit = start(owner.launch)
        wait_for(
            "the owner's segment",
            lambda: admin.segments() or None,
            bound_s=10,
            bound_source="it takes 0.3 s",
            poll_s=0.05,
        )
        (segment,) = admin.segment_list()
        assert (segment.capacity_bytes, segment.used_bytes, segment.protocol) == (16777216, 0, "tcp")
        ports = {c.laddr.port for c in psutil.Process(owner_unit.pid).net_connections("tcp") if c.status == "LISTEN"}
        assert int(segment.endpoint.rsplit(":", 1)[1]) in ports  # the way from a block to the process that owns it

        os.kill(unit.pid, signal.SIGSTOP)
        wait_for(
            "every thread of the master to stop",
            lambda: thread_states(unit.pid) == {"T"} or None,
            bound_s=5,
            bound_source="each thread takes the signal for itself: milliseconds",
            poll_s=0.01,
        )
        with StoreAdmin(plan.admin_url, deadline_s=0.2) as impatient:
            assert not impatient.health()  # a frozen master is not healthy, and asking it does not hang
            with pytest.raises(HarnessError, match="no answer"):
                impatient.key_count()


@pytest.mark.slow
def test_a_master_that_cannot_bind_its_port_exits(
    tmp_path: Path, start: Callable[[Launch], subprocess.Popen[bytes]]
) -> None:
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        plan = plan_master(
            stack(), rpc_port=taken.getsockname()[1], admin_port=free_port(), directory=tmp_path / "master"
        )
        unit = start(plan.launch)
        assert unit.wait(timeout=10) != 0


def test_whatever_depends_on_time_or_listens_is_explicit(tmp_path: Path) -> None:
    plan = master(
        tmp_path,
        stack("client_ttl_s = 3\nkv_lease_ttl_ms = 700\neviction_ratio = 0.25\neviction_high_watermark_ratio = 0.95"),
    )
    flags = dict(arg.removeprefix("--").split("=", 1) for arg in plan.launch.argv[1:] if "=" in arg)
    assert flags == MASTER_DEFAULTS | {
        "rpc_port": str(plan.launch.ports[0]),
        "metrics_port": str(plan.launch.ports[1]),
        "rpc_address": "127.0.0.1",
        "metrics_host": "127.0.0.1",
        "client_ttl": "3",
        "default_kv_lease_ttl": "700",
        "eviction_high_watermark_ratio": "0.95",
        "eviction_ratio": "0.25",
    }
    assert {(d.setting, d.upstream, d.ours) for d in plan.deviations} == {
        ("--rpc_address", "0.0.0.0", "127.0.0.1"),
        ("--metrics_host", "0.0.0.0", "127.0.0.1"),
        ("--client_ttl", "10", "3"),
        ("--default_kv_lease_ttl", "10000", "700"),
        ("--eviction_high_watermark_ratio", "0.9", "0.95"),
        ("--eviction_ratio", "0.05", "0.25"),
    }


def test_upstreams_defaults_are_what_the_installed_master_says() -> None:
    said = subprocess.run(
        [stores.mooncake_binary("mooncake_master"), "--help"], capture_output=True, text=True, check=False
    ).stdout
    flags = {
        name: default.strip('"')
        for name, default in re.findall(
            r"^ +-(\w+) \(.*?\)\s+type: \w+\s+default: (\S+)", said, re.MULTILINE | re.DOTALL
        )
    }
    missing = set(MASTER_DEFAULTS) - set(flags)
    assert not missing
    for name, ours in MASTER_DEFAULTS.items():
        upstream = flags[name]
        same = float(upstream) == float(ours) if "ratio" in name else upstream == ours
        assert same, f"--{name}: the installed master's default is {upstream}, MASTER_DEFAULTS says {ours}"


def test_the_users_master_arguments_come_last_and_are_on_record(tmp_path: Path) -> None:
    plan = master(tmp_path, stack('master_args = ["--rpc_thread_num=4"]'))
    assert plan.launch.argv[-1] == "--rpc_thread_num=4"
    assert plan.deviations[-1].ours == "--rpc_thread_num=4"


def test_a_servers_environment_is_made_from_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "x")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    env = master(tmp_path, stack('env = {MC_LOG_LEVEL = "INFO"}')).launch.env
    assert set(env) - {"LD_LIBRARY_PATH"} == {"PATH", "HOME", "LANG", "TMPDIR", "MC_LOG_LEVEL"}


def test_high_availability_is_refused_with_the_mend(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"masters = 2.*etcd.*set 1"):
        master(tmp_path, stack("masters = 2"))


def test_a_missing_wheel_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"mooncake_master: no Mooncake wheel.*make setup"):
        stores.mooncake_binary("mooncake_master")


# Answers of a master with blocks in it. Real ones need two engines, so these were recorded from a real stack. ---------
ANSWERS = {
    "/get_segments_detail": (200, (GOLDEN / "mooncake-0.3.13-segments.json").read_bytes()),
    f"/query_key?key={KEY}": (200, (GOLDEN / "mooncake-0.3.13-query-key.json").read_bytes()),
    "/get_all_keys": (200, f"{KEY}\n{KEY}1\n".encode()),
    "/metrics": (200, (GOLDEN / "mooncake-0.3.13-metrics.txt").read_bytes()),
    "/query_key?key=gone": (
        404,
        b'{"success":false,"error_code":-704,"error_message":"OBJECT_NOT_FOUND"}',
    ),
    "/query_key?key=odd": (200, b'{"success":false,"error_code":-1,"error_message":"INTERNAL_ERROR"}'),
}


class _Recorded(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        status, body = ANSWERS.get(self.path, (500, b"Failed"))
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        return None


@pytest.fixture
def recorded() -> Iterator[StoreAdmin]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Recorded) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        with StoreAdmin(f"http://127.0.0.1:{server.server_port}") as admin:
            yield admin
        server.shutdown()
        thread.join()


def test_where_a_block_lies(recorded: StoreAdmin) -> None:
    (replica,) = recorded.query_key(KEY)
    assert (replica.size_bytes, replica.protocol) == (32 * 2048, "tcp")
    (owner,) = recorded.owner_of(KEY)
    assert recorded.segments()[owner]["endpoint"] == replica.endpoint
    assert recorded.query_key("gone") == ()
    assert recorded.key_count() == len(recorded.keys()) == 2


def test_segments_with_owner_used_and_capacity(recorded: StoreAdmin) -> None:
    assert len(recorded.segment_list()) == 2
    for segment in recorded.segment_list():
        assert isinstance(segment, Segment)
        assert 0 < segment.used_bytes < segment.capacity_bytes == 536870912
    assert len({segment.client_id for segment in recorded.segment_list()}) == 2


def test_the_masters_counters_keep_the_names_it_gives_them(recorded: StoreAdmin) -> None:
    found = recorded.metrics()
    assert found["master_key_count"] == 82
    assert found["master_allocated_bytes"] == 82 * 65536
    assert found["master_batch_exist_key_requests_total"] > 0
    assert found["mem_cache_hit_nums_"] > 0
    labelled = [value for name, value in found.items() if name.startswith("segment_allocated_bytes{segment=")]
    assert sum(labelled) == found["master_allocated_bytes"]


def test_an_answer_of_another_shape_is_an_error_and_not_an_empty_pool(
    recorded: StoreAdmin, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(HarnessError, match="INTERNAL_ERROR"):
        recorded.query_key("odd")
    for body, message in ((b'{"segments":[{}]}', "not the shape"), (b"<html>", "not JSON")):
        monkeypatch.setitem(ANSWERS, "/get_segments_detail", (200, body))
        with pytest.raises(HarnessError, match=message):
            recorded.segments()
    monkeypatch.setitem(ANSWERS, "/get_all_keys", (500, b"Failed"))
    with pytest.raises(HarnessError, match="status 500"):
        recorded.key_count()
    monkeypatch.setitem(ANSWERS, "/metrics", (200, b"other_metric 1\n"))
    with pytest.raises(HarnessError, match="not a Mooncake master"):
        recorded.metrics()


@pytest.mark.parametrize(
    ("status", "body", "healthy"),
    [
        (200, b'{"status":"ok","role":"leader","service_ready":true}', True),
        (200, b'{"status":"ok","role":"standby","service_ready":false}', False),
        (200, b'{"status":"ok"}', False),
        (200, b"ok", False),
        (200, b"[]", False),
        (503, b'{"service_ready":true}', False),
    ],
)
def test_healthy_is_a_master_that_serves(
    recorded: StoreAdmin, monkeypatch: pytest.MonkeyPatch, status: int, body: bytes, healthy: bool
) -> None:
    monkeypatch.setitem(ANSWERS, "/health", (status, body))
    assert recorded.health() is healthy
