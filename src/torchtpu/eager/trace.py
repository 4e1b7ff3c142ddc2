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
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from torchtpu import _C
from torchtpu.eager import modes
from torchtpu.eager.arrays import number_operand
from torchtpu.eager.cache import TraceCache
from torchtpu.eager.hidden import hide_from_dynamo
from torchtpu.eager.program import Kind, Program
from torchtpu.runtime import checks, devices, memory, meshes

__all__ = ["Pending", "flush", "flush_all", "force", "fresh_cache", "record"]

LOOP = 64
"""A trace at least this long ends where its first operator comes again on the same array: one iteration of a loop."""
LONG = 2048
"""A trace at least this long ends where its first operator comes again on any array."""
LONGEST = 8192
"""A trace ends here at the latest: compile time grows with it."""


class Pending:
    """A value that a trace will compute.

    Attributes:
        array: the value once computed, else None.
        index: its number among the trace's results.
        trace: the trace; None once computed.
        error: why it could not be computed.
    """

    __slots__ = ("__weakref__", "array", "error", "index", "trace")

    def __init__(self, trace: Trace, index: int) -> None:
        self.trace: Trace | None = trace
        self.index = index
        self.array: Any = None
        self.error: Exception | None = None

    def is_ready(self) -> bool:
        """Whether the value is there, as with a ``jax.Array``."""
        return self.array is not None and self.array.is_ready()


class Trace:
    """The operators recorded on one device and not run yet."""

    def __init__(self, device: int) -> None:
        self.device = device
        self.signature: list[int] = []
        self.programs: list[Program] = []
        self.arrays: list[Any] = []
        self.slots: dict[int, int] = {}
        self.floats: list[float] = []
        self.integers: list[int] = []
        self.seeds: list[tuple[int, int]] = []
        self.results: list[weakref.ref[Pending]] = []
        self.head: Any = None
        self.placement: meshes.Placement | None = None

    def record(
        self, program: Program, operands: list[Any], starts: list[int], seed: tuple[int, int] | None
    ) -> list[Any]:
        """Append one operator; returns its results, pending."""
        signature, slots, arrays = self.signature, self.slots, self.arrays
        signature.append(program.uid)
        self.programs.append(program)
        if not slots and program.only_arrays and _append_all(operands, signature, slots, arrays):
            operands = []
        for x, kind in zip(operands, program.kinds, strict=False):
            if kind == Kind.ARRAY or kind == Kind.COMPLEX:
                if type(x) is Pending:
                    if x.trace is self:
                        signature.append(x.index)
                        continue
                    x = force(x)  # another thread ran what it belonged to meanwhile
                if kind == Kind.COMPLEX:
                    x = number_operand(x, self.device)
                slot = slots.get(id(x))
                if slot is None:
                    slot = slots[id(x)] = len(arrays)
                    arrays.append(x)
                signature.append(-1 - slot)
            elif kind == Kind.FLOAT:
                self.floats.append(x)
            elif kind == Kind.INTEGER:
                self.integers.append(x)
        if starts:
            self.integers.extend(starts)
        if seed is not None:
            self.seeds.append(seed)
        results = self.results
        made = [Pending(self, len(results) + i) for i in range(program.results)]
        results.extend(map(weakref.ref, made))
        return made

    def begins_again(self, program: Program, operands: list[Any]) -> bool:
        """Whether a trace of at least ``LOOP`` operators should end before this one: a loop's next iteration."""
        length = len(self.programs)
        if program is not self.programs[0]:
            return length >= LONGEST
        first = operands[0] if operands else None
        return length >= LONG or (first is self.head and first is not None)


def _append_all(operands: list[Any], signature: list[int], slots: dict[int, int], arrays: list[Any]) -> bool:
    """Append the operands of a trace's first program, where all are arrays and none comes twice: a compiled model has
    hundreds. False where it is not so, and nothing has been appended.
    """
    count = len(operands)
    found = dict(zip(map(id, operands), range(count), strict=True))
    if len(found) != count or Pending in set(map(type, operands)):
        return False
    slots.update(found)
    arrays.extend(operands)
    signature.extend(range(-1, -1 - count, -1))
    return True


