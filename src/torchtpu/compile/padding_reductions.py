"""What padding does to operators that combine the elements of a dimension."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch

from torchtpu.compile.padding_layout import Dim, Padded, factors, in_a_row
from torchtpu.compile.padding_rules import Call, aligned, broadcast, pointwise, rule

__all__ = ["lowest", "mean_over"]

_aten = torch.ops.aten


def _axes(call: Call, rank: int) -> list[int]:
    """The dimensions reduced: all of them if none are named."""
    dim = call["dim"] if call.has("dim") else None
    if dim is None or (isinstance(dim, list | tuple) and not dim):
        return list(range(rank))
    return sorted({d % max(rank, 1) for d in (dim if isinstance(dim, list | tuple) else [dim])}) if rank else []


def _kept(x: Padded, axes: list[int], keep: bool) -> tuple[Dim, ...]:
    """The dimensions of a reduction's result."""
    return tuple(() if i in axes else d for i, d in enumerate(x.dims) if keep or i not in axes)


def _keep(call: Call) -> bool:
    return bool(call["keepdim"]) if call.has("keepdim") else False


def lowest(dtype: Any) -> Any:
    """What is not above any element: -inf, or the smallest integer."""
    if dtype == jnp.bool_:
        return False
    return -jnp.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).min


def highest(dtype: Any) -> Any:
    """What is not below any element but NaN."""
    if dtype == jnp.bool_:
        return True
    return jnp.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).max


def _reduction(identity: Any, *names: str) -> None:
    @rule(*names)
    def reduce(call: Call) -> Any:
        x = call["self"]
        axes = _axes(call, len(x.dims))
        value = identity(x.array.dtype) if callable(identity) else identity
        made = call.run(self=Padded(call.frame.fill(x, value, axes), x.dims))
        dims = _kept(x, axes, _keep(call))
        return tuple(Padded(y, dims) for y in made) if isinstance(made, tuple | list) else Padded(made, dims)


_reduction(0, "sum", "nansum", "count_nonzero", "any")
_reduction(1, "prod", "all")
_reduction(lowest, "amax", "logsumexp")
_reduction(highest, "amin")


@rule("linalg_vector_norm", "norm")
def norm(call: Call) -> Padded:
    """Zeros add nothing to a norm, except to those that count them or take the least."""
    x = call["self"]
    order = call.given.get("ord", call.given.get("p", 2))
    order = 2 if order is None else order
    if not isinstance(order, int | float) or order < 0:
        raise call.refuse(f"has order {order}")
    axes = _axes(call, len(x.dims))
    made = call.run(self=Padded(call.frame.fill(x, 0, axes), x.dims))
    return Padded(made, _kept(x, axes, _keep(call)))


def mean_over(call: Call, x: Padded, axes: list[int], dtype: Any = None) -> jax.Array:
    """The mean over axes, which stay; summed in float32 or wider."""
    kind = jnp.dtype(dtype or x.array.dtype)
    wide = kind if kind.itemsize > 4 else jnp.complex64 if kind.kind == "c" else jnp.float32
    total = call.frame.fill(x, 0, axes).astype(wide).sum(tuple(axes), keepdims=True)
    return total / jnp.asarray(call.frame.count(tuple(a for i in axes for a in x.dims[i]))).astype(total.real.dtype)


def _dropped(array: jax.Array, axes: list[int], keep: bool) -> jax.Array:
    return array if keep else jnp.squeeze(array, tuple(axes))


@rule("mean")
def mean(call: Call) -> Padded:
    """The sum divided by the number of elements."""
    from torchtpu.lowering.dtypes import to_jax

    x = call["self"]
    axes = _axes(call, len(x.dims))
    kind = to_jax(call.value.dtype)
    made = _dropped(mean_over(call, x, axes, kind), axes, _keep(call)).astype(kind)
    return Padded(made, _kept(x, axes, _keep(call)))


