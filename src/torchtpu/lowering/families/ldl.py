"""Symmetric indefinite factorisation (Bunch-Kaufman), which XLA does not have: LAPACK on the host."""

from __future__ import annotations

import math

import jax
import numpy as np

from torchtpu.lowering.host_call import host_call
from torchtpu.lowering.registry import lowering


def _routine(name: str, dtype: np.dtype, hermitian: bool):
    """LAPACK's ``?sytrf`` or ``?hetrf`` and their like."""
    import scipy.linalg

    kind = "he" if hermitian and dtype.kind == "c" else "sy"
    return scipy.linalg.get_lapack_funcs(kind + name, dtype=dtype)


@lowering("linalg_ldl_factor_ex")
def ldl_factor_ex(self, hermitian=False, check_errors=False):
    batch, n = self.shape[:-2], self.shape[-1]
    shapes = (
        jax.ShapeDtypeStruct(self.shape, self.dtype),
        jax.ShapeDtypeStruct((*batch, n), np.int32),
        jax.ShapeDtypeStruct(batch, np.int32),
    )

    def on_host(a):
        factors, pivots, info = (np.zeros(s.shape, s.dtype) for s in shapes)
        routine = _routine("trf", a.dtype, hermitian)
        for i in np.ndindex(*batch):
            if n:
                factors[i], pivots[i], info[i] = routine(a[i], lower=1)
        # LAPACK reads and writes the lower triangle; what lies above is no part of the result.
        return np.tril(factors), pivots, info

    return tuple(host_call(on_host, shapes, self))


@lowering("linalg_ldl_solve")
def ldl_solve(LD, pivots, B, hermitian=False):
    batch = np.broadcast_shapes(LD.shape[:-2], B.shape[:-2])
    shape = jax.ShapeDtypeStruct((*batch, *B.shape[-2:]), B.dtype)

    def on_host(factors, pivots, b):
        factors = np.broadcast_to(factors, (*batch, *factors.shape[-2:]))
        pivots = np.broadcast_to(pivots, (*batch, pivots.shape[-1]))
        b = np.broadcast_to(b, shape.shape)
        out = np.zeros(shape.shape, shape.dtype)
        routine = _routine("trs", factors.dtype, hermitian)
        if math.prod(shape.shape):
            for i in np.ndindex(*batch):
                out[i], _ = routine(factors[i], pivots[i], b[i], lower=1)
        return (out,)

    return host_call(on_host, [shape], LD, pivots, B)[0]
