"""Sorting, selection, search, histograms and unique against PyTorch CPU."""

from __future__ import annotations

import math

import pytest
import torch
from checker import check, run_lowering
from own import failures

aten = torch.ops.aten
NAN, INF = math.nan, math.inf
SWEEPS = [
    *("sort", "argsort", "topk", "msort", "kthvalue", "median", "nanmedian", "mode"),
    *("searchsorted", "bucketize", "histc", "bincount", "unique", "unique_consecutive"),
]
AWKWARD = torch.tensor([[3.0, NAN, 1, 2, NAN], [5, -INF, INF, 0, -0.0], [1, 1, 2, 2, 0]])


@pytest.mark.parametrize("entry", SWEEPS)
def test_sweep(entry: str) -> None:
    # PyTorch CPU picks an arbitrary one of equal elements, so integers, which repeat, are checked by value below.
    dtypes = (torch.float32, torch.float64) if entry in ("topk", "kthvalue", "sort", "argsort", "msort") else ()
    assert not failures(entry, {"sorting"}, dtypes or (torch.float32, torch.int64, torch.bfloat16))


def check_selection(
    op: torch._ops.OpOverload, x: torch.Tensor, *args: object, dim: int = -1, keepdim: bool = True
) -> None:
    """The values are PyTorch's, and the indices point at them."""
    values, index = run_lowering(op, x, *args)
    expected, _ = op(x, *args)
    torch.testing.assert_close(values, expected, equal_nan=True)
    assert index.dtype == torch.int64
    if not keepdim:
        values, index = values.unsqueeze(dim), index.unsqueeze(dim)
    torch.testing.assert_close(x.gather(dim, index), values, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.int8, torch.float16])
def test_selection_among_equals(dtype: torch.dtype) -> None:
    x = torch.randint(0, 4, (3, 9)).to(dtype)
    for largest in (True, False):
        check_selection(aten.topk.default, x, 5, -1, largest)
    check_selection(aten.kthvalue.default, x, 4, 1, keepdim=False)
    check_selection(aten.median.dim, x, 1, keepdim=False)
    check_selection(aten.sort.default, x, 0, True, dim=0)


@pytest.mark.parametrize("descending", [False, True])
def test_stable_sort(descending: bool) -> None:
    for x in (AWKWARD, torch.randint(0, 3, (4, 9)), torch.rand(4, 9) > 0.5, AWKWARD.bfloat16()):
        check(aten.sort.stable, x, stable=True, dim=-1, descending=descending)
        check(aten.sort.stable, x, stable=True, dim=0, descending=descending)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_topk_orders_nan_first(dtype: torch.dtype) -> None:
    x = torch.tensor([3.0, NAN, -1, 7, INF, -INF, 0.5, -1]).to(dtype)
    x[-1] = -x[1]  # the NaN that 0 / 0 gives on x86 has its sign bit set
    for largest in (True, False):
        values, index = run_lowering(aten.topk.default, x, 6, -1, largest)
        torch.testing.assert_close(values, x.topk(6, largest=largest).values, equal_nan=True)
        torch.testing.assert_close(x[index], values, equal_nan=True)
    check(aten.topk.default, torch.tensor([5, -(2**63), 2**63 - 1, 3]), 3, 0, False)


def test_scalars_and_empties() -> None:
    x = torch.tensor(2.0)
    for op in (aten.sort.default, aten.median.default, aten.mode.default):
        check(op, x)
    check(aten.topk.default, x, 1)
    check(aten.topk.default, torch.rand(3, 4), 0)
    check(aten.kthvalue.default, x, 1)
    for name in ("median", "nanmedian"):
        check(getattr(aten, name).default, torch.zeros(0))
        check(getattr(aten, name).dim, x, 0)
    check(aten.sort.default, torch.zeros(3, 0))


@pytest.mark.parametrize("name", ["median", "nanmedian"])
def test_median_with_nan(name: str) -> None:
    check(getattr(aten, name).default, AWKWARD)
    check(getattr(aten, name).dim, AWKWARD, 1)
    check(getattr(aten, name).dim, AWKWARD, 0, True)


@pytest.mark.parametrize("right", [False, True])
def test_search(right: bool) -> None:
    boundaries = torch.tensor([0.0, 1, 2, 2, 3, NAN])
    values = torch.tensor([[NAN, 2, -1], [5, 2.5, 0]])
    check(aten.searchsorted.Tensor, boundaries, values, right=right)
    check(aten.bucketize.Tensor, values, boundaries, right=right, out_int32=True)
    check(aten.searchsorted.Tensor, torch.rand(3, 7).sort().values, torch.rand(3, 5), right=right)
    check(aten.searchsorted.Scalar, torch.tensor([1, 3, 5]), 3, right=right)
    check(aten.searchsorted.Scalar, torch.tensor([1.0, 3, 5]), 3, right=right)


def test_search_with_sorter_side_and_nothing() -> None:
    x = torch.rand(3, 7)
    check(aten.searchsorted.Tensor, x, torch.rand(3, 5), sorter=x.argsort(-1))
    check(aten.searchsorted.Tensor, torch.arange(4.0), torch.arange(4.0), side="right")
    check(aten.searchsorted.Tensor, torch.zeros(0), torch.rand(3))
    check(aten.bucketize.Scalar, 2.0, torch.arange(4.0))


def test_histograms() -> None:
    check(aten.histc.default, torch.randn(1000), 10)
    check(aten.histc.default, torch.linspace(0, 1, 101), 10, 0, 1)
    check(aten.histc.default, torch.full((5,), 2.0), 4)
    check(aten.histc.default, torch.randn(1000), 50, -1, 2.5)
    check(aten.histc.default, torch.zeros(0), 3)
    check(aten.bincount.default, torch.tensor([1, 1, 3]), torch.tensor([0.5, 1, 2]), 6)
    check(aten.bincount.default, torch.tensor([], dtype=torch.int64))
    with pytest.raises(RuntimeError, match="non-negative"):
        run_lowering(aten.bincount.default, torch.tensor([-1]))


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("counts", [False, True])
def test_unique(inverse: bool, counts: bool) -> None:
    asked = {"return_inverse": inverse, "return_counts": counts}
    rows = torch.randint(0, 2, (6, 3)).float()
    for x in (torch.tensor([NAN, 1, NAN, 1, -0.0, 0.0]), rows.bfloat16(), torch.zeros(0), rows > 0):
        check(aten._unique2.default, x, **asked)
        check(aten.unique_consecutive.default, x, **asked)
    for dim in (0, -1):
        check(aten.unique_dim.default, rows, dim, **asked)
        check(aten.unique_dim_consecutive.default, rows, dim, **asked)
    check(aten.unique_consecutive.default, rows, dim=0, **asked)
