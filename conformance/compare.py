"""One comparison: what an operator gave on the device against what it gave on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.testing._comparison import default_tolerances
from torch.testing._internal.common_device_type import precisionOverride, toleranceOverride
from torch.testing._internal.opinfo.core import DecorateInfo
from torch.utils._pytree import tree_leaves

from conformance.tolerances import OVERRIDES, REFERENCE_DTYPES
from conformance.transfer import DEVICE

__all__ = ["Difference", "Verdict", "compare", "same_values", "tolerances"]

Tolerance = dict[torch.dtype, tuple[float, float]]
"""(rtol, atol) by dtype."""


class Difference(AssertionError):
    """The device's result is not the CPU's."""


@dataclass
class Verdict:
    """How two results agree: whether only a double-precision reference showed it, and whether strides differ."""

    by_reference: bool = False
    strides: str | None = None


def tolerances(info: Any, name: str, suite: str = "") -> Tolerance:
    """The database's own overrides for CPU tests of an entry, then the visible table's for a suite."""
    found: Tolerance = {}
    for decorate in getattr(info, "decorators", ()) or ():
        if isinstance(decorate, DecorateInfo):
            if decorate.device_type not in (None, "cpu") or decorate.active_if is False:
                continue
            given = decorate.decorators
        else:
            given = [decorate]
        for d in given:
            if isinstance(d, toleranceOverride):
                pairs = {k: (v.rtol, v.atol) for k, v in d.d.items()}
            elif isinstance(d, precisionOverride):
                pairs = {k: (default_tolerances(k)[0], v) for k, v in d.d.items()}
            else:
                continue
            for dtype, (rtol, atol) in pairs.items():
                old = found.get(dtype, (0.0, 0.0))
                found[dtype] = (max(rtol, old[0]), max(atol, old[1]))
    for override in OVERRIDES:
        if override.matches(name, suite):
            for dtype in override.dtypes:
                old = found.get(dtype, (0.0, 0.0))
                found[dtype] = (max(override.rtol, old[0]), max(override.atol, old[1]))
    return found


def compare(
    actual: Any, expected: Any, tolerance: Tolerance, reference: Callable[[], Any] | None = None, exact: bool = True
) -> Verdict:
    """Compare two trees of results; ``actual`` lives on the device.

    Args:
        actual: results on the device.
        expected: results on the CPU.
        tolerance: overrides of the default tolerances.
        reference: gives the double-precision results, asked only when low precision results differ.
        exact: compare values too; a random result agrees in shape and dtype only.

    Raises:
        Difference: says what differs first.
    """
    a, e = tree_leaves(actual), tree_leaves(expected)
    if len(a) != len(e):
        raise Difference(f"{len(a)} results for {len(e)}")
    verdict = Verdict()
    references: list[Any] | None = None
    for i, (x, y) in enumerate(zip(a, e, strict=True)):
        if not isinstance(y, torch.Tensor):
            _compare_plain(x, y, exact)
            continue
        _compare_kind(x, y, i)
        if (
            y.layout is torch.strided
            and not y.is_nested
            and x.stride() != y.stride()
            and y.numel() > 1
            and verdict.strides is None
        ):
            verdict.strides = f"{tuple(x.stride())} for {tuple(y.stride())} at size {tuple(y.shape)}"
        if not exact:
            continue
        x, y = _plain(x), _plain(y)
        try:
            _assert_close(x, y, tolerance)
        except AssertionError as error:
            if reference is not None and y.dtype in REFERENCE_DTYPES and references is None:
                references = tree_leaves(reference())
            if not references or len(references) != len(e) or not _as_accurate(x, y, references[i], tolerance):
                raise Difference(" ".join(str(error).split())) from error
            verdict.by_reference = True
    return verdict


def same_values(a: Any, b: Any) -> bool:
    """Whether two results of one function on the CPU have the same values."""
    for x, y in zip(tree_leaves(a), tree_leaves(b), strict=True):
        if isinstance(y, torch.Tensor):
            try:
                _assert_close(_plain(x), _plain(y), {})
            except AssertionError:
                return False
    return True


def _compare_plain(x: Any, y: Any, exact: bool) -> None:
    if type(x) is not type(y):
        raise Difference(f"{type(x).__name__} for {type(y).__name__}")
    if isinstance(y, bool | int | float | complex) and exact:
        torch.testing.assert_close(x, y, equal_nan=True)
    elif isinstance(y, torch.dtype | torch.Size | tuple) and x != y:
        raise Difference(f"{x} for {y}")


def _compare_kind(x: Any, y: torch.Tensor, i: int) -> None:
    if not isinstance(x, torch.Tensor):
        raise Difference(f"result {i}: {type(x).__name__} for a tensor")
    if x.device.type != DEVICE and y.device.type == "cpu":
        raise Difference(f"result {i} is on {x.device}")
    if y.is_nested and x.is_nested and y.layout is torch.jagged:
        # The ragged size is a symbol of each tensor's own: what it stands for is compared.
        same = torch.equal(x.offsets().cpu(), y.offsets().cpu()) and x.dim() == y.dim()
        if x.dtype != y.dtype or not same or x.values().shape != y.values().shape:
            raise Difference(f"result {i}: jagged {x.dtype}{list(x.shape)} for {y.dtype}{list(y.shape)}")
        return
    if x.dtype != y.dtype or x.shape != y.shape or x.layout != y.layout:
        raise Difference(f"result {i}: {x.dtype}{list(x.shape)} {x.layout} for {y.dtype}{list(y.shape)} {y.layout}")


def _plain(t: torch.Tensor) -> torch.Tensor:
    """A dense CPU tensor of a type that arithmetic knows."""
    t = t.detach()
    if t.is_nested:
        t = t.values() if t.layout is torch.jagged else t.to_padded_tensor(0.0)
    t = t.cpu()
    if t.layout is not torch.strided:
        t = t.to_dense()
    t = t.resolve_conj().resolve_neg()
    if t.is_quantized:
        t = t.dequantize()
    if t.dtype is torch.complex32:
        return t.to(torch.complex64)
    return t.to(torch.float32) if t.dtype.itemsize == 1 and t.dtype.is_floating_point else t


def _tolerance(dtype: torch.dtype, tolerance: Tolerance) -> tuple[float, float]:
    rtol, atol = default_tolerances(dtype)
    more = tolerance.get(dtype, (0.0, 0.0))
    return max(rtol, more[0]), max(atol, more[1])


def _assert_close(x: torch.Tensor, y: torch.Tensor, tolerance: Tolerance) -> None:
    rtol, atol = _tolerance(y.dtype, tolerance)
    torch.testing.assert_close(x, y, rtol=rtol, atol=atol, equal_nan=True, check_stride=False)


def _as_accurate(x: torch.Tensor, y: torch.Tensor, reference: Any, tolerance: Tolerance) -> bool:
    """Whether the device is at least as near to the double-precision result as the CPU is, within one tolerance of the
    dtype.
    """
    if not isinstance(reference, torch.Tensor) or reference.shape != y.shape:
        return False
    wide = torch.complex128 if y.dtype.is_complex else torch.float64
    r = _plain(reference)
    if r.dtype != wide:
        return False
    rtol, atol = _tolerance(y.dtype, tolerance)
    rounded = r.to(y.dtype).to(wide)
    x, y = x.to(wide), y.to(wide)
    same = (x == rounded) | (x == y) | (x.isnan() & (rounded.isnan() | y.isnan()))
    cpu = (y - r).abs()
    worst = cpu[cpu.isfinite()].max() if bool(cpu.isfinite().any()) else torch.zeros((), dtype=torch.float64)
    near = (x - r).abs() <= worst + atol + rtol * r.abs()
    return bool((same | (near & x.isfinite())).all())
