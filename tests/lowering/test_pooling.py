"""Pooling, resampling and grid sampling against PyTorch CPU."""

from __future__ import annotations

import pytest
import torch
from checker import check, compare, run_lowering
from own import failures

aten = torch.ops.aten
nan, inf = float("nan"), float("inf")
ENTRIES = [f"{kind}_pool{rank}d" for kind in ("max", "avg", "adaptive_avg", "adaptive_max") for rank in (2, 3)]
ENTRIES += ["max_unpool2d", "max_unpool3d", "fractional_max_pool2d", "fractional_max_pool3d", "max_pool1d"]


@pytest.mark.parametrize("entry", ENTRIES)
def test_op_db(entry):
    assert not failures(f"nn.functional.{entry}", {"pooling"}, (torch.float32, torch.int64), limit=3)


@pytest.mark.parametrize("entry", ["nn.functional.upsample_nearest", "nn.functional.upsample_bilinear"])
def test_upsample_op_db(entry):
    assert not failures(entry, {"upsample"}, (torch.float32, torch.uint8), limit=3)


@pytest.mark.parametrize("mode", [0, 1, 2])
@pytest.mark.parametrize("padding", [0, 1, 2])
def test_grid_sampler(mode, padding):
    x, grid, align = torch.randn(2, 3, 5, 6), torch.randn(2, 4, 3, 2), bool(padding % 2)
    check(aten.grid_sampler_2d.default, x, grid, mode, padding, align)
    back = aten.grid_sampler_2d_backward.default
    check(back, torch.randn(2, 3, 4, 3), x, grid, mode, padding, align, [True, True])
    if mode < 2:
        check(aten.grid_sampler_3d.default, x[:, :, None], torch.randn(2, 4, 3, 2, 3), mode, padding, align)


@pytest.mark.parametrize("align", [False, True])
def test_affine_grid(align):
    check(aten.affine_grid_generator.default, torch.randn(2, 3, 4), [2, 3, 1, 5, 4], align)
    theta, grad = torch.randn(2, 2, 3, requires_grad=True), torch.randn(2, 4, 5, 2)
    (expected,) = torch.autograd.grad(aten.affine_grid_generator(theta, [2, 3, 4, 5], align), theta, grad)
    op = aten.affine_grid_generator_backward.default
    compare(op, run_lowering(op, grad, [2, 3, 4, 5], align), expected)


@pytest.fixture
def odd_values():
    x = torch.randn(1, 2, 6, 6)
    x[0, 0, 1, 1] = x[0, 0, 1, 2] = nan
    x[0, 1] = -inf
    x[0, 0, 4, 4] = inf
    return x


def test_nan_and_infinity(odd_values):
    check(aten.max_pool2d_with_indices.default, odd_values, [3, 3], [2, 2], [1, 1], [1, 1], True)
    check(aten.adaptive_max_pool2d.default, odd_values, [4, 5])
    check(aten.avg_pool2d.default, odd_values, [3, 3], [2, 2], [1, 1], True, False)
    check(aten._adaptive_avg_pool2d.default, odd_values, [4, 5])


def test_large_window_gradient_scatters():
    x = torch.randn(2, 16, 16)
    _, indices = aten.max_pool2d_with_indices(x, [8, 8], [4, 4], [4, 4])
    grad = torch.randn(indices.shape)
    args = (grad, x, [8, 8], [4, 4], [4, 4], [1, 1], False, indices)
    check(aten.max_pool2d_with_indices_backward.default, *args)


def test_empty_and_integers():
    check(aten._adaptive_avg_pool2d.default, torch.randn(0, 3, 4, 4), [2, 3])
    check(aten.max_pool2d_with_indices.default, torch.randn(0, 3, 4, 4), [2, 2])
    check(aten.max_pool2d_with_indices.default, torch.randint(-9, 9, (1, 3, 5, 5)), [2, 2], [2, 2], [1, 1])


def test_gradients_and_images_of_nothing():
    x = torch.randn(0, 2, 5, 5)
    out, indices = aten.fractional_max_pool2d(x, [2, 2], [3, 3], torch.rand(0, 2, 2))
    check(aten.fractional_max_pool2d_backward.default, out, x, [2, 2], [3, 3], indices)
    check(aten.max_unpool2d.default, out, indices, [5, 5])
    for size in ((0, 2, 5, 5), (2, 0, 5, 5)):
        check(aten.grid_sampler_2d.default, torch.randn(size), torch.randn(size[0], 3, 3, 2), 0, 0, False)


def test_unpool_checks_its_indices():
    with pytest.raises(IndexError):
        run_lowering(aten.max_unpool2d.default, torch.randn(1, 1, 1), torch.tensor([[[9]]]), [2, 2])


@pytest.mark.parametrize("filter", ["bilinear", "bicubic", "lanczos"])
@pytest.mark.parametrize("out", [[3, 4], [17, 13]])
def test_antialias(filter, out):
    op = getattr(aten, f"_upsample_{filter}2d_aa")
    check(op.default, torch.randn(1, 2, 8, 9), out, False)
    check(op.default, torch.randint(0, 255, (1, 2, 8, 9), dtype=torch.uint8), out, False)
    check(getattr(aten, f"_upsample_{filter}2d_aa_backward").default, torch.randn(1, 2, *out), out, [1, 2, 8, 9], False)


@pytest.mark.parametrize("align", [False, True])
@pytest.mark.parametrize("name, size", [("linear1d", [7]), ("bilinear2d", [7, 3]), ("bicubic2d", [7, 3])])
def test_upsample(name, size, align):
    shape = [1, 2, *[5] * len(size)]
    check(getattr(aten, f"upsample_{name}").default, torch.randn(shape), size, align)
    check(getattr(aten, f"upsample_{name}").default, torch.randn(shape).double(), size, align, *[1.4] * len(size))
    check(getattr(aten, f"upsample_{name}_backward").default, torch.randn(1, 2, *size), size, shape, align)


@pytest.mark.parametrize("name", ["upsample_nearest", "_upsample_nearest_exact"])
@pytest.mark.parametrize("size", [[7], [7, 3], [4, 10, 5]])
def test_nearest(name, size):
    op, back = (getattr(aten, f"{name}{len(size)}d{suffix}").default for suffix in ("", "_backward"))
    shape = [1, 2, *[5] * len(size)]
    check(op, torch.randn(shape), size)
    check(back, torch.randn(1, 2, *size), size, shape)


def test_scale_factors():
    x = torch.randn(1, 2, 3, 4)
    check(aten.upsample_nearest2d.vec, x, None, [2.0, 1.5])
    check(aten.upsample_bilinear2d.vec, x, None, True, [2.0, 1.5])
