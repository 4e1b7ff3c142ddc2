"""Memory of the device, in the names of torch.cuda.memory.

``memory_allocated`` and its peak account for what tensors hold, whether their values are computed yet or, in fused
mode, will never be. ``max_memory_used`` is the footprint of the programs that ran: the tensors they found, their
results and temporaries. The runtime's own pools are only in mem_get_info().
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch

from torchtpu.device._index import device_index

__all__ = [
    "empty_cache",
    "max_memory_allocated",
    "max_memory_reserved",
    "max_memory_used",
    "mem_get_info",
    "memory_allocated",
    "memory_reserved",
    "memory_stats",
    "memory_summary",
    "reset_accumulated_memory_stats",
    "reset_max_memory_allocated",
    "reset_peak_memory_stats",
]


def memory_stats(device: Any = None) -> OrderedDict[str, Any]:
    """Flat dictionary of statistics: "allocated_bytes.all.current", "active_bytes.all.peak", "num_ooms" and so on.

    Empty before the device is first used, as on CUDA.
    """
    return torch.accelerator.memory_stats(device_index(device))


def memory_allocated(device: Any = None) -> int:
    """Bytes that tensors hold now."""
    return memory_stats(device).get("allocated_bytes.all.current", 0)


def max_memory_allocated(device: Any = None) -> int:
    """The most bytes that tensors held since the start or the last reset_peak_memory_stats()."""
    return memory_stats(device).get("allocated_bytes.all.peak", 0)


def memory_reserved(device: Any = None) -> int:
    """Bytes set aside for tensors; equal to memory_allocated(), since nothing is cached on PyTorch's side."""
    return memory_stats(device).get("reserved_bytes.all.current", 0)


def max_memory_reserved(device: Any = None) -> int:
    """The most bytes that were set aside for tensors."""
    return memory_stats(device).get("reserved_bytes.all.peak", 0)


def max_memory_used(device: Any = None) -> int:
    """The most bytes in use while a fused program ran, since the start or the last reset_peak_memory_stats().

    Tensors, the program's results and its temporaries (XLA's own figure), less memory that results take over from
    operands.
    """
    from torchtpu.runtime import memory

    return memory.peak(device_index(device))


def reset_peak_memory_stats(device: Any = None) -> None:
    """Let the peaks start again from what is held now."""
    from torchtpu.runtime import memory

    torch.accelerator.reset_peak_memory_stats(device_index(device))
    memory.reset(device_index(device))


reset_max_memory_allocated = reset_peak_memory_stats


def reset_accumulated_memory_stats(device: Any = None) -> None:
    """Set the counters of everything allocated and freed so far to zero."""
    torch.accelerator.reset_accumulated_memory_stats(device_index(device))


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """(free, total) bytes of the device's memory, as the runtime reports it; of the host's on XLA:CPU."""
    from torchtpu.runtime import devices

    return devices.memory_info(device_index(device))


def empty_cache() -> None:
    """Nothing to do: freed tensors give their memory back to the runtime at once."""


def memory_summary(device: Any = None, abbreviated: bool = False) -> str:
    """A table of memory_stats() for people to read."""
    index = device_index(device)
    stats = memory_stats(index)
    pools = [("all", ""), ("large_pool", "  from large pool"), ("small_pool", "  from small pool")]
    if abbreviated:
        pools = pools[:1]
    rows: list[tuple[str, str, Any]] = [
        ("allocated_bytes", "Allocated memory", _size),
        ("active_bytes", "Active memory", _size),
        ("reserved_bytes", "Reserved memory", _size),
        ("allocation", "Allocations", str),
    ]
    lines = [f"PyTorch TPU memory summary, device {index}", f"{'Metric':<22}" + "".join(f"{c:>14}" for c in _COLUMNS)]
    for key, name, show in rows:
        for pool, label in pools:
            values = [show(stats.get(f"{key}.{pool}.{c}", 0)) for c in _COLUMNS]
            lines.append(f"{label or name:<22}" + "".join(f"{value:>14}" for value in values))
    return "\n".join(lines) + "\n"


_COLUMNS = ("current", "peak", "allocated", "freed")


def _size(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"
