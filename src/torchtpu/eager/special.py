"""Operators whose call must be rewritten before it can be a program: boolean indices, and writes that a schema does not
mention.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchtpu.eager.kernels import make_kernel

__all__ = ["SPECIAL_KERNELS"]

_aten = torch.ops.aten
_MASKS = (torch.bool, torch.uint8)


def _without_masks(indices: Sequence[torch.Tensor | None], device: torch.device) -> list[torch.Tensor | None]:
    """Indices with every boolean mask replaced by the positions of its true elements, which has to wait for them."""
    plain: list[torch.Tensor | None] = []
    for index in indices:
        if isinstance(index, torch.Tensor) and index.dtype in _MASKS:
            plain.extend(index.to(device).nonzero().unbind(1))
        else:
            plain.append(index)
    return plain


def _has_mask(indices: Sequence[torch.Tensor | None]) -> bool:
    return any(isinstance(i, torch.Tensor) and i.dtype in _MASKS for i in indices)


def _check_masks(self: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> None:
    """A mask's sizes must be those of the dimensions it selects from."""
    dim = 0
    for index in indices:
        if isinstance(index, torch.Tensor) and index.dtype in _MASKS:
            for k in range(index.dim()):
                if dim + k >= self.dim() or index.shape[k] != self.shape[dim + k]:
                    raise IndexError(
                        f"The shape of the mask {list(index.shape)} at index {k} does not match the shape of the "
                        f"indexed tensor {list(self.shape)} at index {dim + k}"
                    )
            dim += index.dim()
        else:
            dim += 1


def _indexing(op: Any) -> Callable[..., Any]:
    """A kernel for an operator whose second argument is a list of index tensors."""
    program = None

    def kernel(self: torch.Tensor, indices: Sequence[torch.Tensor | None], *rest: Any, **kwargs: Any) -> Any:
        nonlocal program
        if program is None:
            program = make_kernel(op)
        if _has_mask(indices):
            _check_masks(self, indices)
            indices = _without_masks(indices, self.device)
        return program(self, indices, *rest, **kwargs)

    return kernel


def _index_put_(op: Any) -> Callable[..., Any]:
    """``index_put_``: ``x[mask] = number`` needs no positions, so it does not wait for the mask."""
    general = _indexing(op)

    def kernel(
        self: torch.Tensor,
        indices: Sequence[torch.Tensor | None],
        values: torch.Tensor,
        accumulate: bool = False,
        *rest: Any,
    ) -> torch.Tensor:
        mask = indices[0] if len(indices) == 1 else None
        if mask is not None and mask.dtype is torch.bool and values.numel() == 1 and not accumulate:
            _check_masks(self, indices)
            wide = mask.to(self.device).reshape(mask.shape + (1,) * (self.dim() - mask.dim()))
            value = values.reshape(())
            self.masked_fill_(wide, value.to(self.dtype) if value.device != self.device else value)
            return self
        return general(self, indices, values, accumulate, *rest)

    return kernel


def _native_batch_norm(overload: str) -> Callable[..., Any]:
    """``native_batch_norm`` updates the running statistics while training, and its schema does not say so."""
    plain, updating = None, None

    def kernel(
        input: torch.Tensor, weight: Any, bias: Any, mean: Any, var: Any, training: bool, *rest: float, **outs: Any
    ) -> Any:
        nonlocal plain, updating
        if not training or mean is None:
            plain = plain or make_kernel(getattr(_aten.native_batch_norm, overload))
            return plain(input, weight, bias, mean, var, training, *rest, **outs)
        updating = updating or make_kernel(getattr(_aten._native_batch_norm_legit, overload))
        return updating(input, weight, bias, mean, var, training, *rest, **outs)

    return kernel


def _normal_around_out(
    mean: torch.Tensor, std: float = 1.0, *, generator: torch.Generator | None = None, out: torch.Tensor
) -> torch.Tensor:
    """``normal.Tensor_float_out``: PyTorch's draws as many numbers as ``out`` has, and adds the means to them."""
    return torch.add(mean, out.normal_(0.0, std, generator=generator), out=out)


def _linalg_lstsq() -> Callable[..., Any]:
    """``linalg_lstsq`` has no residuals where a matrix turns out to be rank-deficient: it waits for the rank."""
    program = None

    def kernel(self: torch.Tensor, b: torch.Tensor, rcond: float | None = None, *, driver: str | None = None) -> Any:
        nonlocal program
        program = program or make_kernel(_aten.linalg_lstsq.default)
        solution, residuals, rank, values = program(self, b, rcond, driver=driver)
        if driver in ("gelsd", "gelss") and residuals.numel() and not bool((rank == self.shape[-1]).all()):
            residuals = residuals.new_empty(0)
        return solution, residuals, rank, values

    return kernel


