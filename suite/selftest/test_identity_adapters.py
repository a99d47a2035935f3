"""Adapters made offline: equal bytes for equal seeds, the names PEFT uses, and answers that really change."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from fixtures.errors import UsageError
from fixtures.identity_adapters import RANK, _tensors, ensure_adapter, put_adapter
from fixtures.identity_variants import lora_arguments
from fixtures.identity_weights import weights_digest
from fixtures.model_layers import weights
from fixtures.models import TINY
from suite.gates.oracle import ABSOLUTE_MINIMUM_NAT
from suite.selftest.numpy_decoder import Decoder

pytestmark = pytest.mark.selftest

BASE = TINY["tiny-base"]


def test_equal_seeds_give_equal_bytes_and_others_do_not(tmp_path: Path) -> None:
    one, again = ensure_adapter(BASE, 1, tmp_path / "a"), ensure_adapter(BASE, 1, tmp_path / "b")
    other = ensure_adapter(BASE, 2, tmp_path / "a")
    assert weights_digest(one) == weights_digest(again) != weights_digest(other)
    assert one != other
    assert ensure_adapter(BASE, 1, tmp_path / "a") == one


def test_a_spoiled_adapter_is_made_again(tmp_path: Path) -> None:
    path = ensure_adapter(BASE, 1, tmp_path)
    digest = weights_digest(path)
    (path / "adapter_model.safetensors").write_bytes(b"spoiled")
    assert weights_digest(ensure_adapter(BASE, 1, tmp_path)) == digest


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "adapters").write_text("a file where a folder belongs")
    with pytest.raises(UsageError, match="KVGATES_CACHE"):
        ensure_adapter(BASE, 1, tmp_path)


def test_the_files_are_what_peft_writes(tmp_path: Path) -> None:
    path = ensure_adapter(BASE, 1, tmp_path)
    config = json.loads((path / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"]) == ("LORA", RANK)
    with safe_open(path / "adapter_model.safetensors", "np") as file:
        names = set(file.keys())
    assert len(names) == 2 * 3 * BASE.layers
    assert "base_model.model.model.layers.0.self_attn.k_proj.lora_A.weight" in names
    assert lora_arguments(RANK)[-1] == str(RANK)


def test_a_rollout_in_place_leaves_the_path_and_changes_the_bytes(tmp_path: Path) -> None:
    place = tmp_path / "delta"
    put_adapter(ensure_adapter(BASE, 1, tmp_path), place)
    before = weights_digest(place)
    put_adapter(ensure_adapter(BASE, 2, tmp_path), place)
    assert weights_digest(place) != before


def test_an_adapter_of_another_scale_is_another_adapter(tmp_path: Path) -> None:
    place = tmp_path / "delta"
    put_adapter(ensure_adapter(BASE, 1, tmp_path), place)
    before = weights_digest(place)
    config = json.loads((place / "adapter_config.json").read_text())
    (place / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 2 * RANK}))
    assert weights_digest(place) != before


def test_an_adapter_changes_the_answer_far_more_than_the_oracle_needs() -> None:
    base = dict(weights(BASE))
    adapted = dict(base)
    tensors = dict(_tensors(BASE, 1))
    for name in [n for n in tensors if n.endswith("lora_A.weight")]:
        target = name.removeprefix("base_model.model.").replace("lora_A.weight", "weight")
        adapted[target] = adapted[target] + tensors[name.replace("lora_A", "lora_B")] @ tensors[name]
    ids = np.random.default_rng(0).integers(3, 500, 200)
    own, cache = Decoder(BASE, adapted.items()).run(ids)
    foreign_cache = Decoder(BASE, base.items()).run(ids[:-1])[1]
    over_foreign = Decoder(BASE, adapted.items()).run(ids[-1:], foreign_cache)[0]
    best = np.argsort(own[-1])[-5:]
    assert np.abs(over_foreign[-1][best] - own[-1][best]).max() > 10 * ABSOLUTE_MINIMUM_NAT
    assert len(cache) == BASE.layers
