"""Hand-made histories of family I: two engines and a third that differs, all well by default, each defect one keyword away."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from reports import records as r
from reports.history import History
from suite.selftest.degrade_samples import calibration
from suite.selftest.samples import Top, answer, delta

CASE = "I.engine.weights.default"
OURS: Top = ((7, -0.1), (8, -2.5), (9, -4.0))
THEIRS: Top = ((8, -0.2), (7, -1.9), (9, -4.0))
MIXED: Top = ((9, -0.3), (7, -1.5), (8, -3.0))
REUSABLE = 96
PROMPT_TOKENS = 100
PER_TOKEN = 10
"""Bytes: what ``samples.delta`` assumes."""


def facts(name: str) -> r.EngineFacts:
    return r.EngineFacts(
        name=name,
        url="http://127.0.0.1:1",
        model=f"/models/{name}/tiny",
        served_model="tiny",
        connector="mooncake-store",
        block_tokens=32,
        max_model_len=4096,
        load_failure_policy="recompute",
        hash_seed="0",
        kv_bytes_per_token=PER_TOKEN,
        layers=4,
    )


@dataclass
class Made:
    """A case with one pair, e0 -> variant. Lists hold (request, its counters)."""

    foreign_top: Top = THEIRS
    saver_top: Top = OURS
    reader_top: Top = THEIRS
    reused: int = 0
    failed_loads: int = 0
    saver_control: int = REUSABLE
    equal_control: int | None = REUSABLE
    own_control: int = REUSABLE
    own_top: Top | None = None
    own_failed_loads: int = 0
    second_native_top: Top | None = None
    second_cold_top: Top | None = None
    """Of the first pair."""
    cold_samples: Mapping[str, int] = field(default_factory=dict)
    """Tag of a pair -> cold requests, where they are not two."""
    cold_external: int = 0
    reader_keys: Sequence[str] = ("tiny@tp_rank:0@group:0@bb",)
    saver_keys: Sequence[str] = ("tiny@tp_rank:0@group:0@aa",)
    tags: Sequence[str] = ("forward",)
    attempt: str = "ready"
    log: str = ""
    log_unit: str = "e0"
    params: dict[str, Any] = field(default_factory=dict)
    drop: str = ""
    """Role of requests that are left out."""
    counters: bool = True
    words: tuple[str, ...] = ("Traceback (most recent call last):", "ValueError: fp8 is not for this CPU", "stopped")

    def history(self) -> History:
        """The case's view."""
        self.numbers = 0
        out: list[r.Record] = [
            r.StackUp(stack_id="s1", t_s=0.0, spec={}, engines=(facts("e0"), facts("e1"))),
            *calibration(),
            r.CaseStarted(
                case_id=CASE, gate="I.engine", gate_version=1, claim="c", params=self._params(), stack_id="s1", t_s=50.0
            ),
            r.StartAttempt(
                unit="variant",
                t_s=50.0,
                elapsed_s=30.0,
                bound_s=240.0,
                result=self.attempt,  # type: ignore[arg-type]
                exit_code=1,
                log_tail=self.words,
            ),
            r.Fact(name="identity.engine", t_s=51.0, value=msgspec.to_builtins(facts("variant"))),
        ]
        if self.attempt == "ready":
            for tag in self.tags:
                out += self._pair(tag)
        if self.log:
            out.append(r.LogLine(unit=self.log_unit, line_number=3, text=self.log, category="", case_id=CASE, t_s=80.0))
        out.append(r.Fact(name="logs.scanned", t_s=90.0, value={"e0": 10}))
        out.append(r.CaseFinished(case_id=CASE, t_s=91.0))
        return History(out).for_case(CASE)

    def _params(self) -> dict[str, Any]:
        base = {
            "setting": "the model's weights",
            "pairs": ["forward"],
            "changes_answers": True,
            "must_isolate": False,
            "may_lack": False,
            "avoid": "a cache_prefix",
        }
        return base | self.params

    def _pair(self, tag: str) -> list[r.Record]:
        own_top = self.own_top or self.reader_top
        rows: list[tuple[str, str, Top, int, int]] = [
            # role, engine, answer, local tokens, external tokens
            ("cold", "variant", self.reader_top, 0, self.cold_external),
            ("cold", "variant", (tag == self.tags[0] and self.second_cold_top) or self.reader_top, 0, 0),
            ("native", "variant", self.reader_top, REUSABLE, 0),
            ("native", "variant", self.second_native_top or self.reader_top, REUSABLE, 0),
            ("save", "e0", self.saver_top, 0, 0),
            ("saver", "e0", self.saver_top, REUSABLE, 0),
            ("foreign", "variant", self.foreign_top, 0, self.reused),
            ("control", "e0", self.saver_top, 0, self.saver_control),
            ("own", "variant", own_top, 0, self.own_control),
        ]
        if self.equal_control is not None:
            rows.insert(8, ("control", "e1", self.saver_top, 0, self.equal_control))
        del rows[self.cold_samples.get(tag, 2) : 2]
        out: list[r.Record] = []
        for role, engine, top, local, external in rows:
            if role != self.drop:
                out += self._request(f"{role}/{tag}", engine, top, local, external)
        equal = "e1 (its own weights)" if self.equal_control is not None else ""
        value = {
            "tag": tag,
            "saver": "e0 (its own weights)",
            "reader": "variant (other weights)",
            "equal": equal,
            "saver_engine": "e0",
            "reader_engine": "variant",
            "block_tokens": 32,
            "saver_keys": list(self.saver_keys),
            "reader_keys": list(self.reader_keys),
        }
        out.append(r.Fact(name="identity.pair", t_s=70.0, value=value))
        return out

    def _request(self, role: str, engine: str, top: Top, local: int, external: int) -> list[r.Record]:
        self.numbers += 1
        name = f"q{self.numbers}"
        observed = answer(
            name,
            (top[0][0], 3),
            [top, OURS],
            prompt=tuple(range(PROMPT_TOKENS)),
            case_id=CASE,
            engine=engine,
            role=role,
            cached_tokens=local + external,
            usage_prompt_tokens=PROMPT_TOKENS,
        )
        changes: dict[str, float] = {}
        if role.startswith("foreign"):
            changes["store.load_get.partial_failure.ops"] = self.failed_loads
            changes["store.load_get.ok.ops"] = int(bool(external) and not self.failed_loads)
        if role.startswith("own"):
            changes["store.load_get.partial_failure.ops"] = self.own_failed_loads
        after = delta(PROMPT_TOKENS, local, external, **{k.replace(".", "__"): v for k, v in changes.items()})
        before = dict.fromkeys(after, 0.0)
        snapshots = [
            r.MetricsSnapshot(unit=engine, label=f"{name}:before", t_s=60.0, values=before),
            r.MetricsSnapshot(unit=engine, label=f"{name}:after", t_s=61.0, values=after),
        ]
        return [observed, *(snapshots if self.counters or not role.startswith("foreign") else [])]
