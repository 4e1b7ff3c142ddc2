"""Run-time checks that a program leaves behind: values the host looks at when it synchronises.

XLA clamps an out-of-range index; PyTorch raises. A program that indexes returns, beside its results, one int64 per
check: OK or the wrong
index. Waiting for it at once would serialise host and device, so it is kept here until the next synchronisation, or
until it is known to be
ready.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from torchtpu.lowering.context import OK

__all__ = ["note", "on_demand", "raise_failed"]

_LIMIT = 64


@dataclass(frozen=True)
class _Pending:
    values: Any  # a jax.Array
    messages: tuple[tuple[str, type[Exception]], ...]
    operator: str


_pending: deque[_Pending] = deque()
_lock = threading.Lock()
_compute: Callable[[Any], Any] = np.asarray


def on_demand(compute: Callable[[Any], Any]) -> None:
    """Say how to get the array behind values that have not been computed when they were noted."""
    global _compute
    _compute = compute


def note(values: jax.Array, messages: tuple[tuple[str, type[Exception]], ...], operator: str) -> None:
    """Keep a program's checks until the next synchronisation."""
    _pending.append(_Pending(values, messages, operator))
    if len(_pending) > _LIMIT:
        raise_failed(wait=False)


def raise_failed(*, wait: bool = True) -> None:
    """Raise the first failed check, in program order.

    Args:
        wait: wait for programs still running; otherwise look only at those that have finished.

    Raises:
        IndexError: an index was out of range.
    """
    while _pending:
        with _lock:
            if not _pending or not (wait or len(_pending) > 4 * _LIMIT or _pending[0].values.is_ready()):
                return
            entry = _pending.popleft()
        values = np.asarray(_compute(entry.values))
        for value, (message, error) in zip(values, entry.messages, strict=True):
            if value != OK:
                _pending.clear()
                raise error(message.format(value=int(value)))
