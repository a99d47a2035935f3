"""Faults of links on real servers: each is seen by the kernel or by a client, hits its own ports alone, and is undone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fixtures import netfilter
from fixtures.errors import HarnessError
from fixtures.faults import (
    BlackholeLink,
    CutLink,
    DropLink,
    Fault,
    Kill,
    LimitLink,
    ResetLink,
    Restart,
    SlowLink,
    ThrottleLink,
)
from fixtures.faults.connect import connect_result
from fixtures.faults.links import control_ports, data_ports
from fixtures.healthy import prove_healthy
from fixtures.runtimes.process import ProcessRuntime
from fixtures.stack import Stack
from fixtures.store_session import StoreSession
from suite.selftest.process_helpers import own_state_dir, until
from suite.selftest.store_stack import store_stack

pytestmark = [pytest.mark.selftest, pytest.mark.slow, pytest.mark.needs("cpu-stack")]

PROXIED = 'mode = "standalone"\nowners = 2\ncontrol_proxy = true'


def tables_of(stack: Stack) -> list[str]:
    """Firewall tables of this stack's run: tests of other files make theirs at the same time."""
    assert isinstance(stack.runtime, ProcessRuntime)
    return netfilter.tables(f"{netfilter.PREFIX}{stack.runtime._journal.run_id}_")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with pytest.MonkeyPatch.context() as patched, own_state_dir(patched):
        with store_stack(tmp_path_factory.mktemp("links"), PROXIED) as running:
            yield running
        assert tables_of(running) == []


@pytest.fixture(autouse=True)
def healed(stack: Stack) -> Iterator[None]:
    yield
    assert stack.heal_all() == []


@pytest.mark.needs("nft")
@pytest.mark.parametrize(("fault", "sign"), [(DropLink, "silence"), (ResetLink, "refused")])
def test_a_rule_hits_the_control_link_of_one_client_and_no_other(
    stack: Stack, fault: type[DropLink | ResetLink], sign: str
) -> None:
    hurt, other = control_ports(stack, "owner0") + control_ports(stack, "owner1")
    cut = fault("control", between="owner0")
    record = cut.inject(stack)
    assert len(tables_of(stack)) == 1
    assert record.landed
    assert record.proof["connect"] == {str(hurt): sign}
    assert connect_result("127.0.0.1", hurt) == sign
    assert connect_result("127.0.0.1", other) == "connected"

    def confirmed() -> bool:
        again = cut.confirm(stack)  # the owner's own heartbeat
        return again is not None and again.landed and again.fault_id == record.fault_id

    until(confirmed)
    healed = cut.heal(stack)
    assert healed is not None
    assert healed.landed
    assert healed.proof["packets_of_the_stack"] > 0
    assert connect_result("127.0.0.1", hurt) == "connected"
    assert tables_of(stack) == []


@pytest.mark.needs("nft")
def test_an_owners_data_link_is_what_readers_of_its_memory_use(stack: Stack) -> None:
    keys = [f"k{i}" for i in range(8)]
    (stored,) = stack.store_tool([{"op": "put", "keys": keys, "bytes": 64}])
    assert set(stored.values()) == {0}
    link = DropLink("data", between=("reader", "owner1"))
    assert link.ports(stack) == data_ports(stack, "owner1")
    assert not set(data_ports(stack, "owner0")) & set(data_ports(stack, "owner1"))
    assert link.inject(stack).landed
    assert connect_result("127.0.0.1", data_ports(stack, "owner0")[0]) == "connected"
    assert connect_result("127.0.0.1", data_ports(stack, "owner1")[0]) == "silence"


