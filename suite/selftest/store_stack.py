"""A real stack without engines for selftests: the pool's servers alone are up in a fraction of a second."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

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
