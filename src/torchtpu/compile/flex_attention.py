"""``flex_attention``: attention with the user's function on scores and a mask given as a function.

Scores are computed in full, and the functions applied to all of them at once; XLA fuses what it can. The gradient is
JAX's of the same function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from torchtpu.compile.control_flow import Body, first_failure
from torchtpu.lowering.context import Trace, tracing
from torchtpu.lowering.precision import einsum

__all__ = ["FLEX_ATTENTION"]

Graph = torch.fx.GraphModule
_LOG2 = math.log(2)


def _everywhere(graph: Graph, buffers: Sequence[Any], shape: tuple[int, ...], scores: Any = None) -> Any:
    """A function of (score, batch, head, query, key), or of the last four, at every place of ``shape``."""
    body = Body(graph)

    def at(*place: Any) -> Any:
        results, checks = body(*place, *buffers)
        return results[0], checks

    whole = at
    axes = [0] if scores is not None else []
    for dim in reversed(range(4)):
        places: list[int | None] = [None] * 4
        places[dim] = 0
        whole = jax.vmap(whole, in_axes=(*axes, *places))
    positions = [jnp.arange(n, dtype=jnp.int32) for n in shape]
    result, checks = whole(*([scores] if scores is not None else []), *positions)
    body.report([jax.lax.stop_gradient(first_failure(c)) for c in checks])
    return jnp.broadcast_to(result, shape)


def _attend(
    query: Any, key: Any, value: Any, score_mod: Graph, mask_mod: Graph | None, scale: float,
    score_buffers: Sequence[Any], mask_buffers: Sequence[Any],
) -> tuple[Any, Any, Any]:  # fmt: skip
    """(output, log2 of the sum of exponentials, largest score in units of log 2), as PyTorch's own reference."""
    groups = query.shape[1] // key.shape[1]
    key, value = (jnp.repeat(x, groups, axis=1) for x in (key, value))
    key, value = (jnp.broadcast_to(x, (query.shape[0], *x.shape[1:])) for x in (key, value))
    working = jnp.float64 if query.dtype == jnp.float64 else jnp.float32
    scores = einsum("bhqd,bhkd->bhqk", query, key).astype(working) * scale
    shape = scores.shape
    scores = _everywhere(score_mod, score_buffers, shape, scores).astype(working)
    if mask_mod is not None:
        allowed = _everywhere(mask_mod, mask_buffers, shape)
        scores = jnp.where(allowed, scores, -jnp.inf)
    most = jnp.max(scores, axis=-1)
    empty = most == -jnp.inf
    exponentials = jnp.exp(scores - jax.lax.stop_gradient(jnp.where(empty, 0, most))[..., None])
    total = jnp.sum(exponentials, axis=-1)
    safe = jnp.where(empty, 1, total)
    weights = exponentials / safe[..., None]
    output = einsum("bhqk,bhkd->bhqd", weights.astype(query.dtype), value.astype(query.dtype)).astype(query.dtype)
    logsumexp = jnp.where(empty, -jnp.inf, jnp.log(safe) + jnp.where(empty, 0, most))
    return output, logsumexp / _LOG2, most / _LOG2


def _forward(
    query: Any, key: Any, value: Any, score_mod: Graph, block_mask: tuple[Any, ...],
    scale: float, kernel_options: Any, score_mod_other_buffers: Any = (), mask_mod_other_buffers: Any = (),
) -> Any:  # fmt: skip
    return _attend(query, key, value, score_mod, block_mask[-1], scale, score_mod_other_buffers, mask_mod_other_buffers)


def _backward(
    query: Any, key: Any, value: Any, out: Any, logsumexp: Any, grad_out: Any,
    grad_logsumexp: Any, fw_graph: Graph, joint_graph: Graph, block_mask: tuple[Any, ...], scale: float,
    kernel_options: Any, score_mod_other_buffers: Any = (), mask_mod_other_buffers: Any = (),
) -> Any:  # fmt: skip
    floating = [jnp.issubdtype(getattr(b, "dtype", jnp.int32), jnp.floating) for b in score_mod_other_buffers]

    def attend(query: Any, key: Any, value: Any, learned: list[Any]) -> Any:
        given = iter(learned)
        buffers = [next(given) if f else b for f, b in zip(floating, score_mod_other_buffers, strict=True)]
        mask_mod = block_mask[-1]
        with tracing(Trace()):  # the forward pass has reported its checks
            return _attend(query, key, value, fw_graph, mask_mod, scale, buffers, mask_mod_other_buffers)[:2]

    learned = [b for f, b in zip(floating, score_mod_other_buffers, strict=True) if f]
    (output, sums), pull_back = jax.vjp(attend, query, key, value, learned)
    by_sums = jnp.zeros_like(sums) if grad_logsumexp is None else grad_logsumexp.astype(sums.dtype)
    by_output = jnp.zeros_like(output) if grad_out is None else grad_out.astype(output.dtype)
    *gradients, by_learned = pull_back((by_output, by_sums))
    given = iter(by_learned)
    return *gradients, tuple(next(given) if f else None for f in floating)


FLEX_ATTENTION: dict[str, Callable[..., Any]] = {
    "flex_attention": _forward,
    "flex_attention_backward": _backward,
}
"""By name, for ``control_flow.run_operator``."""
