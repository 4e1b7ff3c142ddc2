"""The reference run in float64, where PyTorch CPU has an operator for narrower dtypes only."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Wider", "grouped_product"]


class Wider(TorchDispatchMode):
    """In its block, operators that PyTorch CPU lacks in float64 are computed from others."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype == torch.float64:
            return grouped_product(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def grouped_product(
    mat_a: torch.Tensor,
    mat_b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """``torch.nn.functional.grouped_mm`` in any dtype, a product for each group.

    Args:
        mat_a: (rows, inner) or (groups, rows, inner).
        mat_b: (inner, columns) or (groups, inner, columns).
        offs: (groups,) where each group ends, along the dimension that is not batched: the rows of ``mat_a``, the
            columns of ``mat_b``, or the inner one when neither is batched.
        bias: added to the product.
        out_dtype: of the result.

    Raises:
        ValueError: neither operand is batched by group and there are no offsets.
    """
    if mat_a.dim() == 3 and mat_b.dim() == 3:
        product = mat_a @ mat_b
    elif offs is None:
        raise ValueError("a grouped product of a matrix needs offsets")
    else:
        ends = offs.tolist()
        spans = list(zip([0, *ends[:-1]], ends, strict=True))
        if mat_a.dim() == 2 and mat_b.dim() == 2:
            product = torch.stack([mat_a[:, i:j] @ mat_b[i:j] for i, j in spans])
        elif mat_a.dim() == 2:
            product = mat_a.new_zeros(mat_a.shape[0], mat_b.shape[2])
            for group, (i, j) in enumerate(spans):
                product[i:j] = mat_a[i:j] @ mat_b[group]
        else:
            product = mat_a.new_zeros(mat_a.shape[1], mat_b.shape[1])
            for group, (i, j) in enumerate(spans):
                product[:, i:j] = mat_a[group] @ mat_b[:, i:j]
    if bias is not None:
        product = product + bias
    return product if out_dtype is None else product.to(out_dtype)
