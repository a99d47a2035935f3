"""A stack without engines, for selftests of gates: caches and a pool in memory, answers from a formula, lies on request.

Why no real engines: two of them take half a minute to start, and an honest release cannot be made to tell each lie that a
judge has to see through. ``Stack`` itself is the real one: requests, waits, counters and facts take the paths they take
in a run. The simulation shares no code with the model that judges it (``suite.checks.pool_model``): a block is known by the
whole text before it, caches are plain sets.
"""

from __future__ import annotations

import hashlib
import random
import time
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec

from fixtures.request import Request, body_of, sampling_of
from fixtures.spec import StackSpec, load_spec
from fixtures.stack import Engine, Stack, Store
from fixtures.waiting import Silent
from reports import records as r
from reports.history import History
from suite.contract import Case, Gate, safe_judge

BYTES_A_TOKEN = 2048
BLOCK_BYTES = 32 * BYTES_A_TOKEN
WRONG_NAT = 1.5
"""By how much a wrong block moves the log probabilities of an answer here."""

DAMAGED = "damaged"
CUT = "cut"


def simulated_spec(**changes: Any) -> StackSpec:
    """The CPU spec with bounds of waits that a selftest can sit through."""
    spec = load_spec("cpu")
    return spec.with_changes(timeouts=msgspec.structs.replace(spec.timeouts, visible_s=0.05), **changes)


@dataclass
class SimulatedEngine:
    """What one engine holds and counts."""

    local: set[str] = field(default_factory=set)
    counted: Counter[str] = field(default_factory=Counter)
    usage: float = 0.0


