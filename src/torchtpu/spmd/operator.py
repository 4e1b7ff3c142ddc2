"""The operator that says where a value lies; its gradient says the same of the gradient."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["constrain"]

_library = torch.library.Library("torchtpu", "FRAGMENT")
_library.define("constrain(Tensor self, str place, str gradient, bool again) -> Tensor", tags=(torch.Tag.pointwise,))


@torch.library.register_fake("torchtpu::constrain", lib=_library)
def _fake(self: torch.Tensor, place: str, gradient: str, again: bool) -> torch.Tensor:
    return torch.empty_like(self, memory_format=torch.contiguous_format)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, ctx.place, ctx.gradient, _ = inputs


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    return constrain(gradient, ctx.gradient, ctx.place, False), None, None, None


torch.library.register_autograd("torchtpu::constrain", _backward, setup_context=_setup, lib=_library)


def constrain(x: torch.Tensor, place: str, gradient: str, again: bool = False) -> torch.Tensor:
    """``x``, laid out on a mesh.

    Args:
        x: any tensor on the device.
        place: where, as ``meshes.text`` writes it.
        gradient: where its gradient lies.
        again: it has been laid out so before; the value of then is not to be kept for now.
    """
    return torch.ops.torchtpu.constrain.default(x, place, gradient, again)
