"""Model families: what each keeps of a prompt, how many bytes a hit reads of it, and their gates on a simulated stack."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from fixtures.deaths import refusal
from fixtures.engines import EnginePlan, as_it_runs
from fixtures.errors import Untestable
from fixtures.model_kv import kv_layers
from fixtures.models import TINY, ensure_model
from fixtures.runtimes.base import Handle
from fixtures.spec import load_spec
from reports import records as r
from suite.checks.kv_layers import blocks_of_window, bytes_of_hit, check_bytes_of_hit
from suite.contract import Case, Gate
from suite.gates.arms import first_block_read, positions, replace_keys
from suite.gates.test_connector_options import OPTIONS_GATE, check_drafts
from suite.gates.test_families import FAMILIES_GATE, SHARED_GATE
from suite.selftest.samples import observation
from suite.selftest.simulated_stack import BYTES_A_TOKEN, SimulatedStack, run_case, simulated_spec

pytestmark = [pytest.mark.selftest, pytest.mark.usefixtures("short_calibration")]

F, Out = r.FindingCode, r.Outcome


# What layers keep -------------------------------------------------------------------------------------------------------
def kept(config: dict[str, Any], dtype_bytes: int = 2) -> dict[str, tuple[int, int, int]]:
    found = kv_layers({"num_hidden_layers": 4, **config}, 2, 64, dtype_bytes)
    return {x.kind: (x.layers, x.token_bytes, x.window_tokens) for x in found}


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        ({}, {"full": (4, 2048, 0)}),
        ({"sliding_window": None}, {"full": (4, 2048, 0)}),
        ({"sliding_window": 512}, {"window": (4, 2048, 512)}),
        ({"sliding_window": 512, "use_sliding_window": False}, {"full": (4, 2048, 0)}),
        (
            {"sliding_window": 512, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
            {"full": (1, 512, 0), "window": (3, 1536, 512)},
        ),
        ({"layer_types": ["conv", "full_attention"] * 2}, {"full": (2, 1024, 0), "state": (2, 0, 0)}),
        ({"layers_block_type": ["mamba"] * 3 + ["attention"]}, {"full": (1, 512, 0), "state": (3, 0, 0)}),
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64}, {"full": (4, 4608, 0)}),
    ],
)
def test_what_layers_keep_is_read_from_the_configuration(
    config: dict[str, Any], layers: dict[str, tuple[int, int, int]]
) -> None:
    assert kept(config) == layers
    assert sum(bytes_ for _, bytes_, _ in kept(config, 1).values()) * 2 == sum(b for _, b, _ in layers.values())


def facts(*layers: r.KvLayers, **changes: Any) -> r.EngineFacts:
    known: dict[str, Any] = {"block_tokens": 32, "max_model_len": 4096, "load_failure_policy": "", "hash_seed": "0"}
    names = {"name": "e0", "url": "u", "model": "m", "served_model": "m", "connector": "mooncake-store"}
    return msgspec.structs.replace(r.EngineFacts(**{**names, **known}, kv_layers=layers), **changes)


FULL = r.KvLayers(kind="full", layers=2, token_bytes=1024)
WINDOW = r.KvLayers(kind="window", layers=2, token_bytes=1024, window_tokens=512)
STATE = r.KvLayers(kind="state", layers=2, token_bytes=0)


@pytest.mark.parametrize(
    ("layers", "external", "local", "least", "most"),
    [
        # What vLLM 0.32.0 moved for 1,984 tokens: 2,555,904 with windows between full layers, 2,064,384 with states, and
        # 1,048,576 with four windowed layers; for 64 tokens 131,072 of the first.
        ((FULL, WINDOW), 1984, 0, 2_555_904, 4_063_232),
        ((FULL, WINDOW), 64, 0, 131_072, 131_072),
        ((FULL, STATE), 1984, 0, 2_031_618, 2_064_384),
        ((msgspec.structs.replace(WINDOW, layers=4, token_bytes=2048),), 1984, 0, 1_048_576, 4_063_232),
        ((FULL, WINDOW), 64, 1920, 65_536, 131_072),
        ((FULL,), 64, 0, 65_536, 65_536),
        ((FULL, WINDOW, STATE), 0, 64, 0, 0),
    ],
)
def test_bytes_of_a_hit(layers: tuple[r.KvLayers, ...], external: int, local: int, least: int, most: int) -> None:
    assert bytes_of_hit(facts(*layers), external, local) == (least, most)


@pytest.mark.parametrize(("moved", "found"), [(131_071, 1), (131_072, 0), (131_073, 1), (0, 1)])
def test_half_a_block_too_few_and_bytes_for_nothing_are_seen(moved: int, found: int) -> None:
    delta = {"prompt_tokens.external": 64.0, "prompt_tokens.local": 0.0, "store.load_get.ok.bytes": float(moved)}
    findings = check_bytes_of_hit(observation(), delta, facts(FULL, WINDOW))
    assert [x.code for x in findings] == [F.CONSERVATION] * found


def test_a_window_reaches_over_whole_blocks() -> None:
    assert [blocks_of_window(tokens, 32) for tokens in (1, 2, 33, 34, 512, 514)] == [0, 1, 1, 2, 16, 17]


def test_a_block_is_planted_where_a_hit_reads_it() -> None:
    assert positions(62, first_block_read(facts(FULL), 62)) == {"first": 0, "middle": 31, "last": 61}
    assert positions(62, first_block_read(facts(FULL, WINDOW), 62))["first"] == 0
    only = facts(WINDOW)
    assert positions(62, first_block_read(only, 62)) == {"first": 46, "middle": 54, "last": 61}
    assert first_block_read(only, 8) == 0


# Planting ---------------------------------------------------------------------------------------------------------------
def key(group: int, block: str) -> str:
    return f"m@tp_rank:0@group:{group}@{block}"


class Tool:
    """Stands in for a store: answers each replacement as the store tool does."""

    def __init__(self, *puts: int) -> None:
        self.puts, self.steps = puts, [dict[str, Any]()]

    def store_tool(self, steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
        self.steps = steps
        return [
            {"put": put, "before": step["key"], "after": step["source"]}
            for put, step in zip(self.puts, steps, strict=True)
        ]


def test_every_group_of_a_block_is_replaced_by_its_own() -> None:
    tool = Tool(0, 0)
    own, foreign = [key(0, "a"), key(1, "a")], [key(1, "f"), key(0, "f")]
    answer = replace_keys(cast(Any, tool), own, foreign)
    assert [(s["key"], s["source"]) for s in tool.steps] == [(key(0, "a"), key(0, "f")), (key(1, "a"), key(1, "f"))]
    assert answer == {"put": 0, "before": own, "after": [key(0, "f"), key(1, "f")]}
    failed = replace_keys(cast(Any, Tool(0, -1)), own, foreign)
    assert failed is not None
    assert failed["put"] == -1


@pytest.mark.parametrize(
    ("own", "foreign"),
    [
        ([], []),
        ([key(0, "a")], [key(1, "f")]),
        ([key(0, "a"), key(0, "b")], [key(0, "f")]),
        ([key(0, "a")], [key(0, "f"), key(0, "g")]),
    ],
)
def test_keys_that_are_no_pairs_are_left_alone(own: list[str], foreign: list[str]) -> None:
    assert replace_keys(cast(Any, Tool()), own, foreign) is None


# Engines as they run ----------------------------------------------------------------------------------------------------
INFO = 'vllm:cache_config_info{{_block="1",block_size="{block}",mamba_block_size="32",enable_prefix_caching="{caching}"}} 1.0\n'


def as_run(metrics: str) -> EnginePlan:
    nothing: Any = None
    return as_it_runs(EnginePlan(nothing, facts(settings={"dtype": "d"}), (), (), "u"), metrics)


def test_what_an_engine_overrules_is_in_its_facts_and_shown_as_a_deviation() -> None:
    found = as_run(INFO.format(block=16, caching=False))
    assert (found.facts.block_tokens, found.facts.caches_prefixes) == (16, False)
    assert found.facts.settings["dtype"] == "d"
    assert [(d.setting, d.upstream, d.ours) for d in found.deviations] == [
        ("block_size", "32", "16"),
        ("enable_prefix_caching", "True", "False"),
    ]


@pytest.mark.parametrize("metrics", ["", "vllm:other 1\n", INFO.format(block=32, caching=True)])
def test_an_engine_that_runs_as_asked_is_as_planned(metrics: str) -> None:
    found = as_run(metrics)
    assert (found.facts.block_tokens, found.facts.caches_prefixes, found.deviations) == (32, True, ())


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["Traceback", "ValueError: MooncakeStoreConnector does not support: group 0"], "ValueError: MooncakeStoreConnector does not support: group 0"),
        (["NotImplementedError: Sparse Attention is not supported on CPU.", "RuntimeError: failed"], "NotImplementedError: Sparse Attention is not supported on CPU."),
        (["RuntimeError: Engine core failed", "ValueError: unsupported head size"], "ValueError: unsupported head size"),
        (["WARNING: this is not supported"], ""),
        (["IndexError: index 15 is out of bounds"], ""),
        ([], ""),
    ],
)  # fmt: skip
def test_a_refusal_is_what_an_error_calls_unsupported(lines: list[str], words: str) -> None:
    assert refusal(cast(Handle, SimpleNamespace(log_tail=lambda lines_: lines))) == words


# Gates ------------------------------------------------------------------------------------------------------------------
def case_of(gate: Gate, name: str) -> Case:
    return next(case for case in gate.cases() if case.id == f"{gate.id}.{name}")


@pytest.fixture(autouse=True)
def another_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one release computes wrongly is asked of another, unless a test is about that."""
    monkeypatch.setattr("suite.gates.test_families.versions", lambda: {"vllm": "0.33.0"})


