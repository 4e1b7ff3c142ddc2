"""Layer, RMS, batch and group normalisation with their gradients, and renorm.

Statistics are computed in two passes in the compute dtype (float32 for float16 and bfloat16). Their dtype and shape
follow PyTorch's meta kernels where those differ from the CPU ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from torchtpu.lowering.families.reductions import compute_dtype, moments, p_norm, real_dtype, widen
from torchtpu.lowering.promotion import cast
from torchtpu.lowering.registry import lowering

Array = jax.Array


def _like(x: Array | None, dtype: np.dtype) -> Array | None:
    return None if x is None else x.astype(dtype)


def _trailing(ndim: int, normalized_shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(the dimensions in front, the normalised dimensions)."""
    split = ndim - len(normalized_shape)
    return tuple(range(split)), tuple(range(split, ndim))


def _scale_shift(y: Array, weight: Array | None, bias: Array | None) -> Array:
    if weight is not None:
        y = y * weight.astype(y.dtype)
    return y if bias is None else y + bias.astype(y.dtype)


def _masked(mask: Sequence[bool], *gradients: Array) -> tuple[Array | None, ...]:
    return tuple(g if wanted else None for wanted, g in zip(mask, gradients, strict=True))


def _normalized_grad(g: Array, y: Array, rstd: Array, dims: tuple[int, ...]) -> Array:
    """The gradient through ``y = (x - mean(x)) * rstd(x)``."""
    n = np.asarray(math.prod(y.shape[d] for d in dims), y.dtype)
    mean_g = jnp.sum(g, axis=dims, keepdims=True) / n
    mean_gy = jnp.sum(g * y, axis=dims, keepdims=True) / n
    return rstd * (g - mean_g - y * mean_gy)


# Layer and RMS norm


@lowering("native_layer_norm")
def native_layer_norm(input, normalized_shape, weight, bias, eps):
    x = widen(input)
    variance, mean = moments(x, _trailing(x.ndim, normalized_shape)[1], True)
    rstd = jax.lax.rsqrt(variance + cast(eps, x.dtype))
    return _scale_shift((x - mean) * rstd, weight, bias).astype(input.dtype), mean, rstd


@lowering("native_layer_norm_backward")
def native_layer_norm_backward(grad_out, input, normalized_shape, mean, rstd, weight, bias, output_mask):
    g, x = widen(grad_out), widen(input)
    outer, inner = _trailing(x.ndim, normalized_shape)
    rstd = rstd.astype(x.dtype)
    y = (x - mean.astype(x.dtype)) * rstd
    gw = _scale_shift(g, weight, None)
    weight_dtype = input.dtype if weight is None else weight.dtype
    return _masked(
        output_mask,
        _normalized_grad(gw, y, rstd, inner).astype(input.dtype),
        jnp.sum(g * y, axis=outer).astype(weight_dtype),
        jnp.sum(g, axis=outer).astype(weight_dtype if bias is None else bias.dtype),
    )


@lowering("_fused_rms_norm")
def _fused_rms_norm(input, normalized_shape, weight, eps):
    x = widen(input)
    inner = _trailing(x.ndim, normalized_shape)[1]
    n = np.asarray(math.prod(normalized_shape), x.dtype)
    eps = jnp.finfo(x.dtype).eps if eps is None else eps
    rstd = jax.lax.rsqrt(jnp.sum(x * x, axis=inner, keepdims=True) / n + cast(eps, x.dtype))
    return _scale_shift(x * rstd, weight, None).astype(input.dtype), rstd


@lowering("_fused_rms_norm_backward")
def _fused_rms_norm_backward(grad_out, input, normalized_shape, rstd, weight, output_mask):
    g, x, rstd = widen(grad_out), widen(input), widen(rstd)
    outer, inner = _trailing(x.ndim, normalized_shape)
    y, gw = x * rstd, _scale_shift(g, weight, None)
    n = np.asarray(math.prod(normalized_shape), x.dtype)
    grad_input = rstd * (gw - y * (jnp.sum(gw * y, axis=inner, keepdims=True) / n))
    return _masked(output_mask, grad_input.astype(input.dtype), jnp.sum(g * y, axis=outer).astype(input.dtype))


# Batch norm


def _channels(x: Array, ndim: int) -> Array:
    """A per-channel vector shaped to broadcast over (N, C, ...)."""
    return x.reshape(1, -1, *(1,) * (ndim - 2))


def _all_but_channels(ndim: int) -> tuple[int, ...]:
    return (0, *range(2, ndim))


