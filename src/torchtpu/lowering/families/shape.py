"""Joining, repeating, reversing, padding and rearranging."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from torch._prims_common import canonicalize_dim

from torchtpu.lowering.families.views import transpose_of
from torchtpu.lowering.promotion import Kind, cast, dtypes, promote
from torchtpu.lowering.registry import lowering


def _same_dtype(arrays) -> list[jax.Array]:
    """The arrays cast to the dtype PyTorch gives their concatenation."""
    if len({a.dtype for a in arrays}) == 1:
        return list(arrays)
    result = dtypes(*arrays, kind=Kind.NO_OPMATH)[1]
    return [cast(a, result) for a in arrays]


@lowering("cat", "concat", "concatenate")
def cat(tensors, dim=0):
    tensors = _same_dtype(tensors)
    # Empty one-dimensional tensors join anything: an exception PyTorch keeps for old programs.
    kept = [a for a in tensors if a.shape != (0,)] or tensors[:1]
    return jax.lax.concatenate(kept, canonicalize_dim(kept[0].ndim, dim))


@lowering("stack")
def stack(tensors, dim=0):
    return jnp.stack(_same_dtype(tensors), canonicalize_dim(tensors[0].ndim + 1, dim))


@lowering("block_diag")
def block_diag(tensors):
    blocks = [jnp.atleast_2d(a) for a in _same_dtype(tensors)]
    # A one-dimensional empty tensor is one row of no columns.
    rows, columns = (sum(b.shape[d] for b in blocks) for d in (0, 1))
    out, row, column = jnp.zeros((rows, columns), blocks[0].dtype), 0, 0
    for block in blocks:
        out = jax.lax.dynamic_update_slice(out, block, (row, column))
        row, column = row + block.shape[0], column + block.shape[1]
    return out


@lowering("meshgrid", "meshgrid.indexing")
def meshgrid(tensors, indexing="ij"):
    return jnp.meshgrid(*tensors, indexing=indexing)


@lowering("repeat")
def repeat(self, repeats):
    return jnp.tile(self, repeats)


@lowering("tile")
def tile(self, dims):
    return jnp.tile(self, dims)


@lowering("repeat_interleave.Tensor", dynamic=True)
def repeat_interleave(repeats, output_size=None):
    """Positions to take; with ``output_size`` the shape is known and the function can be traced too."""
    if output_size is not None:
        positions = jnp.arange(repeats.shape[0], dtype=jnp.int32)
        return jnp.repeat(positions, repeats, total_repeat_length=output_size).astype(repeats.dtype)
    counts = np.asarray(repeats)
    if (counts < 0).any():
        raise RuntimeError("repeats can not be negative")
    return jnp.asarray(np.repeat(np.arange(counts.shape[0]), counts), repeats.dtype)


@lowering("flip")
def flip(self, dims):
    return jnp.flip(self, [canonicalize_dim(self.ndim, d) for d in dims] if self.ndim else [])


@lowering("roll")
def roll(self, shifts, dims=()):
    if not dims:
        return jnp.roll(self.reshape(-1), shifts[0]).reshape(self.shape)
    return jnp.roll(self, tuple(shifts), tuple(dims)) if self.size and self.ndim else self


@lowering("rot90")
def rot90(self, k=1, dims=(0, 1)):
    return jnp.rot90(self, k, tuple(dims))


def _per_dim(pad, ndim: int) -> list[tuple[int, int]]:
    """PyTorch's padding (last dimension first) as (low, high) for each dimension."""
    pairs = [(pad[i], pad[i + 1]) for i in range(0, len(pad), 2)]
    return [(0, 0)] * (ndim - len(pairs)) + pairs[::-1]


@lowering("constant_pad_nd")
def constant_pad_nd(self, pad, value=0):
    return jax.lax.pad(self, cast(value, self.dtype), [(*pair, 0) for pair in _per_dim(pad, self.ndim)])


