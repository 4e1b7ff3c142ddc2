"""Reading by index or mask, and embeddings."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from torch._prims_common import canonicalize_dim

from torchtpu.lowering.context import check_index
from torchtpu.lowering.conversion import converted
from torchtpu.lowering.promotion import cast
from torchtpu.lowering.registry import lowering

OUT_OF_BOUNDS = "index {{value}} is out of bounds for dimension {dim} with size {size}"
TOO_FEW = "Number of elements of source < number of ones in mask"


def wrap(index: jax.Array, size: int) -> jax.Array:
    """Negative indices counted from the end, unchecked, int32."""
    index = index.astype(jnp.int32)
    return jnp.where(index < 0, index + size, index)


def at_least_1d(x: jax.Array) -> jax.Array:
    """PyTorch's indexing functions take a 0-d tensor for one of length 1."""
    return x.reshape(1) if x.ndim == 0 else x


def is_mask(index: jax.Array | None) -> bool:
    """Whether an index selects by truth (uint8 counts as bool, as it always has in PyTorch)."""
    return index is not None and index.dtype in (np.bool_, np.uint8)


def advanced_index(shape: tuple[int, ...], indices, checked: bool = True) -> tuple:
    """What to subscript an array of this shape with, for PyTorch's list of index tensors and Nones.

    Index tensors are broadcast together and made non-negative int32, so that NumPy's rule for where their dimensions
    go applies (in place when adjacent, else in front), which is PyTorch's too. A mask stands for the positions where
    it is true: how many there are is data, so masks must be concrete arrays, outside any trace.
    """
    subscripts: list = []
    for index in indices:
        if is_mask(index):
            mask = np.asarray(index)
            dim = len(subscripts)
            if mask.shape != shape[dim : dim + mask.ndim]:
                raise IndexError(
                    f"The shape of the mask {list(mask.shape)} at index {dim} does not match the shape of the indexed "
                    f"tensor {list(shape)} at index {dim}"
                )
            subscripts += [jnp.asarray(p, jnp.int32) for p in (mask.nonzero() if mask.ndim else _scalar_mask(mask))]
        elif index is None:
            subscripts.append(None)
        else:
            size = shape[len(subscripts)]
            message = OUT_OF_BOUNDS.format(dim=len(subscripts), size=size)
            subscripts.append(check_index(index, size, message) if checked else wrap(index, size))
    common = jnp.broadcast_shapes(*(s.shape for s in subscripts if s is not None))
    return tuple(slice(None) if s is None else jnp.broadcast_to(s, common) for s in subscripts)


def _scalar_mask(mask: np.ndarray) -> tuple[np.ndarray, ...]:
    raise NotImplementedError(f"a 0-d mask ({bool(mask)}) as an index; use torch.where or an ordinary if")


def read(self: jax.Array, subscripts: tuple) -> jax.Array:
    return self.at[subscripts].get(mode="promise_in_bounds", wrap_negative_indices=False)


@lowering("index.Tensor")
def index(self, indices):
    return read(self, advanced_index(self.shape, indices))


@lowering("_unsafe_index.Tensor")
def unsafe_index(self, indices):
    return read(self, advanced_index(self.shape, indices, checked=False))


@lowering("index_select")
def index_select(self, dim, index):
    x = at_least_1d(self)
    dim = canonicalize_dim(x.ndim, dim)
    index = check_index(at_least_1d(index), x.shape[dim], "index out of range in self", allow_negative=False)
    out = read(x, (slice(None),) * dim + (index,))
    return out.reshape(()) if self.ndim == 0 else out


@lowering("gather")
def gather(self, dim, index, sparse_grad=False):
    x, i = at_least_1d(self), at_least_1d(index)
    dim = canonicalize_dim(x.ndim, dim)
    size = x.shape[dim]
    i = check_index(i, size, OUT_OF_BOUNDS.format(dim=dim, size=size), allow_negative=False, error=RuntimeError)
    if i.size == 0:
        return jnp.zeros(index.shape, self.dtype)
    x = jax.lax.slice(x, [0] * x.ndim, [x.shape[d] if d == dim else n for d, n in enumerate(i.shape)])
    return jnp.take_along_axis(x, i, dim, mode="promise_in_bounds").reshape(index.shape)


