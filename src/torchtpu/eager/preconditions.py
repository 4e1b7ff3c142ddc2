"""What must hold of a call's tensors before it runs, with PyTorch's errors for what does not."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch._ops import OpOverload

from torchtpu import _C
from torchtpu.eager.views import physical_order
from torchtpu.lowering.apply import short_name
from torchtpu.runtime import devices

__all__ = ["require_no_overlap", "require_one_device", "warn_emulated"]

_CLONE = "Please clone() the tensor before performing the operation."


def require_one_device(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise PyTorch's error when tensors are on different devices; 0-d CPU tensors may join any.

    Raises:
        RuntimeError: names both arguments and both devices.
    """
    names = [a.name for a in op._schema.arguments]
    placed: list[tuple[str, torch.Tensor]] = []
    for name, value in [*zip(names, args, strict=False), *kwargs.items()]:
        if isinstance(value, torch.Tensor):
            placed.append((name, value))
        elif isinstance(value, tuple | list):
            placed += [(f"{name}[{i}]", t) for i, t in enumerate(value) if isinstance(t, torch.Tensor)]
    first = next(((label, t.device) for label, t in placed if t.device.type == "tpu"), None)
    for label, t in placed:
        if first is None or t.device == first[1] or (t.device.type == "cpu" and t.dim() == 0):
            continue
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{first[1]} and {t.device}! In aten.{short_name(op)}, argument '{first[0]}' is on {first[1]} and argument "
            f"'{label}' is on {t.device}: move one of them with .to(\"{first[1]}\")."
        )


_EMULATED = {
    torch.float64: "float64 is emulated on TPU, many times slower than float32; use float32 or bfloat16",
    torch.complex128: "complex128 is emulated on TPU, many times slower than complex64; use complex64",
}
_warned: set[torch.dtype] = set()


def warn_emulated(tensors: list[torch.Tensor]) -> None:
    """Say once that a TPU has no arithmetic of these dtypes."""
    if devices.platform() != "tpu":
        return
    for t in tensors:
        if t.dtype in _EMULATED and t.dtype not in _warned:
            _warned.add(t.dtype)
            warnings.warn(f"torchtpu: {_EMULATED[t.dtype]}", stacklevel=3)


_READ_OUT_OF_ORDER = (
    *("cat", "gather", "index_add", "index_copy", "index_put", "_index_put_impl", "index_reduce", "index_select"),
    *("masked_select", "nonzero", "put", "scatter", "scatter_add", "scatter_reduce", "stack", "take"),
)
"""Operators that read elements in another order than they write them: a result cannot be one of their arguments."""
_ONE_NUMBER = ("masked_fill", "index_fill")
"""Operators that write one number, read before they start."""


def require_no_overlap(op: OpOverload, written: list[torch.Tensor], read: list[Any]) -> None:
    """Raise PyTorch's errors for writes whose result would depend on the order of elements.

    Args:
        op: the operator.
        written: the tensors it writes to.
        read: all its arguments, flat; the written ones among them.

    Raises:
        RuntimeError: a written tensor has several elements in one place, or shares some but not all of its places with
            one that is read, or shares any with one that is read in another order.
    """
    base = op._schema.name.removeprefix("aten::").removesuffix("_")
    if base in _ONE_NUMBER:
        read = []
    reordered = base in _READ_OUT_OF_ORDER
    for t in written:
        if t.numel() and any(n > 1 and s == 0 for n, s in zip(t.shape, t.stride(), strict=True)):
            raise RuntimeError(
                "unsupported operation: more than one element of the written-to tensor refers to a single memory "
                f"location. {_CLONE}"
            )
        others = [x for x in read if isinstance(x, torch.Tensor)]
        twice = reordered and sum(_same_places(t, x) for x in others) > 1
        if twice or any(x is not t and _partly_overlap(t, x) for x in others):
            raise RuntimeError(
                "unsupported operation: some elements of the input tensor and the written-to tensor refer to a "
                f"single memory location. {_CLONE}"
            )


def _same_places(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a is b:
        return a.numel() > 0
    return (
        a.device == b.device
        and _C.storage_of(a)[0] == _C.storage_of(b)[0]
        and a.storage_offset() * a.itemsize == b.storage_offset() * b.itemsize
        and a.nbytes == b.nbytes > 0
    )


def _partly_overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """PyTorch's rule (``at::get_overlap_status``): only dense tensors are judged."""
    if a.device != b.device or _C.storage_of(a)[0] != _C.storage_of(b)[0] or not (a.numel() and b.numel()):
        return False
    if not _dense(a) or not _dense(b):
        return False
    first, second = a.storage_offset() * a.itemsize, b.storage_offset() * b.itemsize
    if first == second and a.nbytes == b.nbytes:
        return a.stride() != b.stride()
    return first < second + b.nbytes and second < first + a.nbytes


def _dense(t: torch.Tensor) -> bool:
    return physical_order(tuple(t.shape), tuple(t.stride())) is not None
