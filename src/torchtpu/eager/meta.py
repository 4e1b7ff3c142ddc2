"""PyTorch's own answer to what an operator returns: its meta kernel, run on stand-ins without data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves, tree_map

from torchtpu.eager.program import Meta, dense

__all__ = ["Unknown", "metas_of", "raise_as_cpu", "run_meta"]


def _without_dims(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    return dim is not None and len(dim) == 0


_WRONG: dict[str, Callable[[tuple[Any, ...], dict[str, Any]], bool]] = {
    "aten::multilabel_margin_loss_forward": lambda args, kwargs: True,
    "aten::nansum": _without_dims,
}
"""Operators whose meta kernel gives another shape than the CPU and CUDA kernels, and for which arguments."""


class Unknown(Exception):
    """PyTorch has no meta kernel for the operator, or none without data."""


def run_meta(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[int, torch.Tensor]]:
    """Run the operator on meta tensors of the arguments' geometry.

    Returns:
        what the operator returned, and for every tensor argument (by ``id``) its stand-in, which an out= operator may
        have resized.

    Raises:
        Unknown: there is no meta kernel, or it refuses what the CPU accepts.
        Exception: what PyTorch raises for wrong arguments: the same error as on any device.
    """
    wrong = _WRONG.get(op._schema.name)
    if wrong is not None and wrong(args, kwargs):
        raise Unknown(op._schema.name)
    stand_ins: dict[int, torch.Tensor] = {}

    def stand_in(x: Any) -> Any:
        if isinstance(x, torch.Tensor) and x.device.type != "cpu":
            if id(x) not in stand_ins:
                made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
                stand_ins[id(x)] = made
            return stand_ins[id(x)]
        if isinstance(x, torch.device):
            return torch.device("meta")
        return None if isinstance(x, torch.Generator) else x

    meta_args, meta_kwargs = tree_map(stand_in, (args, kwargs))
    if "device" in {a.name for a in op._schema.arguments} and not any(
        isinstance(x, torch.Tensor) for x in tree_leaves(args)
    ):
        meta_kwargs["device"] = torch.device("meta")
    try:
        with torch.no_grad():
            return op(*meta_args, **meta_kwargs), stand_ins
    except Exception as error:
        # A meta kernel's words are often its own, and some know less than the CPU does: let the CPU kernel judge the
        # same geometry.
        raise_as_cpu(op, args, kwargs)
        raise Unknown(str(error)) from error


_JUDGE_LIMIT = 2**26
"""Largest total of elements for which an error is reproduced on the CPU."""


def raise_as_cpu(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise what PyTorch CPU raises for arguments of this geometry; return if it accepts them or is not to be asked."""
    made: dict[int, torch.Tensor] = {}

    def zeros(x: Any) -> Any:
        if isinstance(x, torch.Tensor) and x.device.type != "cpu":
            if id(x) not in made:
                made[id(x)] = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu").zero_()
            return made[id(x)]
        if isinstance(x, torch.device):
            return torch.device("cpu")
        return None if isinstance(x, torch.Generator) else x

    if sum(x.numel() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)) > _JUDGE_LIMIT:
        return
    cpu_args, cpu_kwargs = tree_map(zeros, (args, kwargs))
    if "device" in cpu_kwargs or ("device" in {a.name for a in op._schema.arguments} and not made):
        cpu_kwargs["device"] = torch.device("cpu")
    try:
        with torch.no_grad():
            op(*cpu_args, **cpu_kwargs)
    except (NotImplementedError, torch.linalg.LinAlgError):  # the latter judges values, and these are zeros
        return


def metas_of(result: Any) -> list[Meta | None]:
    """Flat descriptions of what an operator returned."""
    out: list[Meta | None] = []
    for x in tree_leaves(result):
        out.append(dense(Meta(tuple(x.shape), tuple(x.stride()), x.dtype)) if isinstance(x, torch.Tensor) else None)
    return out
