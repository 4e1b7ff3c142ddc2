"""Factorisations and what is computed from them: LU, Cholesky, QR, eigenvalues, singular values, determinants."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from torchtpu.lowering.host_call import host_call
from torchtpu.lowering.precision import product
from torchtpu.lowering.registry import lowering

_lapack = jax.lax.linalg


def _adjoint(x):
    return x.conj().swapaxes(-1, -2)


def _real(dtype) -> np.dtype:
    return np.dtype(dtype).type(0).real.dtype


def _info(x, rank: int = 2):
    """The info tensor of a factorisation that cannot fail."""
    return jnp.zeros(x.shape[:-rank], jnp.int32)


def _first_bad_minor(a):
    """For each lower Hermitian matrix: 1 + the row where Cholesky meets a pivot that is not positive, else 0."""
    n = a.shape[-1]
    rows = jnp.arange(n, dtype=jnp.int32)

    def step(j, state):
        a, info = state
        pivot = a[..., j, j].real
        info = jnp.where((info == 0) & ~(pivot > 0), j + 1, info)
        safe = jnp.where(pivot > 0, pivot, 1).astype(a.dtype)
        column = jnp.where(rows > j, a[..., :, j], 0)
        return a - column[..., :, None] * column.conj()[..., None, :] / safe[..., None, None], info

    return jax.lax.fori_loop(0, n, step, (a, _info(a)))[1].astype(jnp.int32)


def _cholesky(a, upper: bool):
    lower = _adjoint(a) if upper else a
    if a.size == 0:
        return a, _info(a)
    factor = _lapack.cholesky(lower, symmetrize_input=False)
    failed = jnp.isnan(jnp.diagonal(factor, axis1=-2, axis2=-1).real).any(-1)
    info = jax.lax.cond(failed.any(), _first_bad_minor, _info, lower)
    factor = jnp.tril(factor)
    return (_adjoint(factor) if upper else factor), jnp.where(failed, info, 0)


@lowering("linalg_cholesky_ex")
def cholesky_ex(self, upper=False, check_errors=False):
    return _cholesky(self, upper)


@lowering("cholesky")
def cholesky(self, upper=False):
    return _cholesky(self, upper)[0]


def _lu(a):
    """(LU, 0-based pivots, permutation) with int32 indices; an empty matrix has no pivots."""
    if a.size == 0:
        batch, n = a.shape[:-2], min(a.shape[-2:])
        rows = jnp.broadcast_to(jnp.arange(a.shape[-2], dtype=jnp.int32), (*batch, a.shape[-2]))
        return a, jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32), (*batch, n)), rows
    return _lapack.lu(a)


def _zero_pivot(lu):
    """1 + the first zero on the diagonal of U, else 0."""
    zero = jnp.diagonal(lu, axis1=-2, axis2=-1) == 0
    if zero.shape[-1] == 0:
        return _info(lu)
    return jnp.where(zero.any(-1), jnp.argmax(zero, -1) + 1, 0).astype(jnp.int32)


def _need_pivots(pivot: bool) -> None:
    if not pivot:
        raise RuntimeError("linalg: LU without pivoting is not implemented; call it with pivot=True")


@lowering("linalg_lu_factor_ex")
def lu_factor_ex(A, pivot=True, check_errors=False):
    _need_pivots(pivot)
    lu, pivots, _ = _lu(A)
    return lu, pivots + 1, _zero_pivot(lu)


def _triangles(lu):
    m, n = lu.shape[-2:]
    k = min(m, n)
    lower = jnp.tril(lu[..., :k], -1) + jnp.eye(m, k, dtype=lu.dtype)
    return lower, jnp.triu(lu[..., :k, :])


def _permutation_matrix(permutation, dtype):
    """P with ``A = P L U``, given the rows of A in pivoted order."""
    m = permutation.shape[-1]
    return (jnp.arange(m, dtype=jnp.int32)[:, None] == permutation[..., None, :]).astype(dtype)


@lowering("linalg_lu")
def linalg_lu(A, pivot=True):
    _need_pivots(pivot)
    lu, _, permutation = _lu(A)
    return _permutation_matrix(permutation, A.dtype), *_triangles(lu)


def _rows_of(pivots, m: int):
    """The row order that 1-based pivots stand for."""
    if pivots.size == 0:
        return jnp.broadcast_to(jnp.arange(m, dtype=jnp.int32), (*pivots.shape[:-1], m))
    return _lapack.lu_pivots_to_permutation(pivots.astype(jnp.int32) - 1, m)


@lowering("lu_unpack")
def lu_unpack(LU_data, LU_pivots, unpack_data=True, unpack_pivots=True):
    empty = jnp.zeros((0,), LU_data.dtype)
    rows = LU_data.shape[-2]
    p = _permutation_matrix(_rows_of(LU_pivots, rows), LU_data.dtype) if unpack_pivots else empty
    return p, *(_triangles(LU_data) if unpack_data else (empty, empty))


def _broadcast(a, b):
    batch = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return jnp.broadcast_to(a, (*batch, *a.shape[-2:])), jnp.broadcast_to(b, (*batch, *b.shape[-2:]))


def _solve_triangular(a, b, *, upper, left=True, adjoint=False, transpose=False, unit=False):
    a, b = _broadcast(a, b)
    if b.size == 0:
        return b
    return _lapack.triangular_solve(
        a, b, left_side=left, lower=not upper, transpose_a=adjoint or transpose, conjugate_a=adjoint, unit_diagonal=unit
    )


def _take_rows(x, rows):
    rows = jnp.broadcast_to(rows, (*x.shape[:-2], rows.shape[-1]))
    return jnp.take_along_axis(x, rows[..., None], axis=-2)


def _lu_solve(lu, rows, b, left=True, adjoint=False):
    """X of ``A X = B``, ``X A = B`` or with the adjoint of A, from the factors and the row order."""
    if not left:
        return _adjoint(_lu_solve(lu, rows, _adjoint(b), True, not adjoint))
    lu, b = _broadcast(lu, b)
    if not adjoint:
        y = _solve_triangular(lu, _take_rows(b, rows), upper=False, unit=True)
        return _solve_triangular(lu, y, upper=True)
    y = _solve_triangular(lu, b, upper=True, adjoint=True)
    y = _solve_triangular(lu, y, upper=False, adjoint=True, unit=True)
    return _take_rows(y, jnp.argsort(rows, axis=-1).astype(jnp.int32))


@lowering("linalg_lu_solve")
def lu_solve(LU, pivots, B, left=True, adjoint=False):
    return _lu_solve(LU, _rows_of(pivots, LU.shape[-1]), B, left, adjoint)


@lowering("_linalg_solve_ex")
def solve_ex(A, B, left=True, check_errors=False):
    vector = B.ndim == 1 or (B.ndim == A.ndim - 1 and B.shape == A.shape[:-1])
    lu, pivots, rows = _lu(A)
    x = _lu_solve(lu, rows, B[..., None] if vector else B, left or vector)
    return (x[..., 0] if vector else x), lu, pivots + 1, _zero_pivot(lu)


@lowering("linalg_inv_ex")
def inv_ex(A, check_errors=False):
    lu, _, rows = _lu(A)
    eye = jnp.broadcast_to(jnp.eye(A.shape[-1], dtype=A.dtype), A.shape)
    return _lu_solve(lu, rows, eye), _zero_pivot(lu)


@lowering("linalg_solve_triangular")
def solve_triangular(self, B, upper, left=True, unitriangular=False):
    return _solve_triangular(self, B, upper=upper, left=left, unit=unitriangular)


@lowering("triangular_solve")
def triangular_solve(self, A, upper=True, transpose=False, unitriangular=False):
    x = _solve_triangular(A, self, upper=upper, transpose=transpose, unit=unitriangular)
    return x, jnp.broadcast_to(A, (*x.shape[:-2], *A.shape[-2:]))


@lowering("cholesky_solve", "_cholesky_solve_helper")
def cholesky_solve(self, input2=None, upper=False, *, A=None):
    factor = input2 if input2 is not None else A
    first = _solve_triangular(factor, self, upper=upper, adjoint=upper)
    return _solve_triangular(factor, first, upper=upper, adjoint=not upper)


@lowering("cholesky_inverse")
def cholesky_inverse(self, upper=False):
    eye = jnp.broadcast_to(jnp.eye(self.shape[-1], dtype=self.dtype), self.shape)
    return cholesky_solve(eye, jnp.triu(self) if upper else jnp.tril(self), upper)


def _parity(pivots):
    """-1 to the number of row exchanges."""
    moved = pivots != jnp.arange(pivots.shape[-1], dtype=jnp.int32)
    return 1 - 2 * (moved.sum(-1, dtype=jnp.int32) % 2)


def _column_major(a):
    """The matrix whose LU PyTorch's det and slogdet save for a row-major ``a``: its transpose, unless it is complex.

    Their backward formulas take the saved factors to be those of the transpose if ``a`` is real and contiguous, and of
    ``a`` itself otherwise. A lowering sees no strides and assumes contiguity; for a real matrix in another layout the
    caller passes its transpose, which has the same determinant.
    """
    return a if jnp.iscomplexobj(a) else a.swapaxes(-1, -2)


@lowering("_linalg_det")
def linalg_det(A):
    lu, pivots, _ = _lu(_column_major(A))
    diagonal = jnp.diagonal(lu, axis1=-2, axis2=-1)
    return diagonal.prod(-1, dtype=A.dtype) * _parity(pivots).astype(A.dtype), lu, pivots + 1


@lowering("_linalg_slogdet")
def linalg_slogdet(A):
    lu, pivots, _ = _lu(_column_major(A))
    diagonal = jnp.diagonal(lu, axis1=-2, axis2=-1)
    size = jnp.abs(diagonal)
    unit = jnp.sign(diagonal)
    sign = unit.prod(-1, dtype=A.dtype) * _parity(pivots).astype(A.dtype)
    return sign, jnp.log(size).sum(-1, dtype=size.dtype), lu, pivots + 1


@lowering("linalg_qr")
def linalg_qr(A, mode="reduced"):
    m, n = A.shape[-2:]
    k = min(m, n)
    if A.size == 0:
        columns = m if mode == "complete" else k
        eye = jnp.broadcast_to(jnp.eye(m, columns, dtype=A.dtype), (*A.shape[:-2], m, columns))
        r = jnp.zeros((*A.shape[:-2], columns, n), A.dtype)
        return (jnp.zeros((0,), A.dtype) if mode == "r" else eye), r
    if mode == "r":
        return jnp.zeros((0,), A.dtype), _lapack.qr(A, full_matrices=False)[1]
    return tuple(_lapack.qr(A, full_matrices=mode == "complete"))


@lowering("geqrf")
def geqrf(self):
    from jax._src.lax.linalg import geqrf as factor

    if self.size == 0:
        return self, jnp.zeros((*self.shape[:-2], min(self.shape[-2:])), self.dtype)
    return tuple(factor(self))


@lowering("linalg_householder_product")
def householder_product(input, tau):
    return _lapack.householder_product(input, tau) if input.size and tau.shape[-1] else _leading_eye(input)


def _leading_eye(x):
    return jnp.broadcast_to(jnp.eye(*x.shape[-2:], dtype=x.dtype), x.shape)


@lowering("ormqr")
def ormqr(self, input2, input3, left=True, transpose=False):
    """Multiply ``input3`` by the Q of reflectors ``self`` with factors ``input2``, or by its adjoint."""
    m = self.shape[-2]
    reflectors = self[..., : input2.shape[-1]]
    pads = [(0, 0)] * (self.ndim - 1) + [(0, m - reflectors.shape[-1])]
    q = householder_product(jnp.pad(reflectors, pads), input2)
    q = _adjoint(q) if transpose else q
    q, other = _broadcast(q, input3)
    return product(q, other) if left else product(other, q)


@lowering("_linalg_eigh")
def linalg_eigh(A, UPLO="L", compute_v=True):
    real = _real(A.dtype)
    if A.size == 0:
        return jnp.zeros(A.shape[:-1], real), A if compute_v else jnp.zeros((0,), A.dtype)
    vectors, values = _lapack.eigh(A, lower=UPLO.upper() == "L", symmetrize_input=False)
    return values.astype(real), vectors if compute_v else jnp.zeros((0,), A.dtype)


def _svd_in_32_bits(a, full_matrices: bool):
    """JAX's form for TPU, traced with 64-bit types off: with them it multiplies by an int64 matrix, which XLA:TPU
    refuses.
    """
    from jax._src.tpu.linalg.svd import svd

    with jax.enable_x64(False):
        form = functools.partial(svd, full_matrices=full_matrices)
        for _ in a.shape[:-2]:
            form = jax.vmap(form)
        return form(a)


def _svd(a, full_matrices: bool):
    """(U, S, Vh)."""

    def usual(a):
        return tuple(_lapack.svd(a, full_matrices=full_matrices))

    if a.dtype != jnp.float32:
        return usual(a)
    return jax.lax.platform_dependent(a, tpu=lambda a: _svd_in_32_bits(a, full_matrices), default=usual)


@lowering("_linalg_svd")
def linalg_svd(A, full_matrices=False, compute_uv=True, driver=None):
    m, n = A.shape[-2:]
    k, batch, real = min(m, n), A.shape[:-2], _real(A.dtype)
    if not compute_uv:
        none = jnp.zeros((0,), A.dtype)
        values = _lapack.svd(A, compute_uv=False) if A.size else jnp.zeros((*batch, k), real)
        return none, values, none
    if A.size == 0:
        rows, columns = (m, n) if full_matrices else (k, k)
        u = jnp.broadcast_to(jnp.eye(m, rows, dtype=A.dtype), (*batch, m, rows))
        v = jnp.broadcast_to(jnp.eye(columns, n, dtype=A.dtype), (*batch, columns, n))
        return u, jnp.zeros((*batch, k), real), v
    return _svd(A, full_matrices)


def _complex(dtype) -> np.dtype:
    return np.result_type(dtype, np.complex64)


def _eig(a):
    """General eigenvalues: LAPACK on the CPU, on the host for other platforms, where XLA has no such algorithm."""
    dtype = _complex(a.dtype)
    shapes = (jax.ShapeDtypeStruct(a.shape[:-1], dtype), jax.ShapeDtypeStruct(a.shape, dtype))

    def on_host(a):
        return tuple(host_call(np.linalg.eig, shapes, a))

    def lapack(a):
        return tuple(_lapack.eig(a, compute_left_eigenvectors=False, compute_right_eigenvectors=True))

    if a.size == 0:
        return tuple(jnp.zeros(s.shape, dtype) for s in shapes)
    return jax.lax.platform_dependent(a, cpu=lapack, default=on_host)


@lowering("linalg_eig")
def linalg_eig(self):
    return _eig(self)


@lowering("_linalg_eigvals", "linalg_eigvals")
def linalg_eigvals(self):
    return _eig(self)[0]


_TAYLOR_DEGREE = 18
_TAYLOR_RADIUS = {4: 3.010066362817634, 8: 1.090863719290036}
"""1-norms up to which that degree is exact to rounding, by bytes of a real number: Bader, Blanes and Casas, "Computing
the matrix exponential with an optimized Taylor polynomial approximation" (2019), table 2."""


