"""Orthogonal polynomials of a degree known only on the device, by their three-term recurrences."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from torchtpu.lowering.promotion import Kind, cast, promote
from torchtpu.lowering.registry import lowering

__all__: list[str] = []

Array = jax.Array


def recurrence(x: Array, n: Array, first: Array, step: Callable[[Array, Array, Array], Array]) -> Array:
    """The polynomials P_n(x) with P_0 = 1, P_1 = ``first`` and P_k = ``step(k, P_(k-1), P_(k-2))``; 0 if n < 0."""

    def advance(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        k, before, now = state
        after = step(k.astype(x.dtype), now, before)
        more = (k <= n) & ~jnp.isnan(now)
        return k + 1, jnp.where(more, now, before), jnp.where(more, after, now)

    def unfinished(state: tuple[Array, Array, Array]) -> Array:
        k, _, now = state
        return ((k <= n) & ~jnp.isnan(now)).any()

    one = jnp.ones_like(x)
    _, _, value = lax.while_loop(unfinished, advance, (jnp.asarray(2, n.dtype), one, first))
    return jnp.where(n < 0, 0 * one, jnp.where(n == 0, one, value))


def _degree(n: Array) -> Array:
    """Degrees truncated to integers; what is not finite counts as negative."""
    return jnp.where(jnp.isfinite(n), n, -1).astype(jnp.int64)


def _chebyshev(kind: str, x: Array, n: Array, limit: int) -> Array:
    """The four kinds; within (-1, 1) degrees above ``limit`` use the trigonometric form, which stays accurate."""
    first = {"t": x, "u": 2 * x, "v": 2 * x - 1, "w": 2 * x + 1}[kind]
    inside = (jnp.abs(x) < 1) & (n > limit)
    edge = jnp.abs(x) == 1
    small = jnp.where(inside | edge, jnp.minimum(n, 1), n)
    value = recurrence(x, small, first, lambda k, now, before: 2 * x * now - before)

    m = n.astype(x.dtype)
    angle = jnp.arccos(jnp.where(inside, x, 0.0))
    trigonometric = {
        "t": lambda: jnp.cos(m * angle),
        "u": lambda: jnp.sin((m + 1) * angle) / jnp.sin(angle),
        "v": lambda: jnp.cos((m + 0.5) * angle) / jnp.cos(angle / 2),
        "w": lambda: jnp.sin((m + 0.5) * angle) / jnp.sin(angle / 2),
    }[kind]()
    one = jnp.ones_like(x)
    at_one = {"t": one, "u": m + 1, "v": one, "w": 2 * m + 1}[kind]
    at_minus_one = {"t": one, "u": m + 1, "v": 2 * m + 1, "w": one}[kind]
    at_edge = jnp.where(x > 0, at_one, jnp.where(n % 2 == 0, at_minus_one, -at_minus_one))
    return jnp.where(inside, trigonometric, jnp.where(edge & (n >= 0), at_edge, value))


def _hermite(x: Array, n: Array, scale: int) -> Array:
    """Physicists' (scale 2) or probabilists' (scale 1); degrees beyond PyTorch's limit are NaN."""
    limit = 128 if x.dtype == np.float32 else 512
    value = recurrence(
        x, jnp.minimum(n, limit), scale * x, lambda k, now, before: scale * x * now - scale * (k - 1) * before
    )
    return jnp.where(n > limit, jnp.nan, value)


def _laguerre(x: Array, n: Array) -> Array:
    value = recurrence(x, n, 1 - x, lambda k, now, before: ((2 * (k - 1) + (1 - x)) * now - (k - 1) * before) / k)
    return jnp.where((x == 0) & (n >= 0), 1, value)


def _legendre(x: Array, n: Array) -> Array:
    edge = jnp.abs(x) == 1
    degree = jnp.where(edge, jnp.minimum(n, 1), n)
    value = recurrence(x, degree, x, lambda k, now, before: ((2 * k - 1) * x * now - (k - 1) * before) / k)
    return jnp.where(edge & (n >= 0), jnp.where((x > 0) | (n % 2 == 0), 1, -1), value)


def _shifted(kind: str, limit: int) -> Callable[[Array, Array], Array]:
    return lambda x, n: _chebyshev(kind, x + x - 1, n, limit)


_POLYNOMIALS: dict[str, Callable[[Array, Array], Array]] = {
    "chebyshev_polynomial_t": lambda x, n: _chebyshev("t", x, n, 6),
    "chebyshev_polynomial_u": lambda x, n: _chebyshev("u", x, n, 8),
    "chebyshev_polynomial_v": lambda x, n: _chebyshev("v", x, n, 8),
    "chebyshev_polynomial_w": lambda x, n: _chebyshev("w", x, n, 8),
    "hermite_polynomial_h": lambda x, n: _hermite(x, n, 2),
    "hermite_polynomial_he": lambda x, n: _hermite(x, n, 1),
    "laguerre_polynomial_l": _laguerre,
    "legendre_polynomial_p": _legendre,
    "shifted_chebyshev_polynomial_t": _shifted("t", 6),
    "shifted_chebyshev_polynomial_u": _shifted("u", 6),
    "shifted_chebyshev_polynomial_v": _shifted("v", 6),
    "shifted_chebyshev_polynomial_w": _shifted("w", 4),
}


def _register(name: str, function: Callable[[Array, Array], Array]) -> None:
    @lowering(*(f"special_{name}.{form}" for form in ("default", "x_scalar", "n_scalar")))
    def lower(x, n):
        (x, n), result = promote(x, n, kind=Kind.INT_TO_FLOAT)
        x, n = jnp.broadcast_arrays(x, n)
        return cast(function(x, _degree(n)), result)


for _name, _function in _POLYNOMIALS.items():
    _register(_name, _function)
