"""Selftests of the lying connector's parts: the switch, and the lying store on plain memory."""

from __future__ import annotations

import ctypes
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fixtures.waiting import wait_for
from suite.defects.switch import CONTROL_NAME, Remote, Setting, Switch, read_journal

pytestmark = pytest.mark.selftest

KNOWN = frozenset({"zero-block", "foreign-block"})


# The switch -----------------------------------------------------------------------------------------------------------
@pytest.fixture
def make_switch(tmp_path: Path) -> Iterator[Callable[..., Switch]]:
    made: list[Switch] = []

    def make(role: str = "worker", **setting: Any) -> Switch:
        made.append(Switch(tmp_path, role, Setting(**setting), KNOWN))
        return made[-1]

    yield make
    for switch in made:
        switch.close()


def _wait(what: str, probe: Callable[[], Any]) -> None:
    wait_for(what, probe, bound_s=5, bound_source="a file is looked at every 50 ms", poll_s=0.01)


def test_both_processes_acknowledge_and_lies_are_counted(tmp_path: Path, make_switch: Callable[..., Switch]) -> None:
    scheduler, worker = make_switch("scheduler"), make_switch("worker")
    remote = Remote({"e0": tmp_path})
    remote.set(Setting(generation=1, defect="zero-block"))
    _wait("both to follow", lambda: remote.acknowledged(1))
    assert worker.lies("zero-block")
    assert scheduler.lies("zero-block")
    assert worker.choose(3) == [0, 1, 2]
    worker.told(3, blocks=[0, 1, 2])
    remote.set(Setting(generation=2))
    _wait("both to follow", lambda: remote.acknowledged(2))
    assert not worker.lies("zero-block")
    told = remote.told(1)
    assert (told.lies, told.read, told.occasions) == (3, 3, 3)
    assert remote.told(2).lies == 0


def test_one_process_that_does_not_follow_is_not_acknowledged(
    tmp_path: Path, make_switch: Callable[..., Switch]
) -> None:
    make_switch("worker", generation=1)
    assert not Remote({"e0": tmp_path}).acknowledged(1)


def test_other_engines_are_told_the_truth(tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in ("e0", "e1")}
    for folder in folders.values():
        folder.mkdir()
    Remote(folders).set(Setting(generation=4, defect="zero-block"), ["e1"])
    written = {name: json.loads((folder / CONTROL_NAME).read_text()) for name, folder in folders.items()}
    assert (written["e0"]["defect"], written["e1"]["defect"]) == ("", "zero-block")
    assert written["e0"]["generation"] == 4


def test_an_unknown_defect_is_refused(tmp_path: Path, make_switch: Callable[..., Switch]) -> None:
    switch = make_switch("worker")
    make_switch("scheduler")
    remote = Remote({"e0": tmp_path})
    remote.set(Setting(generation=1, defect="typo"))
    _wait("the refusal", lambda: any(e["event"] == "refused" for e in read_journal(tmp_path / "lying-worker.jsonl")))
    with pytest.raises(ValueError, match="typo"):
        remote.acknowledged(1)
    assert switch.now.generation == 0
    with pytest.raises(ValueError, match="known: foreign-block, zero-block"):
        Switch(tmp_path, "worker", Setting(defect="typo"), KNOWN)


def test_rates_and_seeds(make_switch: Callable[..., Switch]) -> None:
    assert make_switch(defect="zero-block", rate=0.0).choose(1000) == []
    first = make_switch(defect="zero-block", rate=0.02, seed=7)
    again = make_switch(defect="zero-block", rate=0.02, seed=7)
    drawn = first.choose(5000)
    assert drawn == again.choose(5000)
    assert 60 <= len(drawn) <= 140, "1 in 50 of 5,000 are 100, give or take 4 sigma"
    assert drawn != make_switch(defect="zero-block", rate=0.02, seed=8).choose(5000)


def test_a_decision_by_key_is_the_same_everywhere(make_switch: Callable[..., Switch]) -> None:
    one, other = make_switch("worker", rate=0.5), make_switch("scheduler", rate=0.5)
    keys = [str(i).encode() for i in range(200)]
    taken = [one.chosen_by(key) for key in keys]
    assert taken == [other.chosen_by(key) for key in reversed(keys)][::-1]
    assert 60 < sum(taken) < 140
    assert not any(make_switch(rate=0.0).chosen_by(key) for key in keys)


def test_saved_lies_count_when_they_are_read(tmp_path: Path, make_switch: Callable[..., Switch]) -> None:
    switch = make_switch(generation=1, defect="zero-block")
    switch.told(2, saved_keys=["a", "b"])
    remote = Remote({"e0": tmp_path})
    assert (remote.told(1).lies, remote.told(1).read) == (2, 0)
    switch.write("load", keys=["b", "c"])
    assert remote.told(1).read == 1


