"""Fused mode: operators are recorded as they are called, and run together, as one program, when a value is needed.

A recorded operator's results are ``Pending`` values in their storages: sizes and dtypes are known, elements are not.
The trace is a list of integers: which program, on which earlier results and which arrays from outside. Numbers, slice
starts and random seeds are collected beside it, as operands, so a loop's next iteration makes the same list and finds
the compiled program by it.

Only what is still referenced when the trace runs is returned: a temporary that Python has dropped is never
materialised, and an array that nothing but the trace refers to gives its memory to a result (donation).
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from torchtpu import _C
from torchtpu.eager import modes
from torchtpu.eager.arrays import number_operand
from torchtpu.eager.cache import TraceCache
from torchtpu.eager.errors import translate
from torchtpu.eager.executable import Variant
from torchtpu.eager.hidden import hide_from_dynamo
from torchtpu.eager.program import Program
from torchtpu.runtime import checks, devices, memory, meshes

__all__ = ["Pending", "flush", "flush_all", "force", "fresh_cache", "is_early", "record"]

if TYPE_CHECKING:

    class Pending:
        """A value that a trace will compute; see ``csrc/record.cpp``, as for ``Trace``."""

        array: Any
        error: Exception | None
        trace: Trace | None
        index: int

    class Trace:
        """The operators recorded on one device and not run yet."""

        device: int
        programs: list[Program]
        arrays: list[Any]
        signature: list[int]

        def close(self) -> tuple[list[Pending], bytes, bytes]: ...
        def reopen(self) -> None: ...
        def key(self) -> bytes: ...
        def numbers(self) -> tuple[bytes, bytes, bytes]: ...
else:
    Pending, Trace = _C.Pending, _C.Trace

_lock = threading.RLock()
"""Held while a trace runs, and by whoever has to wait for that; appending to one takes only the interpreter's lock."""
_cache = TraceCache()
_early: weakref.ref[Any] | None = None
"""What was computed before the rest of the latest trace, because Python waits for it."""


def record(
    program: Program, operands: list[Any], starts: list[int], seed: tuple[int, int] | None, device: int
) -> list[Any]:
    """Record an operator on a device; returns a pending value for every array it computes.

    Args:
        program: the traced operator.
        operands: storage values (arrays, pending values of this device, None) and numbers.
        starts: where its slices start.
        seed: (seed, offset) if it draws random numbers.
        device: index of the device.
    """
    if program.complex:
        for i in program.complex:
            operands[i] = number_operand(operands[i], device)
    made = _C.record(program, program.recorded, operands, starts, seed, device)
    while made is None:
        with _lock:  # the trace must end here, or another thread runs it
            if program.reads:
                _C.set_initialising(False)
            flush(device)
            operands = [force(x) for x in operands]
            made = _C.record(program, program.recorded, operands, starts, seed, device)
    return made


def flush(device: int, waiting: Pending | None = None) -> None:
    """Enqueue everything recorded on a device. Returns before it has been computed.

    Args:
        device: its index.
        waiting: the value that Python is going to wait for, and for no other.

    Raises:
        KeyboardInterrupt: Ctrl-C during a compile; nothing is lost, the next flush starts over.
        torch.OutOfMemoryError: the program does not fit.
    """
    global _early
    with _lock:
        trace = _C.trace_of(device)
        if trace is None:
            return
        live, wanted, free = trace.close()
        if not live:
            _C.end_trace(device)
            return
        try:
            placement = meshes.placement(trace.arrays, [p.mesh for p in trace.programs]) if meshes.active else None
            plan = _cache.find(trace, placement, wanted, free, -1 if waiting is None else waiting.index)
            memory.note(device, _C.allocated_bytes(device) + plan.more_bytes)
            values = plan.variant.run(trace) if placement is None else _enqueue(trace, placement, plan.variant)
        except Exception as error:
            _C.end_trace(device)
            failed = translate(error, f"a program of {len(trace.programs)} operators", device)
            _C.fail(live, failed)
            raise failed from error
        except BaseException:
            trace.reopen()
            raise
        _C.end_trace(device)
        _C.settle(live, values, plan.positions)
        _early = weakref.ref(waiting.array) if waiting is not None and plan.variant.first else None
        devices.note(device, live[-1].array)


def _enqueue(trace: Trace, placement: meshes.Placement, variant: Variant) -> list[Any]:
    """Run a trace on a mesh."""
    first, last = trace.programs[0].name, trace.programs[-1].name
    name = f"{len(trace.programs)} operators, {first} to {last}" if len(trace.programs) > 1 else first
    numbers, run = lambda: b"".join(trace.numbers()), lambda: variant.run(trace)
    return meshes.enqueue(placement, variant.digest, name, numbers, run)


def flush_all() -> None:
    """Enqueue everything recorded on any device."""
    for device in _C.traced_devices():
        flush(device)


@contextlib.contextmanager
def fresh_cache() -> Iterator[TraceCache]:
    """Compile what a block runs even if it has been compiled: the block has a cache of its own."""
    global _cache
    flush_all()
    outer, _cache = _cache, TraceCache()
    try:
        yield _cache
    finally:
        _cache = outer


def force(value: Any) -> Any:
    """The array behind a storage's value, running what it depends on.

    Raises:
        Exception: the error of the program that should have computed it.
    """
    if type(value) is not Pending:
        return value
    with _lock:
        if value.array is None:
            if value.error is not None:
                raise value.error
            if value.trace is not None:
                flush(value.trace.device, value)
        return value.array


def is_early(array: Any) -> bool:
    """Whether an array is a value that was computed before the rest of what was recorded with it: the checks of that
    rest are not to be waited for with it.
    """
    return _early is not None and _early() is array


def statistics() -> dict[str, Any]:
    """Counters of the traces: see ``torch.tpu.compile_stats``."""
    return _cache.statistics()


def install() -> None:
    """Connect recording with the rest of the runtime; called once."""
    checks.on_demand(force)
    devices.on_flush(flush)
    for function in (record, flush, flush_all, _before_optimizer, _after_optimizer):
        hide_from_dynamo(function)
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    # A training step is recorded as two units, and the first one's making of the optimizer's state apart from both, so
    # that every step runs the same two programs. Gradients are results either way: nothing is lost by ending there.
    register_optimizer_step_pre_hook(_before_optimizer)
    register_optimizer_step_post_hook(_after_optimizer)


def _before_optimizer(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    flush_all()
    _C.set_initialising(modes.fused and not optimizer.state)


def _after_optimizer(*_: Any) -> None:
    _C.set_initialising(False)
    flush_all()
