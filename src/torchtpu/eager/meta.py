"""PyTorch's own answer to what an operator returns: its meta kernel, run on stand-ins without data."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves, tree_map

from torchtpu.eager.program import Meta, dense

__all__ = ["Unknown", "run_meta"]


class Unknown(Exception):
    """PyTorch has no meta kernel for the operator, or none without data."""


def run_meta(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[int, torch.Tensor]]:
    """Run the operator on meta tensors of the arguments' geometry.

    Returns:
        what the operator returned, and for every tensor argument (by ``id``) its stand-in, which an out= operator may have resized.

    Raises:
        Unknown: there is no meta kernel.
        Exception: what PyTorch raises for wrong arguments: the same error as on any device.
    """
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
    if "device" in {a.name for a in op._schema.arguments} and not any(isinstance(x, torch.Tensor) for x in tree_leaves(args)):
        meta_kwargs["device"] = torch.device("meta")
    try:
        with torch.no_grad():
            return op(*meta_args, **meta_kwargs), stand_ins
    except NotImplementedError as error:
        raise Unknown(str(error)) from error
    except RuntimeError as error:
        text = str(error)
        if "meta tensor" in text.lower() or "Cannot copy out of meta" in text or "data-dependent" in text or "DataDependent" in text:
            raise Unknown(text) from error
        raise


def metas_of(result: Any) -> list[Meta | None]:
    """Flat descriptions of what an operator returned."""
    out: list[Meta | None] = []
    for x in tree_leaves(result):
        out.append(dense(Meta(tuple(x.shape), tuple(x.stride()), x.dtype)) if isinstance(x, torch.Tensor) else None)
    return out
