"""A decoder of the Qwen2 and Llama kind in numpy and float32: an independent reader of tiny models, for selftests without torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fixtures.models import TinySpec

Array = NDArray[np.float32]
Cache = list[tuple[Array, Array]]
"""Rotated keys and values of each layer, both (kv_heads, tokens, head_dim)."""


class Decoder:
    """Full attention, rotary positions, no biases."""

    def __init__(self, spec: TinySpec, weights: Iterable[tuple[str, Array]]) -> None:
        self.spec = spec
        self.weights = dict(weights)

    def run(self, ids: NDArray[np.int64], cache: Cache | None = None) -> tuple[Array, Cache]:
        """Log probabilities (tokens, vocabulary) of ``ids`` behind ``cache``, and the cache grown by them."""
        past = cache[0][0].shape[1] if cache else 0
        hidden = self.weights["model.embed_tokens.weight"][ids]
        grown: Cache = []
        for layer in range(self.spec.layers):
            name = f"model.layers.{layer}."
            update, kv = self._attend(name + "self_attn.", _norm(hidden), past, cache[layer] if cache else None)
            grown.append(kv)
            hidden = hidden + update
            hidden = hidden + self._mlp(name + "mlp.", _norm(hidden))
        logits = _norm(hidden) @ self.weights["lm_head.weight"].T
        logits -= logits.max(axis=1, keepdims=True)
        return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)), grown

    def _attend(self, name: str, x: Array, past: int, before: tuple[Array, Array] | None) -> tuple[Array, Any]:
        spec = self.spec
        query, key, value = (
            (x @ self.weights[f"{name}{part}_proj.weight"].T).reshape(len(x), heads, spec.head_dim).transpose(1, 0, 2)
            for part, heads in (("q", spec.heads), ("k", spec.kv_heads), ("v", spec.kv_heads))
        )
        query, key = (_rotate(part, past, spec.rope_theta) for part in (query, key))
        if before is not None:
            key, value = (np.concatenate(pair, axis=1) for pair in zip(before, (key, value), strict=True))
        group = spec.heads // spec.kv_heads
        score = query @ np.repeat(key, group, axis=0).transpose(0, 2, 1) / np.float32(np.sqrt(spec.head_dim))
        future = np.arange(key.shape[1])[None, :] > past + np.arange(len(x))[:, None]
        score[:, future] = -np.inf
        score = np.exp(score - score.max(axis=2, keepdims=True))
        score /= score.sum(axis=2, keepdims=True)
        out = (score @ np.repeat(value, group, axis=0)).transpose(1, 0, 2).reshape(len(x), -1)
        return out @ self.weights[name + "o_proj.weight"].T, (key, value)

    def _mlp(self, name: str, x: Array) -> Array:
        gate, up, down = (self.weights[f"{name}{part}_proj.weight"] for part in ("gate", "up", "down"))
        opened = x @ gate.T
        result: Array = (opened / (1 + np.exp(-np.clip(opened, -80, 80))) * (x @ up.T)) @ down.T
        return result


def _norm(x: Array) -> Array:
    result: Array = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + np.float32(1e-6))
    return result


def _rotate(x: Array, past: int, theta: float) -> Array:
    half = x.shape[-1] // 2
    angle = (past + np.arange(x.shape[1]))[:, None] / theta ** (np.arange(half) / half)
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    left, right = x[..., :half], x[..., half:]
    return np.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)