_traces: dict[int, Trace] = {}
_lock = threading.RLock()
_cache = TraceCache()
_initialising = False
"""Whether an optimizer is making its state: that ends the trace, so that what follows is the same at every step."""


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
    global _initialising
    with _lock:
        trace = _traces.get(device)
        if _initialising and program.reads:
            _initialising = False
            flush(device)
            operands = [x.array if type(x) is Pending else x for x in operands]
            trace = None
        elif trace is not None and len(trace.programs) >= LOOP and trace.begins_again(program, operands):
            flush(device)
            operands = [x.array if type(x) is Pending else x for x in operands]
            trace = None
        if trace is None:
            trace = _traces[device] = Trace(device)
            trace.head = operands[0] if operands and type(operands[0]) is not Pending else None
        return trace.record(program, operands, starts, seed)


def flush(device: int) -> None:
    """Enqueue everything recorded on a device. Returns before it has been computed.

    Raises:
        KeyboardInterrupt: Ctrl-C during a compile; nothing is lost, the next flush starts over.
        torch.OutOfMemoryError: the program does not fit.
    """
    with _lock:
        trace = _traces.get(device)
        if trace is None:
            return
        live = [p for p in (ref() for ref in trace.results) if p is not None]
        if not live:
            del _traces[device]
            return
        from torchtpu.eager.errors import translate

        wanted = tuple(p.index for p in live)
        trace.head = None
        # Two references are ours: the trace's list and getrefcount's argument.
        arrays = trace.arrays
        free = tuple([i for i, n in enumerate(map(sys.getrefcount, arrays)) if n <= 2])
        try:
            if meshes.active:
                trace.placement = meshes.placement(arrays, [p.mesh for p in trace.programs])
            if trace.placement is not None:
                free = tuple(i for i in free if trace.placement.lies[i] is not None)
                arrays = trace.placement.spread(arrays)
            variant = _cache.find(trace, arrays, wanted, free)
            held = _C.allocated_bytes(device) - sum(variant.sizes[i] for i in wanted)
            held += sum(arrays[i].nbytes for i in free)
            memory.note(device, held + variant.working_memory)
            values = variant.run(
                arrays,
                np.asarray(trace.floats, np.float64),
                np.asarray(trace.integers, np.int64),
                np.asarray(trace.seeds, np.uint64).view(np.uint32).reshape(-1, 4),
            )
        except Exception as error:
            del _traces[device]
            failed = translate(error, f"a program of {len(trace.programs)} operators", device)
            for p in live:
                p.error, p.trace = failed, None
            raise failed from error
        del _traces[device]
        for p in live:
            p.array, p.trace = values[p.index], None
        devices.note(device, live[-1].array)


def flush_all() -> None:
    """Enqueue everything recorded on any device."""
    for device in list(_traces):
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
                flush(value.trace.device)
        return value.array


def statistics() -> dict[str, Any]:
    """Counters of the traces: see ``torch.tpu.compile_stats``."""
    return _cache.statistics()


def install() -> None:
    """Connect recording with the rest of the runtime; called once."""
    _C.set_pending_type(Pending)
    checks.on_demand(force)
    devices.on_flush(flush)
    for function in (flush, flush_all, _before_optimizer, _after_optimizer):
        hide_from_dynamo(function)
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    # A training step is recorded as two units, and the first one's making of the optimizer's state apart from both, so
    # that every step runs the same two programs. Gradients are results either way: nothing is lost by ending there.
    register_optimizer_step_pre_hook(_before_optimizer)
    register_optimizer_step_post_hook(_after_optimizer)


def _before_optimizer(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    global _initialising
    flush_all()
    _initialising = modes.fused and not optimizer.state


def _after_optimizer(*_: Any) -> None:
    global _initialising
    _initialising = False
    flush_all()
