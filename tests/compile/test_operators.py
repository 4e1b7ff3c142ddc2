"""Operators whose meta kernel in PyTorch knows less than the CPU: compiled all the same."""

from __future__ import annotations

import pytest
import torch

import torchtpu  # noqa: F401


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_groups(dtype):
    """What mixtures of experts compute with."""

    def function(x: torch.Tensor, experts: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.grouped_mm(x, experts, offs=ends).relu()

    torch.manual_seed(0)
    x, experts = torch.randn(12, 16, dtype=dtype), torch.randn(3, 16, 8, dtype=dtype)
    ends = torch.tensor([4, 4, 12], dtype=torch.int32)
    wanted = function(x, experts, ends)
    found = torch.compile(function, fullgraph=True)(x.to("tpu"), experts.to("tpu"), ends.to("tpu"))
    torch.testing.assert_close(found.cpu(), wanted)

    weights = [e.clone().requires_grad_() for e in (x, experts)]
    function(*weights, ends).float().square().sum().backward()
    moved = [e.to("tpu").requires_grad_() for e in (x, experts)]
    torch.compile(function)(*moved, ends.to("tpu")).float().square().sum().backward()
    for a, b in zip(moved, weights, strict=True):
        torch.testing.assert_close(a.grad.cpu(), b.grad, rtol=1e-2 if dtype is torch.bfloat16 else 1e-4, atol=1e-2)
