"""Sorting and selection: sort, top-k, order statistics, binary search, histograms, unique."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from torchtpu.lowering.families.reductions import INT64, compute_dtype
from torchtpu.lowering.promotion import cast, promote
from torchtpu.lowering.registry import lowering

Array = jax.Array


def _is_nan(x: Array) -> Array:
    return jnp.isnan(x) if jnp.issubdtype(x.dtype, jnp.floating) else jnp.zeros(x.shape, bool)


def sort_with_index(x: Array, dim: int, descending: bool = False) -> tuple[Array, Array]:
    """Stable sort and int32 positions; NaN counts as the largest value."""
    dim %= x.ndim
    index = jax.lax.broadcasted_iota(np.int32, x.shape, dim)
    if not descending:
        values, positions = jax.lax.sort((x, index), dimension=dim, is_stable=True, num_keys=1)
        return values, positions
    # Reversing before and after keeps equal elements in their order.
    reversed_operands = (jax.lax.rev(x, (dim,)), jax.lax.rev(index, (dim,)))
    values, positions = jax.lax.sort(reversed_operands, dimension=dim, is_stable=True, num_keys=1)
    return jax.lax.rev(values, (dim,)), jax.lax.rev(positions, (dim,))


@lowering("sort")
def sort(self, dim=-1, descending=False):
    if self.ndim == 0:
        return self, jnp.zeros((), INT64)
    values, index = sort_with_index(self, dim, descending)
    return values, index.astype(INT64)


@lowering("sort.stable")
def sort_stable(self, *, stable, dim=-1, descending=False):
    return sort(self, dim, descending)


@lowering("argsort")
def argsort(self, dim=-1, descending=False):
    return sort(self, dim, descending)[1]


@lowering("argsort.stable")
def argsort_stable(self, *, stable, dim=-1, descending=False):
    return sort(self, dim, descending)[1]


@lowering("msort")
def msort(self):
    return jax.lax.sort(self, dimension=0) if self.ndim else self


def _rank_key(x: Array, largest: bool) -> Array:
    """What ``lax.top_k`` must look at to find the largest (smallest) elements, NaN counting as the largest.

    float32 where it is exact, because XLA has a dedicated top-k for it. In its total order a negative NaN is the least
    value and a positive NaN the greatest.
    """
    if x.dtype == bool or (x.dtype.kind in "iu" and x.dtype.itemsize <= 2):
        x = x.astype(np.float32)
    elif x.dtype.kind in "iu":
        return x if largest else ~x
    x = x.astype(compute_dtype(x.dtype))
    nan = np.asarray(np.nan, x.dtype)
    return jnp.where(jnp.isnan(x), np.copysign(nan, 1 if largest else -1), x if largest else -x)


@lowering("topk")
def topk(self, k, dim=-1, largest=True, sorted=True):
    if self.ndim == 0:
        return self, jnp.zeros((), INT64)
    dim %= self.ndim
    x = jnp.moveaxis(self, dim, -1)
    _, index = jax.lax.top_k(_rank_key(x, largest), k)
    values = jnp.take_along_axis(x, index, axis=-1)
    return jnp.moveaxis(values, -1, dim), jnp.moveaxis(index, -1, dim).astype(INT64)


# Order statistics


def _pick(ordered: tuple[Array, Array], place: Array | int, dim: int, keepdim: bool) -> tuple[Array, Array]:
    """The element at ``place`` (one per row, kept dimension) of a sorted array and its index."""
    values, index = ordered
    if isinstance(place, int):
        picked = [jax.lax.slice_in_dim(a, place, place + 1, axis=dim) for a in (values, index)]
    else:
        picked = [jnp.take_along_axis(a, place, axis=dim) for a in (values, index)]
    picked = picked if keepdim else [jnp.squeeze(a, dim) for a in picked]
    return picked[0], picked[1].astype(INT64)


@lowering("kthvalue")
def kthvalue(self, k, dim=-1, keepdim=False):
    if self.ndim == 0:
        return self, jnp.zeros((), INT64)
    dim %= self.ndim
    return _pick(sort_with_index(self, dim), k - 1, dim, keepdim)


def _median_place(x: Array, dim: int, ignore_nan: bool) -> Array:
    """Where the lower median is in the sorted row: the first NaN if NaN counts and there is one."""
    n = x.shape[dim]
    numbers = jnp.sum(~_is_nan(x), axis=dim, keepdims=True, dtype=np.int32)
    if ignore_nan:
        return jnp.maximum((numbers - 1) // 2, 0)
    return jnp.where(numbers < n, numbers, (n - 1) // 2)


def _register_median(name: str, ignore_nan: bool) -> None:
    @lowering(f"{name}.dim")
    def by_dim(self, dim, keepdim=False):
        if self.ndim == 0:
            return self, jnp.zeros((), INT64)
        dim %= self.ndim
        return _pick(sort_with_index(self, dim), _median_place(self, dim, ignore_nan), dim, keepdim)

    @lowering(name)
    def over_all(self):
        if self.size == 0:
            if jnp.issubdtype(self.dtype, jnp.floating):
                return jnp.full((), jnp.nan, self.dtype)
            # The smallest integer, which is what PyTorch's conversion of NaN gives on x86.
            return jnp.full((), jnp.iinfo(self.dtype).min, self.dtype)
        flat = self.reshape(-1)
        return jax.lax.sort(flat)[_median_place(flat, 0, ignore_nan)[0]]


_register_median("median", ignore_nan=False)
_register_median("nanmedian", ignore_nan=True)


@lowering("mode")
def mode(self, dim=-1, keepdim=False):
    if self.ndim == 0:
        return self, jnp.zeros((), INT64)
    dim %= self.ndim
    values, index = sort_with_index(self, dim)
    n = self.shape[dim]
    place = jax.lax.broadcasted_iota(np.int32, self.shape, dim)
    if n > 1:
        before = jax.lax.slice_in_dim(values, 0, n - 1, axis=dim)
        after = jax.lax.slice_in_dim(values, 1, n, axis=dim)
        edge = jnp.ones_like(jax.lax.slice_in_dim(values, 0, 1, axis=dim), bool)
        changes = before != after
        begins = jnp.concatenate([edge, changes], axis=dim)
        ends = jnp.concatenate([changes, edge], axis=dim)
        start = jax.lax.cummax(jnp.where(begins, place, 0), axis=dim)
        length = jnp.where(ends, place - start + 1, 0)
    else:
        length = place + 1
    # The first of the longest runs holds the smallest of the most frequent values.
    longest = jnp.expand_dims(jax.lax.argmax(length, dim, np.int32), dim)
    return _pick((values, index), longest, dim, keepdim)


# Binary search and histograms


def _search(boundaries: Array, values: Array, right: bool, sorter: Array | None = None) -> Array:
    """Insertion points along the last dimension as int32, by PyTorch's own comparisons (they decide where NaN goes).

    ``boundaries`` is 1-d, or has the leading dimensions of ``values``.
    """
    n = boundaries.shape[-1]
    shape = values.shape
    if boundaries.ndim == 1:
        values = values.reshape(-1)
    low, high = jnp.zeros(values.shape, np.int32), jnp.full(values.shape, n, np.int32)
    for _ in range(n.bit_length()):
        middle = (low + high) // 2
        at = jnp.minimum(middle, n - 1)
        place = at if sorter is None else jnp.take_along_axis(sorter, at, axis=-1).astype(np.int32)
        found = jnp.take_along_axis(boundaries, place, axis=-1)
        onward = ~(found > values) if right else ~(found >= values)
        open_ = low < high
        low, high = jnp.where(open_ & onward, middle + 1, low), jnp.where(open_ & ~onward, middle, high)
    return low.reshape(shape)


@lowering("searchsorted.Tensor", "searchsorted.Scalar")
def searchsorted(sorted_sequence, self, *, out_int32=False, right=False, side=None, sorter=None):
    (boundaries, values), _ = promote(sorted_sequence, self)
    if boundaries.ndim > 1 and values.ndim == 0:
        values = values.reshape((1,) * boundaries.ndim)
    place = _search(boundaries, values, right or side == "right", sorter)
    return place.astype(np.int32 if out_int32 else INT64)


@lowering("bucketize.Tensor", "bucketize.Scalar")
def bucketize(self, boundaries, *, out_int32=False, right=False):
    return searchsorted(boundaries, self, out_int32=out_int32, right=right)


@lowering("_convert_indices_from_coo_to_csr")
def convert_indices_from_coo_to_csr(self, size, *, out_int32=False):
    rows = jnp.arange(size + 1, dtype=self.dtype)
    return _search(self, rows, False, None).astype(np.int32 if out_int32 else INT64)


@lowering("_convert_indices_from_csr_to_coo")
def convert_indices_from_csr_to_coo(crow_indices, col_indices, *, out_int32=False, transpose=False):
    dtype = np.int32 if out_int32 else INT64
    batch, nnz = crow_indices.shape[:-1], col_indices.shape[-1]
    step = jnp.broadcast_to(jnp.arange(nnz, dtype=crow_indices.dtype), (*batch, nnz))
    row, column = _search(crow_indices, step, True, None) - 1, col_indices
    parts = [jax.lax.broadcasted_iota(dtype, (*batch, nnz), d) for d in range(len(batch))]
    parts += [column, row] if transpose else [row, column]
    return jnp.stack([p.astype(dtype).reshape(-1) for p in parts])


@lowering("histc")
def histc(self, bins=100, min=0, max=0):
    dtype = compute_dtype(self.dtype) if jnp.issubdtype(self.dtype, jnp.floating) else np.dtype("float32")
    x = self.astype(dtype).reshape(-1)
    low, high = cast(min, dtype), cast(max, dtype)
    if x.size:
        # Equal bounds mean the data's own.
        low, high = jnp.where(low == high, x.min(), low), jnp.where(low == high, x.max(), high)
    one = np.ones((), dtype)
    low, high = jnp.where(low == high, low - one, low), jnp.where(low == high, high + one, high)
    place = ((x - low) * np.asarray(bins, dtype) / (high - low)).astype(np.int32)
    inside = (x >= low) & (x <= high)
    place = jnp.where(inside, jnp.minimum(place, bins - 1), bins)
    return jnp.zeros((bins + 1,), dtype).at[place].add(one)[:bins].astype(self.dtype)


@lowering("bincount", dynamic=True)
def bincount(self, weights=None, minlength=0):
    index = np.asarray(self)
    if index.size and index.min() < 0:
        raise RuntimeError("bincount only supports 1-d non-negative integral inputs.")
    if weights is None:
        return jnp.asarray(np.bincount(index, minlength=minlength).astype(INT64))
    result = np.dtype("float32") if weights.dtype == np.float32 else np.dtype("float64")
    return jnp.asarray(np.bincount(index, np.asarray(weights, np.float64), minlength=minlength).astype(result))


# Unique: the number of results depends on the data, so these run on the host. Along a dimension PyTorch returns the
# inverse and the counts whether or not they are asked for.


def _host(x: Array) -> tuple[np.ndarray, np.dtype]:
    """A NumPy array that NumPy can sort, and the dtype to give back."""
    dtype = np.dtype(x.dtype)
    return (np.asarray(x, np.float32) if dtype in (jnp.bfloat16, jnp.float16) else np.asarray(x)), dtype


def _runs(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(first position of each run of equal rows, the run each row belongs to). NaN equals nothing."""
    if len(rows) == 0:
        return np.zeros(0, INT64), np.zeros(0, INT64)
    changes = (rows[1:] != rows[:-1]).any(axis=tuple(range(1, rows.ndim)))
    first = np.flatnonzero(np.concatenate([[True], changes]))
    return first, np.concatenate([[0], np.cumsum(changes)]).astype(INT64)


