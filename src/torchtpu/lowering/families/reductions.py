"""Reductions: sums, extremes, moments, norms and logical reductions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from torchtpu.lowering.dtypes import default_float, to_jax
from torchtpu.lowering.promotion import cast
from torchtpu.lowering.registry import lowering
from torchtpu.lowering.sizes import as_number

INT64 = np.dtype("int64")


def axes(dim: int | Sequence[int] | None, ndim: int) -> tuple[int, ...]:
    """The dimensions to reduce, non-negative; None and an empty list mean all of them, a 0-d tensor has none."""
    if ndim == 0:
        return ()
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return tuple(range(ndim))
    return tuple(d % ndim for d in ([dim] if isinstance(dim, int) else dim))


def compute_dtype(dtype: np.dtype) -> np.dtype:
    """float16 and bfloat16 accumulate in float32; other types in themselves."""
    return np.dtype("float32") if dtype in (jnp.float16, jnp.bfloat16) else np.dtype(dtype)


def widen(x: jax.Array) -> jax.Array:
    """``x`` in its compute dtype."""
    return x.astype(compute_dtype(x.dtype))


def real_dtype(dtype: np.dtype) -> np.dtype:
    """The type of a complex type's parts; any other type itself."""
    return np.dtype(jnp.finfo(dtype).dtype) if np.dtype(dtype).kind == "c" else np.dtype(dtype)


def to_inexact(x: jax.Array) -> jax.Array:
    """Integers and bools become PyTorch's default float; floating and complex arrays stay."""
    return x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(default_float())


def square(x: jax.Array) -> jax.Array:
    """|x|^2, real also for complex ``x``."""
    return x.real * x.real + x.imag * x.imag if x.dtype.kind == "c" else x * x


def _total(dtype: np.dtype, asked: torch.dtype | None) -> np.dtype:
    """The dtype of a sum or product: what was asked for, else int64 for integers and bools."""
    if asked is not None:
        return to_jax(asked)
    return INT64 if np.dtype(dtype).kind in "biu" else np.dtype(dtype)


def count(mask: jax.Array, axis: tuple[int, ...] | None = None, keepdims: bool = False) -> jax.Array:
    """How many are true, as int64. Counted in int32 where that cannot overflow, because TPUs emulate int64."""
    inner = np.dtype("int32") if mask.size < 2**31 else INT64
    return jnp.sum(mask, axis=axis, dtype=inner, keepdims=keepdims).astype(INT64)


@lowering("sum", "sum.dim_IntList")
def sum(self, dim=None, keepdim=False, *, dtype=None):
    result = _total(self.dtype, dtype)
    if self.dtype == bool and result == INT64:
        return count(self, axes(dim, self.ndim), keepdim)
    x = cast(self, result)
    return jnp.sum(widen(x), axis=axes(dim, self.ndim), keepdims=keepdim, dtype=compute_dtype(result)).astype(result)


@lowering("nansum")
def nansum(self, dim=None, keepdim=False, *, dtype=None):
    if jnp.issubdtype(self.dtype, jnp.floating):
        self = jnp.where(jnp.isnan(self), jnp.zeros((), self.dtype), self)
    return sum(self, dim, keepdim, dtype=dtype)


def _extent(shape: Sequence[int], dims: tuple[int, ...]) -> int:
    return math.prod(shape[d] for d in dims)


@lowering("mean", "mean.dim")
def mean(self, dim=None, keepdim=False, *, dtype=None):
    result = to_jax(dtype) if dtype is not None else self.dtype
    dims = axes(dim, self.ndim)
    n = as_number(_extent(self.shape, dims), compute_dtype(real_dtype(result)))
    return (jnp.sum(widen(cast(self, result)), axis=dims, keepdims=keepdim) / n).astype(result)


@lowering("nanmean")
def nanmean(self, dim=None, keepdim=False, *, dtype=None):
    result = to_jax(dtype) if dtype is not None else self.dtype
    dims, nan = axes(dim, self.ndim), jnp.isnan(self)
    x = widen(cast(jnp.where(nan, jnp.zeros((), self.dtype), self), result))
    n = count(~nan, dims, keepdim).astype(real_dtype(x.dtype))
    return (jnp.sum(x, axis=dims, keepdims=keepdim) / n).astype(result)


