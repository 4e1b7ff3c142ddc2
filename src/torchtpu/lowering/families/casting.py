"""Type conversion, copies, and the conjugate and negative views made real."""

from __future__ import annotations

import jax.numpy as jnp

from torchtpu.lowering.dtypes import to_jax
from torchtpu.lowering.promotion import cast
from torchtpu.lowering.registry import lowering


def convert(x, dtype):
    """``x`` as ``dtype``, as PyTorch's CPU converts.

    Floats become narrow or unsigned integers by way of a wider one, so that they wrap (-1.0 is 255 as uint8) where XLA
    would saturate.
    """
    if jnp.dtype(dtype).kind == "b":
        return x != 0
    if jnp.dtype(dtype).kind in "iu" and jnp.dtype(dtype).itemsize < 4 and x.dtype.kind not in "iub":
        x = cast(x, jnp.int32)
    elif jnp.dtype(dtype).kind == "u" and x.dtype.kind not in "iub":
        x = cast(x, jnp.int64)
    return cast(x, dtype)


@lowering("_to_copy")
def to_copy(self, dtype=None, non_blocking=False, memory_format=None):
    return self if dtype is None else convert(self, to_jax(dtype))


@lowering("to.dtype")
def to_dtype(self, dtype, non_blocking=False, copy=False, memory_format=None):
    return convert(self, to_jax(dtype))


@lowering("to.device")
def to_device(self, device, dtype, non_blocking=False, copy=False, memory_format=None):
    return convert(self, to_jax(dtype))


@lowering("to.dtype_layout")
def to_dtype_layout(self, dtype=None, non_blocking=False, copy=False, memory_format=None):
    return self if dtype is None else convert(self, to_jax(dtype))


@lowering("to.other", "type_as")
def to_other(self, other, non_blocking=False, copy=False, memory_format=None):
    return convert(self, other.dtype)


@lowering("clone", "contiguous")
def clone(self, memory_format=None):
    return self


@lowering("copy")
def copy(self, src, non_blocking=False):
    return jnp.broadcast_to(convert(src, self.dtype), self.shape)


# Arrays have no lazy conjugate or negative bit: the views compute, and resolving one has nothing left to do.
@lowering("_conj", "_conj_copy")
def conj(self):
    return jnp.conj(self)


@lowering("_neg_view", "_neg_view_copy")
def neg_view(self):
    return -self


@lowering("resolve_conj", "resolve_neg")
def resolve(self):
    return self
