"""Losses and their gradients. ``reduction`` is aten's number: 0 none, 1 mean, 2 sum."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from torchtpu.lowering.context import check_index
from torchtpu.lowering.families.reductions import widen
from torchtpu.lowering.promotion import cast, promote
from torchtpu.lowering.registry import lowering

Array = jax.Array
NONE, MEAN, SUM = 0, 1, 2


def _reduce(loss: Array, reduction: int, dtype: np.dtype) -> Array:
    """The loss reduced in its compute dtype and rounded once."""
    if reduction == NONE:
        return loss.astype(dtype)
    total = jnp.sum(loss)
    return (total / np.asarray(loss.size, total.dtype) if reduction == MEAN else total).astype(dtype)


def _per_element(grad_output: Array, reduction: int, count: int) -> Array:
    """The gradient that reaches each of ``count`` elements of the loss."""
    g = widen(grad_output)
    return g / np.asarray(count, g.dtype) if reduction == MEAN else g


# Regression


@lowering("mse_loss")
def mse_loss(self, target, reduction=MEAN):
    (x, y), result = promote(self, target)
    return _reduce((x - y) * (x - y), reduction, result)


@lowering("mse_loss_backward")
def mse_loss_backward(grad_output, self, target, reduction):
    (x, y, g), result = promote(self, target, grad_output)
    d = x - y
    return (np.asarray(2, d.dtype) * d * _per_element(g, reduction, d.size)).astype(result)


@lowering("l1_loss")
def l1_loss(self, target, reduction=MEAN):
    (x, y), result = promote(self, target)
    distance = jnp.abs(x - y)
    return _reduce(distance, reduction, jnp.zeros((), result).real.dtype)


@lowering("smooth_l1_loss")
def smooth_l1_loss(self, target, reduction=MEAN, beta=1.0):
    (x, y), result = promote(self, target)
    z, beta, half = jnp.abs(x - y), cast(beta, x.dtype), np.asarray(0.5, x.dtype)
    return _reduce(jnp.where(z < beta, half * z * z / beta, z - half * beta), reduction, result)


@lowering("smooth_l1_loss_backward")
def smooth_l1_loss_backward(grad_output, self, target, reduction, beta):
    (x, y, g), result = promote(self, target, grad_output)
    d, beta = x - y, cast(beta, x.dtype)
    slope = jnp.where(jnp.abs(d) < beta, d / beta, jnp.sign(d))
    return (slope * _per_element(g, reduction, d.size)).astype(result)


@lowering("huber_loss")
def huber_loss(self, target, reduction=MEAN, delta=1.0):
    (x, y), result = promote(self, target)
    z, delta, half = jnp.abs(x - y), cast(delta, x.dtype), np.asarray(0.5, x.dtype)
    return _reduce(jnp.where(z <= delta, half * z * z, delta * (z - half * delta)), reduction, result)


@lowering("huber_loss_backward")
def huber_loss_backward(grad_output, self, target, reduction, delta):
    (x, y, g), result = promote(self, target, grad_output)
    d, delta = x - y, cast(delta, x.dtype)
    return (jnp.clip(d, -delta, delta) * _per_element(g, reduction, d.size)).astype(result)


@lowering("soft_margin_loss")
def soft_margin_loss(self, target, reduction=MEAN):
    (x, y), result = promote(self, target)
    return _reduce(jnp.log1p(jnp.exp(-x * y)), reduction, result)


@lowering("soft_margin_loss_backward")
def soft_margin_loss_backward(grad_output, self, target, reduction):
    (x, y, g), result = promote(self, target, grad_output)
    return (-y * jax.nn.sigmoid(-x * y) * _per_element(g, reduction, x.size)).astype(result)


# Binary classification


@lowering("binary_cross_entropy")
def binary_cross_entropy(self, target, weight=None, reduction=MEAN):
    x, t = widen(self), widen(target)
    floor, one = np.asarray(-100, x.dtype), np.ones((), x.dtype)
    loss = (t - one) * jnp.maximum(jnp.log1p(-x), floor) - t * jnp.maximum(jnp.log(x), floor)
    return _reduce(loss if weight is None else loss * widen(weight), reduction, self.dtype)


@lowering("binary_cross_entropy_backward")
def binary_cross_entropy_backward(grad_output, self, target, weight=None, reduction=MEAN):
    x, t = widen(self), widen(target)
    one = np.ones((), x.dtype)
    slope = (x - t) / jnp.maximum((one - x) * x, np.asarray(1e-12, x.dtype))
    slope = slope if weight is None else slope * widen(weight)
    return (slope * _per_element(grad_output, reduction, x.size)).astype(self.dtype)


@lowering("binary_cross_entropy_with_logits")
def binary_cross_entropy_with_logits(self, target, weight=None, pos_weight=None, reduction=MEAN):
    (x, t), result = promote(self, target)
    one = np.ones((), x.dtype)
    log_sigmoid = jax.nn.log_sigmoid(x)
    scale = one if pos_weight is None else one + (widen(pos_weight) - one) * t
    loss = (one - t) * x - scale * log_sigmoid
    return _reduce(loss if weight is None else loss * widen(weight), reduction, result)


# Negative log-likelihood, with classes in dimension 1 (0 if there is no batch)


def _class_dim(scores: Array) -> int:
    return 1 if scores.ndim > 1 else 0


def _class_weights(weight: Array | None, target: Array, ignored: Array, dtype: np.dtype) -> Array:
    """The weight of each target's class; 0 for ignored targets."""
    chosen = jnp.ones(target.shape, dtype) if weight is None else weight.astype(dtype)[target]
    return jnp.where(ignored, np.zeros((), dtype), chosen)


