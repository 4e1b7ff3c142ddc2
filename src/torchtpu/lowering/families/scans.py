"""Scans along one dimension: cumulative sums, products and extremes."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from torchtpu.lowering.dtypes import to_jax
from torchtpu.lowering.families.reductions import INT64, widen
from torchtpu.lowering.promotion import cast
from torchtpu.lowering.registry import lowering


def _accumulate(scan: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    def function(self, dim, *, dtype=None):
        result = INT64 if self.dtype.kind in "biu" else self.dtype
        result = result if dtype is None else to_jax(dtype)
        x = widen(cast(self, result))
        return (scan(x, dim % x.ndim) if x.ndim else x).astype(result)

    return function


lowering("cumsum")(_accumulate(jax.lax.cumsum))
lowering("cumprod")(_accumulate(jax.lax.cumprod))


def running_extreme(
    x: jax.Array, dim: int, beats: Callable[[jax.Array, jax.Array], jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """(values, int32 positions) of a running extreme. Of equal values the last wins, and NaN wins over numbers."""
    positions = jax.lax.broadcasted_iota(np.int32, x.shape, dim)

    def combine(left: tuple[jax.Array, jax.Array], right: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        (a, i), (b, j) = left, right
        take = beats(b, a)
        if jnp.issubdtype(x.dtype, jnp.floating):
            take = jnp.isnan(b) | (take & ~jnp.isnan(a))
        return jnp.where(take, b, a), jnp.where(take, j, i)

    return jax.lax.associative_scan(combine, (x, positions), axis=dim)


def _running(beats: Callable[[jax.Array, jax.Array], jax.Array]) -> Callable[..., tuple[jax.Array, jax.Array]]:
    def function(self, dim):
        if self.ndim == 0 or self.size == 0:
            return self, jnp.zeros(self.shape, INT64)
        values, positions = running_extreme(self, dim % self.ndim, beats)
        return values, positions.astype(INT64)

    return function


lowering("cummax")(_running(jnp.greater_equal))
lowering("cummin")(_running(jnp.less_equal))


def _complex_logaddexp(x: jax.Array, y: jax.Array) -> jax.Array:
    """log(exp(x) + exp(y)) on the branch PyTorch takes: the larger argument keeps its own imaginary part."""
    swap = x.real < y.real
    high, low = jnp.where(swap, y, x), jnp.where(swap, x, y)
    both_zero = (low.real == high.real) & jnp.isneginf(low.real)
    return jnp.where(both_zero, low, high + jnp.log1p(jnp.exp(low - high)))


@lowering("logcumsumexp", "_logcumsumexp")
def logcumsumexp(self, dim):
    if self.ndim == 0 or self.size == 0:
        return self
    dim %= self.ndim
    if self.dtype.kind == "c":
        # In order, because the branch of the logarithm depends on it.
        rows = jnp.moveaxis(self, dim, 0)
        _, rest = jax.lax.scan(lambda total, x: (_complex_logaddexp(total, x),) * 2, rows[0], rows[1:])
        return jnp.moveaxis(jnp.concatenate([rows[:1], rest]), 0, dim)
    return jax.lax.associative_scan(jnp.logaddexp, widen(self), axis=dim).astype(self.dtype)
