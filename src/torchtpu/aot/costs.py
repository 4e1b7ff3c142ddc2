"""FLOPs of JAX's primitives, and how each takes part in fusions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

__all__ = ["flops", "is_transcendental", "kind", "nbytes", "passes"]

_ALIASES = {
    *("reshape", "squeeze", "expand_dims", "transpose", "copy", "copy_p", "sharding_constraint", "name", "pvary"),
    *("optimization_barrier", "stop_gradient", "device_put", "bitcast_convert_type", "pbroadcast", "reduce_precision"),
    *("mesh_cast", "reshard", "layout_constraint", "real", "empty", "broadcast_in_dim"),
}
_REDUCTIONS = {
    *("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "reduce_xor", "argmax"),
    *("argmin", "reduce"),
}
_MEMORY = {
    *(
        "gather",
        "sort",
        "top_k",
        "dynamic_update_slice",
        "cumsum",
        "cumprod",
        "cummax",
        "cummin",
        "cumlogsumexp",
        "fft",
    ),
    *("reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min", "select_and_scatter_add"),
    *("select_and_gather_add", "cholesky", "lu", "qr", "householder_product", "geqrf", "eigh", "svd", "eig", "schur"),
    *(
        "triangular_solve",
        "tridiagonal_solve",
        "psum",
        "psum2",
        "psum_invariant",
        "pmax",
        "pmin",
    ),
    *("all_gather", "all_gather_invariant", "all_to_all", "ppermute", "reduce_scatter", "ragged_all_to_all"),
    *("approx_top_k", "pure_callback", "io_callback", "tridiagonal"),
}
_TRANSCENDENTAL = {
    *("exp", "exp2", "expm1", "log", "log1p", "log2", "tanh", "logistic", "sin", "cos", "tan", "asin", "acos", "atan"),
    *("atan2", "sinh", "cosh", "asinh", "acosh", "atanh", "erf", "erfc", "erf_inv", "lgamma", "digamma", "pow", "sqrt"),
    *(
        "rsqrt",
        "cbrt",
        "bessel_i0e",
        "bessel_i1e",
        "igamma",
        "igammac",
        "polygamma",
        "random_gamma",
        "regularized_incomplete_beta",
    ),
}
_NO_WORK = {
    "iota",
    "convert_element_type",
    "slice",
    "dynamic_slice",
    "concatenate",
    "pad",
    "rev",
    "split",
    "gather",
    "sort",
}


def kind(primitive: str) -> str:
    """How a primitive takes part in fusions.

    Returns:
        ``"alias"``: its result is its argument under another shape; ``"mxu"``: a product or convolution;
        ``"reduce"``: fused with what comes before it; ``"memory"``: reads and writes memory by itself;
        ``"fused"``: elementwise, or part of a fusion like it.
    """
    if primitive in _ALIASES:
        return "alias"
    if primitive in ("dot_general", "conv_general_dilated", "ragged_dot_general", "ragged_dot", "scaled_matmul"):
        return "mxu"
    if primitive in _REDUCTIONS:
        return "reduce"
    return "memory" if primitive in _MEMORY or primitive.startswith("scatter") else "fused"


def is_transcendental(primitive: str) -> bool:
    """Whether an elementwise primitive takes more than a few instructions."""
    return primitive in _TRANSCENDENTAL


def nbytes(aval: Any) -> int:
    """Bytes of an array of this type, without padding; 0 for what is no array."""
    dtype = getattr(aval, "dtype", None)
    if dtype is None:
        return 0
    bits = 4 if str(dtype) in ("int4", "uint4", "float4_e2m1fn") else 8 * getattr(dtype, "itemsize", 4)
    return math.prod(aval.shape) * bits // 8


def passes(eqn: Any) -> int:
    """How often the matrix unit, which multiplies bfloat16, goes over a product of float32.

    1 at the default precision, 3 at ``Precision.HIGH`` and 6 at ``Precision.HIGHEST``. Source: ``jax.lax.Precision``.
    A ``DotAlgorithmPreset`` says its number in its name. For other types it is 1.
    """
    if not any(getattr(v.aval, "dtype", None) == np.float32 for v in eqn.invars[:2]):
        return 1
    precision = eqn.params.get("precision")
    chosen = precision if isinstance(precision, tuple) else (precision,)
    return max(_passes_of(p) for p in chosen)


def _passes_of(precision: Any) -> int:
    name = getattr(precision, "name", str(precision))
    if precision in (jax.lax.Precision.HIGH, jax.lax.Precision.HIGHEST):
        return 3 if precision == jax.lax.Precision.HIGH else 6
    if name.endswith(("_X3", "_X6", "_X9")):
        return int(name[-1])
    return {"F32_F32_F32": 6, "TF32_TF32_F32": 3}.get(name, 1)


def flops(eqn: Any) -> float:
    """Multiplications, additions and other operations of one execution of an equation, as the mathematics has them.

    A product counts 2 m k n, a grouped product (``ragged_dot``) as well, with the rows of all groups together. A
    convolution counts its taps, without those that fall on zeros between the elements of a dilated argument. An
    elementwise operation counts 1 for each element, a reduction or cumulative sum 1 for each it reads, a sort
    n log2 n, an FFT 5 n log2 n, a factorisation its leading term.
    """
    primitive = eqn.primitive.name
    if primitive in _FORMULAS:
        return float(_FORMULAS[primitive](eqn))
    if kind(primitive) == "alias" or primitive in _NO_WORK or not eqn.outvars:
        return 0.0
    if kind(primitive) == "reduce" or primitive.startswith(("cum", "scatter", "select_and", "psum", "reduce_scatter")):
        scattered = eqn.invars[2:] if primitive.startswith("scatter-") else eqn.invars[:1]
        return 0.0 if primitive == "scatter" else float(sum(_size(v.aval) for v in scattered))
    if kind(primitive) == "memory":
        return 0.0
    return float(max(_size(v.aval) for v in eqn.outvars))


def _size(aval: Any) -> int:
    return math.prod(getattr(aval, "shape", ()))


def _dot(eqn: Any) -> float:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    return 2 * _size(eqn.outvars[0].aval) * math.prod(eqn.invars[0].aval.shape[i] for i in contracted)


def _ragged_dot(eqn: Any) -> float:
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (_, contracted), (_, batch) = numbers.dot_dimension_numbers
    skipped = {*contracted, *batch, *numbers.rhs_group_dimensions}
    left, right = (v.aval.shape for v in eqn.invars[:2])
    return 2 * math.prod(left) * math.prod(n for i, n in enumerate(right) if i not in skipped)


def _convolution(eqn: Any) -> float:
    layout = eqn.params["dimension_numbers"].rhs_spec  # output features, input features, then the window
    taps = math.prod(eqn.invars[1].aval.shape[i] for i in layout[1:])
    return 2 * _size(eqn.outvars[0].aval) * taps / math.prod(eqn.params["lhs_dilation"])


def _sort(eqn: Any) -> float:
    shape = eqn.invars[0].aval.shape
    return _size(eqn.invars[0].aval) * math.log2(max(2, shape[eqn.params.get("dimension", -1)]))


def _fft(eqn: Any) -> float:
    return 5 * _size(eqn.outvars[0].aval) * math.log2(max(2, math.prod(eqn.params["fft_lengths"])))


def _window(eqn: Any) -> float:
    return _size(eqn.outvars[0].aval) * math.prod(eqn.params["window_dimensions"])


def _matrix(factor: float) -> Callable[[Any], float]:
    """A factorisation of (..., m, n): factor x m x n x min(m, n)."""

    def count(eqn: Any) -> float:
        shape = eqn.invars[0].aval.shape
        return factor * math.prod(shape) * min(shape[-2:])

    return count


def _triangular(eqn: Any) -> float:
    """n^2 for each column solved for."""
    return _size(eqn.outvars[0].aval) * eqn.invars[0].aval.shape[-1]


_FORMULAS: dict[str, Callable[[Any], float]] = {
    "dot_general": _dot,
    "ragged_dot_general": _ragged_dot,
    "conv_general_dilated": _convolution,
    "sort": _sort,
    "top_k": _sort,
    "fft": _fft,
    "reduce_window": _window,
    "reduce_window_sum": _window,
    "reduce_window_max": _window,
    "reduce_window_min": _window,
    "cholesky": _matrix(1 / 3),
    "lu": _matrix(2 / 3),
    "qr": _matrix(4 / 3),
    "geqrf": _matrix(4 / 3),
    "householder_product": _matrix(4 / 3),
    "triangular_solve": _triangular,
}
