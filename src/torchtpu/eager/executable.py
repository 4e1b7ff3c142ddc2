"""Compile what a trace recorded, in one executable or in two.

Two are made where Python waits for a small value that most of the trace has no part in, such as the flag that says
whether a text is finished: what the value needs runs first and alone, and the rest while Python goes on.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from torchtpu.eager.arrays import number_operand
from torchtpu.eager.program import Kind, Program, results_in_place
from torchtpu.runtime import devices, meshes, repeats
from torchtpu.runtime.compiler import compile_program, working_memory
from torchtpu.runtime.disk_cache import digest

if TYPE_CHECKING:
    from torchtpu.eager.trace import Trace

__all__ = ["Variant", "build", "needed_first"]

_SMALL = 1 << 16
"""Bytes that what a value needs may read and make for it to run alone."""
_LARGE = 1 << 20
"""Bytes that the rest must read and make at least: less is done before a second executable has been enqueued."""


@dataclass
class Variant:
    """One way to run a trace.

    Attributes:
        sizes: the results it returns, in order, and their bytes.
        donated: positions of the arrays it takes over.
        first: positions of the programs that run before the others, in an executable of their own.
        digest: what it computes and returns, the same in every process.
        run: enqueues it on what a trace recorded, and returns its results.
        working_memory: bytes it needs besides its arrays.
    """

    sizes: dict[int, int]
    donated: frozenset[int]
    first: frozenset[int]
    digest: str
    run: Callable[[Trace], list[Any]]
    working_memory: int


@dataclass(frozen=True)
class _Part:
    """The programs of a trace that are one executable.

    Attributes:
        programs: their positions.
        arrays: positions of the arrays they read.
        passed: numbers of the results of another part that they read.
        wanted: numbers of the results to return.
        donated: positions of the arrays to take over.
    """

    programs: tuple[int, ...]
    arrays: tuple[int, ...]
    passed: tuple[int, ...]
    wanted: tuple[int, ...]
    donated: tuple[int, ...]


class _Layout:
    """Which results and arrays each program of a trace reads, and which results it makes."""

    def __init__(self, trace: Trace) -> None:
        self.programs: list[Program] = list(trace.programs)
        items = iter(trace.signature)
        self.links: list[list[int]] = []
        self.first_result: list[int] = []
        self.maker: list[int] = []
        for i, program in enumerate(self.programs):
            next(items)  # the program's number
            self.links.append([next(items) for kind in program.kinds if kind in (Kind.ARRAY, Kind.COMPLEX)])
            self.first_result.append(len(self.maker))
            self.maker += [i] * program.results
        self.types = [t for p in self.programs for t in p.result_types]

    def before(self, result: int) -> frozenset[int]:
        """Positions of the programs that a result needs."""
        found: set[int] = set()
        waiting = [self.maker[result]]
        while waiting:
            i = waiting.pop()
            if i not in found:
                found.add(i)
                waiting += [self.maker[n] for n in self.links[i] if n >= 0]
        return frozenset(found)

    def touched(self, chosen: Sequence[int], arrays: Sequence[Any]) -> int:
        """Bytes of what some programs read and make."""
        read = {-1 - n for i in chosen for n in self.links[i] if n < 0}
        made = [t for i in chosen for t in self.programs[i].result_types]
        return sum(arrays[i].nbytes for i in read) + sum(t.size * t.dtype.itemsize for t in made)

    def part(self, chosen: Sequence[int], wanted: tuple[int, ...], donated: tuple[int, ...]) -> _Part:
        """Some programs as one executable."""
        inside = set(chosen)
        links = {n for i in chosen for n in self.links[i]}
        arrays = tuple(sorted(-1 - n for n in links if n < 0))
        passed = tuple(sorted(n for n in links if n >= 0 and self.maker[n] not in inside))
        return _Part(tuple(chosen), arrays, passed, wanted, donated)


def needed_first(trace: Trace, result: int) -> frozenset[int]:
    """Positions of the programs that should run before the others because Python waits for a result: those it needs,
    where they are little beside the others; else none.
    """
    layout = _Layout(trace)
    chosen = layout.before(result)
    others = [i for i in range(len(layout.programs)) if i not in chosen]
    if layout.touched(sorted(chosen), trace.arrays) > _SMALL or layout.touched(others, trace.arrays) < _LARGE:
        return frozenset()
    return chosen


def build(
    trace: Trace,
    placement: meshes.Placement | None,
    wanted: tuple[int, ...],
    free: tuple[int, ...],
    first: frozenset[int],
) -> Variant:
    """Compile a trace.

    Args:
        trace: what was recorded.
        placement: where it runs if not on one device.
        wanted: numbers of the results that something refers to.
        free: positions of the arrays that nothing but the trace refers to.
        first: what ``needed_first`` says; none on a mesh.
    """
    layout = _Layout(trace)
    types = layout.types
    sizes = {i: types[i].size * types[i].dtype.itemsize for i in wanted}
    everything = range(len(layout.programs))
    if not first:
        donated = _donations(trace, types, wanted, free)
        run, memory, key = _executable(trace, placement, layout, layout.part(everything, wanted, donated))
        return Variant(sizes, frozenset(donated), first, key, run, memory)
    rest = [i for i in everything if i not in first]
    late = tuple(i for i in wanted if layout.maker[i] not in first)
    second = layout.part(rest, late, ())
    donated = _donations(trace, types, late, [i for i in free if i in second.arrays])
    second = replace(second, donated=donated)
    early = tuple(sorted({*second.passed, *wanted} - {*late}))
    run_first, memory, first_key = _executable(trace, None, layout, layout.part(sorted(first), early, ()))
    run_second, more, second_key = _executable(trace, None, layout, second)

    def run_both(trace: Trace) -> list[Any]:
        found = dict(zip(early, run_first(trace), strict=True))
        found.update(zip(late, run_second(trace, [found[i] for i in second.passed]), strict=True))
        return [found[i] for i in wanted]

    return Variant(sizes, frozenset(donated), first, f"{first_key} {second_key}", run_both, memory + more)


def _donations(trace: Trace, types: list[Any], wanted: Sequence[int], free: Sequence[int]) -> tuple[int, ...]:
    """Of the arrays nobody needs afterwards, those whose memory a result of the same type can take."""
    room: Counter[Any] = Counter()
    for i in wanted:
        room[types[i].shape, types[i].dtype] += 1
    donated = []
    for i in free:
        kind = trace.arrays[i].shape, trace.arrays[i].dtype
        if room[kind]:
            room[kind] -= 1
            donated.append(i)
    return tuple(donated)


def _executable(
    trace: Trace, placement: meshes.Placement | None, layout: _Layout, part: _Part
) -> tuple[Callable[..., list[Any]], int, str]:
    """Compile a part: the function of a trace and the results passed that enqueues it, the bytes it needs, and the
    digest of what it computes.
    """
    programs = layout.programs
    floats, integers, seeds = _vectors(trace)
    numbered = bool(len(floats) or len(integers) or len(seeds))

    def fused(*given: Any) -> list[jax.Array]:
        vectors, given = (given[:3], given[3:]) if numbered else (((), (), ()), given)
        numbers = list(_numbers(programs, *vectors))
        known = dict(zip((*part.passed, *[-1 - i for i in part.arrays]), given, strict=True))
        for i in part.programs:
            program, operands, items = programs[i], iter(numbers[i]), iter(layout.links[i])
            found = []
            for kind in program.kinds:
                if kind in (Kind.ARRAY, Kind.COMPLEX):
                    found.append(known[next(items)])
                elif kind != Kind.ABSENT:
                    found.append(next(operands))
            found += operands  # starts and seed
            typed = zip(found, program.input_types, strict=True)
            made = program.part(*(jnp.asarray(x, t.dtype) if x.dtype != t.dtype else x for x, t in typed))
            known.update(enumerate(made, layout.first_result[i]))
        return [known[i] for i in part.wanted]

    # Numbers are passed as three vectors; one by one where blocks repeat, so that all occurrences of a block are alike.
    uids = [programs[i].uid for i in part.programs]
    apart = numbered and not part.donated and repeats.enabled() and repeats.any_run(uids)
    index, device = trace.device, devices.device(trace.device)

    def operands(floats: np.ndarray, integers: np.ndarray, seeds: np.ndarray) -> tuple[Any, ...]:
        if not apart:
            return floats, integers, seeds
        if placement is not None:
            return floats.tolist(), integers.tolist(), list(seeds)
        first, second = ([number_operand(x, index) for x in vector.tolist()] for vector in (floats, integers))
        return first, second, list(seeds)

    leading = operands(np.zeros_like(floats), np.zeros_like(integers), np.zeros_like(seeds)) if numbered else ()
    passed = [jax.ShapeDtypeStruct(layout.types[i].shape, layout.types[i].dtype) for i in part.passed]
    before = len(leading) + len(passed)
    key = _digest(trace, layout, part, apart)
    compiled = compile_program(
        fused,
        [*leading, *passed, *_given(trace, placement, part)],
        device,
        f"{len(part.programs)} operators",
        donate=tuple(before + part.arrays.index(i) for i in part.donated),
        key=key,
        operators=[name for i in part.programs for name in programs[i].operators],
        mesh=None if placement is None else placement.mesh,
        results=None if placement is None else _pinned(layout, placement, part.wanted),
    )

    def run(trace: Trace, passed: Sequence[Any] = ()) -> list[Any]:
        arrays = _given(trace, placement, part)
        if not numbered:  # arrays mean the same with 64-bit types switched on and off
            return compiled(*passed, *arrays)
        with jax.enable_x64(True):
            return compiled(*operands(*_vectors(trace)), *passed, *arrays)

    return run, working_memory(compiled), key


def _given(trace: Trace, placement: meshes.Placement | None, part: _Part) -> list[Any]:
    """The arrays that a part reads, where it runs."""
    arrays = trace.arrays if len(part.arrays) == len(trace.arrays) else [trace.arrays[i] for i in part.arrays]
    return arrays if placement is None else placement.spread(arrays)


def _pinned(layout: _Layout, placement: meshes.Placement, wanted: tuple[int, ...]) -> list[Sharding | None]:
    """Where each result of a trace on a mesh lies: what takes the place of a divided value is divided as it was."""
    lies: list[Sharding | None] = []
    for program, links in zip(layout.programs, layout.links, strict=True):
        items = iter(links)
        operands: list[Sharding | None] = []
        for kind in program.kinds:
            item = next(items) if kind in (Kind.ARRAY, Kind.COMPLEX) else None
            if item is None:
                operands.append(None)
            else:
                operands.append(lies[item] if item >= 0 else placement.lies[-1 - item])
        lies += results_in_place(program, operands, placement.everywhere)
    return [lies[i] for i in wanted]


def _vectors(trace: Trace) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The operands of a trace that are no arrays: floats, integers, and seeds as four words each."""
    floats, integers, seeds = trace.numbers()
    words = np.frombuffer(seeds, np.uint32).reshape(-1, 4)
    return np.frombuffer(floats, np.float64), np.frombuffer(integers, np.int64), words


def _digest(trace: Trace, layout: _Layout, part: _Part, apart: bool) -> str:
    """What a part computes and how it is called, the same in every process: a trace's signature with digests for
    programs.
    """
    recorded = [f"{p.digest} {links}" for p, links in zip(layout.programs, layout.links, strict=True)]
    types = [f"{x.dtype}{x.shape}" for x in trace.arrays]
    return digest(*recorded, repr((types, part, apart)))


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