def _batch_norm_gather_stats_with_counts() -> Callable[..., Any]:
    """``batch_norm_gather_stats_with_counts`` updates the running statistics, and its schema does not say so."""
    plain = None

    def kernel(
        input: torch.Tensor,
        mean: torch.Tensor,
        invstd: torch.Tensor,
        running_mean: torch.Tensor | None,
        running_var: torch.Tensor | None,
        momentum: float,
        eps: float,
        counts: torch.Tensor,
    ) -> Any:
        nonlocal plain
        plain = plain or make_kernel(_aten.batch_norm_gather_stats_with_counts.default)
        found, found_invstd = plain(input, mean, invstd, None, None, momentum, eps, counts)
        if running_mean is not None and running_var is not None:
            n = counts.to(found.dtype)
            squares = (n[:, None] * (invstd.to(found.dtype) ** -2 - eps + (mean - found) ** 2)).sum(0)
            running_mean.mul_(1 - momentum).add_((momentum * found).to(running_mean.dtype))
            unbiased = squares / (n.sum() - 1)
            running_var.mul_(1 - momentum).add_((momentum * unbiased).to(running_var.dtype))
        return found, found_invstd

    return kernel


def _as_strided_copy(
    self: torch.Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> torch.Tensor:
    """``as_strided_copy``: the window is one on the storage, of which the tensor may be a part."""
    return self.as_strided(size, stride, storage_offset).clone(memory_format=torch.contiguous_format)


def _as_strided_scatter(
    self: torch.Tensor,
    src: torch.Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int | None = None,
) -> torch.Tensor:
    """``as_strided_scatter``: a copy of the tensor with its gaps, and the window written on it."""
    if any(n > 1 and s == 0 for n, s in zip(self.shape, self.stride(), strict=True)):
        result = self.clone()  # repeated elements have no place of their own to be written to
        result.as_strided(size, stride, storage_offset).copy_(src)
        return result
    spans = sum((n - 1) * s for n, s in zip(self.shape, self.stride(), strict=True))
    reach = self.storage_offset() + spans + 1 if self.numel() else 0
    whole = self.as_strided((reach,), (1,), 0).clone()
    result = whole.as_strided(self.shape, self.stride(), self.storage_offset())
    result.as_strided(size, stride, storage_offset).copy_(src)
    return result


def _embedding_bag_backward() -> Callable[..., Any]:
    """``_embedding_bag_backward`` gives a sparse gradient if asked to, which is another operator."""
    dense = None

    def kernel(
        grad: torch.Tensor,
        indices: torch.Tensor,
        offsets: torch.Tensor,
        offset2bag: torch.Tensor,
        bag_size: torch.Tensor,
        maximum_indices: torch.Tensor,
        num_weights: int,
        scale_grad_by_freq: bool,
        mode: int,
        sparse: bool,
        per_sample_weights: torch.Tensor | None,
        padding_idx: int = -1,
    ) -> Any:
        nonlocal dense
        bags = (indices, offsets, offset2bag, bag_size)
        rest = (num_weights, scale_grad_by_freq, mode)
        if sparse:
            return _aten._embedding_bag_sparse_backward(grad, *bags, *rest, per_sample_weights, padding_idx)
        dense = dense or make_kernel(_aten._embedding_bag_backward.default)
        return dense(grad, *bags, maximum_indices, *rest, sparse, per_sample_weights, padding_idx)

    return kernel


SPECIAL_KERNELS: dict[str, Callable[..., Any]] = {
    "as_strided_copy": _as_strided_copy,
    "as_strided_scatter": _as_strided_scatter,
    "linalg_lstsq": _linalg_lstsq(),
    "index.Tensor": _indexing(_aten.index.Tensor),
    "_unsafe_index.Tensor": _indexing(_aten._unsafe_index.Tensor),
    "index_put_": _index_put_(_aten.index_put_.default),
    "_index_put_impl_": _index_put_(_aten._index_put_impl_.default),
    "index_put": _indexing(_aten.index_put.default),
    "native_batch_norm": _native_batch_norm("default"),
    "native_batch_norm.out": _native_batch_norm("out"),
    "normal.Tensor_float_out": _normal_around_out,
    "batch_norm_gather_stats_with_counts": _batch_norm_gather_stats_with_counts(),
    "_embedding_bag_backward": _embedding_bag_backward(),
}
"""Kernels by overload."""
