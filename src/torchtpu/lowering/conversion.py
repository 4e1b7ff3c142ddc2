"""Numbers converted to the dtype of the tensor they fill, with PyTorch's error for those that do not fit."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from torchtpu.lowering.context import check
from torchtpu.lowering.promotion import cast

__all__ = ["converted"]

_NAMES = {
    "uint8": "uint8_t",
    "uint16": "uint16_t",
    "uint32": "uint32_t",
    "uint64": "uint64_t",
    "int8": "int8_t",
    "int16": "int16_t",
    "int32": "int",
    "int64": "int64_t",
    "float16": "c10::Half",
    "bfloat16": "c10::BFloat16",
    "float32": "float",
    "float64": "double",
}


def converted(value: Any, dtype: np.dtype) -> jax.Array:
    """``cast(value, dtype)`` of one number, checked as PyTorch's ``Scalar::to`` does (``c10::overflows``).

    An integer must fit (into an unsigned dtype also negated: it wraps), a float too, a complex number must be real, and
    a finite number must not become infinite in float16. A number known while tracing is checked at once, others on
    the device, no later than the next synchronisation. Floats that fill bfloat16, float32 and float64 are not checked:
    only those beyond 3.4e38 overflow.

    Raises:
        RuntimeError: the number does not fit.
    """
    bad = _overflows(value, np.dtype(dtype))
    if bad is not None:
        message = f"value cannot be converted to type {_NAMES[np.dtype(dtype).name]} without overflow"
        if not isinstance(bad, jax.Array):
            if bad.any():
                raise RuntimeError(message)
        else:
            check(bad, jnp.zeros_like(bad, dtype=jnp.int64), message)
    return cast(value, dtype)


def _overflows(value: Any, dtype: np.dtype) -> Any:
    """Whether the number does not fit, as an array of NumPy or JAX; None where every number of its dtype does."""
    lib = jnp if isinstance(value, jax.Array) else np
    try:
        x = lib.asarray(value)
    except OverflowError:  # a Python integer of more than 64 bits
        return np.True_
    if dtype.kind == "b" or dtype.kind == "c":
        return None
    if x.dtype.kind == "c":
        real = _overflows(x.real, dtype)
        return (x.imag != 0) if real is None else (x.imag != 0) | real
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        if x.dtype.kind == "b":
            return None
        if x.dtype.kind in "iu":
            given = np.iinfo(x.dtype)
            low = -int(limits.max) if dtype.kind == "u" else int(limits.min)
            if given.max <= limits.max and given.min >= low:
                return None
            above = x > limits.max if given.max > limits.max else lib.zeros_like(x, dtype=bool)
            return above | (x < low) if given.min < low else above
        least = -float(limits.max) if dtype.kind == "u" else float(limits.min)
        return lib.isnan(x) | (x < least) | (x > float(limits.max))
    if dtype == np.float16 and x.dtype != dtype and x.dtype.kind != "b":
        return (abs(x) > float(np.finfo(np.float16).max)) & lib.isfinite(x)
    return None
