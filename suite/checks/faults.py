"""No proof without pressure (rule 1): every injected fault landed, with a proof from outside the injector."""

from __future__ import annotations

from collections.abc import Sequence

from reports import records as r
from suite.checks.base import finding


def check_faults(faults: Sequence[r.FaultRecord], *, min_injected: int = 1) -> list[r.Finding]:
    """Every fault and every heal landed and says how that was proven; at least ``min_injected`` were injected."""
    injected = [f for f in faults if f.action == "inject"]
    if len(injected) < min_injected:
        return no_pressure("injected faults", len(injected), min_injected)
    return [
        finding(
            r.FindingCode.FAULT_DID_NOT_LAND,
            f"{f.action} {f.fault} on {f.target}: {'no proof that it landed' if f.landed else 'it did not land'}",
            fault_id=f.fault_id,
            fault=f.fault,
            target=f.target,
            action=f.action,
            proof=f.proof,
        )
        for f in faults
        if not f.landed or not f.proof
    ]


def no_pressure(what: str, got: float, wanted: float) -> list[r.Finding]:
    """``no-pressure`` unless ``got`` reaches ``wanted``: ``no_pressure("blocks read after the fault", n, 1)``."""
    if got >= wanted:  # false for a NaN
        return []
    return [finding(r.FindingCode.NO_PRESSURE, f"{what}: {got:g}, at least {wanted:g} needed", got=got, wanted=wanted)]