def _unique_rows(
    rows: np.ndarray, ordered: bool, inverse: bool, counts: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Unique rows (first axis), inverse and counts; empty where not asked for."""
    if ordered:
        order = np.arange(len(rows))
    else:
        keys = rows.reshape(len(rows), math.prod(rows.shape[1:])).T[::-1]
        order = np.lexsort(keys) if len(keys) else np.arange(len(rows))
    first, run = _runs(rows[order])
    places = np.zeros(len(rows) if inverse else 0, INT64)
    if inverse:
        places[order] = run
    lengths = np.diff(np.append(first, len(rows))).astype(INT64) if counts else np.zeros(0, INT64)
    return rows[order][first], places, lengths


def _unique(x: Array, dim: int | None, ordered: bool, inverse: bool, counts: bool) -> tuple[Array, Array, Array]:
    host, dtype = _host(x)
    rows = host.reshape(-1) if dim is None else np.moveaxis(host, dim, 0)
    values, places, lengths = _unique_rows(rows, ordered, inverse, counts)
    if dim is None:
        places = places.reshape(x.shape) if inverse else places
    else:
        values = np.moveaxis(values, 0, dim)
    return jnp.asarray(values.astype(dtype)), jnp.asarray(places), jnp.asarray(lengths)


@lowering("_unique", dynamic=True)
def unique_(self, sorted=True, return_inverse=False):
    return _unique(self, None, False, return_inverse, False)[:2]


@lowering("_unique2", dynamic=True)
def unique2(self, sorted=True, return_inverse=False, return_counts=False):
    return _unique(self, None, False, return_inverse, return_counts)


@lowering("unique_dim", dynamic=True)
def unique_dim(self, dim, sorted=True, return_inverse=False, return_counts=False):
    return _unique(self, dim % self.ndim, False, True, True)


@lowering("unique_consecutive", dynamic=True)
def unique_consecutive(self, return_inverse=False, return_counts=False, dim=None):
    if dim is not None:
        return unique_dim_consecutive(self, dim)
    return _unique(self, None, True, return_inverse, return_counts)


@lowering("unique_dim_consecutive", dynamic=True)
def unique_dim_consecutive(self, dim, return_inverse=False, return_counts=False):
    return _unique(self, dim % self.ndim, True, True, True)
