"""What padding does to operators that rearrange elements: views, slices, concatenation."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from torchtpu.compile.padding_layout import Dim, Padded, evaluate, factors, in_a_row, is_padded, normal, product
from torchtpu.compile.padding_rules import Call, Size, rule

__all__: list[str] = []


def _axis(dim: int, rank: int) -> int:
    return dim % max(rank, 1)


@rule("view", "_unsafe_view", "reshape", "_reshape_alias", "_reshape_copy", "view_copy", "_reshape_alias_copy")
def view(call: Call) -> Padded:
    """The dimensions' atoms are grouped anew."""
    if call.op._overloadname == "dtype":
        raise call.refuse("reads elements as another type")
    return call.frame.regroup(call["self"], call.sizes())


@rule("permute", "permute_copy")
def permute(call: Call) -> Padded:
    """Dimensions in another order."""
    x, order = call["self"], [d % len(call["self"].dims) for d in call["dims"]]
    return Padded(x.array.transpose(order), tuple(x.dims[i] for i in order))


@rule("transpose", "transpose_copy", "t", "t_copy")
def transpose(call: Call) -> Padded:
    """Two dimensions exchanged."""
    x = call["self"]
    order = list(range(len(x.dims)))
    if len(order) > 1 or call.has("dim0"):
        a, b = (call["dim0"], call["dim1"]) if call.has("dim0") else (0, 1)
        if order:
            order[a], order[b] = order[b], order[a]
    return Padded(x.array.transpose(order), tuple(x.dims[i] for i in order))


@rule("unsqueeze", "unsqueeze_copy")
def unsqueeze(call: Call) -> Padded:
    """A dimension of one element."""
    x = call["self"]
    at = call["dim"] % (len(x.dims) + 1)
    return Padded(jnp.expand_dims(x.array, at), (*x.dims[:at], (), *x.dims[at:]))


@rule("squeeze", "squeeze_copy")
def squeeze(call: Call) -> Padded:
    """Without dimensions of one element; one that may have more stays, as Dynamo has made sure that it has."""
    x = call["self"]
    rank = len(x.dims)
    asked = call["dim"] if call.has("dim") else list(range(rank))
    chosen = {d % max(rank, 1) for d in (asked if isinstance(asked, list | tuple) else [asked])}
    gone = tuple(i for i in range(rank) if i in chosen and x.dims[i] == ())
    return Padded(jnp.squeeze(x.array, gone), tuple(d for i, d in enumerate(x.dims) if i not in gone))


@rule("expand", "expand_copy")
def expand(call: Call) -> Padded:
    """Dimensions of one element repeated."""
    x, sizes = call["self"], call.sizes()
    new = len(sizes) - len(x.dims)
    dims = tuple(factors(n) if k < new or x.dims[k - new] == () else x.dims[k - new] for k, n in enumerate(sizes))
    return Padded(jnp.broadcast_to(x.array, call.frame.shape(dims)), dims)


@rule("repeat")
def repeat(call: Call) -> Padded:
    """All of it several times along each dimension."""
    x = call["self"]
    times = [factors(n.expr if isinstance(n, Size) else n) for n in call["repeats"]]
    dims: list[Dim] = [()] * (len(times) - len(x.dims)) + list(x.dims)
    array = x.array.reshape([m for d in dims for m in (1, call.frame.extent(d))])
    array = jnp.broadcast_to(
        array, [m for t, d in zip(times, dims, strict=True) for m in (call.frame.extent(t), call.frame.extent(d))]
    )
    made = tuple(normal((*t, *d)) for t, d in zip(times, dims, strict=True))
    return Padded(array.reshape(call.frame.shape(made)), made)


@rule("select", "select_copy")
def select(call: Call) -> Padded:
    """One index of a dimension, counted from either end."""
    x = call["self"]
    axis = _axis(call["dim"], len(x.dims))
    index = call["index"]
    x = call.frame.leading(x, axis)
    at = _start(call, index, product(x.dims[axis]))
    array = lax.dynamic_index_in_dim(x.array, at, axis, keepdims=False)
    return Padded(array, (*x.dims[:axis], *x.dims[axis + 1 :]))


