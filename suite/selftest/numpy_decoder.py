"""Decoders of tiny models in numpy and float32: an independent reader of their weights, for selftests without torch.

Attention of every family is written down here as a model's paper has it: the latent's keys and values are opened for each token
(no absorbed product), a window is a mask, a convolution sees what was put in by the tokens before.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fixtures.model_architectures import CONVOLUTION, KERNEL_TOKENS, WINDOW, architecture_of
from fixtures.models import TinySpec

Array = NDArray[np.float32]
Cache = list[tuple[Array, Array]]
"""What each layer keeps, both (heads, tokens, elements): rotated keys and values; a latent and its rotated key; or what a
convolution was given, and nothing."""


class Decoder:
    """No biases."""

    def __init__(self, spec: TinySpec, weights: Iterable[tuple[str, Array]]) -> None:
        self.spec = spec
        self.names = architecture_of(spec).names
        self.weights = dict(weights)

    def run(self, ids: NDArray[np.int64], cache: Cache | None = None) -> tuple[Array, Cache]:
        """Log probabilities (tokens, vocabulary) of ``ids`` behind ``cache``, and the cache grown by them."""
        past = cache[0][0].shape[1] if cache else 0
        embedding = self.weights["model.embed_tokens.weight"]
        hidden = embedding[ids]
        grown: Cache = []
        for layer in range(self.spec.layers):
            name = f"model.layers.{layer}."
            update, kept = self._mix(layer, name, _norm(hidden), past, cache[layer] if cache else None)
            grown.append(kept)
            hidden = hidden + update
            hidden = hidden + self._mlp(name + self.names.mlp, _norm(hidden))
        last = _norm(hidden) * self.weights[f"{self.names.last_norm}.weight"]
        logits = last @ self.weights.get("lm_head.weight", embedding).T
        logits -= logits.max(axis=1, keepdims=True)
        return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)), grown

    def _mix(self, layer: int, name: str, x: Array, past: int, before: tuple[Array, Array] | None) -> tuple[Array, Any]:
        kind = self.spec.layer_kinds[layer] if self.spec.layer_kinds else ""
        if kind == CONVOLUTION:
            return self._convolve(name + "conv.", x, before)
        windowed = kind == WINDOW or (not self.spec.layer_kinds and self.spec.sliding_window)
        window = self.spec.sliding_window if windowed else None
        attend = self._attend_latents if self.spec.latent_rank else self._attend
        return attend(name + self.names.attention, x, past, before, window)

    def _attend(
        self, name: str, x: Array, past: int, before: tuple[Array, Array] | None, window: int | None
    ) -> tuple[Array, Any]:
        spec = self.spec
        query, key, value = (
            _heads(x @ self.weights[f"{name}{part}_proj.weight"].T, heads)
            for part, heads in (("q", spec.heads), ("k", spec.kv_heads), ("v", spec.kv_heads))
        )
        if self.names.head_norms:
            query, key = _norm(query), _norm(key)
        query, key = (_rotate(part, past, spec.rope_theta) for part in (query, key))
        if before is not None:
            key, value = (np.concatenate(pair, axis=1) for pair in zip(before, (key, value), strict=True))
        group = spec.heads // spec.kv_heads
        out = _softmax_mean(query, np.repeat(key, group, axis=0), np.repeat(value, group, axis=0), past, window)
        return out @ self.weights[f"{name}{self.names.attention_out}.weight"].T, (key, value)

    def _attend_latents(
        self, name: str, x: Array, past: int, before: tuple[Array, Array] | None, window: int | None
    ) -> tuple[Array, Any]:
        spec = self.spec
        query = _heads(x @ self.weights[f"{name}q_proj.weight"].T, spec.heads)
        both = x @ self.weights[f"{name}kv_a_proj_with_mqa.weight"].T
        latent = _norm(both[None, :, : spec.latent_rank])
        key = _rotate(both[None, :, spec.latent_rank :], past, spec.rope_theta, interleaved=True)
        turned = _rotate(query[..., spec.head_dim :], past, spec.rope_theta, interleaved=True)
        if before is not None:
            latent, key = (np.concatenate(pair, axis=1) for pair in zip(before, (latent, key), strict=True))
        opened = _heads(latent[0] @ self.weights[f"{name}kv_b_proj.weight"].T, spec.heads)
        keys = np.concatenate([opened[..., : spec.head_dim], np.repeat(key, spec.heads, axis=0)], axis=2)
        queries = np.concatenate([query[..., : spec.head_dim], turned], axis=2)
        out = _softmax_mean(queries, keys, opened[..., spec.head_dim :], past, window)
        return out @ self.weights[f"{name}o_proj.weight"].T, (latent, key)

    def _convolve(self, name: str, x: Array, before: tuple[Array, Array] | None) -> tuple[Array, Any]:
        gate_in, gate_out, value = np.split(x @ self.weights[f"{name}in_proj.weight"].T, 3, axis=1)
        put = (gate_in * value)[None]
        if before is not None:
            put = np.concatenate([before[0], put], axis=1)
        padded = np.concatenate([np.zeros((KERNEL_TOKENS - 1, x.shape[1]), np.float32), put[0]])
        kernel = self.weights[f"{name}conv.weight"][:, 0]
        out = sum(kernel[:, i] * padded[i : i + put.shape[1]] for i in range(KERNEL_TOKENS))
        return (gate_out * out[-len(x) :]) @ self.weights[f"{name}out_proj.weight"].T, (put, put[:, :, :0])

    def _mlp(self, name: str, x: Array) -> Array:
        if not self.spec.experts:
            return self._expert(name, x)
        router = x @ self.weights[f"{name}gate.weight"].T
        best = np.argsort(router, axis=1)[:, -2:]
        chosen = np.exp(np.take_along_axis(router, best, axis=1))
        chosen /= chosen.sum(axis=1, keepdims=True)
        outs = np.stack([self._expert(f"{name}experts.{i}.", x) for i in range(self.spec.experts)])
        return np.asarray(sum(chosen[:, [i]] * outs[best[:, i], np.arange(len(x))] for i in range(2)))

    def _expert(self, name: str, x: Array) -> Array:
        parts = (self.names.gate, self.names.up, self.names.down)
        gate, up, down = (self.weights[f"{name}{part}.weight"] for part in parts)
        opened = x @ gate.T
        result: Array = (opened / (1 + np.exp(-np.clip(opened, -80, 80))) * (x @ up.T)) @ down.T
        return result


def _heads(x: Array, heads: int) -> Array:
    return x.reshape(len(x), heads, -1).transpose(1, 0, 2)


def _softmax_mean(query: Array, key: Array, value: Array, past: int, window: int | None) -> Array:
    """Values averaged by attention, (tokens, heads * elements). window: tokens that one looks back at, itself included."""
    score = query @ key.transpose(0, 2, 1) / np.float32(np.sqrt(query.shape[-1]))
    own = past + np.arange(query.shape[1])[:, None]
    other = np.arange(key.shape[1])[None, :]
    score[:, (other > own) | (other <= own - (window or key.shape[1] + 1))] = -np.inf
    score = np.exp(score - score.max(axis=2, keepdims=True))
    score /= score.sum(axis=2, keepdims=True)
    mean: Array = (score @ value).transpose(1, 0, 2).reshape(query.shape[1], -1)
    return mean


def _norm(x: Array) -> Array:
    result: Array = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + np.float32(1e-6))
    return result


def _rotate(x: Array, past: int, theta: float, *, interleaved: bool = False) -> Array:
    """Pairs of elements i and i + half (interleaved: 2i and 2i + 1) turned by their position."""
    half = x.shape[-1] // 2
    angle = (past + np.arange(x.shape[1]))[:, None] / theta ** (np.arange(half) / half)
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    left, right = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    turned = left * cos - right * sin, right * cos + left * sin
    return np.stack(turned, axis=-1).reshape(x.shape) if interleaved else np.concatenate(turned, axis=-1)
