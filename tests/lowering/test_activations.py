"""Activation functions and their backward operators against PyTorch CPU."""

from __future__ import annotations

import math

import pytest
import torch
from checker import check, run_lowering, sweep

from torchtpu.lowering.registry import find

aten = torch.ops.aten
FORWARD = """
relu elu prelu celu selu silu hardsigmoid logsigmoid mish softsign tanhshrink threshold softshrink hardshrink hardtanh
relu6 softplus hardswish leaky_relu glu gelu
"""
X = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 0.5, -0.5, 1.0, -1.0, 3.0, -3.0, 6.0, 25.0, -25.0, 100.0])


@pytest.mark.parametrize("name", [f"nn.functional.{n}" for n in FORWARD.split()])
def test_op_db(name: str) -> None:
    """Forward and backward."""
    mode = sweep(name, (torch.float32, torch.bfloat16), limit=2)
    assert not [
        f"{op}: {error}"
        for op, error, *_ in mode.failures
        if (entry := find(op)) is not None and entry.function.__module__.endswith(".activations")
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "name",
    [
        "relu",
        "silu",
        "hardswish",
        "hardsigmoid",
        "softplus",
        "elu",
        "leaky_relu",
        "hardshrink",
        "softshrink",
        "hardtanh",
    ],
)
def test_special_values(name: str, dtype: torch.dtype) -> None:
    check(getattr(aten, name).default, X.to(dtype))


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu(approximate: str) -> None:
    x = torch.linspace(-6, 6, 49)
    check(aten.gelu.default, x, approximate=approximate)
    check(aten.gelu_backward.default, torch.ones_like(x), x, approximate=approximate)
    check(aten.gelu.default, torch.empty(0, 3), approximate=approximate)


@pytest.mark.parametrize(
    "op, arguments",
    [
        (aten.threshold_backward.default, (0.5,)),
        (aten.hardtanh_backward.default, (-1.0, 3.0)),
        (aten.leaky_relu_backward.default, (0.1, False)),
        (aten.softplus_backward.default, (2.0, 20.0)),
        (aten.hardshrink_backward.default, (0.5,)),
        (aten.softshrink_backward.default, (0.5,)),
        (aten.sigmoid_backward.default, ()),
        (aten.tanh_backward.default, ()),
        (aten.silu_backward.default, ()),
        (aten.hardswish_backward.default, ()),
        (aten.hardsigmoid_backward.default, ()),
    ],
    ids=lambda v: str(v),
)
def test_backward_operators(op, arguments) -> None:
    x = X[torch.isfinite(X)]
    check(op, torch.full_like(x, 2.0), x, *arguments)


@pytest.mark.parametrize("is_result", [True, False])
def test_elu_backward(is_result: bool) -> None:
    x = torch.linspace(-0.9, 2, 9)
    check(aten.elu_backward.default, torch.ones_like(x), 1.5, 2.0, 0.5, is_result, x)


def test_glu_splits_a_negative_dimension() -> None:
    x = torch.randn(4, 6)
    check(aten.glu.default, x, -2)
    check(aten.glu_backward.default, torch.randn(2, 6), x, 0)


def test_rrelu_draws_slopes_within_its_bounds() -> None:
    x = torch.linspace(-3, 3, 101)
    out, noise = run_lowering(aten.rrelu_with_noise_functional.default, x, torch.zeros_like(x), 0.1, 0.3, True)
    negative = x <= 0
    assert ((noise[negative] >= 0.1) & (noise[negative] <= 0.3)).all() and noise[negative].unique().numel() > 40
    torch.testing.assert_close(out, torch.where(negative, x * noise, x))
    out, _ = run_lowering(aten.rrelu_with_noise_functional.default, x, torch.zeros_like(x), 0.1, 0.3, False)
    torch.testing.assert_close(out, torch.where(negative, x * 0.2, x))
