"""How the values of collectives travel: over gloo between host memories, or as XLA programs between devices."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import torch

from torchtpu import _C
from torchtpu.distributed.host import HostTransport
from torchtpu.distributed.reductions import Reduction
from torchtpu.distributed.watch import Call
from torchtpu.eager import arrays as eager_arrays
from torchtpu.runtime import meshes

__all__ = ["Transport", "array", "chosen", "from_host", "make", "to_host"]

Shapes = Sequence[Sequence[int]]


class Transport(Protocol):
    """The collectives of one group on values of one kind; see ``HostTransport`` for what each means.

    Attributes:
        host: for messages between two ranks.
        asynchronous: its methods return before the values are there.
        marker: an array that is ready once the last collective has run; None if every one waits for itself.
        one_order: the collectives of all groups of a process run in the order in which they are called.
    """

    @property
    def host(self) -> HostTransport: ...
    @property
    def asynchronous(self) -> bool: ...
    @property
    def marker(self) -> jax.Array | None: ...
    @property
    def one_order(self) -> bool: ...
    def begin(self, call: Call, timeout: float) -> None: ...
    def load(self, arrays: Sequence[jax.Array], sizes: Shapes) -> list[Any]: ...
    def tensor(self, value: Any, device: int) -> torch.Tensor: ...
    def all_reduce(self, x: Any, reduction: Reduction) -> Any: ...
    def reduce(self, x: Any, reduction: Reduction, root: int) -> Any: ...
    def all_gather(self, x: Any) -> Any: ...
    def all_gather_rows(self, x: Any) -> list[Any]: ...
    def all_gather_uneven(self, x: Any, shapes: Shapes) -> list[Any]: ...
    def broadcast(self, x: Any, root: int) -> Any: ...
    def reduce_scatter(self, x: Any, reduction: Reduction) -> Any: ...
    def reduce_scatter_uneven(self, parts: Sequence[Any], reduction: Reduction) -> Any: ...
    def all_to_all(self, x: Any) -> Any: ...
    def all_to_all_uneven(self, parts: Sequence[Any], shapes: Shapes) -> list[Any]: ...
    def scatter(self, x: Any | None, like: Any, root: int) -> Any: ...
    def gather(self, x: Any, root: int) -> list[Any]: ...
    def barrier(self) -> None: ...


def chosen(platform: str) -> str:
    """``TORCHTPU_COLLECTIVES``: "xla" or "host"; by default the devices' own on a TPU, the host's on XLA:CPU.

    Raises:
        ValueError: it is set to something else.
    """
    value = os.environ.get("TORCHTPU_COLLECTIVES", "").strip().lower()
    if value in ("", "auto"):
        return "xla" if platform == "tpu" else "host"
    if value not in ("xla", "host"):
        raise ValueError(f"TORCHTPU_COLLECTIVES must be 'xla' or 'host' (or unset: automatic), not {value!r}")
    return value


def make(store: Any, rank: int, size: int, timeout: float, ranks: Sequence[int]) -> Transport:
    """The transport of a group; it meets the other members through the store."""
    from torchtpu.runtime import devices

    host = OnHost(store, rank, size, timeout)
    if chosen(devices.choose_platform()) == "host":
        return host
    from torchtpu.distributed.xla import XlaTransport

    return XlaTransport(host, rank, size, ranks)


class OnHost(HostTransport):
    """``HostTransport`` for arrays of the device."""

    asynchronous = False
    marker = None
    one_order = False

    def __init__(self, store: Any, rank: int, size: int, timeout: float) -> None:
        super().__init__(store, rank, size, timeout)
        self.host = self

    def load(self, arrays: Sequence[jax.Array], sizes: Shapes) -> list[torch.Tensor]:
        """The arrays' memory, without a copy where they lie in the host's."""
        return [to_host(a, s) for a, s in zip(arrays, sizes, strict=True)]

    def tensor(self, value: torch.Tensor, device: int) -> torch.Tensor:
        """A tpu tensor that takes over a CPU tensor's memory where it can."""
        return from_host(value, device)


def array(tensor: torch.Tensor) -> jax.Array:
    """A tensor's elements, in order and in any folding, on one device; computing them may still be under way."""
    value, shape, dtype = _C.get_value(tensor)
    whole = value is not None and dtype is tensor.dtype and math.prod(shape) == tensor.numel()
    if whole and tensor.is_contiguous() and tensor.storage_offset() == 0 and not (tensor.is_conj() or tensor.is_neg()):
        return meshes.local(eager_arrays.force(value))
    return meshes.local(eager_arrays.array_of(tensor.detach()))


def to_host(array: jax.Array, size: Sequence[int]) -> torch.Tensor:
    """A CPU tensor with an array's elements, only to be read; waits for them."""
    return eager_arrays.to_host(array).view(tuple(size))


def from_host(value: torch.Tensor, device: int) -> torch.Tensor:
    """A tpu tensor with the value of a CPU tensor that nobody else writes to."""
    value = value.contiguous()
    return eager_arrays.wrap_array(eager_arrays.from_host(value, device), device, value.dtype)
