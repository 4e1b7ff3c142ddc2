"""Which operator of a module is at fault: the CPU's operators one by one on the device, with the CPU's operands."""

from __future__ import annotations

import dataclasses
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from torchtpu.aot.parity.measure import NONE, Error, compare_all, explained
from torchtpu.aot.parity.reference import Wider
from torchtpu.aot.parity.structure import tensors

__all__ = ["Draws", "Operator", "Replay", "Trace", "first_difference", "line_of"]

_LIBRARIES = tuple(f"{Path(str(sys.modules[name].__file__)).parent}/" for name in ("torch", "torchtpu"))

_WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float64}

_CPU_ONLY: dict[str, Callable[..., Any]] = {
    "aten._scaled_dot_product_flash_attention_for_cpu.default": (
        lambda query, key, value, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None: (
            torch.nn.functional.scaled_dot_product_attention(
                query, key, value, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale
            )
        )
    ),
}
"""Operators that exist for the CPU alone, as any device computes them; only the first result is compared."""


@dataclasses.dataclass(frozen=True)
class Operator:
    """One operator as it was called.

    Attributes:
        name: such as ``"aten.mm.default"``.
        operands: dtypes and sizes of its tensors.
        results: dtypes of what it returned.
        line: file, line and source of the innermost frame outside torch and torchtpu; in a backward pass that of the
            forward.
        device: the device's error.
        cpu: PyTorch CPU's.
        wrong: whether rounding does not explain the device's.
    """

    name: str
    operands: str
    results: tuple[str, ...]
    line: str
    device: Error = NONE
    cpu: Error = NONE
    wrong: bool = False


