"""Greedy decoding of the Llama of ``jax_llama`` written by hand in JAX: a prefill, then a jitted step with a donated
cache of fixed length, as Transformers' static cache is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.jax_llama import HEAD_DIM, HEADS, KV_HEADS, LAYERS, VOCAB, barrier, init, rms_norm, rotate

__all__ = ["generator"]

Cache = list[dict[str, jax.Array]]


def _angles(positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    angles = positions[:, None] / (10000 ** (jnp.arange(0, HEAD_DIM, 2) / HEAD_DIM))
    angles = jnp.concatenate([angles, angles], -1)
    return jnp.cos(angles), jnp.sin(angles)


def _forward(params: dict[str, Any], cache: Cache, ids: jax.Array, start: jax.Array) -> tuple[jax.Array, Cache]:
    """Logits after the last of some tokens, and the cache with their keys and values from ``start`` on."""
    batch, length = ids.shape
    positions = start + jnp.arange(length)
    cos, sin = barrier(_angles(positions))
    room = cache[0]["k"].shape[2]
    seen = jnp.arange(room)[None] <= positions[:, None]
    x = params["embed"][ids]

    def heads(y: jax.Array, n: int) -> jax.Array:
        return y.reshape(batch, length, n, HEAD_DIM).transpose(0, 2, 1, 3)

    kept = []
    for p, held in zip(params["layers"], cache, strict=True):
        h = rms_norm(x, p["norm1"])
        q, k, v = heads(h @ p["q"], HEADS), heads(h @ p["k"], KV_HEADS), heads(h @ p["v"], KV_HEADS)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        keys = jax.lax.dynamic_update_slice_in_dim(held["k"], k, start, 2)
        values = jax.lax.dynamic_update_slice_in_dim(held["v"], v, start, 2)
        kept.append({"k": keys, "v": values})
        q = q.reshape(batch, KV_HEADS, HEADS // KV_HEADS, length, HEAD_DIM)
        scores = jnp.einsum("bngqd,bnkd->bngqk", q, keys) / HEAD_DIM**0.5
        probs = jax.nn.softmax(jnp.where(seen, scores, -1e30), -1)
        out = jnp.einsum("bngqk,bnkd->bngqd", probs, values).reshape(batch, HEADS, length, HEAD_DIM)
        x = x + out.transpose(0, 2, 1, 3).reshape(batch, length, -1) @ p["o"]
        h = rms_norm(x, p["norm2"])
        x = x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]
    return rms_norm(x[:, -1], params["norm"]) @ params["head"], kept


def generator(batch: int, prompt: int, new: int) -> Callable[[], np.ndarray]:
    """A function that generates ``new`` tokens after prompts of random tokens; each is read as it comes, to see whether
    it ends the text, as ``generate()`` does.
    """
    params = init(jax.random.key(0))
    ids = jnp.asarray(np.random.default_rng(0).integers(4, VOCAB, (batch, prompt)))

    def advance(params: dict[str, Any], cache: Cache, ids: jax.Array, start: jax.Array) -> tuple[jax.Array, Cache]:
        logits, cache = _forward(params, cache, ids, start)
        return jnp.argmax(logits, -1), cache

    step = jax.jit(advance, donate_argnums=1)

    def generate() -> np.ndarray:
        shape = batch, KV_HEADS, prompt + new, HEAD_DIM
        cache = [{"k": jnp.zeros(shape), "v": jnp.zeros(shape)} for _ in range(LAYERS)]
        tokens, cache = step(params, cache, ids, 0)
        found = [np.asarray(tokens)]
        for i in range(new - 1):
            tokens, cache = step(params, cache, tokens[:, None], prompt + i)
            found.append(np.asarray(tokens))
        return np.stack(found, 1)

    return generate
