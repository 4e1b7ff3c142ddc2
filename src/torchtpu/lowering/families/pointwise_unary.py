"""Elementwise operators of one argument: arithmetic, rounding, exponentials, trigonometry, predicates."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from torchtpu.lowering.dtypes import default_float
from torchtpu.lowering.promotion import Kind, cast, promote
from torchtpu.lowering.registry import lowering

__all__ = ["exp2", "register_unary", "sign"]

Array = jax.Array
LOG2E, LN2 = 1.4426950408889634, 0.6931471805599453


def register_unary(kind: Kind, table: dict[str, Callable[[Array], Array]]) -> None:
    """Register ``name(self)`` for a table's entries: computed in the kind's compute dtype, rounded once."""

    def make(f: Callable[[Array], Array]) -> Callable[[Array], Array]:
        def lower(self):
            (x,), result = promote(self, kind=kind)
            return cast(f(x), result)

        return lower

    for name, f in table.items():
        lowering(name)(make(f))


def is_integral(x: Array) -> bool:
    """True for integers and bool."""
    return np.dtype(x.dtype).kind in "biu"


def sign(x: Array) -> Array:
    """-1, 0 or 1 (0 for NaN, as PyTorch's ``sign``); ``x / |x|`` for complex numbers."""
    if jnp.iscomplexobj(x):
        size = jnp.abs(x)
        return jnp.where(size == 0, jnp.zeros_like(x), x / jnp.where(size == 0, jnp.ones_like(size), size))
    if x.dtype == np.bool_:
        return x
    zero, one = jnp.zeros_like(x), jnp.ones_like(x)
    return jnp.where(x > 0, one, jnp.where(x < 0, zero - one, zero))


def _times(x: Array, factor: float) -> Array:
    """A real multiple; of each part for complex numbers, so that an infinite part leaves the other alone."""
    if jnp.iscomplexobj(x):
        return lax.complex(x.real * x.real.dtype.type(factor), x.imag * x.imag.dtype.type(factor))
    return x * x.dtype.type(factor)


def _cosh(x: Array) -> Array:
    """By exp(|x| / 2) squared, which neither overflows early nor loses bits as exp(|x| - log 2) does."""
    if jnp.iscomplexobj(x):
        return jnp.cosh(x)
    root = jnp.exp(jnp.abs(x) * 0.5)
    return root * (0.5 * root) + 0.5 / (root * root)


def _sinh(x: Array) -> Array:
    if jnp.iscomplexobj(x):
        return jnp.sinh(x)
    root = jnp.exp(jnp.abs(x) * 0.5)
    return jnp.where(jnp.abs(x) < 1, jnp.sinh(x), jnp.copysign(root * (0.5 * root) - 0.5 / (root * root), x))


def exp2(x: Array) -> Array:
    """``2 ** x``; the whole part goes into the exponent, where exp(x ln 2) would lose its bits to rounding."""
    if jnp.iscomplexobj(x):
        return jnp.exp(_times(x, LN2))
    whole = jnp.round(x)
    limit = 2.0 * np.finfo(x.dtype).maxexp
    steps = jnp.clip(jnp.where(jnp.isfinite(x), whole, 0.0), -limit, limit).astype(jnp.int32)
    near = jnp.exp(jnp.where(jnp.isfinite(x), x - whole, x) * x.dtype.type(LN2))
    half = steps // 2
    return jnp.ldexp(jnp.ldexp(near, half), steps - half)


def _angle(x: Array) -> Array:
    if jnp.iscomplexobj(x):
        return jnp.arctan2(x.imag, x.real)
    return jnp.where(jnp.isnan(x), x, jnp.where(x < 0, x.dtype.type(np.pi), x.dtype.type(0)))


def _bool_or(f: Callable[[Array], Array], value: bool) -> Callable[[Array], Array]:
    """A predicate of floating-point classes, which is constant for integers."""

    def predicate(x: Array) -> Array:
        return jnp.full(x.shape, value) if is_integral(x) else f(x)

    return predicate


def _unless_integral(f: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """Rounding: nothing to do for integers."""
    return lambda x: x if is_integral(x) else f(x)


def _sinc(x: Array) -> Array:
    scaled = jnp.where(x == 0, jnp.ones_like(x), x * x.dtype.type(np.pi))
    return jnp.where(x == 0, jnp.ones_like(x), jnp.sin(scaled) / scaled)


def _log2(x: Array) -> Array:
    """Exact at powers of two, which ``log(x) / log(2)`` is not."""
    if jnp.iscomplexobj(x):
        return _times(jnp.log(x), LOG2E)
    mantissa, exponent = jnp.frexp(x)
    small = mantissa < np.sqrt(0.5)
    mantissa, exponent = jnp.where(small, mantissa * 2, mantissa), jnp.where(small, exponent - 1, exponent)
    usual = jnp.log(mantissa) * x.dtype.type(LOG2E) + exponent.astype(x.dtype)
    return jnp.where((x > 0) & jnp.isfinite(x), usual, jnp.log(x))


def _frac(x: Array) -> Array:
    return x - jnp.trunc(x)


register_unary(
    Kind.INT_TO_FLOAT,
    {
        "acos": jnp.arccos,
        "acosh": jnp.arccosh,
        "asin": jnp.arcsin,
        "asinh": jnp.arcsinh,
        "atan": jnp.arctan,
        "atanh": jnp.arctanh,
        "cos": jnp.cos,
        "cosh": _cosh,
        "deg2rad": lambda x: x * x.dtype.type(np.pi / 180),
        "exp": jnp.exp,
        "exp2": exp2,
        "expm1": jnp.expm1,
        "log": jnp.log,
        "log10": lambda x: _times(jnp.log(x), 1 / np.log(10.0)),
        "log1p": jnp.log1p,
        "log2": _log2,
        "rad2deg": lambda x: x * x.dtype.type(180 / np.pi),
        "reciprocal": lambda x: x.dtype.type(1) / x,
        "rsqrt": lambda x: x.dtype.type(1) / jnp.sqrt(x),
        "sigmoid": lax.logistic,
        "sin": jnp.sin,
        "sinc": _sinc,
        "sinh": _sinh,
        "sqrt": jnp.sqrt,
        "tan": jnp.tan,
        "tanh": jnp.tanh,
    },
)
register_unary(
    Kind.DEFAULT,
    {
        "_conj_physical": jnp.conj,
        "bitwise_not": jnp.bitwise_not,
        "ceil": _unless_integral(jnp.ceil),
        "conj_physical": jnp.conj,
        "floor": _unless_integral(jnp.floor),
        "frac": _frac,
        "neg": jnp.negative,
        "positive": lambda x: x,
        "round": _unless_integral(jnp.round),
        "sgn": sign,
        "sign": sign,
        "trunc": _unless_integral(jnp.trunc),
    },
)
register_unary(
    Kind.ALWAYS_BOOL,
    {
        "isfinite": _bool_or(jnp.isfinite, True),
        "isinf": _bool_or(jnp.isinf, False),
        "isnan": _bool_or(jnp.isnan, False),
        "isneginf": _bool_or(jnp.isneginf, False),
        "isposinf": _bool_or(jnp.isposinf, False),
        "logical_not": lambda x: x == 0,
        "signbit": lambda x: x < 0 if is_integral(x) and x.dtype != np.bool_ else _bool_or(jnp.signbit, False)(x),
    },
)
register_unary(Kind.COMPLEX_TO_FLOAT, {"abs": lambda x: x if x.dtype == np.bool_ else jnp.abs(x)})


@lowering("angle")
def angle(self):
    x = cast(self, default_float()) if is_integral(self) else self
    (x,), result = promote(x, kind=Kind.COMPLEX_TO_FLOAT)
    return cast(_angle(x), result)


@lowering("round.decimals")
def round_decimals(self, *, decimals):
    if is_integral(self) or decimals == 0:
        return self if is_integral(self) else jnp.round(self)
    (x,), result = promote(self)
    scale = x.dtype.type(10.0 ** abs(decimals))
    return cast(jnp.round(x * scale) / scale if decimals > 0 else jnp.round(x / scale) * scale, result)


@lowering("nan_to_num")
def nan_to_num(self, nan=None, posinf=None, neginf=None):
    if is_integral(self):
        return self
    if jnp.iscomplexobj(self):
        return lax.complex(nan_to_num(self.real, nan, posinf, neginf), nan_to_num(self.imag, nan, posinf, neginf))
    limits = jnp.finfo(self.dtype)
    nan, posinf, neginf = (
        cast(default if given is None else given, self.dtype)
        for given, default in ((nan, 0.0), (posinf, limits.max), (neginf, limits.min))
    )
    x = jnp.where(jnp.isnan(self), nan, self)
    return jnp.where(self == jnp.inf, posinf, jnp.where(self == -jnp.inf, neginf, x))


@lowering("frexp.Tensor")
def frexp(self):
    (x,), result = promote(self)
    mantissa, exponent = jnp.frexp(x)
    return cast(mantissa, result), cast(exponent, np.dtype(np.int32))


@lowering("logit")
def logit(self, eps=None):
    (x,), result = promote(self, kind=Kind.INT_TO_FLOAT)
    if eps is not None:
        eps = cast(eps, x.dtype)
        x = jnp.minimum(jnp.maximum(x, eps), 1 - eps)
    return cast(jnp.log(x / (1 - x)), result)


@lowering("square")
def square(self):
    x = cast(self, np.dtype(np.int64)) if self.dtype == np.bool_ else self
    (x,), result = promote(x)
    return cast(x * x, result)


@lowering("real")
def real(self):
    return jnp.real(self)


@lowering("imag")
def imag(self):
    return jnp.imag(self)
