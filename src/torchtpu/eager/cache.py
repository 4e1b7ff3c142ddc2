"""Compiled traces, found by what was recorded."""

from __future__ import annotations

import itertools
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from torchtpu.eager import growth
from torchtpu.eager.arrays import number_operand
from torchtpu.eager.program import Kind, Program, results_in_place
from torchtpu.runtime import devices, meshes, repeats
from torchtpu.runtime.compiler import compile_program, working_memory
from torchtpu.runtime.compiler import statistics as compiler_statistics
from torchtpu.runtime.disk_cache import digest
from torchtpu.runtime.observe import log

if TYPE_CHECKING:
    from torchtpu.eager.trace import Trace

__all__ = ["RecompileWarning", "TraceCache"]


WORTH_A_WARNING = 16
"""Traces of fewer operators compile in no time; trying things out in a shell makes many."""
SHORT_GROWS_AFTER = 3
"""Compiles of a trace shorter than that for different sizes, after which it is compiled for buckets."""
WARNINGS = 3
"""Recompile warnings for traces that begin with one operator; text that grows by a token a step would give hundreds."""


class RecompileWarning(UserWarning):
    """A trace was compiled anew although it nearly equals an earlier one."""


@dataclass
class Variant:
    """One executable of a trace.

    Attributes:
        sizes: the results it returns, and their bytes.
        donated: positions of the arrays it takes over.
        run: enqueues it: (arrays, floats, integers, seeds) -> {result number: array}.
        working_memory: bytes it needs besides its arrays.
    """

    sizes: dict[int, int]
    donated: frozenset[int]
    run: Callable[..., dict[int, Any]]
    working_memory: int


@dataclass
class _Known:
    """A trace that has been compiled."""

    programs: list[Program]
    variants: list[Variant] = field(default_factory=list)


class TraceCache:
    """Finds the executable of a trace, or compiles it and says why it had to."""

    def __init__(self) -> None:
        self.known: dict[tuple[int, ...], _Known] = {}
        self.by_head: dict[str, deque[list[Program]]] = {}
        self.counts: Counter[str] = Counter()
        self.misses: deque[str] = deque(maxlen=32)
        self.warned: Counter[str] = Counter()

    def find(self, trace: Trace, arrays: list[Any], wanted: tuple[int, ...], free: tuple[int, ...]) -> Variant:
        """The executable for a trace.

        Args:
            trace: what was recorded.
            arrays: its arrays, where the program runs.
            wanted: numbers of the results that something refers to.
            free: positions of the arrays that nothing but the trace refers to.
        """
        self.counts["flushes"] += 1
        self.counts["operators"] += len(trace.programs)
        key = (trace.device, *trace.signature)
        if trace.placement is not None:
            key = (*key, *trace.placement.key)
        known = self.known.get(key)
        need, may = frozenset(wanted), frozenset(free)
        if known is not None:
            for variant in known.variants:
                # Computing more than is needed is cheaper than compiling again; memory still in use must not be taken.
                if variant.donated <= may and need <= variant.sizes.keys():
                    self.counts["cache_hits"] += 1
                    return variant
        self._explain(trace, known)
        donated = _donations(trace, wanted, free)
        variant = _build(trace, arrays, wanted, donated)
        if known is None:
            known = self.known[key] = _Known(list(trace.programs))
            self.by_head.setdefault(_head(trace), deque(maxlen=8)).append(known.programs)
        known.variants.append(variant)
        return variant

    def _explain(self, trace: Trace, known: _Known | None) -> None:
        """Note why a trace is compiled; warn if one of the same operators has been compiled before."""
        length = len(trace.programs)
        if known is not None:
            self._miss(f"{length} operators seen before, but other results of them are still referenced")
            return
        best: tuple[int, list[Program]] | None = None
        for earlier in self.by_head.get(_head(trace), ()):
            same = sum(a.name == b.name for a, b in zip(earlier, trace.programs, strict=False))
            if best is None or same >= best[0]:  # the latest of those equally alike
                best = same, earlier
        if best is None or best[0] < 0.5 * max(length, len(best[1])):
            self._miss(f"{length} operators not seen before, the first is {trace.programs[0].name}")
            return
        reason = _difference(best[1], trace.programs)
        self._miss(reason)
        if best[0] < max(length, len(best[1])):
            return
        # The same operators: other sizes or other constants.
        if length >= WORTH_A_WARNING or self._often(trace):
            apart = [(a, b) for a, b in zip(best[1], trace.programs, strict=True) if a is not b]
            explained = [growth.explains(a, b) for a, b in apart]
            if apart and all(explained):
                return  # the next sizes will need no compile
        if length >= WORTH_A_WARNING:
            self.warned[trace.programs[0].name] += 1
            often = self.warned[trace.programs[0].name]
            if often <= WARNINGS:
                last = " (further ones are only counted: torch.tpu.compile_stats())" if often == WARNINGS else ""
                warnings.warn(f"torchtpu compiles again: {reason}{last}", RecompileWarning, stacklevel=2)

    def _often(self, trace: Trace) -> bool:
        """Whether a short trace has been compiled for several sizes; it may take some before that pays."""
        names = [p.name for p in trace.programs]
        alike = sum([p.name for p in earlier] == names for earlier in self.by_head[_head(trace)])
        return alike >= SHORT_GROWS_AFTER

    def _miss(self, reason: str) -> None:
        self.misses.append(reason)
        log.info("compiles because: %s", reason)

    def statistics(self) -> dict[str, Any]:
        """The counters, and the reasons of the latest compiles of traces."""
        return {
            "compiles": compiler_statistics.compiles,
            "compile_seconds": compiler_statistics.compile_seconds,
            "compile_processor_seconds": compiler_statistics.compile_processor_seconds,
            "disk_hits": compiler_statistics.disk_hits,
            "disk_seconds": compiler_statistics.disk_seconds,
            "cache_hits": self.counts["cache_hits"],
            "flushes": self.counts["flushes"],
            "operators": self.counts["operators"],
            "misses": list(self.misses),
        }


