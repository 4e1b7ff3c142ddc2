"""Read and write strided views of a storage's value.

A storage's value is an array whose row-major elements are the storage's elements; its shape is any folding of them. A
tensor is a
(size, stride, offset) window on the elements. ``plan_view`` recognises what the window is in terms of the array: a
reshape, a slice
(with step) per dimension, a transpose and a broadcast; ``read_view`` and ``write_view`` emit exactly those. Only
windows that are none
of these (overlapping ``as_strided``, say) are gathered and scattered.

Where a slice starts is data, not structure: plans compare equal for every offset, and the starts are operands of the
program, so a loop
over ``x[i]`` compiles once.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

__all__ = ["ViewPlan", "physical_order", "plan_view", "read_view", "write_view"]

Ints = tuple[int, ...]


@dataclass(frozen=True)
class ViewPlan:
    """How to read a window from an array, without the place where it starts.

    Attributes:
        size: the window's sizes.
        folded: the shape the array is folded into; empty for an irregular window.
        count, step: for each folded dimension, how many elements are taken and at what distance.
        axes: for each dimension of the window, its folded dimension; None where the size is 1 or the window repeats
        (stride 0).
        repeated: whether some dimension has stride 0 and a size above 1.
        whole: the window covers the array, element by element, in folded order.
        strides: strides of an irregular window, read by gather; None for a regular one.
        static: the window starts at the first element; the starts are constants 0.
    """

    size: Ints
    folded: Ints = ()
    count: Ints = ()
    step: Ints = ()
    axes: tuple[int | None, ...] = ()
    repeated: bool = False
    whole: bool = False
    strides: Ints | None = None
    static: bool = True


def row_major(shape: Sequence[int]) -> Ints:
    """Strides of a contiguous tensor, in elements."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))


def physical_order(size: Sequence[int], stride: Sequence[int]) -> tuple[int, ...] | None:
    """The order of dimensions from the slowest to the fastest of a dense tensor; None if it is not dense (gaps or
    overlap).
    """
    return _physical_order(tuple(size), tuple(stride))


@functools.lru_cache(maxsize=65536)
def _physical_order(size: Ints, stride: Ints) -> tuple[int, ...] | None:
    if 0 in size:
        return tuple(range(len(size)))
    order = tuple(sorted(range(len(size)), key=lambda i: (-stride[i] if size[i] > 1 else 0, i)))
    # A dimension of one element has no place of its own: keep it before the next larger one, where it disturbs nothing.
    order = tuple(i for i in order if size[i] > 1)
    expected = 1
    for i in reversed(order):
        if stride[i] != expected:
            return None
        expected *= size[i]
    ones = [i for i in range(len(size)) if size[i] == 1]
    merged = list(order)
    for i in ones:
        at = next((k for k, j in enumerate(merged) if j > i), len(merged))
        merged.insert(at, i)
    return tuple(merged)


@functools.lru_cache(maxsize=65536)
def plan_view(shape: Ints, size: Ints, stride: Ints, offset: int) -> tuple[ViewPlan, Ints]:
    """The plan for a window on an array of that shape, and where it starts in each folded dimension.

    Raises:
        ValueError: the window reaches beyond the array.
    """
    if math.prod(size) == 0:
        return ViewPlan(size, strides=(), static=True), ()
    elements = math.prod(shape)
    last = offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    if last >= elements:
        raise ValueError(
            f"a view of size {size}, strides {stride}, offset {offset} needs {last + 1} elements of {elements}"
        )
    dims = sorted(
        ((s, n, i) for i, (n, s) in enumerate(zip(size, stride, strict=True)) if n > 1 and s > 0), reverse=True
    )
    repeated = any(n > 1 and s == 0 for n, s in zip(size, stride, strict=True))
    for chain in _chains(shape, dims, elements):
        found = _fit(chain, elements, dims, offset, size)
        if found is not None:
            folded, count, step, starts, axes = found
            used = [a for a in axes if a is not None]
            whole = not repeated and math.prod(size) == elements and used == sorted(used)
            static = not any(starts)
            return ViewPlan(size, folded, count, step, axes, repeated, whole, None, static), () if static else starts
    return ViewPlan(size, strides=stride, repeated=repeated, static=offset == 0), () if offset == 0 else (offset,)


def _significant(shape: Ints) -> Ints:
    """The row-major strides at which a contiguous array has a boundary, largest first, always ending in 1."""
    strides = {s for n, s in zip(shape, row_major(shape), strict=True) if n > 1}
    return tuple(sorted(strides | {1}, reverse=True))


def _chains(shape: Ints, dims: list[tuple[int, int, int]], elements: int) -> list[Ints]:
    """Candidate foldings, as descending strides each dividing the one before, those nearest to the array's own shape
    first.
    """
    base = set(_significant(shape))
    targets = [s for s, _, _ in dims]
    spanned = {b for b in base if any(s < b <= s * (n - 1) for s, n, _ in dims)}
    candidates = []
    for first, second in ((base - spanned, targets), (set(targets), []), (base, [])):
        strides = set(first) | {1}
        for s in second:
            if all(s % t == 0 or t % s == 0 for t in strides):
                strides.add(s)
        chain = tuple(sorted(strides, reverse=True))
        if (
            elements % chain[0] == 0
            and all(a % b == 0 for a, b in itertools.pairwise(chain))
            and chain not in candidates
        ):
            candidates.append(chain)
    return candidates


