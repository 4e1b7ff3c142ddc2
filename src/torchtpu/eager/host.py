"""Operators that move data between devices or read a value on the host."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import torch

from torchtpu import _C
from torchtpu.eager import trace
from torchtpu.eager.arrays import array_of, force, from_host, host_array, make_spec, to_host, wrap_array
from torchtpu.eager.errors import out_of_memory, translate
from torchtpu.eager.kernels import make_kernel
from torchtpu.eager.preconditions import require_no_overlap, require_one_device
from torchtpu.eager.views import physical_order
from torchtpu.runtime import checks, devices, meshes, observe

__all__ = ["HOST_KERNELS"]

_aten = torch.ops.aten

_WORTH_READING = 8
"""How many times the elements of a tensor are copied to the host if no program has to be compiled for that."""


def _read(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor with the elements of a tpu tensor; it may share memory with the device's array."""
    observe.wait("a copy to the host")
    order = _begins_storage(tensor)
    array = array_of(tensor) if order is None else force(_C.get_value(tensor)[0])
    try:
        host = to_host(array)
    except Exception as error:
        raise translate(error, _aten.copy_.default, tensor.device.index) from error
    checks.raise_failed()
    if order is None:
        return host
    elements = host.reshape(-1)[: tensor.numel()].reshape([tensor.shape[i] for i in order])
    return elements.permute(sorted(range(len(order)), key=order.__getitem__))


def _begins_storage(t: torch.Tensor) -> tuple[int, ...] | None:
    """The order of dimensions of a tensor that is the first part of a storage, such as a graph with sizes that change
    returns: reading all of it compiles nothing, and cutting it would compile a program for each size. None for others.
    """
    value, shape, dtype = _C.get_value(t)
    if value is None or dtype is not t.dtype or t.storage_offset() or t.is_conj() or t.is_neg():
        return None
    if not t.numel() < math.prod(shape) <= _WORTH_READING * t.numel():
        return None
    return physical_order(tuple(t.shape), tuple(t.stride()))


_copy_on_device: Callable[..., Any] | None = None


def copy_(self: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """``self.copy_(src)`` with a tpu tensor on either side.

    A copy to the host waits for the value, whatever ``non_blocking`` says: memory is never seen half written.
    """
    global _copy_on_device
    if self.device.type != "tpu":
        if src.numel() or self.numel():
            self.copy_(_read(src))
        return self
    if src.device.type != "tpu":
        if src.device.type != "cpu":
            src = src.cpu()
        require_no_overlap(_aten.copy_.default, [self], [])
        if src.shape != self.shape:
            src = src.expand(self.shape)
        src = src.detach().resolve_conj().resolve_neg()
        if not _store_from_host(self, src):
            staged = wrap_array(
                _put(_private(src.to(self.dtype).contiguous(), src), self.device.index), self.device.index
            )
            copy_(self, staged)
        return self
    if src.device != self.device:
        moved, target = array_of(src), devices.device(self.device.index)
        if target is not devices.device(src.device.index):  # of several processes on a host each has one
            moved = meshes.put(moved, target)
        return copy_(self, wrap_array(moved, self.device.index))
    if not _share(self, src):
        if _copy_on_device is None:
            _copy_on_device = make_kernel(_aten.copy_.default)
        _copy_on_device(self, src)
    return self


def _private(host: torch.Tensor, src: torch.Tensor) -> torch.Tensor:
    """``host``, cloned if it is still the memory of ``src``: the one copy that a transfer makes."""
    return host.clone() if host.untyped_storage().data_ptr() == src.untyped_storage().data_ptr() else host


def _put(host: torch.Tensor, device: int) -> jax.Array:
    try:
        return from_host(host, device)
    except Exception as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            raise out_of_memory(device, host.nbytes, "(copying from the CPU)") from error
        raise


def _covers_storage(t: torch.Tensor) -> bool:
    """Whether the tensor is its whole storage: dense, from the first element to the last."""
    whole = t.storage_offset() == 0 and t.numel() * t.element_size() == _C.storage_of(t)[1]
    return whole and physical_order(tuple(t.shape), tuple(t.stride())) is not None


def _store_from_host(self: torch.Tensor, src: torch.Tensor) -> bool:
    """Replace a whole storage by host data in its own memory order: one copy, no program."""
    if not _covers_storage(self) or self.is_conj() or self.is_neg() or self.numel() == 0:
        return False
    order = physical_order(tuple(self.shape), tuple(self.stride()))
    assert order is not None  # it covers its storage
    host = _private(src.to(self.dtype).permute(order).contiguous(), src)
    spec = make_spec(tuple(self.shape), tuple(self.stride()), self.dtype)
    before = _C.get_value(self)[0] if meshes.active else None
    if before is not None and meshes.divided(before) and before.shape == tuple(host.shape):
        _C.store(self, meshes.from_host(host_array(host), before.sharding), spec)
    else:
        _C.store(self, _put(host, self.device.index), spec)
    return True


def _share(self: torch.Tensor, src: torch.Tensor) -> bool:
    """Give ``self`` the value of ``src`` where both are whole storages of one layout: arrays are immutable, so no copy
    is needed.
    """
    before = _C.get_value(self)[0] if meshes.active else None
    if not _C.share(self, src):
        return False
    if meshes.divided(before):
        value, shape, dtype = _C.get_value(self)
        _C.set_value(self, meshes.as_stored(value, before), shape, dtype)
    return True


def _local_scalar_dense(self: torch.Tensor) -> Any:
    """``.item()``."""
    observe.wait("a number read by Python (.item(), bool(), print)")
    array = meshes.readable(array_of(self))
    devices.waiting(array)
    try:
        value = np.asarray(array).reshape(-1)[0]
    except Exception as error:
        raise translate(error, _aten._local_scalar_dense.default, self.device.index) from error
    checks.raise_failed(wait=not trace.is_early(array))
    if self.dtype is torch.bool:
        return bool(value)
    return (
        int(value)
        if not (self.dtype.is_floating_point or self.dtype.is_complex)
        else (complex if self.dtype.is_complex else float)(value)
    )


def equal(self: torch.Tensor, other: torch.Tensor) -> bool:
    """``torch.equal``: same size and same elements."""
    require_one_device(_aten.equal.default, (self, other), {})
    if self.shape != other.shape:
        return False
    return bool(torch.eq(self, other).all().item())


def _copy_from(self: torch.Tensor, dst: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """PyTorch's hook for copies out of a device it does not know."""
    return copy_(dst, self, non_blocking)


def _copy_from_and_resize(self: torch.Tensor, dst: torch.Tensor) -> torch.Tensor:
    """As ``_copy_from``, resizing the destination."""
    if dst.shape != self.shape:
        dst.resize_(self.shape)
    return copy_(dst, self)


def record_stream(self: torch.Tensor, s: Any) -> None:
    """Values live as long as a program reads them; there is nothing to record."""


HOST_KERNELS: dict[str, Callable[..., Any]] = {
    "copy_": copy_,
    "_local_scalar_dense": _local_scalar_dense,
    "equal": equal,
    "_copy_from": _copy_from,
    "_copy_from_and_resize": _copy_from_and_resize,
    "record_stream": record_stream,
}
"""Kernels that are not programs, by overload."""
