"""Host memory for results, used again once nothing refers to it: fresh memory costs more than the copy into it."""

from __future__ import annotations

import sys
import threading

import numpy as np
import torch

__all__ = ["empty"]

_SMALLEST = 1 << 18
_ALIGNED = 64
"""What JAX asks of memory that it takes over without a copy."""
_LIMIT = 1 << 28
"""Bytes that are kept while nobody uses them."""

_lock = threading.Lock()
_kept: list[np.ndarray] = []


def empty(nbytes: int) -> torch.Tensor:
    """Uninitialised bytes that belong to the caller, and to whatever takes over their memory."""
    if nbytes < _SMALLEST:
        return torch.empty(nbytes, dtype=torch.uint8)
    with _lock:
        found = None
        unused = 0
        for i in range(len(_kept) - 1, -1, -1):
            if sys.getrefcount(_kept[i]) > 2:  # the list's and the argument's; others are of tensors and arrays
                continue
            if found is None and nbytes <= _kept[i].nbytes - _ALIGNED <= 2 * nbytes:
                found = _kept[i]
                continue
            unused += _kept[i].nbytes
            if unused > _LIMIT:
                del _kept[i]
        if found is None:
            found = np.empty(nbytes + _ALIGNED, np.uint8)
            _kept.append(found)
        start = -found.ctypes.data % _ALIGNED
        return torch.from_numpy(found[start : start + nbytes])
