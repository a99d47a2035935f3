"""Faults of the pool's content on a real master and owner: counted by the master, seen by another client, and taken back."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fixtures.errors import HarnessError
from fixtures.faults import (
    CorruptValues,
    DeleteKeys,
    EvictionStorm,
    ExpireLeases,
    FullPool,
    LoseDisk,
    LoseTier,
    disk,
    pool,
)
from fixtures.faults.pool import EVICTED
from fixtures.stack import Stack
from fixtures.store_session import StoreSession
from suite.gates.degrade_faults import DeleteUnderLookup
from suite.selftest.process_helpers import own_state_dir, until
from suite.selftest.store_stack import store_stack

pytestmark = [pytest.mark.selftest, pytest.mark.slow, pytest.mark.needs("cpu-stack")]

STORE = 'mode = "standalone"\nowners = 1\nssd_bytes = 0\nkv_lease_ttl_ms = 200'


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("pool")
    with pytest.MonkeyPatch.context() as patched, own_state_dir(patched), store_stack(folder, STORE) as running:
        yield running


@pytest.fixture(autouse=True)
def healed(stack: Stack) -> Iterator[None]:
    yield
    assert stack.heal_all() == []


@pytest.fixture(scope="module")
def client(stack: Stack) -> Iterator[StoreSession]:
    with StoreSession(stack) as session:
        yield session


def put(client: StoreSession, prefix: str, count: int = 8) -> list[str]:
    keys = [f"{prefix}{i}" for i in range(count)]
    answer = client.step({"op": "put", "keys": keys, "bytes": 4096}, 30.0)
    assert set(answer.values()) == {0}
    return keys


def test_deleted_keys_are_listed_before_and_not_after(stack: Stack, client: StoreSession) -> None:
    keys, others = put(client, "victim"), put(client, "other")
    record = DeleteKeys(keys).inject(stack)
    assert record.landed
    assert (record.proof["listed_before"], record.proof["listed_after"]) == (8, 0)
    assert set(others) <= stack.keys()
    assert not DeleteKeys(keys).inject(stack).landed  # they were not there
    with pytest.raises(HarnessError, match="no keys"):
        DeleteKeys([]).inject(stack)


def test_a_corrupted_value_has_another_digest_under_the_same_key(stack: Stack, client: StoreSession) -> None:
    keys, (source,) = put(client, "value", 2), put(client, "source", 1)
    client.step({"op": "replace", "key": source, "how": "flip", "offset": 0, "count": 4096}, 30.0)
    record = CorruptValues(keys, "flip").inject(stack)
    assert record.landed
    assert record.proof["before"]["bytes"] == record.proof["after"]["bytes"] == 4096
    assert record.proof["before"]["sha256"] != record.proof["after"]["sha256"]
    assert CorruptValues(keys, "truncate").inject(stack).proof["after"]["bytes"] == 2048
    assert CorruptValues(keys, "copy", source).inject(stack).landed
    again = CorruptValues(keys, "copy", source).inject(stack)
    assert not again.landed  # the same bytes once more change nothing
    with pytest.raises(HarnessError, match="does not hold nobody"):
        CorruptValues(["nobody"]).inject(stack)


def test_leases_run_out_as_a_canary_shows(stack: Stack, client: StoreSession) -> None:
    record = ExpireLeases().inject(stack)
    assert record.landed
    assert record.proof["held_at_first"]
    assert record.proof["waited_s"] > 0.1  # of 0.2


def test_a_storm_evicts_the_victims_and_its_own_objects_go_with_the_heal(stack: Stack, client: StoreSession) -> None:
    victims = put(client, "old")
    storm = EvictionStorm(victims)
    record = storm.inject(stack)
    assert record.landed, record.proof
    assert record.proof["evicted_keys"] >= len(victims)
    assert not set(victims) & stack.keys()
    healed = storm.heal(stack)
    assert healed is not None
    assert healed.landed
    listed = stack.keys()
    assert not [key for key in listed if key.startswith("kvgates-")]


def test_refused_puts_are_no_work_done(stack: Stack, client: StoreSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quick client is refused again and again before the master evicts for the first time (seen: 130 puts, 5 of 8 victims gone)."""
    victims = put(client, "older")
    real, calls = EvictionStorm._fill, itertools.count()

    def late(self: EvictionStorm, session: StoreSession, what: str, size_bytes: int, count: int) -> dict[str, Any]:
        if next(calls) < 4:
            return {"stored": 0, "refused": count, "last_status": -200}
        return real(self, session, what, size_bytes, count)

    monkeypatch.setattr(EvictionStorm, "_fill", late)
    monkeypatch.setattr(
        pool, "wait_for_room", lambda stack: False
    )  # nothing is full: it would only use up the storm's patience
    record = EvictionStorm(victims).inject(stack)
    assert record.landed, record.proof


