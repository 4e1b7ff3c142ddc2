"""Elementwise arithmetic, comparison, logic, bits and rounding against PyTorch CPU."""

from __future__ import annotations

import math

import pytest
import torch
from checker import check, run_lowering, sweep

from torchtpu.lowering.registry import find

aten = torch.ops.aten
FAMILIES = ("pointwise_unary", "pointwise_binary", "pointwise_ternary")

UNARY = """
abs acos acosh asin asinh atan atanh bitwise_not ceil conj_physical cos cosh deg2rad exp exp2 expm1 floor frac frexp
isfinite isinf isnan isneginf isposinf log log10 log1p log2 logical_not nan_to_num neg rad2deg reciprocal round rsqrt
sgn sigmoid sign signbit sin sinc sinh sqrt square tan tanh trunc angle
"""
BINARY = """
add sub rsub mul div floor_divide remainder fmod pow float_power atan2 hypot maximum minimum fmax fmin copysign
nextafter logaddexp logaddexp2 xlogy special.xlog1py heaviside gcd lcm ldexp eq ne lt le gt ge logical_and logical_or
logical_xor bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift isclose where clamp clamp_min
clamp_max lerp addcmul addcdiv
"""

SPECIAL = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0, 0.5, 2.5, -2.5, 1e-3, 88.5, -88.5, 1e5, 3e37]


def own_failures(mode) -> list[str]:
    """Failures of this family's operators; others have tests of their own."""
    return [
        f"{name}: {error}"
        for name, error, *_ in mode.failures
        if (entry := find(name)) is not None and entry.function.__module__.rsplit(".", 1)[-1] in FAMILIES
    ]


@pytest.mark.parametrize("name", (UNARY + BINARY).split())
def test_op_db(name: str) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.int64, torch.bool)
    assert not own_failures(sweep(name, dtypes, limit=2, backward=False))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "name",
    [
        "acosh",
        "atanh",
        "cosh",
        "sinh",
        "exp2",
        "log2",
        "round",
        "sign",
        "sgn",
        "signbit",
        "isposinf",
        "nan_to_num",
        "sinc",
    ],
)
def test_unary_at_special_values(name: str, dtype: torch.dtype) -> None:
    check(getattr(aten, name).default, torch.tensor(SPECIAL, dtype=dtype))


SPECIAL_BINARY = """
div.Tensor floor_divide.default atan2.default maximum.default fmax.default pow.Tensor_Tensor xlogy.Tensor
heaviside.default logaddexp2.default hypot.default
"""


@pytest.mark.parametrize("name", SPECIAL_BINARY.split())
def test_binary_at_special_values(name: str) -> None:
    packet, _, overload = name.partition(".")
    op = getattr(getattr(aten, packet), overload)
    x = torch.tensor(SPECIAL)
    check(op, x[:, None].contiguous(), x)


@pytest.mark.parametrize("mode", ["floor", "trunc"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.float32], ids=str)
def test_rounded_division(mode: str, dtype: torch.dtype) -> None:
    x = torch.tensor([7, -7, 6, -6, 0], dtype=dtype)
    check(aten.div.Tensor_mode, x[:, None], torch.tensor([2, -2, 3, -4], dtype=dtype), rounding_mode=mode)


@pytest.mark.parametrize("op", [aten.remainder.Tensor, aten.fmod.Tensor], ids=str)
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float32], ids=str)
def test_remainders(op, dtype: torch.dtype) -> None:
    x = torch.tensor([7, 5, 100, 0], dtype=dtype)
    signed = torch.cat([x, -x]) if dtype.is_signed else x
    check(op, signed[:, None], torch.cat([x[:3], -x[:3]]) if dtype.is_signed else x[:3])


@pytest.mark.parametrize("exponent", [0, 1, 2, 3, 0.5, -0.5, -1, -2, 2.5, -3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_power_of_number(exponent: float, dtype: torch.dtype) -> None:
    if dtype is torch.int64 and isinstance(exponent, int) and exponent < 0:
        pytest.skip("PyTorch refuses integers to negative powers")
    check(aten.pow.Tensor_Scalar, torch.tensor([0, 1, 2, 5]).to(dtype), exponent)


def test_integer_powers_wrap_as_pytorch_does() -> None:
    check(aten.pow.Tensor_Tensor, torch.tensor([-2, -1, 0, 1, 3]), torch.tensor([[5], [0], [40], [-1], [-2]]))


@pytest.mark.parametrize("op", [aten.bitwise_left_shift.Tensor, aten.bitwise_right_shift.Tensor], ids=str)
@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.int64], ids=str)
def test_shift_counts_out_of_range(op, dtype: torch.dtype) -> None:
    x = torch.tensor([1, 5, 200, -7 if dtype.is_signed else 7]).to(dtype)
    check(op, x[:, None], torch.tensor([0, 1, 31, 64, 100]).to(dtype))


def test_smallest_integer_in_gcd_ends() -> None:
    low = torch.iinfo(torch.int32).min
    check(
        aten.gcd.default,
        torch.tensor([low, 12, 0, -18], dtype=torch.int32),
        torch.tensor([4, low, 0, 12], dtype=torch.int32),
    )


@pytest.mark.parametrize("value", [2, 2.5, True])
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.float16, torch.complex64], ids=str)
@pytest.mark.parametrize("op", [aten.add.Tensor, aten.mul.Tensor, aten.eq.Tensor, aten.clamp_min.Tensor], ids=str)
def test_number_and_0d_promotion(op, dtype: torch.dtype, value) -> None:
    if op is aten.clamp_min.Tensor and (dtype.is_complex or dtype is torch.bool):
        pytest.skip("PyTorch does not order these")
    x = torch.tensor([0, 1, 1]).to(dtype)
    check(op, x, torch.tensor(value))
    if op is not aten.clamp_min.Tensor:
        check(op.overloadpacket.Scalar, x, value)


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3)], ids=str)
def test_0d_and_empty(shape: tuple[int, ...]) -> None:
    x = torch.ones(shape)
    for op in (aten.sub.Tensor, aten.fmod.Tensor, aten.maximum.default, aten.lt.Tensor):
        check(op, x, x)
    check(aten.clamp.default, x, 0.25, 0.5)
    check(aten.where.self, x > 0, x, torch.tensor(2, dtype=torch.int64))
    check(aten.addcmul.default, x, x, x, value=0.5)
    check(aten.round.decimals, x, decimals=2)


def test_clamp_keeps_nan_and_prefers_the_upper_bound() -> None:
    x = torch.tensor([math.nan, -1.0, 0.5, 9.0])
    check(aten.clamp.default, x, 2.0, 1.0)
    check(aten.clamp.Tensor, x, torch.tensor(0.0), torch.tensor([math.nan, 1.0, 1.0, 1.0]))
    check(aten.clamp.default, torch.arange(5), 1.5)


def test_alpha_is_a_runtime_operand() -> None:
    x = torch.arange(4)
    assert run_lowering(aten.add.Tensor, x, x, alpha=3).tolist() == [0, 4, 8, 12]
    assert run_lowering(aten.rsub.Scalar, x, 10, 2).tolist() == [10, 8, 6, 4]
