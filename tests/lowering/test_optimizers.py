"""Fused optimizers, loss scaling and ``_foreach_*`` against PyTorch CPU."""

from __future__ import annotations

import pytest
import torch
from checker import check

from torchtpu.lowering.registry import overloads

aten = torch.ops.aten
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def tensors(dtype, positive=False):
    """A matrix, a scalar and an empty tensor."""
    made = [torch.rand(s) + 0.2 if positive else torch.randn(s) * 2 for s in ((3, 4), (), (0, 2))]
    return [(t if dtype.is_floating_point else t * 3).to(dtype) for t in made]


@pytest.mark.parametrize("name", ["_fused_adam", "_fused_adamw"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "amsgrad, maximize, scale, found", [(False, False, None, None), (True, True, 4.0, 0.0), (True, False, 2.0, 1.0)]
)
def test_adam(name, dtype, amsgrad, maximize, scale, found):
    p, g, m, v = (tensors(dtype, positive=i == 3) for i in range(4))
    maxima = tensors(dtype, positive=True) if amsgrad else []
    options = {
        "beta1": 0.9,
        "beta2": 0.999,
        "weight_decay": 0.01,
        "eps": 1e-8,
        "amsgrad": amsgrad,
        "maximize": maximize,
    }
    options |= {
        "grad_scale": scale and torch.tensor(scale),
        "found_inf": None if found is None else torch.tensor(found),
    }
    steps = [torch.tensor(3.0)] * 3
    check(getattr(aten, name).default, p, g, m, v, maxima, steps, lr=0.01, **options)
    check(getattr(aten, name).tensor_lr, p, g, m, v, maxima, steps, lr=torch.tensor(0.01), **options)


def test_adam_first_step_bias_correction():
    """``1 - 0.999 ** 1`` must not lose its digits."""
    p, g, zero = torch.randn(100), torch.randn(100), torch.zeros(100)
    options = {"beta1": 0.9, "beta2": 0.999, "weight_decay": 0.0, "eps": 1e-8, "amsgrad": False, "maximize": False}
    check(aten._fused_adam.default, [p], [g], [zero], [zero], [], [torch.tensor(1.0)], lr=1.0, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd(dtype, first, nesterov):
    p, g, buffers = (tensors(dtype) for _ in range(3))
    options = {"weight_decay": 0.01, "maximize": nesterov, "is_first_step": first, "grad_scale": torch.tensor(2.0)}
    momentum = {"momentum": 0.9, "dampening": 0.1, "nesterov": nesterov}
    check(aten._fused_sgd.default, p, g, buffers, lr=0.1, **options, **momentum)
    check(aten._fused_sgd.tensor_lr, p, g, buffers, lr=torch.tensor(0.1), **options, **momentum)
    plain = {"momentum": 0.0, "dampening": 0.0, "nesterov": False}
    check(aten._fused_sgd.default, p, g, [], lr=0.1, **options, **plain)


@pytest.mark.parametrize("dtype", DTYPES)
def test_adagrad(dtype):
    p, g, sums = (tensors(dtype, positive=i == 2) for i in range(3))
    steps = [torch.tensor(2.0)] * 3
    options = {"lr_decay": 0.1, "weight_decay": 0.01, "eps": 1e-10, "maximize": False}
    check(aten._fused_adagrad.default, p, g, sums, steps, lr=0.1, **options)
    check(aten._fused_adagrad.tensor_lr, p, g, sums, steps, lr=torch.tensor(0.1), **options)


@pytest.mark.parametrize("bad", [None, float("inf"), float("nan")])
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_unscale(bad, scale):
    grads = tensors(torch.float32)
    if bad is not None:
        grads[1] = torch.tensor(bad)
    check(aten._amp_foreach_non_finite_check_and_unscale.default, grads, torch.zeros(()), torch.tensor(scale))


@pytest.mark.parametrize("found", [0.0, 1.0])
@pytest.mark.parametrize("tracker", [0, 3])
@pytest.mark.parametrize("scale", [4.0, 3e38])
def test_update_scale(found, tracker, scale):
    args = (torch.tensor([scale]), torch.tensor([tracker], dtype=torch.int32), torch.tensor([found]))
    check(aten._amp_update_scale.default, *args, 2.0, 0.5, 4)


POSITIVE = {"log", "log2", "log10", "log1p", "sqrt", "rsqrt", "pow", "lgamma"}


def arguments(op, base, dtype):
    """Arguments for every parameter without a default, by its type."""
    lists = [tensors(dtype, positive=base in POSITIVE), tensors(dtype, positive=True), tensors(dtype, positive=True)]
    if base == "acos":
        lists[0] = [t.clamp(-0.9, 0.9) for t in lists[0]]
    if base == "mm":
        lists = [[torch.randn(s).to(dtype)] for s in ((3, 2), (2, 4))]
    if base == "max":
        lists = [lists[0][:2]]
    floating = dtype.is_floating_point
    made = {
        "List[number]": [2.5, 1, 0.5] if floating else [2, 3, 1],
        "number": 2,
        "Tensor": torch.tensor([2, 3, 1]).to(dtype) if base.startswith("addc") else torch.tensor(3).to(dtype),
    }
    needed = [str(a.type) for a in op._schema.arguments if not a.has_default_value()]
    return [lists.pop(0) if kind == "List[Tensor]" else made[kind] for kind in needed]


@pytest.mark.parametrize("name", [n for n in overloads() if n.startswith("_foreach_")])
def test_foreach(name):
    base, overload = name.split(".")
    op, checked = getattr(getattr(aten, base), overload), 0
    integers = any(word in base for word in ("add", "sub", "mul", "div", "max", "min", "pow"))
    for dtype in (torch.float32, torch.int64) if integers else (torch.float32,):
        args = arguments(op, base.removeprefix("_foreach_"), dtype)
        try:
            op(*args)
        except RuntimeError:  # PyTorch has no kernel for this dtype
            continue
        check(op, *args)
        checked += 1
    assert checked


def test_foreach_alpha_and_value():
    x, y, z = (tensors(torch.float32, positive=True) for _ in range(3))
    check(aten._foreach_add.List, x, y, alpha=0.5)
    check(aten._foreach_sub.List, x, y, alpha=3)
    check(aten._foreach_addcmul.Scalar, x, y, z, 0.5)
    check(aten._foreach_norm.Scalar, x, 1)
    check(aten._foreach_norm.Scalar, x[:2], float("inf"))
    check(aten._foreach_add.Scalar, [torch.tensor([1, 2])], 0.5)
