"""Results of operators for which PyTorch has no meta kernel, without which Dynamo cannot put them into a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["META_KERNELS", "register_fakes"]


def _like_first(self: torch.Tensor, *others: Any, **kwargs: Any) -> torch.Tensor:
    return self.new_empty(self.shape)


def _broadcast(self: torch.Tensor, other: torch.Tensor, generator: Any = None) -> torch.Tensor:
    return self.new_empty(torch.broadcast_shapes(self.shape, other.shape))


def _laid_out_as_first(self: torch.Tensor, *others: Any) -> torch.Tensor:
    return torch.empty_like(self)


def _laid_out_as_second(grad_out: torch.Tensor, self: torch.Tensor, *others: Any) -> torch.Tensor:
    return torch.empty_like(self)


META_KERNELS: dict[str, Callable[..., torch.Tensor]] = {
    "binomial": _broadcast,
    "_sample_dirichlet": _like_first,
    "_dirichlet_grad": _like_first,
    "_standard_gamma_grad": _like_first,
    "batch_norm_elemt": _laid_out_as_first,
    "batch_norm_backward_elemt": _laid_out_as_second,
}
"""Meta kernels by overload."""


def _grouped_mm(
    mode: Any,
    op: Any,
    self: torch.Tensor,
    mat2: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Any:
    """PyTorch's meta kernel states what CUDA can: bfloat16 and strides of whole 16 bytes. The CPU takes all floats."""
    if self.device.type != "tpu" or not self.dtype.is_floating_point or self.dtype is not mat2.dtype:
        return NotImplemented
    rows, columns = self.shape[-2], mat2.shape[-1]
    match self.dim(), mat2.dim():
        case 2, 2 if offs is not None:
            shape = [offs.shape[0], rows, columns]
        case (2, 3) | (3, 2) if offs is not None:
            shape = [rows, columns]
        case 3, 3 if offs is None:
            shape = [self.shape[0], rows, columns]
        case _:
            return NotImplemented  # an error, which PyTorch words
    with mode:
        return self.new_empty(shape, dtype=out_dtype or self.dtype)


def _nansum(
    mode: Any, op: Any, self: torch.Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    """PyTorch's meta kernel takes no dimensions for none to sum over; its kernels take them for all."""
    if self.device.type != "tpu" or dim is None or len(dim):
        return NotImplemented
    with mode:
        return op(self, None, keepdim, dtype=dtype)


def register_fakes() -> None:
    """Tell fake tensors what operators return where PyTorch's meta kernel knows less than its CPU kernel."""
    from torch._subclasses.fake_impls import register_op_impl

    register_op_impl(torch.ops.aten._grouped_mm.default)(_grouped_mm)
    register_op_impl(torch.ops.aten.nansum.default)(_nansum)
