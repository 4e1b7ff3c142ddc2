"""What PyTorch's view operators mean as functions on arrays: views, their copies, scatters and backwards."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from torch._prims_common import canonicalize_dim, canonicalize_dims

from torchtpu.lowering.dtypes import complex_of, to_jax
from torchtpu.lowering.registry import lowering
from torchtpu.lowering.sizes import bounds_of_slice


@lowering(
    "alias",
    "alias_copy",
    "detach",
    "detach_copy",
    "lift",
    "lift_fresh",
    "lift_fresh_copy",
    "_fw_primal",
    "_fw_primal_copy",
)
def alias(self, level=None):
    return self


@lowering("view", "view_copy", "_unsafe_view", "reshape", "_reshape_copy")
def view(self, size):
    if -1 in size:
        known = math.prod(n for n in size if n != -1)
        size = [self.size // known if n == -1 else n for n in size]
    return jnp.reshape(self, size)


@lowering("_reshape_alias", "_reshape_alias_copy")
def reshape_alias(self, size, stride):
    return jnp.reshape(self, size)


@lowering("view.dtype", "view_copy.dtype")
def view_dtype(self, dtype):
    return self.view(to_jax(dtype))


@lowering("permute", "permute_copy")
def permute(self, dims):
    return jnp.transpose(self, [canonicalize_dim(self.ndim, d) for d in dims])


@lowering("transpose.int", "transpose_copy.int", "swapaxes", "swapdims")
def transpose(self, dim0, dim1):
    if self.ndim == 0:
        return self
    return jnp.swapaxes(self, dim0, dim1)


@lowering("t", "t_copy")
def t(self):
    return jnp.transpose(self)


@lowering("movedim.intlist", "moveaxis.intlist")
def movedim(self, source, destination):
    return jnp.moveaxis(self, source, destination)


@lowering("movedim.int", "moveaxis.int")
def movedim_int(self, source, destination):
    return self if self.ndim == 0 else jnp.moveaxis(self, source, destination)


@lowering("expand", "expand_copy")
def expand(self, size, implicit=False):
    new = len(size) - self.ndim
    return jnp.broadcast_to(self, [self.shape[d - new] if n == -1 else n for d, n in enumerate(size)])


@lowering("squeeze", "squeeze.dim", "squeeze.dims", "squeeze_copy", "squeeze_copy.dim", "squeeze_copy.dims")
def squeeze(self, dim=None):
    dims = (
        range(self.ndim)
        if dim is None
        else canonicalize_dims(self.ndim, (dim,) if isinstance(dim, int) else tuple(dim))
    )
    return jax.lax.squeeze(self, [d for d in dims if self.ndim and self.shape[d] == 1])


@lowering("unsqueeze", "unsqueeze_copy")
def unsqueeze(self, dim):
    return jax.lax.expand_dims(self, [canonicalize_dim(self.ndim + 1, dim)])


@lowering("select.int", "select_copy.int")
def select(self, dim, index):
    return jax.lax.index_in_dim(self, index, canonicalize_dim(self.ndim, dim), keepdims=False)


@lowering("slice.Tensor", "slice_copy.Tensor")
def slice_(self, dim=0, start=None, end=None, step=1):
    dim = canonicalize_dim(self.ndim, dim)
    first, last = bounds_of_slice(self.shape[dim], start, end, step)
    return jax.lax.slice_in_dim(self, first, last, step, dim)


@lowering("narrow", "narrow_copy")
def narrow(self, dim, start, length):
    dim = canonicalize_dim(self.ndim, dim)
    start = start + self.shape[dim] if start < 0 else start
    return jax.lax.slice_in_dim(self, start, start + length, axis=dim)


@lowering("unbind.int", "unbind_copy.int")
def unbind(self, dim=0):
    dim = canonicalize_dim(self.ndim, dim)
    return [jax.lax.index_in_dim(self, i, dim, keepdims=False) for i in range(self.shape[dim])]


@lowering("split_with_sizes", "split_with_sizes_copy", "unsafe_split_with_sizes", "split.sizes")
def split_with_sizes(self, split_sizes, dim=0):
    return jax.lax.split(self, tuple(split_sizes), canonicalize_dim(self.ndim, dim))


@lowering("split.Tensor", "split_copy.Tensor", "unsafe_split.Tensor")
def split(self, split_size, dim=0):
    extent = self.shape[canonicalize_dim(self.ndim, dim)]
    if extent == 0 or split_size >= extent:
        return [self]
    whole, rest = divmod(extent, split_size)
    return split_with_sizes(self, [split_size] * whole + [rest] * bool(rest), dim)


@lowering("chunk", "unsafe_chunk")
def chunk(self, chunks, dim=0):
    extent = self.shape[canonicalize_dim(self.ndim, dim)]
    if extent == 0:  # as many empty pieces as were asked for
        return split_with_sizes(self, [0] * chunks, dim)
    return split(self, -(-extent // chunks), dim)


def _windows(x: jax.Array, dim: int, size: int, step: int) -> jax.Array:
    count = (x.shape[dim] - size) // step + 1
    if size == step:
        x = jax.lax.slice_in_dim(x, 0, count * size, axis=dim)
        return jnp.moveaxis(x.reshape(*x.shape[:dim], count, size, *x.shape[dim + 1 :]), dim + 1, -1)
    if size <= 16:  # a few strided slices beat a gather
        span = (count - 1) * step + 1
        return jnp.stack([jax.lax.slice_in_dim(x, i, i + span, step, dim) for i in range(size)], -1)
    positions = jnp.arange(count, dtype=jnp.int32)[:, None] * step + jnp.arange(size, dtype=jnp.int32)
    return jnp.moveaxis(jnp.take(x, positions, axis=dim, mode="clip"), dim + 1, -1)


@lowering("unfold", "unfold_copy")
def unfold(self, dimension, size, step):
    if self.ndim == 0:
        return self.reshape(1)[:size]
    return _windows(self, canonicalize_dim(self.ndim, dimension), size, step)


@lowering("diagonal", "diagonal_copy")
def diagonal(self, offset=0, dim1=0, dim2=1):
    return jnp.diagonal(self, offset, dim1, dim2)


@lowering("view_as_real", "view_as_real_copy")
def view_as_real(self):
    return jnp.stack([self.real, self.imag], -1)


@lowering("view_as_complex", "view_as_complex_copy")
def view_as_complex(self):
    return complex_of(self[..., 0], self[..., 1])


def _strided_positions(size, stride, offset: int) -> jax.Array:
    """Positions in the flat storage of the elements of a strided tensor, int32."""
    positions = jnp.full(size, offset, jnp.int32)
    for dim, step in enumerate(stride):
        positions += jax.lax.broadcasted_iota(jnp.int32, tuple(size), dim) * step
    return positions


@lowering("as_strided", "as_strided_copy")
def as_strided(self, size, stride, storage_offset=None):
    """The input stands for a contiguous storage; dense layouts become slice, reshape and transpose."""
    flat, offset = self.reshape(-1), storage_offset or 0
    count = math.prod(size)
    order = sorted(range(len(size)), key=lambda d: (-stride[d], -size[d]))
    expected = count
    for d in order:
        expected //= max(size[d], 1)
        if size[d] != 1 and stride[d] != expected:
            return (
                flat.at[_strided_positions(size, stride, offset)].get(mode="clip")
                if count
                else jnp.zeros(size, self.dtype)
            )
    dense = jax.lax.slice_in_dim(flat, offset, offset + count).reshape([size[d] for d in order])
    return jnp.transpose(dense, [order.index(d) for d in range(len(order))])


@lowering("slice_scatter")
def slice_scatter(self, src, dim=0, start=None, end=None, step=1):
    dim = canonicalize_dim(self.ndim, dim)
    extent = self.shape[dim]
    first, last = bounds_of_slice(extent, start, end, step)
    count = -(-(last - first) // step)
    src = jnp.broadcast_to(src.astype(self.dtype), (*self.shape[:dim], count, *self.shape[dim + 1 :]))
    if step == 1 or count == 0:
        return jax.lax.dynamic_update_slice_in_dim(self, src, first, dim)
    spread = _pad_slice(src, extent, dim, first, step)
    at = jax.lax.broadcasted_iota(jnp.int32, self.shape, dim) - first
    return jnp.where((at >= 0) & (at < last - first) & (at % step == 0), spread, self)


@lowering("select_scatter")
def select_scatter(self, src, dim, index):
    dim = canonicalize_dim(self.ndim, dim)
    return jax.lax.dynamic_update_index_in_dim(self, src.astype(self.dtype), index % self.shape[dim], dim)


def _scatter_into(view_of, self: jax.Array, src: jax.Array) -> jax.Array:
    """``self`` with ``src`` written where ``view_of(self)`` reads."""
    positions = view_of(jnp.arange(self.size, dtype=jnp.int32).reshape(self.shape))
    flat = self.reshape(-1).at[positions].set(src.astype(self.dtype), mode="promise_in_bounds", unique_indices=True)
    return flat.reshape(self.shape)


@lowering("diagonal_scatter")
def diagonal_scatter(self, src, offset=0, dim1=0, dim2=1):
    return _scatter_into(lambda x: diagonal(x, offset, dim1, dim2), self, src)


@lowering("as_strided_scatter")
def as_strided_scatter(self, src, size, stride, storage_offset=None):
    positions = _strided_positions(size, stride, storage_offset or 0)
    last = (storage_offset or 0) + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    if positions.size and last >= self.size:
        raise RuntimeError(f"sizes {list(size)} and strides {list(stride)} reach beyond {self.size} elements")
    return self.reshape(-1).at[positions].set(src.astype(self.dtype), mode="promise_in_bounds").reshape(self.shape)


def _pad_slice(grad: jax.Array, extent: int, dim: int, first: int, step: int) -> jax.Array:
    """Zeros of the given extent along ``dim``, with ``grad`` at first, first + step, ..."""
    count = grad.shape[dim]
    config = [(0, 0, 0)] * grad.ndim
    config[dim] = (first, extent - first - ((count - 1) * step + 1 if count else 0), step - 1)
    return jax.lax.pad(grad, jnp.zeros((), grad.dtype), config)


@lowering("slice_backward")
def slice_backward(grad_output, input_sizes, dim, start, end, step):
    dim = canonicalize_dim(len(input_sizes), dim)
    if grad_output.size == 0:
        return jnp.zeros(input_sizes, grad_output.dtype)
    first, _ = bounds_of_slice(input_sizes[dim], start, end, step)
    return _pad_slice(grad_output, input_sizes[dim], dim, first, step)


@lowering("select_backward")
def select_backward(grad_output, input_sizes, dim, index):
    dim = canonicalize_dim(len(input_sizes), dim)
    extent = input_sizes[dim]
    return _pad_slice(jax.lax.expand_dims(grad_output, [dim]), extent, dim, index % extent, 1)


def transpose_of(function, sizes, grad: jax.Array) -> jax.Array:
    """The transpose of a linear function of an array of the given sizes, applied to ``grad``.

    16-bit floats add in float32.
    """
    compute = jnp.float32 if grad.dtype in (jnp.float16, jnp.bfloat16) else grad.dtype
    (out,) = jax.linear_transpose(function, jax.ShapeDtypeStruct(tuple(sizes), compute))(grad.astype(compute))
    return out.astype(grad.dtype)


@lowering("diagonal_backward")
def diagonal_backward(grad_output, input_sizes, offset, dim1, dim2):
    return diagonal_scatter(jnp.zeros(input_sizes, grad_output.dtype), grad_output, offset, dim1, dim2)


@lowering("unfold_backward")
def unfold_backward(grad_in, input_sizes, dim, size, step):
    return transpose_of(functools.partial(unfold, dimension=dim, size=size, step=step), input_sizes, grad_in)
