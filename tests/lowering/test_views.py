"""Views as functions, and operators that join, repeat, reverse, pad and rearrange, against PyTorch CPU."""

from __future__ import annotations

import pytest
import torch
from checker import check, run_lowering, sweep

aten = torch.ops.aten
x = torch.arange(24.0).reshape(2, 3, 4)

VIEWS = [
    "alias_copy",
    "diagonal",
    "diagonal_copy",
    "diagonal_scatter",
    "expand_copy",
    "narrow",
    "narrow_copy",
    "permute_copy",
    "reshape",
    "select",
    "select_scatter",
    "slice",
    "slice_scatter",
    "split_with_sizes_copy",
    "squeeze_copy",
    "t_copy",
    "transpose_copy",
    "unbind_copy",
    "unfold_copy",
    "unsafe_chunk",
    "unsafe_split",
    "unsqueeze_copy",
    "view_copy",
]
SHAPES = [
    "block_diag",
    "cat",
    "constant_pad_nd",
    "cross",
    "flip",
    "meshgrid",
    "nn.functional.channel_shuffle",
    "nn.functional.pixel_shuffle",
    "nn.functional.pixel_unshuffle",
    "nn.functional.unfold",
    "repeat",
    "repeat_interleave",
    "roll",
    "rot90",
    "stack",
    "tile",
]


@pytest.mark.parametrize("entry", VIEWS + SHAPES)
def test_op_db(entry):
    mode = sweep(entry, (torch.float32, torch.int64), limit=3)
    assert mode.seen and not mode.failures


@pytest.mark.parametrize("entry", ["view_as_complex", "view_as_real", "resolve_conj"])
def test_op_db_complex(entry):
    mode = sweep(entry, (torch.float32, torch.complex64), limit=3)
    assert mode.seen and not mode.failures


@pytest.mark.parametrize("size", [[6, -1], [24], [2, -1, 2, 2]])
def test_view_infers_a_size(size):
    check(aten.view.default, x, size)


def test_view_of_nothing():
    check(aten.view.default, torch.zeros(0, 3), [3, -1])
    check(aten.view.default, torch.zeros(2, 0, 3), [0, 5])
    check(aten.view.default, torch.zeros(()), [1, 1])


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (torch.float32, torch.int32),
        (torch.float32, torch.float64),
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.uint8),
        (torch.float32, torch.complex64),
        (torch.complex64, torch.float32),
        (torch.complex64, torch.int64),
        (torch.bool, torch.uint8),
        (torch.uint8, torch.bool),
    ],
)
def test_view_as_another_dtype(source, target):
    check(aten.view.dtype, (x % 2).to(source), target)


@pytest.mark.parametrize(
    ("start", "end", "step"),
    [(None, None, 1), (-2, None, 1), (1, 2**63 - 1, 2), (3, 1, 1), (-100, 100, 3), (2, 2, 1), (5, 9, 1)],
)
def test_slice_scatter_and_backward(start, end, step):
    part = aten.slice(x, -1, start, end, step)
    check(aten.slice.Tensor, x, -1, start, end, step)
    check(aten.slice_scatter.default, x, torch.full_like(part, -1), -1, start, end, step)
    last = 2**63 - 1 if end is None else end
    check(aten.slice_backward.default, torch.ones_like(part), [2, 3, 4], 2, start or 0, last, step)


def test_select_backward_and_scatter():
    check(aten.select.int, x, -1, -1)
    check(aten.select_backward.default, torch.ones(2, 3), [2, 3, 4], -1, -2)
    check(aten.select_scatter.default, x, torch.ones(2, 4), 1, -1)


def test_squeeze():
    y = torch.zeros(1, 2, 1)
    check(aten.squeeze.default, y)
    check(aten.squeeze.dim, y, 1)
    check(aten.squeeze.dims, y, [0, -1])
    check(aten.squeeze.dims, y, [])
    check(aten.squeeze.dim, torch.tensor(1.0), 0)


def test_zero_dimensional():
    zero = torch.tensor(3.0)
    check(aten.unsqueeze.default, zero, -1)
    check(aten.transpose.int, zero, 0, -1)
    check(aten.permute.default, zero, [])
    check(aten.t.default, zero)
    check(aten.unfold.default, zero, 0, 1, 1)
    check(aten.expand.default, zero, [2, 0])
    check(aten.flip.default, zero, [0])
    check(aten.roll.default, zero, [1])
    check(aten.repeat.default, zero, [])
    check(aten.stack.default, [zero, zero], -1)


def test_splits():
    check(aten.split.Tensor, x, 3, 2)
    check(aten.split.Tensor, torch.zeros(0, 3), 0, 0)
    check(aten.split_with_sizes.default, x, [1, 0, 3], 2)
    check(aten.chunk.default, x, 3, 2)
    check(aten.chunk.default, torch.zeros(0), 3)
    check(aten.unbind.int, torch.zeros(0, 3), 0)


