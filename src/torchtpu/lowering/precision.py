"""How precisely float32 products are computed, and the product every family shares."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

__all__ = ["accumulator", "einsum", "einsum_of_wide", "matmul_precision", "narrow", "narrow_gradients", "product"]

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
    wide: Any = {"precision": matmul_precision(), "preferred_element_type": accumulator(x.dtype)}
    return narrow(functools.partial(jnp.matmul, **wide), jnp.matmul, x, y)


def _sum_of_products(x: jax.Array, y: jax.Array) -> jax.Array:
    """``x @ y`` by broadcasting, which XLA fuses into the sum."""
    if y.ndim == 1:
        return jnp.sum(x * y, axis=-1, dtype=x.dtype)
    if x.ndim == 1:
        return jnp.sum(x[:, None] * y, axis=-2, dtype=x.dtype)
    return jnp.sum(x[..., :, :, None] * y[..., None, :, :], axis=-2, dtype=x.dtype)


def einsum(formula: str, *operands: jax.Array) -> jax.Array:
    """``jnp.einsum`` in the accumulator dtype and the user's precision."""
    wide: Any = {"precision": matmul_precision(), "preferred_element_type": accumulator(operands[0].dtype)}
    run = functools.partial(jnp.einsum, formula)
    return narrow(functools.partial(run, **wide), run, *operands)


def einsum_of_wide(formula: str, wide: jax.Array, x: jax.Array) -> jax.Array:
    """``einsum`` of a result in ``x``'s accumulator dtype, such as the probabilities of attention, and an input ``x``.

    A TPU multiplies float32 at up to six times the cost of bfloat16: there the result is rounded to the input's dtype
    first, as PyTorch's kernels do. Elsewhere the input is widened, which loses nothing.
    """
    if wide.dtype == x.dtype:
        return einsum(formula, wide, x)
    return jax.lax.platform_dependent(
        wide,
        x,
        tpu=lambda wide, x: einsum(formula, wide.astype(x.dtype), x),
        default=lambda wide, x: einsum(formula, wide, x.astype(wide.dtype)),
    )


_state = threading.local()


@contextlib.contextmanager
def narrow_gradients() -> Iterator[None]:
    """Products traced here and differentiated by JAX have gradients as PyTorch computes them: of operands as narrow as
    those of the forward pass. JAX by itself would multiply the gradient in the accumulator's dtype, at six times the
    cost on a TPU.
    """
    outer = getattr(_state, "narrow", False)
    _state.narrow = True
    try:
        yield
    finally:
        _state.narrow = outer


def narrow(wide: Callable[..., jax.Array], plain: Callable[..., jax.Array], *operands: jax.Array) -> jax.Array:
    """A product in the accumulator dtype, with the gradient of one in the operands' dtype under ``narrow_gradients``.

    Args:
        wide: the product as it is computed.
        plain: the same product with results in the operands' dtype.
        operands: what is multiplied, and integers that say how.
    """
    if not getattr(_state, "narrow", False) or accumulator(operands[0].dtype) == operands[0].dtype:
        return wide(*operands)
    if any(x.dtype != operands[0].dtype for x in operands if jnp.issubdtype(x.dtype, jnp.floating)):
        return wide(*operands)
    return _narrow(wide, plain, *operands)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _narrow(wide: Callable[..., jax.Array], plain: Callable[..., jax.Array], *operands: jax.Array) -> jax.Array:
    return wide(*operands)


def _narrow_forward(wide: Any, plain: Any, *operands: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return wide(*operands), operands


def _narrow_backward(wide: Any, plain: Any, operands: tuple[jax.Array, ...], g: jax.Array) -> tuple[jax.Array, ...]:
    _, pullback = jax.vjp(plain, *operands)
    gradients: tuple[jax.Array, ...] = pullback(g.astype(operands[0].dtype))
    return gradients


_narrow.defvjp(_narrow_forward, _narrow_backward)