@lowering("take")
def take(self, index):
    message = f"out of range: tried to access index {{value}} on a tensor of {self.size} elements."
    return read(self.reshape(-1), (check_index(index, self.size, message),))


@lowering("masked_select", dynamic=True)
def masked_select(self, mask):
    x, mask = np.broadcast_arrays(np.asarray(self), np.asarray(mask))
    return jnp.asarray(x[mask], self.dtype)


@lowering("nonzero", dynamic=True)
def nonzero(self):
    x = np.asarray(self) != 0
    positions = np.stack(x.nonzero(), -1) if x.ndim else np.zeros((int(x), 0))
    return jnp.asarray(positions, jnp.int64)


@lowering("nonzero_static")
def nonzero_static(self, size, fill_value=-1):
    if self.ndim == 0:
        return jnp.zeros((size, 0), jnp.int64)
    if self.size == 0:
        return jnp.full((size, self.ndim), fill_value, jnp.int64)
    positions = jnp.nonzero(self, size=size, fill_value=fill_value)
    return jnp.stack(positions, -1).astype(jnp.int64)


@lowering("masked_fill.Scalar", "masked_fill.Tensor")
def masked_fill(self, mask, value):
    x, mask = jnp.broadcast_arrays(self, mask)
    return jnp.where(mask, converted(value, self.dtype), x)


def _rank_in_mask(mask: jax.Array) -> jax.Array:
    """For every element of a flat mask, how many true ones come before it."""
    return jnp.cumsum(mask, dtype=jnp.int32) - mask.astype(jnp.int32)


@lowering("masked_scatter")
def masked_scatter(self, mask, source):
    if mask.dtype != np.bool_:
        raise RuntimeError(f"masked_scatter_ only supports boolean masks, but got mask with dtype {mask.dtype}")
    x, mask = jnp.broadcast_arrays(self, mask)
    return spread_by_mask(x, mask, source)


def spread_by_mask(x: jax.Array, mask: jax.Array, source: jax.Array) -> jax.Array:
    """``x`` with the elements of ``source``, in order, where ``mask`` (of x's shape) is true: no shape is data."""
    flat = mask.reshape(-1)
    if source.size == 0:
        check_index(flat.any()[None], 1, TOO_FEW)
        return x
    rank = jnp.where(flat, _rank_in_mask(flat), 0)
    rank = check_index(rank, source.size, TOO_FEW)
    return jnp.where(mask, read(source.reshape(-1), (rank,)).reshape(x.shape).astype(x.dtype), x)


@lowering("masked_scatter_backward")
def masked_scatter_backward(grad_output, mask, sizes):
    grad, mask = (a.reshape(-1) for a in jnp.broadcast_arrays(grad_output, mask))
    size = int(np.prod(sizes))
    rank = jnp.where(mask, _rank_in_mask(mask), size)
    return jnp.zeros(size, grad.dtype).at[rank].set(grad, mode="drop", unique_indices=False).reshape(sizes)


@lowering("embedding")
def embedding(weight, indices, padding_idx=-1, scale_grad_by_freq=False, sparse=False):
    rows = check_index(indices, weight.shape[0], "index out of range in self", allow_negative=False)
    return read(weight, (rows,))


