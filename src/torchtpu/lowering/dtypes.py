"""PyTorch dtypes and JAX dtypes."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import torch

_PAIRS = [
    ("bool", "bool_"),
    *((n, n) for n in ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64")),
    *((n, n) for n in ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")),
    *((n, n) for n in ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")),
]
_TO_JAX: dict[torch.dtype, np.dtype] = {getattr(torch, t): np.dtype(getattr(jnp, j)) for t, j in _PAIRS}
_TO_TORCH: dict[np.dtype, torch.dtype] = {j: t for t, j in _TO_JAX.items()}


def to_jax(dtype: torch.dtype) -> np.dtype:
    """The JAX dtype of a PyTorch dtype.

    Raises:
        NotImplementedError: XLA has no such type (complex32, quantised types).
    """
    try:
        return _TO_JAX[dtype]
    except KeyError:
        raise NotImplementedError(f"XLA has no type for {dtype}; supported: {', '.join(map(str, _TO_JAX))}") from None


def to_torch(dtype: np.dtype | type) -> torch.dtype:
    """The PyTorch dtype of a JAX dtype."""
    return _TO_TORCH[np.dtype(dtype)]


def default_float() -> np.dtype:
    """PyTorch's default floating dtype (``torch.get_default_dtype()``)."""
    return to_jax(torch.get_default_dtype())
