"""Keep Dynamo out of the runtime's own Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

__all__ = ["hide_from_dynamo"]


def hide_from_dynamo(function: Callable[..., Any]) -> None:
    """Never compile a function, nor what it calls: after a graph break Dynamo looks at every Python frame, and would
    compile the kernels, and JAX below them.
    """
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    function._torchdynamo_disable = True  # type: ignore[attr-defined]  # nor read it along with its caller
