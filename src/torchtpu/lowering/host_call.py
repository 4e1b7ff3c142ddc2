"""Compute a part of a program on the host with NumPy, in the precision of the program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["host_call"]

_WIDE = ("float64", "int64", "uint64", "complex128")


def host_call(function: Callable[..., Any], results: Sequence[jax.ShapeDtypeStruct], *arrays: jax.Array) -> list[Any]:
    """``jax.pure_callback`` for 64-bit types.

    JAX narrows them in the thread that calls back, where 64-bit mode is off; so they travel as pairs of 32-bit words.

    Args:
        function: takes NumPy arrays of the shapes and dtypes of ``arrays`` and returns a sequence of NumPy arrays.
        results: their shapes and dtypes.
        arrays: the arguments.
    """

    def on_host(*words: Any) -> tuple[np.ndarray, ...]:
        given = (_from_words(np.asarray(w), a) for w, a in zip(words, arrays, strict=True))
        found = zip(function(*given), results, strict=True)
        return tuple(_to_words(np.asarray(y, r.dtype).reshape(r.shape)) for y, r in found)

    packed = [
        jax.ShapeDtypeStruct((*r.shape, *_extra(r.dtype)), np.uint32 if _extra(r.dtype) else r.dtype) for r in results
    ]
    words = jax.pure_callback(on_host, packed, *(_pack(a) for a in arrays))
    return [_unpack(w, r) for w, r in zip(words, results, strict=True)]


def _extra(dtype: Any) -> tuple[int, ...]:
    """The dimension of words that a value of this type is packed in; none where it needs no packing."""
    return (np.dtype(dtype).itemsize // 4,) if np.dtype(dtype).name in _WIDE else ()


def _to_words(x: np.ndarray) -> np.ndarray:
    extra = _extra(x.dtype)
    return np.ascontiguousarray(x).reshape(-1).view(np.uint32).reshape(*x.shape, *extra) if extra else x


def _from_words(words: np.ndarray, like: Any) -> np.ndarray:
    return np.ascontiguousarray(words).reshape(-1).view(like.dtype).reshape(like.shape) if _extra(like.dtype) else words


def _pack(x: jax.Array) -> jax.Array:
    if not _extra(x.dtype):
        return x
    parts = jnp.stack([x.real, x.imag], -1) if x.dtype.kind == "c" else x
    return jax.lax.bitcast_convert_type(parts, jnp.uint32).reshape(*x.shape, *_extra(x.dtype))


def _unpack(words: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
    if not _extra(like.dtype):
        return words
    if np.dtype(like.dtype).kind == "c":
        parts = jax.lax.bitcast_convert_type(words.reshape(*like.shape, 2, 2), jnp.float64)
        return jax.lax.complex(parts[..., 0], parts[..., 1])
    return jax.lax.bitcast_convert_type(words, like.dtype)
