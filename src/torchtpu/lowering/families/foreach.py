"""``_foreach_*``: one operator over lists of tensors, derived from the operator on one tensor."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import torch

from torchtpu.lowering.apply import apply
from torchtpu.lowering.dtypes import to_jax
from torchtpu.lowering.precision import accumulator
from torchtpu.lowering.promotion import cast
from torchtpu.lowering.registry import lowering

_aten = torch.ops.aten


def _run(name: str, *args, **kwargs):
    """The operator on one tensor: its lowering, or PyTorch's decomposition."""
    base, _, overload = name.partition(".")
    return apply(getattr(getattr(_aten, base), overload or "default"), args, kwargs)


_UNARY = [
    "abs", "acos", "asin", "atan", "ceil", "cos", "cosh", "erf", "erfc", "exp",
    "expm1", "floor", "frac", "lgamma", "log", "log10", "log1p", "log2", "neg", "reciprocal",
    "round", "rsqrt", "sigmoid", "sign", "sin", "sinh", "sqrt", "tan", "tanh", "trunc",
]  # fmt: skip


def _unary(name: str):
    return lambda self: [_run(name, x) for x in self]


for _name in _UNARY:
    lowering(f"_foreach_{_name}")(_unary(_name))

lowering("_foreach_max")(_unary("max"))


@lowering("_foreach_zero")
def zero(self):
    return [jnp.zeros_like(x) for x in self]


@lowering("_foreach_clone")
def clone(self, memory_format=None):
    return list(self)


@lowering("_foreach_copy")
def copy(self, src, non_blocking=False):
    return [jnp.broadcast_to(cast(s, x.dtype), x.shape) for x, s in zip(self, src, strict=True)]


@lowering("_foreach_mm")
def mm(self, mat2):
    return [_run("mm", x, y) for x, y in zip(self, mat2, strict=True)]


def _pairwise(base: str, key: str):
    """The second argument, whatever it is called, is a list: of tensors or of numbers."""

    def lower(self, *rest, **named):
        others = rest[0] if rest else named[key]
        return [_run(base, x, y) for x, y in zip(self, others, strict=True)]

    return lower


def _with_one(base: str, key: str):
    """The second argument is the same number or tensor for all."""

    def lower(self, *rest, **named):
        other = rest[0] if rest else named[key]
        return [_run(base, x, other) for x in self]

    return lower


def _scaled(base: str, one: bool):
    """``add`` and ``sub`` of tensors have an ``alpha``."""

    def lower(self, other, alpha=1):
        others = itertools.repeat(other, len(self)) if one else other
        return [_run(base, x, y, alpha=alpha) for x, y in zip(self, others, strict=True)]

    return lower


for _name in ("add", "sub"):
    lowering(f"_foreach_{_name}.List")(_scaled(f"{_name}.Tensor", one=False))
    lowering(f"_foreach_{_name}.Scalar")(_with_one(f"{_name}.Tensor", "scalar"))
    lowering(f"_foreach_{_name}.ScalarList")(_pairwise(f"{_name}.Tensor", "scalars"))
lowering("_foreach_add.Tensor")(_scaled("add.Tensor", one=True))

for _name in ("mul", "div"):
    lowering(f"_foreach_{_name}.List")(_pairwise(f"{_name}.Tensor", "other"))
    lowering(f"_foreach_{_name}.Scalar")(_with_one(f"{_name}.Tensor", "scalar"))
    lowering(f"_foreach_{_name}.ScalarList")(_pairwise(f"{_name}.Tensor", "scalars"))
    lowering(f"_foreach_{_name}.Tensor")(_with_one(f"{_name}.Tensor", "other"))

for _name, _list, _number in (
    ("clamp_max", "minimum", "clamp_max"),
    ("clamp_min", "maximum", "clamp_min"),
    ("maximum", "maximum", "clamp_min"),
    ("minimum", "minimum", "clamp_max"),
):
    lowering(f"_foreach_{_name}.List")(_pairwise(_list, "other"))
    lowering(f"_foreach_{_name}.Scalar")(_with_one(_number, "scalar"))
    lowering(f"_foreach_{_name}.ScalarList")(_pairwise(_number, "scalars"))

# The exponent decides the formula (a square is one multiplication), as in ``pow`` itself.
lowering("_foreach_pow.List")(_pairwise("pow.Tensor_Tensor", "exponent"))
lowering("_foreach_pow.Scalar", static=("exponent",))(_with_one("pow.Tensor_Scalar", "exponent"))
lowering("_foreach_pow.ScalarList", static=("exponent",))(_pairwise("pow.Tensor_Scalar", "exponent"))


@lowering("_foreach_pow.ScalarAndTensor", static=("self",))
def pow_number(self, exponent):
    return [_run("pow.Scalar", self, x) for x in exponent]


@lowering("_foreach_lerp.List")
def lerp_list(self, tensors1, weights):
    return [_run("lerp.Tensor", x, y, w) for x, y, w in zip(self, tensors1, weights, strict=True)]


@lowering("_foreach_lerp.Scalar")
def lerp_scalar(self, tensors1, weight):
    return [_run("lerp.Scalar", x, y, weight) for x, y in zip(self, tensors1, strict=True)]


@lowering("_foreach_lerp.ScalarList")
def lerp_scalars(self, tensors1, weight):
    return [_run("lerp.Scalar", x, y, w) for x, y, w in zip(self, tensors1, weight, strict=True)]


def _fused(base: str) -> None:
    def one(self, tensor1, tensor2, value=1):
        return [_run(base, x, y, z, value=value) for x, y, z in zip(self, tensor1, tensor2, strict=True)]

    def each(self, tensor1, tensor2, scalars):
        values = [scalars[i] for i in range(len(self))] if isinstance(scalars, jax.Array) else scalars
        return [_run(base, x, y, z, value=v) for x, y, z, v in zip(self, tensor1, tensor2, values, strict=True)]

    lowering(f"_foreach_{base}.Scalar")(one)
    lowering(f"_foreach_{base}.ScalarList", f"_foreach_{base}.Tensor")(each)


_fused("addcmul")
_fused("addcdiv")


@lowering("_foreach_norm.Scalar", static=("ord",))
def norm(self, ord=2, dtype=None):
    return [_run("linalg_vector_norm", x, ord, None, False, dtype=dtype) for x in self]


@lowering("_foreach_powsum.Scalar", static=("ord",))
def powsum(self, ord=2, dtype=None):
    """The norm without its root."""
    out = []
    for x in self:
        wide = jnp.abs(cast(x, accumulator(x.dtype) if dtype is None else to_jax(dtype)))
        power = wide * wide if ord == 2 else wide if ord == 1 else wide ** jnp.asarray(ord, wide.dtype)
        result = wide.dtype if dtype is not None or jnp.iscomplexobj(x) else x.dtype
        out.append(cast(power.sum(dtype=wide.dtype), result))
    return out
