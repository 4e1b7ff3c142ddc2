"""Eager execution: the kernels that PyTorch's dispatcher calls for tpu tensors."""

from __future__ import annotations

__all__ = ["initialise"]

_libraries: list[object] = []


def initialise() -> None:
    """Register every kernel with the dispatcher; called once, when the device is first used."""
    if _libraries:
        return
    from torchtpu.eager import trace
    from torchtpu.eager.register import register

    trace.install()
    _libraries.extend(register())
