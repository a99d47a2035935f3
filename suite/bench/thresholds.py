"""What a benchmark has to show where the stack's spec does not say so. None: measured and reported, not judged."""

from __future__ import annotations

from typing import Any

EXTERNAL_OVER_COLD: dict[str, float | None] = {"cpu": None, "cuda": 1.0}
"""On a GPU a pool that is slower than computing anew is not worth having. What a tiny model on a CPU takes to compute a prompt says nothing
about pools for large ones, whichever way it comes out."""

RECOVERED_SHARE = 0.5
"""Part of the hits lost to a constrained cache that the pool gives back, on any platform: a count, not a time. A pool that holds the
whole working set should give back nearly all of it; half is where it begins to be a different thing from no pool."""


def external_over_cold(spec: dict[str, Any]) -> float | None:
    """Most that TTFT from the pool may be of a cold one's. spec: that of ``StackUp``."""
    given = spec.get("bench", {}).get("external_over_cold")
    return float(given) if given is not None else EXTERNAL_OVER_COLD.get(str(spec.get("platform")))


def recovered_share(spec: dict[str, Any]) -> float:
    """Least part of the lost hits that the pool has to give back."""
    given = spec.get("bench", {}).get("recovered_share")
    return float(given) if given is not None else RECOVERED_SHARE