def _pad_by_copying(self, padding, mode: str):
    pairs = _per_dim(padding, self.ndim)
    padded = jnp.pad(self, [(max(low, 0), max(high, 0)) for low, high in pairs], mode) if self.size else self
    if not self.size:  # only a batch may be empty
        return jnp.zeros([n + low + high for n, (low, high) in zip(self.shape, pairs, strict=True)], self.dtype)
    crop = [(min(low, 0), min(high, 0), 0) for low, high in pairs]
    return jax.lax.pad(padded, jnp.zeros((), self.dtype), crop)


for _rank in ("1d", "2d", "3d"):
    for _name, _mode in (("reflection", "reflect"), ("replication", "edge")):

        @lowering(f"{_name}_pad{_rank}")
        def copying_pad(self, padding, mode=_mode):
            return _pad_by_copying(self, padding, mode)

        @lowering(f"{_name}_pad{_rank}_backward")
        def copying_pad_backward(grad_output, self, padding, mode=_mode):
            forward = functools.partial(_pad_by_copying, padding=padding, mode=mode)
            return transpose_of(forward, self.shape, grad_output)


@lowering("pixel_shuffle")
def pixel_shuffle(self, upscale_factor):
    *batch, c, h, w = self.shape
    r, n = upscale_factor, len(batch)
    x = self.reshape(*batch, c // r**2, r, r, h, w)
    x = jnp.transpose(x, [*range(n), n, n + 3, n + 1, n + 4, n + 2])
    return x.reshape(*batch, c // r**2, h * r, w * r)


@lowering("pixel_unshuffle")
def pixel_unshuffle(self, downscale_factor):
    *batch, c, h, w = self.shape
    r, n = downscale_factor, len(batch)
    x = self.reshape(*batch, c, h // r, r, w // r, r)
    x = jnp.transpose(x, [*range(n), n, n + 2, n + 4, n + 1, n + 3])
    return x.reshape(*batch, c * r**2, h // r, w // r)


@lowering("channel_shuffle", "native_channel_shuffle")
def channel_shuffle(self, groups):
    n, c, *rest = self.shape
    return jnp.swapaxes(self.reshape(n, groups, c // groups, *rest), 1, 2).reshape(self.shape)


def _im2col(x: jax.Array, kernel_size, dilation, padding, stride) -> jax.Array:
    """Patches as columns: one strided slice per kernel position."""
    batched = x if x.ndim == 4 else x[None]
    batched = jnp.pad(batched, [(0, 0), (0, 0), (padding[0],) * 2, (padding[1],) * 2])
    n, c, height, width = batched.shape
    extents = [
        (size - d * (k - 1) - 1) // s + 1
        for size, k, d, s in zip((height, width), kernel_size, dilation, stride, strict=True)
    ]
    patches = [
        jax.lax.slice(
            batched,
            (0, 0, i * dilation[0], j * dilation[1]),
            (
                n,
                c,
                i * dilation[0] + (extents[0] - 1) * stride[0] + 1,
                j * dilation[1] + (extents[1] - 1) * stride[1] + 1,
            ),
            (1, 1, *stride),
        )
        for i in range(kernel_size[0])
        for j in range(kernel_size[1])
    ]
    columns = jnp.stack(patches, 2).reshape(n, c * len(patches), extents[0] * extents[1])
    return columns if x.ndim == 4 else columns[0]


@lowering("im2col")
def im2col(self, kernel_size, dilation, padding, stride):
    return _im2col(self, kernel_size, dilation, padding, stride)


@lowering("col2im")
def col2im(self, output_size, kernel_size, dilation, padding, stride):
    *batch, columns, _ = self.shape
    image = (*batch, columns // (kernel_size[0] * kernel_size[1]), *output_size)
    forward = functools.partial(_im2col, kernel_size=kernel_size, dilation=dilation, padding=padding, stride=stride)
    return transpose_of(forward, image, self)


@lowering("linalg_cross")
def linalg_cross(self, other, dim=-1):
    (x, y), result = promote(self, other)
    x, y = jnp.broadcast_arrays(x, y)
    return cast(
        jnp.roll(x, -1, dim) * jnp.roll(y, -2, dim) - jnp.roll(x, -2, dim) * jnp.roll(y, -1, dim),
        result,
    )
