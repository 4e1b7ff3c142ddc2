"""Results of operators for which PyTorch has no meta kernel, without which Dynamo cannot put them into a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["META_KERNELS"]


def _like_first(self: torch.Tensor, *others: Any, **kwargs: Any) -> torch.Tensor:
    return self.new_empty(self.shape)


def _broadcast(self: torch.Tensor, other: torch.Tensor, generator: Any = None) -> torch.Tensor:
    return self.new_empty(torch.broadcast_shapes(self.shape, other.shape))


META_KERNELS: dict[str, Callable[..., torch.Tensor]] = {
    "binomial": _broadcast,
    "_sample_dirichlet": _like_first,
    "_dirichlet_grad": _like_first,
    "_standard_gamma_grad": _like_first,
}
"""Meta kernels by overload."""
