"""Reductions over ragged segments of one dimension, and the hash that combines the bits of all elements."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from torchtpu.lowering.promotion import cast
from torchtpu.lowering.registry import lowering

_NAMES = {"sum": "add", "mean": "add", "max": "max", "min": "min", "prod": "multiply"}
_SHORT = {"amax": "max", "amin": "min"}
_STARTS = {"sum": 0, "mean": 0, "max": -math.inf, "min": math.inf, "prod": 1}


def _segments(data, lengths, offsets, axis: int):
    """Data as [batch, length, rest], and for each batch its segments' first positions and lengths."""
    if offsets is None:
        ends = jnp.cumsum(lengths, -1)
        starts = ends - lengths
    else:
        starts, ends = offsets[..., :-1], offsets[..., 1:]
    flat = data.reshape(math.prod(data.shape[:axis]), data.shape[axis], math.prod(data.shape[axis + 1 :]))
    count = starts.shape[-1]
    starts, ends = (x.astype(np.int32).reshape(-1, count) for x in (starts, ends))
    return flat, starts, ends


def _members(flat, starts, ends):
    """Whether position j belongs to segment i: [batch, segments, length]."""
    j = jnp.arange(flat.shape[1], dtype=np.int32)
    return (j >= starts[..., None]) & (j < ends[..., None])


def _segment_of(member):
    """The segment of each position; the number of segments for a position outside all."""
    return jnp.where(member.any(1), jnp.argmax(member, 1), member.shape[1]).astype(np.int32)


@lowering("segment_reduce")
def segment_reduce(data, reduce, lengths=None, indices=None, offsets=None, axis=0, unsafe=False, initial=None):
    axis, reduce = axis % data.ndim, _SHORT.get(reduce, reduce)
    flat, starts, ends = _segments(data, lengths, offsets, axis)
    count = starts.shape[-1]
    segment = _segment_of(_members(flat, starts, ends))
    start = cast(_STARTS[reduce] if initial is None else initial, data.dtype)

    def one(x, at):
        out = jnp.broadcast_to(start, (count + 1, x.shape[1]))
        return getattr(out.at[at], _NAMES[reduce])(x)[:count]

    out = jax.vmap(one)(flat, segment)
    if reduce == "mean":
        n = (ends - starts).astype(data.dtype)[..., None]
        empty = jnp.asarray(math.nan, data.dtype) if initial is None else out
        out = jnp.where(n > 0, out / jnp.maximum(n, 1), empty)
    return out.reshape(*data.shape[:axis], count, *data.shape[axis + 1 :])


@lowering("_segment_reduce_backward")
def segment_reduce_backward(grad, output, data, reduce, lengths=None, offsets=None, axis=0, initial=None):
    axis, reduce = axis % data.ndim, _SHORT.get(reduce, reduce)
    flat, starts, ends = _segments(data, lengths, offsets, axis)
    count = starts.shape[-1]
    member = _members(flat, starts, ends)
    segment = jnp.minimum(_segment_of(member), max(count - 1, 0))[..., None]
    inside = member.any(1)[..., None]
    if not count or not flat.size:
        return jnp.zeros_like(data)

    def spread(x):
        """A value of each segment at each of its positions."""
        return jnp.take_along_axis(x.reshape(flat.shape[0], count, -1), segment, 1)

    g, out = spread(grad), spread(output)
    if reduce in ("max", "min"):
        hit = jnp.isnan(flat) | (flat == out)
        hits = spread(jnp.einsum("bij,bjr->bir", member.astype(flat.dtype), hit.astype(flat.dtype)))
        # PyTorch shares a positive gradient between equal extremes and gives each the whole of a negative one.
        result = jnp.where(hit, jnp.where((hits >= 2) & (g > 0), g / hits, g), 0)
    elif reduce == "mean":
        result = g / spread((ends - starts).astype(flat.dtype)[..., None])
    elif reduce == "prod":
        whole = jnp.where(member[..., None], flat[:, None], 1)  # [batch, segments, length, rest]
        own = jnp.eye(flat.shape[1], dtype=bool)[None, :, :, None]  # leaves one position out
        mine = jnp.take_along_axis(whole, segment[..., None].astype(np.int32), 1) if count else whole
        others = jnp.where(own, 1, mine).prod(2)
        first = cast(1 if initial is None else initial, flat.dtype)
        exact = (flat == 0) | jnp.isnan(flat)
        result = g * jnp.where(exact, first * others, out / jnp.where(exact, 1, flat))
    else:
        result = g
    return jnp.where(inside, result, 0).astype(data.dtype).reshape(data.shape)


@lowering("hash_tensor")
def hash_tensor(self, dim=(), keepdim=False, mode=0):
    """Exclusive or of the elements' bits: floats as float64, integers as int64."""
    wide = self.astype(np.float64 if jnp.issubdtype(self.dtype, jnp.floating) else np.int64)
    bits = jax.lax.bitcast_convert_type(wide, np.uint64)
    axes = tuple(d % max(self.ndim, 1) for d in dim) if self.ndim and dim else tuple(range(self.ndim))
    out = jax.lax.reduce(bits, np.uint64(0), jax.lax.bitwise_xor, axes)
    return jnp.expand_dims(out, axes) if keepdim and self.ndim else out


def _one_level(offsets):
    if len(offsets) != 1:
        raise NotImplementedError("jagged tensors with more than one ragged dimension are not supported")
    return offsets[0].astype(np.int32)


@lowering("_jagged_to_padded_dense_forward")
def jagged_to_padded_dense(values, offsets, max_lengths, padding_value=0.0):
    """Rows of ``values`` between consecutive offsets, each padded or cut to one length."""
    starts, ends = _one_level(offsets)[:-1, None], _one_level(offsets)[1:, None]
    at = starts + jnp.arange(max_lengths[0], dtype=np.int32)
    padding = cast(padding_value, values.dtype)
    if not values.shape[0]:
        return jnp.broadcast_to(padding, (*at.shape, *values.shape[1:]))
    rows = jnp.take(values, jnp.where(at < ends, at, 0), axis=0, mode="clip")
    return jnp.where((at < ends).reshape(*at.shape, *(1,) * (values.ndim - 1)), rows, padding)


@lowering("_padded_dense_to_jagged_forward", dynamic=True)
def padded_dense_to_jagged(dense, offsets, total_L=None):
    """The reverse: what lies beyond a row's length is dropped. The number of elements is the last offset."""
    edges = np.asarray(_one_level(offsets))
    total = int(edges[-1])
    if total_L is not None and total_L != total:
        raise RuntimeError("_padded_dense_to_jagged_forward(): final offset should match total_L value")
    place = np.arange(total)
    row = np.searchsorted(edges, place, side="right") - 1
    column = place - edges[row]
    kept = jnp.where(column < dense.shape[1], column, 0)
    rows = dense[row.astype(np.int32), kept.astype(np.int32)]
    beyond = jnp.asarray(column >= dense.shape[1]).reshape(-1, *(1,) * (dense.ndim - 2))
    return jnp.where(beyond, jnp.zeros((), dense.dtype), rows)
