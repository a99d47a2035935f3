"""The case that one side of an interleaving records, and its judge."""

from __future__ import annotations

import re
from collections.abc import Iterable
from statistics import geometric_mean

from reports import records as r
from reports.history import History
from suite.checks import liveness
from suite.checks.base import COMPUTED, PROMPT, finding, run, too_few
from suite.contract import Case, Gate
from suite.gates.judging import ordered

CASE = "B.interleaved.cold"
_ROLE = re.compile(r"cold/b(\d+)\Z")


def role_of(block: int) -> str:
    """Role of a request of a block."""
    return f"cold/b{block}"


class Interleaved(Gate):
    """Claim: every request of this side was answered, and every one was computed in full.

    How it can lie: a prompt that somebody sent before makes its side fast.
    Oracle: cached tokens as each response reports them; the engine's counters over the whole session.
    Turns red: failed requests, cached tokens, counters that do not add up.
    """

    id = "B.interleaved"
    version = 2
    claim = "every request of this side was answered, and computed in full"
    needs_pool = False
    min_engines = 1

    def cases(self) -> Iterable[Case]:
        return ()  # recorded by `python -m suite.bench.interleave`

    def blocks(self, history: History) -> dict[int, float]:
        """Block -> geometric mean of its two times in seconds; blocks with a request that failed or was warm are left out."""
        found: dict[int, list[float]] = {}
        for o in history.observations():
            if (m := _ROLE.match(o.role)) and o.ok and not o.cached_tokens and o.ttft_s is not None and o.ttft_s > 0:
                found.setdefault(int(m[1]), []).append(o.ttft_s)
        return {block: geometric_mean(times) for block, times in found.items() if len(times) == 2}

    def judge(self, history: History) -> r.Verdict:
        asked = int(history.case.params["blocks"])
        blocks = self.blocks(history)
        checks = {
            "liveness": lambda: liveness.check_liveness(history.observations()),
            "computed": lambda: self._computed(history),
            "blocks": lambda: [] if len(blocks) > asked / 2 else too_few(f"{len(blocks)} of {asked} blocks are good"),
        }
        findings = ordered(run(checks))
        return self.judged(
            history,
            findings,
            good=f"{len(blocks)} of {asked} blocks",
            wanted="all of them",
        )

    @staticmethod
    def _computed(history: History) -> list[r.Finding]:
        """Counters cover both sides where these are one engine: at least this side's tokens, and nothing reused."""
        engine = next((m.unit for m in history.of(r.MetricsSnapshot) if m.label == "before"), "")
        delta = history.delta(engine, "before", "after")
        if delta is None:
            return [finding(r.FindingCode.NO_CONTROL, "no counters around the session")]
        sent = sum(len(o.prompt_token_ids) for o in history.observations() if o.ok and _ROLE.match(o.role))
        if delta[PROMPT] < sent or delta[COMPUTED] != delta[PROMPT]:
            text = (
                f"{sent} prompt tokens were sent, {delta[PROMPT]:.0f} counted, {delta[COMPUTED]:.0f} of them computed"
            )
            return [finding(r.FindingCode.CONSERVATION, text)]
        return []


INTERLEAVED = Interleaved()