@rule("var", "std", "var_mean", "std_mean")
def variance(call: Call) -> Any:
    """From the elements' distances to their mean."""
    x = call["self"]
    axes = _axes(call, len(x.dims))
    correction = call.given.get("correction", 1) if call.has("correction") else int(call["unbiased"])
    correction = 1 if correction is None else correction
    if not isinstance(correction, int | float) or x.array.dtype.kind == "c":
        raise call.refuse("is of complex numbers, or has a correction that changes")
    middle = mean_over(call, x, axes)
    away = Padded(jnp.square(x.array.astype(middle.dtype) - middle), x.dims)
    total = call.frame.fill(away, 0, axes).sum(tuple(axes), keepdims=True)
    count = jnp.asarray(call.frame.count(tuple(a for i in axes for a in x.dims[i]))).astype(total.dtype)
    made = total / jnp.maximum(count - correction, 0)
    made = jnp.sqrt(made) if "std" in call.name else made
    dims = _kept(x, axes, _keep(call))

    def result(y: jax.Array) -> Padded:
        return Padded(_dropped(y, axes, _keep(call)).astype(x.array.dtype), dims)

    return (result(made), result(middle)) if call.name.endswith("_mean") else result(made)


@rule("max", "min")
def extremum(call: Call) -> Any:
    """Of all elements, or of a dimension with the index, or of two tensors."""
    if call.has("other"):
        return pointwise(call)
    x = call["self"]
    axes = _axes(call, len(x.dims))
    for axis in axes if call.has("dim") else ():
        x = call.frame.leading(x, axis)
    fill = lowest if call.name == "max" else highest
    made = call.run(self=Padded(call.frame.fill(x, fill(x.array.dtype), axes), x.dims))
    dims = _kept(x, axes, _keep(call))
    return tuple(Padded(y, dims) for y in made) if isinstance(made, tuple | list) else Padded(made, dims)


@rule("argmax", "argmin")
def arg_extremum(call: Call) -> Padded:
    """The first of equal elements; an element comes before any padding that equals it."""
    x = call["self"]
    if call["dim"] is None:
        x = call.frame.reshape(x, [in_a_row(tuple(a for d in x.dims for a in d))])
    axes = _axes(call, len(x.dims))
    for axis in axes:
        x = call.frame.leading(x, axis)
    fill = lowest if call.name == "argmax" else highest
    made = call.run(self=Padded(call.frame.fill(x, fill(x.array.dtype), axes), x.dims))
    if call["dim"] is None:
        return Padded(made.reshape((1,) * len(call.sizes())), ((),) * len(call.sizes()))
    return Padded(made, _kept(x, axes, _keep(call)))


@rule("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin")
def scan(call: Call) -> Any:
    """Elements depend on those before them; with all padding at the end it does not matter."""
    x = call["self"]
    if x.dims:
        x = call.frame.leading(x, call["dim"] % len(x.dims))
    made = call.run(self=x)
    return tuple(Padded(y, x.dims) for y in made) if isinstance(made, tuple | list) else Padded(made, x.dims)


@rule("sort", "argsort", "topk")
def sort(call: Call) -> Any:
    """Padding goes last: equal elements keep their order, and NaN comes after everything in ascending order."""
    x = call["self"]
    axis = (call["dim"] if call["dim"] is not None else -1) % max(len(x.dims), 1)
    x = call.frame.leading(x, axis)
    floating = jnp.issubdtype(x.array.dtype, jnp.floating)
    if call["largest"] if call.name == "topk" else call["descending"]:
        last = lowest(x.array.dtype)
    else:
        last = jnp.nan if floating else highest(x.array.dtype)
    dims = list(x.dims)
    if call.name == "topk":
        if not isinstance(call["k"], int):
            raise call.refuse("takes a number of elements that changes")
        dims[axis] = factors(call["k"])
    made = call.run(self=Padded(call.frame.fill(x, last, [axis]), x.dims))
    return tuple(Padded(y, tuple(dims)) for y in made) if isinstance(made, tuple | list) else Padded(made, tuple(dims))


