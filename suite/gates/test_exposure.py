"""Family O, exposure: who can reach a running stack, and what may such a process do to the pool."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from reports import records as r
from reports.history import History
from suite.checks.base import finding, too_few
from suite.contract import Case, Gate
from suite.gates import gate_cases

if TYPE_CHECKING:
    from fixtures.stack import Stack

PROMPT_TOKENS = 65
"""Two whole blocks: enough to be saved, and to be taken away."""

LOOPBACK = "127.0.0.1"

UNDER_LEASE = -706
"""The store's answer to a removal of what somebody has just looked up or read (``fixtures.store_tool``)."""

CONTROL_BYTES = 4096
"""Size of the object that the foreign client puts, reads and removes itself: its tools work."""


class ExposedPorts(Gate):
    """Claim: every port of a running stack is bound to the address that the stack was given.

    How it can lie: a port was not open yet; a process of the stack was not looked at.
    Oracle: the kernel's list of listening sockets, with the process that holds each. Control: every engine's API port
    and the master's ports are in the list.
    Turns red: a server that listens on all interfaces whatever it is told.
    """

    id = "O.exposed-ports"
    claim = "every port of a running stack is bound to the address that the stack was given"
    min_engines = 1

    def cases(self) -> Iterable[Case]:
        yield Case(f"{self.id}.bound")

    def collect(self, stack: Stack, case: Case) -> None:
        with stack.phase(case.id, "look"):
            stack.snapshot_sockets("exposure")
            stack.fact("exposure.host", stack.spec.host)
            stack.fact("exposure.units", sorted(stack.units()))
            # Where every unit has an address of its own (containers), that is what it was given.
            given = {name: stack.host_of(name, unit.launch.role) for name, unit in stack.units().items()}
            stack.fact("exposure.hosts", given)

    def judge(self, history: History) -> r.Verdict:
        snapshot = next((s for s in history.of(r.SocketSnapshot) if s.label == "exposure"), None)
        host, units = history.fact("exposure.host"), history.fact("exposure.units")
        listening = snapshot.listening if snapshot else ()
        hosts = history.fact("exposure.hosts")
        given = dict(hosts.value) if hosts else {}
        findings = _exposed(listening, str(host.value) if host else "", units.value if units else [], given)
        open_to_all = findings[0].evidence.get("ports", []) if findings else []
        return self.judged(
            history,
            findings,
            good=f"{len(listening)} ports, all bound to {host.value if host else '?'}",
            wanted="no port bound to another address than the stack's own",
            cause="a store client binds its data and handshake ports to all interfaces, whatever it is told"
            if findings
            else "",
            production="ss -ltnp on each host" if findings else "",
            next_command=f"pytest -m gates -k {history.case.case_id}" if findings else "",
            numbers={"ports": len(listening), "ports_bound_elsewhere": len(open_to_all)},
        )


def _exposed(listening: Sequence[str], host: str, units: Sequence[str], given: Mapping[str, str]) -> list[r.Finding]:
    """``unit address:port`` lines whose address is not the one that the unit was given (default: the stack's own)."""
    seen = {line.split(" ", 1)[0] for line in listening}
    missing = [unit for unit in units if unit not in seen]
    if not listening or not units or missing:
        return too_few(f"no listening port was seen of {', '.join(missing) or 'any unit'}", missing=missing)
    wrong = [line for line in listening if not _bound_as_given(line, given, host)]
    if not wrong:
        return []
    by_unit: dict[str, list[str]] = {}
    for line in wrong:
        by_unit.setdefault(line.split(" ", 1)[0], []).append(line.split(" ", 1)[1])
    words = "; ".join(f"{unit}: {', '.join(ports)}" for unit, ports in by_unit.items())
    return [
        finding(
            r.FindingCode.EXPOSED_PORT,
            f"{len(wrong)} of {len(listening)} ports are bound to other addresses than {host}: {words}",
            ports=wrong,
            host=host,
        )
    ]


def _bound_as_given(line: str, given: Mapping[str, str], host: str) -> bool:
    """A unit with an address of its own may use that and loopback, which is its own too."""
    unit, _, where = line.partition(" ")
    address = where.rpartition(":")[0]
    return _bound_to(address, given.get(unit, host)) or (unit in given and _bound_to(address, LOOPBACK))


