"""A real stack without engines for selftests: the pool's servers alone are up in a fraction of a second."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from fixtures.faults import Fault
from fixtures.spec import parse_spec
from fixtures.stack import Stack
from fixtures.stack_pool import StackBuilder
from fixtures.waiting import Silent
from reports import records as r

SEGMENT_BYTES = 16 << 20


@contextlib.contextmanager
def store_stack(folder: Path, store: str = "", head: str = "") -> Iterator[Stack]:
    """The servers of a pool, brought up as for a real stack. ``store``: lines of its [store] table;
    ``head``: of the stack itself (such as its runtime).

    What was recorded is in ``stack.notes["records"]``.
    """
    spec = parse_spec(
        f'name = "x"\n{head}\n[store]\nsegment_bytes = {SEGMENT_BYTES}\nclient_ttl_s = 2\n{store}\n[engine]\n', "x.toml"
    )
    recorded: list[r.Record] = []
    builder = StackBuilder(spec, "s1", folder, recorded.append, Silent())
    builder.stack.notes["records"] = recorded
    try:
        builder.start_store()
        yield builder.stack
    finally:
        builder.stack.heal_all()
        builder.stack.client.close()
        if builder.stack.store:
            builder.stack.store.close()
        builder.stack.runtime.close(0.0)


def healed_record(stack: Stack, fault: Fault) -> r.FaultRecord:
    """Heal a fault; what was recorded of that."""
    record = fault.heal(stack)
    assert record is not None
    return record


def paused_run(head: str) -> str:
    """The program of a run in small that has paused its master's container and waits to be killed: PROGRAM <folder>. head: as of
    ``store_stack``. It prints its run's id as JSON."""
    return f"""
import json, signal, sys
from pathlib import Path
from fixtures.faults.docker import Pause
from suite.selftest.store_stack import store_stack

signal.signal(signal.SIGINT, signal.default_int_handler)
with store_stack(Path(sys.argv[1]), "", {head!r}) as stack:
    assert Pause("master").inject(stack).landed
    print(json.dumps({{"run": stack.handle("master").marker.partition("/")[0]}}), flush=True)
    while True:
        signal.pause()
"""
