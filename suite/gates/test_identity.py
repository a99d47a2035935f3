"""Family I: nothing that changes the KV can be reused across, or the answer is the reader's own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from fixtures.errors import Untestable
from fixtures.identity_adapters import RANK, ensure_adapter, put_adapter
from fixtures.identity_variants import (
    LORA_ENV,
    VARIANT,
    load_adapter,
    lora_arguments,
    unload_adapter,
    variant_engine,
)
from fixtures.models import TINY
from reports import records as r
from reports.history import History
from suite.contract import Case, Gate
from suite.gates import gate_cases
from suite.gates.arms import calibrate
from suite.gates.identity_arms import Pair, Party, ask_before_and_after, ask_pair
from suite.gates.identity_settings import AVOID, PROTECTIONS, SETTINGS, merged
from suite.gates.judging_identity import judge_identity

if TYPE_CHECKING:
    from fixtures.spec import StackSpec
    from fixtures.stack import Stack

CORE = ("weights.default", "weights.prefix")
"""The worst case, and the setting that avoids it; one engine start each."""

FULL = (
    "position.default",
    "weights.tenant",
    "position.prefix",
    "dtype.default",
    "dtype.prefix",
    "kv-dtype.default",
    "kv-dtype.prefix",
    "quantization.default",
    "block-size.default",
    "hash-algorithm.default",
    "tokenizer.default",
    "tensor-parallel.default",
    "pipeline-parallel.default",
    "kv-layout.default",
    "kv-layout.prefix",
    "triton.default",
    "flashinfer.default",
    "flashinfer.prefix",
    "release.default",
    "release.prefix",
)
"""An engine start each: too much for the core, where the same key is judged by its worst cases."""


class OtherEngine(Gate):
    """Claim: two engines that differ in one setting reuse nothing of each other, or the reader answers as if alone.

    How it can lie: "no hit across" says nothing where nothing could have hit; and engines that share by accident report
    healthy hits and fluent answers.
    Oracle: the reader's own answers under a salt of its own, in the shape of a cold request and of a hit; the noise is that
    of its own repeated answers; where the two compute one function with unlike kernels, that of rounding. Controls: the saver reads its blocks back from the pool, an equal engine reads them too,
    the reader reads its own, and both sides are seen to answer differently where the setting says so. Both orders.
    Turns red: a key that does not hold the setting.
    """

    id = "I.engine"
    proof = ("ignored-prefix",)
    judges_lmcache = True
    version = 6
    claim = "two engines that differ in one setting reuse nothing of each other, or answer as if they were alone"

    def cases(self) -> Iterable[Case]:
        for name in (*CORE, *FULL):
            key, protection = name.split(".")
            setting = SETTINGS[key]
            params = {
                "setting": setting.text,
                "key": key,
                "protection": protection,
                "pairs": ["forward", "backward"],
                "changes_answers": setting.changes_answers,
                "must_isolate": False,
                "may_lack": setting.may_lack,
                "avoid": AVOID,
            }
            yield Case(f"{self.id}.{name}", params, needs=setting.needs, core=name in CORE)

    def stack(self, base: StackSpec, case: Case) -> StackSpec:
        if case.params["protection"] != "default" and any(e.connector.startswith("lmcache") for e in base.engines):
            raise Untestable(
                "lmcache",
                f"the protection {case.params['protection']!r} is an option of vLLM's own store connector",
                "judge the .default cases, or the pool without LMCache (--stack gpu-shared)",
            )
        return base

    def collect(self, stack: Stack, case: Case) -> None:
        calibrate(stack)
        setting, protection = SETTINGS[case.params["key"]], PROTECTIONS[case.params["protection"]]
        ours, theirs = setting.sides()
        saver, equal = (Party(name, ours) for name in stack.names[:2])
        other = Party(VARIANT, f"{theirs}, {protection.text}")
        changes = merged(stack.spec.engine(saver.engine), {**setting.changes(stack), **protection.changes})
        with variant_engine(stack, like=saver.engine, tenant_id=protection.tenant_id, **changes) as attempt:
            if attempt.result == "ready":
                ask_pair(stack, case.id, Pair("forward", saver, other, equal))
                ask_pair(stack, case.id, Pair("backward", other, saver))
            stack.scan_logs(case.id)

    def judge(self, history: History) -> r.Verdict:
        return judge_identity(self, history)


class Salt(Gate):
    """Claim: blocks saved under one cache salt are found under no other, nor without one.

    How it can lie: the engine's own cache honours the salt and the pool does not (the hash was rebuilt from tokens alone).
    Oracle: as I.engine; here any reuse is a failure, however right the answer. Control: the same salt does hit.
    Turns red: a connector that ignores the salt.
    """

    id = "I.salt"
    judges_lmcache = True
    version = 4
    claim = "blocks saved under one cache salt are reused under that salt alone"
    proof = ("ignored-salt",)

    CASES = {
        "none": (("salted-to-plain", "red", None), ("plain-to-salted", None, "red")),
        "other": (("red-to-blue", "red", "blue"), ("short-to-long", "red", "redder")),
    }

    def cases(self) -> Iterable[Case]:
        for name, pairs in self.CASES.items():
            params = {
                "name": name,
                "setting": "the cache salt",
                "pairs": [tag for tag, _, _ in pairs],
                "changes_answers": False,
                "must_isolate": True,
                "avoid": "none known: the salt itself is the setting",
            }
            yield Case(f"{self.id}.{name}", params, smoke=name == "other")

    def collect(self, stack: Stack, case: Case) -> None:
        calibrate(stack)
        first, second = stack.names[:2]
        for tag, ours, theirs in self.CASES[case.params["name"]]:
            saver = Party(first, f"salt {ours}" if ours else "no salt", salt=ours)
            reader = Party(second, f"salt {theirs}" if theirs else "no salt", salt=theirs)
            equal = Party(second, saver.text, salt=ours)
            ask_pair(stack, case.id, Pair(tag, saver, reader, equal))
        stack.scan_logs(case.id)

    def judge(self, history: History) -> r.Verdict:
        return judge_identity(self, history)


RELOADED = "reloaded"
"""The case whose saver and reader are one engine, before and after an adapter was rolled out in place."""


class Adapter(Gate):
    """Claim: KV of one LoRA adapter is reused neither by the base model nor by another adapter, whatever its name.

    How it can lie: adapters share one set of weights, and a key that names the model alone cannot tell them apart; a name
    can be given to other bytes by a roll-out in place.
    Oracle: as I.engine, with the reader's own answers through its own adapter. Control: the same adapter does hit.
    Turns red: a key without the adapter; an adapter known by its name or path alone.
    """

    id = "I.lora"
    proof = ("ignored-adapter",)
    judges_lmcache = True
    version = 4
    claim = "KV of one adapter is reused neither by the base model nor by another adapter, whatever its name"

    CASES = {
        # case -> (pairs as (tag, saver's adapter, saver's salt, reader's adapter, reader's salt)), what differs, what helps
        "base": (
            (("base-to-adapter", "", None, "alpha", None), ("adapter-to-base", "alpha", None, "", None)),
            "the adapter",
        ),
        "other": (
            (("alpha-to-beta", "alpha", None, "beta", None), ("beta-to-alpha", "beta", None, "alpha", None)),
            "the adapter",
        ),
        "salt": (
            (("adapter-to-salt", "alpha", None, "", "alpha"), ("salt-to-adapter", "", "alpha", "alpha", None)),
            "an adapter's name given as a salt",
        ),
        "same-name": (
            (("forward", "gamma", None, "gamma", None), ("backward", "gamma", None, "gamma", None)),
            "the bytes of an adapter of one name",
        ),
        "same-path": (
            (("forward", "delta", None, "delta", None), ("backward", "delta", None, "delta", None)),
            "the bytes of an adapter of one name and path",
        ),
        RELOADED: (
            (("before-to-after", "echo", None, "echo", None),),
            "the bytes of an adapter that was unloaded, replaced and loaded again",
        ),
    }

    def cases(self) -> Iterable[Case]:
        for name, (pairs, setting) in self.CASES.items():
            params = {
                "name": name,
                "setting": setting,
                "pairs": [pair[0] for pair in pairs],
                "changes_answers": True,
                "must_isolate": False,
                "avoid": "a new path (or name) for every version of an adapter's bytes",
            }
            yield Case(f"{self.id}.{name}", params, variant="lora", core=name != RELOADED)

    def stack(self, base: StackSpec, case: Case) -> StackSpec:
        args = (*base.engines[0].args, *lora_arguments(RANK))
        return base.with_all_engines(args=args, env={**base.engines[0].env, **LORA_ENV})

    def collect(self, stack: Stack, case: Case) -> None:
        calibrate(stack)
        _load_adapters(stack)
        first, second = stack.names[:2]
        name = case.params["name"]  # not from the id: a case may run under another one
        if name == RELOADED:
            _ask_reloaded(stack, case.id, first, self.CASES[name][0][0][0])
            stack.scan_logs(case.id)
            return
        for tag, ours, salt, theirs, other_salt in self.CASES[name][0]:
            saver = Party(first, _text(ours, salt), adapter=ours, salt=salt)
            reader = Party(second, _text(theirs, other_salt), adapter=theirs, salt=other_salt)
            equal: Party | None = Party(second, saver.text, adapter=ours, salt=salt)
            if ours == theirs:  # each engine has bytes of its own under this name
                equal = None
                saver, reader = (Party(p.engine, f"{ours}, bytes of {p.engine}", adapter=ours) for p in (saver, reader))
                if tag == "backward":
                    saver, reader = reader, saver
            ask_pair(stack, case.id, Pair(tag, saver, reader, equal))
        stack.scan_logs(case.id)

    def judge(self, history: History) -> r.Verdict:
        return judge_identity(self, history)


def _text(adapter: str, salt: str | None) -> str:
    return (f"adapter {adapter}" if adapter else "base model") + (f", salt {salt}" if salt else "")


def _load_adapters(stack: Stack) -> None:
    """Once a stack: ``alpha`` and ``beta`` are the same on both engines; ``gamma`` lies in two places, with other bytes in
    each; ``delta`` lies in one place whose bytes are replaced between the first engine's load and the second's."""
    if stack.notes.get("identity.adapters"):
        return
    stack.notes["identity.adapters"] = True
    model = stack.spec.engines[0].model
    if model not in TINY:
        raise Untestable("tiny-model", f"the stack serves {model}", "use a stack of tiny models (--stack cpu)")
    alpha, beta, gamma, gamma_2, delta, delta_2 = (ensure_adapter(TINY[model], seed) for seed in range(1, 7))
    first, second = stack.names[:2]
    place = stack.directory / "adapters" / "delta"
    for engine, paths in ((first, (gamma, delta)), (second, (gamma_2, delta_2))):
        put_adapter(paths[1], place)
        for name, path in (("alpha", alpha), ("beta", beta), ("gamma", paths[0]), ("delta", place)):
            load_adapter(stack, engine, name, path)
            stack.ask(
                engine, stack.prompts("lora-warm-up").fresh(f"{engine}/{name}", 64), "warm-up", extra={"model": name}
            )


def _ask_reloaded(stack: Stack, case_id: str, engine: str, tag: str) -> None:
    """One engine: an adapter is loaded, used, unloaded, its files replaced, and loaded again under its name and path."""
    before, after = (ensure_adapter(TINY[stack.spec.engines[0].model], seed) for seed in (7, 8))
    place = stack.directory / "adapters" / "echo"
    put_adapter(before, place)
    load_adapter(stack, engine, "echo", place)

    def roll_out() -> None:
        unload_adapter(stack, engine, "echo")
        put_adapter(after, place)
        load_adapter(stack, engine, "echo", place)

    sides = [Party(engine, f"echo, bytes {when} the roll-out", adapter="echo") for when in ("before", "after")]
    ask_before_and_after(stack, case_id, Pair(tag, *sides), roll_out)


OTHER_ENGINE = OtherEngine()
SALT = Salt()
ADAPTER = Adapter()


@gate_cases(OTHER_ENGINE)
def test_other_engine(run_case: Any, case: Case) -> None:
    run_case(OTHER_ENGINE, case)


@gate_cases(SALT)
def test_salt(run_case: Any, case: Case) -> None:
    run_case(SALT, case)


@gate_cases(ADAPTER)
def test_adapter(run_case: Any, case: Case) -> None:
    run_case(ADAPTER, case)
