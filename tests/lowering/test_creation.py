"""Creation operators and type conversion against PyTorch CPU."""

from __future__ import annotations

import pytest
import torch
from checker import check, run_lowering, sweep

aten = torch.ops.aten
inf, nan = float("inf"), float("nan")


@pytest.mark.parametrize(
    "entry",
    [
        "arange",
        "complex",
        "eye",
        "fill",
        "full",
        "full_like",
        "linspace",
        "logspace",
        "new_full",
        "ones_like",
        "scalar_tensor",
        "to",
        "tril",
        "tril_indices",
        "triu",
        "triu_indices",
        "zeros_like",
        "polar",
    ],
)
def test_op_db(entry):
    mode = sweep(entry, (torch.float32, torch.int64, torch.bool), limit=4)
    assert mode.seen and not mode.failures


@pytest.mark.parametrize("value", [3, 2.5, True, 1 + 2j, nan])
def test_full_infers_the_dtype(value):
    check(aten.full.default, [2, 0, 3], value)
    check(aten.full.default, [], value)
    check(aten.full.default, [2], value, dtype=torch.complex64)


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.bfloat16])
def test_scalars_take_the_tensor_dtype(dtype):
    x = torch.ones(2, 3).to(dtype)
    for op in (aten.full_like.default, aten.fill.Scalar):
        check(op, x, 3)
    check(aten.fill.Tensor, x, torch.tensor(2.5))
    check(aten.new_full.default, x, [2], 1)
    check(aten.new_zeros.default, x, [0, 2])
    check(aten.new_ones.default, x, [2], dtype=torch.float64)


@pytest.mark.parametrize(
    ("arguments", "dtype"),
    [
        ((0, 5, 1), None),
        ((0, 5.5, 1), None),
        ((0.1, 1.0, 0.1), None),
        ((10, 0, -3), None),
        ((0, 1, 1e-4), None),
        ((2**40, 2**40 + 5, 2), None),
        ((5, 5, 1), torch.float64),
        ((1.5, 7.5, 1.5), torch.int64),
        ((1.5, 7.5, 1.5), torch.int32),
        ((0, 10, 1), torch.bfloat16),
    ],
)
def test_arange(arguments, dtype):
    check(aten.arange.start_step, *arguments, dtype=dtype)


@pytest.mark.filterwarnings("ignore:torch.range")
def test_range_includes_its_end():
    check(aten.range.default, 0, 4)
    check(aten.range.step, 1, 4, 0.5)
    check(aten.range.step, 1, 4, 2, dtype=torch.int64)


@pytest.mark.parametrize("dtype", [None, torch.float64, torch.int64, torch.complex64])
@pytest.mark.parametrize("arguments", [(0, 10, 5), (-5.5, 9.3, 50), (1, 2, 0), (0.6, 0.6, 1)])
def test_spaces(arguments, dtype):
    check(aten.linspace.default, *arguments, dtype=dtype)
    start, end, steps = arguments
    check(aten.logspace.default, start / 5, end / 5, steps, dtype=dtype)


def test_linspace_of_tensors_and_complex_numbers():
    check(aten.linspace.default, 1j, 2, 5)
    check(aten.linspace.Tensor_Scalar, torch.tensor(1.0), 2, 5)
    check(aten.linspace.Tensor_Tensor, torch.tensor(1), torch.tensor(2.5), 5)


@pytest.mark.parametrize("name", ["hann", "hamming", "blackman", "bartlett", "kaiser"])
def test_windows(name):
    op = getattr(aten, f"{name}_window")
    for length in (0, 1, 2, 9):
        check(op.default, length)
        check(op.periodic, length, False, dtype=torch.float64)


def test_windows_with_parameters():
    check(aten.hamming_window.periodic_alpha_beta, 9, True, 0.5, 0.4)
    check(aten.kaiser_window.beta, 9, True, 5.0)


@pytest.mark.parametrize("offset", [-5, -1, 0, 1, 5])
def test_triangles(offset):
    check(aten.tril.default, torch.randn(2, 3, 4), offset)
    check(aten.triu.default, torch.randn(3, 4) > 0, offset)
    check(aten.tril_indices.default, 3, 4, offset)
    check(aten.triu_indices.default, 3, 4, offset, dtype=torch.int32)


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.uint8, torch.int64, torch.bool, torch.complex64, torch.bfloat16, torch.float8_e4m3fn]
)
def test_conversion_of_floats(dtype):
    check(aten._to_copy.default, torch.tensor([-1.0, 2.7, -2.7, 0.0, 0.4]), dtype=dtype)


def test_conversion_edges():
    check(aten._to_copy.default, torch.tensor([300.0, -129.0]), dtype=torch.int8)
    check(aten._to_copy.default, torch.tensor([nan, inf, 0.0]), dtype=torch.bool)
    check(aten._to_copy.default, torch.tensor([-1, 300]), dtype=torch.uint8)
    check(aten._to_copy.default, torch.tensor([1 + 2j, 0.5j]), dtype=torch.bool)


@pytest.mark.filterwarnings("ignore:Casting complex")
def test_copy_broadcasts_and_casts():
    check(aten.copy.default, torch.zeros(2, 3, dtype=torch.int32), torch.tensor([1.5, 2.5, -3.7]))
    check(aten.copy.default, torch.zeros(2, 3), torch.tensor(1 + 2j))
    check(aten._to_copy.default, torch.tensor([1 + 2j, 0.5j]), dtype=torch.float32)


@pytest.mark.parametrize("op", [aten.empty.memory_format, aten.zeros.default, aten.ones.default])
def test_sizes_give_the_default_dtype(op):
    assert run_lowering(op, [2, 0]).shape == (2, 0)
    assert run_lowering(op, []).dtype is torch.get_default_dtype()
    assert run_lowering(op, [1], dtype=torch.bool).dtype is torch.bool


def test_uninitialised_memory_has_the_right_type():
    x = torch.ones(2, 3, dtype=torch.bfloat16)
    for result in (
        run_lowering(aten.empty_like.default, x),
        run_lowering(aten.new_empty.default, x, [2, 3]),
        run_lowering(aten.new_empty_strided.default, x, [2, 3], [1, 2]),
        run_lowering(aten.empty_strided.default, [2, 3], [3, 1], dtype=torch.bfloat16),
        run_lowering(aten.empty_permuted.default, [2, 3], [1, 0], dtype=torch.bfloat16),
    ):
        assert result.shape == (2, 3) and result.dtype is torch.bfloat16
