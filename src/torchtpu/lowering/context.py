"""What a lowering may ask of the program being traced: random keys, and checks of values that only the device knows."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

__all__ = ["Check", "Trace", "check", "check_index", "current", "random_key", "tracing"]


@dataclass
class Check:
    """A run-time check: ``value`` is an int64 scalar, ``OK`` or the offending value. ``message`` has ``{value}``
    in it.
    """

    value: jax.Array
    message: str
    error: type[Exception] = IndexError


OK = -(2**63)
"""The value of a check that passed; no index has it."""


@dataclass
class Trace:
    """One program being traced.

    Attributes:
        reserve: gives an operator's key when it first draws, and counts the draw; None where nothing may be drawn.
        key: the key of the operator being traced, once it has drawn.
        keys_used: how many keys were derived from it.
        checks: the run-time checks so far.
        checked: whether there are any; a program that only compiles has no use for them.
    """

    reserve: Callable[[], jax.Array] | None = None
    key: jax.Array | None = None
    keys_used: int = 0
    checks: list[Check] = field(default_factory=list)
    checked: bool = True

    def begin_operator(self, reserve: Callable[[], jax.Array]) -> None:
        """The next operator of a graph begins: what it draws is its own."""
        self.reserve, self.key, self.keys_used = reserve, None, 0


_state = threading.local()


@contextlib.contextmanager
def tracing(trace: Trace) -> Iterator[Trace]:
    """Make ``trace`` the current one of this thread."""
    outer = getattr(_state, "trace", None)
    _state.trace = trace
    try:
        yield trace
    finally:
        _state.trace = outer


def current() -> Trace:
    """The program that this thread is tracing.

    Raises:
        RuntimeError: there is none.
    """
    trace: Trace | None = getattr(_state, "trace", None)
    if trace is None:
        raise RuntimeError("no program is being traced")
    return trace


def random_key() -> jax.Array:
    """A fresh JAX PRNG key of this operator, derived from the generator's (seed, offset), which are operands of the
    program.

    An operator takes one draw from the generator, however many keys it needs, and none if it never asks: evaluation
    must not move the numbers of training.

    Raises:
        RuntimeError: the lowering was not registered with ``random=True``.
    """
    trace: Trace | None = getattr(_state, "trace", None)
    if trace is not None and trace.key is None and trace.reserve is not None:
        trace.key = trace.reserve()
    if trace is None or trace.key is None:
        raise RuntimeError("a lowering that draws random numbers must be registered with random=True")
    key = jax.random.fold_in(trace.key, trace.keys_used)
    trace.keys_used += 1
    return key


def check(bad: jax.Array, value: jax.Array, message: str, error: type[Exception] = RuntimeError) -> None:
    """Raise ``error`` no later than the next synchronisation if ``bad`` is true anywhere.

    Args:
        bad: booleans, any shape.
        value: integers of that shape; the first where ``bad`` holds is put into the message.
        message: the error's text, with ``{value}`` where the value goes.
        error: what is raised.
    """
    trace: Trace | None = getattr(_state, "trace", None)
    if trace is not None and trace.checked and bad.size:
        first = value.astype(jnp.int64).reshape(-1)[jnp.argmax(bad.reshape(-1))]
        trace.checks.append(Check(jnp.where(bad.any(), first, OK), message, error))


def check_index(
    index: jax.Array, size: int, message: str, *, allow_negative: bool = True, error: type[Exception] = IndexError
) -> jax.Array:
    """Check that every index lies in ``[-size, size)`` and return the indices made non-negative, as int32.

    XLA clamps a wrong index silently; PyTorch raises. The check runs on the device and raises IndexError no later than
    the next
    synchronisation.

    Args:
        index: integers, any shape.
        size: extent of the dimension indexed.
        message: the error's text, with ``{value}`` where the first wrong index goes.
        allow_negative: count negative indices from the end.
        error: what is raised.
    """
    low = -size if allow_negative else 0
    wide = index.astype(jnp.int64)
    check((wide < low) | (wide >= size), wide, message, error)
    index = index.astype(jnp.int32)
    return jnp.where(index < 0, index + size, index) if allow_negative else index