def _bound_to(address: str, host: str) -> bool:
    """A loopback stack may use any loopback address (``127.0.0.1``, ``[::1]``)."""
    bound, wanted = ipaddress.ip_address(address.strip("[]")), ipaddress.ip_address(host)
    mapped = getattr(bound, "ipv4_mapped", None)
    bound = mapped or bound
    return bound == wanted or (wanted.is_loopback and bound.is_loopback)


class ForeignClient(Gate):
    """Claim: a process that merely reaches the master cannot read or delete what the engines stored.

    How it can lie: the key was not an engine's; reading or removing failed for another reason than a refusal.
    Oracle: a store client of the suite's own, with no credential of any kind, reads and removes one block of a prompt
    that an engine saved; the store's own listing afterwards. Control: it can read and remove an object of its own.
    Turns red: a master without authentication, a pool without tenants.
    """

    id = "O.foreign-client"
    version = 3
    claim = "a process that merely reaches the master cannot read or delete what the engines stored"
    min_engines = 1

    def cases(self) -> Iterable[Case]:
        yield Case(f"{self.id}.read")
        yield Case(f"{self.id}.delete")

    def collect(self, stack: Stack, case: Case) -> None:
        engine = stack.names[0]
        with stack.phase(case.id, "save"):
            before = stack.keys()
            stack.save(engine, stack.prompts(case.id).fresh("own", PROMPT_TOKENS))
            own = sorted(stack.keys() - before)
        with stack.phase(case.id, "reach"):
            op = "digest" if case.id.endswith("read") else "remove"
            key, mine = own[0] if own else "none", f"{case.id}-control"
            steps = [{"op": "put", "keys": [mine], "bytes": CONTROL_BYTES}]
            steps += [{"op": op, "keys": [k]} for k in (mine, key)]
            _, control, answer = stack.store_tool(steps)
            listed = stack.keys()
            stack.fact("foreign", {"op": op, "own": len(own), "answer": answer[key], "control": control[mine]})
            stack.fact("foreign.after", key in listed)
            stack.store_tool([{"op": "remove", "keys": [mine]}])

    def judge(self, history: History) -> r.Verdict:
        fact, after = history.fact("foreign"), history.fact("foreign.after")
        findings = _reached(fact.value, bool(after.value)) if fact and after else too_few("nothing was tried")
        return self.judged(
            history,
            findings,
            good="refused",
            wanted="the block is neither given out nor removed",
            cause="the master knows no clients: whoever reaches its port is one" if findings else "",
            production="invisible: the master logs no client by name" if findings else "",
            next_command=f"pytest -m gates -k {history.case.case_id}" if findings else "",
        )


def _reached(fact: dict[str, Any], listed_after: bool) -> list[r.Finding]:
    if fact["own"] < 1:
        return too_few("the engine's prompt is not in the pool: there was nothing to reach for")
    able = bool(fact["control"]) if fact["op"] == "digest" else fact["control"] == 0
    if not able:
        return too_few("the foreign client cannot even read and remove an object of its own")
    if fact["op"] == "digest":
        if not fact["answer"]:
            return [] if listed_after else too_few("the block left the pool by itself: nothing was refused")
        return [
            finding(
                r.FindingCode.EXPOSED_PORT,
                f"a client without any credential read a stored block ({fact['answer']['bytes']} bytes)",
                **fact,
            )
        ]
    if listed_after and fact["answer"] == UNDER_LEASE:
        return too_few("a lease protected the block just then, whoever asks: nothing was refused")
    if listed_after and fact["answer"] != 0:
        return []
    return [finding(r.FindingCode.EXPOSED_PORT, "a client without any credential deleted a stored block", **fact)]


EXPOSED_PORTS = ExposedPorts()
FOREIGN_CLIENT = ForeignClient()


@gate_cases(EXPOSED_PORTS)
def test_exposed_ports(run_case: Any, case: Case) -> None:
    run_case(EXPOSED_PORTS, case)


@gate_cases(FOREIGN_CLIENT)
def test_foreign_client(run_case: Any, case: Case) -> None:
    run_case(FOREIGN_CLIENT, case)
