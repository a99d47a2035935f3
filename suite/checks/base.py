"""What all checks share: how a finding is made, the names of the counters, and how checks are run.

A check is a pure function that returns a list of findings; an empty list means that it looked and found nothing
wrong. A check that had nothing to look at says so (``too-few-observations``, ``no-pressure``), it never returns [].
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from reports import records as r

Check = Callable[[], Sequence[r.Finding]]

# Canonical counter names, as ``fixtures.telemetry`` writes them into MetricsSnapshot.values.
PROMPT = "prompt_tokens"
COMPUTED = "prompt_tokens.computed"
LOCAL = "prompt_tokens.local"
EXTERNAL = "prompt_tokens.external"
EXTERNAL_HITS = "external_hits_tokens"
STORE_GET = "load_get"
"""Label ``operation`` of a load from the store (vLLM 0.26 to 0.32)."""
STORE_LOOKUP = "lookup_exists"
"""Label ``operation`` of a lookup (same releases)."""
STORE_STATUSES = ("ok", "partial_failure", "error")
"""Values of the label ``status`` in those releases."""
OK = STORE_STATUSES[0]


def finding(code: r.FindingCode, message: str, **evidence: Any) -> r.Finding:
    """A finding; evidence is plain JSON data."""
    return r.Finding(code=code, message=message, evidence=evidence)


def too_few(message: str, **evidence: Any) -> list[r.Finding]:
    """The one answer of a check that had too little to look at (INCONCLUSIVE)."""
    return [finding(r.FindingCode.TOO_FEW_OBSERVATIONS, message, **evidence)]


def counter(delta: Mapping[str, float], name: str) -> float:
    """A counter of a delta. KeyError that names it where it is absent: absent is unknown, never zero."""
    if name not in delta:
        raise KeyError(f"no counter {name!r} in this delta; it has: {', '.join(sorted(delta)) or 'nothing'}")
    return delta[name]


def store_counter(delta: Mapping[str, float], operation: str, status: str, quantity: str) -> float:
    """``store.<operation>.<status>.<quantity>``; 0 where only this label is absent, KeyError where all store counters are.

    A labelled counter appears with its first event, so one absent label means that nothing happened yet. An engine
    that has no store counter at all is not measured, which is something else.
    """
    name = f"store.{operation}.{status}.{quantity}"
    if name not in delta and not any(key.startswith("store.") for key in delta):
        raise KeyError(f"no store counters in this delta (wanted {name!r}); the engine reports none")
    return delta.get(name, 0.0)


def store_ops(delta: Mapping[str, float], operation: str, *, but_ok: bool = False) -> dict[str, float]:
    """Operations of a kind by status; 0 where there were none. But those that went well, where only failures are asked for.

    Statuses that no known release has count as well: one that is renamed must not turn failures into nothing.
    """
    found = dict.fromkeys(STORE_STATUSES, 0.0)
    for name, value in delta.items():
        front, _, quantity = name.rpartition(".")
        if quantity == "ops" and front.startswith(f"store.{operation}."):
            found[front.removeprefix(f"store.{operation}.")] = value
    return {status: value for status, value in found.items() if not (but_ok and status == OK)}


def run(checks: Iterable[Check] | Mapping[str, Check]) -> list[r.Finding]:
    """Run checks in order and gather their findings; a check that crashes becomes ``checker-crashed``, never silence.

    checks: callables without arguments (``functools.partial`` or a lambda), or a mapping name -> callable.
    No check at all is ``no-pressure``: nothing was judged.
    """
    named = list(checks.items()) if isinstance(checks, Mapping) else [(_name(c), c) for c in checks]
    if not named:
        return [finding(r.FindingCode.NO_PRESSURE, "no check was run on this history")]
    found: list[r.Finding] = []
    for name, check in named:
        try:
            result = list(check())
            wrong = next((item for item in result if not isinstance(item, r.Finding)), None)
            if wrong is not None:
                raise TypeError(f"returned {wrong!r} where a Finding belongs")
        except Exception as exc:  # noqa: BLE001 - a crashed checker is unknown, never a pass; its traceback is the evidence
            message = f"check {name} crashed: {type(exc).__name__}: {exc}"
            found.append(finding(r.FindingCode.CHECKER_CRASHED, message, check=name, traceback=traceback.format_exc()))
        else:
            found += result
    return found


def _name(check: Check) -> str:
    inner = getattr(check, "func", check)
    return str(getattr(inner, "__qualname__", repr(inner)))
