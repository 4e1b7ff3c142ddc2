"""Pooling: average and maximum over windows, adaptive and fractional windows, unpooling, and their gradients.

A maximum is taken one dimension at a time, so a window costs the sum of its extents, not their product. The state is
(value, flat index of the input position); PyTorch's rule is kept: the first of equal values wins, the last NaN wins
over everything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from torchtpu.lowering.context import check_index
from torchtpu.lowering.precision import accumulator
from torchtpu.lowering.promotion import cast
from torchtpu.lowering.registry import lowering

_MAX_UNROLLED = 32
"""Windows with more elements than this scatter their gradient instead of adding one shifted copy for each element."""


def _full(values, rank: int) -> list[int]:
    values = [values] if isinstance(values, int) else list(values)
    return values * rank if len(values) == 1 else values


def _output_size(size: int, kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool) -> int:
    reach = size + 2 * padding - dilation * (kernel - 1) - 1
    out = -(-reach // stride) + 1 if ceil_mode else reach // stride + 1
    # The last window must start inside the input or the low padding.
    return out - 1 if ceil_mode and (out - 1) * stride >= size + padding else out


def _lowest(dtype: np.dtype):
    return -jnp.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).min


def _better(value, index, best, best_index):
    """Whether a candidate replaces the best so far; index -1 marks what lies outside the input."""
    replaces = (value > best) | (best_index < 0)
    if jnp.issubdtype(value.dtype, jnp.floating):
        replaces |= jnp.isnan(value)
    return (index >= 0) & replaces


def _fold(candidates: Iterable[tuple[jax.Array, jax.Array]]):
    remaining = iter(candidates)
    best, best_index = next(remaining)
    for value, index in remaining:
        take = _better(value, index, best, best_index)
        best, best_index = jnp.where(take, value, best), jnp.where(take, index, best_index)
    return best, best_index


def _positions(shape: tuple[int, ...], rank: int) -> jax.Array:
    """The flat index of every position of the last ``rank`` dimensions, broadcast to the whole shape."""
    flat = jnp.arange(math.prod(shape[-rank:]), dtype=jnp.int32).reshape(shape[-rank:])
    return jnp.broadcast_to(flat, shape)


def _max_over(x, rank: int, windows: Callable):
    """Reduce the last ``rank`` dimensions with ``windows(value, index, axis, d)``, which yields candidates."""
    value, index = x, _positions(x.shape, rank)
    for d in reversed(range(rank)):
        value, index = _fold(windows(value, index, x.ndim - rank + d, d))
    return value, index.astype(jnp.int64)


def _max_pool(rank, self, kernel_size, stride, padding, dilation, ceil_mode):
    kernel, padding, dilation = (_full(v, rank) for v in (kernel_size, padding, dilation))
    stride = _full(stride, rank) if len(_listed(stride)) else kernel

    def windows(value, index, axis, d):
        k, s, p, dil = kernel[d], stride[d], padding[d], dilation[d]
        size = value.shape[axis]
        out = _output_size(size, k, s, p, dil, ceil_mode)
        high = max(0, (out - 1) * s + dil * (k - 1) + 1 - size - p)
        pads = [(0, 0, 0)] * value.ndim
        pads[axis] = (p, high, 0)
        value = jax.lax.pad(value, jnp.asarray(_lowest(value.dtype), value.dtype), pads)
        index = jax.lax.pad(index, jnp.int32(-1), pads)
        for j in range(k):
            start = j * dil
            yield tuple(
                jax.lax.slice_in_dim(a, start, start + (out - 1) * s + 1, stride=s, axis=axis) for a in (value, index)
            )

    return _max_over(self, rank, windows)


def _listed(v) -> list[int]:
    return [v] if isinstance(v, int) else list(v)


def _scatter_gradient(grad_output, self, indices, rank):
    """Add each gradient at its flat input position."""
    lead, count = self.shape[:-rank], math.prod(grad_output.shape[-rank:])
    wide = cast(grad_output, accumulator(grad_output.dtype)).reshape(*lead, count)
    zero = jnp.zeros((*lead, math.prod(self.shape[-rank:])), wide.dtype)
    add = lambda z, i, g: z.at[i].add(g, mode="drop")  # noqa: E731
    for _ in lead:
        add = jax.vmap(add)
    flat = add(zero, indices.reshape(*lead, count).astype(jnp.int32), wide)
    return cast(flat.reshape(self.shape), self.dtype)


def _max_pool_backward(rank, grad_output, self, kernel_size, stride, padding, dilation, ceil_mode, indices):
    kernel, padding, dilation = (_full(v, rank) for v in (kernel_size, padding, dilation))
    stride = _full(stride, rank) if len(_listed(stride)) else kernel
    if math.prod(kernel) > _MAX_UNROLLED or self.size == 0:
        return _scatter_gradient(grad_output, self, indices, rank)
    # Window element j of output o lies at input o * stride - padding + j * dilation: spread the gradients of one j over
    # the input with a strided pad, keeping those whose index says that the maximum was there. No scatter.
    grad = cast(grad_output, accumulator(grad_output.dtype))
    out, size = grad.shape[-rank:], self.shape[-rank:]
    index = indices.astype(jnp.int32)
    total = jnp.zeros(self.shape, grad.dtype)
    lead = [(0, 0, 0)] * (self.ndim - rank)
    for offsets in np.ndindex(*kernel):
        flat, pads = jnp.zeros((1,) * rank, jnp.int32), []
        for d in range(rank):
            first = offsets[d] * dilation[d] - padding[d]
            at = first + stride[d] * np.arange(out[d])
            coordinate = jnp.where((at >= 0) & (at < size[d]), at, -(2**20)).astype(jnp.int32)
            flat = flat * size[d] + coordinate.reshape([-1 if i == d else 1 for i in range(rank)])
            pads.append((first, size[d] - int(at[-1]) - 1, stride[d] - 1))
        hit = jnp.where(index == flat, grad, 0)
        total += jax.lax.pad(hit, jnp.zeros((), grad.dtype), lead + pads)
    return cast(total, self.dtype)


def _divisors(sizes, outs, kernel, stride, padding, count_include_pad, divisor_override) -> np.ndarray:
    """What each window's sum is divided by."""
    if divisor_override:
        return np.asarray(divisor_override)
    result = np.ones((1,) * len(sizes), np.int64)
    for d, (n, o, k, s, p) in enumerate(zip(sizes, outs, kernel, stride, padding, strict=True)):
        low = np.arange(o) * s - p
        high = np.minimum(low + k, n + p)
        extent = high - low if count_include_pad else np.minimum(high, n) - np.maximum(low, 0)
        result = result * extent.reshape([-1 if i == d else 1 for i in range(len(sizes))])
    return result


