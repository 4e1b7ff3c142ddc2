"""Hugging Face Accelerate (and so Transformers' Trainer): its default device is the tpu where PyTorch's is.

Accelerate keeps a closed list of accelerators and answers "cpu" for the rest, while Transformers itself knows the
device. It has no
registration point except ``ACCELERATE_TORCH_DEVICE``, which would also win over a user's ``use_cpu=True``. So its
answer is amended when
the module is imported: only where it is "cpu" by default and ``torch.accelerator`` says tpu.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

__all__ = ["install"]

_MODULE = "accelerate.state"


def install() -> None:
    """Amend ``accelerate.state`` when it is imported, or now if it has been."""
    if _MODULE in sys.modules:
        _amend(sys.modules[_MODULE])
    else:
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module, through the other finders, and amends it once it has run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                _amend(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


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
