"""Writing by index: scatters, index_add and its kin, index_put."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from torch._prims_common import canonicalize_dim

from torchtpu.lowering.context import check_index
from torchtpu.lowering.conversion import converted
from torchtpu.lowering.families.indexing import OUT_OF_BOUNDS, advanced_index, at_least_1d, is_mask
from torchtpu.lowering.promotion import cast
from torchtpu.lowering.registry import lowering

_UPDATES = {"set": "set", "sum": "add", "add": "add", "mean": "add", "prod": "multiply", "multiply": "multiply"}
_UPDATES |= {"amax": "max", "amin": "min"}


def write(x: jax.Array, subscripts: tuple, values: jax.Array, update: str = "set") -> jax.Array:
    """``x`` with ``values`` combined into the elements the subscripts select.

    ``update`` is PyTorch's name of the reduction. 16-bit floats combine in float32 and are rounded once; for bool,
    a sum is "or" and a product is "and".
    """
    method = _UPDATES[update]
    dtype = compute = x.dtype
    values = cast(values, dtype)
    if dtype == np.bool_:
        method = {"add": "max", "multiply": "min"}.get(method, method)
    elif dtype in (jnp.float16, jnp.bfloat16) and method in ("add", "multiply"):
        compute = np.dtype(np.float32)
    function = getattr(x.astype(compute).at[subscripts], method)
    return function(values.astype(compute), mode="promise_in_bounds", wrap_negative_indices=False).astype(dtype)


def _identity(dtype: np.dtype, update: str):
    """The value that a reduction leaves unchanged."""
    if update in ("amax", "amin"):
        if dtype == np.bool_:
            return update == "amin"
        if jnp.issubdtype(dtype, jnp.floating):
            return -jnp.inf if update == "amax" else jnp.inf
        info = jnp.iinfo(dtype)
        return info.min if update == "amax" else info.max
    return 1 if update in ("prod", "multiply") else 0


def reduce_into(x: jax.Array, subscripts: tuple, values: jax.Array, update: str, include_self: bool) -> jax.Array:
    """``write``, with the mean, and with or without what was there."""
    if not include_self:
        x = write(x, subscripts, jnp.asarray(_identity(x.dtype, update), x.dtype))
    out = write(x, subscripts, values, update)
    if update != "mean":
        return out
    counts = jnp.full(x.shape, int(include_self), jnp.int32)
    counts = cast(jnp.maximum(write(counts, subscripts, jnp.int32(1), "add"), 1), x.dtype)
    return out // counts if x.dtype.kind in "iu" else (out / counts).astype(x.dtype)


def _scatter(self, dim, index, src, combine: Callable[[jax.Array, tuple, jax.Array], jax.Array]) -> jax.Array:
    """The frame of every scatter along one dimension: element [i, j, k] of ``src`` goes to [i, index[i, j, k], k]."""
    x, i = at_least_1d(self), at_least_1d(index)
    if i.size == 0:
        return self
    dim = canonicalize_dim(x.ndim, dim)
    size = x.shape[dim]
    i = check_index(i, size, OUT_OF_BOUNDS.format(dim=dim, size=size), allow_negative=False, error=RuntimeError)
    subscripts = tuple(i if d == dim else _positions(i.shape, d) for d in range(i.ndim))
    values = jnp.asarray(src)
    if values.ndim or not i.ndim:
        values = at_least_1d(values)
        values = jax.lax.slice(values, [0] * i.ndim, i.shape) if values.shape != (1,) * i.ndim else values
    return combine(x, subscripts, values).reshape(self.shape)


def _positions(shape: tuple[int, ...], dim: int) -> jax.Array:
    """0, 1, 2, ... along one dimension of an index of this shape, shaped to broadcast against it."""
    return jnp.arange(shape[dim], dtype=jnp.int32).reshape([-1 if d == dim else 1 for d in range(len(shape))])


@lowering("scatter.src")
def scatter(self, dim, index, src):
    return _scatter(self, dim, index, src, write)


@lowering("scatter.value")
def scatter_value(self, dim, index, value):
    return _scatter(self, dim, index, value, write)


@lowering("scatter_add")
def scatter_add(self, dim, index, src):
    return _scatter(self, dim, index, src, lambda x, at, values: write(x, at, values, "add"))


@lowering("scatter.reduce")
def scatter_with(self, dim, index, src, reduce):
    return _scatter(self, dim, index, src, lambda x, at, values: write(x, at, values, reduce))


@lowering("scatter.value_reduce")
def scatter_value_with(self, dim, index, value, reduce):
    return scatter_with(self, dim, index, value, reduce)


@lowering("scatter_reduce.two")
def scatter_reduce(self, dim, index, src, reduce, include_self=True):
    return _scatter(self, dim, index, src, lambda x, at, values: reduce_into(x, at, values, reduce, include_self))


def _along(self, dim, index, message: str, negative: bool = False) -> tuple[jax.Array, tuple]:
    """The array with at least one dimension, and the subscripts of the slices that a 1-D index names."""
    x = at_least_1d(self)
    dim = canonicalize_dim(x.ndim, dim)
    size = x.shape[dim]
    at = check_index(at_least_1d(index), size, message.format(dim=dim, size=size), allow_negative=negative)
    return x, (slice(None),) * dim + (at,)


@lowering("index_add")
def index_add(self, dim, index, source, alpha=1):
    x, at = _along(self, dim, index, OUT_OF_BOUNDS if self.ndim > 1 else "index out of range in self")
    if not (isinstance(alpha, int) and alpha == 1):
        source = source * cast(alpha, source.dtype)
    return write(x, at, _slices(source, x, at), "add").reshape(self.shape)


def _slices(source: jax.Array, x: jax.Array, at: tuple) -> jax.Array:
    """``source`` in the shape of the selected slices (a 0-d or 1-element source is one slice)."""
    dim = len(at) - 1
    return source.reshape(*x.shape[:dim], at[-1].shape[0], *x.shape[dim + 1 :])


@lowering("index_copy")
def index_copy(self, dim, index, source):
    x, at = _along(self, dim, index, f"index_copy_(): {OUT_OF_BOUNDS}")
    slices = _slices(source, x, at)
    if at[-1].shape == (1,):
        new = jax.lax.dynamic_update_slice_in_dim(x, slices, at[-1][0], len(at) - 1)
    else:
        new = write(x, at, slices)
    # A cache is written in place and then read: without the barrier, XLA:CPU writes a copy of it again for each reader.
    return jax.lax.optimization_barrier(new).reshape(self.shape)


@lowering("index_fill.int_Scalar", "index_fill.int_Tensor")
def index_fill(self, dim, index, value):
    if jnp.asarray(value).dtype.kind == "c" and self.dtype.kind != "c":
        raise RuntimeError("index_fill_(): Converting complex Scalar to non-complex type is not supported")
    x, at = _along(self, dim, index, OUT_OF_BOUNDS, negative=True)
    return write(x, at, converted(value, x.dtype)).reshape(self.shape)


@lowering("index_reduce")
def index_reduce(self, dim, index, source, reduce, include_self=True):
    x, at = _along(self, dim, index, "index out of range in self")
    return reduce_into(x, at, _slices(source, x, at), reduce, include_self).reshape(self.shape)


def _put_by_mask(self: jax.Array, indices, values: jax.Array, accumulate: bool) -> jax.Array:
    """``index_put`` where the only index is a mask: how many elements it selects is data, but no shape is."""
    dim = next(d for d, i in enumerate(indices) if i is not None)
    mask = indices[dim].astype(bool)
    if mask.shape != self.shape[dim : dim + mask.ndim]:
        raise IndexError(f"the mask's shape {mask.shape} does not match {self.shape} from dimension {dim}")
    rest = self.shape[dim + mask.ndim :]
    inner = values.ndim - len(rest) - 1  # where the dimension that counts the selected elements would be
    full = jnp.broadcast_to(jnp.expand_dims(mask, range(mask.ndim, mask.ndim + len(rest))), self.shape[dim:])
    if inner < 0 or values.shape[inner] == 1:  # the same values at every selected position
        if inner >= 0:
            ones = (1,) * (mask.ndim - 1)
            values = values.reshape(*values.shape[:inner], *ones, *values.shape[inner:])
        new = jnp.broadcast_to(cast(values, self.dtype), self.shape)
    else:
        lead, count = self.shape[:dim], values.shape[inner]
        values = jnp.broadcast_to(cast(values, self.dtype), (*lead, count, *rest))
        flat = mask.reshape(-1)
        rank = jnp.where(flat, jnp.cumsum(flat, dtype=jnp.int32) - 1, 0)
        excess = flat.sum(dtype=jnp.int32)[None] - count
        message = f"shape mismatch: {count} values for a mask whose count of true elements differs by {{value}}"
        check_index(excess, 1, message, allow_negative=False)
        if count == 0:
            return self
        new = jnp.take(values, rank, axis=dim, mode="clip").reshape(self.shape)
    if accumulate:
        new = self | new if self.dtype == np.bool_ else self + new
    return jnp.where(full, new, self)


def _index_put(self, indices, values, accumulate: bool, checked: bool = True):
    given = [i for i in indices if i is not None]
    if len(given) == 1 and is_mask(given[0]) and given[0].ndim:
        return _put_by_mask(self, indices, values, accumulate)
    subscripts = advanced_index(self.shape, indices, checked)
    return write(self, subscripts, values, "add" if accumulate else "set")


@lowering("index_put")
def index_put(self, indices, values, accumulate=False):
    return _index_put(self, indices, values, accumulate)


@lowering("_index_put_impl")
def index_put_impl(self, indices, values, accumulate=False, unsafe=False):
    return _index_put(self, indices, values, accumulate, checked=not unsafe)


@lowering("_unsafe_index_put")
def unsafe_index_put(self, indices, values, accumulate=False):
    return _index_put(self, indices, values, accumulate, checked=False)


@lowering("put")
def put(self, index, source, accumulate=False):
    message = f"out of range: tried to access index {{value}} on a tensor of {self.size} elements."
    at = check_index(index.reshape(-1), self.size, message)
    return write(self.reshape(-1), (at,), source.reshape(-1), "add" if accumulate else "set").reshape(self.shape)
