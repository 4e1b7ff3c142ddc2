"""The device in a minute, for versions of torch on which not every test runs."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import torchtpu  # noqa: F401


def test_arithmetic_and_views() -> None:
    x = torch.arange(12.0, device="tpu").view(3, 4)
    x[:, 1:3].mul_(2)
    expected = torch.arange(12.0).view(3, 4)
    expected[:, 1:3].mul_(2)
    assert x.device.type == "tpu"
    assert_close(x.cpu(), expected)
    assert_close((x.t() @ x).cpu(), expected.t() @ expected)


def test_training_step() -> None:
    def losses(device: str) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))
        x, target = torch.randn(6, 8), torch.tensor([0, 1, 2, 3, 0, 1])
        model, x, target = model.to(device), x.to(device), target.to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        found = []
        for _ in range(3):
            loss = nn.functional.cross_entropy(model(x), target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    assert_close(losses("tpu"), losses("cpu"), rtol=1e-5, atol=1e-6)
    assert torch.tpu.fallback_count() == 0


def test_random_numbers_repeat() -> None:
    torch.manual_seed(3)
    first = torch.randn(5, device="tpu").cpu()
    torch.manual_seed(3)
    assert_close(torch.randn(5, device="tpu").cpu(), first, rtol=0, atol=0)


def test_wrong_index_raises() -> None:
    with pytest.raises(IndexError):
        torch.arange(3, device="tpu")[torch.tensor([5], device="tpu")].cpu()
