"""The most memory in use at once, as far as programs tell: tensors, and what a running program needs besides."""

from __future__ import annotations

from collections import defaultdict

__all__ = ["note", "peak", "reset"]

_peaks: defaultdict[int, int] = defaultdict(int)


def note(device: int, nbytes: int) -> None:
    """A program starts on a device, and with it ``nbytes`` are in use."""
    if nbytes > _peaks[device]:
        _peaks[device] = nbytes


def peak(device: int) -> int:
    """The most that ``note`` was told of a device since the start or the last ``reset``."""
    return _peaks[device]


def reset(device: int) -> None:
    """Start again."""
    _peaks[device] = 0
