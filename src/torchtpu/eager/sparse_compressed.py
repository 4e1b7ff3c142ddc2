"""Sparse CSR and CSC tensors: what needs more than PyTorch's own code, by way of COO or of the row of every element."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchtpu.eager.fallback import run_on_cpu
from torchtpu.eager.sparse import assign, coo, merge, multiply

__all__ = ["COMPRESSED_KERNELS"]

_HALF = (torch.float16, torch.bfloat16)


def _coo(t: torch.Tensor) -> torch.Tensor:
    return t.to_sparse() if t.layout is not torch.strided else t


def _compressed_indices(t: torch.Tensor) -> torch.Tensor:
    return t.crow_indices() if t.layout in (torch.sparse_csr, torch.sparse_bsr) else t.ccol_indices()


def _layout_of(t: torch.Tensor, layout: torch.layout, like: torch.Tensor) -> torch.Tensor:
    """A COO or dense tensor in this layout, with the block size and dtype of indices of another tensor."""
    if layout is torch.strided:
        return t.to_dense() if t.layout is not torch.strided else t
    block = like.values().shape[-2:] if layout in (torch.sparse_bsr, torch.sparse_bsc) else None
    made, wanted = t.to_sparse(layout=layout, blocksize=block), _compressed_indices(like).dtype
    compressed = _compressed_indices(made)
    if compressed.dtype is wanted:
        return made
    plain = made.col_indices() if layout in (torch.sparse_csr, torch.sparse_bsr) else made.row_indices()
    return torch.sparse_compressed_tensor(
        compressed.to(wanted), plain.to(wanted), made.values(), made.shape, layout=layout, check_invariants=False
    )


def _flip(name: str, layout: torch.layout) -> Callable[..., torch.Tensor]:
    """CSR to CSC and back. PyTorch's code for that is the CPU's; batches and blocks are left to it."""
    op = getattr(torch.ops.aten, name).default

    def kernel(self: torch.Tensor, dense_dim: int | None = None) -> torch.Tensor:
        if self.layout is layout and dense_dim is None:
            return self.clone()
        batched = _compressed_indices(self).dim() > 1
        if batched or self.layout not in (torch.sparse_csr, torch.sparse_csc) or dense_dim is not None:
            return run_on_cpu(op, (self, dense_dim), {})
        return _layout_of(self.to_sparse(), layout, self)

    return kernel


def _product_of(values: torch.Tensor, place: torch.Tensor, rows: int) -> torch.Tensor:
    """Rows of products of the values that go to each place."""
    return torch.ones((rows, *values.shape[1:]), dtype=values.dtype, device=values.device).index_reduce_(
        0, place, values, "prod"
    )


def _csr_reduce(combine: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A reduction over rows, columns or both that gives a CSR matrix: elements move to index 0 there, and meet."""

    def kernel(
        self: torch.Tensor, dim: list[int], keepdim: bool = False, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        if not keepdim:
            raise RuntimeError("reduction operations on CSR tensors with keepdim=False is unsupported")
        t = self.to_sparse() if dtype is None else self.to_sparse().to(dtype)
        dims = {d % self.dim() for d in dim}
        rows = [torch.zeros_like(r) if d in dims else r for d, r in enumerate(t._indices().unbind(0))]
        size = [1 if d in dims else n for d, n in enumerate(t.shape)]
        return _layout_of(combine(coo(torch.stack(rows), t._values(), size)), torch.sparse_csr, self)

    return kernel


def _add_out(self: torch.Tensor, other: torch.Tensor, *, alpha: Any = 1, out: torch.Tensor) -> torch.Tensor:
    if self.layout is not torch.strided and other.layout is torch.strided:
        result = torch.add(_coo(self).mul(1).to_dense(), other, alpha=alpha)
    else:
        result = torch.add(_coo(self), _coo(other), alpha=alpha)
    return assign(out, _layout_of(result, out.layout, out), "add")


def _product(mat1: torch.Tensor, mat2: torch.Tensor) -> torch.Tensor:
    """A matrix product with a sparse factor: dense, or COO if both are sparse."""
    a, b = _coo(mat1), _coo(mat2)
    if b.layout is torch.strided:
        return multiply(a._indices(), a._values(), a.shape[0], b)
    if a.layout is torch.strided:
        return multiply(b._indices().flip(0), b._values(), b.shape[1], a.t()).t()
    return torch.sparse.mm(a, b)


def _addmm_out(
    self: torch.Tensor,
    mat1: torch.Tensor,
    mat2: torch.Tensor,
    *,
    beta: Any = 1,
    alpha: Any = 1,
    out: torch.Tensor,
) -> torch.Tensor:
    if mat1.dim() != 2 or mat2.dim() != 2:
        raise RuntimeError(f"addmm: matrices expected, got {mat1.dim()}D and {mat2.dim()}D tensors")
    if mat1.shape[1] != mat2.shape[0]:
        raise RuntimeError(
            f"mat1 and mat2 shapes cannot be multiplied ({mat1.shape[0]}x{mat1.shape[1]} and "
            f"{mat2.shape[0]}x{mat2.shape[1]})"
        )
    result = _product(mat1, mat2)
    result = result if alpha == 1 else result * alpha
    if beta != 0:
        base = _coo(self)
        base = base.expand(result.shape) if base.layout is torch.strided else base
        base = base if beta == 1 else base * beta
        result = base + result if base.layout is torch.strided else torch.add(result, base)
    return assign(out, _layout_of(result, out.layout, out), "addmm")


def _addmv_out(
    self: torch.Tensor, mat: torch.Tensor, vec: torch.Tensor, *, beta: Any = 1, alpha: Any = 1, out: torch.Tensor
) -> torch.Tensor:
    if mat.dim() != 2 or vec.dim() != 1 or mat.shape[1] != vec.shape[0]:
        raise RuntimeError(f"size mismatch, got mat {list(mat.shape)}, vec {list(vec.shape)}")
    result = _product(mat, vec.unsqueeze(1)).squeeze(1)
    result = result if alpha == 1 else result * alpha
    if beta != 0:
        result = result + (self if beta == 1 else self * beta)
    return assign(out, result, "addmv")


def _rows(t: torch.Tensor) -> torch.Tensor:
    """The row of every element of a CSR tensor; batches have rows of their own."""
    crow, columns = t.crow_indices(), t.col_indices()
    step = torch.arange(columns.shape[-1], dtype=crow.dtype, device=t.device).expand(columns.shape).contiguous()
    return torch.searchsorted(crow.contiguous(), step, right=True) - 1


def _csr(like: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """A CSR tensor with the elements' places of another."""
    return torch.sparse_compressed_tensor(
        like.crow_indices().clone(),
        like.col_indices().clone(),
        values,
        like.shape,
        layout=torch.sparse_csr,
        check_invariants=False,
    )


def _take_rows(dense: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Rows of a matrix, or of each matrix of a batch."""
    where = index.to(torch.int64).unsqueeze(-1).expand(*index.shape, dense.shape[-1])
    return dense.expand(*index.shape[:-1], *dense.shape[-2:]).gather(-2, where)


def _sampled_addmm(
    self: torch.Tensor, mat1: torch.Tensor, mat2: torch.Tensor, *, beta: Any = 1, alpha: Any = 1
) -> torch.Tensor:
    """``beta * self + alpha * (mat1 @ mat2)`` at the elements of ``self`` only."""
    if self.layout is not torch.sparse_csr:
        raise RuntimeError(f"sampled_addmm: expected self to have sparse csr layout, but got {self.layout}")
    for name, t in (("mat1", mat1), ("mat2", mat2)):
        if t.layout is not torch.strided:
            raise RuntimeError(f"sampled_addmm: expected {name} to have strided layout, but got {t.layout}")
        if t.dtype is not self.dtype:
            raise RuntimeError(f"sampled_addmm: expected {name} and self to have one dtype")
        if t.dim() < 2 or t.shape[:-2] != self.shape[:-2]:
            raise RuntimeError(f"sampled_addmm: expected self and {name} to have the same batch sizes")
    if mat1.shape[-1] != mat2.shape[-2]:
        raise RuntimeError("sampled_addmm: mat1 and mat2 shapes cannot be multiplied")
    if (mat1.shape[-2], mat2.shape[-1]) != tuple(self.shape[-2:]):
        raise RuntimeError("sampled_addmm: self.shape does not match the product of mat1 and mat2")
    left, right = _take_rows(mat1, _rows(self)), _take_rows(mat2.mT, self.col_indices())
    values = (left * right).sum(-1) * alpha
    return _csr(self, values if beta == 0 else values + self.values() * beta)


def _sampled_addmm_out(*args: Any, out: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    return assign(out, _sampled_addmm(*args, **kwargs), "sampled_addmm")


def _mm_reduce(self: torch.Tensor, other: torch.Tensor, reduce: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A CSR matrix times a dense one with another reduction than the sum, and which element won each place."""
    row, column = _rows(self), self.col_indices().to(torch.int64)
    terms = other.index_select(0, column) * self.values().unsqueeze(1)
    size, nnz = (self.shape[0], other.shape[1]), terms.shape[0]
    wide = terms.float() if terms.dtype in _HALF else terms
    out = torch.zeros(size, dtype=wide.dtype, device=terms.device)
    out = out.index_reduce_(0, row, wide, reduce if reduce != "sum" else "mean", include_self=False)
    if reduce == "sum":
        out = torch.zeros_like(out).index_add_(0, row, wide)
    out = out.to(terms.dtype)
    if reduce not in ("amax", "amin"):
        return out, torch.empty(0, dtype=torch.int64, device=terms.device)
    step = torch.arange(nnz, device=terms.device).unsqueeze(1)
    candidate = torch.where(terms == out[row], step, nnz)
    winner = torch.full(size, nnz, dtype=torch.int64, device=terms.device)
    return out, winner.index_reduce_(0, row, candidate, "amin")


def _mm_reduce_backward(
    self: torch.Tensor,
    grad_out: torch.Tensor,
    weight: torch.Tensor,
    reduce: str,
    arg_out: torch.Tensor,
    output_mask: tuple[bool, bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    row, column = _rows(self), self.col_indices().to(torch.int64)
    share = grad_out[row]
    if reduce == "mean":
        count = (self.crow_indices().diff()).to(share.dtype)
        share = share / count[row].unsqueeze(1)
    if reduce in ("amax", "amin"):
        step = torch.arange(row.shape[0], device=row.device).unsqueeze(1)
        share = torch.where(arg_out[row] == step, share, torch.zeros_like(share))
    grad_self = _csr(self, (share * weight.index_select(0, column)).sum(1)) if output_mask[0] else None
    grad_weight = None
    if output_mask[1]:
        grad_weight = torch.zeros_like(weight).index_add_(0, column, share * self.values().unsqueeze(1))
    return grad_self, grad_weight


COMPRESSED_KERNELS: dict[str, Callable[..., Any]] = {
    "add.out": _add_out,
    "addmm.out": _addmm_out,
    "addmv.out": _addmv_out,
    "_to_sparse_csr": _flip("_to_sparse_csr", torch.sparse_csr),
    "_to_sparse_csc": _flip("_to_sparse_csc", torch.sparse_csc),
    "_sparse_csr_sum.dim_dtype": _csr_reduce(torch.Tensor.coalesce),
    "_sparse_csr_prod.dim_dtype": _csr_reduce(lambda t: merge(t, _product_of)),
    "sparse_sampled_addmm": _sampled_addmm,
    "sparse_sampled_addmm.out": _sampled_addmm_out,
    "_sparse_mm_reduce_impl": _mm_reduce,
    "_sparse_mm_reduce_impl_backward": _mm_reduce_backward,
}
"""Kernels of compressed tensors by overload."""