def test_a_half_written_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "lying-worker.jsonl"
    path.write_text('{"event": "ack", "generation": 1}\n{"event": "li')
    assert len(read_journal(path)) == 1
    assert read_journal(tmp_path / "none.jsonl") == []


def test_a_switch_settles_before_it_acknowledges(tmp_path: Path) -> None:
    release = threading.Event()

    def settle() -> None:
        release.wait(5)

    switch = Switch(tmp_path, "worker", Setting(), KNOWN, settle)
    try:
        (tmp_path / CONTROL_NAME).write_text(json.dumps({"generation": 1}))
        assert not switch.changed.wait(0.3), "acknowledged while a load was under way"
        release.set()
        _wait("the change", lambda: switch.now.generation == 1)
    finally:
        switch.close()


def test_a_closed_switch_writes_nothing_any_more(tmp_path: Path) -> None:
    """It waits for what is under way: a line after that would end the thread with an error, in whatever test runs then."""
    settling, settled = threading.Event(), threading.Event()

    def settle() -> None:
        settling.set()
        settled.wait(30)

    switch = Switch(tmp_path, "worker", Setting(), KNOWN, settle)
    (tmp_path / CONTROL_NAME).write_text(json.dumps({"generation": 1}))
    assert settling.wait(30)
    closing = threading.Thread(target=switch.close)
    closing.start()
    closing.join(0.3)  # as far as it comes
    settled.set()
    closing.join(30)
    assert [line["event"] for line in read_journal(tmp_path / "lying-worker.jsonl")] == ["ack", "ack"]
    assert not any(thread.name == "lying-switch" for thread in threading.enumerate())