@pytest.mark.parametrize("name", ["latent", "hybrid"])
def test_what_a_cpu_build_computes_wrongly_by_itself_is_no_verdict_on_reuse(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("suite.gates.test_families.versions", lambda: {"vllm": "0.32.0"})
    with pytest.raises(Untestable, match=r"without any reuse, vLLM 0\.32\.0 on a CPU is .* nat from transformers"):
        FAMILIES_GATE.stack(load_spec("cpu"), case_of(FAMILIES_GATE, name))
    FAMILIES_GATE.stack(load_spec("gpu-shared"), case_of(FAMILIES_GATE, name))
    FAMILIES_GATE.stack(load_spec("cpu"), case_of(FAMILIES_GATE, "interleaved"))


@pytest.mark.parametrize("gate", [FAMILIES_GATE, SHARED_GATE], ids=lambda gate: gate.id)
def test_every_family_makes_a_stack_of_its_own_on_either_platform(gate: Gate) -> None:
    for base in (load_spec("cpu"), load_spec("gpu-shared")):
        keys = [gate.stack(base, case).key() for case in gate.cases()]
        assert len(set(keys)) == len(keys)
        assert base.key() not in keys
    assert {case.params["model"] for case in gate.cases()} <= set(TINY)


def test_dense_is_a_place_at_every_block_of_the_platform() -> None:
    for base, block in ((load_spec("cpu"), "32"), (load_spec("gpu-shared"), "16")):
        args = SHARED_GATE.stack(base, case_of(SHARED_GATE, "hybrid-dense")).engines[0].args
        assert args[-2:] == ("--prefix-cache-retention-interval", block)


def test_an_argument_that_a_release_lacks_is_untestable_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("suite.gates.test_families.takes_argument", lambda flag: False)
    with pytest.raises(Untestable, match="has no --prefix-cache-retention-interval"):
        SHARED_GATE.stack(load_spec("cpu"), case_of(SHARED_GATE, "interleaved-dense"))
    SHARED_GATE.stack(load_spec("cpu"), case_of(SHARED_GATE, "interleaved"))


class WindowedStack(SimulatedStack):
    """Its model has a window of 64 tokens in every layer; a hit reads the blocks inside."""

    kv_layers = (r.KvLayers(kind="window", layers=4, token_bytes=BYTES_A_TOKEN, window_tokens=64),)

    def __init__(self, lies: Sequence[str]) -> None:
        # A number of keys that stands still takes four looks, however busy the host is.
        spec = simulated_spec()
        super().__init__(spec.with_changes(timeouts=msgspec.structs.replace(spec.timeouts, visible_s=5.0)), lies)

    def _bytes_read(self, external: int) -> int:
        return min(external, 32 if "half-window" in self.lies else 64) * BYTES_A_TOKEN


class EndsOnlyStack(SimulatedStack):
    """Prompts are kept whole and nothing of what they share; with the lie ``own``, the engine that saved it does keep it."""

    def _read(self, engine: str, prompt: tuple[int, ...], salt: str | None) -> tuple[int, int, bool, bool]:
        local, external, *rest = super()._read(engine, prompt, salt)
        if local + external == 992 and not ("own" in self.lies and engine == "e0"):
            return 0, 0, False, False
        return local, external, rest[0], rest[1]


def test_a_family_is_judged_like_any_prompt() -> None:
    assert run_case(FAMILIES_GATE, "P.families.multi-query", []).outcome is Out.PASS
    assert run_case(FAMILIES_GATE, "P.families.multi-query", ["foreign"]).finding == F.WRONG_ANSWER


@pytest.mark.parametrize(
    ("lies", "outcome", "finding"),
    [([], Out.PASS, ""), (["half-window"], Out.FAIL, F.CONSERVATION), (["foreign"], Out.FAIL, F.WRONG_ANSWER)],
)
def test_a_window_reads_its_own_blocks_and_no_fewer(lies: list[str], outcome: r.Outcome, finding: str) -> None:
    verdict = run_case(FAMILIES_GATE, "P.families.sliding-window", stack=WindowedStack(lies=lies))
    assert (verdict.outcome, verdict.finding) == (outcome, finding), verdict.findings


class UncachedStack(SimulatedStack):
    """Its engines have no prefix cache of their own: they read even what they saved from the pool."""

    def _up(self) -> None:
        super()._up()
        stack_up = cast(r.StackUp, self.records.pop())
        without = [msgspec.structs.replace(e, settings={"prefix_caching": False}) for e in stack_up.engines]
        self.record(msgspec.structs.replace(stack_up, engines=tuple(without)))

    def _read(self, engine: str, prompt: tuple[int, ...], salt: str | None) -> tuple[int, int, bool, bool]:
        if "caches" not in self.lies:
            self.held[engine].local.clear()
        return super()._read(engine, prompt, salt)


def test_an_engine_without_a_cache_of_its_own_reads_from_the_pool_alone() -> None:
    good = run_case(FAMILIES_GATE, "P.families.latent", stack=UncachedStack())
    assert (good.outcome, good.got) == (Out.PASS, "external tokens [1984, 64, 64, 96], answers equal")
    assert run_case(FAMILIES_GATE, "P.families.latent", stack=UncachedStack(lies=["zero-hits"])).finding == F.ZERO_HITS
    assert run_case(FAMILIES_GATE, "P.families.latent", stack=UncachedStack(lies=["caches"])).outcome is Out.FAIL


def test_so_does_one_whose_cache_is_off_by_an_option() -> None:
    assert run_case(OPTIONS_GATE, "P.options.cache-off", stack=UncachedStack()).outcome is Out.PASS
    assert run_case(OPTIONS_GATE, "P.options.cache-off", stack=UncachedStack(lies=["caches"])).outcome is Out.FAIL


@pytest.mark.parametrize(
    ("stack", "outcome", "words"),
    [
        (SimulatedStack(), Out.PASS, ""),
        (EndsOnlyStack(), Out.FAIL, "of 992 shared tokens the engine that saved them reuses 0, another engine 0 from the pool"),
        (EndsOnlyStack(lies=["own"]), Out.FAIL, "of 992 shared tokens the engine that saved them reuses 992, another engine 0 from the pool"),
    ],
    ids=["shares", "nowhere", "not-in-the-pool"],
)  # fmt: skip
def test_a_shared_prefix_that_nobody_reuses_is_zero_hits_and_says_who_lacks_it(
    stack: SimulatedStack, outcome: r.Outcome, words: str
) -> None:
    verdict = run_case(SHARED_GATE, "P.shared-prefix.interleaved", stack=stack)
    assert verdict.outcome is outcome, verdict.findings
    if words:
        assert (verdict.finding, verdict.got) == (F.ZERO_HITS, words)
        assert verdict.cause.startswith("the pool" if "own" in stack.lies else "the engine that saved")


def test_a_shared_prefix_that_is_wrong_stays_wrong() -> None:
    assert run_case(SHARED_GATE, "P.shared-prefix.interleaved", ["foreign"]).finding == F.WRONG_ANSWER


# Speculation ------------------------------------------------------------------------------------------------------------
def test_speculation_that_proposed_nothing_says_nothing() -> None:
    assert run_case(OPTIONS_GATE, "P.options.speculative").finding == F.NO_PRESSURE
    history: Any = SimpleNamespace(
        fact=lambda name: SimpleNamespace(value={"e0": 5.0, "e1": 9.0 if name.endswith("after") else 2.0})
    )
    assert [x.code for x in check_drafts(history)] == [F.NO_PRESSURE]
    more: Any = SimpleNamespace(fact=lambda name: SimpleNamespace(value={"e0": 7.0 if name.endswith("after") else 5.0}))
    assert check_drafts(more) == []


@pytest.mark.parametrize("name", ["tiny-latent", "tiny-hybrid", "tiny-interleaved", "tiny-experts"])
def test_models_of_the_families_are_made_alike_twice(tmp_path: Path, name: str) -> None:
    first, second = (ensure_model(name, tmp_path / side) for side in "ab")
    for file in ("config.json", "model.safetensors"):
        assert (first.path / file).read_bytes() == (second.path / file).read_bytes()