@pytest.mark.parametrize(("size", "step", "extent"), [(2, 1, 4), (2, 2, 5), (3, 2, 4), (1, 3, 4), (20, 3, 60)])
def test_unfold(size, step, extent):
    y = torch.randn(3, extent)
    windows = y.unfold(1, size, step)
    check(aten.unfold.default, y, 1, size, step)
    check(aten.unfold_backward.default, torch.randn(windows.shape), [3, extent], 1, size, step)


@pytest.mark.parametrize("offset", [-5, -1, 0, 2, 9])
def test_diagonals(offset):
    check(aten.diagonal.default, x, offset, 0, 2)
    part = torch.randn(x.diagonal(offset, -1, 0).shape)
    check(aten.diagonal_backward.default, part, [2, 3, 4], offset, -1, 0)
    check(aten.diagonal_scatter.default, x, part, offset, -1, 0)


@pytest.mark.parametrize(
    ("size", "stride", "offset"),
    [
        ([4, 3], [1, 4], 0),
        ([4, 2, 3], [1, 12, 4], 0),
        ([2, 1, 3], [3, 100, 1], 1),
        ([3, 4], [4, 1], 12),
        ([2, 2], [2, 7], 3),
        ([], [], 5),
        ([0, 3], [3, 1], 0),
    ],
)
def test_as_strided(size, stride, offset):
    check(aten.as_strided.default, x, size, stride, offset)
    check(aten.as_strided_scatter.default, x, torch.randn(size), size, stride, offset)


def test_as_strided_may_overlap():
    check(aten.as_strided.default, x, [3, 3], [1, 1], 2)
    check(aten.as_strided.default, x, [2, 2], [0, 1], 3)


def test_cat_promotes_and_skips_empty():
    empty = torch.zeros(0)
    check(aten.cat.default, [empty, torch.randn(2, 3), torch.randn(1, 3).double()], 0)
    check(aten.cat.default, [empty, torch.zeros(0, dtype=torch.int64)])
    check(aten.cat.default, [torch.ones(2, dtype=torch.bool), torch.ones(2, dtype=torch.uint8), torch.ones(1).half()])
    check(aten.cat.default, [torch.randn(2, 3), torch.randn(2, 0)], -1)
    check(aten.stack.default, [torch.tensor(1), torch.tensor(2.0)], 0)


def test_constant_pad():
    check(aten.constant_pad_nd.default, x, [1, -1, 0, 2], 3.5)
    check(aten.constant_pad_nd.default, x.long(), [1, 1], 2)
    check(aten.constant_pad_nd.default, x > 2, [1, 1], True)
    check(aten.constant_pad_nd.default, torch.zeros(0, 2), [1, 1, 2, 0], 7)


@pytest.mark.parametrize("mode", ["reflection", "replication"])
@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4, 5), (2, 3, 3, 4, 5)])
@pytest.mark.parametrize("pair", [(1, 2), (2, -1)])
def test_copying_pads(mode, shape, pair):
    spatial = max(len(shape) - 2, 1)
    y, padding = torch.randn(shape), list(pair) * spatial
    forward, backward = (getattr(aten, f"{mode}_pad{spatial}d{suffix}").default for suffix in ("", "_backward"))
    check(forward, y, padding)
    check(backward, torch.randn(forward(y, padding).shape), y, padding)


def test_copying_pads_of_empty_batches():
    check(aten.reflection_pad1d.default, torch.zeros(0, 2, 4), [1, 1])
    check(aten.replication_pad2d.default, torch.zeros(0, 2, 4, 4), [1, 1, 1, 1])


def test_backwards_of_16_bit_floats_round_once():
    grad = torch.randn(2, 8).bfloat16()
    result = run_lowering(aten.replication_pad1d_backward.default, grad, torch.zeros(2, 3).bfloat16(), [3, 2])
    expected = aten.replication_pad1d_backward(grad.float(), torch.zeros(2, 3), [3, 2]).bfloat16()
    torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("shape", [(2, 3, 7, 8), (3, 7, 8)])
def test_columns(shape):
    image = torch.randn(shape)
    how = ([2, 3], [2, 1], [1, 0], [2, 1])
    check(aten.im2col.default, image, *how)
    check(aten.col2im.default, aten.im2col(image, *how), [7, 8], *how)


def test_repeat_interleave_with_known_size():
    check(aten.repeat_interleave.Tensor, torch.tensor([1, 0, 3]))
    check(aten.repeat_interleave.Tensor, torch.tensor([1, 0, 3], dtype=torch.int32), output_size=4)
