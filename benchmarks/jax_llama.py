"""A Llama training step written by hand in JAX: the same sizes and the same work as the Transformers model beside it.

Hidden 256, 4 layers, 8 heads, 4 kv heads, MLP 688, vocabulary 4096, batch 8 x 256 tokens, float32, AdamW. Heads lead
the attention products, and barriers keep XLA:CPU from computing a producer again inside each of its consumers: without
both, the forward pass takes three quarters more time on two cores.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["BATCH", "SEQ", "SIZES", "VOCAB", "forward_and_step", "step_memory"]

HIDDEN, MLP, LAYERS, HEADS, KV_HEADS, VOCAB, HEAD_DIM = 256, 688, 4, 8, 4, 4096, 32
BATCH, SEQ = 8, 256
SIZES = {
    "hidden_size": HIDDEN,
    "intermediate_size": MLP,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "vocab_size": VOCAB,
}
"""Arguments of Transformers' LlamaConfig for the same model."""
barrier = jax.lax.optimization_barrier


def init(key: jax.Array) -> dict[str, Any]:
    """Random parameters."""
    keys = iter(jax.random.split(key, 64))

    def normal(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape) * 0.02

    def layer() -> dict[str, jax.Array]:
        return {
            "q": normal(HIDDEN, HEADS * HEAD_DIM),
            "k": normal(HIDDEN, KV_HEADS * HEAD_DIM),
            "v": normal(HIDDEN, KV_HEADS * HEAD_DIM),
            "o": normal(HEADS * HEAD_DIM, HIDDEN),
            "gate": normal(HIDDEN, MLP),
            "up": normal(HIDDEN, MLP),
            "down": normal(MLP, HIDDEN),
            "norm1": jnp.ones(HIDDEN),
            "norm2": jnp.ones(HIDDEN),
        }

    layers = [layer() for _ in range(LAYERS)]
    return {
        "embed": normal(VOCAB, HIDDEN),
        "head": normal(HIDDEN, VOCAB),
        "norm": jnp.ones(HIDDEN),
        "layers": layers,
    }


def rms_norm(x, weight):
    return weight * x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def rotate(x, cos, sin):
    a, b = jnp.split(x, 2, -1)
    return x * cos + jnp.concatenate([-b, a], -1) * sin


def forward(params, ids):
    x = params["embed"][ids]
    angles = jnp.arange(SEQ)[:, None] / (10000 ** (jnp.arange(0, HEAD_DIM, 2) / HEAD_DIM))
    angles = jnp.concatenate([angles, angles], -1)
    cos, sin = barrier((jnp.cos(angles), jnp.sin(angles)))
    causal = jnp.tril(jnp.ones((SEQ, SEQ), bool))

    def heads(y: jax.Array, n: int) -> jax.Array:
        return y.reshape(BATCH, SEQ, n, HEAD_DIM).transpose(0, 2, 1, 3)

    for p in params["layers"]:
        h = barrier(rms_norm(x, p["norm1"]))
        q, k, v = heads(h @ p["q"], HEADS), heads(h @ p["k"], KV_HEADS), heads(h @ p["v"], KV_HEADS)
        q, k, v = barrier((rotate(q, cos, sin), rotate(k, cos, sin), v))
        k, v = barrier((jnp.repeat(k, HEADS // KV_HEADS, 1), jnp.repeat(v, HEADS // KV_HEADS, 1)))
        scores = barrier(jnp.einsum("bnqd,bnkd->bnqk", q, k) / HEAD_DIM**0.5)
        probs = barrier(jax.nn.softmax(jnp.where(causal, scores, -1e30), -1))
        out = jnp.einsum("bnqk,bnkd->bnqd", probs, v).transpose(0, 2, 1, 3).reshape(BATCH, SEQ, -1)
        x = x + barrier(out) @ p["o"]
        h = barrier(rms_norm(x, p["norm2"]))
        x = x + barrier(jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]
    return barrier(rms_norm(x, params["norm"])) @ params["head"]


def loss_fn(params, ids):
    logp = jax.nn.log_softmax(barrier(forward(params, ids)[:, :-1]))
    return -jnp.take_along_axis(logp, ids[:, 1:, None], -1).mean()


def train_step(params, mu, nu, step, ids, lr=1e-3, b1=0.9, b2=0.999, eps=1e-8, decay=0.01):
    loss, grads = jax.value_and_grad(loss_fn)(params, ids)
    mu = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, mu, grads)
    nu = jax.tree.map(lambda n, g: b2 * n + (1 - b2) * g * g, nu, grads)

    def update(p: jax.Array, m: jax.Array, n: jax.Array) -> jax.Array:
        return p * (1 - lr * decay) - lr * (m / (1 - b1**step)) / (jnp.sqrt(n / (1 - b2**step)) + eps)

    return loss, jax.tree.map(update, params, mu, nu), mu, nu


def step_memory() -> int:
    """Bytes that the donated training step needs: operands, results and temporaries, by XLA's account."""
    params = init(jax.random.key(0))
    moments = jax.tree.map(jnp.zeros_like, params)
    ids = jax.ShapeDtypeStruct((BATCH, SEQ), jnp.int32)
    lowered = jax.jit(train_step, donate_argnums=(0, 1, 2)).lower(params, moments, moments, 1.0, ids)
    m = lowered.compile().memory_analysis()
    return m.argument_size_in_bytes + m.output_size_in_bytes + m.temp_size_in_bytes - m.alias_size_in_bytes


def forward_and_step() -> tuple[Callable[[], float], Callable[[], float]]:
    """A forward pass and a training step, both of which return the loss; buffers are donated from step to step."""
    params = init(jax.random.key(0))
    state = [params, jax.tree.map(jnp.zeros_like, params), jax.tree.map(jnp.zeros_like, params)]
    ids = jnp.asarray(np.random.default_rng(0).integers(0, VOCAB, (BATCH, SEQ)))
    run_forward, run_step = jax.jit(loss_fn), jax.jit(train_step, donate_argnums=(0, 1, 2))
    count = 0

    def step() -> float:
        nonlocal count
        count += 1
        loss, *state[:] = run_step(*state, float(count), ids)
        return float(loss)

    return lambda: float(run_forward(state[0], ids)), step
