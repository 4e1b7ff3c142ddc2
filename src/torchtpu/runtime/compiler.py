"""Compile a traced function for one device, visibly and interruptibly.

XLA compiles in C++ and cannot be stopped, so it runs on a worker thread: the caller waits where Ctrl-C reaches it, and
a compile that takes
longer than ``PROGRESS_AFTER`` seconds says on a terminal what it compiles and for how long.
"""

from __future__ import annotations

import atexit
import contextlib
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
from jax.sharding import SingleDeviceSharding

from torchtpu.runtime import disk_cache, observe, repeats
from torchtpu.runtime.pieces import Pieces

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
    """Count the time of a block as time to compile."""
    start, processor = time.perf_counter(), time.process_time()
    try:
        yield
    finally:
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

    Returns:
        A callable of the operands; it enqueues the program and returns its results.

    Raises:
        KeyboardInterrupt: Ctrl-C during the compile, which is abandoned.
    """
    if key is not None and (found := _from_disk(key, device, name)) is not None:
        return found
    start = time.perf_counter()
    with jax.enable_x64(True), timed():
        jitted = jax.jit(function, out_shardings=SingleDeviceSharding(device), donate_argnums=donate)
        traced = jitted.trace(*operands)
        pieces = repeats.split(traced.jaxpr) if repeats.enabled() and not donate else None
        if pieces is None:
            return _compile(traced.lower(), device, key, repr(donate), start, observe.About(name, tuple(operators)))()
        # Each part compiles while the next ones are lowered.
        distinct = {id(p.function): p.function for p in pieces}
        runs = Counter(id(p.function) for p in pieces)
        waiting: dict[int, Callable[[], Any]] = {}
        for n, (part, computes) in enumerate(distinct.items()):
            block = jax.jit(core.jaxpr_as_fun(computes), out_shardings=SingleDeviceSharding(device))
            lowered = block.trace(*computes.in_avals).lower()
            about = observe.About(f"part {n + 1} of {len(distinct)} of {name}", tuple(operators), runs[part])
            waiting[part] = _compile(lowered, device, None, "", start, about)
            start = time.perf_counter()
        return Pieces(traced.jaxpr, pieces, {part: wait() for part, wait in waiting.items()}, device)


def _compile(
    lowered: Any, device: jax.Device, key: str | None, extra: str, start: float, about: observe.About
) -> Callable[[], Any]:
    """Begin to compile what was lowered, or take it from the cache on disk; ``start`` is when tracing it began.

    Returns:
        A function that waits for the compiled program and returns it.
    """
    module = lowered.as_text()
    if key is None:
        key = disk_cache.digest(module, extra)
        if (found := _from_disk(key, device, about.name)) is not None:
            return lambda: found
    observe.lowered(about, module)
    traced = time.perf_counter()
    work = _in_thread(lowered.compile)

    def wait() -> Any:
        compiled = _wait_for(work, about.name)
        statistics.compiles += 1
        observe.compiled(observe.CompiledProgram(about, module, compiled, traced - start, work.seconds))
        disk_cache.save(key, device, compiled, module)
        return compiled

    return wait


def _from_disk(key: str, device: jax.Device, name: str) -> Any | None:
    if observe.watched():
        return None
    start = time.perf_counter()
    found = disk_cache.load(key, device)
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
