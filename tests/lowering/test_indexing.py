"""Reading by index or mask, and embeddings, against PyTorch CPU."""

from __future__ import annotations

import checker
import jax
import pytest
import torch
from checker import check, run_lowering, sweep

from torchtpu.lowering.apply import apply

aten = torch.ops.aten
torch.manual_seed(0)
x = torch.randn(4, 5, 6)
mask = x[..., 0] > 0
i1, i2, i3 = torch.tensor([0, -1, 3]), torch.tensor([[1], [-4]]), torch.tensor(2)

INTEGER_INDICES = [
    [i1],
    [i1.int(), None, i1],
    [None, i1],
    [i1, None, i1],
    [i1, i2],
    [None, i1, i2],
    [i2, None, i1],
    [i3],
    [i3, None, i3],
    [i1, i3, None],
    [None, None, i2],
    [i1, i2, i1],
    [torch.tensor([], dtype=torch.long)],
]
MASK_INDICES = [
    [torch.tensor([True, False, True, True])],
    [None, torch.tensor([True, False, False, True, True])],
    [mask],
    [x > 0],
    [torch.tensor([True, False, True, True]), None, torch.tensor([1, 2, 3])],
    [torch.zeros(4, dtype=torch.bool)],
]


def concrete(op, *args, **kwargs):
    """Run a lowering as the engine does when shapes depend on data: on arrays, outside a trace."""
    with jax.enable_x64(True):
        arrays = torch.utils._pytree.tree_map_only(torch.Tensor, checker.to_array, (args, kwargs))
        return checker.to_tensor(apply(op, *arrays))


@pytest.mark.parametrize(
    "entry",
    [
        "gather",
        "index_select",
        "masked_fill",
        "masked_scatter",
        "masked_select",
        "nn.functional.embedding",
        "nonzero",
        "nonzero_static",
        "take",
    ],
)
def test_op_db(entry):
    mode = sweep(entry, (torch.float32, torch.int64), limit=2)
    assert mode.seen and not mode.failures


@pytest.mark.parametrize("indices", INTEGER_INDICES)
def test_index(indices):
    check(aten.index.Tensor, x, indices)
    check(aten._unsafe_index.Tensor, x, indices)


@pytest.mark.parametrize("indices", MASK_INDICES)
def test_index_by_mask(indices):
    checker.compare(aten.index.Tensor, concrete(aten.index.Tensor, x, indices), aten.index(x, indices))


def test_mask_of_the_wrong_shape():
    with pytest.raises(IndexError, match="shape of the mask"):
        concrete(aten.index.Tensor, x, [torch.ones(3, dtype=torch.bool)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64, torch.bool, torch.int32])
def test_dtypes(dtype):
    y = x.to(dtype)
    check(aten.index.Tensor, y, [i1, None, i1])
    check(aten.gather.default, y, -1, torch.randint(0, 6, (4, 5, 9)))
    check(aten.index_select.default, y, 1, torch.tensor([0, 4, 4]))
    check(aten.masked_select.default, y, mask[..., None])
    check(aten.nonzero.default, y)


def test_zero_dimensional():
    zero, at = torch.tensor(3.0), torch.tensor(0)
    check(aten.index_select.default, zero, 0, at)
    check(aten.index_select.default, x, 0, torch.tensor(1))
    check(aten.gather.default, zero, -1, at)
    check(aten.gather.default, zero, 0, at.reshape(1))
    check(aten.gather.default, torch.tensor([1.0, 2.0]), 0, at)
    check(aten.take.default, x, torch.tensor(-3))
    check(aten.masked_select.default, zero, torch.tensor(True))
    check(aten.nonzero.default, zero)
    check(aten.nonzero.default, torch.tensor(0))
    check(aten.nonzero_static.default, zero, size=3)
    check(aten.embedding.default, torch.randn(5, 3), at)
    check(aten.masked_fill.Tensor, zero, mask, torch.tensor(5))


def test_empty():
    none = torch.tensor([], dtype=torch.long)
    check(aten.index_select.default, x, 0, none.int())
    check(aten.index_select.default, torch.zeros(3, 0), 0, torch.tensor([1]))
    check(aten.gather.default, x, 0, torch.zeros(0, 5, 6, dtype=torch.long))
    check(aten.embedding.default, torch.randn(5, 3), none)
    check(aten.embedding_dense_backward.default, torch.zeros(0, 3), none, 5, -1, False)
    check(aten.nonzero.default, torch.zeros(0, 3))
    check(aten.masked_scatter.default, x, torch.zeros(6, dtype=torch.bool), torch.zeros(0))


