"""Special functions: gamma and its kin, error functions, zeta, modified Bessel functions of JAX."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy import special as jsp

from torchtpu.lowering.families.pointwise_binary import register_binary
from torchtpu.lowering.families.pointwise_unary import register_unary
from torchtpu.lowering.promotion import Kind, cast, promote
from torchtpu.lowering.registry import lowering

__all__: list[str] = []

Array = jax.Array


def digamma_values(x: Array) -> Array:
    """As ``lax.digamma``; infinite at 0 with the sign that the limit has, and NaN at the negative integers."""
    at_zero = jnp.copysign(jnp.full_like(x, jnp.inf), -x)
    pole = (x < 0) & (x == jnp.floor(x))
    return jnp.where(x == 0, at_zero, jnp.where(pole, jnp.nan, lax.digamma(x)))


def zeta_values(x: Array, q: Array) -> Array:
    """Hurwitz's zeta function: undefined below x = 1, infinite at the poles q = 0, -1, -2, ...

    Between the poles, for whole x, terms are added until q is 1 or more, where the series of ``lax.zeta`` is small. For
    odd x those on the two sides of 0 have opposite signs and may cancel, so the sum keeps its rounding errors (Knuth's
    TwoSum).
    """
    between = (q < 0) & (q > -1000) & (x > 1) & (x == jnp.floor(x))

    def add(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        total, lost, q = state
        more = between & (q < 1)
        term = jnp.where(more, lax.pow(jnp.where(more & (q != 0), q, 1), -x), 0)
        wider = total + term
        added = wider - total
        lost += (total - (wider - added)) + (term - added)
        return wider, lost, jnp.where(more, q + 1, q)

    start = (jnp.zeros_like(q), jnp.zeros_like(q), q)
    terms, lost, shifted = lax.while_loop(lambda s: (between & (s[2] < 1)).any(), add, start)
    pole = (q <= 0) & (q == jnp.floor(q))
    series = terms + (lost + lax.zeta(x, shifted))
    return jnp.where(x < 1, jnp.nan, jnp.where(pole & (x >= 1), jnp.inf, series))


def trigamma_values(x: Array) -> Array:
    """The reflection formula carries arguments below one half to ones above."""
    below = x < 0.5
    pi = x.dtype.type(np.pi)
    right = jnp.where(x == jnp.inf, 0, lax.zeta(jnp.full_like(x, 2), jnp.where(below, 1 - x, x)))
    return jnp.where(below, (pi / jnp.sin(pi * x)) ** 2 - right, right)


def polygamma_values(n: int, x: Array) -> Array:
    """The ``n``-th derivative of digamma."""
    if n == 0:
        return digamma_values(x)
    if n == 1:
        return trigamma_values(x)
    order = jnp.full_like(x, n + 1)
    factorial = x.dtype.type(math.gamma(n + 1)) if n < 170 else x.dtype.type(np.inf)
    return (factorial if n % 2 else -factorial) * zeta_values(order, x)


@lowering("polygamma", "special_polygamma")
def polygamma(n, self):
    (x,), result = promote(self, kind=Kind.INT_TO_FLOAT)
    return cast(polygamma_values(n, x), result)


@lowering("mvlgamma", "special_multigammaln")
def mvlgamma(self, p):
    (x,), result = promote(self, kind=Kind.INT_TO_FLOAT)
    total = sum(lax.lgamma(x - 0.5 * i) for i in range(p))
    return cast(total + x.dtype.type(p * (p - 1) / 4 * np.log(np.pi)), result)


def _entr(x: Array) -> Array:
    inside = -x * jnp.log(jnp.where(x > 0, x, jnp.ones_like(x)))
    return jnp.where(jnp.isnan(x), x, jnp.where(x > 0, inside, jnp.where(x == 0, 0, -jnp.inf)))


def _ndtr(x: Array) -> Array:
    scaled = x * x.dtype.type(np.sqrt(0.5))
    near = 0.5 + 0.5 * lax.erf(scaled)
    tail = 0.5 * lax.erfc(jnp.abs(scaled))
    return jnp.where(jnp.abs(x) < 1, near, jnp.where(x > 0, 1 - tail, tail))


def _log_ndtr(x: Array) -> Array:
    scaled = x * x.dtype.type(np.sqrt(0.5))
    left = jnp.log(jsp.erfcx(-scaled) * 0.5) - scaled * scaled
    return jnp.where(x < -1, left, jnp.log1p(-0.5 * lax.erfc(scaled)))


def _i0(x: Array) -> Array:
    return jnp.exp(jnp.abs(x)) * lax.bessel_i0e(x)


def _i1(x: Array) -> Array:
    return jnp.exp(jnp.abs(x)) * lax.bessel_i1e(x)


def _spherical_j0(x: Array) -> Array:
    square = x * x
    series = sum(c * square**i for i, c in enumerate((1, -1 / 6, 1 / 120, -1 / 5040, 1 / 362880)))
    usual = jnp.sin(x) / jnp.where(x == 0, jnp.ones_like(x), x)
    return jnp.where(jnp.isinf(x), 0, jnp.where(jnp.abs(x) < 0.5, series, usual))


def _incomplete_gamma(a: Array, x: Array, *, upper: bool) -> Array:
    """Regularised incomplete gamma function; the limits are PyTorch's, where JAX gives NaN for some."""
    a, x = jnp.broadcast_arrays(a, x)
    none, all_ = (1.0, 0.0) if upper else (0.0, 1.0)
    ordinary = (a > 0) & (x > 0) & jnp.isfinite(a) & jnp.isfinite(x)
    value = (lax.igammac if upper else lax.igamma)(jnp.where(ordinary, a, 1), jnp.where(ordinary, x, 1))
    cases = [
        ((x < 0) | (a < 0), jnp.nan),
        (a == 0, jnp.where(x > 0, all_, jnp.nan)),
        (x == 0, none),
        (jnp.isinf(a), jnp.where(jnp.isinf(x), jnp.nan, none)),
        (jnp.isinf(x), all_),
        (jnp.isnan(a) | jnp.isnan(x), jnp.nan),
    ]
    for condition, limit in reversed(cases):
        value = jnp.where(condition, jnp.asarray(limit, x.dtype), value)
    return value


