"""The reference run: in a dtype that is wider all the way, with operators that PyTorch CPU lacks in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Wider", "grouped_product", "widen"]


def widen(model: torch.nn.Module) -> torch.nn.Module:
    """Put what a float64 model keeps in float32, such as a rotary embedding's frequencies, into float64 too."""
    for module in model.modules():
        for name, x in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            if x.dtype == torch.float32:
                if isinstance(x, torch.nn.Parameter):
                    x.data = x.data.double()
                else:
                    setattr(module, name, x.double())
    return model


class Wider(TorchDispatchMode):
    """In its block, with float64, nothing is float32: a model that says ``x.float()``, as norms do, would else round
    there as PyTorch CPU does, and the reference would hide how large that rounding is.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.double = dtype == torch.float64

    def __enter__(self) -> Any:
        if self.double:
            self.before = torch.get_default_dtype()
            torch.set_default_dtype(torch.float64)
        return super().__enter__()

    def __exit__(self, *error: Any) -> Any:
        if self.double:
            torch.set_default_dtype(self.before)
        return super().__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.double:
            args, kwargs = pytree.tree_map(lambda x: torch.float64 if x is torch.float32 else x, (args, kwargs))
            if func is torch.ops.aten._grouped_mm.default:
                return grouped_product(*args, **kwargs)
        return func(*args, **kwargs)


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
