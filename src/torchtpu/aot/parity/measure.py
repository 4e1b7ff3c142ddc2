"""How far two tensors are apart, and whether rounding explains it."""

from __future__ import annotations

import dataclasses
import math

import torch

__all__ = ["FACTOR", "NONE", "Error", "compare_all", "explained", "measure", "unit"]

FACTOR = 4.0
"""How many times PyTorch CPU's own error is explained: another order of summation, another exponential function."""


@dataclasses.dataclass(frozen=True)
class Error:
    """A difference from a reference.

    Attributes:
        absolute: the largest difference of an element.
        relative: the norm of the difference over the reference's norm; for integers the share of elements that
            differ. Infinite when NaN or infinity is not where the reference has it, or a shape differs.
        note: what makes it infinite; else empty.
    """

    absolute: float = 0.0
    relative: float = 0.0
    note: str = ""

    def worse(self, other: Error) -> Error:
        """The larger of two errors, in both measures."""
        return Error(max(self.absolute, other.absolute), max(self.relative, other.relative), self.note or other.note)


NONE = Error()


def unit(dtype: torch.dtype) -> float:
    """The distance from 1 to the next number of a floating-point dtype."""
    return torch.finfo(dtype).eps


def explained(device: Error, cpu: Error, dtype: torch.dtype) -> bool:
    """Whether rounding explains the device's error, given PyTorch CPU's, both from the same reference."""
    if math.isinf(device.relative):
        return math.isinf(cpu.relative) and device.note == cpu.note
    return device.relative <= FACTOR * cpu.relative + unit(dtype)


def measure(actual: torch.Tensor, expected: torch.Tensor, scale: float = 0.0) -> Error:
    """The error of a tensor.

    Args:
        actual: on any device, in any dtype.
        expected: the reference.
        scale: the root mean square that the reference has at least; for references that are near zero.
    """
    if actual.shape != expected.shape:
        return Error(math.inf, math.inf, f"shape {list(actual.shape)}, not {list(expected.shape)}")
    if not actual.numel():
        return NONE
    floats = actual.is_floating_point() or actual.is_complex()
    if floats != (expected.is_floating_point() or expected.is_complex()):
        return Error(math.inf, math.inf, f"{actual.dtype}, not {expected.dtype}")
    a, e = _wide(actual), _wide(expected)
    if not floats:
        differ = a != e
        return Error((a - e).abs().max().item(), differ.double().mean().item())
    odd, expected_odd = _odd(a), _odd(e)
    if not torch.equal(odd, expected_odd):
        count = int((odd != expected_odd).sum())
        return Error(math.inf, math.inf, f"NaN or infinity differs at {count} of {a.numel()} elements")
    finite = odd == 0
    a, e = a[finite], e[finite]
    if not a.numel():
        return NONE
    difference = (a - e).abs()
    size = max(torch.linalg.vector_norm(e).item(), scale * math.sqrt(e.numel()))
    distance = torch.linalg.vector_norm(difference).item()
    return Error(difference.max().item(), distance / size if size else (math.inf if distance else 0.0))


def compare_all(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> Error:
    """The largest error of several tensors; infinite if there are not as many."""
    if len(actual) != len(expected):
        return Error(math.inf, math.inf, f"{len(actual)} tensors, not {len(expected)}")
    worst = NONE
    for a, e in zip(actual, expected, strict=True):
        worst = worst.worse(measure(a, e))
    return worst


def _wide(x: torch.Tensor) -> torch.Tensor:
    """A copy on the CPU in the widest dtype. The lowest and highest number of a dtype, which masks are made of, become
    infinite: they depend on the dtype.
    """
    x = x.detach().cpu()
    if x.is_complex():
        return torch.view_as_real(x.resolve_conj().to(torch.complex128))
    if not x.is_floating_point():
        return x.to(torch.float64 if x.dtype != torch.int64 else torch.int64)
    limit = torch.finfo(x.dtype).max
    wide = x.to(torch.float64)
    return torch.where(wide.abs() >= limit, wide.sign() * math.inf, wide)


def _odd(x: torch.Tensor) -> torch.Tensor:
    """0 for a number, 1 and -1 for infinities, 2 for NaN."""
    signs = torch.where(x.isinf(), x.sign(), torch.zeros_like(x))
    return torch.where(x.isnan(), torch.full_like(x, 2.0), signs)
