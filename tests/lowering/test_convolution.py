"""Convolutions and their gradients against PyTorch CPU."""

from __future__ import annotations

import pytest
import torch
from checker import check, run_lowering
from own import failures

aten = torch.ops.aten


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("kind", ["conv", "conv_transpose"])
def test_op_db(kind, rank):
    # float64: a weight gradient sums thousands of products, and float32 sums differ in their order.
    assert not failures(f"nn.functional.{kind}{rank}d", {"convolution"}, (torch.float64, torch.int64), limit=4)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
def test_float32_and_bfloat16(transposed, groups):
    x = torch.randn(2, 4, 7, 6)
    w = torch.randn(4, 6 // groups, 3, 2) if transposed else torch.randn(6, 4 // groups, 3, 2)
    rest = [[2, 1], [1, 0], [1, 2], transposed, [1, 0] if transposed else [0, 0], groups]
    bias = torch.randn(6)
    check(aten.convolution.default, x, w, bias, *rest)
    x, w, bias = x.bfloat16(), w.bfloat16(), bias.bfloat16()
    expected = aten.convolution(x.float(), w.float(), bias.float(), *rest).bfloat16()
    torch.testing.assert_close(run_lowering(aten.convolution.default, x, w, bias, *rest), expected)
    grad = torch.randn(expected.shape).bfloat16()
    wide = aten.convolution_backward(grad.float(), x.float(), w.float(), [6], *rest, [True] * 3)
    actual = run_lowering(aten.convolution_backward.default, grad, x, w, [6], *rest, [True] * 3)
    torch.testing.assert_close(list(actual), [t.bfloat16() for t in wide])


@pytest.mark.parametrize("mask", [(True, False, False), (False, True, False), (False, False, True)])
def test_output_mask(mask):
    rest = [[2, 2], [1, 1], [1, 1], False, [0, 0], 2]
    args = (torch.randn(2, 6, 4, 4), torch.randn(2, 4, 8, 8), torch.randn(6, 2, 3, 3))
    expected = aten.convolution_backward(*args, [6], *rest, list(mask))
    for name, sizes in (("convolution_backward", ([6],)), ("convolution_backward_overrideable", ())):
        actual = run_lowering(getattr(aten, name).default, *args, *sizes, *rest, list(mask))
        assert [t is not None for t in actual] == list(mask)
        index = mask.index(True)
        torch.testing.assert_close(actual[index], expected[index])


def test_overrideable_is_the_same_convolution():
    args = (torch.randn(1, 2, 5), torch.randn(3, 2, 3), torch.randn(3), [1], [1], [1], False, [0], 1)
    torch.testing.assert_close(run_lowering(aten.convolution_overrideable.default, *args), aten.convolution(*args))


def test_empty_batch_unbatched_and_same_padding():
    weight, bias = torch.randn(4, 3, 3, 2), torch.randn(4)
    check(aten.convolution.default, torch.randn(0, 3, 8, 8), weight, bias, [2, 2], [1, 1], [1, 1], False, [0, 0], 1)
    check(aten.conv2d.default, torch.randn(3, 8, 8), weight, bias, [1, 1], [1, 1])
    check(aten.conv2d.padding, torch.randn(3, 8, 8), torch.randn(4, 3, 4, 3), bias, [1, 1], "same", [1, 2])
    check(aten.conv_transpose2d.input, torch.randn(3, 5, 5), torch.randn(3, 2, 3, 3), None, [2, 2], [1, 1], [1, 1])
    check(aten.conv_tbc.default, torch.randn(5, 2, 3), torch.randn(3, 3, 4), bias, 1)
