"""Settings in which two engines of a fleet can differ, one at a time: what an engine that differs is started with."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fixtures import capabilities

if TYPE_CHECKING:
    from fixtures.spec import EngineSpec
    from fixtures.stack import Stack

OTHER_BASE = 500_000.0
"""Rotary base of the engine whose positions differ; the tiny models have 10,000. (``rope_theta`` at the top level of
``--hf-overrides`` is ignored by the tested release without a word: the base is read from ``rope_parameters``.)"""


@dataclass(frozen=True)
class Setting:
    """One way to differ.

    text: what differs, as a person would say it. ours, theirs: its value on the stack's engines and on the other one.
    changes: makes the fields of EngineSpec that differ (and ``kv_bytes_per_token`` where it is not the model's).
    changes_answers: the model computes something else, so both sides must be seen to answer differently.
    may_lack: the build may not have it; an engine that refuses to start is then no failure.
    named: says both values where they are known only on the host.
    """

    text: str
    ours: str
    theirs: str
    changes: Callable[[Stack], dict[str, Any]]
    changes_answers: bool = True
    may_lack: bool = False
    needs: tuple[str, ...] = ()
    named: Callable[[], tuple[str, str]] | None = None

    def sides(self) -> tuple[str, str]:
        """What a person reads of both sides: ours, theirs."""
        return self.named() if self.named else (self.ours, self.theirs)


def _sibling(stack: Stack) -> dict[str, Any]:
    from fixtures.errors import Untestable
    from fixtures.models import TINY, ensure_model

    model = stack.spec.engines[0].model
    if model not in TINY:
        raise Untestable("tiny-model", f"the stack serves {model}", "use a stack of tiny models (--stack cpu)")
    sibling = ensure_model("tiny-sibling", same_name_as=model)
    assert sibling.path.name == stack.engines[stack.names[0]].model.path.name
    return {"model": str(sibling.path), "served_model_name": "sibling"}


def _half_width(stack: Stack) -> dict[str, Any]:
    per_token = stack.engines[stack.names[0]].model.kv_bytes_per_token(1)
    return {"args": ("--kv-cache-dtype", "fp8"), "kv_bytes_per_token": per_token}


def _other_tokenizer(stack: Stack) -> dict[str, Any]:
    from fixtures.models import ensure_model

    return {"args": ("--tokenizer", str(ensure_model("tiny-llama").path))}


def _other_environment(stack: Stack) -> dict[str, Any]:
    from fixtures.capabilities import second_python

    return {"python": second_python()}


def _releases() -> tuple[str, str]:
    """Releases of this environment and of the second one, as their own interpreters say them."""
    return capabilities.own_releases(), capabilities.probe("second-stack").probe


def _args(*args: str, **more: Any) -> Callable[[Stack], dict[str, Any]]:
    return lambda stack: {"args": args, **more}


def _in_two(flag: str) -> Callable[[Stack], dict[str, Any]]:
    """Sharding changes what a rank stores under its key, not what is computed; bytes a token: not those of one rank. On a host with
    two GPUs the engine sees both; with one it refuses to start, and says so."""

    def changes(stack: Stack) -> dict[str, Any]:
        found: dict[str, Any] = {"args": (flag, "2"), "kv_bytes_per_token": 0}
        if stack.spec.platform == "cuda":
            gpus = sorted(int(node.name.removeprefix("nvidia")) for node in capabilities.gpu_nodes())
            found["env"] = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus[:2]))}
        return found

    return changes


def _backend(name: str) -> Setting:
    """One function with other kernels, and perhaps another layout of blocks. A CPU has one backend."""
    return Setting(
        "the attention backend",
        "the host's default",
        name,
        _args("--attention-backend", name),
        changes_answers=False,
        may_lack=True,
        needs=("gpu",),
    )


_ROPE = json.dumps({"rope_parameters": {"rope_type": "default", "rope_theta": OTHER_BASE}})

SETTINGS: dict[str, Setting] = {
    "weights": Setting("the model's weights", "its own weights", "other weights, directory of the same name", _sibling),
    "position": Setting(
        "the position encoding",
        "rotary base 10,000",
        "rotary base 500,000 by --hf-overrides",
        _args("--hf-overrides", _ROPE),
    ),
    "dtype": Setting("the model's dtype", "bfloat16", "float16", lambda stack: {"dtype": "float16"}),
    "kv-dtype": Setting("the KV cache's dtype", "auto", "fp8", _half_width, may_lack=True),
    "quantization": Setting(
        "quantisation of the weights", "none", "fp8", _args("--quantization", "fp8"), may_lack=True
    ),
    "block-size": Setting(
        "the KV block size", "32 tokens", "64 tokens", lambda stack: {"block_tokens": 64}, changes_answers=False
    ),
    "hash-algorithm": Setting(
        "the hash algorithm",
        "sha256",
        "sha256_cbor",
        lambda stack: {"hash_algorithm": "sha256_cbor"},
        changes_answers=False,
    ),
    "tokenizer": Setting("the tokenizer", "its own", "another, equal ids", _other_tokenizer, changes_answers=False),
    "release": Setting(
        "the releases of vLLM and Mooncake",
        "this environment's",
        "those of a second environment",
        _other_environment,
        changes_answers=False,
        may_lack=True,  # the pool may take no client of another release: then there is nothing to share
        needs=("second-stack",),
        named=_releases,
    ),
    "kv-layout": Setting(
        "the order of heads and tokens inside a KV block",
        "the backend's default",
        "HND by VLLM_KV_CACHE_LAYOUT",
        lambda stack: {"env": {"VLLM_KV_CACHE_LAYOUT": "HND"}},
        changes_answers=False,
        may_lack=True,
        needs=("gpu",),  # the CPU's one backend has one order
    ),
    "triton": _backend("TRITON_ATTN"),
    # The default of other GPUs than Hopper: a fleet of two kinds differs in it unasked.
    "flashinfer": _backend("FLASHINFER"),
    "tensor-parallel": Setting(
        "the tensor-parallel size",
        "1",
        "2",
        _in_two("--tensor-parallel-size"),
        changes_answers=False,
        may_lack=True,
    ),
    "pipeline-parallel": Setting(
        "the pipeline-parallel size",
        "1",
        "2",
        _in_two("--pipeline-parallel-size"),
        changes_answers=False,
        may_lack=True,
    ),
}


@dataclass(frozen=True)
class Protection:
    """What an operator can set on the engine that differs. ``changes``: fields of EngineSpec; ``tenant_id``: Mooncake's."""

    text: str
    changes: dict[str, Any]
    tenant_id: str = ""


PROTECTIONS: dict[str, Protection] = {
    "default": Protection("upstream's defaults", {}),
    "prefix": Protection("a cache_prefix of its own", {"kv_extra": {"cache_prefix": "other-identity"}}),
    "tenant": Protection("a Mooncake tenant_id of its own", {}, tenant_id="other-identity"),
}

AVOID = "a kv_connector_extra_config.cache_prefix of its own for every set of weights, dtypes, overrides, releases and KV layouts"
"""The setting that keeps such engines apart in the tested release; ``I.engine.*.prefix`` shows whether it does."""


def merged(engine: EngineSpec, changes: dict[str, Any]) -> dict[str, Any]:
    """Changes on top of what the engine has: arguments are added to its own, extra settings and environment merged into its own."""
    found = dict(changes)
    if "args" in found:
        found["args"] = (*engine.args, *found["args"])
    if "kv_extra" in found:
        found["kv_extra"] = {**engine.kv_extra, **found["kv_extra"]}
    if "env" in found:
        found["env"] = {**engine.env, **found["env"]}
    return found
