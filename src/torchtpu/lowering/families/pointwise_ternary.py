"""Elementwise operators of three arguments: selection, clamping, interpolation, multiply-add."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from torchtpu.lowering.families.pointwise_binary import common, scaled
from torchtpu.lowering.promotion import cast, promote
from torchtpu.lowering.registry import lowering


@lowering("where.self", "where.ScalarSelf", "where.ScalarOther", "where.Scalar")
def where(condition, self, other):
    x, y = common(self, other)
    return jnp.where(condition != 0, x, y)


def clamp(self: Any, min: Any = None, max: Any = None) -> Any:
    """Limit to ``[min, max]``: NaN in the input or in a bound wins, and ``max`` wins over ``min``."""
    given = [b for b in (min, max) if b is not None]
    x, *_ = values = common(self, *given)
    bounds = iter(values[1:])
    if min is not None:
        x = jnp.maximum(x, next(bounds))
    return x if max is None else jnp.minimum(x, next(bounds))


@lowering("clamp", "clamp.Tensor", "clip", "clip.Tensor")
def clamp_both(self, min=None, max=None):
    return clamp(self, min, max)


@lowering("clamp_min", "clamp_min.Tensor")
def clamp_min(self, min):
    return clamp(self, min=min)


@lowering("clamp_max", "clamp_max.Tensor")
def clamp_max(self, max):
    return clamp(self, max=max)


@lowering("lerp.Scalar", "lerp.Tensor")
def lerp(self, end, weight):
    (x, y, w), result = promote(self, end, weight)
    # the branch nearer to the weight's end keeps lerp(x, y, 1) equal to y
    return cast(jnp.where(jnp.abs(w) < 0.5, x + w * (y - x), y - (y - x) * (1 - w)), result)


@lowering("addcmul")
def addcmul(self, tensor1, tensor2, *, value=1):
    (x, a, b), result = promote(self, tensor1, tensor2)
    return cast(x + scaled(a * b, value), result)


@lowering("addcdiv")
def addcdiv(self, tensor1, tensor2, *, value=1):
    (x, a, b), result = promote(self, tensor1, tensor2)
    return cast(x + scaled(a / b, value), result)
