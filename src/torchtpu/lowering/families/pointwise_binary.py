"""Elementwise operators of two arguments: arithmetic, powers, comparison, logic, bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from torchtpu.lowering.families.pointwise_unary import exp2, is_integral
from torchtpu.lowering.promotion import Kind, cast, dtypes, is_number, promote
from torchtpu.lowering.registry import lowering

__all__ = ["register_binary"]

Array = jax.Array


def register_binary(kind: Kind, table: dict[str, tuple[tuple[str, ...], Callable[[Array, Array], Array]]]) -> None:
    """Register ``name(self, other)``: a table of name -> (overload names, function in the compute dtype)."""

    def make(f: Callable[[Array, Array], Array]) -> Callable[[Any, Any], Array]:
        def lower(self, other):
            (x, y), result = promote(self, other, kind=kind)
            return cast(f(x, y), result)

        return lower

    for name, (forms, f) in table.items():
        lowering(*(f"{name}.{form}" for form in forms))(make(f))


def common(*args: Any) -> list[Array]:
    """The arguments in their common dtype, for operators that do not round and so need no wider compute dtype."""
    _, dtype = dtypes(*args)
    return [cast(x, dtype) for x in args]


def scaled(y: Array, alpha: Any) -> Array:
    """``alpha * y`` in the dtype of ``y``."""
    return y if isinstance(alpha, int) and alpha == 1 else y * cast(alpha, y.dtype)


@lowering("add.Tensor", "add.Scalar")
def add(self, other, alpha=1):
    (x, y), result = promote(self, other)
    return cast(x + scaled(y, alpha), result)


def _subtractable(*args: Any) -> None:
    """PyTorch's rule (``at::native::sub_check``): booleans are not subtracted.

    Raises:
        RuntimeError: an argument is boolean.
    """
    booleans = sum(isinstance(a, bool) or getattr(a, "dtype", None) == np.bool_ for a in args)
    if booleans == len(args):
        raise RuntimeError(
            "Subtraction, the `-` operator, with two bool tensors is not supported. "
            "Use the `^` or `logical_xor()` operator instead."
        )
    if booleans:
        raise RuntimeError(
            "Subtraction, the `-` operator, with a bool tensor is not supported. "
            "If you are trying to invert a mask, use the `~` or `logical_not()` operator instead."
        )


@lowering("sub.Tensor", "sub.Scalar")
def sub(self, other, alpha=1):
    _subtractable(self, other)
    (x, y), result = promote(self, other)
    return cast(x - scaled(y, alpha), result)


@lowering("rsub.Tensor", "rsub.Scalar")
def rsub(self, other, alpha=1):
    _subtractable(self, other)
    (x, y), result = promote(self, other)
    return cast(y - scaled(x, alpha), result)


@lowering("_add_relu.Tensor", "_add_relu.Scalar")
def add_relu(self, other, alpha=1):
    (x, y), result = promote(self, other)
    z = x + scaled(y, alpha)
    return cast(jnp.maximum(z, jnp.zeros_like(z)), result)


def safe_divisor(y: Array) -> Array:
    """Integers: 1 where the divisor is 0, whose quotient XLA leaves to the platform."""
    return jnp.where(y == 0, jnp.ones_like(y), y)


def floor_divide_values(x: Array, y: Array) -> Array:
    """Quotient rounded towards minus infinity, by PyTorch's formula: exact for integers, x / y where y is 0."""
    if x.dtype == np.bool_ or np.dtype(x.dtype).kind == "u":
        return lax.div(x, safe_divisor(y))
    if is_integral(x):
        y = safe_divisor(y)
        quotient = lax.div(x, y)
        return jnp.where((lax.rem(x, y) != 0) & ((x < 0) != (y < 0)), quotient - 1, quotient)
    rest = lax.rem(x, y)
    quotient = (x - rest) / y
    quotient = jnp.where((rest != 0) & ((y < 0) != (rest < 0)), quotient - 1, quotient)
    whole = jnp.floor(quotient)
    whole = jnp.where(quotient - whole > 0.5, whole + 1, whole)
    return jnp.where(y == 0, x / y, jnp.where(quotient == 0, jnp.copysign(jnp.zeros_like(x), x / y), whole))


