"""Automatic mixed precision for the device: torch.amp with "tpu" filled in, and bfloat16 as the lower precision."""

from __future__ import annotations

import functools
from typing import Any

import torch

__all__ = ["GradScaler", "autocast", "custom_bwd", "custom_fwd"]


class autocast(torch.amp.autocast):
    """``torch.autocast("tpu")``; bfloat16 unless told otherwise."""

    def __init__(self, enabled: bool = True, dtype: torch.dtype = torch.bfloat16, cache_enabled: bool | None = None):
        super().__init__("tpu", dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler("tpu")``. Only float16 needs it; bfloat16 has float32's range."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__("tpu", *args, **kwargs)


custom_fwd = functools.partial(torch.amp.custom_fwd, device_type="tpu")
custom_bwd = functools.partial(torch.amp.custom_bwd, device_type="tpu")
