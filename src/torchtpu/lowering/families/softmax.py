"""Softmax, its logarithm, its masked forms, and their gradients."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from torchtpu.lowering.dtypes import to_jax
from torchtpu.lowering.families.reductions import axes, widen
from torchtpu.lowering.promotion import cast
from torchtpu.lowering.registry import lowering


def _shifted(x: jax.Array, dims: tuple[int, ...]) -> jax.Array:
    return x - jnp.max(x, axis=dims, keepdims=True, initial=-math.inf)


def softmax(x: jax.Array, dims: tuple[int, ...]) -> jax.Array:
    """Softmax over ``dims`` in ``x``'s own dtype."""
    exponentials = jnp.exp(_shifted(x, dims))
    return exponentials / jnp.sum(exponentials, axis=dims, keepdims=True)


@lowering("_softmax")
def _softmax(self, dim, half_to_float):
    x = widen(self)
    return softmax(x, axes(dim, x.ndim)).astype(x.dtype if half_to_float else self.dtype)


@lowering("_log_softmax")
def _log_softmax(self, dim, half_to_float):
    x = widen(self)
    dims = axes(dim, x.ndim)
    z = _shifted(x, dims)
    y = z - jnp.log(jnp.sum(jnp.exp(z), axis=dims, keepdims=True))
    return y.astype(x.dtype if half_to_float else self.dtype)


@lowering("_softmax_backward_data")
def _softmax_backward_data(grad_output, output, dim, input_dtype):
    g, y = widen(grad_output), widen(output)
    gy = g * y
    return (gy - y * jnp.sum(gy, axis=axes(dim, y.ndim), keepdims=True)).astype(to_jax(input_dtype))


@lowering("_log_softmax_backward_data")
def _log_softmax_backward_data(grad_output, output, dim, input_dtype):
    g, y = widen(grad_output), widen(output)
    return (g - jnp.exp(y) * jnp.sum(g, axis=axes(dim, y.ndim), keepdims=True)).astype(to_jax(input_dtype))


@lowering("_safe_softmax")
def _safe_softmax(self, dim, dtype=None):
    result = to_jax(dtype) if dtype is not None else self.dtype
    x = widen(cast(self, result))
    dims = axes(dim, x.ndim)
    masked = jnp.all(x == -math.inf, axis=dims, keepdims=True)
    return jnp.where(masked, jnp.zeros((), x.dtype), softmax(x, dims)).astype(result)


@lowering("_masked_softmax")
def _masked_softmax(self, mask, dim=None, mask_type=None):
    # mask_type 0: (L, L) for every head; 1: (B, L) padding of the keys; 2: the scores' own shape. True hides a score.
    if mask_type == 1:
        mask = mask.reshape(mask.shape[0], 1, 1, mask.shape[1])
    x, hidden = widen(self), jnp.broadcast_to(mask, self.shape)
    dims = axes(-1 if dim is None else dim, x.ndim)
    peak = jnp.max(x, axis=dims, keepdims=True, initial=-math.inf, where=~hidden)
    exponentials = jnp.where(hidden, jnp.zeros((), x.dtype), jnp.exp(x - peak))
    return (exponentials / jnp.sum(exponentials, axis=dims, keepdims=True)).astype(self.dtype)


@lowering("_masked_softmax_backward")
def _masked_softmax_backward(grad_output, output, mask, dim=None):
    g, y, hidden = widen(grad_output), widen(output), jnp.broadcast_to(mask, output.shape)
    gy = jnp.where(hidden, np.zeros((), y.dtype), g * y)
    total = jnp.sum(gy, axis=axes(-1 if dim is None else dim, y.ndim), keepdims=True)
    return jnp.where(hidden, np.zeros((), y.dtype), gy - y * total).astype(grad_output.dtype)
