"""Sparse COO tensors: the operators whose CPU kernels read memory, written with dense operators on indices and values.

What is only geometry, or the same function of every value, is PyTorch's own code (``csrc/sparse.cpp``). Here an
element is found by its *key*: its place in the flattened sparse dimensions. Where the number of elements depends on the
data (coalescing, the intersection of two patterns, a product of sparse matrices) Python waits for that number; all else
stays on the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["SPARSE_KERNELS", "assign", "coo", "merge", "multiply"]

_aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)


def coo(indices: torch.Tensor, values: torch.Tensor, size: Sequence[int], coalesced: bool = False) -> torch.Tensor:
    """A sparse tensor of these parts, unchecked: the indices are known to be right."""
    return _aten._sparse_coo_tensor_with_dims_and_tensors(
        indices.shape[0],
        values.dim() - 1,
        size,
        indices,
        values,
        dtype=values.dtype,
        layout=torch.sparse_coo,
        device=values.device,
        is_coalesced=coalesced,
    )


def assign(out: torch.Tensor, result: torch.Tensor, name: str) -> torch.Tensor:
    """Write a result into the argument of an in-place or out= form, whose dtype stays."""
    if not torch.can_cast(result.dtype, out.dtype):
        raise RuntimeError(f"result type {result.dtype} can't be cast to the desired output type {out.dtype} in {name}")
    if out.layout is torch.strided:
        return (out if out.shape == result.shape else out.resize_(result.shape)).copy_(result)
    if out.layout is torch.sparse_coo:
        return _aten.copy_sparse_to_sparse_(out, result)
    return out.resize_as_sparse_(result).copy_(result)


def _like_out(function: Callable[..., torch.Tensor], name: str) -> Callable[..., torch.Tensor]:
    """The out= form of a functional kernel."""
    return lambda *args, out, **kwargs: assign(out, function(*args, **kwargs), name)


def _keys(indices: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """The place of every element in the flattened dimensions that the rows of ``indices`` stand for."""
    key = torch.zeros(indices.shape[1], dtype=torch.int64, device=indices.device)
    for row, size in zip(indices.unbind(0), sizes, strict=True):
        key = key * size + row
    return key


def _runs(key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(the order that sorts the keys, for each key so sorted the number of smaller different ones)."""
    ordered, order = torch.sort(key, stable=True)
    new = (ordered[1:] != ordered[:-1]).to(torch.int64)
    return order, torch.nn.functional.pad(new, (1, 0)).cumsum(0)


def _accumulate(values: torch.Tensor, place: torch.Tensor, rows: int) -> torch.Tensor:
    """Rows of sums of the values that go to each place; low precision is summed in float32, bool is or-ed."""
    if values.dtype is torch.bool:
        return _accumulate(values.to(torch.int32), place, rows).to(torch.bool)
    wide = values.float() if values.dtype in _HALF else values
    zeros = torch.zeros((rows, *values.shape[1:]), dtype=wide.dtype, device=values.device)
    return zeros.index_add_(0, place, wide).to(values.dtype)


def merge(self: torch.Tensor, combine: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]) -> torch.Tensor:
    """A coalesced tensor, where ``combine(values, place, rows)`` makes one row of those that go to one place."""
    indices, values, nnz = self._indices(), self._values(), self._nnz()
    if nnz < 2:
        return coo(indices.clone(), values.clone(), self.shape, True)
    order, run = _runs(_keys(indices, self.shape[: self.sparse_dim()]))
    combined = combine(values[order], run, nnz)
    # Equal keys write equal indices, so the order of writing does not matter. Both results have room for every element;
    # the windows on the front of them are what programs see, so that these two do not depend on how many are left.
    place = torch.zeros_like(indices).index_copy_(1, run, indices[:, order])
    count = int(run[-1].item()) + 1
    return coo(place[:, :count], combined[:count], self.shape, True)


def _coalesce(self: torch.Tensor) -> torch.Tensor:
    return merge(self, _accumulate)


