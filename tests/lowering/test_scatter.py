"""Writing by index against PyTorch CPU."""

from __future__ import annotations

import checker
import pytest
import torch
from checker import check, run_lowering, sweep
from test_indexing import INTEGER_INDICES, MASK_INDICES, concrete

aten = torch.ops.aten
torch.manual_seed(0)
x = torch.randn(4, 5, 6) * 3
index = torch.randint(0, 5, (3, 2, 6))
distinct = torch.argsort(torch.randn(3, 5, 6), 1)[:, :2]
DTYPES = [torch.float32, torch.int64, torch.bool, torch.complex64]


@pytest.mark.parametrize("entry", ["index_add", "index_copy", "index_fill", "put", "scatter", "scatter_add"])
def test_op_db(entry):
    mode = sweep(entry, (torch.float32, torch.int64), limit=2)
    ours = [f for f in mode.failures if not f[0].startswith("_unique")]
    assert mode.seen and not ours


@pytest.mark.parametrize("indices", INTEGER_INDICES)
@pytest.mark.parametrize("accumulate", [False, True])
def test_index_put(indices, accumulate):
    shape = aten.index(x, indices).shape
    values = torch.randn(shape) if accumulate else torch.full(shape, 7.0)  # which of several writes wins is undefined
    check(aten.index_put.default, x, indices, values, accumulate)
    check(aten._unsafe_index_put.default, x, indices, values[:1] if shape[0] else values, accumulate)


@pytest.mark.parametrize("indices", [i for i in MASK_INDICES if len([k for k in i if k is not None]) == 1])
@pytest.mark.parametrize("accumulate", [False, True])
def test_index_put_by_mask_is_traceable(indices, accumulate):
    selected = aten.index(x, indices)
    check(aten.index_put.default, x, indices, torch.randn(selected.shape), accumulate)
    check(aten.index_put.default, x, indices, torch.tensor(2.0), accumulate)
    check(aten.index_put.default, x, indices, torch.randn(selected.shape[-1:]), accumulate)


@pytest.mark.parametrize("indices", MASK_INDICES)
def test_index_put_by_mask_on_arrays(indices):
    nine = torch.tensor(9.0)
    checker.compare(
        aten.index_put.default, concrete(aten.index_put.default, x, indices, nine), aten.index_put(x, indices, nine)
    )


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.bfloat16])
def test_index_put_accumulates_in(dtype):
    at = [torch.tensor([1, 1, 2])]
    check(aten.index_put.default, torch.zeros(5).to(dtype), at, torch.tensor([1, 0, 1]).to(dtype), True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_scatters(dtype):
    y, src = x.to(dtype), x.flip(0).to(dtype)
    check(aten.scatter.src, y, 1, distinct, src)
    check(aten.scatter.value, y, 1, index, 2)
    check(aten.scatter_add.default, y, 1, index, src)
    if dtype is not torch.bool:
        check(aten.scatter.reduce, y, 1, index, src, reduce="add")
        check(aten.scatter.value_reduce, y, 1, index, 2, reduce="multiply")


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
@pytest.mark.parametrize("reduce", ["sum", "prod", "mean", "amax", "amin"])
def test_scatter_reduce(dtype, reduce):
    for include_self in (True, False):
        check(aten.scatter_reduce.two, x.to(dtype), 1, index, x.flip(0).to(dtype), reduce, include_self=include_self)


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("reduce", ["prod", "mean", "amax", "amin"])
def test_index_reduce(reduce):
    for include_self in (True, False):
        check(aten.index_reduce.default, x, 0, torch.tensor([1, 1, 3]), x[:3] + 1, reduce, include_self=include_self)


@pytest.mark.parametrize("dtype", DTYPES)
def test_slices_by_index(dtype):
    y, at = x.to(dtype), torch.tensor([3, 1])
    check(aten.index_fill.int_Scalar, y, -1, torch.tensor([0, -1]), 2)
    check(aten.index_fill.int_Tensor, y, -1, torch.tensor(1), torch.tensor(2))
    check(aten.index_copy.default, y, 0, at, y[:2])
    check(aten.index_add.default, y, 1, torch.tensor([3, 1, 3]), y[:, :3])
    if dtype is not torch.bool:
        check(aten.index_add.default, y, 1, torch.tensor([3, 1, 3]), y[:, :3], alpha=2)


def test_16_bit_floats_are_summed_in_float32():
    at, src = torch.zeros(500, dtype=torch.long), torch.rand(500).bfloat16()
    result = run_lowering(aten.index_add.default, torch.zeros(2).bfloat16(), 0, at, src)
    torch.testing.assert_close(result[0], src.float().sum().bfloat16())


def test_nan_wins_a_maximum():
    src, at = torch.tensor([1.0, float("nan"), 3.0]), torch.tensor([0, 0, 1])
    check(aten.scatter_reduce.two, torch.zeros(2), 0, at, src, "amax")
    check(aten.scatter_reduce.two, torch.zeros(2), 0, at, src, "amin", include_self=False)


def test_zero_dimensional_and_empty():
    one, three, at = torch.tensor(1.0), torch.tensor(3.0), torch.tensor(0)
    check(aten.scatter_reduce.two, one, 0, at.reshape(1), three.reshape(1), "sum")
    check(aten.scatter_add.default, torch.ones(2), 0, at, three)
    check(aten.scatter.value, one, 0, at, 3.0)
    check(aten.scatter.src, torch.zeros(3), 0, torch.tensor([], dtype=torch.long), torch.zeros(3))
    check(aten.index_add.default, one, 0, at, three)
    check(aten.index_copy.default, one, 0, at, three)
    check(aten.index_fill.int_Scalar, one, 0, at.reshape(1), 4.0)
    check(aten.scatter.src, torch.zeros(3, 4), 1, torch.full((1, 1), 2), torch.ones(3, 4))


def test_put():
    check(aten.put.default, x, torch.tensor([[0, -1], [5, 7]]), torch.ones(2, 2))
    check(aten.put.default, x, torch.tensor([0, 0]), torch.ones(2), True)


_far = torch.full((1, 1, 1), 9)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ((aten.scatter.value, x, 2, _far, 1.0), "index 9 is out of bounds for dimension 2 with size 6"),
        ((aten.scatter_add.default, x, 2, -_far, x), "index -9 is out of bounds for dimension 2 with size 6"),
        ((aten.scatter_reduce.two, x, 0, _far, x, "sum"), "index 9 is out of bounds for dimension 0 with size 4"),
        (
            (aten.index_add.default, x, 0, torch.tensor([4]), x[:1]),
            "index 4 is out of bounds for dimension 0 with size 4",
        ),
        ((aten.index_copy.default, x, 1, torch.tensor([5]), x[:, :1]), "index_copy_.*index 5 is out of bounds"),
        ((aten.index_fill.int_Scalar, x, 1, torch.tensor([-6]), 1.0), "index -6 is out of bounds for dimension 1"),
        ((aten.put.default, x, torch.tensor([-121]), torch.ones(1)), "tried to access index -121"),
        (
            (aten.index_put.default, x, [torch.tensor([4])], torch.tensor(1.0)),
            "index 4 is out of bounds for dimension 0",
        ),
        ((aten.index_put.default, x, [torch.tensor([True] * 4)], torch.ones(2, 5, 6)), "shape mismatch"),
    ],
)
def test_wrong_indices_raise(call, message):
    with pytest.raises((IndexError, RuntimeError), match=message):
        run_lowering(*call)
