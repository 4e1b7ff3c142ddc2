"""Tensors made from sizes and numbers: constants, ranges, windows, triangles, complex numbers from their parts."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import torch

from torchtpu.lowering.conversion import converted
from torchtpu.lowering.dtypes import complex_of, default_float, to_jax
from torchtpu.lowering.promotion import cast, is_number, promote
from torchtpu.lowering.registry import lowering
from torchtpu.lowering.sizes import is_open

_KINDS_OF_NUMBER = {"b": np.dtype(bool), "i": np.dtype(np.int64), "u": np.dtype(np.int64)}


def _default_complex() -> np.dtype:
    return np.dtype(np.complex128 if default_float() == np.float64 else np.complex64)


def _number_dtype(number) -> np.dtype:
    """The dtype PyTorch infers for a tensor filled with this number."""
    kind = jnp.asarray(number).dtype.kind
    return _KINDS_OF_NUMBER.get(kind) or (_default_complex() if kind == "c" else default_float())


def _or_default(dtype: torch.dtype | None) -> np.dtype:
    return default_float() if dtype is None else to_jax(dtype)


@lowering("full")
def full(size, fill_value, dtype=None):
    return jnp.broadcast_to(converted(fill_value, _number_dtype(fill_value) if dtype is None else to_jax(dtype)), size)


@lowering("full_like")
def full_like(self, fill_value, dtype=None, memory_format=None):
    return jnp.broadcast_to(converted(fill_value, self.dtype if dtype is None else to_jax(dtype)), self.shape)


@lowering("new_full")
def new_full(self, size, fill_value, dtype=None):
    return jnp.broadcast_to(converted(fill_value, self.dtype if dtype is None else to_jax(dtype)), size)


def _constants(number: int, sized: tuple[str, ...], like: tuple[str, ...], new: tuple[str, ...]) -> None:
    """Register the operators whose result is one constant everywhere."""

    @lowering(*sized)
    def from_size(size, *strides, dtype=None, memory_format=None):
        return jnp.full(size, number, _or_default(dtype))

    @lowering(*like)
    def from_tensor(self, dtype=None, memory_format=None):
        return jnp.full(self.shape, number, self.dtype if dtype is None else to_jax(dtype))

    @lowering(*new)
    def from_tensor_and_size(self, size, *strides, dtype=None):
        return jnp.full(size, number, self.dtype if dtype is None else to_jax(dtype))


# Memory without a value is zeros: XLA has no uninitialised arrays.
_constants(
    0,
    ("zeros", "empty.memory_format", "empty_strided", "empty_permuted", "_efficientzerotensor"),
    ("zeros_like", "empty_like"),
    ("new_zeros", "new_empty", "new_empty_strided"),
)
_constants(1, ("ones",), ("ones_like",), ("new_ones",))


@lowering("scalar_tensor")
def scalar_tensor(s, dtype=None):
    return cast(s, _or_default(dtype))


@lowering("fill.Scalar", "fill.Tensor")
def fill(self, value):
    """A number must fit into the dtype; a tensor is converted as ``copy_`` does, which wraps."""
    fit = converted if is_number(value) else cast
    return jnp.broadcast_to(fit(value, self.dtype), self.shape)


@lowering("zero")
def zero(self):
    return jnp.zeros_like(self)


def _progression(start, step, count: int, dtype: np.dtype) -> jax.Array:
    """``start + step * i`` for i in [0, count): in integers where exact, else in float64 and rounded once."""
    if dtype.kind in "iub":  # PyTorch truncates the bounds first
        start, step = int(start), int(step)
    last = start + step * max(count - 1, 0)
    if start == int(start) and step == int(step) and max(abs(start), abs(last)) < 2**31:
        return (jnp.arange(count, dtype=jnp.int32) * int(step) + int(start)).astype(dtype)
    wide = jnp.int64 if dtype.kind in "iub" else jnp.float64
    return (jnp.arange(count, dtype=wide) * step + start).astype(dtype)


def _range_dtype(numbers, dtype: torch.dtype | None) -> np.dtype:
    if dtype is not None:
        return to_jax(dtype)
    return np.dtype(np.int64) if all(isinstance(n, int) for n in numbers) else default_float()


def _arange(start, end, step, dtype) -> jax.Array:
    if is_open(start, end):
        count = max((end - start + step - 1) // step, 0)
        return (jnp.arange(count, dtype=jnp.int64) * step + start).astype(to_jax(dtype or torch.int64))
    result = _range_dtype((start, end, step), dtype)
    if result == np.int64:  # the only type for which PyTorch truncates the bounds before it counts
        first, last, by = int(start), int(end), int(step)
        count = -((first - last) // by)
    else:
        count = math.ceil((end - start) / step)
    return _progression(start, step, max(count, 0), result)


@lowering("arange", static=("end",))
def arange(end, dtype=None):
    return _arange(0, end, 1, dtype)


@lowering("arange.start", static=("start", "end"))
def arange_start(start, end, dtype=None):
    return _arange(start, end, 1, dtype)


@lowering("arange.start_step", static=("start", "end", "step"))
def arange_start_step(start, end, step=1, dtype=None):
    return _arange(start, end, step, dtype)


@lowering("range", "range.step", static=("start", "end", "step"))
def closed_range(start, end, step=1, dtype=None):
    return _progression(start, step, math.floor((end - start) / step) + 1, _or_default(dtype))


def evenly_spaced(start, end, steps: int, dtype: np.dtype) -> jax.Array:
    """Evenly spaced points, counted from the nearer end, so that both ends are exact."""
    compute = np.promote_types(dtype, np.float64 if dtype.kind in "iub" else np.float32)
    start, end = (
        cast(cast(x, dtype), compute) for x in (start, end)
    )  # PyTorch rounds the ends to the result's type first
    i = jnp.arange(steps, dtype=jnp.int32)
    # XLA turns division by a constant into a product with its reciprocal, which misses whole numbers.
    intervals = jax.lax.optimization_barrier(jnp.asarray(max(steps - 1, 1), compute))
    step = (end - start) / intervals
    up, down = (cast(n, compute) * step for n in (i, steps - 1 - i))
    return jnp.where(i < steps // 2, start + up, end - down)


def _space_dtype(numbers, dtype: torch.dtype | None) -> np.dtype:
    if dtype is not None:
        return to_jax(dtype)
    return _default_complex() if any(jnp.asarray(n).dtype.kind == "c" for n in numbers) else default_float()


_ENDS = ("default", "Tensor_Tensor", "Tensor_Scalar", "Scalar_Tensor")


@lowering(*(f"linspace.{ends}" for ends in _ENDS))
def linspace(start, end, steps, dtype=None):
    result = _space_dtype((start, end), dtype)
    if steps == 1:
        return cast(start, result).reshape(1)
    return cast(evenly_spaced(start, end, steps, result), result)


@lowering(*(f"logspace.{ends}" for ends in _ENDS))
def logspace(start, end, steps, base=10.0, dtype=None):
    result = _space_dtype((start, end), dtype)
    exponents = jnp.asarray(start).reshape(1) if steps == 1 else evenly_spaced(start, end, steps, result)
    compute = np.promote_types(exponents.dtype, np.float64 if result.kind in "iub" else np.float32)
    return cast(jnp.power(cast(base, compute), cast(exponents, compute)), result)


@lowering("eye", "eye.m")
def eye(n, m=None, dtype=None):
    return jnp.eye(n, m, dtype=_or_default(dtype))


@lowering("tril")
def tril(self, diagonal=0):
    return jnp.tril(self, diagonal)


@lowering("triu")
def triu(self, diagonal=0):
    return jnp.triu(self, diagonal)


@lowering("tril_indices")
def tril_indices(row, col, offset=0, dtype=torch.int64):
    return jnp.asarray(np.stack(np.tril_indices(row, offset, col)), to_jax(dtype))


@lowering("triu_indices")
def triu_indices(row, col, offset=0, dtype=torch.int64):
    return jnp.asarray(np.stack(np.triu_indices(row, offset, col)), to_jax(dtype))


def _window(length: int, periodic: bool, dtype: torch.dtype | None, formula) -> jax.Array:
    """A window as a constant: ``formula`` maps positions in [0, 1] to weights."""
    intervals = length if periodic else length - 1
    weights = formula(np.arange(length) / intervals) if length > 1 else np.ones(length)
    return jnp.asarray(weights, _or_default(dtype))


@lowering("hann_window", "hann_window.periodic")
def hann_window(window_length, periodic=True, dtype=None):
    return _window(window_length, periodic, dtype, lambda t: 0.5 - 0.5 * np.cos(2 * np.pi * t))


@lowering(
    *(f"hamming_window.{o}" for o in ("default", "periodic", "periodic_alpha", "periodic_alpha_beta")),
    static=("alpha", "beta"),
)
def hamming_window(window_length, periodic=True, alpha=0.54, beta=0.46, dtype=None):
    return _window(window_length, periodic, dtype, lambda t: alpha - beta * np.cos(2 * np.pi * t))


@lowering("blackman_window", "blackman_window.periodic")
def blackman_window(window_length, periodic=True, dtype=None):
    def blackman(t):
        return 0.42 - 0.5 * np.cos(2 * np.pi * t) + 0.08 * np.cos(4 * np.pi * t)

    return _window(window_length, periodic, dtype, blackman)


@lowering("bartlett_window", "bartlett_window.periodic")
def bartlett_window(window_length, periodic=True, dtype=None):
    return _window(window_length, periodic, dtype, lambda t: 1 - np.abs(2 * t - 1))


@lowering("kaiser_window", "kaiser_window.periodic", "kaiser_window.beta", static=("beta",))
def kaiser_window(window_length, periodic=True, beta=12.0, dtype=None):
    def kaiser(t):
        return np.i0(beta * np.sqrt(np.maximum(1 - (2 * t - 1) ** 2, 0))) / np.i0(beta)

    return _window(window_length, periodic, dtype, kaiser)


@lowering("complex")
def complex_(real, imag):
    return complex_of(*jnp.broadcast_arrays(real, imag))


@lowering("polar")
def polar(abs, angle):
    (radius, phase), _ = promote(abs, angle)
    return jax.lax.complex(radius * jnp.cos(phase), radius * jnp.sin(phase))