@lowering("nll_loss_forward", "nll_loss2d_forward")
def nll_loss_forward(self, target, weight, reduction, ignore_index):
    x, dim = widen(self), _class_dim(self)
    ignored = target == ignore_index
    index = jnp.where(ignored, jnp.zeros((), target.dtype), target)
    index = check_index(index, self.shape[dim], "Target {value} is out of bounds.", allow_negative=False)
    picked = jnp.squeeze(jnp.take_along_axis(x, jnp.expand_dims(index, dim), axis=dim), dim) if x.shape[dim] else None
    if picked is None:
        picked = jnp.zeros(index.shape, x.dtype)
    w = _class_weights(weight, index, ignored, x.dtype)
    loss = jnp.where(ignored, np.zeros((), x.dtype), -picked * w)
    if reduction == NONE and self.ndim > 1:
        return loss.astype(self.dtype), jnp.zeros((), self.dtype)
    total, total_weight = jnp.sum(loss), jnp.sum(w)
    loss = total / total_weight if reduction == MEAN else total
    return loss.astype(self.dtype), total_weight.astype(self.dtype)


@lowering("nll_loss_backward", "nll_loss2d_backward")
def nll_loss_backward(grad_output, self, target, weight, reduction, ignore_index, total_weight):
    g, dim = widen(grad_output), _class_dim(self)
    ignored = target == ignore_index
    index = jnp.where(ignored, jnp.zeros((), target.dtype), target).astype(np.int32)
    w = _class_weights(weight, index, ignored, g.dtype)
    if reduction == MEAN:
        g = g / total_weight.astype(g.dtype)
    slope = jnp.where(ignored, np.zeros((), g.dtype), -w * g)
    # Comparing with an iota instead of scattering: dense output, and it fuses with the softmax gradient that follows.
    here = jax.lax.broadcasted_iota(np.int32, self.shape, dim) == jnp.expand_dims(index, dim)
    return jnp.where(here, jnp.expand_dims(slope, dim), np.zeros((), g.dtype)).astype(self.dtype)


# Margins


def _rows(x: Array) -> Array:
    """(N, C) from scores or labels that may lack the batch."""
    return x.reshape(-1, x.shape[-1] if x.ndim else 1)


def _margins(self: Array, target: Array, margin: Any) -> tuple[Array, Array, Array]:
    """(hinges of every class against the target's, where the target's class is, the targets)."""
    x = _rows(widen(self))
    t = check_index(target.reshape(-1), x.shape[1], "target out of range", allow_negative=False)
    here = jax.lax.broadcasted_iota(np.int32, x.shape, 1) == t[:, None]
    own = jnp.take_along_axis(x, t[:, None], axis=1)
    return jnp.where(here, np.zeros((), x.dtype), jnp.maximum(cast(margin, x.dtype) - own + x, 0)), here, t