def _taylor(a):
    """exp of matrices within the radius: blocks of three terms, by Horner in ``a**3``."""
    powers = [jnp.broadcast_to(jnp.eye(a.shape[-1], dtype=a.dtype), a.shape), a, product(a, a)]
    cube = product(powers[2], a)
    total = None
    for block in range(_TAYLOR_DEGREE // 3, -1, -1):
        terms = [
            p * np.asarray(1 / math.factorial(n), a.dtype)
            for n, p in enumerate(powers, 3 * block)
            if n <= _TAYLOR_DEGREE
        ]
        part = sum(terms[1:], terms[0])
        total = part if total is None else product(total, cube) + part
    return total


@lowering("linalg_matrix_exp")
def matrix_exp(self):
    if self.size == 0:
        return self
    if self.shape[-1] == 1:
        return jnp.exp(self)
    if self.dtype in (jnp.bfloat16, jnp.float16):
        return matrix_exp(self.astype(jnp.float32)).astype(self.dtype)
    # A polynomial, as in PyTorch: the Pade quotient of jax.scipy loses digits in its solve, which gradients show.
    real = _real(self.dtype)
    norm = jnp.max(jnp.sum(jnp.abs(self), axis=-2), axis=-1)
    squarings = jnp.ceil(jnp.log2(norm / np.asarray(_TAYLOR_RADIUS[real.itemsize], real)))
    squarings = jnp.clip(jnp.nan_to_num(squarings), 0, 1000)
    scaled = self * jnp.exp2(-squarings)[..., None, None].astype(self.dtype)

    def square(state):
        done, x = state
        return done + 1, jnp.where((done < squarings)[..., None, None], product(x, x), x)

    return jax.lax.while_loop(lambda s: s[0] < jnp.max(squarings), square, (jnp.zeros((), real), _taylor(scaled)))[1]


@lowering("linalg_lstsq", static=("rcond",))
def lstsq(self, b, rcond=None, driver=None):
    """Minimum-norm solution through the singular values; the driver decides only which results are filled in.

    The residuals of a rank-deficient matrix are returned; PyTorch leaves them out, which eager mode does afterwards.
    """
    m, n = self.shape[-2:]
    real, batch = _real(self.dtype), self.shape[:-2]
    driver = driver or "gelsy"
    cutoff = float(np.finfo(real).eps) * max(m, n) if rcond is None else rcond
    vector = b.ndim == self.ndim - 1
    y = b[..., None] if vector else b
    u, s, vh = linalg_svd(self, False, True)
    kept = s > cutoff * s.max(-1, keepdims=True, initial=0)
    inverse = jnp.where(kept, 1 / jnp.where(kept, s, 1), 0).astype(self.dtype)
    a_shape = jnp.broadcast_shapes(batch, y.shape[:-2])
    u, y = (jnp.broadcast_to(x, (*a_shape, *x.shape[-2:])) for x in (u, y))
    x = product(_adjoint(vh), inverse[..., None] * product(_adjoint(u), y))
    residual = y - product(self, x)
    squares = (residual * residual.conj()).real.sum(-2, dtype=real)
    none = jnp.zeros((0,), real)
    rank = kept.sum(-1, dtype=jnp.int64) if driver != "gels" else jnp.zeros((0,), jnp.int64)
    values = s if driver in ("gelsd", "gelss") else none
    return (x[..., 0] if vector else x), squares if m > n and driver != "gelsy" else none, rank, values
