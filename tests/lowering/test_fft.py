"""Fourier transforms against PyTorch CPU."""

from __future__ import annotations

import pytest
import torch
from checker import check
from own import failures

aten = torch.ops.aten
ENTRIES = ["fft", "ifft", "rfft", "irfft", "hfft", "ihfft", "fftn", "ifftn", "rfftn", "irfftn", "hfft2", "ihfft2"]


@pytest.mark.parametrize("entry", ENTRIES)
def test_op_db(entry):
    assert not failures(f"fft.{entry}", {"fft"}, (torch.float32, torch.complex64), limit=3)


@pytest.mark.parametrize("normalization", [0, 1, 2])
@pytest.mark.parametrize("dim", [[0], [3], [1, 3], [0, 1, 2, 3]])
def test_normalization_and_dims(normalization, dim):
    x = torch.randn(2, 3, 4, 5, dtype=torch.complex128)
    check(aten._fft_c2c.default, x, dim, normalization, True)
    check(aten._fft_c2c.default, x, dim, normalization, False)
    check(aten._fft_r2c.default, x.real.clone(), dim, normalization, True)
    check(aten._fft_r2c.default, x.real.clone(), dim, normalization, False)
    last = 2 * (x.shape[dim[-1]] - 1) or 1
    check(aten._fft_c2r.default, x, dim, normalization, last)