@lowering("prod", "prod.dim_int")
def prod(self, dim=None, keepdim=False, *, dtype=None):
    result = _total(self.dtype, dtype)
    x = widen(cast(self, result))
    return jnp.prod(x, axis=axes(dim, self.ndim), keepdims=keepdim, dtype=x.dtype).astype(result)


# Extremes


@lowering("amax", "max")
def amax(self, dim=None, keepdim=False):
    return jnp.max(self, axis=axes(dim, self.ndim), keepdims=keepdim)


@lowering("amin", "min")
def amin(self, dim=None, keepdim=False):
    return jnp.min(self, axis=axes(dim, self.ndim), keepdims=keepdim)


@lowering("aminmax", "_aminmax", "_aminmax.dim")
def aminmax(self, dim=None, keepdim=False):
    return amin(self, dim, keepdim), amax(self, dim, keepdim)


def _position(extreme: Callable[..., jax.Array], self: jax.Array, dim: int | None, keepdim: bool) -> jax.Array:
    """The first position of an extreme, NaN being the most extreme, along ``dim`` or in the flat tensor."""
    if dim is None or self.ndim == 0:
        index = _position(extreme, self.reshape(-1), 0, False)
        return index.reshape((1,) * self.ndim) if keepdim else index
    dim %= self.ndim
    # Two plain reductions: XLA:CPU does not vectorise one reduction of (value, index) pairs.
    here = self == extreme(self, axis=dim, keepdims=True)
    if jnp.issubdtype(self.dtype, jnp.floating):
        here |= jnp.isnan(self)
    places = jax.lax.broadcasted_iota(np.int32, self.shape, dim)
    index = jnp.min(jnp.where(here, places, as_number(self.shape[dim], np.int32)), axis=dim, keepdims=keepdim)
    return index.astype(INT64)


@lowering("argmax")
def argmax(self, dim=None, keepdim=False):
    return _position(jnp.max, self, dim, keepdim)


@lowering("argmin")
def argmin(self, dim=None, keepdim=False):
    return _position(jnp.min, self, dim, keepdim)


@lowering("max.dim")
def max_dim(self, dim, keepdim=False):
    return amax(self, dim, keepdim), argmax(self, dim, keepdim)


@lowering("min.dim")
def min_dim(self, dim, keepdim=False):
    return amin(self, dim, keepdim), argmin(self, dim, keepdim)


@lowering("value_selecting_reduction_backward")
def value_selecting_reduction_backward(grad, dim, indices, sizes, keepdim):
    if not sizes:
        return grad.reshape(())
    dim %= len(sizes)
    if not keepdim:
        grad, indices = jnp.expand_dims(grad, dim), jnp.expand_dims(indices, dim)
    # A comparison with an iota instead of a scatter: the result is dense and the comparison fuses with its consumer.
    here = jax.lax.broadcasted_iota(np.int32, tuple(sizes), dim) == indices.astype(np.int32)
    return jnp.where(here, grad, jnp.zeros((), grad.dtype))


# Logical reductions