class SimulatedStack(Stack):
    """``lies``: names of what this stack does wrong; see ``_serve``, ``_read`` and the methods that ask for them."""

    kv_layers: tuple[r.KvLayers, ...] = ()
    """Of its model; as if every layer kept every token where empty."""

    def __init__(self, spec: StackSpec | None = None, lies: Sequence[str] = ()) -> None:
        self.records: list[r.Record] = []
        self.lies = set(lies)
        self.pending: list[SimulatedPending] = []
        self.pool: dict[str, str] = {}
        """Key -> content. The content of an undamaged block is its own key."""
        self.held: dict[str, SimulatedEngine] = {}
        self.master: Counter[str] = Counter()
        self.logs: list[str] = []
        client: Any = SimpleNamespace(send=self._send, start=self._start, send_all=self._send_all)
        nothing: Any = None
        super().__init__(
            spec or simulated_spec(), "s1", Path("nowhere"), nothing, client, self.records.append, Silent()
        )
        self._up()

    def _up(self) -> None:
        facts = []
        for engine in self.spec.engines:
            told = r.EngineFacts(
                name=engine.name,
                url="http://127.0.0.1:1",
                model="m",
                served_model="m",
                connector=engine.connector,
                block_tokens=32,
                max_model_len=engine.max_model_len,
                load_failure_policy="recompute",
                hash_seed="0",
                kv_bytes_per_token=BYTES_A_TOKEN,
                kv_layers=self.kv_layers,
                layers=4,
                settings={"prefix_caching": True},
            )
            facts.append(told)
            plan = SimpleNamespace(facts=told)
            model = SimpleNamespace(vocab_size=512)
            self.engines[engine.name] = cast(Engine, SimpleNamespace(facts=told, plan=plan, model=model, handle=None))
            self.held[engine.name] = SimulatedEngine()
        admin = SimpleNamespace(
            key_count=lambda: len(self.pool),
            keys=lambda: sorted(self.pool),
            segment_list=lambda: [SimpleNamespace(endpoint="e0:1")],
            query_key=lambda key: [SimpleNamespace(endpoint="e0:1")] if key in self.pool else [],
            metrics=lambda: {"master_evicted_key_count_mem": float(self.master["evicted"])},
        )
        self.store = cast(Store, SimpleNamespace(admin=admin))
        self.record(r.StackUp(stack_id="s1", t_s=time.monotonic(), spec=self.spec.to_dict(), engines=tuple(facts)))

    # What a real stack asks of the world ----------------------------------------------------------------------------
    def wait(self, label: str, probe: Callable[[], Any], *, bound_s: float, bound_source: str, **more: Any) -> bool:
        if "late-failure" not in self.lies:
            for pending in self.pending:  # meanwhile they are served
                pending.result()
            self.pending.clear()
        return super().wait(
            label, probe, bound_s=min(bound_s, 0.3), bound_source=bound_source, **more | {"poll_s": 1e-3}
        )

    def _settled(
        self, engine: str, before: r.MetricsSnapshot | None, label: str, expected: int | None
    ) -> r.MetricsSnapshot | None:
        return self.scrape(engine, label)  # counters are never late here

    def _scrape_values(self, engine: str) -> dict[str, float]:
        held = self.held[engine]
        names = ("prompt_tokens", "prompt_tokens.local", "prompt_tokens.external", "prompt_tokens.computed")
        zeros = dict.fromkeys((*names, "external_hits_tokens", "preemptions", "store.lookup_exists.ok.ops"), 0.0)
        gauges = {"running": 0.0, "waiting": 0.0, "kv_usage_ratio": held.usage}
        return zeros | {name: float(value) for name, value in held.counted.items()} | gauges

    def reset_local_cache(self, engine: str) -> int:
        if "keeps-local" not in self.lies:
            self.held[engine].local.clear()
        self.fact("reset-local", {"engine": engine, "http_status": 200})
        return 200

    def scan_logs(self, case_id: str) -> None:
        if "crash" in self.lies:
            self.logs.append("Traceback (most recent call last):")
        for number, text in enumerate(self.logs):
            t_s = time.monotonic()
            self.record(r.LogLine(unit="e0", line_number=number, text=text, category="", case_id=case_id, t_s=t_s))
        self.fact("logs.scanned", {"e0": 10})

    def health(self, engine: str, deadline_s: float = 5.0) -> r.HealthProbe:
        probe = r.HealthProbe(engine=engine, t_s=time.monotonic(), http_status=200, elapsed_s=0.001)
        self.record(probe)
        return probe

    def snapshot_processes(self, unit: str, label: str) -> r.ProcessSnapshot:
        pid = 77 if label == "after" and "died" in self.lies else 7
        taken = r.ProcessSnapshot(
            unit=unit,
            t_s=time.monotonic(),
            label=label,
            processes=(r.ProcessFacts(name=unit, pid=pid, ppid=1, start_ticks=pid),),
        )
        self.record(taken)
        return taken

    def pool_share(self) -> float:
        return 0.0

    def store_tool(self, steps: list[dict[str, Any]]) -> list[Any]:
        return [self._tool(step) for step in steps]

    def _digest(self, key: str) -> dict[str, Any] | None:
        content = self.pool.get(key)
        if content is None:
            return None
        return {"bytes": BLOCK_BYTES // 2 if content == CUT else BLOCK_BYTES, "sha256": content}

    def _tool(self, step: dict[str, Any]) -> Any:
        if step["op"] == "digest":
            return {key: self._digest(key) for key in step["keys"]}
        if step["op"] == "remove":
            return {key: 0 if self.pool.pop(key, None) else -1 for key in step["keys"]}
        keys = step.get("keys") or [step["key"]]
        before = [self._digest(key) for key in keys]
        if "idle-damage" not in self.lies:
            contents = [self.pool[key] for key in keys]
            how = {"flip": DAMAGED, "truncate": CUT, "copy": self.pool.get(step.get("source", ""), "")}
            changed = contents[::-1] if step["op"] == "exchange" else [how[step["how"]]]
            self.pool.update(zip(keys, changed, strict=True))
        after = [self._digest(key) for key in keys]
        one = step["op"] == "replace"
        return {"put": 0, "before": before[0] if one else before, "after": after[0] if one else after}

    # Requests -------------------------------------------------------------------------------------------------------
    def _send(self, request: Request, *, case_id: str, phase: str) -> r.Observation:
        return self._finish(request, case_id, phase, time.monotonic())

    def _send_all(
        self, requests: Sequence[Request], *, case_id: str, phase: str, concurrency: int
    ) -> list[r.Observation]:
        began = time.monotonic()
        together = concurrency > 1 and "serial" not in self.lies
        return [self._finish(q, case_id, phase, began if together else time.monotonic()) for q in requests]

    def _start(self, request: Request, *, case_id: str, phase: str) -> Any:
        self.pending.append(SimulatedPending(self, request, case_id, phase))
        return self.pending[-1]

    def _finish(
        self, request: Request, case_id: str, phase: str, sent_s: float, cancelled: bool = False
    ) -> r.Observation:
        """Serve it, count it, record it."""
        prompt = request.prompt_token_ids or _tokens_of(str(request.extra.get("messages")))
        body = body_of(request, "m")
        if cancelled:
            self._read(request.engine, prompt, request.cache_salt)  # looked up, and loaded, for nobody
            fields: dict[str, Any] = {
                "cancelled": True,
                "error": "cancelled: before an answer began",
                "http_status": None,
            }
        else:
            fields = self._serve(request, prompt, body)
        first_s = time.monotonic()
        tokens = fields.get("output_token_ids", ())
        o = r.Observation(
            request_id=request.request_id,
            case_id=case_id,
            phase=phase,
            engine=request.engine,
            role=request.role,
            prompt_token_ids=prompt,
            sent_s=sent_s,
            first_token_s=first_s if tokens else None,
            token_s=(first_s,) * len(tokens),
            done_s=time.monotonic(),
            deadline_s=request.deadline_s or 60.0,
            cache_salt=body.get("cache_salt"),
            sampling=sampling_of(request, body),
            **fields,
        )
        self.record(o)
        return o

    def _serve(self, request: Request, prompt: tuple[int, ...], body: dict[str, Any]) -> dict[str, Any]:
        engine, held = request.engine, self.held[request.engine]
        if "refuses-long" in self.lies and request.role == "maximum-length":
            return {"http_status": 400, "error": "http 400: too long"}
        if ("stalls" in self.lies and request.role == "load/5") or (
            "starves" in self.lies and request.role == "bystander"
        ):
            return {"http_status": None, "timed_out": True, "error": "deadline: 60 s ran out"}
        salt = None if "no-salt" in self.lies else request.cache_salt
        choices = int(body.get("n") or 1)
        reading = body.get("prompt_logprobs") is None
        cached, wrong = 0, False
        for _ in range(choices):
            local, external, spoiled, hung = self._read(engine, prompt, salt) if reading else (0, 0, 0, 0)
            if hung:
                held.counted["store.lookup_exists.ok.ops"] += 500
                return {"http_status": None, "timed_out": True, "error": "deadline: 15 s ran out"}
            wrong = wrong or bool(spoiled)
            cached = max(cached, local + external)
            self._count(held, len(prompt), local, external)
        if "silent-recompute" in self.lies and request.role == "external":
            held.counted["store.load_get.error.ops"] += 1
        answers = [self._answer(prompt, body, number, wrong) for number in range(choices)]
        tokens, tops = answers[0]
        self._keep(engine, prompt, tokens, salt, request.max_tokens)
        if choices > 1 and "last-choice" in self.lies and cached and engine == "e1":
            answers[-1] = answers[0]
        if "one-choice" in self.lies:
            answers = answers[:1]
        other = engine if "prompt" in self.lies else ""
        steps = () if reading else tuple(_top(random.Random(f"{t}{other}"), t) for t in prompt[1:])
        return {
            "http_status": 200,
            "finish_reason": "length",
            "usage_prompt_tokens": len(prompt),
            "cached_tokens": cached,
            "output_token_ids": tokens,
            "top_logprobs": tops,
            "more_choices": tuple(r.Choice(output_token_ids=t, top_logprobs=p) for t, p in answers[1:]),
            "prompt_logprobs": steps,
        }

    def _read(self, engine: str, prompt: tuple[int, ...], salt: str | None) -> tuple[int, int, bool, bool]:
        """Local and external tokens, whether a wrong block was used, whether the request never ends."""
        held = self.held[engine]
        keys = self._keys(engine, prompt[:-1], None if "ignored-salt" in self.lies else salt)
        local = _leading(keys, held.local)
        found = 0 if "zero-hits" in self.lies else _leading(keys, self.pool)
        held.counted["store.lookup_exists.ok.ops"] += 1 if keys else 0
        loaded = keys[local:found]
        failed = [k for k in loaded if self.pool[k] == CUT or ("checksum" in self.lies and self.pool[k] != k)]
        if failed:
            held.counted["store.load_get.partial_failure.ops"] += 1
            self.logs.append("WARNING 11-29 10:00:00 Recovered from KV load failure")
            if failed[0] == loaded[0] and "checksum" not in self.lies:
                return 0, 0, False, True
            found = keys.index(failed[0])
            loaded = keys[local:found]
        wrong = any(self.pool[key] != key for key in loaded) or ("foreign" in self.lies and len(loaded) > 1)
        wrong = wrong or ("wrong-recompute" in self.lies and bool(failed))
        if "extra" in self.lies and found and len(prompt) > 32 * (found + 1):
            found += 1
        held.local.update(loaded)
        return 32 * local, 32 * max(0, found - local), wrong, False

    def _count(self, held: SimulatedEngine, prompt: int, local: int, external: int) -> None:
        held.counted.update(
            {
                "prompt_tokens": prompt,
                "prompt_tokens.local": local,
                "prompt_tokens.external": external,
                "prompt_tokens.computed": prompt - local - external,
                "external_hits_tokens": external * (2 if "booked-twice" in self.lies else 1),
                "store.load_get.ok.ops": 1 if external else 0,
                "store.load_get.ok.bytes": self._bytes_read(external),
            }
        )
        held.counted["preemptions"] += 0 if "calm" in self.lies else 1
        self.master["evicted"] += 0 if "calm" in self.lies else 1
        if "leak" in self.lies:
            held.usage = 0.01

    def _bytes_read(self, external: int) -> int:
        return external * BYTES_A_TOKEN

    def _keep(self, engine: str, prompt: tuple[int, ...], tokens: tuple[int, ...], salt: str | None, most: int) -> None:
        self.held[engine].local.update(self._keys(engine, prompt + tokens[:-1], salt))
        if most > 1 and "unsaved" not in self.lies:
            saved = prompt + tokens[:-1] if "saves-outputs" in self.lies else prompt
            for key in self._keys(engine, saved, salt):
                self.pool.setdefault(key, key)

    def _keys(self, engine: str, tokens: tuple[int, ...], salt: str | None) -> list[str]:
        apart = "other-seed" in self.lies and engine == "e1"  # whose keys no other engine makes
        return _keys(tokens, f"{salt}, hashed by {engine}" if apart else salt)

    def _answer(
        self, prompt: tuple[int, ...], body: dict[str, Any], number: int, wrong: bool
    ) -> tuple[tuple[int, ...], tuple[Any, ...]]:
        rng = random.Random(f"{_digest_of(prompt).hexdigest()}/{body.get('seed')}/{number}")
        tokens = tuple(rng.randrange(3, 500) for _ in range(body["max_tokens"]))
        tops = tuple(_top(rng, token) for token in tokens)
        if wrong:
            tops = tuple((top[0], (top[1][0], top[1][1] - WRONG_NAT), *top[2:]) for top in tops)
        return tokens, tops


class SimulatedPending:
    """A request that is served when somebody waits, for its end or anything else."""

    def __init__(self, stack: SimulatedStack, request: Request, case_id: str, phase: str) -> None:
        self._stack, self._what, self._sent_s = stack, (request, case_id, phase), time.monotonic()
        self._o: r.Observation | None = None

    def _finish(self, cancelled: bool) -> r.Observation:
        return self._stack._finish(*self._what, self._sent_s, cancelled)

    def wait_first_token(self, timeout_s: float) -> bool:
        return False

    def cancel(self) -> None:
        self._o = self._o or self._finish(True)

    def result(self) -> r.Observation:
        self._o = self._o or self._finish(False)
        return self._o


def _top(rng: random.Random, token: int) -> tuple[tuple[int, float], ...]:
    others = [500 + i for i in range(4)]
    return ((token, -0.1), *((other, -2.0 - i - rng.random()) for i, other in enumerate(others)))


def _keys(tokens: tuple[int, ...], salt: str | None) -> list[str]:
    """Key of every whole block: a digest of all the text up to its end."""
    digest = hashlib.blake2b(repr(salt).encode(), digest_size=12)
    data = array("q", tokens)
    text, block = data.tobytes(), 32 * data.itemsize
    keys = []
    for number in range(len(tokens) // 32):
        digest.update(text[number * block : (number + 1) * block])
        keys.append(digest.hexdigest())
    return keys


def _digest_of(tokens: tuple[int, ...]) -> hashlib.blake2b:
    return hashlib.blake2b(array("q", tokens).tobytes(), digest_size=12)


def _leading(keys: Sequence[str], held: Any) -> int:
    return next((i for i, key in enumerate(keys) if key not in held), len(keys))


def _tokens_of(text: str) -> tuple[int, ...]:
    return tuple(text.encode())


def run_case(gate: Gate, case_id: str, lies: Sequence[str] = (), stack: SimulatedStack | None = None) -> r.Verdict:
    """Collect a case on a simulated stack and judge it, as a run does."""
    case: Case = next(c for c in gate.cases() if c.id == case_id)
    stack = stack or SimulatedStack(lies=lies)
    started = r.CaseStarted(
        case_id=case.id,
        gate=gate.id,
        gate_version=gate.version,
        claim=gate.claim,
        params=case.params,
        stack_id=stack.stack_id,
        t_s=time.monotonic(),
    )
    stack.record(started)
    gate.collect(stack, case)
    stack.record(r.CaseFinished(case_id=case.id, t_s=time.monotonic()))
    return safe_judge(gate, History(stack.records).for_case(case.id))
