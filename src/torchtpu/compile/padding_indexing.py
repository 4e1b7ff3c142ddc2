"""What padding does to operators that index, and to those that draw random numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from torchtpu.compile.padding_layout import Dim, Padded, in_a_row, is_padded, normal
from torchtpu.compile.padding_rules import Call, broadcast, extents, rule
from torchtpu.lowering.context import check_index

__all__: list[str] = []


def _index(call: Call, index: Padded, dim: Dim, beyond: int = 0, negative: bool = True) -> Padded:
    """Indices into a dimension, made non-negative and checked against its number of elements; ``beyond`` where they are
    padding.
    """
    found = check_index(
        jnp.asarray(call.frame.fill(index, 0)),
        call.frame.count(dim),
        "index {value} is out of bounds for a dimension of " + call.name,
        allow_negative=negative,
    ).astype(jnp.int64)
    return Padded(call.frame.fill(Padded(found, index.dims), beyond), index.dims)


def _no_masks(call: Call, indices: list[Padded]) -> None:
    if any(i.array.dtype in (jnp.bool_, jnp.uint8) for i in indices):
        raise call.refuse("indexes with a mask")


@rule("embedding")
def embedding(call: Call) -> Padded:
    """Padding reads row 0."""
    weight, index = call.frame.leading(call["weight"], 0), call["indices"]
    at = _index(call, index, weight.dims[0], negative=False)
    return Padded(call.run(weight=weight, indices=at), (*index.dims, *weight.dims[1:]))


@rule("embedding_dense_backward")
def embedding_dense_backward(call: Call) -> Padded:
    """Padding adds zero to row 0."""
    if call["scale_grad_by_freq"]:
        raise call.refuse("counts how often rows are read")
    grad, index = call["grad_output"], call["indices"]
    for i, dim in enumerate(index.dims):
        grad = call.frame.relayout(grad, i, dim)
    rows = call.sizes()[0]
    if not isinstance(rows, int):
        raise call.refuse("has a number of rows that changes")
    axes = range(len(index.dims))
    grad = Padded(call.frame.fill(grad, 0, axes), grad.dims)
    made = call.run(grad_output=grad, indices=Padded(call.frame.fill(index, 0), index.dims))
    return Padded(made, (normal((rows,)), grad.dims[-1]))


@rule("index_select")
def index_select(call: Call) -> Padded:
    """Padding reads index 0."""
    x, index = call["self"], call["index"]
    axis = call["dim"] % max(len(x.dims), 1)
    x = call.frame.leading(x, axis)
    at = _index(call, index, x.dims[axis], negative=False)
    dim = index.dims[0] if index.dims else ()
    return Padded(call.run(self=x, index=at), (*x.dims[:axis], dim, *x.dims[axis + 1 :]))


def _beside(call: Call, x: Padded, other: Padded, axis: int) -> tuple[Padded, Padded]:
    """Two tensors with places that correspond along every dimension but one."""
    for i in range(len(x.dims)):
        if i == axis or x.dims[i] == other.dims[i]:
            continue
        x, other = call.frame.leading(x, i), call.frame.leading(other, i)
        if x.dims[i] != other.dims[i] and other.array.shape[i] > x.array.shape[i]:
            raise call.refuse(f"dimension {i} has another size in its index")
    return x, other


@rule("gather")
def gather(call: Call) -> Padded:
    """Padding reads index 0."""
    x, index = call["self"], call["index"]
    axis = call["dim"] % max(len(x.dims), 1)
    x, index = _beside(call, x, index, axis)
    if x.dims:
        x = call.frame.leading(x, axis)
    at = _index(call, index, x.dims[axis] if x.dims else (), negative=False)
    return Padded(call.run(self=x, index=at), index.dims)


def _widened(x: Padded, axis: int) -> Padded:
    """With one more place along a dimension, for what is to be thrown away."""
    room = [(0, int(i == axis)) for i in range(len(x.dims))]
    return Padded(jnp.pad(x.array, room), (*x.dims[:axis], (x.array.shape[axis] + 1,), *x.dims[axis + 1 :]))


def _narrowed(array: jax.Array, axis: int) -> jax.Array:
    return jax.lax.slice_in_dim(array, 0, array.shape[axis] - 1, axis=axis)


@rule("scatter", "scatter_add", "scatter_reduce")
def scatter(call: Call) -> Padded:
    """What padding would write goes to a place that is thrown away."""
    x, index = call["self"], call["index"]
    axis = call["dim"] % max(len(x.dims), 1)
    if not x.dims:
        raise call.refuse("writes to a tensor without dimensions")
    x, index = _beside(call, x, index, axis)
    x = call.frame.leading(x, axis)
    changed: dict[str, Any] = {}
    if isinstance(call.given.get("src"), Padded):
        source = call["src"]
        source, index = _beside(call, source, index, -1)
        if any(a != b for i, (a, b) in enumerate(zip(index.dims, x.dims, strict=True)) if i != axis and is_padded(b)):
            x, index = _beside(call, x, index, axis)
        changed["src"] = source
    at = _index(call, index, x.dims[axis], beyond=x.array.shape[axis], negative=False)
    made = call.run(self=_widened(x, axis), index=at, **changed)
    return Padded(_narrowed(made, axis), x.dims)


@rule("index_add", "index_copy", "index_fill", "index_reduce")
def index_write(call: Call) -> Padded:
    """What padding would write goes to a place that is thrown away."""
    x, index = call["self"], call["index"]
    if not x.dims or not index.dims:
        raise call.refuse("has no dimensions")
    axis = call["dim"] % len(x.dims)
    x = call.frame.leading(x, axis)
    changed: dict[str, Any] = {}
    if call.has("source"):
        source = call["source"]
        for i in range(len(source.dims)):
            source = call.frame.relayout(source, i, index.dims[0] if i == axis else x.dims[i])
        changed["source"] = source
    at = _index(call, index, x.dims[axis], beyond=x.array.shape[axis])
    made = call.run(self=_widened(x, axis), index=at, **changed)
    return Padded(_narrowed(made, axis), x.dims)


def _subscripts(call: Call) -> tuple[Padded, list[Padded | None], tuple[Dim, ...], int]:
    """The tensor with its indexed dimensions ready, its indices in one layout, the result's dimensions, and where those
    of the indices begin.
    """
    x, indices = call["self"], list(call["indices"])
    places = [k for k, i in enumerate(indices) if i is not None]
    _no_masks(call, [indices[k] for k in places])
    common, dims = broadcast(call.frame, [indices[k] for k in places])
    for k, i in zip(places, common, strict=True):
        x = call.frame.leading(x, k)
        indices[k] = i
    together = places == list(range(places[0], places[-1] + 1))
    first = places[0] if together else 0
    kept = [d for k, d in enumerate(x.dims) if k not in places]
    return x, indices, (*kept[:first], *dims, *kept[first:]), first


@rule("isin")
def isin(call: Call) -> Padded:
    """Each element is compared with all test elements, none of which may be padding."""
    if not call.has("elements") or not isinstance(call["elements"], Padded):
        raise call.refuse("looks for a number")
    if isinstance(call["test_elements"], Padded) and call["test_elements"].padded:
        raise call.refuse("compares with a number of elements that changes")
    return Padded(call.run(), call["elements"].dims)


@rule("index", "_unsafe_index")
def index(call: Call) -> Padded:
    """Padding reads index 0."""
    x, indices, dims, _ = _subscripts(call)
    ready = [None if i is None else _index(call, i, x.dims[k]) for k, i in enumerate(indices)]
    return Padded(call.run(self=x, indices=ready), dims)


@rule("index_put", "_unsafe_index_put")
def index_put(call: Call) -> Padded:
    """What padding would write goes to a place that is thrown away."""
    x, indices, dims, _ = _subscripts(call)
    values = call["values"]
    for axis in range(len(values.dims)):
        if values.dims[axis] != ():
            values = call.frame.relayout(values, axis, dims[len(dims) - len(values.dims) + axis])
    ready: list[Any] = []
    widened = x
    # Broadcast, so that every index tells which of its places are padding.
    there = [i for i in indices if i is not None]
    shape, whole = jnp.broadcast_shapes(*(i.array.shape for i in there)), broadcast(call.frame, there)[1]
    for k, i in enumerate(indices):
        if i is None:
            ready.append(None)
            continue
        i = Padded(jnp.broadcast_to(_index(call, i, x.dims[k]).array, shape), whole)
        if widened is x:
            i = Padded(call.frame.fill(i, x.array.shape[k]), whole)
            widened, axis = _widened(x, k), k
        ready.append(i)
    made = call.run(self=widened, indices=ready, values=values)
    return Padded(_narrowed(made, axis), x.dims)


# ---- operators that keep batches apart ------------------------------------------------------------------------------


@rule(
    "max_pool2d_with_indices",
    "max_pool3d_with_indices",
    "avg_pool2d",
    "avg_pool3d",
    "_adaptive_avg_pool2d",
    "_adaptive_avg_pool3d",
    "adaptive_max_pool2d",
    "adaptive_max_pool3d",
    "upsample_nearest2d",
    "upsample_bilinear2d",
    "upsample_bicubic2d",
    "reflection_pad2d",
    "replication_pad2d",
    "glu",
    "pixel_shuffle",
    "pixel_unshuffle",
)
def separate(call: Call) -> Any:
    """The first dimension is a batch; what is done to the others is the same for each."""
    x = call["self"] if call.has("self") else call["input"]
    if (
        not is_padded(x.dims[0])
        or x.axes(range(1, len(x.dims)))
        or (call.name == "glu" and call["dim"] % len(x.dims) == 0)
    ):
        raise call.refuse("has a rule for batches only")
    made = call.run()
    results = [Padded(y, (x.dims[0], *(normal((n,)) for n in y.shape[1:]))) for y in _listed(made)]
    return tuple(results) if isinstance(made, tuple | list) else results[0]


@rule(
    "max_pool2d_with_indices_backward",
    "max_pool3d_with_indices_backward",
    "avg_pool2d_backward",
    "avg_pool3d_backward",
    "_adaptive_avg_pool2d_backward",
    "_adaptive_avg_pool3d_backward",
    "adaptive_max_pool2d_backward",
    "glu_backward",
    "reflection_pad2d_backward",
    "replication_pad2d_backward",
)
def separate_backward(call: Call) -> Padded:
    """The gradient of one of those."""
    x, grad = call["self"], call["grad_output"]
    if not is_padded(x.dims[0]) or x.axes(range(1, len(x.dims))):
        raise call.refuse("has a rule for batches only")
    changed = {"grad_output": call.frame.relayout(grad, 0, x.dims[0])}
    if call.has("indices"):
        at = call.frame.relayout(call["indices"], 0, x.dims[0])
        changed["indices"] = Padded(call.frame.fill(at, 0), at.dims)
    return Padded(call.run(**changed), x.dims)


def _listed(made: Any) -> list[Any]:
    return list(made) if isinstance(made, tuple | list) else [made]


# ---- random numbers -------------------------------------------------------------------------------------------------


def _drawn(call: Call, dims: tuple[Dim, ...], draw: Callable[[Dim], Any]) -> Any:
    """Numbers drawn in a row, as those of an unpadded tensor are, and put where they belong: the generator counts
    elements, so the numbers do not depend on how many follow.
    """
    row = in_a_row(normal([a for d in dims for a in d]))
    made = draw(row)
    results = [call.frame.reshape(Padded(y.reshape(-1), (row,)), dims) for y in _listed(made)]
    return tuple(results) if isinstance(made, tuple | list) else results[0]


@rule("rand", "randn", "randint")
def random_factory(call: Call) -> Padded:
    """New random numbers."""
    dims = extents(call, call.sizes())[1]
    return _drawn(call, dims, lambda row: call.run(size=[call.frame.extent(row)]))


@rule("rand_like", "randn_like", "randint_like", "bernoulli", "uniform", "normal_functional", "exponential")
def random_like(call: Call) -> Padded:
    """Random numbers in the size of a tensor."""
    if any(isinstance(x, Padded) for n, x in call.given.items() if n != "self"):
        raise call.refuse("has parameters that are tensors")
    x = call["self"]
    return _drawn(call, x.dims, lambda row: call.run(self=call.frame.reshape(x, [row])))


@rule("native_dropout")
def native_dropout(call: Call) -> tuple[Padded, Padded]:
    """The numbers that drop the elements are those of the unpadded tensor."""
    x = call["input"]
    return _drawn(call, x.dims, lambda row: call.run(input=call.frame.reshape(x, [row])))
