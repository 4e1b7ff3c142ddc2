"""Sizes that grow: which operator calls differ from earlier ones in nothing but sizes.

A loop that appends a token at every step runs the same operators on other sizes each time. When a trace is compiled
anew for such a reason, the operators that differ are marked; from then on they run as programs for buckets of sizes
(``torchtpu.compile.growing``), which serve every size up to the bucket's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._ops import OpOverload

from torchtpu.eager.schema import Derived

if TYPE_CHECKING:
    from torchtpu.eager.program import Call, Program

__all__ = ["Shape", "explains", "forget", "measure", "refuse", "sizes_among", "varying"]

Shape = tuple[Any, tuple[int, ...]]
"""An operator call without its sizes, and the sizes: those of its tensors, and arguments that are sizes."""

_varying: dict[Any, frozenset[int]] = {}
_refused: set[Any] = set()


def forget() -> None:
    """Forget which calls have had several sizes: each begins anew as a program of one size."""
    _varying.clear()
    _refused.clear()


def measure(call: Call, flags: dict[str, bool], derived: Derived | None) -> Shape | None:
    """What of a call may change from one to the next; None where nothing may.

    Args:
        call: the call.
        flags: for each argument, whether a number is an operand.
        derived: how the operator writes to its arguments, if it does.
    """
    from torchtpu.eager.program import OUT_DECIDES, Number, Window

    if derived is not None and derived.dropped and derived.functional._schema.name in OUT_DECIDES:
        return None
    sizes: list[int] = []

    def leaf(x: Any, is_size: bool) -> Any:
        if isinstance(x, Window):
            sizes.extend(x.plan.size)
            return "window", x.operand, x.dtype, len(x.plan.size), x.conj, x.neg
        if isinstance(x, tuple | list):
            return tuple(leaf(y, is_size) for y in x)
        if is_size and type(x) is int:
            sizes.append(x)
            return "size"
        return x if isinstance(x, Number) else None if isinstance(x, torch.Generator) else (type(x), x)

    schema, are_sizes = call.op._schema.arguments, sizes_among(call.op, flags)
    args = tuple(leaf(x, are_sizes[a.name]) for a, x in zip(schema, call.args, strict=False))
    kwargs = tuple((n, leaf(x, are_sizes[n])) for n, x in call.kwargs.items())
    settings = call.device, torch.get_default_dtype(), torch.get_float32_matmul_precision()
    absent = tuple(s is not None and s.uninitialised for s in call.operands)
    return (call.op, args, kwargs, absent, *settings), tuple(sizes)


def sizes_among(op: OpOverload, flags: dict[str, bool]) -> dict[str, bool]:
    """By argument, whether its integers are sizes, or numbers that decide one; ``flags`` says what is an operand."""

    def is_size(kind: Any) -> bool:
        while kind.kind() in ("OptionalType", "ListType"):
            kind = kind.getElementType()
        return kind.kind() == "SymIntType"

    return {
        a.name: is_size(a.real_type) or (str(a.type) == "number" and not flags[a.name]) for a in op._schema.arguments
    }


def explains(earlier: Program, now: Program) -> bool:
    """Whether two programs differ in sizes alone. If so calls like them are for buckets from now on."""
    if earlier.growth is None or now.growth is None:
        return False
    (structure, before), (other, after) = earlier.growth, now.growth
    if structure != other or structure in _refused:
        return False
    differ = frozenset(i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b)
    _varying[structure] = _varying.get(structure, frozenset()) | differ
    return True


def varying(structure: Any) -> frozenset[int] | None:
    """Which sizes of a call change; None if it is not one that grows."""
    return None if structure in _refused else _varying.get(structure)


def refuse(structure: Any) -> None:
    """What an operator does to padding is not known: calls like this are compiled for exact sizes."""
    _refused.add(structure)