@lowering("embedding_renorm", static=("norm_type",))
def embedding_renorm(self, indices, max_norm, norm_type):
    """The table with the rows that are used, and are longer than ``max_norm``, scaled down to it."""
    rows = check_index(indices.reshape(-1), self.shape[0], "index out of range in self", allow_negative=False)
    compute = jnp.float32 if self.dtype in (jnp.float16, jnp.bfloat16) else self.dtype
    used = read(self, (rows,)).astype(compute)
    norms = jnp.linalg.norm(used, norm_type, axis=-1, keepdims=True)
    limit = cast(max_norm, compute)
    shorter = jnp.where(norms > limit, used * (limit / (norms + 1e-7)), used)
    return self.at[rows].set(shorter.astype(self.dtype), mode="promise_in_bounds", wrap_negative_indices=False)


def _add_rows(rows: jax.Array, values: jax.Array, count: int) -> jax.Array:
    """A table of ``count`` rows: the sum of the values given for each; 16-bit floats add in float32."""
    compute = jnp.float32 if values.dtype in (jnp.float16, jnp.bfloat16) else values.dtype
    table = jnp.zeros((count, *values.shape[1:]), compute)
    return table.at[rows].add(values.astype(compute), mode="promise_in_bounds", wrap_negative_indices=False)


def _by_frequency(rows: jax.Array, used: jax.Array, count: int, dtype) -> jax.Array:
    """1 / how often each row occurs, for every occurrence."""
    times = jnp.zeros(count, jnp.int32).at[rows].add(used.astype(jnp.int32), mode="promise_in_bounds")
    return 1 / jnp.maximum(times, 1)[rows].astype(dtype)


@lowering("embedding_dense_backward")
def embedding_dense_backward(grad_output, indices, num_weights, padding_idx, scale_grad_by_freq):
    rows = indices.reshape(-1).astype(jnp.int32)
    grad = grad_output.reshape(rows.shape[0], -1 if rows.shape[0] else grad_output.shape[-1])
    if padding_idx >= 0:
        grad = jnp.where((rows == padding_idx)[:, None], jnp.zeros((), grad.dtype), grad)
    if scale_grad_by_freq:
        grad = grad * _by_frequency(rows, jnp.ones_like(rows), num_weights, grad.dtype)[:, None]
    return _add_rows(rows, grad, num_weights).astype(grad.dtype)


SUM, MEAN, MAX = range(3)


def _bag_of(offsets: jax.Array, count: int) -> jax.Array:
    """The bag each of ``count`` positions lies in."""
    positions = jnp.arange(count, dtype=jnp.int32)
    return jnp.searchsorted(offsets.astype(jnp.int32), positions, side="right").astype(jnp.int32) - 1


@lowering("_embedding_bag", "_embedding_bag_forward_only")
def embedding_bag(
    weight,
    indices,
    offsets,
    scale_grad_by_freq=False,
    mode=SUM,
    sparse=False,
    per_sample_weights=None,
    include_last_offset=False,
    padding_idx=-1,
):
    """The bags, the bag of each index, the size of each bag, the row that won each maximum.

    Their shapes are those of PyTorch's kernels for devices other than the CPU.
    """
    dtype = np.promote_types(indices.dtype, offsets.dtype)
    bags = offsets.shape[0] - bool(include_last_offset)
    compute = jnp.float32 if weight.dtype in (jnp.float16, jnp.bfloat16) else weight.dtype
    rows = check_index(indices, weight.shape[0], "index out of range in self", allow_negative=False)
    bag = _bag_of(offsets[:bags], rows.shape[0])
    used = rows != padding_idx
    sizes = jnp.zeros(bags, jnp.int32).at[bag].add(used.astype(jnp.int32), mode="promise_in_bounds")
    values = read(weight, (rows,)).astype(compute)
    winners = jnp.zeros(0, dtype)
    if mode == MAX:
        values = jnp.where(used[:, None], values, -jnp.inf)
        best = jnp.full((bags, weight.shape[1]), -jnp.inf, compute).at[bag].max(values, mode="promise_in_bounds")
        at = jnp.arange(rows.shape[0], dtype=jnp.int32)[:, None]
        hit = jnp.where((values == best[bag]) & used[:, None], at, rows.shape[0])
        first = jnp.full(best.shape, rows.shape[0], jnp.int32).at[bag].min(hit, mode="promise_in_bounds")
        winners = jnp.concatenate([rows, jnp.full(1, -1, jnp.int32)])[first].astype(dtype)
        out = jnp.where((sizes > 0)[:, None], best, 0)
    else:
        scale = used.astype(compute) if per_sample_weights is None else used * per_sample_weights.astype(compute)
        out = _add_rows(bag, values * scale[:, None], bags)
        if mode == MEAN:
            out = out / jnp.maximum(sizes, 1)[:, None].astype(compute)
    sizes = jnp.pad(sizes, (0, offsets.shape[0] - bags))
    return out.astype(weight.dtype), bag.astype(dtype), sizes.astype(dtype), winners


