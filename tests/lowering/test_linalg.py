"""Linear algebra against PyTorch CPU; factors that are unique only up to signs are checked by what they multiply to."""

from __future__ import annotations

import pytest
import torch
from checker import check, run_lowering
from own import failures

aten = torch.ops.aten
UNIQUE = ["cholesky_inverse", "cholesky_solve", "lu_unpack", "triangular_solve"]
UNIQUE += [
    "linalg.cholesky_ex", "linalg.det", "linalg.inv_ex", "linalg.lu",
    "linalg.lu_factor_ex", "linalg.lu_solve", "linalg.slogdet",
    "linalg.solve_ex", "linalg.solve_triangular",
]  # fmt: skip


def batch(*shape, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(*shape, dtype=dtype, generator=generator)


@pytest.mark.parametrize("entry", UNIQUE)
def test_op_db(entry):
    assert not failures(entry, {"linalg"}, (torch.float64, torch.complex64), limit=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex128])
@pytest.mark.parametrize("shape", [(4, 4), (2, 5, 3), (3, 5), (0, 3), (2, 0, 0)])
def test_svd_and_qr(dtype, shape):
    a = batch(*shape, dtype=dtype)
    k = min(shape[-2:])
    for full in (False, True):
        u, s, vh = run_lowering(aten._linalg_svd.default, a, full, True)
        expected = aten._linalg_svd(a, full, True)
        assert [t.shape for t in (u, s, vh)] == [t.shape for t in expected]
        torch.testing.assert_close(s, expected[1])
        torch.testing.assert_close(u[..., :k] * s.unsqueeze(-2) @ vh[..., :k, :], a)
        q, r = run_lowering(aten.linalg_qr.default, a, "complete" if full else "reduced")
        assert [t.shape for t in (q, r)] == [t.shape for t in aten.linalg_qr(a, "complete" if full else "reduced")]
        torch.testing.assert_close(q @ r, a)
    check(aten._linalg_svd.default, a, False, False)
    assert run_lowering(aten.linalg_qr.default, a, "r")[0].shape == (0,)


@pytest.mark.parametrize("uplo", ["L", "U"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_eigh_reads_one_triangle(uplo, dtype):
    a = batch(2, 4, 4, dtype=dtype)
    values, vectors = run_lowering(aten._linalg_eigh.default, a, uplo)
    torch.testing.assert_close(values, aten._linalg_eigh(a, uplo)[0])
    half = a.tril(-1) if uplo == "L" else a.triu(1)
    hermitian = half + half.mH + torch.diag_embed(a.diagonal(dim1=-2, dim2=-1).real).to(dtype)
    torch.testing.assert_close(hermitian @ vectors, vectors * values.unsqueeze(-2).to(dtype))
    check(aten._linalg_eigh.default, a, uplo, False)


def test_eig():
    a = batch(2, 4, 4)
    values, vectors = run_lowering(aten.linalg_eig.default, a)
    assert values.dtype == vectors.dtype == torch.complex128
    torch.testing.assert_close(a.to(values.dtype) @ vectors, vectors * values.unsqueeze(-2))
    torch.testing.assert_close(run_lowering(aten._linalg_eigvals.default, a), values)


def test_cholesky_reports_the_first_bad_minor():
    good = batch(4, 4)
    good = good @ good.mT + torch.eye(4)
    bad = good.clone()
    bad[2, 2] = -1
    stack = torch.stack([good, bad, -good])
    for upper in (False, True):
        factor, info = run_lowering(aten.linalg_cholesky_ex.default, stack, upper=upper)
        assert info.dtype == torch.int32 and info.tolist() == aten.linalg_cholesky_ex(stack, upper=upper)[1].tolist()
        torch.testing.assert_close(factor[0], torch.linalg.cholesky(good, upper=upper))


def test_singular_matrices_report_info():
    a = torch.ones(2, 3, 3, dtype=torch.float64)
    a[1] = torch.eye(3)
    for op in (aten.linalg_lu_factor_ex, aten.linalg_inv_ex):
        torch.testing.assert_close(run_lowering(op.default, a)[-1], op(a)[-1])


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("left", [False, True])
def test_householder(left, transpose):
    a, other = batch(5, 3), batch(5, 5)
    packed, tau = run_lowering(aten.geqrf.default, a)
    torch.testing.assert_close([packed, tau], list(torch.geqrf(a)))
    check(aten.linalg_householder_product.default, packed, tau)
    check(aten.ormqr.default, packed, tau, other, left, transpose)


@pytest.mark.parametrize("driver", ["gels", "gelsd", "gelsy"])
@pytest.mark.parametrize("shape", [(5, 3), (3, 5), (2, 4, 4)])
def test_lstsq(driver, shape):
    check(aten.linalg_lstsq.default, batch(*shape), batch(*shape[:-1], 2), driver=driver)


def test_matrix_exp():
    for a in (batch(3, 3), 20 * batch(2, 4, 4), batch(2, 1, 1), batch(0, 0), batch(3, 3, dtype=torch.complex128)):
        check(aten.linalg_matrix_exp.default, a)


def test_determinant_gradient():
    assert not failures("linalg.slogdet", {"linalg"}, (torch.float64,), limit=4)


def test_empty():
    a = torch.zeros(2, 0, 0)
    for op in (aten._linalg_det, aten._linalg_slogdet, aten.linalg_lu_factor_ex, aten.linalg_inv_ex, aten.linalg_eig):
        check(op.default, a)
    check(aten.linalg_cholesky_ex.default, a)
    check(aten._linalg_solve_ex.default, a, torch.zeros(2, 0, 3))