def test_a_storm_gives_up_where_nothing_fits(
    stack: Stack, client: StoreSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    victims = put(client, "kept")
    refused = {"stored": 0, "refused": 64, "last_status": -200}
    monkeypatch.setattr(EvictionStorm, "_fill", lambda *_, **__: refused)
    started_s = time.monotonic()
    record = EvictionStorm(victims).inject(stack)
    assert not record.landed
    assert record.proof["victims_left"] == len(victims)
    assert 1.2 <= time.monotonic() - started_s < 20  # a lease of 0.2 s and one second


def test_victims_that_went_without_being_counted_as_evicted_are_no_storm(
    stack: Stack, client: StoreSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody removed them: that is another fault."""
    victims = put(client, "gone")
    client.step({"op": "remove", "keys": victims}, 30.0)
    assert stack.store is not None
    seen = iter([0.0, *[1.0] * 999])
    real = stack.store.admin.metrics
    monkeypatch.setattr(stack.store.admin, "metrics", lambda: {**real(), EVICTED: next(seen)})
    record = EvictionStorm(victims, turnover=0.1).inject(stack)
    assert not record.landed
    assert (record.proof["victims_left"], record.proof["evicted_keys"]) == (0, 1.0)


def test_a_storm_too_small_to_evict_has_not_landed(stack: Stack, client: StoreSession) -> None:
    record = EvictionStorm(turnover=0.1).inject(stack)
    assert not record.landed
    assert record.proof["evicted_keys"] == 0


def test_a_full_pool_refuses_a_small_put_until_it_is_healed(stack: Stack, client: StoreSession) -> None:
    put(client, "evictable")
    full = FullPool()
    record = full.inject(stack)
    assert record.landed, record.proof
    assert record.proof["used_bytes"] > 0.95 * record.proof["capacity_bytes"]
    assert client.step({"op": "put", "keys": ["late"], "bytes": 4096}, 30.0)["late"] != 0
    again = full.confirm(stack)
    assert again is not None
    assert again.landed
    healed = full.heal(stack)
    assert healed is not None
    assert healed.landed, healed.proof
    put(client, "again")


def test_a_pool_in_which_a_little_fits_again_was_full_where_somebody_was_refused(
    stack: Stack, client: StoreSession
) -> None:
    """A block that a lease protected is evicted later; the fault has landed if a put was refused before that."""
    for refused in (True, False):
        full = FullPool()
        assert full.inject(stack).landed
        if refused:
            assert client.step({"op": "put", "keys": ["refused"], "bytes": 4096}, 30.0)["refused"] != 0
        some = full._mine(stack)[:4]
        client.step({"op": "remove", "keys": some}, 30.0)
        again = full.confirm(stack)
        assert again is not None
        assert again.proof["put_status"] == 0
        assert again.proof["refused_since"] == (1 if refused else 0)
        assert again.landed is refused
        full.heal(stack)


def test_a_removal_under_a_lookup_has_landed_where_keys_are_gone_though_some_are_saved_again(
    stack: Stack, client: StoreSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = put(client, "looked-up")
    back = frozenset(keys[:3])
    with StoreSession(stack) as session, monkeypatch.context() as patched:
        fault = DeleteUnderLookup(session, keys)
        patched.setattr(type(stack), "keys", lambda self: back)
        record = fault.inject(stack)
        assert record.landed
        assert record.proof["listed_after"] == 3
        assert not fault.inject(stack).landed  # nothing was there to be removed
        patched.setattr(type(stack), "keys", lambda self: frozenset(keys))
        put(client, "looked-up")
        assert not fault.inject(stack).landed  # listed as if nobody had removed anything


def test_a_pool_that_takes_a_put_is_not_full(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FullPool, "_pinned", lambda self, stack, session, size: 0)
    assert not FullPool().inject(stack).landed


def test_a_lost_disk_needs_a_disk_and_files_on_it(stack: Stack, tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match="no SSD tier"):
        LoseDisk("owner0").inject(stack)
    with store_stack(tmp_path, STORE.replace("ssd_bytes = 0", "ssd_bytes = 67108864")) as tiered:
        assert not LoseDisk("owner0").inject(tiered).landed  # nothing on it yet
        with StoreSession(tiered) as other:
            put(other, "tiered")
        folder = tmp_path / "owner0" / "ssd"
        until(lambda: len(disk._names(folder)) == 8)
        assert LoseDisk("owner0").inject(tiered).landed


TIERED = STORE.replace("ssd_bytes = 0", "ssd_bytes = 268435456")


def test_what_lies_on_the_disk_tier_is_no_evidence_and_goes_with_the_stack(tmp_path: Path) -> None:
    with store_stack(tmp_path, TIERED) as tiered, StoreSession(tiered) as client:
        put(client, "tiered")
        until(
            lambda: [path for path in (tmp_path / "owner0" / "ssd").rglob("*") if path.is_file()], "files of the tier"
        )
    assert not (tmp_path / "owner0" / "ssd").exists()
    assert (tmp_path / "owner0" / "log.txt").exists()


def test_a_lost_tier_takes_what_memory_has_evicted(tmp_path: Path) -> None:
    with store_stack(tmp_path, TIERED) as tiered, StoreSession(tiered) as client:
        keys = put(client, "tiered")
        fault = LoseTier("owner0", keys)
        record = fault.inject(tiered)
        assert record.landed, record.proof
        assert record.proof["on_disk_alone"] == len(keys)
        assert record.proof["files_before"] >= len(keys)
        assert set(keys) <= tiered.keys()  # the master does not know yet
        assert None in client.step({"op": "digest", "keys": keys}, 30.0).values()
        healed = fault.heal(tiered)
        assert healed is not None
        assert healed.landed  # its own objects are gone


def test_a_tier_that_keeps_its_files_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_empty", lambda folder: None)
    with store_stack(tmp_path, TIERED) as tiered, StoreSession(tiered) as client:
        keys = put(client, "tiered")
        kept = LoseTier("owner0", keys)
        record = kept.inject(tiered)
        assert not record.landed
        assert record.proof["on_disk_alone"] == len(keys)
        assert kept.heal(tiered)


def test_what_is_in_memory_as_well_is_not_lost_with_its_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "TURNOVER", 0.0)  # nothing is evicted
    with store_stack(tmp_path, TIERED) as tiered, StoreSession(tiered) as client:
        assert not LoseTier("owner0", put(client, "tiered")).inject(tiered).landed