def test_nonzero_static():
    check(aten.nonzero_static.default, mask, size=3)
    check(aten.nonzero_static.default, mask, size=30, fill_value=7)
    check(aten.nonzero_static.default, torch.tensor([1.0, float("nan"), 0.0]), size=3)


def test_masks():
    check(aten.masked_fill.Scalar, x, mask[..., None], float("-inf"))
    check(aten.masked_fill.Scalar, x.long(), x > 0, 2)
    check(aten.masked_fill.Scalar, x.bfloat16(), x > 0, 0.1)
    check(aten.masked_scatter.default, x, mask[..., None], torch.randn(200))
    check(aten.masked_scatter_backward.default, x, x > 0, [130])


@pytest.mark.parametrize("padding", [-1, 2])
@pytest.mark.parametrize("by_frequency", [False, True])
def test_embedding_backward(padding, by_frequency):
    indices = torch.tensor([[1, 2, 2, 1], [0, 4, 4, 4]])
    check(aten.embedding_dense_backward.default, torch.randn(2, 4, 3), indices, 5, padding, by_frequency)


def test_embedding_backward_of_16_bit_floats_rounds_once():
    grad, indices = torch.randn(300, 3).bfloat16(), torch.randint(0, 2, (300,))
    result = run_lowering(aten.embedding_dense_backward.default, grad, indices, 2, -1, False)
    expected = aten.embedding_dense_backward(grad.float(), indices, 2, -1, False).bfloat16()
    torch.testing.assert_close(result, expected)


def test_embedding_renorm():
    table, rows = torch.randn(6, 3) * 2, torch.tensor([[0, 2], [2, 5]])
    for norm_type in (1.0, 2.0, float("inf")):
        check(aten.embedding_renorm.default, table, rows, 1.5, norm_type)


@pytest.mark.parametrize(("mode", "weighted"), [(0, False), (0, True), (1, False), (2, False)])
@pytest.mark.parametrize(("include_last", "padding"), [(False, -1), (True, 2)])
def test_embedding_bag(mode, weighted, include_last, padding):
    indices = torch.tensor([0, 2, 2, 5, 1, 3, 3])
    offsets = torch.tensor([0, 2, 2, 5] + [7] * include_last)
    weight = torch.randn(6, 3, requires_grad=True)
    samples = torch.rand(7, requires_grad=True) if weighted else None
    arguments = (indices, offsets, False, mode, False, samples, include_last, padding)
    expected = aten._embedding_bag(weight, *arguments)
    out, bag, sizes, winners = run_lowering(aten._embedding_bag.default, weight, *arguments)
    torch.testing.assert_close(out, expected[0].detach())
    assert bag.tolist() == [0, 0, 2, 2, 2, 3, 3] and sizes.shape == offsets.shape
    grad = torch.randn(4, 3)
    inputs = [weight] + [samples] * weighted
    grads = torch.autograd.grad(expected[0], inputs, grad)
    saved = (grad, indices, offsets, bag, sizes, winners, 6, False, mode, False, samples, padding)
    torch.testing.assert_close(run_lowering(aten._embedding_bag_backward.default, *saved), grads[0])
    if weighted:
        backward = aten._embedding_bag_per_sample_weights_backward.default
        result = run_lowering(backward, grad, weight, indices, offsets, bag, mode, padding)
        torch.testing.assert_close(result, grads[1])


def test_embedding_bag_refuses_sparse_gradients():
    one = torch.zeros(1, dtype=torch.long)
    saved = (torch.ones(1, 3), one, one, one, one, one, 6, False, 0, True, None)
    with pytest.raises(NotImplementedError, match="sparse=False"):
        run_lowering(aten._embedding_bag_backward.default, *saved)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ((aten.embedding.default, torch.randn(5, 3), torch.tensor([5])), "index out of range in self"),
        ((aten.embedding.default, torch.randn(5, 3), torch.tensor([-1])), "index out of range in self"),
        ((aten.index_select.default, x, 0, torch.tensor([-1])), "index out of range in self"),
        ((aten.index.Tensor, x, [None, torch.tensor([7, 5])]), "index 7 is out of bounds for dimension 1 with size 5"),
        (
            (aten.gather.default, x, 1, torch.full((1, 1, 1), -1)),
            "index -1 is out of bounds for dimension 1 with size 5",
        ),
        ((aten.take.default, x, torch.tensor([120])), "tried to access index 120 on a tensor of 120 elements"),
        (
            (aten.masked_scatter.default, x, x > 0, torch.ones(3)),
            "Number of elements of source < number of ones in mask",
        ),
    ],
)
def test_wrong_indices_raise(call, message):
    with pytest.raises((IndexError, RuntimeError), match=message):
        run_lowering(*call)