def _find(t: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(position of each key among the elements of a coalesced tensor, whether it is there)."""
    known = _keys(t._indices(), t.shape[: t.sparse_dim()])
    position = torch.searchsorted(known, key).clamp_(max=known.shape[0] - 1)
    return position, known[position] == key


def _values_at(t: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """The values of a coalesced tensor at these keys: zero where it has none."""
    if t._nnz() == 0:
        return torch.zeros((key.shape[0], *t._values().shape[1:]), dtype=t.dtype, device=t.device)
    position, there = _find(t, key)
    values = t._values()[position]
    return torch.where(there.reshape(-1, *(1,) * (values.dim() - 1)), values, torch.zeros_like(values))


def _add(self: torch.Tensor, other: torch.Tensor, alpha: Any, dtype: torch.dtype) -> torch.Tensor:
    if self.layout is torch.strided:
        return _add_to_dense(self, other, alpha, dtype)
    if other.layout is torch.strided:
        raise RuntimeError("add(sparse, dense) is not supported. Use add(dense, sparse) instead.")
    if self.shape != other.shape:
        raise RuntimeError(
            f"add: expected sizes of 'self' and 'other' to match, but {list(self.shape)} != {list(other.shape)}"
        )
    scaled = other._values().to(dtype)
    scaled = scaled if alpha == 1 else scaled * alpha
    if other._nnz() == 0:
        return coo(self._indices().clone(), self._values().to(dtype, copy=True), self.shape, self.is_coalesced())
    if self._nnz() == 0:
        return coo(other._indices().clone(), scaled.clone(), self.shape, other.is_coalesced())
    if self.sparse_dim() != other.sparse_dim():
        raise RuntimeError(
            "add: expected 'self' and 'other' to have same density, but 'self' has "
            f"{self.sparse_dim()} sparse dimensions while 'other' has {other.sparse_dim()} sparse dimensions"
        )
    indices = torch.cat([self._indices(), other._indices()], 1)
    result = coo(indices, torch.cat([self._values().to(dtype), scaled]), self.shape)
    coalesced = self.is_coalesced() and other.is_coalesced()
    return result.coalesce() if coalesced or result._nnz() > result.numel() else result


def _add_to_dense(dense: torch.Tensor, sparse: torch.Tensor, alpha: Any, dtype: torch.dtype) -> torch.Tensor:
    """A new dense tensor with the elements of a sparse one added where they belong."""
    if dense.shape != sparse.shape:
        raise RuntimeError(
            f"add: expected 'self' and 'other' to have same size, but self has size {list(dense.shape)} while other "
            f"has size {list(sparse.shape)} (FYI: dense-sparse addition does not currently support broadcasting)"
        )
    values = sparse._values().to(dtype)
    values = values if alpha == 1 else values * alpha
    if sparse._nnz() == 0 or dense.numel() == 0:
        return dense.to(dtype, copy=True)
    rows = math.prod(sparse.shape[: sparse.sparse_dim()])
    key = _keys(sparse._indices(), sparse.shape[: sparse.sparse_dim()])
    flat = dense.to(dtype).reshape(rows, *sparse.shape[sparse.sparse_dim() :])
    if dtype is torch.bool:
        return (flat | _accumulate(values, key, rows)).reshape(dense.shape)
    if dtype in _HALF and not sparse.is_coalesced():
        return (flat + _accumulate(values, key, rows)).reshape(dense.shape)
    return flat.index_add(0, key, values).reshape(dense.shape)


def _add_out(self: torch.Tensor, other: torch.Tensor, *, alpha: Any = 1, out: torch.Tensor) -> torch.Tensor:
    dtype = torch.promote_types(self.dtype, other.dtype)
    if not torch.can_cast(dtype, out.dtype):
        raise RuntimeError(f"Can't convert result type {dtype} to output {out.dtype} in add operation")
    return assign(out, _add(self, other, alpha, dtype), "add")


def _mul_out(self: Any, other: Any, *, out: torch.Tensor) -> torch.Tensor:
    dtype = torch.result_type(self, other)
    if not torch.can_cast(dtype, out.dtype):
        raise RuntimeError(f"Can't convert result type {dtype} to output {out.dtype} in mul operation")
    if not isinstance(self, torch.Tensor) or not isinstance(other, torch.Tensor):  # a number
        sparse, number = (self, other) if isinstance(self, torch.Tensor) else (other, self)
        result = coo(sparse._indices().clone(), sparse._values() * number, sparse.shape, sparse.is_coalesced())
    elif self.layout is torch.strided:
        result = _mul_dense(other, self)
    elif other.layout is torch.strided:
        result = _mul_dense(self, other)
    elif 0 in (self.dim(), other.dim()):
        number, tensor = (self, other) if self.dim() == 0 else (other, self)
        result = _mul_dense(tensor, number.to_dense())
    else:
        result = _mul_sparse(self, other)
    return assign(out, result.to(dtype), "mul")


def _mul_dense(sparse: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
    """Every element times the dense tensor's at its place."""
    size = torch.broadcast_shapes(sparse.shape, dense.shape)
    if sparse.shape != size:
        sparse = torch._sparse_broadcast_to(sparse, size)
    indices, values, dim = sparse._indices(), sparse._values(), sparse.sparse_dim()
    if dense.dim() > sparse.dense_dim():
        whole = dense.expand(size) if dense.dim() == len(size) or dim else dense
        dense = whole[tuple(indices.unbind(0))] if dim else whole.expand(values.shape)
    return coo(indices.clone(), values * dense, size, sparse.is_coalesced())


def _mul_sparse(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The product on the elements that both have."""
    if self.shape != other.shape:
        raise RuntimeError(
            "mul: expected 'self' and 'other' to have same sizes when both are sparse, but "
            f"{list(self.shape)} != {list(other.shape)}"
        )
    if self.sparse_dim() != other.sparse_dim():
        raise RuntimeError("mul: expects sparse inputs with equal number of sparse dimensions")
    a, b = self.coalesce(), other.coalesce()
    if a._nnz() == 0 or b._nnz() == 0:
        kept = torch.zeros(0, dtype=torch.int64, device=a.device)
        position = kept
    else:
        position, there = _find(b, _keys(a._indices(), a.shape[: a.sparse_dim()]))
        kept = there.nonzero().squeeze(1)
        position = position[kept]
    return coo(a._indices()[:, kept], a._values()[kept] * b._values()[position], a.shape, True)


def multiply(indices: torch.Tensor, values: torch.Tensor, rows: int, dense: torch.Tensor) -> torch.Tensor:
    """The product of a sparse matrix with this many rows and a dense one, without the sparse one's layout."""
    row, column = indices.unbind(0)
    wide = torch.float32 if values.dtype in _HALF else values.dtype
    scaled = dense.index_select(0, column).to(wide) * values.to(wide).unsqueeze(1)
    return _accumulate(scaled, row, rows).to(values.dtype)


def _addmm(
    self: torch.Tensor, mat1: torch.Tensor, mat2: torch.Tensor, *, beta: Any = 1, alpha: Any = 1
) -> torch.Tensor:
    if mat1.layout is not torch.sparse_coo or mat1.sparse_dim() != 2 or mat1.dense_dim():
        raise RuntimeError(f"addmm: expected a sparse matrix as 'mat1', got {mat1.layout} of {mat1.dim()} dimensions")
    if mat2.layout is not torch.strided or mat2.dim() != 2:
        raise RuntimeError(f"addmm: expected a dense matrix as 'mat2', got {mat2.layout} of {mat2.dim()} dimensions")
    if mat1.shape[1] != mat2.shape[0]:
        raise RuntimeError(f"addmm: Argument #3 (dense): Expected dim 0 size {mat1.shape[1]}, got {mat2.shape[0]}")
    if not self.dtype == mat1.dtype == mat2.dtype:
        raise RuntimeError(f"addmm: expected tensors of one dtype, got {self.dtype}, {mat1.dtype} and {mat2.dtype}")
    size = (mat1.shape[0], mat2.shape[1])
    base = self.expand(size)
    product = multiply(mat1._indices(), mat1._values(), size[0], mat2)
    product = product if alpha == 1 else product * alpha
    if beta == 0:
        return product
    return product + (base if beta == 1 else base * beta)


def _addmm_(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return self.copy_(_addmm(self, *args, **kwargs))


def _bmm(self: torch.Tensor, mat2: torch.Tensor) -> torch.Tensor:
    if self.layout is torch.strided or mat2.layout is not torch.strided:
        raise RuntimeError("bmm_sparse: Tensor 'self' must be sparse and 'mat2' dense")
    if self.dense_dim():
        raise RuntimeError(f"bmm_sparse: Tensor 'self' must have 0 dense dims, but has {self.dense_dim()}")
    if self.sparse_dim() != 3 or mat2.dim() != 3:
        raise RuntimeError("bmm_sparse: Tensors 'self' and 'mat2' must have 3 dims")
    if self.shape[0] != mat2.shape[0] or self.shape[2] != mat2.shape[1]:
        raise RuntimeError("bmm_sparse: sizes of 'self' and 'mat2' do not match")
    batch, row, column = self._indices().unbind(0)
    batches, rows, inner = self.shape
    indices = torch.stack([batch * rows + row, batch * inner + column])
    product = multiply(indices, self._values(), batches * rows, mat2.reshape(batches * inner, mat2.shape[2]))
    return product.reshape(batches, rows, mat2.shape[2])


def _expand_runs(start: torch.Tensor, length: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For runs of positions, ``start[i]`` on for ``length[i]``: (the run of each position, the position)."""
    end = length.cumsum(0)
    total = int(end[-1].item()) if end.numel() else 0
    step = torch.arange(total, device=start.device)
    run = torch.searchsorted(end, step, right=True)
    return run, start[run] + step - (end - length)[run]


def _matmul(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The product of two sparse matrices: each element of the first meets a row of the second."""
    for t in (self, other):
        if t.sparse_dim() != 2 or t.dense_dim():
            raise RuntimeError(f"sparse_sparse_matmul: expected a sparse matrix, got {list(t.shape)}")
    if self.shape[1] != other.shape[0]:
        raise RuntimeError(
            f"mat1 and mat2 shapes cannot be multiplied ({self.shape[0]}x{self.shape[1]} and "
            f"{other.shape[0]}x{other.shape[1]})"
        )
    if self.dtype is not other.dtype:
        raise RuntimeError(f"mat1 dtype {self.dtype} does not match mat2 dtype {other.dtype}")
    a, b = self.coalesce(), other.coalesce()
    row = b._indices()[0].contiguous()
    inner = a._indices()[1].contiguous()
    start, end = torch.searchsorted(row, inner), torch.searchsorted(row, inner, right=True)
    run, position = _expand_runs(start, end - start)
    indices = torch.stack([a._indices()[0][run], b._indices()[1][position]])
    values = a._values()[run] * b._values()[position]
    return coo(indices, values, (self.shape[0], other.shape[1])).coalesce()


def _hspmm(mat1: torch.Tensor, mat2: torch.Tensor) -> torch.Tensor:
    """A sparse matrix times a dense one, keeping only the rows that are not empty."""
    if mat1.sparse_dim() != 2 or mat1.dense_dim() or mat2.dim() != 2:
        raise RuntimeError("hspmm: matrices expected")
    if mat1.shape[1] != mat2.shape[0]:
        raise RuntimeError(f"hspmm: Argument #3: Expected dim 0 size {mat1.shape[1]}, got {mat2.shape[0]}")
    row, column = mat1._indices().unbind(0)
    scaled = mat2.index_select(0, column) * mat1._values().unsqueeze(1)
    result = coo(row.unsqueeze(0), scaled, (mat1.shape[0], mat2.shape[1])).coalesce()
    return coo(result._indices(), result._values(), result.shape)


def _sspaddmm_out(
    self: torch.Tensor,
    mat1: torch.Tensor,
    mat2: torch.Tensor,
    *,
    beta: Any = 1,
    alpha: Any = 1,
    out: torch.Tensor,
) -> torch.Tensor:
    """``beta * self + alpha * (mat1 @ mat2)`` as a sparse matrix; ``smm`` gives an empty ``out`` for ``self``."""
    product = _hspmm(mat1, mat2)
    rows, columns = product._nnz(), mat2.shape[1]
    row = product._indices()[0].repeat_interleave(columns, output_size=rows * columns)
    indices = torch.stack([row, torch.arange(columns, device=row.device).repeat(rows)])
    values = product._values().reshape(-1) * alpha
    if self is not out or self._nnz():
        if self.shape != product.shape:
            raise RuntimeError(f"sspaddmm: Argument #1: Expected size {list(product.shape)}, got {list(self.shape)}")
        indices, values = torch.cat([self._indices(), indices], 1), torch.cat([self._values() * beta, values])
    return assign(out, coo(indices, values, product.shape), "sspaddmm")


def _index_select(self: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    if self.dim() == 0:
        raise IndexError("index_select() cannot be applied to a 0-dim tensor.")
    if not -self.dim() <= dim < self.dim():
        raise IndexError(
            f"Dimension out of range (expected to be in range of [{-self.dim()}, {self.dim() - 1}], but got {dim})"
        )
    if index.dim() != 1 or index.dtype is not torch.int64:
        raise IndexError("index_select() argument index must be 1-D long-tensor.")
    dim %= self.dim()
    size = [*self.shape[:dim], index.shape[0], *self.shape[dim + 1 :]]
    if dim >= self.sparse_dim():
        values = self._values().index_select(dim - self.sparse_dim() + 1, index)
        return coo(self._indices().clone(), values, size, self.is_coalesced())
    index = torch.where(index < 0, index + self.shape[dim], index)
    wrong = bool(((index < 0) | (index >= self.shape[dim])).any().item())
    if wrong:
        raise IndexError(f"index_select(): index out of range for a dimension of size {self.shape[dim]}")
    ordered, order = torch.sort(self._indices()[dim], stable=True)
    start, end = torch.searchsorted(ordered, index), torch.searchsorted(ordered, index, right=True)
    run, position = _expand_runs(start, end - start)
    source = order[position]
    indices = self._indices()[:, source].index_copy(0, torch.tensor([dim], device=run.device), run.unsqueeze(0))
    # Elements come ordered by the new index: for the first dimension that is the order of a coalesced tensor.
    return coo(indices, self._values()[source], size, self.is_coalesced() and dim == 0)


def _sum_backward(grad: torch.Tensor, self: torch.Tensor, dim: Sequence[int]) -> torch.Tensor:
    """The gradient of ``sum(dim)`` at the elements of the input."""
    input, ndim, sparse_dim = self.coalesce(), self.dim(), self.sparse_dim()
    summed = {d % ndim for d in dim}
    kept = [d for d in range(sparse_dim) if d not in summed]
    values = input._values()
    if kept:
        grad = grad.coalesce()
        found = _values_at(grad, _keys(input._indices()[kept], [input.shape[d] for d in kept]))
    else:
        found = grad.unsqueeze(0)
    for d in sorted(summed):
        if d >= sparse_dim:
            found = found.unsqueeze(d - sparse_dim + 1)
    found = found.expand(values.shape).clone(memory_format=torch.contiguous_format)
    return coo(input._indices().clone(), found, input.shape, True)


def _sparse_mask(self: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor at the places where the mask has one."""
    if mask.shape != self.shape:
        raise RuntimeError(
            f"sparse_mask(): operands have incompatible sizes; self has size {list(self.shape)} but mask has size "
            f"{list(mask.shape)}"
        )
    if self is mask:
        return self
    indices, sparse_dim = mask._indices(), mask.sparse_dim()
    if self.layout is torch.strided:
        values = self[tuple(indices.unbind(0))] if sparse_dim else self.expand(mask._values().shape).clone()
    else:
        if self.sparse_dim() != sparse_dim:
            raise RuntimeError("sparse_mask(): expects sparse inputs with equal number of sparse dimensions")
        values = _values_at(self.coalesce(), _keys(indices, mask.shape[:sparse_dim]))
    return coo(indices.clone(), values, mask.shape, mask.is_coalesced())


def _mask_projection(self: torch.Tensor, mask: torch.Tensor, accumulate_matches: bool = False) -> torch.Tensor:
    """The elements where the mask has one, zeros elsewhere: the gradient of ``sparse_mask``."""
    if mask.shape != self.shape:
        raise RuntimeError(
            f"sparse_mask_projection(): operands have incompatible sizes; self has size {list(self.shape)} but mask "
            f"has size {list(mask.shape)}"
        )
    sizes = self.shape[: self.sparse_dim()]
    known, key = torch.sort(_keys(mask._indices(), sizes)).values, _keys(self._indices(), sizes)
    matches = torch.searchsorted(known, key, right=True) - torch.searchsorted(known, key)
    values = self._values()
    matches = matches.reshape(-1, *(1,) * (values.dim() - 1))
    scaled = values * matches.to(values.dtype) if accumulate_matches else values
    kept = torch.where(matches > 0, scaled, torch.zeros_like(values))
    return coo(self._indices().clone(), kept, self.shape, self.is_coalesced())


class _Groups:
    """The elements of a coalesced tensor that differ in one sparse dimension only, for reductions over it."""

    def __init__(self, t: torch.Tensor, dim: int) -> None:
        others = [d for d in range(t.sparse_dim()) if d != dim]
        key = _keys(t._indices()[others], [t.shape[d] for d in others])
        order, run = _runs(key)
        self.of = torch.zeros_like(key).index_copy_(0, order, run)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """For each element, the sum of its group."""
        return _accumulate(values, self.of, values.shape[0])[self.of]

    def amax(self, values: torch.Tensor) -> torch.Tensor:
        """For each element, the largest of its group."""
        low = torch.full_like(values, -math.inf)
        return low.index_reduce_(0, self.of, values, "amax")[self.of]


def _softmax(log: bool) -> Callable[..., torch.Tensor]:
    def kernel(self: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
        if half_to_float:
            raise RuntimeError("softmax with half to float conversion is not supported on CPU")
        input = self.coalesce()
        dim, values = dim % self.dim(), input._values()
        if dim >= input.sparse_dim():
            dense = torch.log_softmax if log else torch.softmax
            result = dense(values, dim - input.sparse_dim() + 1)
        elif input._nnz() == 0:
            result = values.clone()
        else:
            groups = _Groups(input, dim)
            shifted = values - groups.amax(values)
            total = groups.sum(shifted.exp())
            result = shifted - total.log() if log else shifted.exp() / total
        return coo(input._indices().clone(), result, input.shape, True)

    return kernel


def _softmax_backward(log: bool) -> Callable[..., torch.Tensor]:
    def kernel(grad_output: torch.Tensor, output: torch.Tensor, dim: int, self: torch.Tensor) -> torch.Tensor:
        grad, out = grad_output.coalesce(), output.coalesce()
        dim, values, sparse_dim = dim % self.dim(), out._values(), out.sparse_dim()
        given = _values_at(grad, _keys(out._indices(), out.shape[:sparse_dim]))
        weighted = given if log else given * values
        if out._nnz() == 0:
            total = weighted
        elif dim >= sparse_dim:
            total = weighted.sum(dim - sparse_dim + 1, keepdim=True)
        else:
            total = _Groups(out, dim).sum(weighted)
        result = given - values.exp() * total if log else weighted - values * total
        return coo(out._indices().clone(), result, out.shape, True)

    return kernel


SPARSE_KERNELS: dict[str, Callable[..., Any]] = {
    "_coalesce": _coalesce,
    "add.out": _add_out,
    "mul.out": _mul_out,
    "addmm": _addmm,
    "addmm_": _addmm_,
    "addmm.out": _like_out(_addmm, "addmm"),
    "bmm": _bmm,
    "bmm.out": _like_out(_bmm, "bmm"),
    "_sparse_sparse_matmul": _matmul,
    "sspaddmm.out": _sspaddmm_out,
    "hspmm": _hspmm,
    "hspmm.out": _like_out(_hspmm, "hspmm"),
    "index_select": _index_select,
    "sparse_mask": _sparse_mask,
    "_sparse_mask_projection": _mask_projection,
    "_sparse_sum_backward": _sum_backward,
    "_sparse_softmax": _softmax(log=False),
    "_sparse_log_softmax": _softmax(log=True),
    "_sparse_softmax_backward_data": _softmax_backward(log=False),
    "_sparse_log_softmax_backward_data": _softmax_backward(log=True),
}
"""Kernels of COO tensors by overload."""
