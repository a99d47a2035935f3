"""Exposure: ports and foreign clients, on hand-made histories."""

from __future__ import annotations

from typing import Any

import pytest

from reports import records as r
from reports.history import History
from suite.contract import Gate, safe_judge
from suite.gates.test_exposure import EXPOSED_PORTS, FOREIGN_CLIENT

pytestmark = pytest.mark.selftest


def judged(gate: Gate, *records: r.Record) -> r.Verdict:
    case = next(iter(gate.cases())).id
    start = r.CaseStarted(case_id=case, gate=gate.id, gate_version=1, claim="c", t_s=0.0)
    return safe_judge(gate, History([start, *records, r.CaseFinished(case_id=case, t_s=9.0)]).for_case(case))


def fact(name: str, value: Any) -> r.Fact:
    return r.Fact(name=name, t_s=1.0, value=value)


def ports(*listening: str, units: tuple[str, ...] = ("e0", "master")) -> r.Verdict:
    return judged(
        EXPOSED_PORTS,
        r.SocketSnapshot(t_s=1.0, label="exposure", listening=listening),
        fact("exposure.host", "127.0.0.1"),
        fact("exposure.units", list(units)),
    )


def test_ports_on_the_stacks_own_address_are_fine() -> None:
    assert ports("e0 127.0.0.1:80", "master 127.0.0.1:81").outcome is r.Outcome.PASS
    assert ports("e0 [::1]:80", "master 127.0.0.1:81", "master [::ffff:127.0.0.1]:82").outcome is r.Outcome.PASS


@pytest.mark.parametrize("address", ["0.0.0.0", "[::]", "10.0.0.7", "[2001:db8::1]"])
def test_ports_on_other_addresses_are_exposed(address: str) -> None:
    verdict = ports("e0 127.0.0.1:80", "master 127.0.0.1:81", f"e0 {address}:15868")
    assert verdict.finding == "exposed-port"
    assert f"e0: {address}:15868" in verdict.got
    assert verdict.numbers["ports_bound_elsewhere"] == 1


def test_a_unit_whose_ports_were_not_seen_is_no_pass() -> None:
    assert ports("e0 127.0.0.1:80").outcome is r.Outcome.INCONCLUSIVE
    assert ports().outcome is r.Outcome.INCONCLUSIVE
    assert judged(EXPOSED_PORTS).outcome is r.Outcome.INCONCLUSIVE


def foreign(op: str, answer: Any, *, listed_after: bool = True, own: int = 2, able: bool = True) -> r.Verdict:
    control = ({"bytes": 1, "sha256": "y"} if able else None) if op == "digest" else (0 if able else -1)
    value = {"op": op, "own": own, "answer": answer, "control": control}
    return judged(FOREIGN_CLIENT, fact("foreign", value), fact("foreign.after", listed_after))


def test_what_a_foreign_client_may_do() -> None:
    assert foreign("digest", None).outcome is r.Outcome.PASS
    assert foreign("digest", {"bytes": 64, "sha256": "x"}).finding == "exposed-port"
    assert foreign("remove", -1).outcome is r.Outcome.PASS
    assert foreign("remove", 0, listed_after=False).finding == "exposed-port"
    assert (
        foreign("remove", 0).finding == "exposed-port"
    )  # the store said that it is gone, whatever its listing still shows


def test_nothing_to_reach_for_is_no_pass() -> None:
    assert foreign("digest", None, listed_after=False).outcome is r.Outcome.INCONCLUSIVE
    assert foreign("digest", None, own=0).outcome is r.Outcome.INCONCLUSIVE
    assert foreign("digest", None, able=False).outcome is r.Outcome.INCONCLUSIVE
    assert foreign("remove", -1, able=False).outcome is r.Outcome.INCONCLUSIVE
    assert foreign("remove", -706).outcome is r.Outcome.INCONCLUSIVE  # under a lease it is refused to everybody
    assert judged(FOREIGN_CLIENT).outcome is r.Outcome.INCONCLUSIVE
