"""Compile a traced function for a device or a mesh of them, visibly and interruptibly.

XLA compiles in C++ and cannot be stopped, so it runs on a worker thread: the caller waits where Ctrl-C reaches it, and
a compile that takes
longer than ``PROGRESS_AFTER`` seconds says on a terminal what it compiles and for how long.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend import core
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from torchtpu.runtime import disk_cache, meshes, observe, repeats
from torchtpu.runtime.pieces import Pieces
from torchtpu.runtime.repeats import Piece

__all__ = ["Statistics", "compile_program", "statistics", "timed", "working_memory"]

_THREAD = "torchtpu-compile"

PROGRESS_AFTER = 2.0
"""Seconds before a compile shows progress."""


@dataclass
class Statistics:
    """What this process has compiled; ``compile_seconds`` has gone by meanwhile, tracing included, and
    ``compile_processor_seconds`` were spent by all threads of the process.
    """

    compiles: int = 0
    compile_seconds: float = 0.0
    compile_processor_seconds: float = 0.0
    disk_hits: int = 0
    disk_seconds: float = 0.0


statistics = Statistics()


@contextlib.contextmanager
def timed() -> Iterator[None]:
    """Count the time of a block as time to compile.

    Meanwhile Python does not look for cyclic garbage: tracing makes hundreds of thousands of objects that live until
    its end, which would be looked through again and again together with all of the model's.
    """
    start, processor = time.perf_counter(), time.process_time()
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
        statistics.compile_seconds += time.perf_counter() - start
        statistics.compile_processor_seconds += time.process_time() - processor


def compile_program(
    function: Callable[..., Any],
    operands: Sequence[Any],
    device: jax.Device,
    name: str,
    donate: tuple[int, ...] = (),
    key: str | None = None,
    operators: Sequence[str] = (),
    mesh: Mesh | None = None,
    results: Sequence[Sharding | None] | None = None,
) -> Callable[..., Any]:
    """Trace ``function`` on the operands' types and compile it for ``device``, or take it from the cache on disk.

    A program with blocks that repeat is compiled in pieces (``repeats``).

    Args:
        function: takes the operands, returns a list of arrays.
        operands: arrays (or None for operands the program does not read).
        device: where the program runs and its results live.
        name: what is compiled, for the progress line.
        donate: positions of operands whose memory the results may take; the arrays given there are gone afterwards.
        key: a digest that says what ``function`` computes from which types; it saves tracing a program that is on
            disk. Without one the traced program is its own key.
        operators: what it is made of, for those who observe.
        mesh: the devices it runs on, if several; the operands lie there already, and ``key`` is not asked for.
        results: on a mesh, where each result lies; None where XLA chooses, for one or for all.

    Returns:
        A callable of the operands; it enqueues the program and returns its results.

    Raises:
        KeyboardInterrupt: Ctrl-C during the compile, which is abandoned.
    """
    start = time.perf_counter()
    about = observe.About(name, tuple(operators))
    if mesh is not None:
        with jax.enable_x64(True), timed():
            traced = jax.jit(function, out_shardings=results, donate_argnums=donate).trace(*operands)
            pieces = repeats.split(traced.jaxpr) if repeats.enabled() and not donate else None
            if pieces is None:
                return _compile(traced.lower(), device, None, "", start, about, mesh)()
            return _pieces_on_mesh(traced.jaxpr, pieces, jax.tree.leaves(operands), mesh, results, about)
    if key is not None and (found := _from_disk(key, device, name)) is not None:
        return found
    with jax.enable_x64(True), timed():
        jitted = jax.jit(function, out_shardings=SingleDeviceSharding(device), donate_argnums=donate)
        traced = jitted.trace(*operands)
        pieces = repeats.split(traced.jaxpr) if repeats.enabled() and not donate else None
        if pieces is None:
            return _compile(traced.lower(), device, key, repr(donate), start, about)()
        # Each part compiles while the next ones are lowered.
        distinct = {id(p.function): p.function for p in pieces}
        runs = Counter(id(p.function) for p in pieces)
        waiting: dict[int, Callable[[], Any]] = {}
        for n, (part, piece) in enumerate(distinct.items()):
            block = jax.jit(core.jaxpr_as_fun(piece), out_shardings=SingleDeviceSharding(device))
            lowered = block.trace(*piece.in_avals).lower()
            one = observe.About(f"part {n + 1} of {len(distinct)} of {name}", tuple(operators), runs[part])
            waiting[part] = _compile(lowered, device, None, "", start, one)
            start = time.perf_counter()
        compiled = {part: wait() for part, wait in waiting.items()}
    return Pieces(traced.jaxpr, pieces, [compiled[id(p.function)] for p in pieces], device)


def _compile(
    lowered: Any,
    device: jax.Device,
    key: str | None,
    extra: str,
    start: float,
    about: observe.About,
    mesh: Mesh | None = None,
) -> Callable[[], Any]:
    """Begin to compile what was lowered, or take it from the cache on disk; ``start`` is when tracing it began.

    Returns:
        A function that waits for the compiled program and returns it.
    """
    module = lowered.as_text()
    options, devices = None, None
    if mesh is not None:
        options, devices = meshes.options(mesh), list(mesh.devices.flat)
        extra = repr((options, [d.id for d in devices]))
        if meshes.spans(mesh):  # what a process keeps may hold what its own devices run only
            extra += f" process {jax.process_index()} of {jax.process_count()}"
    if key is None:
        key = disk_cache.digest(module, extra)
        if (found := _from_disk(key, device, about.name, devices)) is not None:
            return lambda: found
    observe.lowered(about, module)
    traced = time.perf_counter()
    work = _in_thread(lambda: lowered.compile(compiler_options=options))

    def wait() -> Any:
        compiled = _wait_for(work, about.name)
        statistics.compiles += 1
        observe.compiled(observe.CompiledProgram(about, module, compiled, traced - start, work.seconds))
        disk_cache.save(key, device, compiled, module)
        return compiled

    return wait


def _pieces_on_mesh(
    closed: core.ClosedJaxpr,
    pieces: Sequence[Piece],
    operands: Sequence[Any],
    mesh: Mesh,
    results: Sequence[Sharding | None] | None,
    about: observe.About,
) -> Pieces:
    """Compile the pieces of a program one after the other: how XLA divides a piece's results decides how the next ones
    are compiled, so a block that repeats is compiled once for each way in which it is given its operands.
    """
    everywhere = NamedSharding(mesh, PartitionSpec())
    lie: dict[Any, Any] = dict(zip(closed.jaxpr.invars, map(meshes.sharding_of, operands), strict=True))
    outputs = zip(closed.jaxpr.outvars, results or (), strict=False)
    wanted = {v: s for v, s in outputs if not isinstance(v, core.Literal)}
    compiled: dict[Any, Callable[..., Any]] = {}
    runs = []
    for piece in pieces:
        given = [None if isinstance(v, core.Literal) else lie.get(v) for v in piece.inputs]
        asked = [wanted.get(v) for v in piece.outputs]
        key = id(piece.function), *map(meshes.normal, given), *map(meshes.normal, asked)
        if key not in compiled:
            start = time.perf_counter()
            block = jax.jit(
                core.jaxpr_as_fun(piece.function), in_shardings=[s or everywhere for s in given], out_shardings=asked
            )
            part = observe.About(f"part {len(compiled) + 1} of {about.name}", about.operators)
            lowered = block.trace(*piece.function.in_avals).lower()
            compiled[key] = _compile(lowered, mesh.devices.flat[0], None, "", start, part, mesh)()
        runs.append(compiled[key])
        made: Any = runs[-1]
        lie.update(zip(piece.outputs, made.output_shardings, strict=True))
    return Pieces(closed, pieces, runs, everywhere)


def _from_disk(key: str, device: jax.Device, name: str, mesh: Sequence[jax.Device] | None = None) -> Any | None:
    if observe.watched():
        return None
    start = time.perf_counter()
    found = disk_cache.load(key, device, mesh)
    if found is not None:
        statistics.disk_hits += 1
        statistics.disk_seconds += time.perf_counter() - start
        observe.log.info("found %s on disk", name)
    return found


def working_memory(compiled: Any) -> int:
    """Bytes that a compiled program needs besides its operands: results and temporaries, less what takes over the
    memory of operands.
    """
    if isinstance(compiled, Pieces):
        return compiled.working_memory()
    analysis = compiled.memory_analysis()
    return analysis.temp_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes


@dataclass
class _Work:
    thread: threading.Thread
    done: threading.Event
    result: Any = None
    error: BaseException | None = None
    seconds: float = 0.0


def _in_thread(function: Callable[[], Any]) -> _Work:
    done = threading.Event()

    def run() -> None:
        begin = time.perf_counter()
        try:
            with jax.enable_x64(True):
                work.result = function()
        except BaseException as error:  # handed to the thread that waits
            work.error = error
        finally:
            work.seconds = time.perf_counter() - begin
            done.set()

    work = _Work(threading.Thread(target=run, name=_THREAD, daemon=True), done)
    work.thread.start()
    return work


def _wait_for(work: _Work, name: str) -> Any:
    if not work.done.wait(PROGRESS_AFTER):
        start = time.perf_counter() - PROGRESS_AFTER
        terminal = sys.stderr.isatty()
        try:
            while not work.done.wait(0.25):
                if terminal:
                    seconds = time.perf_counter() - start
                    print(f"\rtorchtpu: compiling {name} ... {seconds:.0f} s", end="", file=sys.stderr, flush=True)
        finally:
            if terminal:
                with contextlib.suppress(OSError):
                    print("\r\033[K", end="", file=sys.stderr, flush=True)
    if work.error is not None:
        raise work.error
    return work.result


def _leave_abandoned_compiles() -> None:
    """At exit after an interrupt: XLA aborts a process that ends while it compiles, so give it a moment, then leave."""
    running = [t for t in threading.enumerate() if t.name == _THREAD]
    for thread in running:
        thread.join(timeout=5)
    if any(t.is_alive() for t in running):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(130)  # the status of a program ended by Ctrl-C


atexit.register(_leave_abandoned_compiles)
