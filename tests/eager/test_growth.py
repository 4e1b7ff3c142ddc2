"""Loops whose tensors grow: a bounded number of compiles, and the results of PyTorch CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from torchtpu.compile.padding import Buckets


@pytest.fixture(autouse=True)
def mode():
    """Traces are what grows, and there are none in the other modes."""
    with torch.tpu.set_eager_mode("fused"):
        yield


def _compiles() -> int:
    return torch.tpu.compile_stats()["compiles"]


def _grow(step: Callable[..., Any], device: str, start: int, steps: int) -> tuple[list[torch.Tensor], list[int]]:
    """Results of a loop on a tensor that begins with ``start`` columns, and how often each step compiled."""
    torch.manual_seed(start)
    x = torch.randn(3, start).to(device)
    found, compiled = [], []
    for _ in range(steps):
        before = _compiles()
        x, seen = step(x)
        found.append(seen.cpu())
        compiled.append(_compiles() - before)
    return [*found, x.cpu()], compiled


def _append(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Twenty operators on all there is, and one column more."""
    y = x
    for _ in range(5):
        y = (y * 0.5 + x.softmax(-1)).cumsum(-1)
    y = y - y.mean(-1, keepdim=True)
    return torch.cat([x, y[:, -1:]], -1), y.sum(-1) + y[:, 1]


def _write(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Writes to all of a new tensor, to a part of it, and in place."""
    y = x.double().float()
    for k in range(4):
        y.mul_(0.9).add_(x)
        y[:, -1] = float(k)
        y[:, 1:].clamp_(max=3.0)
        y.masked_fill_(y > 2, 0.25)
    return torch.cat([y, y[:, :1] + 1], -1), y.t().sum(0)


def _attend(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over all that has been seen, as in a decoder with a cache that grows."""
    keys = torch.stack([x * k for k in range(1, 9)], -1)[:, None]
    query = keys[:, :, -1:]
    for _ in range(3):
        query = torch.nn.functional.scaled_dot_product_attention(query, keys, keys) + query * 0.1
        keys = torch.nn.functional.layer_norm(keys.transpose(1, 2), (8,)).transpose(1, 2)
    return torch.cat([x, query[:, 0, :, 0]], -1), query.flatten(1)


def _token_mask(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What generate() does with its tokens: masks, positions, membership, the last one."""
    ids = (x * 3).long()
    mask = torch.cat([torch.ones_like(ids), ids.new_ones(3, 1)], -1)
    positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)
    causal = torch.arange(mask.shape[1], device=x.device) <= positions[:, :, None]
    stop = torch.isin(ids, torch.tensor([1, 2], device=x.device)).any(-1)
    room = torch.nn.functional.pad(mask, (0, 200 - mask.shape[1]), value=2)
    stop = stop + torch.nn.functional.pad(mask, (1, 0)).sum(-1) + room.sum(-1)
    last = ids[:, -1:].clone() + positions[:, -1:]
    return torch.cat([x, last.float() / 7], -1), causal.sum((1, 2)) + stop


@pytest.mark.parametrize("step", [_append, _write, _attend, _token_mask], ids=lambda f: f.__name__[1:])
def test_a_loop_that_appends(step):
    steps = 25
    found, compiled = _grow(step, "tpu", 5, steps)
    wanted, _ = _grow(step, "cpu", 5, steps)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    # Columns 5 to 29: after the first sizes, programs are made only where a power of two is passed.
    sizes = range(5, 5 + steps)
    quiet = [c for n, c in zip(sizes, compiled, strict=True) if n >= 12 and not 14 <= n <= 19]
    assert sum(quiet) == 0, dict(zip(sizes, compiled, strict=True))
    again, compiled = _grow(step, "tpu", 6, 4)
    wanted, _ = _grow(step, "cpu", 6, 4)
    for a, b in zip(again, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert torch.tpu.fallback_count() == 0


def test_exact_sizes_on_demand(monkeypatch):
    monkeypatch.setenv("TORCHTPU_BUCKETS", "exact")
    assert Buckets().exact

    def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x
        for _ in range(10):
            y = y.sin() + 0.125
        return torch.cat([x, y[:, :1]], -1), y

    _, compiled = _grow(step, "tpu", 5, 6)
    assert all(compiled)


def test_an_operator_without_a_rule_is_compiled_for_its_sizes():
    def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x
        for _ in range(9):
            y = y.cos() * 0.5
        return torch.cat([x, y[:, :1]], -1), torch.linalg.svdvals(y @ y.t() + torch.cdist(x.t(), x.t()).sum())

    found, _ = _grow(step, "tpu", 5, 6)
    wanted, _ = _grow(step, "cpu", 5, 6)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_random_numbers_are_those_of_exact_sizes(monkeypatch):
    def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x
        for _ in range(5):
            y = torch.nn.functional.dropout(y, 0.5) + torch.rand_like(y) * 0.5 + 0.25
        return torch.cat([x, x[:, :1]], -1), y

    torch.manual_seed(0)
    torch.tpu.manual_seed(3)
    found = _grow_seeded(step)
    monkeypatch.setenv("TORCHTPU_BUCKETS", "exact")
    for a, b in zip(found, _grow_seeded(step), strict=True):
        torch.testing.assert_close(a, b)


def _grow_seeded(step: Callable[..., Any]) -> list[torch.Tensor]:
    torch.manual_seed(7)
    x, found = torch.ones(2, 5, device="tpu"), []
    for _ in range(7):
        x, seen = step(x)
        found.append(seen.cpu())
    return found