def _start(call: Call, x: Any, size: Any) -> Any:
    """Where a slice of a dimension begins, as an int or a traced scalar; counted from the end if negative."""
    expr = (x.expr if isinstance(x, Size) else x) or 0
    if isinstance(expr, int):
        expr = size + expr if expr < 0 else expr
    elif call.frame.implied(expr < 0):
        expr = size + expr
    elif not call.frame.implied(expr >= 0):
        raise call.refuse(f"begins at {expr}, of unknown sign")
    return expr if isinstance(expr, int) else evaluate(expr, call.frame.counts)


@rule("slice", "slice_copy")
def slice_(call: Call) -> Padded:
    """From a place on, as many places as the result's bucket has; the place may be counted from the end."""
    x = call["self"]
    axis = _axis(call["dim"], len(x.dims))
    size = call.sizes()[axis]
    if call.frame.same(product(x.dims[axis]), size):
        return x
    x = call.frame.leading(x, axis)
    made = in_a_row(factors(size))
    begin, step = _start(call, call["start"], product(x.dims[axis])), call["step"]
    reach = call.frame.extent(made) * step
    array = x.array
    if not isinstance(begin, int) or begin + reach > array.shape[axis]:
        # A window that does not fit would be moved back: behind the last element there must be room.
        array = jnp.pad(array, [(0, reach if i == axis else 0) for i in range(array.ndim)])
    window = lax.dynamic_slice_in_dim(array, begin, reach, axis)
    if step > 1:
        window = lax.slice_in_dim(window, 0, reach, step, axis)
    return Padded(window, (*x.dims[:axis], made, *x.dims[axis + 1 :]))


@rule("slice_backward")
def slice_backward(call: Call) -> Padded:
    """The gradient at its place among zeros."""
    grad, sizes = call["grad_output"], call.sizes()
    axis = _axis(call["dim"], len(sizes))
    if call["step"] != 1:
        raise call.refuse("has a step")
    grad = call.frame.leading(grad, axis)
    new = in_a_row(factors(sizes[axis]))
    begin = _start(call, call["start"], sizes[axis])
    filled = call.frame.fill(grad, 0, [axis])
    dims = (*grad.dims[:axis], new, *grad.dims[axis + 1 :])
    shape = list(call.frame.shape(dims))
    wide = list(shape)
    wide[axis] += filled.shape[axis]
    zeros = jnp.zeros(wide, filled.dtype)
    placed = lax.dynamic_update_slice_in_dim(zeros, filled, begin, axis)
    return Padded(lax.slice_in_dim(placed, 0, shape[axis], axis=axis), dims)


@rule("select_backward")
def select_backward(call: Call) -> Padded:
    """The gradient at its index among zeros."""
    grad, sizes = call["grad_output"], call.sizes()
    axis = _axis(call["dim"], len(sizes))
    new = in_a_row(factors(sizes[axis]))
    dims = (*grad.dims[:axis], new, *grad.dims[axis:])
    zeros = jnp.zeros(call.frame.shape(dims), grad.array.dtype)
    at = _start(call, call["index"], product(new))
    return Padded(lax.dynamic_update_index_in_dim(zeros, grad.array, at, axis), dims)


@rule("cat", "concat", "concatenate")
def cat(call: Call) -> Padded:
    """Along a dimension with padding each piece goes where the elements before it end, and covers their padding."""
    rank = len(call.sizes())
    pieces = [x for x in call["tensors"] if not (len(x.dims) == 1 and x.array.shape[0] == 0 and rank > 1)]
    axis = _axis(call["dim"], rank)
    dims = list(pieces[0].dims)
    for i in range(rank):
        if i != axis:
            dims[i] = max((x.dims[i] for x in pieces), key=len)
            pieces = [call.frame.relayout(x, i, dims[i]) for x in pieces]
    pieces = [call.frame.leading(x, axis) for x in pieces]
    dims[axis] = in_a_row(factors(call.sizes()[axis]))
    arrays = [x.array.astype(jnp.result_type(*(y.array for y in pieces))) for x in pieces]
    if not any(is_padded(x.dims[axis]) for x in pieces):
        return Padded(jnp.concatenate(arrays, axis), tuple(dims))
    made = jnp.zeros(call.frame.shape(dims), arrays[0].dtype)
    at = 0
    for x, array in zip(pieces, arrays, strict=True):
        made = lax.dynamic_update_slice_in_dim(made, array, at, axis)
        at = at + call.frame.count(x.dims[axis])
    return Padded(made, tuple(dims))