def _batch_norm(
    input: Array,
    weight: Array | None,
    bias: Array | None,
    running_mean: Array | None,
    running_var: Array | None,
    training: bool,
    momentum: Any,
    eps: Any,
) -> tuple[Array, Array, Array, Array | None, Array | None]:
    """(output, mean, inverse deviation, new running mean, new running variance), statistics in the compute dtype."""
    x = widen(input)
    dtype, ndim = x.dtype, x.ndim
    eps, momentum = cast(eps, dtype), cast(momentum, dtype)
    new_mean, new_var = _like(running_mean, dtype), _like(running_var, dtype)
    if training:
        variance, mean = moments(x, _all_but_channels(ndim), False)
        n = x.size // x.shape[1] if x.shape[1] else 0
        unbiased = variance * np.asarray(n / (n - 1) if n > 1 else np.nan, dtype)
        keep = np.ones((), dtype) - momentum
        new_mean = None if new_mean is None else momentum * mean + keep * new_mean
        new_var = None if new_var is None else momentum * unbiased + keep * new_var
    else:
        if new_mean is None or new_var is None:
            raise RuntimeError("batch norm in evaluation mode needs running_mean and running_var")
        mean, variance = new_mean, new_var
    invstd = jax.lax.rsqrt(variance + eps)
    y = (x - _channels(mean, ndim)) * _channels(invstd, ndim)
    scale, shift = (None if p is None else _channels(p, ndim) for p in (weight, bias))
    return _scale_shift(y, scale, shift).astype(input.dtype), mean, invstd, new_mean, new_var


def native_batch_norm_functional(input, weight, bias, running_mean, running_var, training, momentum, eps):
    """What ``native_batch_norm`` does, with its hidden updates as results.

    Returns:
        (output, save_mean, save_invstd, running_mean after the call, running_var after the call); the last two in the
        dtypes of the running statistics, None where there are none.
    """
    y, mean, invstd, new_mean, new_var = _batch_norm(
        input, weight, bias, running_mean, running_var, training, momentum, eps
    )
    if not training:
        new_mean, new_var = running_mean, running_var
    new_mean = None if running_mean is None else new_mean.astype(running_mean.dtype)
    new_var = None if running_var is None else new_var.astype(running_var.dtype)
    return y, mean, invstd, new_mean, new_var


@lowering("native_batch_norm")
def native_batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps):
    return _batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps)[:3]


@lowering("_native_batch_norm_legit.no_stats")
def _native_batch_norm_legit_no_stats(input, weight, bias, training, momentum, eps):
    return _batch_norm(input, weight, bias, None, None, training, momentum, eps)[:3]


@lowering("_native_batch_norm_legit_no_training")
def _native_batch_norm_legit_no_training(input, weight, bias, running_mean, running_var, momentum, eps):
    return _batch_norm(input, weight, bias, running_mean, running_var, False, momentum, eps)[:3]


@lowering("_native_batch_norm_legit_functional")
def _native_batch_norm_legit_functional(input, weight, bias, running_mean, running_var, training, momentum, eps):
    return _batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps)


def _no_reserve() -> Array:
    """The reserve of cuDNN, which nothing here needs."""
    return jnp.zeros((0,), np.uint8)


@lowering("_batch_norm_with_update_functional")
def _batch_norm_with_update_functional(input, weight, bias, running_mean, running_var, momentum, eps):
    y, mean, invstd, *new = _batch_norm(input, weight, bias, running_mean, running_var, True, momentum, eps)
    return y, mean, invstd, _no_reserve(), *new


@lowering("_batch_norm_no_update")
def _batch_norm_no_update(input, weight, bias, running_mean, running_var, momentum, eps):
    return *_batch_norm(input, weight, bias, running_mean, running_var, False, momentum, eps)[:3], _no_reserve()


@lowering("native_batch_norm_backward")
def native_batch_norm_backward(
    grad_out, input, weight, running_mean, running_var, save_mean, save_invstd, train, eps, output_mask
):
    g, x = widen(grad_out), widen(input)
    dtype, ndim = x.dtype, x.ndim
    dims = _all_but_channels(ndim)
    if train:
        mean, invstd = save_mean.astype(dtype), save_invstd.astype(dtype)
    else:
        mean, invstd = running_mean.astype(dtype), jax.lax.rsqrt(running_var.astype(dtype) + cast(eps, dtype))
    rstd = _channels(invstd, ndim)
    y = (x - _channels(mean, ndim)) * rstd
    gw = _scale_shift(g, None if weight is None else _channels(weight, ndim), None)
    weight_dtype = input.dtype if weight is None else weight.dtype
    return _masked(
        output_mask,
        (_normalized_grad(gw, y, rstd, dims) if train else gw * rstd).astype(input.dtype),
        jnp.sum(g * y, axis=dims).astype(weight_dtype),
        jnp.sum(g, axis=dims).astype(weight_dtype),
    )


@lowering("batch_norm_backward")
def batch_norm_backward(
    grad_out, input, weight, running_mean, running_var, save_mean, save_var, update, eps, output_mask, reserve
):
    # save_var is an inverse deviation despite its name.
    return native_batch_norm_backward(
        grad_out, input, weight, running_mean, running_var, save_mean, save_var, update, eps, output_mask
    )


# Batch norm over several processes (torch.nn.SyncBatchNorm)