def _fit(chain: Ints, elements: int, dims: list[tuple[int, int, int]], offset: int, size: Ints):
    """Place every dimension of the window on one folded dimension, or None if the folding does not suit it."""
    folded = (elements // chain[0], *(a // b for a, b in itertools.pairwise(chain)))
    starts = tuple(offset // c % f for c, f in zip(chain, folded, strict=True))
    count, step = [1] * len(chain), [1] * len(chain)
    axes: list[int | None] = [None] * len(size)
    for s, n, i in dims:
        k = next(j for j, c in enumerate(chain) if c <= s)
        if s % chain[k] or count[k] != 1 or starts[k] + (s // chain[k]) * (n - 1) >= folded[k]:
            return None
        count[k], step[k], axes[i] = n, s // chain[k], k
    # a folding dimension of one element says nothing
    keep = [k for k in range(len(chain)) if folded[k] > 1]
    place = {k: j for j, k in enumerate(keep)}
    pick = lambda values: tuple(values[k] for k in keep)  # noqa: E731
    return pick(folded), pick(count), pick(step), pick(starts), tuple(None if a is None else place[a] for a in axes)


def _spans(plan: ViewPlan) -> Ints:
    return tuple((n - 1) * s + 1 for n, s in zip(plan.count, plan.step, strict=True))


def _indices(plan: ViewPlan, starts: Sequence[jax.Array]) -> jax.Array:
    """Element numbers of an irregular window, as int32 (int64 beyond 2**31 elements)."""
    assert plan.strides is not None
    reach = sum((n - 1) * s for n, s in zip(plan.size, plan.strides, strict=True))
    dtype = jnp.int32 if reach < 2**31 else jnp.int64
    total = jnp.asarray(starts[0] if starts else 0, dtype)
    for axis, (n, s) in enumerate(zip(plan.size, plan.strides, strict=True)):
        shape = [1] * len(plan.size)
        shape[axis] = n
        total = total + (jnp.arange(n, dtype=dtype) * s).reshape(shape)
    return jnp.broadcast_to(total, plan.size)


def read_view(array: jax.Array, plan: ViewPlan, starts: Sequence[jax.Array] = ()) -> jax.Array:
    """The window of ``array`` that ``plan`` describes, as an array of shape ``plan.size``.

    Args:
        array: the storage's value.
        starts: for a plan that is not static, int32 scalars: where the window starts in each folded dimension
            (or the element offset, for an irregular window).
    """
    if plan.strides is not None:
        if math.prod(plan.size) == 0:
            return jnp.zeros(plan.size, array.dtype)
        return array.reshape(-1)[_indices(plan, starts)]
    picked = _slice(_shaped(array, plan.folded), plan, starts)
    # Fold away what was taken as one element, order the rest as the window does, and repeat.
    kept = [k for k, n in enumerate(plan.count) if n > 1]
    wanted = [a for a in plan.axes if a is not None]
    if wanted != kept:
        picked = _shaped(picked, [plan.count[k] for k in kept]).transpose([kept.index(a) for a in wanted])
    picked = _shaped(picked, [n if a is not None else 1 for n, a in zip(plan.size, plan.axes, strict=True)])
    return picked if picked.shape == plan.size else jnp.broadcast_to(picked, plan.size)


def _shaped(array: jax.Array, shape: Sequence[int]) -> jax.Array:
    """``reshape`` that costs nothing where nothing changes: a graph has a thousand inputs."""
    return array if array.shape == tuple(shape) else array.reshape(shape)


def _slice(folded: jax.Array, plan: ViewPlan, starts: Sequence[jax.Array]) -> jax.Array:
    spans = _spans(plan)
    if spans != folded.shape:
        if plan.static:
            folded = lax.slice(folded, (0,) * folded.ndim, spans)
        else:
            folded = lax.dynamic_slice(folded, list(starts), spans)
    if any(s > 1 for s in plan.step):
        folded = lax.slice(folded, (0,) * folded.ndim, folded.shape, plan.step)
    return folded


def write_view(array: jax.Array, plan: ViewPlan, new: jax.Array, starts: Sequence[jax.Array] = ()) -> jax.Array:
    """``array`` with the window replaced by ``new`` (shape ``plan.size``, dtype of ``array``), in the array's own
    shape.

    Where the window repeats or overlaps, one of the values written to an element stays, as in PyTorch.
    """
    if math.prod(plan.size) == 0:
        return array
    if plan.strides is not None:
        flat = array.reshape(-1).at[_indices(plan, starts)].set(new, mode="drop")
        return flat.reshape(array.shape)
    for axis, (n, a) in enumerate(zip(plan.size, plan.axes, strict=True)):
        if a is None and n > 1:
            new = lax.slice_in_dim(new, 0, 1, axis=axis)
    used = [i for i, a in enumerate(plan.axes) if a is not None]
    new = new.reshape([plan.size[i] for i in used])
    new = new.transpose(sorted(range(len(used)), key=lambda j: plan.axes[used[j]]))
    new = new.reshape(plan.count)
    if plan.whole:
        return new.reshape(array.shape)
    folded = array.reshape(plan.folded)
    begin = [0] * folded.ndim if plan.static else list(starts)
    if any(s > 1 for s in plan.step):
        region = lax.dynamic_slice(folded, begin, _spans(plan))
        new = region.at[tuple(slice(0, None, s) for s in plan.step)].set(new)
    return lax.dynamic_update_slice(folded, new, begin).reshape(array.shape)
