"""Operators of a graph that differ in nothing but their values are traced once, and called: a decoder's layers cost one
layer's tracing, and the traced program says which of its parts are the same (``torchtpu.runtime.repeats``).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import jax
import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_flatten, tree_unflatten

from torchtpu.lowering.apply import apply, short_name
from torchtpu.lowering.context import Check, Trace, current, tracing
from torchtpu.lowering.registry import find

__all__ = ["Calls"]

_CONSTANTS = bool | int | float | complex | str | None | torch.dtype | torch.device | torch.layout | torch.memory_format


@dataclass
class _Called:
    """An operator on arrays of certain types.

    Attributes:
        function: arrays -> (results that are arrays, values of checks).
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
        where it stands.
        """
        entry = find(short_name(op))
        draws = torch.Tag.nondeterministic_seeded in op.tags or (entry is not None and entry.random)
        leaves, structure = tree_flatten((args, kwargs))
        arrays = [x for x in leaves if isinstance(x, jax.core.Tracer)]
        if draws or not arrays or not all(isinstance(x, jax.core.Tracer | _CONSTANTS) for x in leaves):
            return apply(op, args, kwargs)
        kinds = tuple([jax.typeof(x) if isinstance(x, jax.core.Tracer) else (type(x), repr(x)) for x in leaves])
        key = op, structure, kinds
        called = self._known.get(key)
        if called is None:
            called = self._known[key] = _called(op, leaves, structure, current().checked)
        made, values = called.function(arrays)
        current().checks += [Check(v, m, e) for v, (m, e) in zip(values, called.checks, strict=True)]
        results, shape = called.results
        for i, x in zip(called.arrays, made, strict=True):
            results[i] = x
        found = tree_unflatten(list(results), shape)
        for i in called.arrays:
            results[i] = None  # a tracer that is kept would outlive its trace
        return found


def _called(op: OpOverload, leaves: list[Any], structure: Any, checked: bool) -> _Called:
    constants = [None if isinstance(x, jax.core.Tracer) else x for x in leaves]
    at = [i for i, x in enumerate(leaves) if isinstance(x, jax.core.Tracer)]
    called = _Called()

    def function(arrays: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
        given = list(constants)
        for i, x in zip(at, arrays, strict=True):
            given[i] = x
        args, kwargs = tree_unflatten(given, structure)
        trace = Trace(checked=checked)
        with tracing(trace):
            made, shape = tree_flatten(apply(op, args, kwargs))
        called.arrays = [i for i, x in enumerate(made) if isinstance(x, jax.Array)]
        called.results = [None if isinstance(x, jax.Array) else x for x in made], shape
        called.checks = [(c.message, c.error) for c in trace.checks]
        return [made[i] for i in called.arrays], [c.value for c in trace.checks]

    function.__name__ = short_name(op).replace("::", "_").replace(".", "_")
    called.function = jax.jit(function)
    return called
