"""The last resort: run an operator on PyTorch CPU, say so once, and count it."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_map

from torchtpu.eager.preconditions import require_one_device
from torchtpu.eager.schema import written_arguments

__all__ = ["fallback_count", "fallbacks", "reset_fallbacks", "run_on_cpu"]

_counts: Counter[str] = Counter()


def fallback_count() -> int:
    """How many operator calls of this process ran on the CPU because the device has no program for them."""
    return _counts.total()


def fallbacks() -> dict[str, int]:
    """{operator: calls} of what ran on the CPU."""
    return dict(_counts)


def reset_fallbacks() -> None:
    """Start counting anew."""
    _counts.clear()


def run_on_cpu(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Copy the arguments to the CPU, run the operator there, and copy back its results and what it wrote.

    Raises:
        NotImplementedError: the CPU has no kernel either; the message names the operator.
    """
    name = str(op)
    if name not in _counts:
        warnings.warn(
            f"{name} has no program on the tpu device yet and runs on the CPU: its inputs and results are copied on "
            "every call. torch.tpu.fallbacks() counts such calls.",
            stacklevel=2,
        )
    _counts[name] += 1
    require_one_device(op, args, kwargs)
    copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    device: torch.device | None = None

    def down(x: Any) -> Any:
        nonlocal device
        if isinstance(x, torch.Tensor) and x.device.type == "tpu":
            device = x.device if device is None else device
            if id(x) not in copies:
                copies[id(x)] = (x, x.cpu())
            return copies[id(x)][1]
        if isinstance(x, torch.device) and x.type == "tpu":
            device = x if device is None else device
            return torch.device("cpu")
        if isinstance(x, torch.Generator) and x.device.type == "tpu":
            raise NotImplementedError(f"{name} cannot use a tpu generator: it runs on the CPU")
        return x

    cpu_args, cpu_kwargs = tree_map(down, (args, kwargs))
    try:
        result = op(*cpu_args, **cpu_kwargs)
    except NotImplementedError as error:
        raise NotImplementedError(
            f"{name} is implemented neither for the tpu device nor for the CPU it falls back to with these arguments. "
            "Write it with other operators, or compute it before moving its inputs to the device."
        ) from error
    written = set(written_arguments(op))
    names = [a.name for a in op._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    back: dict[int, torch.Tensor] = {}
    for argument in written:
        value = given.get(argument)
        for tensor in value if isinstance(value, tuple | list) else [value]:
            if isinstance(tensor, torch.Tensor) and id(tensor) in copies:
                cpu = copies[id(tensor)][1]
                _write_back(tensor, cpu)
                back[id(cpu)] = tensor

    def up(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return back[id(x)] if id(x) in back else x.to(device)
        return x

    return tree_map(up, result)


def _write_back(tensor: torch.Tensor, cpu: torch.Tensor) -> None:
    """Give a tpu tensor what the CPU operator left in its copy."""
    if tensor.layout is torch.sparse_coo:  # takes size and elements from what it copies
        tensor.copy_(cpu)
    elif tensor.layout is not torch.strided:
        tensor.resize_as_sparse_(cpu.to(tensor.device)).copy_(cpu)
    else:
        if cpu.shape != tensor.shape:
            tensor.resize_(cpu.shape)
        tensor.copy_(cpu)
