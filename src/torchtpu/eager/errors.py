"""Errors of the runtime, in PyTorch's terms."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch._ops import OpOverload

from torchtpu import _C
from torchtpu.runtime import meshes

__all__ = ["translate"]


def _size(nbytes: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if nbytes < 1024 or unit == "GiB":
            return f"{nbytes:.0f} {unit}" if unit == "bytes" else f"{nbytes:.2f} {unit}"
        nbytes /= 1024
    raise AssertionError


LISTED = 8
"""Kinds of tensors that an out-of-memory error lists."""


def largest_tensors(device: int) -> str:
    """The large tensors of a device, those alike together: bytes, number, dtype and size, operator and line."""
    kinds: dict[tuple[Any, ...], list[int]] = {}
    for nbytes, shape, dtype, written, op, file, line in _C.large_storages(device):
        what = f"{dtype}{list(shape)}".removeprefix("torch.") if written else "not written yet"
        where = f", {file}:{line}" if file is not None else ""
        kinds.setdefault((what, op or "", where), []).append(nbytes)
    listed = sorted(kinds.items(), key=lambda kind: -sum(kind[1]))
    lines = [
        f"  {_size(sum(sizes))}: {len(sizes)} x {what}{f', {op}' if op else ''}{where}"
        for (what, op, where), sizes in listed[:LISTED]
    ]
    if len(listed) > LISTED:
        rest = [n for _, sizes in listed[LISTED:] for n in sizes]
        lines.append(f"  {_size(sum(rest))}: {len(rest)} other tensors of 1 MiB and more")
    return "\nThe largest live tensors, and where they were made:\n" + "\n".join(lines) if lines else ""


def out_of_memory(device: int, asked: int | None, detail: str) -> torch.OutOfMemoryError:
    """An out-of-memory error that says how much was asked, used and free, and what the largest live tensors are."""
    from torchtpu.device import memory

    free, total = memory.mem_get_info(device)
    wanted = f"Tried to allocate {_size(asked)}. " if asked is not None else ""
    return torch.OutOfMemoryError(
        f"tpu:{device} out of memory. {wanted}Of {_size(total)}, {_size(total - free)} are in use and "
        f"{_size(free)} are free. {detail}{largest_tensors(device)}"
    )


def translate(error: Exception, op: OpOverload | str, device: int) -> Exception:
    """The exception to raise for one that JAX raised while running an operator."""
    text = str(error)
    if "RESOURCE_EXHAUSTED" in text or "Out of memory" in text:
        asked = re.search(r"allocat\w+ (\d+) bytes", text)
        return out_of_memory(device, int(asked.group(1)) if asked else None, f"(in {op})")
    if isinstance(error, torch.OutOfMemoryError | IndexError | KeyboardInterrupt):
        return error
    if torch.distributed.is_available() and isinstance(error, torch.distributed.DistBackendError):
        return error  # what other processes did; it names the line
    return RuntimeError(f"{op} failed on tpu:{device}: {text}{meshes.others(error)}")
