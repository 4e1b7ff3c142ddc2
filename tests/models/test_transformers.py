"""Unmodified Transformers models on the device, compared with CPU: forward, loss, every gradient, three optimizer
steps.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.testing import assert_close

import torchtpu  # noqa: F401
from zoo import MODELS, Batch, build

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3, eps=1e-3),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-3, eps=1e-3, fused=True),
    "AdamW per tensor": lambda p: torch.optim.AdamW(p, lr=1e-3, eps=1e-3, foreach=False),
    "AdamW amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-3, eps=1e-3, amsgrad=True),
    "AdamW capturable": lambda p: torch.optim.AdamW(list(p), lr=1e-3, eps=1e-3, capturable=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
}


def on(device: str, batch: Batch) -> Batch:
    return {k: v.to(device) for k, v in batch.items()}


def train(
    model: torch.nn.Module, batch: Batch, make: Callable[[Any], torch.optim.Optimizer], steps: int = 3
) -> list[Any]:
    """Losses and gradients of every step, logits of the first, and the parameters and buffers at the end, all on the
    CPU.
    """
    optimizer = make(model.parameters())
    seen: list[Any] = []
    for _ in range(steps):
        out = model(**batch)
        out.loss.backward()
        if not seen:
            seen.append(out.logits.detach().cpu())
        seen.append(out.loss.detach().cpu())
        seen.append({n: p.grad.cpu() for n, p in model.named_parameters() if p.grad is not None})
        torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        optimizer.zero_grad()
    seen.append({n: p.detach().cpu() for n, p in model.state_dict().items()})
    return seen


def compare(name: str, optimizer: str) -> None:
    # PyTorch has no capturable optimizers on the CPU; they compute what the others do.
    model, batch = build(name)
    twin = copy.deepcopy(model).to("tpu")
    expected = train(model, batch, OPTIMIZERS[optimizer.removesuffix(" capturable")])
    before = torch.tpu.fallbacks()
    actual = train(twin, on("tpu", batch), OPTIMIZERS[optimizer])
    assert torch.tpu.fallbacks() == before
    assert_close(actual, expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("name", list(MODELS))
def test_trains_like_cpu(name):
    compare(name, "AdamW")


@pytest.mark.parametrize("optimizer", [o for o in OPTIMIZERS if o != "AdamW"])
def test_optimizers(optimizer):
    compare("llama", optimizer)
