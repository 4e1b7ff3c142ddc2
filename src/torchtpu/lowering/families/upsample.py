"""Resampling on a regular grid: nearest, linear, cubic and Lanczos interpolation, with and without antialiasing.

Sizes and scales are constants of the program, so each dimension is a table of (positions, weights) computed on the
host, applied one dimension after the other. The gradient applies the transposed table: a gather too, never a scatter.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from torchtpu.lowering.precision import accumulator
from torchtpu.lowering.promotion import cast
from torchtpu.lowering.registry import lowering


@dataclass(frozen=True)
class Table:
    """``out[i] = sum_j weights[i, j] * x[positions[i, j]]`` where ``inside[i, j]``."""

    positions: np.ndarray
    weights: np.ndarray
    inside: np.ndarray

    def transposed(self, size: int) -> Table:
        """The table of the gradient with respect to an input of ``size`` elements."""
        out, _ = np.nonzero(self.inside)
        source, weight = self.positions[self.inside], self.weights[self.inside]
        order = np.argsort(source, kind="stable")
        source, out, weight = source[order], out[order], weight[order]
        counts = np.bincount(source, minlength=size)
        column = np.arange(len(source)) - np.repeat(np.cumsum(counts) - counts, counts)
        width = max(1, int(counts.max(initial=0)))
        positions, inside = np.zeros((size, width), np.int64), np.zeros((size, width), bool)
        weights = np.zeros((size, width), self.weights.dtype)
        positions[source, column], weights[source, column], inside[source, column] = out, weight, True
        return Table(positions, weights, inside)


def _apply(x, table: Table, axis: int):
    shape = [-1 if a == axis else 1 for a in range(x.ndim)]
    total = None
    for j in range(table.positions.shape[1]):
        term = jnp.take(x, jnp.asarray(table.positions[:, j], jnp.int32), axis=axis)
        if not (table.weights[:, j] == 1).all():
            term = term * jnp.asarray(table.weights[:, j], x.dtype).reshape(shape)
        if not table.inside[:, j].all():
            term = jnp.where(table.inside[:, j].reshape(shape), term, jnp.zeros((), x.dtype))
        total = term if total is None else total + term
    return total


def _apply_uint8(x, table: Table, axis: int):
    """One pass over uint8 with PyTorch's fixed-point weights, rounded to uint8: bit-exact with its CPU kernels."""
    weights = np.where(table.inside, table.weights, 0).astype(np.float64)
    bits = 0
    while bits < 22 and int(0.5 + weights.max(initial=0) * (1 << (bits + 1))) < (1 << 15):
        bits += 1
    fixed = np.trunc(weights * (1 << bits) + np.where(weights < 0, -0.5, 0.5))
    total = _apply(cast(x, jnp.int32), Table(table.positions, fixed.astype(np.int32), table.inside), axis)
    half = 1 << (bits - 1) if bits else 0
    return cast(jnp.clip((total + jnp.int32(half)) >> bits, 0, 255), jnp.uint8)


def _scale(size: int, out: int, align: bool, factor: float | None, dtype) -> np.floating:
    """Input elements per output element, in the arithmetic of PyTorch's kernel."""
    if align:
        return dtype(size - 1) / dtype(out - 1) if out > 1 else dtype(0)
    return dtype(1.0 / factor) if factor is not None and factor > 0 else dtype(size) / dtype(out)


def _nearest(size, out, align, factor, dtype, exact=False):
    scale = _scale(size, out, False, factor, np.float32)
    i = np.arange(out, dtype=np.float32) + np.float32(0.5 if exact else 0)
    at = np.minimum(np.floor(i * scale).astype(np.int64), size - 1)[:, None]
    return at, np.ones(at.shape, dtype)


def _nearest_exact(*args):
    return _nearest(*args, exact=True)


def _source(size, out, align, factor, dtype, cubic=False):
    """The real-valued input coordinate of each output element."""
    scale, i = _scale(size, out, align, factor, dtype), np.arange(out, dtype=dtype)
    if align:
        return i * scale
    at = (i + dtype(0.5)) * scale - dtype(0.5)
    return at if cubic else np.maximum(at, dtype(0))


def _linear(size, out, align, factor, dtype):
    at = _source(size, out, align, factor, dtype)
    low = np.minimum(at.astype(np.int64), size - 1)
    weight = np.clip(at - low.astype(dtype), 0, 1)
    return np.stack([low, np.minimum(low + 1, size - 1)], 1), np.stack([1 - weight, weight], 1)


def _cubic_kernel(x, a):
    x = np.abs(x)
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    return np.where(x < 1, near, np.where(x < 2, far, 0))


def _cubic(size, out, align, factor, dtype):
    at = _source(size, out, align, factor, dtype, cubic=True)
    low = np.floor(at)
    offsets = np.arange(-1, 3)
    weights = _cubic_kernel((at - low)[:, None] - offsets.astype(dtype), dtype(-0.75))
    return np.clip(low.astype(np.int64)[:, None] + offsets, 0, size - 1), weights.astype(dtype)


def _sinc(x):
    return np.sinc(x)


_FILTERS: dict[str, tuple[float, Callable]] = {
    "linear": (1.0, lambda x: np.maximum(1 - np.abs(x), 0)),
    "cubic": (2.0, lambda x: _cubic_kernel(x, -0.5)),
    "lanczos": (3.0, lambda x: np.where(np.abs(x) < 3, _sinc(x) * _sinc(x / 3), 0)),
}


