"""The ``prims`` operators that ``torch._refs`` and ``torch._decomp`` break aten operators into."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from torchtpu.lowering.context import check
from torchtpu.lowering.dtypes import default_float, to_jax
from torchtpu.lowering.families.pointwise_binary import common, trunc_divide_values
from torchtpu.lowering.families.pointwise_unary import is_integral
from torchtpu.lowering.promotion import cast, promote
from torchtpu.lowering.registry import find, lowering

Array = jax.Array

_SAME = """
abs acos acosh asin asinh atan atan2 atanh bitwise_not ceil conj_physical cos cosh digamma erf erfc exp exp2
expm1 floor fmax fmin frexp.Tensor gcd hypot igamma igammac isfinite lgamma log log10 log1p log2 maximum minimum
neg nextafter reciprocal round rsqrt sign signbit sin sinh sqrt tan tanh trunc add.Tensor bitwise_and.Tensor
bitwise_or.Tensor bitwise_xor.Tensor eq.Tensor fmod.Tensor ge.Tensor gt.Tensor le.Tensor lt.Tensor mul.Tensor
ne.Tensor remainder.Tensor sub.Tensor
"""
_RENAMED = {
    "bessel_i0": "i0",
    "bessel_i0e": "special_i0e",
    "bessel_i1": "special_i1",
    "bessel_i1e": "special_i1e",
    "bessel_j0": "special_bessel_j0",
    "bessel_j1": "special_bessel_j1",
    "erf_inv": "erfinv",
    "erfcx": "special_erfcx",
    "fill": "fill.Scalar",
    "ndtri": "special_ndtri",
    "pow": "pow.Tensor_Tensor",
    "shift_left": "bitwise_left_shift.Tensor",
    "shift_right_arithmetic": "bitwise_right_shift.Tensor",
    "spherical_bessel_j0": "special_spherical_bessel_j0",
    "zeta": "special_zeta",
}


def _prim(name: str, **options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return lowering(f"prims::{name}.default", **options)


def _as_aten(name: str) -> Callable[..., Any]:
    """On operands of one dtype a prim is the aten operator; looked up when called, since families load in any order."""
    full = name if "." in name else f"{name}.default"

    def lower(*args):
        entry = find(full)
        if entry is None:
            raise NotImplementedError(f"aten.{full} has no lowering")
        return entry.function(*args)

    return lower


for _name in _SAME.split():
    _prim(_name.split(".")[0])(_as_aten(_name))
for _name, _aten in _RENAMED.items():
    _prim(_name)(_as_aten(_aten))


@_prim("div")
def div(self, other):
    """Integers divide towards zero, unlike aten's true division."""
    (x, y), result = promote(self, other)
    return cast(trunc_divide_values(*jnp.broadcast_arrays(x, y)) if is_integral(x) else x / y, result)


@_prim("cbrt")
def cbrt(self):
    (x,), result = promote(self)
    return cast(jnp.cbrt(x), result)


@_prim("real")
def real(self):
    return jnp.real(self)


@_prim("imag")
def imag(self):
    return jnp.imag(self)


@_prim("conj")
def conj(a):
    return jnp.conj(a)


@_prim("where")
def where(pred, a, b):
    x, y = common(a, b)
    return jnp.where(pred != 0, x, y)


@_prim("convert_element_type")
def convert_element_type(a, dtype):
    return find("_to_copy.default").function(jnp.asarray(a), dtype=dtype)


@_prim("view_of")
@_prim("clone")
@_prim("copy_strided")
@_prim("device_put")
def identity(a, *_, **__):
    return a


@_prim("view_of_dtype")
def view_of_dtype(a, dtype):
    return find("view.dtype").function(a, dtype)


@_prim("broadcast_in_dim")
def broadcast_in_dim(a, shape, broadcast_dimensions):
    return lax.broadcast_in_dim(a, tuple(shape), tuple(broadcast_dimensions))


@_prim("reshape")
def reshape(a, shape):
    return jnp.reshape(a, tuple(shape))


@_prim("transpose")
def transpose(a, permutation):
    return jnp.transpose(a, tuple(permutation))


@_prim("squeeze")
def squeeze(a, dimensions):
    return jnp.reshape(a, [n for i, n in enumerate(a.shape) if i not in {d % a.ndim for d in dimensions}])


