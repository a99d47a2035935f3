"""A hand-made history of one cell of the fault matrix: all well by default, each defect one change away."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from reports import records as r
from reports.history import History
from suite.gates.degrade_cells import Cell
from suite.selftest.samples import Top, answer, delta

RIGHT: tuple[Top, ...] = (((7, -0.1), (9, -3.0)), ((8, -0.2), (5, -2.5)))
WRONG: tuple[Top, ...] = (((7, -1.6), (9, -1.9)), ((8, -1.7), (5, -1.9)))
"""The same tokens, at log probabilities that a foreign block leads to (1.5 nat away)."""

FAULT_S = 100.0
TTL_S = 10.0
BUDGET = {"ttft_factor": 3.0, "ttft_extra_s": 1.0, "max_lookups": 3}

Change = Callable[[list[r.Record]], list[r.Record]]


def prompt(number: int, tokens: int) -> tuple[int, ...]:
    """A prompt of its own for each number."""
    return (number + 3, *range(4, 3 + tokens))


def ask(
    name: str,
    role: str,
    phase: str,
    at_s: float,
    *,
    engine: str = "e1",
    tokens: int = 2000,
    number: int = 0,
    **changes: Any,
) -> r.Observation:
    """One request, answered right after 0.2 s."""
    took_s = changes.pop("took_s", 0.2)
    fields: dict[str, Any] = {
        "prompt": prompt(number, tokens),
        "engine": engine,
        "role": role,
        "phase": phase,
        "sent_s": at_s,
        "first_token_s": at_s + took_s,
        "token_s": (at_s + took_s, at_s + took_s + 0.01),
        "done_s": at_s + took_s + 0.02,
        "deadline_s": 15.0,
        "sampling": {"max_tokens": 2, "temperature": 0.0, "logprobs": 2},
    }
    tops = changes.pop("tops", RIGHT)
    made = answer(name, (7, 8), tops)
    values = {field: getattr(made, field) for field in made.__struct_fields__}
    fields["prompt_token_ids"] = fields.pop("prompt")
    fields["usage_prompt_tokens"] = tokens
    return r.Observation(**(values | fields | changes))


def hung(name: str, role: str, phase: str, at_s: float, **changes: Any) -> r.Observation:
    """One request that got no answer within its deadline."""
    return ask(
        name, role, phase, at_s, timed_out=True, http_status=None, error="deadline", output_token_ids=(), top_logprobs=(),
        token_s=(), first_token_s=None, done_s=at_s + 15.0, finish_reason=None, **changes,
    )  # fmt: skip


def calibration() -> list[r.Record]:
    """Floors of zero, and planted blocks 1.5 nat away."""
    out: list[r.Record] = []
    for suffix in ("", "-concurrent"):
        for engine in ("e0", "e1"):
            for i, kind in enumerate((f"floor-cold{suffix}", f"floor-native{suffix}", f"floor-native{suffix}")):
                name = f"cal{suffix}/{engine}/{i}"
                out.append(ask(name, kind, "floors", 1.0, engine=engine, case_id="calibration", number=900))
    for i, where in enumerate(("first", "middle", "last")):
        number = 910 + i
        out.append(
            ask(f"ref/{i}", "planted-reference", "planted", 2.0, engine="e0", case_id="calibration", number=number)
        )
        out.append(
            ask(
                f"bad/{i}",
                "planted",
                "planted",
                3.0,
                case_id="calibration",
                number=number,
                tops=WRONG,
                cached_tokens=1984,
            )
        )
        replaced = {"put": 0, "before": "a", "after": "b"}
        value = {"where": where, "block": i, "keys": ["k"], "replaced": replaced, "request_id": f"bad/{i}"}
        out.append(r.Fact(name="planted-block", t_s=3.5, value=value))
    return out


def engine(name: str) -> r.EngineFacts:
    return r.EngineFacts(
        name=name, url="http://127.0.0.1:1", model="m", served_model="m", connector="mooncake-store", block_tokens=32,
        max_model_len=4096, load_failure_policy="recompute", hash_seed="0",
    )  # fmt: skip


def processes(unit: str, label: str, pid: int = 7) -> r.ProcessSnapshot:
    facts = (r.ProcessFacts(name=unit, pid=pid, ppid=1, start_ticks=5),)
    return r.ProcessSnapshot(unit=unit, t_s=1.0, label=f"{label}/{unit}", processes=facts, states={str(pid): "S"})


def metrics(unit: str, label: str, t_s: float, **values: float) -> r.MetricsSnapshot:
    base = {"running": 0.0, "waiting": 0.0, "kv_usage_ratio": 0.0}
    return r.MetricsSnapshot(unit=unit, label=label, t_s=t_s, values=base | values)


def wait(what: str, t_s: float, came_true: bool = True, elapsed_s: float = 0.5, bound_s: float = 20.0) -> r.WaitRecord:
    return r.WaitRecord(what=what, t_s=t_s, elapsed_s=elapsed_s, bound_s=bound_s, came_true=came_true)


def fault(cell: Cell, action: str, t_s: float, **changes: Any) -> r.FaultRecord:
    target = "owner0" if cell.target == "owner" else cell.target
    fields: dict[str, Any] = {
        "fault_id": f"{cell.fault}:{target}:1", "fault": cell.fault, "target": target, "action": action, "landed": True,
        "proof": {"took_s": 0.05}, "t_s": t_s,
    }  # fmt: skip
    return r.FaultRecord(**(fields | changes))


def records(cell: Cell) -> list[r.Record]:
    """A cell of two surviving engines, all well."""
    stack = r.StackUp(
        stack_id="s1",
        t_s=0.0,
        spec={"budget": BUDGET, "store": {"client_ttl_s": TTL_S}},
        engines=(engine("e0"), engine("e1")),
    )
    out: list[r.Record] = [stack, *calibration()]
    out.append(
        r.CaseStarted(
            case_id=cell.id,
            gate=f"D.{cell.target}",
            gate_version=1,
            claim="c",
            params=cell.params(),
            stack_id="s1",
            t_s=50.0,
        )
    )
    out += [processes("e0", "before"), processes("e1", "before")]
    held = {"owner0": 62} if cell.target == "owner" else {"e0": 62}
    for i in range(4):
        out.append(ask(f"c{i}", f"cold/{i}", "save", 60.0 + i, engine="e0", number=i, case_id=cell.id))
        out.append(
            r.Fact(
                name="owners", t_s=65.0, value={"label": f"victim/{i}", "saver": "e0", "blocks": 62, "held_by": held}
            )
        )
    for i in range(3):
        out.append(ask(f"b{i}", "baseline", "baseline", 70.0, number=50 + i, case_id=cell.id))
        out.append(ask(f"s{i}", "short", "baseline", 70.0, number=60 + i, tokens=200, took_s=0.05, case_id=cell.id))
    out.append(metrics("e1", "k0:before", 80.0))
    out.append(ask("k0", "control/0", "control", 80.1, number=80, case_id=cell.id))
    out.append(metrics("e1", "k0:after", 81.0, **delta(2000, external=1984)))
    for name in ("e0", "e1"):
        out.append(metrics(name, "before-fault", 90.0, **{"store.lookup_exists.ok.ops": 10.0}))
    out.append(fault(cell, "inject", FAULT_S))
    for i in range(3):
        out.append(ask(f"v{i}", f"victim/{i}", "degraded", FAULT_S + 0.1 + i, number=i, case_id=cell.id))
        for name in ("e0", "e1"):
            out.append(
                ask(
                    f"y{name}{i}",
                    "bystander",
                    "degraded",
                    FAULT_S + 0.1 + i,
                    engine=name,
                    number=100 + i,
                    tokens=200,
                    took_s=0.05,
                    case_id=cell.id,
                )
            )
            out.append(r.HealthProbe(engine=name, t_s=FAULT_S + 1.0 + i, http_status=200, elapsed_s=0.01))
    if cell.heal != "none":
        out.append(fault(cell, "heal", FAULT_S + 5.0))
    out.append(wait("first-good", FAULT_S + 5.1))
    out.append(ask("w3", "returned/3", "recovery", FAULT_S + 6.0, number=3, case_id=cell.id))
    out.append(wait("hits-back", FAULT_S + 7.0))
    for name in ("e0", "e1"):
        out.append(metrics(name, "after-fault", FAULT_S + 8.0, **{"store.lookup_exists.ok.ops": 18.0}))
        out.append(
            ask(
                f"m{name}",
                "maximum-length",
                "after",
                FAULT_S + 9.0,
                engine=name,
                number=200,
                tokens=4094,
                case_id=cell.id,
            )
        )
        out.append(metrics(name, f"idle/{name}", FAULT_S + 10.0))
        out.append(processes(name, "after"))
    out.append(r.Fact(name="logs.scanned", t_s=FAULT_S + 11.0, value={"e0": 10, "e1": 10, "master": 5}))
    out.append(r.Fact(name="healthy", t_s=FAULT_S + 11.0, value={"complaints": [], "took_s": 1.0}))
    out.append(r.CaseFinished(case_id=cell.id, t_s=FAULT_S + 12.0))
    return out


def history(cell: Cell, *changes: Change) -> History:
    """The case view of a cell after some changes."""
    made = records(cell)
    for change in changes:
        made = change(made)
    return History(made).for_case(cell.id)


def replaced(match: Callable[[r.Record], bool], make: Callable[[Any], r.Record | None]) -> Change:
    """Replace (or, for None, drop) every record that matches. ValueError where none does: the change would do nothing."""

    def apply(rows: list[r.Record]) -> list[r.Record]:
        if not any(map(match, rows)):
            raise ValueError("this change matches no record")
        new = [make(row) if match(row) else row for row in rows]
        return [row for row in new if row is not None]

    return apply


def added(*more: r.Record) -> Change:
    """Records put in before the end of the case."""

    def apply(rows: Sequence[r.Record]) -> list[r.Record]:
        return [*rows[:-1], *more, rows[-1]]

    return apply
