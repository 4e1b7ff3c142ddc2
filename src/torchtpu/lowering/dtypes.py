"""PyTorch dtypes and JAX dtypes."""

from __future__ import annotations

import jax
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
# XLA has no complex type of two float16: complex32 tensors hold complex64 values, rounded by ``rounded``.
_TO_JAX[torch.complex32] = np.dtype(jnp.complex64)


def to_jax(dtype: torch.dtype) -> np.dtype:
    """The JAX dtype of a PyTorch dtype.

    Raises:
        NotImplementedError: XLA has no such type (quantised types).
    """
    try:
        return _TO_JAX[dtype]
    except KeyError:
        raise NotImplementedError(f"XLA has no type for {dtype}; supported: {', '.join(map(str, _TO_JAX))}") from None


def to_torch(dtype: np.dtype | type) -> torch.dtype:
    """The PyTorch dtype of a JAX dtype."""
    return _TO_TORCH[np.dtype(dtype)]


def complex_of(real: jax.Array, imag: jax.Array) -> jax.Array:
    """The complex array of two parts; parts of float16 become complex64, which is how complex32 is held."""
    wide = np.float32 if real.dtype == np.float16 else real.dtype
    return jax.lax.complex(real.astype(wide), imag.astype(wide))


def rounded(array: jax.Array, dtype: torch.dtype) -> jax.Array:
    """What a tensor of ``dtype`` can hold of the array: complex32 keeps float16's range and precision in complex64
    values; anything else is the array itself.
    """
    if dtype is not torch.complex32:
        return array
    # XLA may drop a conversion to float16 and back; not this.
    parts = [jax.lax.reduce_precision(x, exponent_bits=5, mantissa_bits=10) for x in (array.real, array.imag)]
    return jax.lax.complex(*parts)


def default_float() -> np.dtype:
    """PyTorch's default floating dtype (``torch.get_default_dtype()``)."""
    return to_jax(torch.get_default_dtype())