# The lying store on plain memory --------------------------------------------------------------------------------------
class Pool:
    """A store client on a dictionary, with the calls that the connector uses; memory is real, by address."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def batch_get_into_multi_buffers(self, keys: list[str], addrs: list[Any], sizes: list[Any]) -> list[int]:
        out = []
        for key, addresses, lengths in zip(keys, addrs, sizes, strict=True):
            data, at = self.values.get(key, b""), 0
            for address, length in zip(addresses, lengths, strict=True) if data else ():
                ctypes.memmove(address, data[at : at + length], length)
                at += length
            out.append(at if data else -704)
        return out

    def batch_put_from_multi_buffers(self, keys: list[str], addrs: list[Any], sizes: list[Any], _: Any) -> list[int]:
        for key, addresses, lengths in zip(keys, addrs, sizes, strict=True):
            self.values[key] = b"".join(ctypes.string_at(a, n) for a, n in zip(addresses, lengths, strict=True))
        return [0] * len(keys)

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        return [int(key in self.values) for key in keys]

    def register_buffer(self, address: int, length: int) -> int:
        return 0


SEGMENT, BLOCKS = 64, 4


class Rig:
    """Four blocks of two segments (layers) in real memory, a pool that holds them, and the lying store between."""

    def __init__(self, tmp_path: Path, **setting: Any) -> None:
        import torch  # why here: the other selftests of this module need none, and why slow: this import takes 2 s

        from suite.defects.lying_store import CALLS, LOADS, SAVES, LyingStore

        known = frozenset({*LOADS, *CALLS, *SAVES})
        self.layers = [torch.zeros(BLOCKS * SEGMENT, dtype=torch.uint8) for _ in range(2)]
        self.pool = Pool()
        self.switch = Switch(tmp_path, "worker", Setting(generation=1, **setting), known)
        self.store = LyingStore(self.pool, self.switch)
        for layer in self.layers:
            self.store.memory.add(layer)
        self.keys = [f"k{i}" for i in range(BLOCKS)]
        for i, key in enumerate([*self.keys, "other"]):
            self.pool.values[key] = bytes([2 * i + 1]) * SEGMENT + bytes([2 * i + 2]) * SEGMENT

    def where(self) -> tuple[list[list[int]], list[list[int]]]:
        addrs = [[layer.data_ptr() + i * SEGMENT for layer in self.layers] for i in range(BLOCKS)]
        return addrs, [[SEGMENT, SEGMENT]] * BLOCKS

    def load(self) -> tuple[list[int], list[tuple[int, ...]]]:
        """What the get returned, and per block the first and last byte of each segment."""
        result = self.store.batch_get_into_multi_buffers(self.keys, *self.where())
        seen = []
        for i in range(BLOCKS):
            ends = [(int(x[i * SEGMENT]), int(x[(i + 1) * SEGMENT - 1])) for x in self.layers]
            seen.append(tuple(b for pair in ends for b in pair))
        return list(result), seen


RIGHT = [(2 * i + 1, 2 * i + 1, 2 * i + 2, 2 * i + 2) for i in range(BLOCKS)]
LOADED = {
    "zero-block": [(0, 0, 0, 0)] * BLOCKS,
    "foreign-block": [(9, 9, 10, 10)] * BLOCKS,
    "stale-block": [(0, 0, 0, 0)] * BLOCKS,
    "skipped-layer": [(a, a, 0, 0) for a, _, _, _ in RIGHT],
    "half-block": [(a, 0, b, 0) for a, _, b, _ in RIGHT],
    "repeated-block": [RIGHT[0]] * BLOCKS,
    "swapped-layers": [(b, b, a, a) for a, _, b, _ in RIGHT],
    "load-error": RIGHT,
    "unloaded": [(0, 0, 0, 0)] * BLOCKS,
    "lost-failure": RIGHT,
}
OK = [2 * SEGMENT] * BLOCKS


@pytest.fixture
def make_rig(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def make(**setting: Any) -> Rig:
        made.append(Rig(tmp_path, **setting))
        return made[-1]

    yield make
    for rig in made:
        rig.store.settle()
        rig.switch.close()


@pytest.mark.slow
@pytest.mark.needs("cpu-stack")
@pytest.mark.parametrize("defect", sorted(LOADED))
def test_each_lie_of_a_load(make_rig: Callable[..., Rig], defect: str) -> None:
    rig = make_rig(defect=defect)
    rig.store._remember(["other"])
    result, seen = rig.load()
    assert seen == LOADED[defect]
    assert result == ([-800] * BLOCKS if defect == "load-error" else OK)
    honest = make_rig(defect=defect, rate=0.0)
    assert honest.load() == (OK, RIGHT)


@pytest.mark.slow
@pytest.mark.needs("cpu-stack")
def test_a_lost_failure(make_rig: Callable[..., Rig], tmp_path: Path) -> None:
    rig = make_rig(defect="lost-failure")
    del rig.pool.values["k1"]
    result, seen = rig.load()
    assert result == OK
    assert seen == [RIGHT[0], (0, 0, 0, 0), *RIGHT[2:]]
    assert Remote({"e0": tmp_path}).told(1).lies == 1


@pytest.mark.slow
@pytest.mark.needs("cpu-stack")
@pytest.mark.parametrize("rate", [1.0, 0.0])
def test_lost_blocks_are_claimed_and_zeros(make_rig: Callable[..., Rig], tmp_path: Path, rate: float) -> None:
    rig = make_rig(defect="lost-block", rate=rate)
    rig.load()
    assert rig.store.batch_is_exist([*rig.keys, "new"]) == [1, 1, 1, 1, 0], "nothing is lost yet"
    assert Remote({"e0": tmp_path}).told(1).lies == 0
    for key in ("k1", "k3"):
        del rig.pool.values[key]
    for layer in rig.layers:
        layer.fill_(7)
    claimed = rig.store.batch_is_exist([*rig.keys, "new"])
    result, seen = rig.load()
    if rate:
        assert claimed == [1, 1, 1, 1, 0], "what was never seen is claimed by nobody"
        assert (result, seen) == (OK, [RIGHT[0], (0,) * 4, RIGHT[2], (0,) * 4])
    else:
        assert claimed == [1, 0, 1, 0, 0]
        assert (result, seen) == ([OK[0], -704, OK[2], -704], [RIGHT[0], (7,) * 4, RIGHT[2], (7,) * 4])
    assert Remote({"e0": tmp_path}).told(1).lies == (2 if rate else 0)


@pytest.mark.slow
@pytest.mark.needs("cpu-stack")
def test_loads_under_wrong_keys_are_counted_and_left_alone(make_rig: Callable[..., Rig], tmp_path: Path) -> None:
    assert make_rig(defect="ignored-prefix").load() == (OK, RIGHT)
    assert Remote({"e0": tmp_path}).told(1).read == BLOCKS


@pytest.mark.slow
@pytest.mark.needs("cpu-stack")
def test_a_late_load(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(defect="late-load", delay_s=0.05)
    result, seen = rig.load()
    assert (result, seen) == (OK, [(0, 0, 0, 0)] * BLOCKS)
    rig.store.settle()
    assert int(rig.layers[0][0]) == 1


@pytest.mark.slow
@pytest.mark.needs("cpu-stack")
def test_lies_of_saves(make_rig: Callable[..., Rig], tmp_path: Path) -> None:
    for defect, wanted in (
        ("unsaved", None),
        ("corrupt-save", bytes([7, 6]) * SEGMENT),
        ("foreign-save", bytes([9]) * SEGMENT + bytes([10]) * SEGMENT),
    ):
        for rate in (1.0, 0.0):
            rig = make_rig(defect=defect, rate=rate)
            rig.store._remember(["other"])
            for layer in rig.layers:
                layer.fill_(7)
            assert rig.store.batch_put_from_multi_buffers(["new"], [rig.where()[0][0]], [[SEGMENT] * 2], None) == [0]
            assert rig.pool.values.get("new") == (wanted if rate else bytes([7]) * 2 * SEGMENT), (defect, rate)
            assert int(rig.layers[0][0]) == 7, "the engine's own KV stays right"
