"""Operators of a graph that differ in nothing but their values are traced once, and called: a decoder's layers cost one
layer's tracing, and the traced program says which of its parts are the same (``torchtpu.runtime.repeats``).
"""

from __future__ import annotations

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

_PLAIN = (bool, int, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


class _NotUnderstood(Exception):
    """An argument is neither an array being traced nor a constant."""


class _Operand:
    """What stands for an operand in the arguments that are kept."""


@dataclass
class _Called:
    """An operator on arrays of certain types.

    Attributes:
        function: operands -> (results that are arrays, values of checks).
        results: the results once traced, with None for arrays, and their structure.
        arrays: positions of the arrays among the results.
        single: whether the result is one array.
        checks: messages and error types.
    """

    function: Any = None
    results: tuple[list[Any], Any] = field(default_factory=lambda: ([], None))
    arrays: list[int] = field(default_factory=list)
    single: bool = False
    checks: list[tuple[str, type[Exception]]] = field(default_factory=list)


class Calls:
    """Runs operators of one graph while it is traced."""

    def __init__(self) -> None:
        self._known: dict[Hashable, _Called] = {}

    def apply(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Like ``lowering.apply``; what is drawn at random, or depends on more than types and constants, is traced
        where it stands. A ``float`` is an operand where eager mode has one, since layers may differ in it.
        """
        random, names, is_operand = _facts(op)
        if random:
            return apply(op, args, kwargs)
        operands: list[Any] = []
        try:
            key = (
                op,
                tuple([_kind(x, operands, is_operand[n]) for n, x in zip(names, args, strict=False)]),
                tuple([(n, _kind(x, operands, is_operand[n])) for n, x in kwargs.items()]),
            )
        except _NotUnderstood:
            return apply(op, args, kwargs)
        if not any(isinstance(x, jax.core.Tracer) for x in operands):
            return apply(op, args, kwargs)
        called = self._known.get(key)
        if called is None:
            kept = [_kept(x, is_operand[n]) for n, x in zip(names, args, strict=False)]
            named = {n: _kept(x, is_operand[n]) for n, x in kwargs.items()}
            called = self._known[key] = _called(op, kept, named, current().checked)
        made, values = called.function(operands)
        if values:
            current().checks += [Check(v, m, e) for v, (m, e) in zip(values, called.checks, strict=True)]
        if called.single:
            return made[0]
        results, shape = called.results
        found = list(results)
        for i, x in zip(called.arrays, made, strict=True):
            found[i] = x
        return tree_unflatten(found, shape)


@functools.cache
def _facts(op: OpOverload) -> tuple[bool, list[str], dict[str, bool]]:
    """Whether an operator may draw at random; its arguments; for each, whether a number is an operand."""
    entry = find(short_name(op))
    random = torch.Tag.nondeterministic_seeded in op.tags or (entry is not None and entry.random)
    return random, [a.name for a in op._schema.arguments], operand_flags(op, entry)


def _kind(x: Any, operands: list[Any], number: bool) -> Hashable:
    """What two calls have in common in an argument; its arrays, and itself if it is a number and operand, are appended
    to the operands.
    """
    if isinstance(x, jax.core.Tracer):
        operands.append(x)
        return x.aval
    if isinstance(x, float):
        if not number:
            return float, repr(x)  # 0.0 and -0.0 are equal
        operands.append(x)
        return float
    if isinstance(x, _PLAIN):
        return type(x), x
    if isinstance(x, list | tuple):
        return list, tuple([_kind(y, operands, False) for y in x])
    raise _NotUnderstood


def _kept(x: Any, number: bool) -> Any:
    """An argument with stand-ins for operands."""
    if isinstance(x, jax.core.Tracer) or (number and isinstance(x, float)):
        return _Operand()
    return [_kept(y, False) for y in x] if isinstance(x, list | tuple) else x


def _called(op: OpOverload, kept: list[Any], named: dict[str, Any], checked: bool) -> _Called:
    """An operator with stand-ins for operands among its arguments."""
    called = _Called()

    def function(operands: list[Any]) -> tuple[list[jax.Array], list[jax.Array]]:
        rest = iter(operands)

        def fill(x: Any) -> Any:
            if isinstance(x, list):
                return [fill(y) for y in x]
            return next(rest) if isinstance(x, _Operand) else x

        args, kwargs = tuple([fill(x) for x in kept]), {n: fill(x) for n, x in named.items()}
        trace = Trace(checked=checked)
        with tracing(trace):
            result = apply(op, args, kwargs)
        made, shape = tree_flatten(result)
        called.arrays = [i for i, x in enumerate(made) if isinstance(x, jax.Array)]
        called.results = [None if isinstance(x, jax.Array) else x for x in made], shape
        called.single = isinstance(result, jax.Array)
        called.checks = [(c.message, c.error) for c in trace.checks]
        return [made[i] for i in called.arrays], [c.value for c in trace.checks]

    function.__name__ = short_name(op).replace("::", "_").replace(".", "_")
    called.function = jax.jit(function)
    return called
