"""Sizes that an exported program leaves open: symbolic dimensions of JAX in the place of whole numbers."""

from __future__ import annotations

from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

__all__ = ["as_number", "bounds_of_slice", "is_open"]


def is_open(*sizes: Any) -> bool:
    """Whether any of the sizes is left open."""
    return any(jax.export.is_symbolic_dim(n) for n in sizes)


def as_number(size: Any, dtype: np.dtype | type) -> Any:
    """A size to compute with: a constant, or where it is left open a 0-d array."""
    return jnp.asarray(size).astype(dtype) if is_open(size) else np.asarray(size, dtype)


def bounds_of_slice(extent: Any, start: Any, end: Any, step: int) -> tuple[Any, Any]:
    """A slice's first element and the one after its last, with PyTorch's clamping, and never backwards.

    Raises:
        jax.errors.InconclusiveDimensionOperation: a size is left open and the bounds depend on how large it is.
    """
    if not is_open(extent, start, end):
        first, last, _ = slice(start, end, step).indices(extent)
        return first, max(first, last)

    def bound(n: Any, default: Any) -> Any:
        if n is None:
            return default
        if isinstance(n, int) and n >= 2**63 - 1:  # PyTorch's way of saying: to the end
            return extent
        n = n + extent if n < 0 else n
        return max(min(n, extent), 0)

    first = bound(start, 0)
    return first, max(first, bound(end, extent))
