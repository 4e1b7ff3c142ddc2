"""Matrix products: dense, scaled (float8) and grouped (mixture of experts)."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import torch

from torchtpu.lowering.dtypes import to_jax
from torchtpu.lowering.precision import accumulator, einsum, matmul_precision, narrow, product
from torchtpu.lowering.promotion import cast
from torchtpu.lowering.registry import lowering


def _is(number, value) -> bool:
    """Whether a number is the constant ``value``; an operand of the program never is."""
    return isinstance(number, int | float) and number == value


def _combine(self, new, beta, alpha, dtype):
    """``beta * self + alpha * new``; as in BLAS, ``self`` is not read when beta is zero."""
    work = new.dtype
    if not _is(alpha, 1):
        new = new * cast(alpha, work)
    if _is(beta, 0):
        return cast(jnp.broadcast_to(new, jnp.broadcast_shapes(self.shape, new.shape)), dtype)
    self = cast(self, work)
    if not _is(beta, 1):
        beta = cast(beta, work)
        self = jnp.where(beta == 0, jnp.zeros((), work), self * beta)
    return cast(self + new, dtype)


@lowering("mm", "bmm", "mv", "matmul", "linalg_matmul")
def mm(self, other=None, mat2=None, vec=None):
    other = next(x for x in (other, mat2, vec) if x is not None)
    return cast(product(self, other), self.dtype)


@lowering("mm.dtype", "bmm.dtype")
def mm_dtype(self, mat2, out_dtype):
    return cast(product(self, mat2), to_jax(out_dtype))


@lowering("dot")
def dot(self, tensor):
    return cast(product(self, tensor), self.dtype)


@lowering("_int_mm")
def int_mm(self, mat2):
    return jnp.matmul(self, mat2, preferred_element_type=jnp.int32)


@lowering("vdot")
def vdot(self, other):
    return cast(product(self.conj(), other), self.dtype)


@lowering("outer", "ger")
def outer(self, vec2):
    dtype = jnp.promote_types(self.dtype, vec2.dtype)
    return cast(self, dtype)[:, None] * cast(vec2, dtype)[None, :]


@lowering("addmm", "addmv", "baddbmm")
def addmm(self, mat1=None, mat2=None, beta=1, alpha=1, *, mat=None, vec=None, batch1=None, batch2=None):
    x = next(x for x in (mat1, mat, batch1) if x is not None)
    y = next(x for x in (mat2, vec, batch2) if x is not None)
    return _combine(self, product(x, y), beta, alpha, self.dtype)


@lowering("addmm.dtype", "baddbmm.dtype")
def addmm_dtype(self, mat1=None, mat2=None, out_dtype=None, beta=1, alpha=1, *, batch1=None, batch2=None):
    x, y = (mat1, mat2) if mat1 is not None else (batch1, batch2)
    return _combine(self, product(x, y), beta, alpha, to_jax(out_dtype))


@lowering("_addmm_activation")
def addmm_activation(self, mat1, mat2, beta=1, alpha=1, use_gelu=False):
    y = _combine(self, product(mat1, mat2), beta, alpha, accumulator(mat1.dtype))
    return cast(jax.nn.gelu(y, approximate=False) if use_gelu else jax.nn.relu(y), self.dtype)


@lowering("addbmm")
def addbmm(self, batch1, batch2, beta=1, alpha=1):
    return _combine(self, einsum("bij,bjk->ik", batch1, batch2), beta, alpha, self.dtype)


@lowering("addr")
def addr(self, vec1, vec2, beta=1, alpha=1):
    dtype = jnp.promote_types(self.dtype, jnp.promote_types(vec1.dtype, vec2.dtype))
    if dtype == jnp.bool_:
        new = vec1[:, None] & vec2[None, :] & jnp.asarray(alpha, bool)
        return (self & jnp.asarray(beta, bool)) | new
    work = accumulator(dtype)
    return _combine(self, cast(vec1, work)[:, None] * cast(vec2, work)[None, :], beta, alpha, dtype)


@lowering("linear")
def linear(input, weight, bias=None):
    y = product(input, weight.T)
    return cast(y if bias is None else y + cast(bias, y.dtype), input.dtype)


@lowering("linear_backward")
def linear_backward(self, grad_output, weight, output_mask):
    rows = grad_output.reshape(-1, grad_output.shape[-1])
    return (
        cast(product(grad_output, weight), self.dtype) if output_mask[0] else None,
        cast(product(rows.T, self.reshape(-1, self.shape[-1])), weight.dtype) if output_mask[1] else None,
        cast(cast(rows, accumulator(rows.dtype)).sum(0), weight.dtype) if output_mask[2] else None,
    )


@lowering("_trilinear")
def trilinear(i1, i2, i3, expand1, expand2, expand3, sumdim, unroll_dim=1):
    """Sum of the product of three tensors, each with new axes at ``expandN``, over ``sumdim``: one einsum."""
    rank = i1.ndim + len(expand1)
    terms, operands = [], []
    for x, new in zip((i1, i2, i3), (expand1, expand2, expand3), strict=True):
        axes = [d for d in range(rank) if d not in {e % rank for e in new}]
        axes = [d for d, n in zip(axes, x.shape, strict=True) if n != 1]
        operands.append(x.reshape([n for n in x.shape if n != 1]))
        terms.append("".join(chr(97 + d) for d in axes))
    summed = {d % rank for d in sumdim}
    used = "".join(terms)
    kept = [d for d in range(rank) if d not in summed]
    result = "".join(chr(97 + d) for d in kept if chr(97 + d) in used)
    y = einsum(",".join(terms) + "->" + result, *operands)
    return cast(y.reshape([_extent(d, terms, operands) for d in kept]), i1.dtype)


def _extent(dim, terms, operands) -> int:
    letter = chr(97 + dim)
    return next((x.shape[t.index(letter)] for t, x in zip(terms, operands, strict=True) if letter in t), 1)


def _wide(x):
    """A float8 array as bfloat16, which holds every float8 value; XLA multiplies that on every platform."""
    return cast(x, jnp.bfloat16) if x.dtype.itemsize == 1 else x


def _blocks(scale, shape):
    """Scales of blocks, repeated to one for each element."""
    for axis, (n, blocks) in enumerate(zip(shape, scale.shape, strict=True)):
        if blocks not in (1, n):
            scale = jnp.repeat(scale, -(-n // blocks), axis=axis, total_repeat_length=n)
    return scale


@lowering("_scaled_mm")
def scaled_mm(self, mat2, scale_a, scale_b, bias=None, scale_result=None, out_dtype=None, use_fast_accum=False):
    """Float8 product; scales are for the tensor, for each row (of ``self``) and column (of ``mat2``), or for blocks."""
    scale_a, scale_b = cast(scale_a, jnp.float32), cast(scale_b, jnp.float32)
    x, y = _wide(self), _wide(mat2)
    outer_a = scale_a.size == 1 or scale_a.shape == (self.shape[0], 1)
    outer_b = scale_b.size == 1 or scale_b.shape == (1, mat2.shape[1])
    if outer_a and outer_b:
        scale_a, scale_b = (s.reshape(()) if s.size == 1 else s for s in (scale_a, scale_b))
        acc = product(x, y) * scale_a * scale_b
    elif scale_a.ndim == scale_b.ndim == 2:
        x = cast(x, jnp.float32) * _blocks(scale_a, x.shape)
        acc = product(x, cast(y, jnp.float32) * _blocks(scale_b, y.shape))
    else:
        raise NotImplementedError(
            f"_scaled_mm: scales of shapes {scale_a.shape} and {scale_b.shape} for {self.shape} @ {mat2.shape}; "
            "supported: one number, (rows, 1) with (1, columns), or a 2-d grid of blocks"
        )
    if bias is not None:
        acc = acc + cast(bias, jnp.float32)
    dtype = self.dtype if out_dtype is None else to_jax(out_dtype)
    if scale_result is not None and dtype.itemsize == 1:
        acc = acc / cast(scale_result, jnp.float32).reshape(())
    if dtype == jnp.float8_e4m3fnuz:  # no infinity: too large a number becomes the largest
        acc = jnp.clip(acc, -jnp.finfo(dtype).max.astype(acc.dtype), jnp.finfo(dtype).max.astype(acc.dtype))
    return cast(acc, dtype)


@lowering("_scaled_mm_v2")
def scaled_mm_v2(
    self, mat2, scale_a, recipe_a, swizzle_a, scale_b, recipe_b, swizzle_b, bias, out_dtype, contraction_dim=(),
    use_fast_accum=False,
):  # fmt: skip
    if len(scale_a) != 1 or len(scale_b) != 1 or any(swizzle_a) or any(swizzle_b):
        raise NotImplementedError("_scaled_mm_v2: one unswizzled scale tensor for each operand is supported")
    return scaled_mm(self, mat2, scale_a[0], scale_b[0], bias, None, out_dtype)


def _ragged(x, y, sizes, contracting, ragged=(0,), group=(0,)):
    numbers = jax.lax.RaggedDotDimensionNumbers((contracting, ((), ())), list(ragged), list(group))
    wide = accumulator(x.dtype)

    def grouped(x, y, sizes, dtype):
        return jax.lax.ragged_dot_general(
            x, y, sizes, numbers, precision=matmul_precision(), preferred_element_type=dtype
        )

    def run(x, y, sizes, dtype=wide):
        # XLA:CPU has no bfloat16 product for all of these forms.
        return jax.lax.platform_dependent(
            x,
            y,
            sizes,
            cpu=lambda x, y, n: cast(grouped(cast(x, wide), cast(y, wide), n, wide), dtype),
            default=lambda x, y, n: grouped(x, y, n, dtype),
        )

    return narrow(run, functools.partial(run, dtype=x.dtype), x, y, sizes)


@lowering("_grouped_mm")
def grouped_mm(self, mat2, offs=None, bias=None, out_dtype=None):
    """One product for each group; ``offs`` holds the end of every group along the axis that they share."""
    if offs is None:
        acc = product(self, mat2)
    else:
        sizes = jnp.diff(offs.astype(jnp.int32), prepend=jnp.zeros((1,), jnp.int32))
        match self.ndim, mat2.ndim:
            case 2, 3:  # the rows of self
                acc = _ragged(self, mat2, sizes, ((1,), (1,)))
            case 3, 2:  # the columns of mat2
                acc = _ragged(mat2, self, sizes, ((0,), (2,)), ragged=(1,)).T
            case 2, 2:  # the contracted axis: one result for each group
                acc = _ragged(self, mat2, sizes, ((1,), (0,)), ragged=(1,), group=())
            case _:
                acc = product(self, mat2)
    if bias is not None:
        acc = acc + cast(bias, acc.dtype)
    return cast(acc, self.dtype if out_dtype is None else to_jax(out_dtype))


@lowering("_scaled_grouped_mm")
def scaled_grouped_mm(
    self, mat2, scale_a, scale_b, offs=None, bias=None, scale_result=None, out_dtype=None, use_fast_accum=False
):
    """Rowwise scaled ``_grouped_mm``: scales follow the rows of ``self`` and the columns of ``mat2``."""
    if self.ndim == mat2.ndim == 2:
        raise NotImplementedError("_scaled_grouped_mm of two matrices: scales differ from group to group")
    acc = grouped_mm(_wide(self), _wide(mat2), offs, out_dtype=torch.float32)
    if (self.ndim, mat2.ndim) == (2, 3):
        ends = offs.astype(jnp.int32)
        row_group = jnp.searchsorted(ends, jnp.arange(self.shape[0], dtype=jnp.int32), side="right")
        acc = acc * scale_a[:, None] * scale_b[jnp.minimum(row_group, len(ends) - 1)]
    elif (self.ndim, mat2.ndim) == (3, 2):
        ends = offs.astype(jnp.int32)
        column_group = jnp.searchsorted(ends, jnp.arange(mat2.shape[1], dtype=jnp.int32), side="right")
        acc = acc * scale_a[jnp.minimum(column_group, len(ends) - 1)].T * scale_b[None, :]
    else:
        acc = acc * scale_a[:, :, None] * scale_b[:, None, :]
    return cast(acc, to_jax(out_dtype) if out_dtype is not None else jnp.bfloat16)
