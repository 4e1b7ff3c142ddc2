"""What the runtime does, told to whoever asks: programs compiled, and places where Python waits for the device.

The logger ``torchtpu`` says at INFO what is compiled and why; ``TORCH_LOGS=torchtpu`` turns it on. Where PyTorch keeps
a structured trace (``TORCH_TRACE``, read by tlparse), every program's StableHLO is an artifact of it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch._logging import trace_structured

__all__ = ["About", "CompiledProgram", "compiled", "exact", "log", "lowered", "observing", "wait", "watched"]

log = logging.getLogger("torchtpu")


@dataclass(frozen=True)
class About:
    """What is compiled.

    Attributes:
        name: what messages call it.
        operators: aten overloads, as they were recorded; for a part of a program those of the whole.
        runs: how often it runs in one call of the program: a block that repeats is compiled once.
    """

    name: str
    operators: tuple[str, ...] = ()
    runs: int = 1


@dataclass(frozen=True)
class CompiledProgram:
    """A program that has been compiled.

    Attributes:
        about: what it is.
        text: its StableHLO.
        executable: the ``jax.stages.Compiled``.
        trace_seconds: tracing it and lowering it to StableHLO.
        compile_seconds: XLA.
    """

    about: About
    text: str
    executable: Any
    trace_seconds: float
    compile_seconds: float


_compiled: list[Callable[[CompiledProgram], None]] = []
_waiting: list[Callable[[str], None]] = []
_exact: list[Callable[[str], None]] = []


@contextlib.contextmanager
def observing(
    on_compile: Callable[[CompiledProgram], None],
    on_wait: Callable[[str], None],
    on_exact: Callable[[str], None],
) -> Iterator[None]:
    """Call the observers during a block. Programs on disk are compiled all the same: observers see them whole."""
    _compiled.append(on_compile)
    _waiting.append(on_wait)
    _exact.append(on_exact)
    try:
        yield
    finally:
        _compiled.remove(on_compile)
        _waiting.remove(on_wait)
        _exact.remove(on_exact)


def watched() -> bool:
    """Whether anybody observes what is compiled."""
    return bool(_compiled)


def lowered(about: About, text: str) -> None:
    """A program has been traced and is going to be compiled."""
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": "torchtpu_stablehlo", "encoding": "string"},
        payload_fn=lambda: f"// {about.name}: {', '.join(about.operators)}\n{text}",
        expect_trace_id=False,  # eager programs belong to no compile of Dynamo
    )


def compiled(program: CompiledProgram) -> None:
    """A program has been compiled."""
    log.info(
        "compiled %s in %.2f s (traced in %.2f s)", program.about.name, program.compile_seconds, program.trace_seconds
    )
    for function in list(_compiled):
        function(program)


def wait(what: str) -> None:
    """Python is about to wait for the device, because of ``what``."""
    for function in list(_waiting):
        function(what)


def exact(why: str) -> None:
    """What has sizes that change is compiled for exact sizes, because of ``why``."""
    log.info("compiled for exact sizes: %s", why)
    for function in list(_exact):
        function(why)
