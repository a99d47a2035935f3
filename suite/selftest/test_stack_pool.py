"""The pool of stacks, without a stack: how it names them, and which it hands out again."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from fixtures import capabilities
from fixtures.capabilities import Capability
from fixtures.errors import Untestable, UsageError
from fixtures.models import ensure_model
from fixtures.progress import open_progress
from fixtures.spec import StackSpec, load_spec
from fixtures.stack_pool import StackBuilder, StackPool
from reports import records as r

pytestmark = pytest.mark.selftest


def test_no_stack_gets_the_directory_of_another(tmp_path: Path) -> None:
    """A second pool of one run (after a restart, or in a resumed run) begins to count anew."""
    spec = load_spec("cpu")
    progress = open_progress()
    try:
        for expected in ("s1", "s2", "s3"):
            pool = StackPool(tmp_path, lambda record: None, progress)
            name = pool._new_id(spec)
            assert name == f"{expected}-cpu-{spec.key()}"
            (tmp_path / "stacks" / name).mkdir(parents=True)
        assert pool._new_id(spec).startswith("s4-")
    finally:
        progress.close()


def test_a_stack_of_which_a_unit_is_gone_is_not_handed_out_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stacks are stand-ins: a real one takes half a minute."""
    records: list[r.Record] = []
    running = SimpleNamespace(alive=lambda: True)
    units = {"master": running, "e0": running}

    class Builder:
        def __init__(self, spec: StackSpec, stack_id: str, *_: object) -> None:
            nothing = SimpleNamespace(close=list)
            self.stack = SimpleNamespace(
                spec=spec, stack_id=stack_id, dirty=False, store=None, client=nothing, runtime=nothing,
                heal_all=list, units=lambda: dict(units),
            )  # fmt: skip

        def start(self) -> None:
            units["e0"] = running

    monkeypatch.setattr("fixtures.stack_pool.builder_of", lambda spec: Builder)
    spec = load_spec("cpu")
    progress = open_progress()
    try:
        pool = StackPool(tmp_path, records.append, progress)
        first = pool.acquire(spec)
        assert pool.acquire(spec) is first
        units["e0"] = SimpleNamespace(alive=lambda: False)
        second = pool.acquire(spec)
        assert second is not first
        assert pool.acquire(spec) is second
    finally:
        progress.close()
    assert [x.reason for x in records if isinstance(x, r.StackDown)] == ["e0 ended"]


@pytest.mark.parametrize("where", ["heal_all", "client", "store"])
def test_an_interrupt_on_the_way_to_the_units_does_not_leave_them_running(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted() -> list[str]:
        raise KeyboardInterrupt

    closed: list[str] = []

    def note(name: str) -> list[str]:
        closed.append(name)
        return []

    class Builder:
        def __init__(self, spec: StackSpec, stack_id: str, *_: object) -> None:
            parts = {name: SimpleNamespace(close=partial(note, name)) for name in ("client", "store", "runtime")}
            self.stack = SimpleNamespace(spec=spec, stack_id=stack_id, dirty=False, heal_all=list, units=dict, **parts)

        def start(self) -> None:
            if where == "heal_all":
                self.stack.heal_all = interrupted
            else:
                getattr(self.stack, where).close = interrupted

    monkeypatch.setattr("fixtures.stack_pool.builder_of", lambda spec: Builder)
    progress = open_progress()
    try:
        pool = StackPool(tmp_path, lambda record: None, progress)
        pool.acquire(load_spec("cpu"))
        with pytest.raises(KeyboardInterrupt):
            pool.close()
    finally:
        progress.close()
    assert closed == [name for name in ("client", "store", "runtime") if name != where]


def test_a_gpu_stack_is_not_brought_up_on_a_host_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its engines would start on the CPU, and their verdicts would be a GPU stack's."""
    monkeypatch.setattr(capabilities, "probe", lambda word: Capability(False, "no /dev/nvidia0", "run elsewhere"))
    progress = open_progress()
    try:
        with pytest.raises(Untestable, match="needs gpu: stack 'gpu-shared' has platform = 'cuda', and here: no /dev"):
            StackPool(tmp_path, lambda record: None, progress).acquire(load_spec("gpu-shared"))
    finally:
        progress.close()


@pytest.mark.parametrize("host", ["203.0.113.1", "no.such.host.invalid", "x" * 300, ".", ""])
def test_an_address_that_no_unit_could_bind_is_one_line(tmp_path: Path, host: str) -> None:
    """Nothing is started: 203.0.113.0/24 is for documentation, and no host has an address of it."""
    progress = open_progress()
    records: list[r.Record] = []
    try:
        with pytest.raises(UsageError, match=r"^stack cpu: host = ") as caught:
            StackPool(tmp_path, records.append, progress).acquire(load_spec("cpu").with_changes(host=host))
    finally:
        progress.close()
    assert "\n" not in str(caught.value)
    assert [type(record) for record in records] == [r.StackDown]


def test_weights_that_are_cut_short_are_found_before_anything_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def starts(builder: object) -> None:
        raise AssertionError("a store is started over weights that no engine can load")

    monkeypatch.setattr("fixtures.stack_pool.check_installed", lambda spec: None)
    monkeypatch.setattr(StackBuilder, "start_store", starts)
    model = shutil.copytree(ensure_model("tiny-base").path, tmp_path / "model")
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    progress = open_progress()
    try:
        with pytest.raises(UsageError, match="cut short"):
            StackPool(tmp_path, lambda record: None, progress).acquire(
                load_spec("cpu").with_all_engines(model=str(model))
            )
    finally:
        progress.close()