def _class_scale(weight: Array | None, target: Array, classes: int, dtype: np.dtype) -> Array:
    scale = jnp.full((target.size, 1), 1 / classes, dtype)
    return scale if weight is None else scale * weight.astype(dtype)[target][:, None]


@lowering("multi_margin_loss", static=("p",))
def multi_margin_loss(self, target, p=1, margin=1, weight=None, reduction=MEAN):
    hinge, _, t = _margins(self, target, margin)
    hinge = (hinge if p == 1 else hinge * hinge) * _class_scale(weight, t, hinge.shape[1], hinge.dtype)
    loss = jnp.sum(hinge, axis=1)
    return _reduce(loss if target.ndim else loss[0], reduction, self.dtype)


@lowering("multi_margin_loss_backward", static=("p",))
def multi_margin_loss_backward(grad_output, self, target, p, margin, weight=None, reduction=MEAN):
    hinge, here, t = _margins(self, target, margin)
    slope = (hinge > 0).astype(hinge.dtype) if p == 1 else hinge + hinge
    slope = slope * _class_scale(weight, t, hinge.shape[1], hinge.dtype)
    slope = jnp.where(here, -jnp.sum(slope, axis=1, keepdims=True), slope)
    g = _per_element(grad_output, reduction, t.size)
    return (slope * (g.reshape(-1, 1) if g.ndim else g)).reshape(self.shape).astype(self.dtype)


def _targets_of(target: Array, classes: int) -> tuple[Array, Array, Array]:
    """(indices, which of them count, which classes are targets) of rows of labels that end at the first -1."""
    counts = jnp.cumsum((target < 0).astype(np.int32), axis=-1) == 0
    index = check_index(jnp.where(counts, target, 0), classes, "target out of range", allow_negative=False)
    chosen = (index[:, :, None] == jnp.arange(classes, dtype=np.int32)) & counts[:, :, None]
    return index, counts, chosen.any(axis=1)


def _label_hinges(x: Array, index: Array, counts: Array, is_target: Array) -> Array:
    """max(0, 1 - (x[label] - x[other])) for every (row, label, other class), 0 where either does not count."""
    own = jnp.take_along_axis(x, index, axis=1)[:, :, None]
    hinge = jnp.maximum(np.ones((), x.dtype) - own + x[:, None, :], 0)
    return jnp.where(counts[:, :, None] & ~is_target[:, None, :], hinge, np.zeros((), x.dtype))


@lowering("multilabel_margin_loss_forward")
def multilabel_margin_loss_forward(self, target, reduction):
    x = _rows(widen(self))
    index, counts, is_target = _targets_of(_rows(target), x.shape[1])
    hinge = _label_hinges(x, index, counts, is_target)
    loss = jnp.sum(hinge, axis=(1, 2)) / np.asarray(x.shape[1], x.dtype)
    loss = _reduce(loss if self.ndim > 1 else loss[0], reduction, self.dtype)
    return loss, is_target.reshape(target.shape).astype(self.dtype)


@lowering("multilabel_margin_loss_backward")
def multilabel_margin_loss_backward(grad_output, self, target, reduction, is_target):
    x = _rows(widen(self))
    index, counts, chosen = _targets_of(_rows(target), x.shape[1])
    active = (_label_hinges(x, index, counts, chosen) > 0).astype(x.dtype)
    # One label may be named twice: each mention pushes its class up by its own number of violations.
    named = index[:, :, None] == jnp.arange(x.shape[1], dtype=np.int32)
    pushes = jnp.where(named, jnp.sum(active, axis=2)[:, :, None], np.zeros((), x.dtype))
    slope = (jnp.sum(active, axis=1) - jnp.sum(pushes, axis=1)) / np.asarray(x.shape[1], x.dtype)
    g = _per_element(grad_output, reduction, x.shape[0])
    return (slope * (g.reshape(-1, 1) if g.ndim else g)).reshape(self.shape).astype(self.dtype)
