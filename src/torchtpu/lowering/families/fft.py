"""Discrete Fourier transforms: complex, real to half-complex and back."""

from __future__ import annotations

import math

import jax.numpy as jnp

from torchtpu.lowering.registry import lowering

_NONE, _BY_ROOT_N, _BY_N = range(3)


def _normalize(x, n: int, normalization: int):
    if normalization == _NONE:
        return x
    factor = 1 / math.sqrt(n) if normalization == _BY_ROOT_N else 1 / n
    return x * jnp.asarray(factor, x.real.dtype)


def _transform(x, dim, forward: bool):
    """Unnormalised complex transform over any number of dimensions; XLA takes at most three at once."""
    dim = [d % x.ndim for d in dim]
    for i in range(0, len(dim), 3):
        axes = dim[i : i + 3]
        x = jnp.fft.fftn(x, axes=axes) if forward else jnp.fft.ifftn(x, axes=axes, norm="forward")
    return x


@lowering("_fft_c2c")
def fft_c2c(self, dim, normalization, forward):
    n = math.prod(self.shape[d] for d in dim)
    return _normalize(_transform(self, dim, forward), n, normalization) if self.size else self


@lowering("_fft_r2c")
def fft_r2c(self, dim, normalization, onesided):
    n = math.prod(self.shape[d] for d in dim)
    if onesided:
        *others, last = dim
        y = _transform(jnp.fft.rfft(self, axis=last), others, True)
    else:
        y = _transform(self.astype(jnp.result_type(self.dtype, jnp.complex64)), dim, True)
    return _normalize(y, n, normalization)


@lowering("_fft_c2r")
def fft_c2r(self, dim, normalization, last_dim_size):
    *others, last = dim
    n = math.prod(self.shape[d] for d in others) * last_dim_size
    y = jnp.fft.irfft(_transform(self, others, False), n=last_dim_size, axis=last, norm="forward")
    return _normalize(y, n, normalization)