def _antialiased(name: str):
    reach, kernel = _FILTERS[name]

    def table(size, out, align, factor, dtype):
        scale = _scale(size, out, align, factor, dtype)
        support = dtype(reach) * max(scale, dtype(1))
        inverse = dtype(1) / scale if scale >= 1 else dtype(1)
        center = scale * (np.arange(out, dtype=dtype) + dtype(0.5))
        low = np.maximum((center - support + dtype(0.5)).astype(np.int64), 0)
        high = np.minimum((center + support + dtype(0.5)).astype(np.int64), size)
        width = max(1, int((high - low).max(initial=0)))
        at = low[:, None] + np.arange(width)
        inside = at < high[:, None]
        weights = kernel((at.astype(dtype) - center[:, None] + dtype(0.5)) * inverse)
        weights = np.where(inside, weights, 0).astype(dtype)
        total = weights.sum(1, keepdims=True)
        weights = weights / np.where(total == 0, 1, total)
        return np.minimum(at, size - 1), weights.astype(dtype), inside

    return table


def _tables(make, sizes, outs, align, factors, dtype) -> list[Table]:
    tables = []
    for size, out, factor in zip(sizes, outs, factors, strict=True):
        positions, weights, *inside = make(size, out, align, factor, dtype)
        tables.append(Table(positions, weights, inside[0] if inside else np.ones(positions.shape, bool)))
    return tables


def _identity(table: Table, size: int) -> bool:
    same = table.positions.shape == (size, 1) and (table.positions[:, 0] == np.arange(size)).all()
    return bool(same and (table.weights == 1).all() and table.inside.all())


def _work_dtype(x) -> np.dtype:
    return accumulator(x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else np.dtype(np.float32)


def _resample(make, self, outs, align, factors):
    rank = self.ndim - 2
    nearest = make in (_nearest, _nearest_exact)
    work = self.dtype if nearest else _work_dtype(self)
    weight_type = np.float64 if work == np.float64 else np.float32
    small = self.dtype == jnp.uint8 and not nearest
    x = self if small else cast(self, work)
    # The last dimension first, as PyTorch's separable kernels do.
    tables = _tables(make, self.shape[2:], outs, align, factors, np.float64 if small else weight_type)
    for d in reversed(range(rank)):
        if not _identity(tables[d], x.shape[2 + d]):
            x = (_apply_uint8 if small else _apply)(x, tables[d], 2 + d)
    if not small and work != self.dtype and not jnp.issubdtype(self.dtype, jnp.floating):
        limits = jnp.iinfo(self.dtype)
        x = jnp.clip(jnp.floor(x + 0.5), limits.min, limits.max)
    return cast(x, self.dtype)


def _resample_backward(make, grad_output, outs, input_size, align, factors):
    work = _work_dtype(grad_output)
    weight_type = np.float64 if work == np.float64 else np.float32
    x = cast(grad_output, work)
    for d, table in enumerate(_tables(make, input_size[2:], outs, align, factors, weight_type)):
        if not _identity(table, input_size[2 + d]):
            x = _apply(x, table.transposed(input_size[2 + d]), 2 + d)
    return cast(x, grad_output.dtype)


def _output_size(self, output_size, scale_factors) -> list[int]:
    if output_size is not None:
        return list(output_size)
    return [math.floor(n * s) for n, s in zip(self.shape[2:], scale_factors, strict=True)]


_SCALES = {1: ("scales",), 2: ("scales_h", "scales_w"), 3: ("scales_d", "scales_h", "scales_w")}


def _register(name: str, rank: int, make, aligned: bool) -> None:
    """The forward, ``.vec`` and backward overloads of one mode and rank."""

    def split(rest, named):
        """(align_corners, one factor for each dimension) of what follows the sizes."""
        align, factors = (rest[0], rest[1:]) if aligned and rest else (named.get("align_corners", False), rest)
        given = [*factors, *[None] * (rank - len(factors))]
        return align, [named.get(key, value) for key, value in zip(_SCALES[rank], given, strict=True)]

    def forward(self, output_size, *rest, **named):
        return _resample(make, self, output_size, *split(rest, named))

    def backward(grad_output, output_size, input_size, *rest, **named):
        return _resample_backward(make, grad_output, output_size, input_size, *split(rest, named))

    def vec(input, output_size, *rest):
        align_corners, scale_factors = rest if aligned else (False, *rest)
        factors = scale_factors or [None] * rank
        return _resample(make, input, _output_size(input, output_size, scale_factors), align_corners, factors)

    lowering(name, static=_SCALES[rank])(forward)
    lowering(f"{name}_backward", static=_SCALES[rank])(backward)
    lowering(f"{name}.vec", static=("scale_factors",))(vec)


for _rank in (1, 2, 3):
    _register(f"upsample_nearest{_rank}d", _rank, _nearest, aligned=False)
    _register(f"_upsample_nearest_exact{_rank}d", _rank, _nearest_exact, aligned=False)
for _name, _rank in (("linear1d", 1), ("bilinear2d", 2), ("trilinear3d", 3)):
    _register(f"upsample_{_name}", _rank, _linear, aligned=True)
_register("upsample_bicubic2d", 2, _cubic, aligned=True)
for _name, _filter in (("bilinear", "linear"), ("bicubic", "cubic"), ("lanczos", "lanczos")):
    _register(f"_upsample_{_name}2d_aa", 2, _antialiased(_filter), aligned=True)
