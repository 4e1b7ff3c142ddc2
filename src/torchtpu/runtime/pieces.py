"""A program compiled in pieces, each distinct one once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from torchtpu.runtime import meshes
from torchtpu.runtime.repeats import Piece

__all__ = ["Pieces"]


class Pieces:
    """Runs a program's pieces one after the other; a value is dropped after its last reader.

    Args:
        closed: the program.
        pieces: its parts, in order.
        runs: the executable of each: takes and returns flat arrays.
        home: where constants live: a device, or a sharding.
    """

    def __init__(
        self,
        closed: core.ClosedJaxpr,
        pieces: Sequence[Piece],
        runs: Sequence[Callable[..., Any]],
        home: Any,
    ) -> None:
        jaxpr = closed.jaxpr
        number: dict[Any, int] = {}
        for v in (*jaxpr.constvars, *jaxpr.invars, *(v for p in pieces for v in p.outputs)):
            number.setdefault(v, len(number))
        self._sizes = [_nbytes(v.aval) for v in number]
        self._constants = dict(enumerate(meshes.put(c, home) for c in closed.consts))
        self._first_operand = len(self._constants)
        literals: dict[str, int] = {}

        def place(v: Any) -> int:
            """The number of a variable or constant."""
            if not isinstance(v, core.Literal):
                return number[v]
            n = literals.setdefault(f"{v.aval} {v.val!r}", len(number) + len(literals))
            if n not in self._constants:
                self._constants[n] = _constant(v, home)
            return n

        self._results = [place(v) for v in jaxpr.outvars]
        last = {place(v): i for i, p in enumerate(pieces) for v in p.inputs}
        kept = {*self._results, *self._constants}
        self._steps = []
        for i, (p, run) in enumerate(zip(pieces, runs, strict=True)):
            reads, makes = [place(v) for v in p.inputs], [number[v] for v in p.outputs]
            dropped = [n for n in {*reads, *makes} if last.get(n, i) == i and n not in kept]
            self._steps.append((run, reads, makes, dropped))
        self._operands = len(jaxpr.invars)

    def __call__(self, *operands: Any) -> list[Any]:
        """Enqueue all pieces; takes the program's operands (None for those it does not read), nested as they are."""
        values = self._constants | dict(enumerate(jax.tree.leaves(operands), self._first_operand))
        for run, reads, makes, dropped in self._steps:
            values.update(zip(makes, run(*[values[n] for n in reads]), strict=True))
            for n in dropped:
                del values[n]
        return [values[n] for n in self._results]

    def working_memory(self) -> int:
        """Bytes needed at once besides the operands: values between pieces, results, and a piece's temporaries."""
        outside = set(range(self._first_operand + self._operands))
        held: set[int] = set()
        most = 0
        for run, _, makes, dropped in self._steps:
            held.update(makes)
            temporary = run.memory_analysis().temp_size_in_bytes  # type: ignore[attr-defined]
            most = max(most, sum(self._sizes[n] for n in held - outside) + temporary)
            held.difference_update(dropped)
        return most


def _constant(literal: Any, home: Any) -> jax.Array:
    with jax.enable_x64(True):
        return meshes.put(jnp.asarray(literal.val, literal.aval.dtype), home)


def _nbytes(aval: Any) -> int:
    return aval.size * aval.dtype.itemsize
