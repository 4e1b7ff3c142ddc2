"""Errors of the runtime, in PyTorch's terms."""

from __future__ import annotations

import re

import torch
from torch._ops import OpOverload

__all__ = ["translate"]


def _size(nbytes: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if nbytes < 1024 or unit == "GiB":
            return f"{nbytes:.0f} {unit}" if unit == "bytes" else f"{nbytes:.2f} {unit}"
        nbytes /= 1024
    raise AssertionError


def out_of_memory(device: int, asked: int | None, detail: str) -> torch.OutOfMemoryError:
    """An out-of-memory error that says how much was asked, used and free."""
    from torchtpu.device import memory

    free, total = memory.mem_get_info(device)
    wanted = f"Tried to allocate {_size(asked)}. " if asked is not None else ""
    return torch.OutOfMemoryError(
        f"tpu:{device} out of memory. {wanted}Of {_size(total)}, {_size(total - free)} are in use and "
        f"{_size(free)} are free. {detail}"
    )


def translate(error: Exception, op: OpOverload | str, device: int) -> Exception:
    """The exception to raise for one that JAX raised while running an operator."""
    text = str(error)
    if "RESOURCE_EXHAUSTED" in text or "Out of memory" in text:
        asked = re.search(r"allocat\w+ (\d+) bytes", text)
        return out_of_memory(device, int(asked.group(1)) if asked else None, f"(in {op})")
    if isinstance(error, torch.OutOfMemoryError | IndexError | KeyboardInterrupt):
        return error
    return RuntimeError(f"{op} failed on tpu:{device}: {text}")
