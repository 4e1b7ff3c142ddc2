"""What padding does to products: matrices, attention, convolutions; and to normalisation layers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from torchtpu.compile.padding_layout import Dim, Padded, factors, in_a_row, normal
from torchtpu.compile.padding_reductions import mean_over
from torchtpu.compile.padding_rules import Call, broadcast, rule

__all__: list[str] = []


def _contract(call: Call, x: Padded, i: int, y: Padded, j: int) -> tuple[Padded, Padded]:
    """Two tensors made ready to be multiplied along a dimension of each: one layout, zeros in the padding of both,
    since what is there may be NaN.
    """
    if x.dims[i] != y.dims[j]:
        wanted = max(x.dims[i], y.dims[j], key=len)
        x, y = call.frame.relayout(x, i, wanted), call.frame.relayout(y, j, wanted)
    return (
        Padded(call.frame.fill(x, 0, [i]), x.dims),
        Padded(call.frame.fill(y, 0, [j]), y.dims),
    )


def _same(call: Call, x: Padded, i: int, dim: Dim) -> Padded:
    """A tensor with a dimension in the given layout, unless it is repeated along it."""
    return x if x.dims[i] == () else call.frame.relayout(x, i, dim)


@rule("mm", "bmm", "matmul", "linalg_matmul", "dot", "vdot", "mv", "_int_mm")
def product(call: Call) -> Padded:
    """Rows and columns in the padding of the result are padding; the dimension summed over is filled with zeros."""
    first, second = [a.name for a in call.op._schema.arguments[:2]]
    x, y = call[first], call[second]
    x, y = _contract(call, x, -1 % len(x.dims), y, max(len(y.dims) - 2, 0))
    batch: tuple[Dim, ...] = ()
    if len(x.dims) > 2 or len(y.dims) > 2:
        pair = [Padded(x.array, x.dims[:-2]), Padded(y.array, y.dims[:-2])]
        if len(x.dims) != len(y.dims):
            raise call.refuse("broadcasts batches")
        for i in range(len(batch_dims := pair[0].dims)):
            wanted = max(batch_dims[i], pair[1].dims[i], key=len)
            x, y = _same(call, x, i, wanted), _same(call, y, i, wanted)
            batch = (*batch, wanted)
    dims = (*batch, *x.dims[-2:-1], *(y.dims[-1:] if len(y.dims) > 1 else ()))
    return Padded(call.run(None, **{first: x, second: y}), dims)


@rule("addmm", "baddbmm", "addmv", "addr", "_addmm_activation")
def add_product(call: Call) -> Padded:
    """A product and what is added to it, which broadcasts."""
    names = [a.name for a in call.op._schema.arguments[:3]]
    bias, x, y = (call[n] for n in names)
    if call.name != "addr":
        x, y = _contract(call, x, len(x.dims) - 1, y, max(len(y.dims) - 2, 0))
    if len(x.dims) == 3:
        wanted = max(x.dims[0], y.dims[0], key=len)
        x, y = _same(call, x, 0, wanted), _same(call, y, 0, wanted)
    made = (*x.dims[:-1], *(y.dims[-1:] if len(y.dims) > 1 else ())) if call.name != "addr" else (*x.dims, *y.dims)
    for axis in range(len(bias.dims)):
        bias = _same(call, bias, axis, made[len(made) - len(bias.dims) + axis])
    return Padded(call.run(**dict(zip(names, (bias, x, y), strict=True))), made)


@rule("linear")
def linear(call: Call) -> Padded:
    """A product with a transposed weight."""
    x, weight = _contract(call, call["input"], len(call["input"].dims) - 1, call["weight"], 1)
    bias = call["bias"]
    made = (*x.dims[:-1], weight.dims[0])
    if bias is not None:
        bias = _same(call, bias, 0, made[-1])
    return Padded(call.run(input=x, weight=weight, bias=bias), made)


# ---- attention ------------------------------------------------------------------------------------------------------


def _attention(call: Call, everywhere: bool = False) -> dict[str, Any]:
    """Query, key, value and mask in common layouts; keys in the padding are zero and hidden. ``everywhere``: so is all
    else in the padding.
    """
    if call["dropout_p"]:
        raise call.refuse("drops out probabilities")
    query, key, value = call["query"], call["key"], call["value"]
    rank = len(query.dims)
    rows = rank - 2
    query, key, value = (call.frame.leading(x, rows) for x in (query, key, value))
    for i in range(rank - 3):
        key, value = _same(call, key, i, query.dims[i]), _same(call, value, i, query.dims[i])
    for x in (query, key, value):
        if x.axes([i for i in (rank - 3, rank - 1) if i > 0]):
            raise call.refuse("has heads, or a width of heads, that change")
    name = "attn_bias" if call.has("attn_bias") else "attn_mask"
    bias = call[name]
    if bias is not None:
        for axis in range(len(bias.dims)):
            at = rank - len(bias.dims) + axis
            bias = _same(call, bias, axis, key.dims[rows] if at == rank - 1 else query.dims[at])
        neutral = True if bias.array.dtype == jnp.bool_ else 0
        bias = Padded(call.frame.fill(bias, neutral, range(len(bias.dims) - 1)), bias.dims)
    valid = call.frame.valid(key.dims[rows])
    if valid is not None:
        if bias is None:
            bias = Padded(valid.reshape((1,) * (rank - 1) + (-1,)), (*((),) * (rank - 1), key.dims[rows]))
        elif bias.array.dtype == jnp.bool_:
            bias = Padded(bias.array & valid, (*bias.dims[:-1], key.dims[rows]))
        else:
            bias = Padded(jnp.where(valid, bias.array, -jnp.inf), (*bias.dims[:-1], key.dims[rows]))
    # Values in the padding are multiplied by zero, which needs them finite.
    axes = None if everywhere else [rows]
    key, value = Padded(call.frame.fill(key, 0, axes), key.dims), Padded(call.frame.fill(value, 0, axes), value.dims)
    if everywhere:
        query = Padded(call.frame.fill(query, 0), query.dims)
    return {"query": query, "key": key, "value": value, name: bias}


@rule("_scaled_dot_product_fused_attention_overrideable", "_scaled_dot_product_flash_attention_for_cpu")
def attention(call: Call) -> tuple[Any, ...]:
    """Queries in the padding give padding."""
    changed = _attention(call)
    out, log_sum, *rest = call.run(**changed)
    dims = changed["query"].dims
    others = [Padded(x, ()) if isinstance(x, jax.Array) else x for x in rest]
    return (Padded(out, (*dims[:-1], changed["value"].dims[-1])), Padded(log_sum, dims[:-1]), *others)


@rule(
    "_scaled_dot_product_fused_attention_overrideable_backward", "_scaled_dot_product_flash_attention_for_cpu_backward"
)
def attention_backward(call: Call) -> tuple[Any, ...]:
    """Queries in the padding have no gradient to hand on."""
    changed = _attention(call, everywhere=True)
    query = changed["query"]
    for name in ("grad_out", "out", "logsumexp"):
        x = call[name]
        for i, dim in enumerate(query.dims[:-1]):
            x = call.frame.relayout(x, i, dim)
        changed[name] = Padded(call.frame.fill(x, 0), x.dims)
    made = call.run(**changed)
    results: list[Any] = [Padded(x, changed[n].dims) for x, n in zip(made, ("query", "key", "value"), strict=False)]
    if len(made) > 3:
        bias = call["attn_bias"]
        results.append(None if bias is None else Padded(made[3], changed["attn_bias"].dims))
    return tuple(results)


# ---- convolution ----------------------------------------------------------------------------------------------------


@rule("convolution")
def convolution(call: Call) -> Padded:
    """Batches are separate. Padding behind the elements is zero, as a convolution's own padding is, so that no element
    of the result sees it.
    """
    x, weight = call["input"], call["weight"]
    if x.axes([1]) or weight.padded:
        raise call.refuse("has channels, or a kernel, that change")
    kernel = weight.array.shape
    channels = normal((call["groups"] * kernel[1] if call["transposed"] else kernel[0],))
    spatial = list(range(2, len(x.dims)))
    for axis in x.axes(spatial):
        x = call.frame.leading(x, axis)
    made = call.run(input=Padded(call.frame.fill(x, 0, spatial), x.dims))
    return Padded(made, (x.dims[0], channels, *(in_a_row(factors(n)) for n in call.sizes()[2:])))


@rule("convolution_backward")
def convolution_backward(call: Call) -> tuple[Any, ...]:
    """Gradients of weight and bias are sums over batches and places: padding is zero in all of them."""
    grad, x, weight = call["grad_output"], call["input"], call["weight"]
    if x.axes([1]) or weight.padded:
        raise call.refuse("has channels, or a kernel, that change")
    for axis in range(2, len(x.dims)):
        x, grad = call.frame.leading(x, axis), call.frame.leading(grad, axis)
    wanted = max(x.dims[0], grad.dims[0], key=len)
    x, grad = _same(call, x, 0, wanted), _same(call, grad, 0, wanted)
    made = call.run(
        grad_output=Padded(call.frame.fill(grad, 0), grad.dims), input=Padded(call.frame.fill(x, 0), x.dims)
    )
    return tuple(
        None if y is None or not needed else Padded(y, dims)
        for y, dims, needed in zip(made, (x.dims, weight.dims, (grad.dims[1],)), call["output_mask"], strict=True)
    )


# ---- normalisation --------------------------------------------------------------------------------------------------


def _inner(call: Call, x: Padded) -> tuple[int, tuple[Dim, ...]]:
    """How many dimensions come before those that are normalised, and the dimensions of mean and rstd."""
    outer = len(x.dims) - len(call["normalized_shape"])
    if x.axes(range(outer, len(x.dims))):
        raise call.refuse("normalises a dimension of a size that changes")
    return outer, (*x.dims[:outer], *((),) * (len(x.dims) - outer))


@rule("native_layer_norm", "_fused_rms_norm")
def layer_norm(call: Call) -> tuple[Padded, ...]:
    """Rows are separate."""
    x = call["input"]
    _, rows = _inner(call, x)
    made = call.run()
    return (Padded(made[0], x.dims), *(Padded(y, rows) for y in made[1:]))


@rule("native_layer_norm_backward", "_fused_rms_norm_backward")
def layer_norm_backward(call: Call) -> tuple[Any, ...]:
    """Gradients of weight and bias are sums over rows: rows in the padding are zero."""
    (grad, x), dims = broadcast(call.frame, [call["grad_out"], call["input"]])
    outer, _ = _inner(call, x)
    changed = {"grad_out": grad, "input": x, **{n: call[n] for n in ("mean", "rstd") if call.has(n)}}
    for name, y in changed.items():
        for i in range(outer):
            y = call.frame.relayout(y, i, dims[i])
        changed[name] = Padded(call.frame.fill(y, 0, range(outer)), y.dims)
    made = call.run(**changed)
    return tuple(
        None if y is None or not needed else Padded(y, dims if k == 0 else dims[outer:])
        for k, (y, needed) in enumerate(zip(made, call["output_mask"], strict=True))
    )


@rule("native_group_norm")
def group_norm(call: Call) -> tuple[Padded, ...]:
    """Batches are separate."""
    x = call["input"]
    if x.axes(range(1, len(x.dims))):
        raise call.refuse("normalises a dimension of a size that changes")
    made = call.run(N=x.array.shape[0])
    rows = (x.dims[0], normal((call["group"],)))
    return Padded(made[0], x.dims), Padded(made[1], rows), Padded(made[2], rows)


@rule("native_group_norm_backward")
def group_norm_backward(call: Call) -> tuple[Any, ...]:
    """Gradients of weight and bias are sums over batches."""
    x, grad = call["input"], call["grad_out"]
    if x.axes(range(1, len(x.dims))):
        raise call.refuse("normalises a dimension of a size that changes")
    changed = {}
    for name, y in (("grad_out", grad), ("input", x), ("mean", call["mean"]), ("rstd", call["rstd"])):
        y = call.frame.relayout(y, 0, x.dims[0])
        changed[name] = Padded(call.frame.fill(y, 0, [0]), y.dims)
    made = call.run(**changed, N=x.array.shape[0])
    channels = (x.dims[1],)
    return tuple(
        None if y is None or not needed else Padded(y, d)
        for y, d, needed in zip(made, (x.dims, channels, channels), call["output_mask"], strict=True)
    )


def _channels(call: Call, x: Padded) -> list[int]:
    """The dimensions that batch normalisation takes statistics over."""
    if x.axes([1]):
        raise call.refuse("has channels that change")
    return [0, *range(2, len(x.dims))]


def _row(x: jax.Array, rank: int) -> jax.Array:
    return x.reshape(1, -1, *(1,) * (rank - 2))


@rule("native_batch_norm", "_native_batch_norm_legit_functional", "_native_batch_norm_legit_no_training")
def batch_norm(call: Call) -> tuple[Any, ...]:
    """In training the statistics are those of the elements."""
    x = call["input"]
    axes, rank = _channels(call, x), len(x.dims)
    channel = (x.dims[1],)
    if not (call.has("training") and call["training"]):
        made = call.run()
        empty = [normal((y.shape[0],)) if y is not None else () for y in made[1:]]
        return (
            Padded(made[0], x.dims),
            *(None if y is None else Padded(y, (d,)) for y, d in zip(made[1:], empty, strict=True)),
        )
    count = jnp.asarray(call.frame.count(tuple(a for i in axes for a in x.dims[i])))
    mean = mean_over(call, x, axes)
    away = Padded(x.array.astype(mean.dtype) - mean, x.dims)
    variance = mean_over(call, Padded(jnp.square(away.array), x.dims), axes)
    invstd = jax.lax.rsqrt(variance + jnp.asarray(call["eps"], variance.dtype))
    y = away.array * invstd
    if call["weight"] is not None:
        y = y * _row(call["weight"].array, rank)
    if call["bias"] is not None:
        y = y + _row(call["bias"].array, rank)
    made = [Padded(y.astype(x.array.dtype), x.dims), *(Padded(s.reshape(-1), channel) for s in (mean, invstd))]
    if call.name == "native_batch_norm":
        if call["running_mean"] is not None:
            raise call.refuse("updates its running statistics in place")
        return tuple(made)
    count = count.astype(variance.dtype)
    unbiased = variance * (count / jnp.maximum(count - 1, 1))
    for name, new in (("running_mean", mean), ("running_var", unbiased)):
        old = call[name]
        moved = (1 - call["momentum"]) * old.array + call["momentum"] * new.reshape(-1).astype(old.array.dtype)
        made.append(Padded(moved.astype(old.array.dtype), old.dims))
    return tuple(made)


@rule("native_batch_norm_backward")
def batch_norm_backward(call: Call) -> tuple[Any, ...]:
    """Sums over the elements of a channel, divided by their number."""
    (grad, x), dims = broadcast(call.frame, [call["grad_out"], call["input"]])
    axes, rank = _channels(call, x), len(dims)
    kind = jnp.promote_types(x.array.dtype, jnp.float32)
    g, values = (Padded(call.frame.fill(y, 0, axes).astype(kind), dims) for y in (grad, x))
    if call["train"]:
        mean, invstd = call["save_mean"].array.astype(kind), call["save_invstd"].array.astype(kind)
    else:
        mean = call["running_mean"].array.astype(kind)
        invstd = jax.lax.rsqrt(call["running_var"].array.astype(kind) + jnp.asarray(call["eps"], kind))
    y = (values.array - _row(mean, rank)) * _row(invstd, rank)
    scaled = g.array if call["weight"] is None else g.array * _row(call["weight"].array.astype(kind), rank)
    inner = scaled
    if call["train"]:
        along = mean_over(call, Padded(scaled * y, dims), axes)
        inner = scaled - mean_over(call, Padded(scaled, dims), axes) - y * along
    made = (
        Padded((inner * _row(invstd, rank)).astype(x.array.dtype), dims),
        Padded((g.array * y).sum(tuple(axes)).astype(x.array.dtype), (dims[1],)),
        Padded(g.array.sum(tuple(axes)).astype(x.array.dtype), (dims[1],)),
    )
    return tuple(y if needed else None for y, needed in zip(made, call["output_mask"], strict=True))
