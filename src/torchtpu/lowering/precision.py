"""How precisely float32 products are computed, and the product every family shares."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import torch

__all__ = ["accumulator", "einsum", "matmul_precision", "product"]

_PRECISIONS = {
    "highest": jax.lax.Precision.HIGHEST,
    "high": jax.lax.Precision.HIGH,
    "medium": jax.lax.Precision.DEFAULT,
}


def matmul_precision() -> jax.lax.Precision:
    """XLA's precision for float32 products under ``torch.get_float32_matmul_precision()``.

    A TPU multiplies bfloat16: HIGHEST splits a float32 in three of them, HIGH in two, DEFAULT rounds it to one.
    """
    return _PRECISIONS[torch.get_float32_matmul_precision()]


def accumulator(dtype: np.dtype) -> np.dtype:
    """The dtype that products of ``dtype`` are summed in: float32 for the narrower floats, else itself."""
    dtype = np.dtype(dtype)
    narrow = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
    return np.dtype(jnp.float32) if narrow else dtype


def product(x: jax.Array, y: jax.Array) -> jax.Array:
    """``x @ y`` in the accumulator dtype, so that an epilogue (scale, bias) comes before the only rounding."""
    if x.dtype.itemsize == 8 and x.dtype.kind in "iu":
        # A TPU has no product of 64-bit integers; sums of products it emulates.
        return jax.lax.platform_dependent(x, y, tpu=_sum_of_products, default=jnp.matmul)
    return jnp.matmul(x, y, precision=matmul_precision(), preferred_element_type=accumulator(x.dtype))


def _sum_of_products(x: jax.Array, y: jax.Array) -> jax.Array:
    """``x @ y`` by broadcasting, which XLA fuses into the sum."""
    if y.ndim == 1:
        return jnp.sum(x * y, axis=-1, dtype=x.dtype)
    if x.ndim == 1:
        return jnp.sum(x[:, None] * y, axis=-2, dtype=x.dtype)
    return jnp.sum(x[..., :, :, None] * y[..., None, :, :], axis=-2, dtype=x.dtype)


def einsum(formula: str, *operands: jax.Array) -> jax.Array:
    """``jnp.einsum`` in the accumulator dtype and the user's precision."""
    dtype = accumulator(operands[0].dtype)
    return jnp.einsum(formula, *operands, precision=matmul_precision(), preferred_element_type=dtype)
