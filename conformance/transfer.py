"""Copies of test inputs on the device, with the geometry of the originals."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map

__all__ = ["DEVICE", "to_cpu", "to_device", "upcast"]

DEVICE = "tpu"

_WIDER = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}


def _moved(
    t: torch.Tensor, storages: dict[int, torch.Tensor], dtype: torch.dtype | None = None, device: str = DEVICE
) -> torch.Tensor:
    """The tensor on the device: same size, strides, offset, conjugate and negative bits, and the same aliases as its
    neighbours.
    """
    if t.is_nested or t.layout is not torch.strided or type(t) not in (torch.Tensor, torch.nn.Parameter):
        return t.to(device)
    with torch.no_grad():
        plain = t.detach()
        conj, neg = plain.is_conj(), plain.is_neg()
        plain = torch._neg_view(plain) if neg else plain
        plain = plain.conj() if conj else plain
        key = hash((t.untyped_storage()._cdata, t.dtype))
        if key not in storages:
            elements = t.untyped_storage().nbytes() // t.element_size()
            whole = torch.as_strided(plain, (elements,), (1,), 0)
            storages[key] = (
                whole.to(dtype or t.dtype).to(device)
                if elements
                else torch.empty(0, dtype=dtype or t.dtype, device=device)
            )
            storages[key] = (
                storages[key].clone()
                if storages[key].untyped_storage()._cdata == t.untyped_storage()._cdata
                else storages[key]
            )
        moved = storages[key].as_strided(t.size(), t.stride(), t.storage_offset())
        moved = moved.conj() if conj else moved
        moved = torch._neg_view(moved) if neg else moved
    return moved.detach().requires_grad_(t.requires_grad)


def to_device(tree: Any) -> Any:
    """Every CPU tensor of a tree on the device; ``"cpu"`` and ``torch.device("cpu")`` become the device's."""
    storages: dict[int, torch.Tensor] = {}
    seen: dict[int, torch.Tensor] = {}

    def leaf(x: Any) -> Any:
        if isinstance(x, torch.Tensor) and x.device.type == "cpu":
            if id(x) not in seen:
                seen[id(x)] = _moved(x, storages)
            return seen[id(x)]
        if isinstance(x, torch.device):
            return torch.device(DEVICE) if x.type == "cpu" else x
        if isinstance(x, torch.Generator):
            return torch.Generator(DEVICE).manual_seed(x.initial_seed())
        return DEVICE if isinstance(x, str) and x == "cpu" else x

    return tree_map(leaf, tree)


def copied(tree: Any) -> Any:
    """The same tree on the CPU, in new storages."""
    storages: dict[int, torch.Tensor] = {}
    return tree_map(
        lambda x: _moved(x, storages, device="cpu") if isinstance(x, torch.Tensor) and x.device.type == "cpu" else x,
        tree,
    )


def upcast(tree: Any) -> Any:
    """The same tree in double precision, for a reference result."""
    storages: dict[int, torch.Tensor] = {}

    def leaf(x: Any) -> Any:
        if isinstance(x, torch.Tensor) and x.dtype in _WIDER:
            return _moved(x, storages, _WIDER[x.dtype], "cpu")
        return _WIDER.get(x, x) if isinstance(x, torch.dtype) else x

    return tree_map(leaf, tree)


def to_cpu(tree: Any) -> Any:
    """Results on the CPU, detached."""

    def leaf(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        x = x.detach()
        return x.cpu() if x.device.type != "cpu" else x

    return tree_map(leaf, tree)
