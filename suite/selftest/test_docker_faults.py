"""A real pool in containers: what it may do, and every docker fault seen by the kernel, undone, and red when it does nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fixtures import netfilter
from fixtures.errors import HarnessError, Untestable
from fixtures.faults import DropLink, Freeze, docker_disk
from fixtures.faults import docker as faults
from fixtures.faults import docker_probes as probes
from fixtures.faults.connect import connect_result
from fixtures.faults.links import data_ports
from fixtures.runtimes.docker_audit import audit, rights_of
from fixtures.runtimes.docker_unit import ContainerUnit
from fixtures.stack import Stack
from suite.selftest.process_helpers import own_state_dir
from suite.selftest.store_stack import healed_record, store_stack

pytestmark = [pytest.mark.selftest, pytest.mark.slow, pytest.mark.needs("docker-image", "nft")]

RUNTIME = 'runtime = "docker"'


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with (
        pytest.MonkeyPatch.context() as patched,
        own_state_dir(patched),
        store_stack(tmp_path_factory.mktemp("pool"), 'mode = "standalone"\nowners = 2', RUNTIME) as running,
    ):
        yield running


@pytest.fixture(autouse=True)
def healed(stack: Stack) -> Iterator[None]:
    yield
    assert stack.heal_all() == []


def unit(stack: Stack, name: str) -> ContainerUnit:
    found = stack.handle(name)
    assert isinstance(found, ContainerUnit)
    return found


# What the containers are --------------------------------------------------------------------------------------------
def test_a_pool_in_containers_exposes_and_may_do_no_more_than_it_has_to(stack: Stack) -> None:
    assert audit(stack.units()) == []
    assert [rights_of(unit(stack, name)).published for name in ("master", "owner0")] == [{}, {}]
    facts = stack.runtime.facts()
    assert facts["image"]["id"].startswith("sha256:")
    assert facts["image"]["versions"]["mooncake"]


def test_processes_of_containers_are_seen_with_their_environment(stack: Stack) -> None:
    (master,) = stack.handle("master").processes()
    assert Path(master.cmdline[0]).name == "mooncake_master"
    assert master.env["PATH"].startswith("/opt/kvgates/bin")
    assert stack.handle("master").pid == master.pid


def test_what_a_container_says_is_in_its_log_and_its_store_serves(stack: Stack) -> None:
    (stored,) = stack.store_tool([{"op": "put", "keys": ["a", "b"], "bytes": 64}])
    assert set(stored.values()) == {0}
    assert stack.key_count() >= 2
    assert stack.handle("master").log_tail()


# Faults -------------------------------------------------------------------------------------------------------------
def test_a_paused_container_is_frozen_by_the_kernel(stack: Stack) -> None:
    pause = faults.Pause("owner0")
    record = pause.inject(stack)
    assert record.landed
    assert record.proof["kernel_frozen"] is True
    assert healed_record(stack, pause).landed
    assert probes.frozen(unit(stack, "owner0").pid) is False


def test_a_pause_that_does_nothing_has_not_landed(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unit(stack, "owner0").container, "pause", lambda: None)
    monkeypatch.setattr(faults.shows, "__defaults__", (0.2,))
    assert not faults.Pause("owner0").inject(stack).landed


def test_a_disconnected_container_has_no_interface(stack: Stack) -> None:
    cut = faults.Disconnect("owner1")
    record = cut.inject(stack)
    assert record.landed
    assert record.proof["interfaces"] == []
    assert healed_record(stack, cut).landed
    assert connect_result(unit(stack, "owner1").address, data_ports(stack, "owner1")[0]) == "connected"


def test_a_disconnect_that_does_nothing_has_not_landed(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    network = faults.runtime_of(stack).network_of(unit(stack, "owner1"))
    monkeypatch.setattr(network, "disconnect", lambda _: None)
    monkeypatch.setattr(faults.shows, "__defaults__", (0.2,))
    assert not faults.Disconnect("owner1").inject(stack).landed


def test_a_partition_parts_two_units_and_nobody_else(stack: Stack) -> None:
    parted = faults.Partition("owner0", "owner1")
    record = parted.inject(stack)
    assert record.landed
    assert set(record.proof["connect"].values()) == {"silence"}
    master = unit(stack, "master")
    for name in ("owner0", "owner1"):
        way = probes.connect_from(unit(stack, name).init_pid, master.address, master.launch.ports[0])
        assert way == "connected", f"{name} to the master"
    assert healed_record(stack, parted).landed
    assert not [t for name in ("owner0", "owner1") for t in netfilter.tables(netns=unit(stack, name).init_pid)]


def test_a_partition_whose_rules_pass_everything_has_not_landed(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    def passing(table: str, address: str, netns: int) -> None:
        netfilter._nft(netfilter._table(table, f"    ip saddr {address} counter accept"), netns)

    monkeypatch.setattr(netfilter, "block_peer", passing)
    record = faults.Partition("owner0", "owner1").inject(stack)
    assert all(record.proof["packets"].values()), "the rules did see the packets"
    assert not record.landed


def test_a_partition_of_units_that_do_not_reach_each_other_is_refused(stack: Stack) -> None:
    assert faults.Disconnect("owner0").inject(stack).landed
    with pytest.raises(HarnessError, match="do not reach each other before it"):
        faults.Partition("owner0", "owner1").inject(stack)


def test_a_limited_container_sends_at_the_rate_it_was_given(stack: Stack) -> None:
    limit = faults.LimitNetwork("owner0", 200_000)
    record = limit.inject(stack)
    assert record.landed, record.proof
    assert record.proof["during_s"] > record.proof["before_s"]
    assert healed_record(stack, limit).landed


def test_a_limit_that_does_nothing_has_not_landed(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "limit", lambda pid, rate: None)
    assert not faults.LimitNetwork("owner0", 200_000).inject(stack).landed


def test_faults_of_processes_work_on_containers(stack: Stack) -> None:
    link = DropLink("data", "owner1")
    assert link.inject(stack).landed
    assert healed_record(stack, link).landed
    freeze = Freeze("owner0")
    assert freeze.inject(stack).landed
    assert healed_record(stack, freeze).landed


def test_a_restarted_container_is_the_same_with_new_processes_and_a_killed_one_is_gone(stack: Stack) -> None:
    log = unit(stack, "master").log_path
    before = log.read_bytes()
    record = faults.RestartContainer("master").inject(stack)
    assert record.landed
    assert record.proof["result"] == "ready"
    after = log.read_bytes()
    assert after.startswith(before)
    assert after.count(before.splitlines()[1]) == 1, "docker's old log is not written again"
    assert faults.KillContainer("owner1").inject(stack).landed
    assert stack.handle("owner1").exit_code() == -9
    with pytest.raises(HarnessError, match="it is dead already"):
        faults.Pause("owner1").inject(stack)


def test_a_full_disk_is_the_containers_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stack: Stack) -> None:
    with pytest.raises(HarnessError, match="never filled"):
        docker_disk.FillDisk("owner0").inject(stack)
    store = 'mode = "standalone"\nowners = 1\nssd_bytes = 67108864\nssd_volume_bytes = 8388608'
    with store_stack(tmp_path, store, RUNTIME) as tiered:
        fault = docker_disk.FillDisk("owner0")
        record = fault.inject(tiered)
        assert record.landed, record.proof
        assert 7 << 20 < record.proof["written_bytes"] <= 8 << 20
        assert not list((tmp_path / "owner0" / "ssd").iterdir())  # nothing of it is on the host's disk
        assert not fault.inject(tiered).landed  # full already: it would prove nothing
        assert healed_record(tiered, fault).landed
        monkeypatch.setattr(docker_disk, "fill", lambda file: 0)
        assert not docker_disk.FillDisk("owner0").inject(tiered).landed
        assert tiered.heal_all() == []


def test_on_processes_a_docker_fault_is_untestable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        own_state_dir(monkeypatch),
        store_stack(tmp_path) as processes,
        pytest.raises(Untestable, match="needs docker-runtime: unit master is a process"),
    ):
        faults.Pause("master").inject(processes)