@rule("stack")
def stack(call: Call) -> Padded:
    """Tensors of one size along a new dimension."""
    pieces = call["tensors"]
    dims = [max((x.dims[i] for x in pieces), key=len) for i in range(len(pieces[0].dims))]
    for i, d in enumerate(dims):
        pieces = [call.frame.relayout(x, i, d) for x in pieces]
    axis = call["dim"] % (len(dims) + 1)
    kind = jnp.result_type(*(x.array for x in pieces))
    return Padded(
        jnp.stack([x.array.astype(kind) for x in pieces], axis),
        (*dims[:axis], normal((len(pieces),)), *dims[axis:]),
    )


@rule("split", "split_with_sizes", "chunk", "unbind", "unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk")
def split(call: Call) -> list[Padded]:
    """Pieces along a dimension without padding."""
    x = call["self"]
    axis = _axis(call["dim"], len(x.dims))
    if is_padded(x.dims[axis]):
        raise call.refuse(f"splits dimension {axis} of size {product(x.dims[axis])}")
    made = []
    for piece in call.run():
        dims = list(x.dims)
        if piece.ndim < len(dims):
            del dims[axis]
        else:
            dims[axis] = normal((piece.shape[axis],))
        made.append(Padded(piece, tuple(dims)))
    return made


@rule("constant_pad_nd")
def constant_pad_nd(call: Call) -> Padded:
    """The padding becomes the constant first, so that what is added behind the elements is there."""
    x, pad, value = call["self"], call["pad"], call["value"]
    rank = len(x.dims)
    touched = [rank - 1 - k // 2 for k, p in enumerate(pad) if p]
    dims = list(x.dims)
    for axis in set(touched):
        x = call.frame.leading(x, axis)
        dims[axis] = in_a_row(factors(call.sizes()[axis]))
    array = call.frame.fill(x, value, sorted(set(touched)))
    if not any(isinstance(p, Size) for p in pad):
        return Padded(call.run(self=Padded(array, x.dims)), tuple(dims))
    if not all(call.frame.implied(p.expr >= 0) if isinstance(p, Size) else p >= 0 for p in pad):
        raise call.refuse("pads by a size that may be negative")
    before = [0] * rank
    for k, p in enumerate(pad):
        if k % 2 == 0:
            before[rank - 1 - k // 2] = evaluate(p.expr, call.frame.counts) if isinstance(p, Size) else p
    made = jnp.full(call.frame.shape(dims), value, array.dtype)
    return Padded(lax.dynamic_update_slice(made, array, before), tuple(dims))


@rule("flip")
def flip(call: Call) -> Padded:
    """From the last element to the first, then the padding."""
    x = call["self"]
    for dim in call["dims"]:
        axis = _axis(dim, len(x.dims))
        x = call.frame.leading(x, axis)
        at = call.frame.count(x.dims[axis]) - 1 - jnp.arange(x.array.shape[axis])
        x = Padded(jnp.take(x.array, at, axis=axis, mode="clip"), x.dims)
    return x


@rule("roll")
def roll(call: Call) -> Padded:
    """Shifted round along a dimension."""
    x = call["self"]
    if len(call["dims"]) != len(call["shifts"]) or any(isinstance(s, Size) for s in call["shifts"]):
        raise call.refuse("shifts all dimensions at once, or by a size that changes")
    for dim, shift in zip(call["dims"], call["shifts"], strict=True):
        axis = _axis(dim, len(x.dims))
        x = call.frame.leading(x, axis)
        n = call.frame.count(x.dims[axis])
        x = Padded(jnp.take(x.array, (jnp.arange(x.array.shape[axis]) - shift) % n, axis=axis, mode="clip"), x.dims)
    return x


@rule("tril", "triu")
def triangle(call: Call) -> Padded:
    """By place, which is by index once all padding is at the end."""
    x = call["self"]
    if isinstance(call["diagonal"], Size):
        raise call.refuse("has a diagonal that changes")
    for axis in (len(x.dims) - 2, len(x.dims) - 1):
        x = call.frame.leading(x, axis)
    return Padded(call.run(self=x), x.dims)