@_prim("split_dim")
def split_dim(a, dim, outer_length):
    return jnp.reshape(a, (*a.shape[:dim], outer_length, a.shape[dim] // outer_length, *a.shape[dim + 1 :]))


@_prim("collapse")
@_prim("collapse_view")
def collapse(a, start, end):
    """Merge the dimensions from ``start`` to ``end``, both included."""
    shape = a.shape or (1,)
    return jnp.reshape(a, (*shape[:start], int(np.prod(shape[start : end + 1])), *shape[end + 1 :]))


@_prim("cat")
def cat(tensors, dim):
    return jnp.concatenate(common(*tensors), axis=dim)


@_prim("rev")
def rev(a, dims):
    return jnp.flip(a, tuple(dims))


@_prim("as_strided_scatter")
def as_strided_scatter(self, src, size, stride, storage_offset):
    return find("as_strided_scatter.default").function(self, src, size, stride, storage_offset)


@_prim("iota")
def iota(length, *, start, step, dtype, requires_grad=False):
    wide = jnp.arange(length, dtype=jnp.int64) * step + start
    return wide.astype(to_jax(dtype))


@_prim("full")
def full(shape, fill_value, *, dtype, requires_grad=False):
    return jnp.broadcast_to(cast(fill_value, to_jax(dtype)), tuple(shape))


@_prim("full_like")
def full_like(a, fill_value, *, dtype, requires_grad=False):
    return jnp.broadcast_to(cast(fill_value, to_jax(dtype)), a.shape)


@_prim("scalar_tensor")
def scalar_tensor(s, *, dtype=None):
    return jnp.asarray(cast(s, default_float() if dtype is None else to_jax(dtype)))


@_prim("empty")
@_prim("empty_strided")
@_prim("empty_permuted")
def empty(shape, *_, dtype, requires_grad=False):
    return jnp.zeros(tuple(shape), to_jax(dtype))


def _register_reductions(table: dict[str, Callable[..., Array]]) -> None:
    def make(f: Callable[..., Array]) -> Callable[..., Array]:
        def lower(inp, dims, *, output_dtype=None):
            dtype = inp.dtype if output_dtype is None else to_jax(output_dtype)
            return cast(f(inp, axis=None if dims is None else tuple(dims)), dtype)

        return lower

    for name, f in table.items():
        _prim(name)(make(f))


def _in_float32(f: Callable[..., Array]) -> Callable[..., Array]:
    """Accumulate 16-bit floats in float32."""

    def reduce(x: Array, axis: tuple[int, ...] | None) -> Array:
        (wide,), _ = promote(x)
        return f(wide, axis=axis)

    return reduce


def _xor_sum(x: Array, axis: tuple[int, ...] | None) -> Array:
    axes: Any = tuple(range(x.ndim)) if axis is None else axis
    return jnp.bitwise_xor.reduce(x, axis=axes)


_register_reductions(
    {
        "sum": _in_float32(jnp.sum),
        "prod": _in_float32(jnp.prod),
        "amax": jnp.max,
        "amin": jnp.min,
        "xor_sum": _xor_sum,
    }
)


@_prim("var", static=("correction",))
def var(inp, dims, correction=1.0, *, output_dtype=None):
    axes = tuple(range(inp.ndim)) if dims is None else tuple(dims)
    (x,), result = promote(inp)
    count = int(np.prod([inp.shape[d] for d in axes]))
    centred = x - jnp.mean(x, axis=axes, keepdims=True)
    total = jnp.sum(centred.real**2 + centred.imag**2 if jnp.iscomplexobj(x) else centred * centred, axis=axes)
    variance = total / jnp.asarray(max(count - correction, 0), total.dtype)
    dtype = jnp.zeros((), result).real.dtype if output_dtype is None else to_jax(output_dtype)
    return cast(variance, dtype)


@_prim("fft_r2c")
def fft_r2c(self, *, dim, onesided):
    return jnp.fft.rfftn(self, axes=tuple(dim)) if onesided else jnp.fft.fftn(self, axes=tuple(dim))


@_prim("fft_c2c")
def fft_c2c(self, *, dim, forward):
    return jnp.fft.fftn(self, axes=tuple(dim)) if forward else jnp.fft.ifftn(self, axes=tuple(dim), norm="forward")


@_prim("fft_c2r")
def fft_c2r(self, *, dim, last_dim_size):
    sizes = [self.shape[d] for d in dim[:-1]] + [last_dim_size]
    return jnp.fft.irfftn(self, s=sizes, axes=tuple(dim), norm="forward")


@lowering("_assert_async", "_assert_async.msg")
def assert_async(self, assert_msg="Expected Tensor with single nonzero value, but got zero"):
    holds = self.reshape(()).astype(bool)
    check(~holds, holds, assert_msg.replace("{", "{{").replace("}", "}}"))


@lowering("prims::_make_token")
def make_token():
    """What orders operators that have effects; it holds nothing."""
    return jnp.zeros(0, jnp.float32)


@lowering("prims::_sink_tokens")
def sink_tokens(tokens):
    return None
