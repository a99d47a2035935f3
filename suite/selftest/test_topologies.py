"""Every topology of a pool with real servers and no engine: owners, elected masters, control proxy, SSD tier."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from fixtures.capabilities import Capability
from fixtures.errors import HarnessError, Untestable, UsageError
from fixtures.faults import Freeze, Kill, Restart, Stop
from fixtures.healthy import prove_healthy
from fixtures.revive import revive
from fixtures.runtimes.base import Handle
from fixtures.runtimes.unit import Unit
from fixtures.spec import load_spec, require_built
from fixtures.stack import Stack
from fixtures.store_builder import serves
from fixtures.store_units import Store
from fixtures.stores import CLIENT_DATA_PORTS
from reports import records as r
from suite.selftest.process_helpers import own_state_dir, until
from suite.selftest.store_stack import SEGMENT_BYTES, store_stack

pytestmark = [pytest.mark.selftest, pytest.mark.slow, pytest.mark.needs("cpu-stack")]

KEYS = [f"k{i}" for i in range(24)]


@pytest.fixture(autouse=True)
def own_state(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    with own_state_dir(monkeypatch):
        yield


def put(stack: Stack) -> None:
    (answer,) = stack.store_tool([{"op": "put", "keys": KEYS, "bytes": 1000}])
    assert set(answer.values()) == {0}


def test_standalone_owners_hold_the_blocks_and_one_of_them_can_come_back(tmp_path: Path) -> None:
    with store_stack(tmp_path, 'mode = "standalone"\nowners = 2') as stack:
        assert stack.store is not None
        assert list(stack.units()) == ["master", "owner0", "owner1"]
        capacities = [s.capacity_bytes for s in stack.store.admin.segment_list()]
        assert capacities == [SEGMENT_BYTES] * 2
        assert prove_healthy(stack, "case") == []
        put(stack)
        held = {replica.endpoint for key in KEYS for replica in stack.store.admin.query_key(key)}
        assert held == {s.endpoint for s in stack.store.admin.segment_list()}  # both owners hold some

        killed = Kill("owner0").inject(stack)
        assert killed.landed
        assert prove_healthy(stack, "case") == ["owner0: not running (exit -9)"]
        assert revive(stack, "owner0").result == "ready"
        # The dead one's segment is dropped after the client TTL; until then the pool is not well.
        assert prove_healthy(stack, "case") == []
        assert len(stack.store.admin.segment_list()) == 2
        stopped = Stop("owner1").inject(stack)
        assert stopped.landed
        assert stopped.proof["exit_code"] == -15  # the tested release has no handler


def test_a_restarted_owner_with_fixed_ports_is_back_under_its_old_name(tmp_path: Path) -> None:
    with store_stack(tmp_path, 'mode = "standalone"\nowners = 1\nfixed_ports = true') as stack:
        assert stack.store is not None
        (before,) = stack.store.admin.segment_list()
        put(stack)
        assert Restart("owner0").inject(stack).landed
        until(lambda: len(stack.store.admin.segment_list()) == 1 if stack.store else False)
        (after,) = stack.store.admin.segment_list()
        assert after.name == before.name
        assert after.client_id != before.client_id  # by which the two are told apart while both are listed
        first, second = (
            x.value for x in stack.notes["records"] if isinstance(x, r.Fact) and x.name == "owner.endpoint"
        )
        assert (first["port"], first["port_before"]) == (before.port, 0)
        assert (second["port"], second["port_before"]) == (after.port, before.port)
        assert second["same"] == (after.port == before.port)
        assert abs(after.port - before.port) < CLIENT_DATA_PORTS  # one of the few


@pytest.mark.needs("etcd")
def test_masters_elect_one_of_them_through_an_etcd_of_the_stacks_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As far as a second allows: the elected one serves clients only after its lease of 5 s."""

    def roles(stack: Stack) -> list[str]:
        assert stack.store is not None
        return sorted(str(m.admin.status()["role"]) for m in stack.store.masters.values())

    def elected(stack: Stack, store: Store, ready: object) -> None:
        until(lambda: all(serves(store, name)() for name in (*store.masters, "etcd0")))
        until(lambda: roles(stack) == ["leader", "standby"])

    monkeypatch.setattr("fixtures.store_builder._wait_elected", elected)
    with store_stack(tmp_path, "masters = 2") as stack:
        store = stack.store
        assert store is not None
        assert store.address.startswith("etcd://127.0.0.1:")
        assert list(stack.units()) == ["etcd0", "master0", "master1"]
        with pytest.raises(HarnessError, match="none of master0, master1 serves"):
            stack.handle("master")
        with pytest.raises(HarnessError, match="0 of master0, master1 are dead"):
            revive(stack, "master")
        assert Kill("master1").inject(stack).landed
        assert revive(stack, "master").unit == "master1"
        assert Freeze("etcd0").inject(stack).landed
        assert not serves(store, "etcd0")()
        assert stack.heal_all() == []
        assert Restart("master1").inject(stack).proof["result"] == "ready"


