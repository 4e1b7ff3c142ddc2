"""``flex_attention`` accepts tpu tensors: PyTorch keeps a closed list of devices and has no registration point."""

from __future__ import annotations

from typing import Any

from torchtpu.integrations.imports import when_imported

__all__ = ["install"]

_MODULE = "torch.nn.attention.flex_attention"


def install() -> None:
    """Amend PyTorch's module when it is imported, or now if it has been."""
    when_imported(_MODULE, _amend)


def _amend(module: Any) -> None:
    original = getattr(module, "_validate_device", None)
    if original is None:
        return  # another version, which may know better

    def _validate_device(query: Any, key: Any, value: Any) -> None:
        if query.device.type != "tpu":
            original(query, key, value)

    module._validate_device = _validate_device