# ---- softmax --------------------------------------------------------------------------------------------------------


@rule("_softmax", "_log_softmax", "_safe_softmax", "softmax", "log_softmax")
def softmax(call: Call) -> Padded:
    """Padding is -inf, which has no share."""
    x = call["self"]
    axis = call["dim"] % max(len(x.dims), 1)
    return Padded(call.run(self=Padded(call.frame.fill(x, -jnp.inf, [axis]), x.dims)), x.dims)


@rule("_softmax_backward_data", "_log_softmax_backward_data")
def softmax_backward(call: Call) -> Padded:
    """Padding takes no part in the sum along the dimension."""
    (grad, output), dims = broadcast(call.frame, [call["grad_output"], call["output"]])
    axis = call["dim"] % max(len(dims), 1)
    made = call.run(
        grad_output=Padded(call.frame.fill(grad, 0, [axis]), dims),
        output=Padded(call.frame.fill(output, 0, [axis]), dims),
    )
    return Padded(made, dims)


# ---- losses ---------------------------------------------------------------------------------------------------------

_LOSSES = ("mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "soft_margin_loss")
_NONE, _MEAN = 0, 1


@rule(*_LOSSES, "binary_cross_entropy_with_logits")
def loss(call: Call) -> Padded:
    """The loss of each element, then their sum or mean."""
    changed, dims = aligned(call)
    each = Padded(call.run(**changed, reduction=_NONE), dims)
    if call["reduction"] == _NONE:
        return each
    axes = list(range(len(dims)))
    if call["reduction"] == _MEAN:
        return Padded(mean_over(call, each, axes).reshape(()).astype(each.array.dtype), ())
    wide = jnp.promote_types(each.array.dtype, jnp.float32)
    return Padded(call.frame.fill(each, 0, axes).sum(dtype=wide).astype(each.array.dtype), ())


@rule(*(f"{name}_backward" for name in _LOSSES))
def loss_backward(call: Call) -> Padded:
    """Each element's gradient, of a mean divided by the number of elements."""
    changed, dims = aligned(call)
    made = call.run(**changed, reduction=_NONE)
    if call["reduction"] == _MEAN:
        count = jnp.asarray(call.frame.count(tuple(a for d in dims for a in d)))
        made = (made / count.astype(jnp.promote_types(made.dtype, jnp.float32))).astype(made.dtype)
    return Padded(made, dims)


def _target(call: Call, x: Padded) -> tuple[Padded, Padded]:
    """Log-probabilities and targets where padding is ignored: classes are dimension 1, or 0 of a vector."""
    classes = 1 if len(x.dims) > 1 else 0
    if x.axes([classes]):
        raise call.refuse("has a number of classes that changes")
    target = call["target"]
    for i, d in enumerate(target.dims):
        own = i + 1 if i >= classes and len(x.dims) > 1 else i
        if len(x.dims) > 1 and x.dims[own] != d:
            x = call.frame.relayout(x, own, d)
    ignored = call["ignore_index"]
    return (
        Padded(call.frame.fill(x, 0), x.dims),
        Padded(call.frame.fill(target, ignored), target.dims),
    )


@rule("nll_loss_forward", "nll_loss2d_forward")
def nll_loss(call: Call) -> tuple[Padded, Padded]:
    """Targets in the padding are ``ignore_index``."""
    x, target = _target(call, call["self"])
    made, weight = call.run(self=x, target=target)
    return Padded(made, target.dims if made.ndim else ()), Padded(weight, ())


@rule("nll_loss_backward", "nll_loss2d_backward")
def nll_loss_backward(call: Call) -> Padded:
    """Where the target is ignored the gradient is zero."""
    x, target = _target(call, call["self"])
    grad = call["grad_output"]
    for i, d in enumerate(target.dims if grad.dims else ()):
        grad = call.frame.relayout(grad, i, d)
    return Padded(call.run(grad_output=grad, self=x, target=target), x.dims)