def test_no_etcd_is_untestable_with_the_mend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = Capability(False, "etcd: not installed", "install etcd (Debian: etcd-server)")
    monkeypatch.setattr("fixtures.store_builder.probe", lambda requirement: missing)
    with pytest.raises(Untestable, match="etcd-server"), store_stack(tmp_path, "masters = 2"):
        pass


def test_each_owner_has_told_of_its_ssd_tier_before_it_is_ready(tmp_path: Path) -> None:
    with store_stack(tmp_path, 'mode = "standalone"\nowners = 2\nssd_bytes = 268435456') as stack:
        assert stack.store is not None
        assert stack.store.admin.metrics()["master_total_file_capacity_bytes"] == 2 * 268435456


def test_evicted_blocks_are_read_from_the_ssd_tier(tmp_path: Path) -> None:
    with store_stack(
        tmp_path, 'mode = "standalone"\nowners = 1\nssd_bytes = 268435456\nkv_lease_ttl_ms = 200'
    ) as stack:
        assert stack.store is not None
        admin = stack.store.admin
        assert stack.store_tool([fill("k", 10)])[0]["stored"] == 10  # of 16 MiB of memory
        until(lambda: admin.metrics()["master_allocated_file_size_bytes"] == 10 << 20)
        assert sum(path.is_file() for path in (stack.directory / "owner0" / "ssd").rglob("*")) == 10
        stack.store_tool([fill("more", 10)])
        until(lambda: admin.metrics()["master_evicted_key_count"] > 0)
        wanted = hashlib.sha256(bytes(1 << 20)).hexdigest()

        def all_read() -> bool:
            """A read that meets an eviction may find nothing; it never finds anything else."""
            (digests,) = stack.store_tool([{"op": "digest", "keys": [f"k{i}" for i in range(10)]}])
            found = {digest and digest["sha256"] for digest in digests.values()}
            assert found <= {wanted, None}
            return found == {wanted}

        until(all_read)


def fill(prefix: str, count: int) -> dict[str, object]:
    return {"op": "fill", "prefix": prefix, "bytes": 1 << 20, "count": count}


@pytest.mark.parametrize("name", ["cpu", "cpu-owners", "cpu-ha", "cpu-ssd", "cpu-proxy"])
def test_ready_specs_can_be_brought_up(name: str) -> None:
    require_built(load_spec(name), where=name)


@pytest.mark.parametrize(
    ("store", "message"),
    [
        ("masters = 2\ncontrol_proxy = true", "control_proxy is for masters = 1"),
        ("ssd_bytes = 1000", "ssd_bytes is for mode = 'standalone'"),
        ('mode = "standalone"', "needs owners = 1"),
        ("owners = 2", "owners is for mode = 'standalone'"),
    ],
)
def test_combinations_that_cannot_be_are_one_line(tmp_path: Path, store: str, message: str) -> None:
    with pytest.raises(UsageError, match=message), store_stack(tmp_path, store):
        pass


def test_a_log_that_cannot_be_read_is_told_and_what_it_missed_is_read_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scanned(stack: Stack) -> dict[str, int | None]:
        stack.scan_logs("c")
        facts = [x for x in stack.notes["records"] if isinstance(x, r.Fact) and x.name == "logs.scanned"]
        found: dict[str, int | None] = facts[-1].value
        return found

    with store_stack(tmp_path) as stack:
        assert (scanned(stack)["master"] or 0) > 0
        with monkeypatch.context() as patched:
            patched.setattr(Unit, "read_log", lambda self: False)
            assert scanned(stack) == {"master": None}
        assert (scanned(stack)["master"] or 0) > 0
        with monkeypatch.context() as patched:
            patched.setattr(Unit, "log_path", tmp_path / "nowhere")
            assert scanned(stack) == {"master": None}
            stack.skip_log("master")  # nothing to skip


def test_what_a_unit_says_of_the_end_that_we_made_belongs_to_no_case(tmp_path: Path) -> None:
    """A second variant of an engine goes on in the log of the first: its case may not be given the first one's last words."""
    log = tmp_path / "variant.txt"
    last_words = "ERROR EngineDeadError: EngineCore encountered an issue\n"
    log.write_text(f"ready\n{last_words}")
    ended = cast(Handle, SimpleNamespace(log_path=log, read_log=lambda: True))
    with store_stack(tmp_path / "stack") as stack:
        stack.skip_log("variant", ended)
        stack.extras["variant"] = ended  # the next one

        def lines() -> list[str]:
            stack.scan_logs("c")
            return [x.text for x in stack.notes["records"] if isinstance(x, r.LogLine) and x.unit == "variant"]

        assert lines() == []
        with log.open("a") as file:
            file.write(last_words)
        assert lines() == [last_words.strip()]
        del stack.extras["variant"]