def _truth(reduce: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    def function(self, dim=None, keepdim=False):
        # Unlike other reductions, an empty list of dimensions reduces nothing here.
        dims = () if dim == [] else axes(dim, self.ndim)
        result = reduce(self != 0, axis=dims, keepdims=keepdim)
        return result.astype(np.uint8) if self.dtype == np.uint8 else result

    return function


lowering("all", "all.dim", "all.dims", "_is_all_true")(_truth(jnp.all))
lowering("any", "any.dim", "any.dims", "_is_any_true")(_truth(jnp.any))


@lowering("count_nonzero", "count_nonzero.dim_IntList")
def count_nonzero(self, dim=None):
    return count(self != 0, axes(dim, self.ndim))


# Moments


def moments(x: jax.Array, dims: tuple[int, ...], keepdims: bool, correction: Any = 0) -> tuple[jax.Array, jax.Array]:
    """(variance, mean) in two passes, which keeps the variance's digits when the mean is large."""
    real = real_dtype(x.dtype)
    n = as_number(_extent(x.shape, dims), real)
    center = jnp.sum(x, axis=dims, keepdims=True) / n
    rest = jnp.maximum(n - cast(correction, real), np.zeros((), real))
    variance = jnp.sum(square(x - center), axis=dims, keepdims=keepdims) / rest
    return variance, center if keepdims else jax.lax.squeeze(center, dims)


def _var_mean(self: jax.Array, dim: Any, correction: Any, keepdim: bool) -> tuple[jax.Array, jax.Array]:
    variance, center = moments(widen(self), axes(dim, self.ndim), keepdim, 1 if correction is None else correction)
    return variance, center


def _register_moments(name: str, finish: Callable[[jax.Array, jax.Array, np.dtype], Any]) -> None:
    """The three overloads of var, std, var_mean or std_mean."""

    @lowering(f"{name}.correction")
    def corrected(self, dim=None, *, correction=None, keepdim=False):
        return finish(*_var_mean(self, dim, correction, keepdim), self.dtype)

    @lowering(name)
    def unbiased_all(self, unbiased=True):
        return finish(*_var_mean(self, None, int(unbiased), False), self.dtype)

    @lowering(f"{name}.dim")
    def unbiased_dim(self, dim, unbiased=True, keepdim=False):
        return finish(*_var_mean(self, dim, int(unbiased), keepdim), self.dtype)


_register_moments("var", lambda v, m, t: v.astype(real_dtype(t)))
_register_moments("std", lambda v, m, t: jnp.sqrt(v).astype(real_dtype(t)))
_register_moments("var_mean", lambda v, m, t: (v.astype(real_dtype(t)), m.astype(t)))
_register_moments("std_mean", lambda v, m, t: (jnp.sqrt(v).astype(real_dtype(t)), m.astype(t)))


# Norms


def p_norm(x: jax.Array, p: float, dims: tuple[int, ...], keepdims: bool = False) -> jax.Array:
    """The vector p-norm over ``dims`` in ``x``'s (real) dtype; ``p`` may be 0 or infinite."""
    real = real_dtype(x.dtype)
    if p == 2:
        return jnp.sqrt(jnp.sum(square(x), axis=dims, keepdims=keepdims))
    if p == 0:
        return count(x != 0, dims, keepdims).astype(real)
    x = jnp.abs(x)
    if p == math.inf:
        return jnp.max(x, axis=dims, keepdims=keepdims, initial=0)
    if p == -math.inf:
        return jnp.min(x, axis=dims, keepdims=keepdims, initial=math.inf)
    if p == 1:
        return jnp.sum(x, axis=dims, keepdims=keepdims)
    power = jnp.sum(jnp.power(x, np.asarray(p, real)), axis=dims, keepdims=keepdims)
    return jnp.power(power, np.asarray(1 / p, real))


@lowering("linalg_vector_norm", static=("ord",))
def linalg_vector_norm(self, ord=2, dim=None, keepdim=False, *, dtype=None):
    x = cast(self, to_jax(dtype)) if dtype is not None else self
    return p_norm(widen(x), float(ord), axes(dim, self.ndim), keepdim).astype(real_dtype(x.dtype))


@lowering("norm.Scalar", "norm.ScalarOpt_dtype", static=("p",))
def norm_all(self, p=2, *, dtype=None):
    return linalg_vector_norm(self, 2 if p is None else p, dtype=dtype)


@lowering("norm.ScalarOpt_dim", "norm.ScalarOpt_dim_dtype", static=("p",))
def norm_dim(self, p, dim, keepdim=False, *, dtype=None):
    return linalg_vector_norm(self, 2 if p is None else p, dim, keepdim, dtype=dtype)


@lowering("logsumexp")
def logsumexp(self, dim, keepdim=False):
    self = to_inexact(self)
    x, dims = widen(self), axes(dim, self.ndim)
    peak = jnp.max(x.real, axis=dims, keepdims=True, initial=-math.inf)
    # An infinite peak would give inf - inf.
    peak = jnp.where(jnp.isinf(peak), jnp.zeros((), peak.dtype), peak)
    total = jnp.log(jnp.sum(jnp.exp(x - peak), axis=dims, keepdims=True)) + peak
    return (total if keepdim else jax.lax.squeeze(total, dims)).astype(self.dtype)


@lowering("trace")
def trace(self):
    result = _total(self.dtype, None)
    return jnp.trace(widen(cast(self, result))).astype(result)
