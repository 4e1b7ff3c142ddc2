"""c10d's reductions: their numbers, their names, and what each computes on the host."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchtpu.distributed import buffers

__all__ = ["Op", "Reduction", "combine", "working_dtype"]


class Op(enum.IntEnum):
    """``c10d::ReduceOp::RedOpType``."""

    SUM = 0
    AVG = 1
    PRODUCT = 2
    MIN = 3
    MAX = 4
    BAND = 5
    BOR = 6
    BXOR = 7
    PREMUL_SUM = 8


_BITWISE = (Op.BAND, Op.BOR, Op.BXOR)


@dataclass(frozen=True)
class Reduction:
    """How the values of all ranks become one.

    Attributes:
        op: the operation.
        factor: what PREMUL_SUM multiplies this rank's values by; None for the others.
    """

    op: Op
    factor: Any = None

    @classmethod
    def of(cls, number: int, factor: Any = None) -> Reduction:
        """The reduction that c10d asked for: its number, and a number or tensor of one element, or None."""
        if isinstance(factor, torch.Tensor):
            factor = factor.item()
        return cls(Op(number), factor)

    def check(self, dtype: torch.dtype) -> None:
        """Refuse what has no meaning for a dtype.

        Raises:
            TypeError: bits of floating-point or complex numbers, an order or product of complex numbers, or the average
                of booleans.
        """
        number = dtype.is_floating_point or dtype.is_complex
        wrong = (
            (self.op in _BITWISE and number)
            or (self.op in (Op.MIN, Op.MAX) and dtype.is_complex)
            or (self.op in (Op.AVG, Op.PREMUL_SUM) and dtype is torch.bool)
        )
        if wrong:
            raise TypeError(f"ReduceOp.{self.op.name} has no meaning for {dtype}")


_WIDER = {
    torch.bool: torch.uint8,
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.uint64: torch.int64,
    torch.complex32: torch.complex64,
}


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values are reduced: itself, or one that holds it and has arithmetic everywhere."""
    if dtype.is_floating_point and dtype.itemsize == 1:
        return torch.float32
    return _WIDER.get(dtype, dtype)


def combine(values: Sequence[torch.Tensor], reduction: Reduction) -> torch.Tensor:
    """The reduction of one CPU tensor per rank, taken in the order of ranks: equal on every rank, to the bit.

    PREMUL_SUM finds its values multiplied already. Booleans are reduced as NCCL does: a sum says whether any is true.
    """
    dtype = values[0].dtype
    wide = working_dtype(dtype)
    total = buffers.empty(values[0].numel() * wide.itemsize).view(wide).view(values[0].shape)
    if len(values) == 1:
        total.copy_(values[0])
    else:
        _accumulate(total, values[0].to(wide), values[1].to(wide), reduction.op, dtype is torch.bool)
    for x in values[2:]:
        _accumulate(total, total, x.to(wide), reduction.op, dtype is torch.bool)
    return finish(total, reduction, len(values), dtype)


def _accumulate(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, op: Op, boolean: bool) -> None:
    if boolean and op is Op.SUM:
        op = Op.MAX
    _FUNCTIONS.get(op, torch.add)(a, b, out=total)


_FUNCTIONS: dict[Op, Callable[..., torch.Tensor]] = {
    Op.MAX: torch.maximum,
    Op.MIN: torch.minimum,
    Op.PRODUCT: torch.mul,
    Op.BAND: torch.bitwise_and,
    Op.BOR: torch.bitwise_or,
    Op.BXOR: torch.bitwise_xor,
}


def finish(total: torch.Tensor, reduction: Reduction, ranks: int, dtype: torch.dtype) -> torch.Tensor:
    """From the accumulated values to the result: the average's division, and the dtype that was given."""
    if reduction.op is Op.AVG:
        whole = not (total.is_floating_point() or total.is_complex())
        total = total.div_(ranks, rounding_mode="trunc") if whole else total.div_(ranks)
    return total.to(dtype)