def _avg_pool(rank, self, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override):
    kernel, padding = _full(kernel_size, rank), _full(padding, rank)
    stride = _full(stride, rank) if len(_listed(stride)) else kernel
    size = self.shape[-rank:]
    outs = [_output_size(n, k, s, p, 1, ceil_mode) for n, k, s, p in zip(size, kernel, stride, padding, strict=True)]
    pads = [
        (p, max(0, (o - 1) * s + k - n - p)) for n, o, k, s, p in zip(size, outs, kernel, stride, padding, strict=True)
    ]
    lead = self.ndim - rank
    x = cast(self, accumulator(self.dtype))
    total = jax.lax.reduce_window(
        x, np.zeros((), x.dtype), jax.lax.add, [1] * lead + kernel, [1] * lead + stride, [(0, 0)] * lead + pads
    )
    total = total[tuple([slice(None)] * lead + [slice(0, o) for o in outs])]
    divisor = _divisors(size, outs, kernel, stride, padding, count_include_pad, divisor_override)
    return cast(jax.lax.div(total, jnp.broadcast_to(jnp.asarray(divisor, x.dtype), total.shape)), self.dtype)


def _transposed(linear: Callable, self, grad_output):
    """The gradient of a pooling that is linear in its input, in the accumulator dtype."""
    wide = accumulator(self.dtype)
    shape = jax.ShapeDtypeStruct(self.shape, wide)
    return cast(jax.linear_transpose(linear, shape)(cast(grad_output, wide))[0], self.dtype)


def _adaptive_windows(size: int, out: int) -> tuple[np.ndarray, np.ndarray]:
    """(positions [out, longest], whether each is in the window): window i is [floor(i n / o), ceil((i + 1) n / o))."""
    i = np.arange(out)
    start, end = i * size // out, -(-(i + 1) * size // out)
    at = start[:, None] + np.arange(int((end - start).max(initial=1)))
    return np.minimum(at, max(size - 1, 0)), at < end[:, None]


