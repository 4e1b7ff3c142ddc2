"""Special functions, orthogonal polynomials and the prims operators against PyTorch CPU."""

from __future__ import annotations

import math

import pytest
import torch
from checker import check, run_lowering, sweep

from torchtpu.lowering.registry import find

aten, prims = torch.ops.aten, torch.ops.prims
FAMILIES = ("special", "special_bessel", "special_polynomials")
NAMES = """
digamma erf erfc erfinv i0 igamma igammac lgamma mvlgamma polygamma special.airy_ai special.bessel_j0
special.bessel_j1 special.bessel_y0 special.bessel_y1 special.entr special.erfcx special.i0e special.i1 special.i1e
special.log_ndtr special.modified_bessel_i0 special.modified_bessel_i1 special.modified_bessel_k0
special.modified_bessel_k1 special.ndtr special.ndtri special.scaled_modified_bessel_k0
special.scaled_modified_bessel_k1 special.spherical_bessel_j0 special.zeta special.chebyshev_polynomial_t
special.chebyshev_polynomial_u special.hermite_polynomial_h special.hermite_polynomial_he
special.laguerre_polynomial_l special.legendre_polynomial_p special.shifted_chebyshev_polynomial_v
"""


@pytest.mark.parametrize("name", NAMES.split())
def test_op_db(name: str) -> None:
    mode = sweep(name, (torch.float32,), limit=2, backward=False)
    assert not [
        f"{op}: {error}"
        for op, error, *_ in mode.failures
        if (entry := find(op)) is not None and entry.function.__module__.rsplit(".", 1)[-1] in FAMILIES
    ]


@pytest.mark.parametrize(
    "name", ["digamma", "erfinv", "special_ndtri", "special_log_ndtr", "special_entr", "special_erfcx"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_poles_and_limits(name: str, dtype: torch.dtype) -> None:
    x = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0, -1.5, 0.3, 4.0, -4.0, 20.0], dtype=dtype)
    check(getattr(aten, name).default, x)


@pytest.mark.parametrize("op", [aten.igamma.default, aten.igammac.default, aten.special_zeta.default], ids=str)
def test_limits_of_two_arguments(op) -> None:
    x = torch.tensor([0.0, 0.5, 1.0, 2.0, 3.5])
    check(op, x[:, None].contiguous(), x)


def test_zeta_between_its_poles() -> None:
    check(aten.special_zeta.default, torch.tensor(3.0), torch.tensor([-8.3, -2.0, -0.5, 0.0, 1.5]))


@pytest.mark.parametrize("n", [0, 1, 2, 3])
def test_polygamma(n: int) -> None:
    check(aten.polygamma.default, n, torch.tensor([0.25, 0.5, 1.0, 3.0, 10.0, math.inf] + [-0.3] * (n < 2)))


def test_polygamma_where_terms_cancel() -> None:
    x = torch.tensor([-8.5, -3.5, -0.5], dtype=torch.bfloat16)
    exact = torch.polygamma(4, x.double())
    actual = run_lowering(aten.polygamma.default, 4, x)
    torch.testing.assert_close(actual.double(), exact, rtol=2**-7, atol=0)


def test_integers_become_floats() -> None:
    for op in (aten.lgamma.default, aten.erf.default, aten.special_i1.default, aten.special_bessel_j0.default):
        check(op, torch.tensor([1, 2, 3]))


def test_bessel_far_and_near() -> None:
    x = torch.tensor([0.0, 1e-6, 0.5, 2.0, 4.9, 5.1, 9.0, 40.0, -3.0], dtype=torch.float64)
    for name in (
        "special_bessel_j0",
        "special_bessel_j1",
        "special_bessel_y0",
        "special_modified_bessel_k1",
        "special_airy_ai",
    ):
        check(getattr(aten, name).default, x)


@pytest.mark.parametrize(
    "name", ["chebyshev_polynomial_t", "chebyshev_polynomial_w", "legendre_polynomial_p", "hermite_polynomial_he"]
)
def test_polynomials_by_degree(name: str) -> None:
    x = torch.tensor([-1.0, -0.5, 0.0, 0.3, 1.0, 1.5])
    check(
        getattr(aten, f"special_{name}").default,
        x[:, None].contiguous(),
        torch.tensor([-1.0, 0.0, 1.0, 2.0, 5.0, 12.0]),
    )
    check(getattr(aten, f"special_{name}").n_scalar, x, 3)


def test_prims_elementwise() -> None:
    x, y = torch.tensor([-7.5, 2.0, 0.5]), torch.tensor([2.0, 4.0, -0.5])
    for name in ("add", "sub", "mul", "div", "fmod", "remainder", "maximum", "lt", "eq", "atan2"):
        check(getattr(prims, name).default, x, y)
    check(prims.div.default, torch.tensor([7, -7]), torch.tensor([2, 2]))
    for name in ("abs", "exp", "bessel_i0", "bessel_j1", "cbrt", "erf_inv", "isfinite", "sign", "tanh"):
        check(getattr(prims, name).default, y)
    check(prims.where.default, x > 0, x, y)


def test_prims_shapes_and_reductions() -> None:
    x = torch.arange(24.0).reshape(2, 3, 4)
    check(prims.broadcast_in_dim.default, x, (2, 5, 3, 4), (0, 2, 3))
    check(prims.transpose.default, x, (2, 0, 1))
    check(prims.reshape.default, x, (4, 6))
    check(prims.split_dim.default, x, 2, 2)
    check(prims.collapse.default, x, 0, 1)
    check(prims.squeeze.default, x[:, :1], (1,))
    check(prims.rev.default, x, (0, 2))
    check(prims.convert_element_type.default, x, torch.int32)
    check(prims.cat.default, [x, x], 1)
    for name in ("sum", "prod", "amax", "amin"):
        check(getattr(prims, name).default, x, (0, 2))
    check(prims.var.default, x, (1,), 1.0)
    check(prims.iota.default, 5, start=3, step=2, dtype=torch.int64, device=torch.device("cpu"), requires_grad=False)
