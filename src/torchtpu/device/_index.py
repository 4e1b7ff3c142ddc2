"""Reading a device argument, for all of torch.tpu."""

from __future__ import annotations

from typing import Any

import torch


def device_index(device: Any, *, allow_none: bool = True) -> int:
    """The index that `device` names: an int, a string, a torch.device, or None for the current device.

    Raises:
        ValueError: if it is not a tpu device.
    """
    from torchtpu import _C

    if device is None:
        if not allow_none:
            raise ValueError("expected a tpu device, got None")
        return _C.current_device()
    if isinstance(device, int):
        return device
    device = torch.device(device)
    if device.type != "tpu":
        raise ValueError(f"Expected a tpu device, but got: {device}")
    return _C.current_device() if device.index is None else device.index