def trunc_divide_values(x: Array, y: Array) -> Array:
    """Quotient rounded towards zero."""
    return lax.div(x, safe_divisor(y)) if is_integral(x) else jnp.trunc(x / y)


def fmod_values(x: Array, y: Array) -> Array:
    """Remainder with the sign of ``x``."""
    return lax.rem(x, safe_divisor(y)) if is_integral(x) else lax.rem(x, y)


def remainder_values(x: Array, y: Array) -> Array:
    """Remainder with the sign of ``y``."""
    rest = fmod_values(x, y)
    if np.dtype(x.dtype).kind in "bu":
        return rest
    return jnp.where((rest != 0) & ((y < 0) != (rest < 0)), rest + y, rest)


@lowering("div.Tensor", "div.Scalar", "div.Tensor_mode", "div.Scalar_mode")
def div(self, other, *, rounding_mode=None):
    (x, y), result = promote(self, other, kind=Kind.DEFAULT if rounding_mode else Kind.INT_TO_FLOAT)
    functions = {None: lax.div, "trunc": trunc_divide_values, "floor": floor_divide_values}
    return cast(functions[rounding_mode](*jnp.broadcast_arrays(x, y)), result)


def _hypot(x: Array, y: Array) -> Array:
    infinite = jnp.isinf(x) | jnp.isinf(y)
    return jnp.where(infinite, jnp.full_like(x, jnp.inf), jnp.hypot(x, y))


def _logaddexp2(x: Array, y: Array) -> Array:
    top, low = jnp.maximum(x, y), jnp.minimum(x, y)
    log2e = x.dtype.type(np.log2(np.e))
    usual = top + jnp.log1p(exp2(low - top)) * log2e
    return jnp.where(jnp.isinf(x) & (x == y), x, usual)


def _logaddexp(x: Array, y: Array) -> Array:
    if not jnp.iscomplexobj(x):
        return jnp.logaddexp(x, y)
    # torch orders complex numbers by their real parts, and by the imaginary ones when those are equal
    first = (x.real > y.real) | ((x.real == y.real) & (x.imag > y.imag))
    top, low = jnp.where(first, x, y), jnp.where(first, y, x)
    return jnp.where(jnp.isinf(x.real) & (x.real == y.real) & (x == y), x, top + jnp.log1p(jnp.exp(low - top)))


def _xlogy(x: Array, y: Array, log: Callable[[Array], Array] = jnp.log) -> Array:
    usual = jnp.where(x == 0, jnp.zeros_like(x), x * log(y))
    return jnp.where(jnp.isnan(y), jnp.full_like(y, jnp.nan), usual)


def _gcd(x: Array, y: Array) -> Array:
    """Euclid's algorithm on all elements at once (``jnp.gcd`` never ends for the smallest negative number)."""

    def step(state: tuple[Array, Array]) -> tuple[Array, Array]:
        a, b = state
        return jnp.where(b != 0, b, a), jnp.where(b != 0, lax.rem(a, safe_divisor(b)), b)

    a, b = jnp.broadcast_arrays(x, y)
    divisor, _ = lax.while_loop(lambda s: (s[1] != 0).any(), step, (a, b))
    return divisor if np.dtype(divisor.dtype).kind in "bu" else jnp.abs(divisor)


def _lcm(x: Array, y: Array) -> Array:
    x, y = jnp.broadcast_arrays(x, y)
    product = lax.div(x, safe_divisor(_gcd(x, y))) * y
    return product if np.dtype(x.dtype).kind in "bu" else jnp.abs(product)


def _heaviside(x: Array, y: Array) -> Array:
    if x.dtype == np.bool_:
        return x | y
    return jnp.where(x == 0, y, (x > 0).astype(x.dtype))


