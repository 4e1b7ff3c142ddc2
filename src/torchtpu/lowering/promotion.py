"""PyTorch's type promotion for JAX arrays.

The rules are PyTorch's own (``torch._prims_common.elementwise_dtypes``): a Python number or a 0-d tensor only decides
the dtype when its
category (bool < integer < float < complex) is higher than that of the tensors. JAX's rules differ, so a lowering never
relies on them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND as Kind
from torch._prims_common import elementwise_dtypes

from torchtpu.lowering.dtypes import to_jax, to_torch

__all__ = ["Kind", "cast", "is_number", "promote"]


def is_number(x: Any) -> bool:
    """True for a Python number, also when it is a weakly typed operand of the traced program."""
    return isinstance(x, bool | int | float | complex) or (isinstance(x, jax.Array) and jax.typeof(x).weak_type)


def _stand_in(x: Any) -> Any:
    """What PyTorch's rule looks at: category, dtype and whether the rank is 0."""
    if isinstance(x, bool | int | float | complex):
        return x
    if is_number(x):
        kind = np.dtype(x.dtype).kind
        return {"b": True, "i": 1, "u": 1, "f": 1.0, "c": 1j}[kind]
    return torch.empty((1,) * x.ndim, dtype=to_torch(x.dtype), device="meta")


def dtypes(*args: Any, kind: Kind = Kind.DEFAULT) -> tuple[np.dtype, np.dtype]:
    """(compute dtype, result dtype) of an elementwise operator on these arguments (arrays or numbers)."""
    compute, result = elementwise_dtypes(*map(_stand_in, args), type_promotion_kind=kind)
    return to_jax(compute), to_jax(result)


def cast(x: Any, dtype: np.dtype) -> jax.Array:
    """``x`` as a strongly typed array of ``dtype``; complex to real keeps the real part, to bool asks for zero, and
    what is too large for float8_e4m3fn becomes its largest number, as PyTorch does.
    """
    x = jnp.asarray(x)
    if x.dtype.kind == "c" and np.dtype(dtype).kind != "c":
        x = x != 0 if np.dtype(dtype).kind == "b" else x.real
    if np.dtype(dtype) == jnp.float8_e4m3fn and x.dtype.itemsize > 1:  # XLA makes NaN of it
        x = jnp.clip(x, -448, 448)
    return jax.lax.convert_element_type(x, np.dtype(dtype))


def promote(*args: Any, kind: Kind = Kind.DEFAULT) -> tuple[list[jax.Array], np.dtype]:
    """The arguments cast to the compute dtype, and the result's dtype.

    The compute dtype of float16 and bfloat16 is float32, as in PyTorch's CPU and CUDA kernels; cast the result with
    ``cast(y, result)``.

    Example:
        >>> (x, y), result = promote(self, other)
        >>> return cast(x + y, result)
    """
    compute, result = dtypes(*args, kind=kind)
    return [cast(x, compute) for x in args], result
