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


def _running(scan: Callable[..., jax.Array]) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """(values, positions) of a running extreme. Of equal values the last wins, and NaN wins over numbers."""

    def function(self, dim):
        if self.ndim == 0 or self.size == 0:
            return self, jnp.zeros(self.shape, INT64)
        dim %= self.ndim
        values = scan(self.astype(np.uint8), dim).astype(bool) if self.dtype == bool else scan(self, dim)
        # An element that equals the running extreme has just become it.
        record = self == values
        if jnp.issubdtype(self.dtype, jnp.floating):
            record |= jnp.isnan(self)
        places = jax.lax.broadcasted_iota(np.int32, self.shape, dim)
        return values, jax.lax.cummax(jnp.where(record, places, 0), dim).astype(INT64)

    return function


lowering("cummax")(_running(jax.lax.cummax))
lowering("cummin")(_running(jax.lax.cummin))


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
    # One step after another: a complex logarithm's branch depends on the order, and a tree takes seconds to compile.
    add = _complex_logaddexp if self.dtype.kind == "c" else jnp.logaddexp
    rows = jnp.moveaxis(widen(self), dim, 0)
    _, rest = jax.lax.scan(lambda total, x: (add(total, x),) * 2, rows[0], rows[1:])
    return jnp.moveaxis(jnp.concatenate([rows[:1], rest]), 0, dim).astype(self.dtype)
