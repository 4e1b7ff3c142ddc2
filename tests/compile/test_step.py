"""A whole training step as one compiled function: Dynamo stays out of what the optimizer's hooks run."""

from __future__ import annotations

import torch
from torch import nn


def losses(device: str, backend: str) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 2))
    x = torch.randn(16, 8).to(device)
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    compiled = torch.compile(step, backend=backend)
    return [compiled().item() for _ in range(3)]


def test_a_compiled_step_trains_as_on_the_cpu() -> None:
    torch.testing.assert_close(losses("tpu", "tpu"), losses("cpu", "eager"))