@lowering("_embedding_bag_dense_backward")
def embedding_bag_dense_backward(
    grad,
    indices,
    offset2bag,
    bag_size,
    maximum_indices,
    num_weights,
    scale_grad_by_freq,
    mode,
    per_sample_weights,
    padding_idx=-1,
):
    rows, bag = indices.astype(jnp.int32), offset2bag.astype(jnp.int32)
    compute = jnp.float32 if grad.dtype in (jnp.float16, jnp.bfloat16) else grad.dtype
    grad, dtype = grad.astype(compute), grad.dtype
    sizes = bag_size[: grad.shape[0]]
    if mode == MAX:
        columns = jnp.broadcast_to(jnp.arange(grad.shape[1], dtype=jnp.int32), grad.shape)
        won = jnp.where((sizes > 0)[:, None], grad, 0)
        at = jnp.maximum(maximum_indices.astype(jnp.int32), 0)
        table = jnp.zeros((num_weights, grad.shape[1]), compute)
        return table.at[at, columns].add(won, mode="promise_in_bounds").astype(dtype)
    used = rows != padding_idx
    scale = used.astype(compute)
    if per_sample_weights is not None:
        scale = scale * per_sample_weights.astype(compute)
    if scale_grad_by_freq:
        scale = scale * _by_frequency(rows, used, num_weights, compute)
    if mode == MEAN:
        grad = grad / jnp.maximum(sizes, 1)[:, None].astype(compute)
    return _add_rows(rows, read(grad, (bag,)) * scale[:, None], num_weights).astype(dtype)


@lowering("_embedding_bag_backward")
def embedding_bag_backward(
    grad,
    indices,
    offsets,
    offset2bag,
    bag_size,
    maximum_indices,
    num_weights,
    scale_grad_by_freq,
    mode,
    sparse,
    per_sample_weights,
    padding_idx=-1,
):
    if sparse:
        raise NotImplementedError("embedding_bag with sparse=True: XLA has no sparse gradients; use sparse=False")
    if offset2bag.shape != indices.shape:  # PyTorch's CPU kernel leaves it empty when its forward did not need it
        offset2bag = _bag_of(offsets[: grad.shape[0]], indices.shape[0])
    return embedding_bag_dense_backward(
        grad,
        indices,
        offset2bag,
        bag_size,
        maximum_indices,
        num_weights,
        scale_grad_by_freq,
        mode,
        per_sample_weights,
        padding_idx,
    )


@lowering("_embedding_bag_per_sample_weights_backward")
def embedding_bag_per_sample_weights_backward(grad, weight, indices, offsets, offset2bag, mode, padding_idx=-1):
    if offset2bag.shape != indices.shape:
        offset2bag = _bag_of(offsets[: grad.shape[0]], indices.shape[0])
    rows = indices.astype(jnp.int32)
    compute = jnp.float32 if grad.dtype in (jnp.float16, jnp.bfloat16) else grad.dtype
    products = read(grad, (offset2bag.astype(jnp.int32),)).astype(compute) * read(weight, (rows,)).astype(compute)
    return jnp.where(rows != padding_idx, products.sum(-1), 0).astype(grad.dtype)
