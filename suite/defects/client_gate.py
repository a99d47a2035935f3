"""The client's own check as a gate: on a server whose times are known, its time to first token is the server's."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median
from typing import Any

from fixtures.client import Client
from fixtures.request import Target
from reports import records as r
from reports.history import History
from suite.contract import Case, Gate
from suite.defects.catalogue import CLIENT

ERRORS = "client.ttft-errors"
"""Fact: ``{"client_s": [...], "socket_s": [...], "limit_s": x}``: time to first token less the server's own."""

ROUNDS, REQUESTS = 4, 6
"""Rounds of requests of the client and of a blocking socket in turn: both see the same machine."""


def ttft_errors(kind: type[Client]) -> dict[str, Any]:
    """Measure a kind of client; see ``ERRORS``."""
    from suite.selftest import sse_server, test_client  # why here: only this one defect needs the selftest's server

    with sse_server.running() as server:
        client = kind({"e0": Target(server.url, "m")}, lambda record: None, 20.0)
        bench = test_client.Bench(client, server)
        errors, plain = [], []
        try:
            for _ in range(ROUNDS):
                errors += test_client.ttft_errors_s(bench, REQUESTS)
                plain += test_client.socket_errors_s(server, REQUESTS)
        finally:
            client.close()
    return {"client_s": errors, "socket_s": plain, "limit_s": test_client.LIMIT_S}


class LateClient(Client):
    """Looks at the clock 5 ms after the bytes came."""

    def arrival_s(self) -> float:
        return super().arrival_s() + 0.005


class ClientOnTime(Gate):
    """Claim: the client's time to first token is the server's, within a millisecond.

    Oracle: a server whose own times are known, and the simplest client there is (a blocking socket) beside it.
    """

    id = CLIENT
    claim = "the client measures the server's time to first token"
    needs_pool = False
    min_engines = 1
    proof = ("late-client",)

    def cases(self) -> Iterable[Case]:
        yield Case(CLIENT)

    def judge(self, history: History) -> r.Verdict:
        fact = history.fact(ERRORS)
        assert fact is not None
        errors, plain = fact.value["client_s"], fact.value["socket_s"]
        limit_s = max(fact.value["limit_s"], 3 * median(plain))
        findings = []
        if not 0 <= median(errors) < limit_s:
            text = f"the client is {median(errors) * 1e3:.2f} ms late (median); limit {limit_s * 1e3:.2f} ms"
            findings.append(r.Finding(code=r.FindingCode.HARNESS_EXCEPTION, message=text, evidence=dict(fact.value)))
        return self.judged(
            history,
            findings,
            good=f"{median(errors) * 1e3:.2f} ms late (median)",
            wanted=f"less than {limit_s * 1e3:.2f} ms",
        )
