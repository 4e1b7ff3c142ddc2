"""Reductions, scans, norms and distances against PyTorch CPU."""

from __future__ import annotations

import math

import pytest
import torch
from checker import check
from own import failures

aten = torch.ops.aten
FAMILIES = {"reductions", "scans", "distances"}
NAN, INF = math.nan, math.inf

SWEEPS = [
    *("sum", "mean", "prod", "amax", "amin", "aminmax", "max", "min", "argmax", "argmin", "all", "any"),
    *("std", "var", "var_mean", "std_mean", "linalg.vector_norm", "logsumexp", "nansum", "count_nonzero"),
    *("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "dist", "cdist", "trace", "nn.functional.pdist"),
]
AWKWARD = torch.tensor([[3.0, NAN, 1, 2, NAN], [5, -INF, INF, 0, -0.0], [1, 1, 2, 2, 0]])


@pytest.mark.parametrize("entry", SWEEPS)
def test_sweep(entry: str) -> None:
    assert not failures(entry, FAMILIES, (torch.float32, torch.bfloat16), limit=3)


@pytest.mark.parametrize("entry", ["sum", "prod", "var", "linalg.vector_norm", "logsumexp", "logcumsumexp", "cumsum"])
def test_sweep_complex(entry: str) -> None:
    assert not failures(entry, FAMILIES, (torch.complex64,), limit=3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "args"),
    [
        *((n, ()) for n in ("amax", "amin", "nansum")),
        *((n, (1,)) for n in ("argmax", "argmin", "cummax", "cummin", "logcumsumexp", "cumsum")),
        ("argmax", (None, True)),
        ("logsumexp", ([1],)),
    ],
)
def test_nan_and_infinity(name: str, args: tuple, dtype: torch.dtype) -> None:
    check(getattr(aten, name).default, AWKWARD.to(dtype), *args)


@pytest.mark.parametrize("name", ["nansum", "nanmean", "sum", "mean"])
@pytest.mark.parametrize("keepdim", [False, True])
def test_no_dimensions_mean_all(name: str, keepdim: bool) -> None:
    x = AWKWARD[:, :1].clone() if name in ("sum", "mean") else AWKWARD[::2]
    reduce = lambda x: getattr(torch, name)(x, dim=(), keepdim=keepdim)  # noqa: E731
    for found in (reduce(x.to("tpu")), torch.compile(reduce, fullgraph=True)(x.to("tpu"))):
        torch.testing.assert_close(found.cpu(), reduce(x))


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0,), ()])
def test_empty_and_scalar(shape: tuple[int, ...]) -> None:
    x = torch.zeros(shape)
    for name in ("sum", "mean", "prod", "all", "any", "nansum", "count_nonzero"):
        check(getattr(aten, name).default, x)
    check(aten.sum.dim_IntList, x, [-1], True)
    check(aten.logsumexp.default, x, [0])
    check(aten.cumsum.default, x, 0)
    check(aten.cummax.default, x, -1)
    check(aten.linalg_vector_norm.default, x, 0.5)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32])
def test_integers_widen_and_uint8_stays_a_truth_value(dtype: torch.dtype) -> None:
    x = torch.tensor([[0, 1, 1], [1, 0, 1]]).to(dtype)
    for name in ("sum", "prod", "all", "any", "count_nonzero"):
        check(getattr(aten, name).default, x)
    for name in ("cumsum", "cumprod", "cummax"):
        check(getattr(aten, name).default, x, 1)
    check(aten.all.dims, x, [])
    check(aten.any.dims, x, None, True)
    check(aten.any.dims, x, [0, -1])


def test_dtype_argument() -> None:
    x = torch.rand(3, 4)
    check(aten.sum.dim_IntList, x, [-1], True, dtype=torch.bfloat16)
    check(aten.mean.dim, torch.arange(12).reshape(3, 4), [0], dtype=torch.float32)
    check(aten.cumsum.default, x.half(), 0, dtype=torch.float64)
    check(aten.prod.dim_int, x.bfloat16(), 0, dtype=torch.float32)


@pytest.mark.parametrize("name", ["var", "std", "var_mean", "std_mean"])
def test_moments(name: str) -> None:
    op = getattr(aten, name)
    # The digits of a small variance around a large mean survive.
    large = torch.randn(1000) + 1e4
    check(op.correction, large)
    check(op.default, large, False)
    check(op.dim, torch.rand(3, 4), [0], False, True)
    check(op.correction, torch.rand(3, 4), [1], correction=1.5, keepdim=True)
    check(op.correction, torch.rand(3), correction=5)
    check(op.correction, torch.rand(1))


@pytest.mark.parametrize("p", [0, 1, 2, 3, 0.5, -1, INF, -INF])
def test_norms(p: float) -> None:
    for x in (torch.randn(3, 4), torch.randn(3, 4, dtype=torch.complex64), torch.randn(3, 4).bfloat16()):
        check(aten.linalg_vector_norm.default, x, p, [1], True)
        check(aten.norm.ScalarOpt_dim, x, p, [0])
        check(aten.norm.Scalar, x, p)


def test_norm_defaults_and_dtype() -> None:
    check(aten.norm.ScalarOpt_dtype, torch.rand(3, 4), None, dtype=torch.float64)
    check(aten.norm.ScalarOpt_dim_dtype, torch.rand(3, 4).bfloat16(), 2, [0], True, dtype=torch.float32)


def test_selection_gradient() -> None:
    op = aten.value_selecting_reduction_backward.default
    check(op, torch.rand(3), 1, torch.tensor([0, 3, 1]), [3, 4], False)
    check(op, torch.rand(3, 1), -1, torch.tensor([[0], [3], [1]]), [3, 4], True)
    check(op, torch.tensor(1.0), 0, torch.tensor(0), [], False)


@pytest.mark.parametrize("p", [0.0, 0.5, 1.0, 2.0, 3.0, INF])
def test_distances_of_equal_points(p: float) -> None:
    x, y = torch.randn(2, 4, 3), torch.randn(2, 5, 3)
    x[0, 0] = y[0, 0]
    distances = aten._cdist_forward.default(x, y, p, None)
    check(aten._cdist_forward.default, x, y, p, None)
    check(aten._cdist_backward.default, torch.rand_like(distances), x, y, p, distances)
    points = torch.randn(5, 3)
    points[1] = points[2]
    distances = aten._pdist_forward.default(points, p)
    check(aten._pdist_forward.default, points, p)
    check(aten._pdist_backward.default, torch.rand_like(distances), points, p, distances)


def test_euclidean_distance_by_matrix_product() -> None:
    check(aten._cdist_forward.default, torch.randn(40, 8), torch.randn(30, 8), 2.0, 1)
    check(aten._euclidean_dist.default, torch.randn(4, 8), torch.randn(3, 8))