@lowering("batch_norm_stats")
def batch_norm_stats(input, eps):
    variance, mean = moments(widen(input), _all_but_channels(input.ndim), False)
    return mean, jax.lax.rsqrt(variance + cast(eps, mean.dtype))


@lowering("batch_norm_gather_stats_with_counts")
def batch_norm_gather_stats_with_counts(input, mean, invstd, running_mean, running_var, momentum, eps, counts):
    """Mean and inverse deviation of all ranks' rows, from each one's (ranks, channels) and its count (ranks,)."""
    if running_mean is not None or running_var is not None:
        raise NotImplementedError("batch_norm_gather_stats_with_counts with running statistics cannot be compiled")
    dtype = compute_dtype(input.dtype)
    mean, invstd, n = mean.astype(dtype), invstd.astype(dtype), counts.astype(dtype)[:, None]
    total = jnp.sum(n)
    center = jnp.sum(n * mean, axis=0) / total
    eps = cast(eps, dtype)
    variance = jnp.sum(n * (1 / (invstd * invstd) - eps + (mean - center) ** 2), axis=0) / total
    return center, jax.lax.rsqrt(variance + eps)


@lowering("batch_norm_elemt")
def batch_norm_elemt(input, weight, bias, mean, invstd, eps):
    x = widen(input)
    scale, shift, mean, invstd = (
        None if p is None else _channels(p.astype(x.dtype), x.ndim) for p in (weight, bias, mean, invstd)
    )
    return _scale_shift((x - mean) * invstd, scale, shift).astype(input.dtype)


@lowering("batch_norm_backward_reduce")
def batch_norm_backward_reduce(grad_out, input, mean, invstd, weight, input_g, weight_g, bias_g):
    g, x = widen(grad_out), widen(input)
    dims, dtype = _all_but_channels(x.ndim), mean.dtype if weight is None else weight.dtype
    total = jnp.sum(g, axis=dims)
    moment = jnp.sum(g * (x - _channels(mean.astype(x.dtype), x.ndim)), axis=dims)
    grads = total, moment, (moment * invstd.astype(x.dtype)).astype(dtype), total.astype(dtype)
    return _masked((input_g, input_g, weight_g, bias_g), *grads)


@lowering("batch_norm_backward_elemt")
def batch_norm_backward_elemt(grad_out, input, mean, invstd, weight, sum_dy, sum_dy_xmu, count):
    g, x = widen(grad_out), widen(input)
    n = jnp.sum(count).astype(x.dtype)
    mean, invstd, total, moment = (_channels(p.astype(x.dtype), x.ndim) for p in (mean, invstd, sum_dy, sum_dy_xmu))
    grad = (g - total / n - (x - mean) * invstd * invstd * moment / n) * invstd
    return _scale_shift(grad, None if weight is None else _channels(weight, x.ndim), None).astype(input.dtype)


# Group norm


@lowering("native_group_norm")
def native_group_norm(input, weight, bias, N, C, HxW, group, eps):
    dtype = compute_dtype(input.dtype)
    x = input.astype(dtype).reshape(N, group, C // group * HxW)
    variance, mean = moments(x, (2,), True)
    rstd = jax.lax.rsqrt(variance + cast(eps, dtype))
    y = ((x - mean) * rstd).reshape(N, C, HxW)
    scale, shift = (None if p is None else p.reshape(1, C, 1) for p in (weight, bias))
    y = _scale_shift(y, scale, shift).reshape(input.shape).astype(input.dtype)
    return y, mean.reshape(N, group).astype(input.dtype), rstd.reshape(N, group).astype(input.dtype)


@lowering("native_group_norm_backward")
def native_group_norm_backward(grad_out, input, mean, rstd, weight, N, C, HxW, group, output_mask):
    dtype, grouped = compute_dtype(input.dtype), (N, group, C // group, HxW)
    g, x = (a.astype(dtype).reshape(grouped) for a in (grad_out, input))
    mean, rstd = (a.astype(dtype).reshape(N, group, 1, 1) for a in (mean, rstd))
    y = (x - mean) * rstd
    gw = _scale_shift(g, None if weight is None else weight.reshape(1, group, C // group, 1), None)
    weight_dtype = input.dtype if weight is None else weight.dtype
    return _masked(
        output_mask,
        _normalized_grad(gw, y, rstd, (2, 3)).reshape(input.shape).astype(input.dtype),
        jnp.sum(g * y, axis=(0, 3)).reshape(C).astype(weight_dtype),
        jnp.sum(g, axis=(0, 3)).reshape(C).astype(weight_dtype),
    )


@lowering("renorm", static=("p",))
def renorm(self, p, dim, maxnorm):
    dim %= self.ndim
    x = widen(self)
    real = real_dtype(x.dtype)
    norm = p_norm(x, float(p), tuple(d for d in range(x.ndim) if d != dim), keepdims=True)
    limit = cast(maxnorm, real)
    scale = jnp.where(norm > limit, limit / (norm + np.asarray(1e-7, real)), np.ones((), real))
    return (x * scale).astype(self.dtype)