@pytest.mark.needs("nft")
def test_a_throttled_link_carries_everything_and_slowly(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """8 MiB over two links of 1 MiB/s each, where loopback takes milliseconds; without the limit nothing is confirmed. (How long it
    took before says nothing on a busy host: starting a client can take a second.)"""
    keys = [f"throttled{i}" for i in range(8)]
    (stored,) = stack.store_tool([{"op": "put", "keys": keys, "bytes": 1 << 20}])
    assert set(stored.values()) == {0}

    def read() -> tuple[object, float]:
        started = time.monotonic()
        (digests,) = stack.store_tool([{"op": "digest", "keys": keys}])
        return digests, time.monotonic() - started

    whole, _ = read()
    links = [ThrottleLink("data", owner, bytes_per_s=1 << 20) for owner in ("owner0", "owner1")]
    assert all(link.inject(stack).landed for link in links)
    again, slow_s = read()
    assert again == whole
    assert slow_s > 2.5  # four seconds, less the second's worth and the burst that each link lets through at once
    confirmed = [link.confirm(stack) for link in links]
    assert any(record is not None and record.landed for record in confirmed)
    assert stack.heal_all() == []
    monkeypatch.setattr(netfilter, "_STATEMENTS", {"throttle": "accept"})
    idle = ThrottleLink("data", "owner0", bytes_per_s=4 << 20)
    assert idle.inject(stack).landed
    read()
    nothing = idle.confirm(stack)
    assert nothing is not None
    assert not nothing.landed


@pytest.mark.needs("nft")
def test_a_rule_that_catches_nothing_has_not_landed(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(netfilter, "_STATEMENTS", {"drop": "counter accept"})
    record = DropLink("control").inject(stack)
    assert not record.landed
    assert set(record.proof["connect"].values()) == {"connected"}


@pytest.mark.parametrize(
    "fault",
    [SlowLink(0.2, between="owner0"), LimitLink(8000, between="owner0"), BlackholeLink("owner0"), CutLink("owner0")],
)
def test_the_proxy_hurts_one_clients_link_and_gives_it_back(stack: Stack, fault: Fault) -> None:
    record = fault.inject(stack)
    assert record.landed, record.proof
    assert stack.store is not None
    assert stack.store.proxy is not None
    state = stack.store.proxy.state()
    assert not any(state["owner1"][name] for name in ("delay_s", "bytes_per_s", "hold", "cut"))
    healed = fault.heal(stack)
    assert healed is not None
    assert healed.landed, healed.proof
    assert prove_healthy(stack, "case") == []  # the owner's segment is listed, or is again


def test_a_proxy_that_was_started_again_has_its_routes_back(stack: Stack) -> None:
    assert stack.store is not None
    assert stack.store.proxy is not None
    before = stack.store.proxy.state()
    restarted = Restart("proxy").inject(stack)
    assert (restarted.landed, restarted.proof["result"]) == (True, "ready")
    after = stack.store.proxy.state()
    assert {name: route["port"] for name, route in after.items()} == {n: s["port"] for n, s in before.items()}
    assert prove_healthy(stack, "case") == []


def test_a_proxy_that_does_nothing_has_not_landed(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    for fault in (SlowLink(0.5), BlackholeLink(), CutLink()):
        monkeypatch.setattr(type(fault), "settings", lambda self: {})
        record = fault.inject(stack)
        assert not record.landed, record.proof
        stack.heal_all()


def test_what_a_link_fault_needs_is_said(stack: Stack, tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match="no route for e7"):
        BlackholeLink("e7").inject(stack)
    with pytest.raises(HarnessError, match="name it"):
        DropLink("data")
    with store_stack(tmp_path) as plain:
        with pytest.raises(HarnessError, match="control_proxy = true"):
            SlowLink(1.0).inject(plain)
        with pytest.raises(HarnessError, match="control_proxy = true"):
            DropLink("control", between="e0").inject(plain)
        assert control_ports(plain) == [plain.handle("master").launch.ports[0]]


def test_a_session_with_a_master_that_is_gone_says_so(tmp_path: Path) -> None:
    with store_stack(tmp_path) as plain:
        assert Kill("master").inject(plain).landed
        with pytest.raises(HarnessError, match="could not connect"), StoreSession(plain, connect_bound_s=1.0):
            pass
