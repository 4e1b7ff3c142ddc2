"""Execution modes of the eager device.

* ``fused``: operators are recorded and run together, as one program, when a value is needed. Nothing has to be called.
* ``strict``: every operator is one program, enqueued at once; Python does not wait for it.
* ``debug``: the same, but Python waits for each operator, so that an error surfaces on the line that caused it.

Set the mode with ``torch.tpu.eager_mode = "debug"``, for a block with ``torch.tpu.set_eager_mode("debug")``, or for a
process with the environment variable ``TORCHTPU_EAGER_MODE``.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from torchtpu import _C

__all__ = ["MODES", "get_mode", "set_eager_mode", "set_mode"]

MODES = ("fused", "strict", "debug")


def _checked(mode: str) -> str:
    if mode not in MODES:
        raise ValueError(f"unknown eager mode {mode!r}: choose one of {', '.join(MODES)}")
    return mode


_mode = _checked(os.environ.get("TORCHTPU_EAGER_MODE", "fused"))
blocking = _mode == "debug"
"""True when every operator is waited for; read by the dispatch path."""
fused = _mode == "fused"
"""True when operators are recorded; read by the dispatch path."""
_C.set_recording(fused)


def get_mode() -> str:
    """The current mode's name."""
    return _mode


def set_mode(mode: str) -> None:
    """Change the mode of this process, for all threads.

    Raises:
        ValueError: there is no such mode.
    """
    global _mode, blocking, fused
    _checked(mode)
    if fused and mode != "fused":
        from torchtpu.eager import trace

        trace.flush_all()
    _mode, blocking, fused = mode, mode == "debug", mode == "fused"
    _C.set_recording(fused)


@contextlib.contextmanager
def set_eager_mode(mode: str) -> Iterator[None]:
    """Use a mode for a block.

    Example:
        >>> with torch.tpu.set_eager_mode("debug"):
        ...     loss = model(x)
    """
    before = _mode
    set_mode(mode)
    try:
        yield
    finally:
        set_mode(before)