def _fmax(x: Array, y: Array) -> Array:
    return jnp.where(jnp.isnan(y) | (x >= y), x, y)


def _fmin(x: Array, y: Array) -> Array:
    return jnp.where(jnp.isnan(y) | (x <= y), x, y)


def _mul(x: Array, y: Array) -> Array:
    return x * y


def _full(f: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    """For ``lax`` functions, which do not broadcast."""
    return lambda x, y: f(*jnp.broadcast_arrays(x, y))


_TENSOR, _NUMBER = ("default",), ("Tensor", "Scalar")
register_binary(
    Kind.DEFAULT,
    {
        "floor_divide": (("default", "Scalar"), _full(floor_divide_values)),
        "fmod": (_NUMBER, _full(fmod_values)),
        "mul": (_NUMBER, _mul),
        "remainder": (("Tensor", "Scalar", "Scalar_Tensor"), _full(remainder_values)),
        "hypot": (_TENSOR, _hypot),
        "logaddexp": (_TENSOR, _logaddexp),
        "logaddexp2": (_TENSOR, _logaddexp2),
    },
)
register_binary(
    Kind.INT_TO_FLOAT,
    {
        "atan2": (_TENSOR, jnp.arctan2),
        "copysign": (_NUMBER, jnp.copysign),
        "special_xlog1py": (("default", "self_scalar", "other_scalar"), lambda x, y: _xlogy(x, y, jnp.log1p)),
        "xlogy": (("Tensor", "Scalar_Self", "Scalar_Other"), _xlogy),
    },
)


def _register_exact(table: dict[str, tuple[tuple[str, ...], Callable[[Array, Array], Array]]]) -> None:
    """As ``register_binary``, for functions that do not round: the result is a bool or of the common dtype."""

    def make(f: Callable[[Array, Array], Array]) -> Callable[[Any, Any], Array]:
        return lambda self, other: f(*common(self, other))

    for name, (forms, f) in table.items():
        lowering(*(f"{name}.{form}" for form in forms))(make(f))


def _left(x: Array, y: Array) -> Array:
    """Shift left; a count that is negative or no smaller than the width gives 0."""
    return lax.shift_left(*jnp.broadcast_arrays(x, y))


def _right(x: Array, y: Array) -> Array:
    """Arithmetic shift right (logical for unsigned integers); a count out of range leaves only the sign."""
    x, y = jnp.broadcast_arrays(x, y)
    unsigned = np.dtype(x.dtype).kind == "u"
    return lax.shift_right_logical(x, y) if unsigned else lax.shift_right_arithmetic(x, y)


_BITS = ("Tensor", "Scalar", "Scalar_Tensor")
_SHIFTS = ("Tensor", "Tensor_Scalar", "Scalar_Tensor")
_register_exact(
    {
        "eq": (_NUMBER, jnp.equal),
        "ne": (_NUMBER, jnp.not_equal),
        "lt": (_NUMBER, jnp.less),
        "le": (_NUMBER, jnp.less_equal),
        "gt": (_NUMBER, jnp.greater),
        "ge": (_NUMBER, jnp.greater_equal),
        "maximum": (_TENSOR, jnp.maximum),
        "minimum": (_TENSOR, jnp.minimum),
        "fmax": (_TENSOR, _fmax),
        "fmin": (_TENSOR, _fmin),
        "bitwise_and": (_BITS, jnp.bitwise_and),
        "bitwise_or": (_BITS, jnp.bitwise_or),
        "bitwise_xor": (_BITS, jnp.bitwise_xor),
        "bitwise_left_shift": (_SHIFTS, _left),
        "bitwise_right_shift": (_SHIFTS, _right),
        "__lshift__": (_NUMBER, _left),
        "__rshift__": (_NUMBER, _right),
        "gcd": (_TENSOR, _gcd),
        "lcm": (_TENSOR, _lcm),
        "nextafter": (_TENSOR, _full(lax.nextafter)),
    }
)


@lowering("heaviside")
def heaviside(self, values):
    return _heaviside(*common(self, values))


@lowering("logical_and")
def logical_and(self, other):
    return (self != 0) & (other != 0)


@lowering("logical_or")
def logical_or(self, other):
    return (self != 0) | (other != 0)


@lowering("logical_xor")
def logical_xor(self, other):
    return (self != 0) ^ (other != 0)


@lowering("ldexp.Tensor")
def ldexp(self, other):
    return _multiply(self, power(2.0, other))


def _multiply(self: Any, other: Any) -> Array:
    (x, y), result = promote(self, other)
    return cast(x * y, result)


def integer_power(x: Array, y: Array) -> Array:
    """Integers by repeated squaring; a negative exponent gives what PyTorch gives: 1 / x rounded towards zero."""
    base, exponent = jnp.broadcast_arrays(x, y)
    one = jnp.ones_like(base)

    def step(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        total, square, left = state
        return jnp.where(left & 1 == 1, total * square, total), square * square, left >> 1

    start = (one, base, jnp.maximum(exponent, 0))
    positive, _, _ = lax.while_loop(lambda s: (s[2] > 0).any(), step, start)
    if np.dtype(x.dtype).kind == "u":
        return positive
    odd = jnp.where(exponent & 1 == 1, -one, one)
    inverse = jnp.where(base == 1, one, jnp.where(base == -1, odd, 0))
    return jnp.where(exponent < 0, inverse, positive)


def power_values(x: Array, y: Array) -> Array:
    """``x ** y`` for operands of one dtype."""
    if is_integral(x):
        return integer_power(x, y)
    if not jnp.iscomplexobj(x):
        return lax.pow(*jnp.broadcast_arrays(x, y))
    zero = jnp.where(y == 0, jnp.ones_like(y), jnp.where(y.real > 0, jnp.zeros_like(y), jnp.full_like(y, jnp.nan)))
    return jnp.where(x == 0, zero, lax.pow(*jnp.broadcast_arrays(x, y)))


@lowering("pow.Tensor_Tensor", "pow.Scalar")
def power(self, exponent):
    (x, y), result = promote(self, exponent)
    return cast(power_values(x, y), result)


_POWERS: dict[float, Callable[[Array], Array]] = {
    0.0: jnp.ones_like,
    1.0: lambda x: x,
    2.0: lambda x: x * x,
    3.0: lambda x: x * x * x,
    0.5: jnp.sqrt,
    -0.5: lambda x: 1 / jnp.sqrt(x),
    -1.0: lambda x: 1 / x,
    -2.0: lambda x: 1 / (x * x),
}


@lowering("pow.Tensor_Scalar", static=("exponent",))
def power_of_number(self, exponent):
    if is_number(exponent) and not isinstance(exponent, jax.Array | complex) and float(exponent) in _POWERS:
        (x, _), result = promote(self, exponent)
        if not is_integral(x) or exponent >= 0:
            return cast(_POWERS[float(exponent)](x), result)
    return power(self, exponent)


@lowering("float_power.Tensor_Tensor", "float_power.Scalar", "float_power.Tensor_Scalar")
def float_power(self, exponent):
    complex_ = jnp.iscomplexobj(self) or jnp.iscomplexobj(exponent)
    wide = np.dtype(np.complex128 if complex_ else np.float64)
    return power_values(*jnp.broadcast_arrays(cast(self, wide), cast(exponent, wide)))


@lowering("isclose")
def isclose(self, other, rtol=1e-05, atol=1e-08, equal_nan=False):
    (x, y) = (cast(v, v.dtype) for v in common(self, other))
    same = x == y
    if equal_nan and not is_integral(x):
        same = same | (jnp.isnan(x) & jnp.isnan(y))
    if is_integral(x):
        x, y = x.astype(jnp.float64), y.astype(jnp.float64)
    real = jnp.abs(y).dtype
    allowed = cast(atol, real) + jnp.abs(cast(rtol, real) * y)
    distance = jnp.abs(x - y)
    return same | (jnp.isfinite(distance) & (distance <= allowed))