class Trace(TorchDispatchMode):
    """Note the operators that a block runs, without views."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[Operator] = []

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _is_view(func):
            return func(*args, **kwargs)
        operands = _describe((args, kwargs))
        prepared = self._before(func, args, kwargs)
        result = func(*args, **kwargs)
        note = Operator(str(func), operands, tuple(_short(x.dtype) for x in tensors(result)), _line())
        self.operators.append(self._after(func, prepared, result, note))
        return result

    def _before(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return None

    def _after(self, func: OpOverload, prepared: Any, result: Any, note: Operator) -> Operator:
        return note


class Draws(Trace):
    """Note the operators that draw random numbers, and whatever ``where`` says as they do."""

    def __init__(self, where: Callable[[], Any]) -> None:
        super().__init__()
        self.where = where
        self.drawn: list[tuple[Any, Operator]] = []

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        before = torch.default_generator.get_state()
        result = super().__torch_dispatch__(func, types, args, kwargs)
        # Attention has the tag for its dropout, and mostly draws nothing.
        given = any(isinstance(x, torch.Generator) for x in pytree.tree_leaves((args, kwargs)))
        if given or not torch.equal(before, torch.default_generator.get_state()):
            self.drawn.append((self.where(), self.operators[-1]))
        return result


class Replay(Trace):
    """Run each of a block's CPU operators on the device as well, and compare both with a wider dtype."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    @property
    def wrong(self) -> Operator | None:
        """The first operator whose error rounding does not explain."""
        return next((x for x in self.operators if x.wrong), None)

    def _before(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Copied: the operator may write to its operands.
        return pytree.tree_map_only(torch.Tensor, lambda x: x.detach().clone(), (args, kwargs))

    def _after(self, func: OpOverload, prepared: Any, result: Any, note: Operator) -> Operator:
        if func._schema.name.startswith("aten::empty") or not tensors(result):
            return note
        args, kwargs = prepared
        portable = _CPU_ONLY.get(str(func))
        dtypes = [x.dtype for x in tensors((args, kwargs, result)) if x.dtype in _WIDER]
        dtype = min(dtypes, key=lambda d: torch.finfo(d).bits, default=torch.float32)
        expected = [x.detach().clone() for x in tensors(result)]
        try:
            got = tensors(_call(portable or func, args, kwargs, self.device, {}))
        except (RuntimeError, NotImplementedError, TypeError) as error:
            # The CPU's own form of something; the device's run has another operator there.
            return dataclasses.replace(note, device=Error(note=f"not compared: {str(error).splitlines()[0]}"))
        reference = self._reference(portable or func, args, kwargs, dtype, expected)
        if portable is not None:
            expected, reference = expected[:1], reference[:1]
        device, cpu = compare_all(got, reference), compare_all(expected, reference)
        wrong = not explained(device, cpu, dtype)
        return dataclasses.replace(note, device=device, cpu=cpu, wrong=wrong)

    def _reference(
        self, function: Any, args: Any, kwargs: Any, dtype: torch.dtype, expected: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """The results in a wider dtype; the CPU's own where the operator has none."""
        try:
            with Wider(_WIDER[dtype]):
                wide = tensors(_call(function, args, kwargs, torch.device("cpu"), {dtype: _WIDER[dtype]}))
        except (RuntimeError, NotImplementedError):
            return expected
        kinds = [x.is_floating_point() for x in expected]
        return wide if [x.is_floating_point() for x in wide] == kinds[: len(wide)] else expected


def first_difference(cpu: list[Operator], device: list[Operator]) -> tuple[Operator | None, Operator | None] | None:
    """The first place where the device's run has another operator or another dtype than the CPU's; attention, which
    has an operator for each device, aside.
    """

    def comparable(operators: list[Operator]) -> list[Operator]:
        return [x for x in operators if "scaled_dot_product" not in x.name]

    left, right = comparable(cpu), comparable(device)
    for a, b in zip(left, right, strict=False):
        if (a.name, a.results) != (b.name, b.results):
            return a, b
    if len(left) == len(right):
        return None
    return (left[len(right)], None) if len(left) > len(right) else (None, right[len(left)])


def _call(function: Any, args: Any, kwargs: Any, device: torch.device, dtypes: dict[torch.dtype, torch.dtype]) -> Any:
    """Call an operator with operands moved to a device and dtypes replaced, also where it names them."""

    def change(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return x.to(device=device, dtype=dtypes.get(x.dtype, x.dtype), copy=True)
        if isinstance(x, torch.device):
            return device
        return dtypes.get(x, x) if isinstance(x, torch.dtype) else x

    args, kwargs = pytree.tree_map(change, (args, kwargs))
    return function(*args, **kwargs)


def _is_view(func: OpOverload) -> bool:
    """Whether an operator computes nothing."""
    returns = [x.alias_info for x in func._schema.returns]
    return bool(returns) and all(x is not None and not x.is_write for x in returns)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _describe(value: Any) -> str:
    return ", ".join(f"{_short(x.dtype)}{list(x.shape)}" for x in tensors(value))


def _line() -> str:
    """Where the operator was called; empty if no frame is the user's."""
    frame: FrameType | None = sys._getframe(2)
    node = torch._C._current_autograd_node()
    if node is not None:
        return _forward_line(node)
    while frame is not None:
        if _is_users(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return ""


def line_of(error: BaseException) -> str:
    """The innermost frame outside torch and torchtpu that an error came through."""
    frames = [x for x in traceback.extract_tb(error.__traceback__) if _is_users(x.filename)]
    return f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""


def _is_users(file: str) -> bool:
    return not file.startswith((*_LIBRARIES, "<"))


def _forward_line(node: Any) -> str:
    """Where the forward operator of a backward node was called; known in anomaly mode."""
    for entry in reversed(node.metadata.get("traceback_", [])):
        for text in reversed(entry.splitlines()):
            place = text.strip()
            if place.startswith('File "') and _is_users(place.removeprefix('File "')):
                file, line, where = (*place.removeprefix('File "').split(", "), "", "")[:3]
                number, function = line.removeprefix("line "), where.removeprefix("in ")
                return f"{file.removesuffix(chr(34))}:{number} in {function} (backward: {node.name()})"
    return f"backward: {node.name()}"
