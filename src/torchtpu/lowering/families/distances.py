"""Distances between points: dist, cdist, pdist."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from torchtpu.lowering.families.reductions import p_norm, widen
from torchtpu.lowering.promotion import promote
from torchtpu.lowering.registry import lowering

Array = jax.Array

MATMUL_FROM = 25
"""With more points than this, PyTorch computes Euclidean distances by a matrix product unless told otherwise."""


@lowering("dist", static=("p",))
def dist(self, other, p=2):
    (x, y), result = promote(self, other)
    return p_norm((x - y).reshape(-1), float(p), (0,)).astype(jnp.zeros((), result).real.dtype)


@lowering("_euclidean_dist")
def _euclidean_dist(x1, x2):
    x, y = widen(x1), widen(x2)
    inner = jnp.matmul(x, jnp.swapaxes(y, -1, -2), precision=jax.lax.Precision.HIGHEST)
    left, right = jnp.sum(x * x, axis=-1)[..., :, None], jnp.sum(y * y, axis=-1)[..., None, :]
    return jnp.sqrt(jnp.maximum(left + right - inner - inner, np.zeros((), x.dtype))).astype(x1.dtype)


@lowering("_cdist_forward", static=("p",))
def _cdist_forward(x1, x2, p, compute_mode):
    # compute_mode None or 0: matrix product if large; 1: always; 2: never.
    large = max(x1.shape[-2], x2.shape[-2]) > MATMUL_FROM
    if p == 2 and (compute_mode == 1 or (compute_mode in (None, 0) and large)):
        return _euclidean_dist(x1, x2)
    return p_norm(x1[..., :, None, :] - x2[..., None, :, :], float(p), (-1,))


def _distance_grad(grad: Array, difference: Array, distance: Array, p: float) -> Array:
    """The gradient of ``distance = |difference|_p`` by ``difference``; 0 where the distance is 0."""
    zero = np.zeros((), difference.dtype)
    size = jnp.abs(difference)
    if p == 0:
        return jnp.zeros_like(difference * grad)
    if p == 1:
        return grad * jnp.sign(difference)
    if p == math.inf:
        return grad * jnp.sign(difference) * (size == distance)
    safe = jnp.where(distance == 0, np.ones((), difference.dtype), distance)
    if p == 2:
        slope = difference / safe
    else:
        exponent = np.asarray(p - 1, difference.dtype)
        slope = jnp.sign(difference) * jnp.where(size == 0, zero, jnp.power(size, exponent)) / jnp.power(safe, exponent)
    return jnp.where(distance == 0, zero, grad * slope)


@lowering("_cdist_backward", static=("p",))
def _cdist_backward(grad, x1, x2, p, cdist):
    if grad.size == 0:
        return jnp.zeros_like(x1)
    difference = x1[..., :, None, :] - x2[..., None, :, :]
    return jnp.sum(_distance_grad(grad[..., None], difference, cdist[..., None], float(p)), axis=-2)


@lowering("_pdist_forward", static=("p",))
def _pdist_forward(self, p=2.0):
    left, right = np.triu_indices(self.shape[0], 1)
    return p_norm(self[left] - self[right], float(p), (1,))


@lowering("_pdist_backward", static=("p",))
def _pdist_backward(grad, self, p, pdist):
    left, right = np.triu_indices(self.shape[0], 1)
    slope = _distance_grad(grad[:, None], self[left] - self[right], pdist[:, None], float(p))
    return jnp.zeros_like(self).at[left].add(slope).at[right].add(-slope)