def _adaptive_avg(rank, self, output_size):
    x = cast(self, accumulator(self.dtype))
    for d, out in enumerate(_full(output_size, rank)):
        axis = x.ndim - rank + d
        size = x.shape[axis]
        if out and size % out == 0:
            x = x.reshape(*x.shape[:axis], out, size // out, *x.shape[axis + 1 :]).mean(axis + 1, dtype=x.dtype)
            continue
        at, inside = _adaptive_windows(size, out)
        mask = inside.reshape(*inside.shape, *[1] * (x.ndim - axis - 1))
        window = jnp.where(mask, jnp.take(x, jnp.asarray(at, jnp.int32), axis=axis), jnp.zeros((), x.dtype))
        count = jnp.asarray(inside.sum(1), x.dtype).reshape(-1, *[1] * (x.ndim - axis - 1))
        x = window.sum(axis + 1, dtype=x.dtype) / count
    return cast(x, self.dtype)


def _adaptive_max(rank, self, output_size):
    outs = _full(output_size, rank)

    def windows(value, index, axis, d):
        at, inside = _adaptive_windows(value.shape[axis], outs[d])
        for j in range(at.shape[1]):
            where = jnp.asarray(at[:, j], jnp.int32)
            mask = inside[:, j].reshape(-1, *[1] * (value.ndim - axis - 1))
            yield jnp.take(value, where, axis=axis), jnp.where(mask, jnp.take(index, where, axis=axis), -1)

    return _max_over(self, rank, windows)


def _fractional_max(rank, self, kernel_size, output_size, random_samples):
    """Windows start at a random sequence: ``int((i + u) * alpha) - int(u * alpha)``, the last one at the end."""
    kernel, outs = _full(kernel_size, rank), _full(output_size, rank)
    if self.size == 0:
        shape = (*self.shape[:-rank], *outs)
        return jnp.zeros(shape, self.dtype), jnp.zeros(shape, jnp.int64)
    x = self if self.ndim == rank + 2 else self[None]

    def starts(d, size):
        u = random_samples[..., d if rank == 3 else rank - 1 - d][..., None]
        if outs[d] == 1:
            return jnp.full(u.shape, size - kernel[d], jnp.int32)
        alpha = jnp.asarray(size - kernel[d], u.dtype) / jnp.asarray(outs[d] - 1, u.dtype)
        i = jnp.arange(outs[d], dtype=u.dtype)
        at = ((i + u) * alpha).astype(jnp.int32) - (u * alpha).astype(jnp.int32)
        return jnp.where(i == outs[d] - 1, size - kernel[d], at)

    def windows(value, index, axis, d):
        first = starts(d, value.shape[axis])
        first = first.reshape(*first.shape[:2], *[-1 if a == axis else 1 for a in range(2, value.ndim)])
        for j in range(kernel[d]):
            yield jnp.take_along_axis(value, first + j, axis=axis), jnp.take_along_axis(index, first + j, axis=axis)

    value, index = _max_over(x, rank, windows)
    return (value, index) if self.ndim == rank + 2 else (value[0], index[0])


def _unpool(rank, self, indices, output_size):
    lead, sizes, count = self.shape[:-rank], list(output_size), math.prod(self.shape[-rank:])
    extent = math.prod(sizes)
    at = check_index(
        indices.reshape(-1), extent, "max_unpool: index {value} is outside the output", allow_negative=False
    )
    put = lambda z, i, v: z.at[i].set(v)  # noqa: E731
    for _ in lead:
        put = jax.vmap(put)
    flat = put(jnp.zeros((*lead, extent), self.dtype), at.reshape(*lead, count), self.reshape(*lead, count))
    return flat.reshape(*lead, *sizes)


@lowering("max_unpool2d")
def max_unpool2d(self, indices, output_size):
    return _unpool(2, self, indices, output_size)


@lowering("max_unpool3d")
def max_unpool3d(self, indices, output_size, stride, padding):
    return _unpool(3, self, indices, output_size)


def _register(rank: int) -> None:
    """The operators of two and three dimensions; PyTorch sends one dimension through two."""

    def max_pool(self, kernel_size, stride=(), padding=0, dilation=1, ceil_mode=False):
        return _max_pool(rank, self, kernel_size, stride, padding, dilation, ceil_mode)

    def max_backward(grad_output, self, kernel_size, stride, padding, dilation, ceil_mode, indices):
        return _max_pool_backward(rank, grad_output, self, kernel_size, stride, padding, dilation, ceil_mode, indices)

    def avg_pool(
        self, kernel_size, stride=(), padding=0, ceil_mode=False, count_include_pad=True, divisor_override=None
    ):
        return _avg_pool(rank, self, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)

    def avg_backward(grad_output, self, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override):
        options = (kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)
        return _transposed(lambda x: _avg_pool(rank, x, *options), self, grad_output)

    def adaptive_avg(self, output_size):
        return _adaptive_avg(rank, self, output_size)

    def adaptive_avg_backward(grad_output, self):
        return _transposed(lambda x: _adaptive_avg(rank, x, grad_output.shape[-rank:]), self, grad_output)

    def adaptive_max(self, output_size):
        return _adaptive_max(rank, self, output_size)

    def adaptive_max_backward(grad_output, self, indices):
        return _scatter_gradient(grad_output, self, indices, rank)

    def fractional_max(self, kernel_size, output_size, random_samples):
        return _fractional_max(rank, self, kernel_size, output_size, random_samples)

    def fractional_max_backward(grad_output, self, kernel_size, output_size, indices):
        return _scatter_gradient(grad_output, self, indices, rank)

    functions: dict[str, Callable[..., Any]] = {
        f"max_pool{rank}d_with_indices": max_pool,
        f"max_pool{rank}d_with_indices_backward": max_backward,
        f"avg_pool{rank}d": avg_pool,
        f"avg_pool{rank}d_backward": avg_backward,
        f"_adaptive_avg_pool{rank}d": adaptive_avg,
        f"_adaptive_avg_pool{rank}d_backward": adaptive_avg_backward,
        f"adaptive_max_pool{rank}d": adaptive_max,
        f"adaptive_max_pool{rank}d_backward": adaptive_max_backward,
        f"fractional_max_pool{rank}d": fractional_max,
        f"fractional_max_pool{rank}d_backward": fractional_max_backward,
    }
    for name, function in functions.items():
        lowering(name)(function)


_register(2)
_register(3)
