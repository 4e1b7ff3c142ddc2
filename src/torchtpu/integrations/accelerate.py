"""Hugging Face Accelerate (and so Transformers' Trainer): its default device is the tpu where PyTorch's is.

Accelerate keeps a closed list of accelerators and answers "cpu" for the rest, while Transformers itself knows the
device. It has no
registration point except ``ACCELERATE_TORCH_DEVICE``, which would also win over a user's ``use_cpu=True``. So its
answer is amended when
the module is imported: only where it is "cpu" by default and ``torch.accelerator`` says tpu.
"""

from __future__ import annotations

from typing import Any

import torch

from torchtpu.integrations.imports import when_imported

__all__ = ["install"]

_MODULE = "accelerate.state"


def install() -> None:
    """Amend ``accelerate.state`` when it is imported, or now if it has been."""
    when_imported(_MODULE, _amend)


def _amend(module: Any) -> None:
    state: Any = getattr(module, "PartialState", None)
    answer = getattr(state, "default_device", None)
    if not isinstance(answer, property) or answer.fget is None:
        return  # another version, which may know better
    original = answer.fget
    tpu: Any = torch.tpu  # type: ignore[attr-defined]

    def default_device(self: Any) -> torch.device:
        device = original(self)
        if device.type == "cpu" and tpu.is_available():
            return torch.device("tpu", tpu.current_device())
        return device

    default_device.__doc__ = original.__doc__
    state.default_device = property(default_device)
