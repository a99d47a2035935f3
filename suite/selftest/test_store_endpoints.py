"""Which data port an owner has that was started again."""

from types import SimpleNamespace
from typing import Any

import pytest

from fixtures import store_builder

pytestmark = pytest.mark.selftest


@pytest.mark.parametrize(
    ("listed", "port", "same"),
    [
        ((501,), 501, True),
        ((502,), 502, False),
        ((502, 501), 502, False),
        ((501, 502), 502, False),
        ((501, 501), 501, True),
        ((), 0, False),
    ],
    ids=[
        "same-port",
        "new-port",
        "stale-entry-last",
        "stale-entry-first",
        "stale-entry-of-the-same-port",
        "not-listed",
    ],
)
def test_the_stale_entry_of_an_owners_name_is_not_taken_for_its_new_port(
    listed: tuple[int, ...], port: int, same: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen on a real master: until it drops the segment of the process before, both are said to be the new client's."""
    facts: list[dict[str, Any]] = []
    segments = [SimpleNamespace(port=number, client_id="new") for number in listed]
    monkeypatch.setattr(store_builder, "owner_segments", lambda store, unit: segments)
    store = SimpleNamespace(owners={"owner0": None}, owner_clients={})
    stack = SimpleNamespace(store=store, notes={"endpoint/owner0": 501}, fact=lambda name, value: facts.append(value))
    store_builder.note_endpoint(stack, "owner0")  # type: ignore[arg-type]
    assert [(fact["port"], fact["port_before"], fact["same"]) for fact in facts] == [(port, 501, same)]
    assert store.owner_clients == ({"owner0": "new"} if listed else {})