def _head(trace: Trace) -> str:
    """What traces are compared by: the first operator, and the mesh if it runs on one."""
    where = "" if trace.placement is None else f" on {dict(trace.placement.mesh.shape)}"
    return trace.programs[0].name + where


def _difference(earlier: list[Program], now: list[Program]) -> str:
    """Where two traces part, in words."""
    for i, (a, b) in enumerate(zip(earlier, now, strict=False)):
        if a is b:
            continue
        place = f"operator {i + 1} of {len(now)}"
        if a.name != b.name:
            return f"{place} is {b.name} where it was {a.name}"
        if a.describes != b.describes:
            return f"{place}, {b.name}, got {', '.join(b.describes)} where it had {', '.join(a.describes)}"
        return f"{place}, {b.name}, was called with other constant arguments"
    if len(earlier) != len(now):
        return f"{len(now)} operators where there were {len(earlier)}"
    return "the same operators on other results of each other"


def _donations(trace: Trace, wanted: tuple[int, ...], free: tuple[int, ...]) -> tuple[int, ...]:
    """Of the arrays nobody needs afterwards, those whose memory a result of the same type can take."""
    room: Counter[Any] = Counter()
    results = [t for p in trace.programs for t in p.result_types]
    for i in wanted:
        room[results[i].shape, results[i].dtype] += 1
    donated = []
    for i in free:
        kind = trace.arrays[i].shape, trace.arrays[i].dtype
        if room[kind]:
            room[kind] -= 1
            donated.append(i)
    return tuple(donated)


