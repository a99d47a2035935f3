"""Checkers and oracles: pure functions over the history. No I/O, no clock; they import evidence types alone.

| module | question | findings |
|---|---|---|
| ``hits`` | did each prompt get exactly the tokens that it must, from each source? | zero-hits, fewer-hits, extra-hits |
| ``conservation`` | do local + external + computed tokens, and bytes, add up? | conservation |
| ``sources`` | do response, counters and bytes moved tell one story? | source-disagreement |
| ``answers`` | is the answer the right one, and could the oracle have seen a wrong one? | wrong-answer, oracle-blind |
| ``identity`` | was anything reused across engines that differ, and is the reader's answer its own? | foreign-reuse, wrong-answer |
| ``liveness`` | was every request answered in time, by the same engine? | failed-request, hang, stuck-behind-health, engine-died |
| ``degrade`` | what did a fault cost? | slow-degrade, unbounded-lookups |
| ``recovery`` | is the stack well again? | hits-not-back, kv-leak, admission-refused, resource-growth |
| ``logs`` | do the logs hold what no fault explains? | unexplained-log |
| ``faults`` | was there any pressure? | fault-did-not-land, no-pressure |
| ``parity`` | can these engines share at all, and only what they should? | seed-mismatch, shared-lookup-channel |

Every check returns a list of findings, the smallest evidence in each. A check without enough to look at returns
``too-few-observations`` (or ``no-pressure``, ``no-control``), never an empty list. ``run`` composes checks; one that
crashes is ``checker-crashed``.
"""

from suite.checks.base import run

__all__ = ["run"]
