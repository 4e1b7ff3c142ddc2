"""Matrix products against PyTorch CPU."""

from __future__ import annotations

import pytest
import torch
from checker import check, run_lowering
from own import failures

aten = torch.ops.aten
nan = float("nan")


def ints(dtype, *shape):
    return torch.randint(-9 if dtype.is_signed else 0, 9, shape, dtype=dtype)


def against_float32(op, *args, **kwargs):
    """bfloat16 arguments: the float32 result, rounded once. PyTorch CPU itself rounds more than once in places."""
    wide = [a.float() if isinstance(a, torch.Tensor) and a.dtype is torch.bfloat16 else a for a in args]
    torch.testing.assert_close(run_lowering(op, *args, **kwargs), op(*wide, **kwargs).bfloat16())


@pytest.mark.parametrize(
    "entry", ["mm", "bmm", "addmm", "baddbmm", "addmv", "addr", "mv", "dot", "vdot", "matmul", "nn.functional.bilinear"]
)
def test_op_db(entry):
    # In double precision: sums of float32 products differ in their order.
    assert not failures(entry, {"matmul"}, (torch.float64, torch.int64, torch.complex128), limit=2)


@pytest.mark.parametrize(
    "name, shapes",
    [
        ("mm", [(3, 4), (4, 5)]),
        ("bmm", [(2, 3, 4), (2, 4, 5)]),
        ("addmm", [(5,), (3, 4), (4, 5)]),
        ("baddbmm", [(3, 5), (2, 3, 4), (2, 4, 5)]),
        ("addbmm", [(3, 5), (2, 3, 4), (2, 4, 5)]),
        ("linear", [(2, 3, 4), (5, 4), (5,)]),
        ("dot", [(7,), (7,)]),
    ],
)
def test_bfloat16_rounds_once(name, shapes):
    against_float32(getattr(aten, name).default, *(torch.randn(s).bfloat16() for s in shapes))


@pytest.mark.parametrize("shapes", [[(0, 3), (3, 2)], [(2, 0), (0, 3)], [(2, 3), (3, 0)]])
def test_empty(shapes):
    check(aten.mm.default, *map(torch.randn, shapes))


@pytest.mark.parametrize("beta", [0, 0.0, 0.5])
def test_beta_zero_does_not_read_self(beta):
    self = torch.full((3,), nan) if not beta else torch.randn(3)
    check(aten.addmm.default, self, torch.randn(2, 4), torch.randn(4, 3), beta=beta, alpha=2)


def test_integers():
    check(aten.mm.default, ints(torch.uint8, 3, 4), ints(torch.uint8, 4, 2))
    check(aten.addmm.default, ints(torch.int64, 3), ints(torch.int64, 2, 4), ints(torch.int64, 4, 3), beta=2, alpha=3)
    check(aten._int_mm.default, ints(torch.int8, 32, 16), ints(torch.int8, 16, 8))
    check(aten.outer.default, torch.randn(3), ints(torch.int64, 4))
    check(aten.addr.default, torch.ones(2, 3) > 0, torch.ones(2) > 0, torch.zeros(3) > 0)


@pytest.mark.parametrize("gelu", [False, True])
def test_activation(gelu):
    check(aten._addmm_activation.default, torch.randn(3), torch.randn(2, 4), torch.randn(4, 3), use_gelu=gelu)


def test_linear_of_a_vector_and_its_gradient():
    check(aten.linear.default, torch.randn(4), torch.randn(3, 4), torch.randn(3))
    x, w, b, g = torch.randn(2, 5, 4), torch.randn(3, 4), torch.randn(3), torch.randn(2, 5, 3)
    leaves = [t.requires_grad_() for t in (x, w, b)]
    expected = torch.autograd.grad(torch.nn.functional.linear(*leaves), leaves, g)
    actual = run_lowering(aten.linear_backward.default, x, g, w, [True, True, True])
    torch.testing.assert_close(list(actual), list(expected))


@pytest.mark.parametrize("rowwise", [False, True])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
def test_scaled_mm(rowwise, out_dtype):
    x, y = (torch.randn(16, 32).to(torch.float8_e4m3fn) for _ in range(2))
    scales = (torch.rand(16, 1), torch.rand(1, 16)) if rowwise else (torch.tensor(0.5), torch.tensor(2.0))
    actual = run_lowering(aten._scaled_mm.default, x, y.t(), *scales, out_dtype=out_dtype)
    torch.testing.assert_close(actual, ((x.float() * scales[0]) @ (y.float().t() * scales[1])).to(out_dtype))


def test_scaled_mm_blocks():
    x, y = torch.randn(4, 256).to(torch.float8_e4m3fn), torch.randn(256, 128).to(torch.float8_e4m3fn)
    scale_x, scale_y = torch.rand(4, 2), torch.rand(2, 1)
    actual = run_lowering(aten._scaled_mm.default, x, y, scale_x, scale_y, out_dtype=torch.float32)
    wide = (x.float() * scale_x.repeat_interleave(128, 1)) @ (y.float() * scale_y.repeat_interleave(128, 0))
    torch.testing.assert_close(actual, wide, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    "a, b, result",
    [((48, 32), (3, 32, 16), "rows"), ((3, 16, 32), (32, 48), "columns"), ((16, 48), (48, 32), "contracted")],
)
def test_grouped_mm(a, b, result):
    a, b = torch.randn(a).bfloat16(), torch.randn(b).bfloat16()
    ends = [16, 16, 48]
    spans = [slice(0, 16), slice(16, 16), slice(16, 48)]
    x, y = a.float(), b.float()
    expected = {
        "rows": lambda: torch.cat([x[s] @ y[i] for i, s in enumerate(spans)]),
        "columns": lambda: torch.cat([x[i] @ y[:, s] for i, s in enumerate(spans)], 1),
        "contracted": lambda: torch.stack([x[:, s] @ y[s] for s in spans]),
    }[result]()
    actual = run_lowering(aten._grouped_mm.default, a, b, torch.tensor(ends, dtype=torch.int32))
    torch.testing.assert_close(actual, expected.bfloat16())


def test_precision_follows_the_user():
    from torchtpu.lowering.precision import matmul_precision

    old = torch.get_float32_matmul_precision()
    try:
        names = []
        for value in ("highest", "high", "medium"):
            torch.set_float32_matmul_precision(value)
            names.append(matmul_precision().name)
    finally:
        torch.set_float32_matmul_precision(old)
    assert names == ["HIGHEST", "HIGH", "DEFAULT"]