def _build(trace: Trace, arrays: list[Any], wanted: tuple[int, ...], donated: tuple[int, ...]) -> Variant:
    """Compile a trace."""
    programs, signature = list(trace.programs), list(trace.signature)

    def fused(floats: Any, integers: Any, seeds: Any, *given: jax.Array) -> list[jax.Array]:
        numbers = _numbers(programs, floats, integers, seeds)
        results: list[jax.Array] = []
        items = iter(signature)
        for program, own in zip(programs, numbers, strict=True):
            next(items)  # the program itself
            operands = iter(own)
            found = []
            for kind in program.kinds:
                if kind in (Kind.ARRAY, Kind.COMPLEX):
                    item = next(items)
                    found.append(results[item] if item >= 0 else given[-1 - item])
                elif kind != Kind.ABSENT:
                    found.append(next(operands))
            found += operands  # starts and seed
            typed = zip(found, program.input_types, strict=True)
            results.extend(program.part(*(jnp.asarray(x, t.dtype) if x.dtype != t.dtype else x for x, t in typed)))
        return [results[i] for i in wanted]

    # Numbers are passed as three vectors; one by one where blocks repeat, so that all occurrences of a block are alike.
    mesh = trace.placement.mesh if trace.placement is not None else None
    apart = not donated and repeats.enabled() and repeats.any_run([p.uid for p in programs])
    index, device = trace.device, devices.device(trace.device)

    def operands(floats: np.ndarray, integers: np.ndarray, seeds: np.ndarray) -> tuple[Any, Any, Any]:
        if not apart:
            return floats, integers, seeds
        if mesh is not None:
            return floats.tolist(), integers.tolist(), list(seeds)
        first, second = ([number_operand(x, index) for x in vector.tolist()] for vector in (floats, integers))
        return first, second, list(seeds)

    examples = [
        *operands(
            np.zeros(len(trace.floats)),
            np.zeros(len(trace.integers), np.int64),
            np.zeros((len(trace.seeds), 4), np.uint32),
        ),
        *arrays,
    ]
    name = f"{len(programs)} operators"
    given = tuple(3 + i for i in donated)
    key = _digest(trace, wanted, donated, apart)
    compiled = compile_program(
        fused,
        examples,
        device,
        name,
        donate=given,
        key=key,
        operators=[name for p in programs for name in p.operators],
        mesh=mesh,
        results=None if trace.placement is None else _pinned(trace, trace.placement, wanted),
    )

    def run(given: list[Any], floats: np.ndarray, integers: np.ndarray, seeds: np.ndarray) -> dict[int, Any]:
        with jax.enable_x64(True):
            return dict(zip(wanted, compiled(*operands(floats, integers, seeds), *given), strict=True))

    types = [t for p in programs for t in p.result_types]
    sizes = {i: types[i].size * types[i].dtype.itemsize for i in wanted}
    return Variant(sizes, frozenset(donated), run, working_memory(compiled))


def _pinned(trace: Trace, placement: meshes.Placement, wanted: tuple[int, ...]) -> list[Sharding | None]:
    """Where each result of a trace on a mesh lies: what takes the place of a divided value is divided as it was."""
    lies: list[Sharding | None] = []
    items = iter(trace.signature)
    for program in trace.programs:
        next(items)
        links: list[Sharding | None] = []
        for kind in program.kinds:
            item = next(items) if kind in (Kind.ARRAY, Kind.COMPLEX) else None
            if item is None:
                links.append(None)
            else:
                links.append(lies[item] if item >= 0 else placement.lies[-1 - item])
        lies += results_in_place(program, links)
    return [lies[i] for i in wanted]


def _digest(trace: Trace, wanted: tuple[int, ...], donated: tuple[int, ...], apart: bool) -> str:
    """What the compiled trace computes and how it is called, the same in every process: its signature with digests
    for programs.
    """
    items = iter(trace.signature)
    parts = []
    for program in trace.programs:
        next(items)  # the program's number, which is this process's own
        links = [next(items) for kind in program.kinds if kind in (Kind.ARRAY, Kind.COMPLEX)]
        parts.append(f"{program.digest} {links}")
    types = [f"{x.dtype}{x.shape}" for x in trace.arrays]
    return digest(*parts, repr((types, wanted, donated, apart)))


def _numbers(programs: list[Program], floats: Any, integers: Any, seeds: Any) -> Iterator[list[jax.Array]]:
    """For each program the operands that are not arrays: numbers in order, where slices start, the seed."""
    next_float, next_integer, next_seed = itertools.count(), itertools.count(), itertools.count()
    for program in programs:
        found = []
        kinds = [k for k in program.kinds if k != Kind.ABSENT]
        for kind, wanted in zip(kinds, program.input_types, strict=False):
            if kind in (Kind.FLOAT, Kind.INTEGER):
                vector, position = (floats, next_float) if kind == Kind.FLOAT else (integers, next_integer)
                found.append(jnp.asarray(vector[next(position)], wanted.dtype))
        if program.starts:
            starts = jnp.stack([integers[next(next_integer)] for _ in range(program.starts)])
            found.append(jnp.asarray(starts, program.input_types[len(kinds)].dtype))
        if program.random:
            found.append(seeds[next(next_seed)])
        yield found
