"""Operators of a graph that differ in nothing but their values are traced once, and called: a decoder's layers cost one
layer's tracing, and the traced program says which of its parts are the same (``torchtpu.runtime.repeats``).
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import jax
import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_flatten, tree_unflatten

from torchtpu.eager.kernels import operand_flags
from torchtpu.lowering.apply import apply, short_name
from torchtpu.lowering.context import Check, Trace, current, tracing
from torchtpu.lowering.registry import find

__all__ = ["Calls"]

_CONSTANTS = bool | int | float | complex | str | None | torch.dtype | torch.device | torch.layout | torch.memory_format


class _Number(enum.Enum):
    """What stands for a number that is an operand."""

    OPERAND = 0


_OPERANDS = jax.core.Tracer | _Number
_UNDERSTOOD = _OPERANDS | _CONSTANTS


@dataclass
class _Called:
    """An operator on arrays of certain types.

    Attributes:
        function: operands -> (results that are arrays, values of checks).
        results: the results once traced, with None for arrays, and their structure.
        arrays: positions of the arrays among the results.
        checks: messages and error types.
    """

    function: Any = None
    results: tuple[list[Any], Any] = field(default_factory=lambda: ([], None))
    arrays: list[int] = field(default_factory=list)
    checks: list[tuple[str, type[Exception]]] = field(default_factory=list)


class Calls:
    """Runs operators of one graph while it is traced."""

    def __init__(self) -> None:
        self._known: dict[Hashable, _Called] = {}

    def apply(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Like ``lowering.apply``; what is drawn at random, or depends on more than types and constants, is traced
        where it stands. A ``float`` is an operand where eager mode has one, since layers may differ in it.
        """
        random, is_operand = _facts(op)
        numbers: list[float] = []

        def mark(name: str, x: Any) -> Any:
            if type(x) is not float or not is_operand[name]:
                return x
            numbers.append(x)
            return _Number.OPERAND

        names = [a.name for a in op._schema.arguments]
        marked = [mark(n, x) for n, x in zip(names, args, strict=False)], {n: mark(n, x) for n, x in kwargs.items()}
        leaves, structure = tree_flatten(marked)
        if random or not all(isinstance(x, _UNDERSTOOD) for x in leaves):
            return apply(op, args, kwargs)
        at = [i for i, x in enumerate(leaves) if isinstance(x, _OPERANDS)]
        if len(at) == len(numbers):
            return apply(op, args, kwargs)
        rest = iter(numbers)
        operands = [next(rest) if leaves[i] is _Number.OPERAND else leaves[i] for i in at]
        kinds = tuple([jax.typeof(x) if isinstance(x, jax.core.Tracer) else (type(x), repr(x)) for x in leaves])
        key = op, structure, kinds
        called = self._known.get(key)
        if called is None:
            fixed = [None if isinstance(x, _OPERANDS) else x for x in leaves]
            called = self._known[key] = _called(op, fixed, at, structure, current().checked)
        made, values = called.function(operands)
        current().checks += [Check(v, m, e) for v, (m, e) in zip(values, called.checks, strict=True)]
        results, shape = called.results
        found = list(results)
        for i, x in zip(called.arrays, made, strict=True):
            found[i] = x
        return tree_unflatten(found, shape)


@functools.cache
def _facts(op: OpOverload) -> tuple[bool, dict[str, bool]]:
    """Whether an operator may draw at random; by argument, whether a number is an operand of it."""
    entry = find(short_name(op))
    random = torch.Tag.nondeterministic_seeded in op.tags or (entry is not None and entry.random)
    return random, operand_flags(op, entry)


def _called(op: OpOverload, fixed: list[Any], at: list[int], structure: Any, checked: bool) -> _Called:
    """An operator with constants ``fixed``, whose operands are the leaves ``at`` these positions."""
    called = _Called()

    def function(operands: list[Any]) -> tuple[list[jax.Array], list[jax.Array]]:
        leaves = list(fixed)
        for i, x in zip(at, operands, strict=True):
            leaves[i] = x
        args, kwargs = tree_unflatten(leaves, structure)
        trace = Trace(checked=checked)
        with tracing(trace):
            made, shape = tree_flatten(apply(op, tuple(args), kwargs))
        called.arrays = [i for i, x in enumerate(made) if isinstance(x, jax.Array)]
        called.results = [None if isinstance(x, jax.Array) else x for x in made], shape
        called.checks = [(c.message, c.error) for c in trace.checks]
        return [made[i] for i in called.arrays], [c.value for c in trace.checks]

    function.__name__ = short_name(op).replace("::", "_").replace(".", "_")
    called.function = jax.jit(function)
    return called
