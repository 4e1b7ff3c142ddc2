"""Tensors inside whatever a module takes and returns: tuples, mappings, model outputs, caches."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

__all__ = ["convert", "tensors"]

_OPAQUE = (
    str,
    bytes,
    int,
    float,
    complex,
    type,
    type(None),
    torch.nn.Module,
    FunctionType,
    BuiltinFunctionType,
    MethodType,
    ModuleType,
)


def convert(
    value: Any,
    change: Callable[[torch.Tensor], torch.Tensor],
    kinds: Mapping[Any, Any] | None = None,
    seen: dict[int, Any] | None = None,
) -> Any:
    """A copy of a value with every tensor changed; objects that hold no tensors are shared.

    A tensor or an object that occurs twice is changed once.

    Args:
        value: tuples, lists, dictionaries and objects with attributes are copied.
        change: from a tensor to another.
        kinds: which dtypes and devices become which, where they stand by themselves: a cache remembers its device.
    """
    kinds = {} if kinds is None else kinds
    seen = {} if seen is None else seen
    if id(value) in seen:
        return seen[id(value)]
    made: Any
    if isinstance(value, torch.Tensor):
        made = change(value)
    elif isinstance(value, _OPAQUE):
        return value
    elif isinstance(value, (torch.dtype, torch.device)):
        return kinds.get(value, value)
    elif isinstance(value, Mapping) and isinstance(value, dict):
        made = copy.copy(value)
        for key, item in value.items():
            made[key] = convert(item, change, kinds, seen)
    elif isinstance(value, tuple):
        items = [convert(item, change, kinds, seen) for item in value]
        made = type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    elif isinstance(value, list):
        made = [convert(item, change, kinds, seen) for item in value]
    elif hasattr(value, "__dict__") and tensors(value):
        made = copy.copy(value)
        seen[id(value)] = made
        for name, item in vars(value).items():
            made.__dict__[name] = convert(item, change, kinds, seen)
    else:
        return value
    seen[id(value)] = made
    return made


def tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in a value, in order, each once."""
    found: list[torch.Tensor] = []
    _collect(value, found, set())
    return found


def _collect(value: Any, found: list[torch.Tensor], seen: set[int]) -> None:
    if isinstance(value, _OPAQUE) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif isinstance(value, Mapping):
        for item in value.values():
            _collect(item, found, seen)
    elif isinstance(value, (tuple, list)):
        for item in value:
            _collect(item, found, seen)
    elif hasattr(value, "__dict__"):
        for item in vars(value).values():
            _collect(item, found, seen)