def _erfinv(y: Array) -> Array:
    """XLA's approximation and one step of Newton's method, for PyTorch's accuracy: near 1 what is left counts, so the
    complement is compared there.
    """
    size = jnp.abs(y)
    x = lax.erf_inv(size)
    miss = jnp.where(size < 0.5, lax.erf(x) - size, (1 - size) - lax.erfc(x))
    slope = np.asarray(2 / math.sqrt(math.pi), y.dtype) * jnp.exp(-x * x)
    return jnp.sign(y) * jnp.where(size < 1, x - miss / slope, x)


register_unary(
    Kind.INT_TO_FLOAT,
    {
        "digamma": digamma_values,
        "erf": lax.erf,
        "erfc": lax.erfc,
        "erfinv": _erfinv,
        "i0": _i0,
        "lgamma": lax.lgamma,
        "special_entr": _entr,
        "special_erfcx": jsp.erfcx,
        "special_i0e": lax.bessel_i0e,
        "special_i1": _i1,
        "special_i1e": lax.bessel_i1e,
        "special_log_ndtr": _log_ndtr,
        "special_ndtr": _ndtr,
        "special_ndtri": jsp.ndtri,
        "special_spherical_bessel_j0": _spherical_j0,
    },
)
register_binary(
    Kind.INT_TO_FLOAT,
    {
        "igamma": (("default",), lambda a, x: _incomplete_gamma(a, x, upper=False)),
        "igammac": (("default",), lambda a, x: _incomplete_gamma(a, x, upper=True)),
        "special_zeta": (
            ("default", "self_scalar", "other_scalar"),
            lambda x, q: zeta_values(*jnp.broadcast_arrays(x, q)),
        ),
    },
)
