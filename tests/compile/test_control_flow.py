"""Operators that take functions, compiled: the same as eager PyTorch on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch._higher_order_ops import associative_scan, map, scan, while_loop
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.testing import assert_close

import torchtpu  # noqa: F401

X = torch.arange(48.0).reshape(8, 6) / 40 - 0.5
TABLE = torch.arange(5.0)


def looked_up(x):
    index = (x[0, :2] * 0).long() + 7
    return torch.cond(
        x.sum() > -100, lambda x, i: TABLE.to(x.device)[i] + x[0, 0], lambda x, i: x[0, :2] + i, (x, index)
    )


FUNCTIONS = {
    "cond": lambda x: torch.cond(x.sum() > 0, lambda x: x.sin() + 1, lambda x: x.cos() - 1, (x,)),
    "cond, the other way": lambda x: torch.cond(x.sum() < 0, lambda x: x.sin() + 1, lambda x: x.cos() - 1, (x,)),
    "while_loop": lambda x: while_loop(
        lambda i, x: (i < 5) & (x.sum() < 50), lambda i, x: (i + 1, x * 1.5), (torch.zeros_like(x[0, 0]).long(), x)
    ),
    "map": lambda x: map(lambda row: (row * 2).cumsum(0), x),
    "scan": lambda x: scan(lambda c, row: (c + row, c * row), torch.zeros_like(x[0]), x),
    "associative_scan": lambda x: associative_scan(lambda a, b: a * 0.5 + b, x, 0, combine_mode="generic"),
    "nested": lambda x: torch.cond(
        x.sum() > 0,
        lambda x: map(lambda row: row * 2, x),
        lambda x: torch.cond(x[0, 0] > 0, torch.sin, torch.cos, (x,)),
        (x,),
    ),
}


@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_control_flow(name):
    expected = FUNCTIONS[name](X)
    assert_close(torch.compile(FUNCTIONS[name], fullgraph=True)(X.to("tpu")), expected, check_device=False)


@pytest.mark.parametrize("name", ["cond", "map", "scan"])
def test_gradients_of_control_flow(name):
    def loss(x):
        result = FUNCTIONS[name](x)
        return sum(r.square().sum() for r in (result if isinstance(result, tuple) else (result,)))

    on_cpu, on_device = X.clone().requires_grad_(), X.to("tpu").requires_grad_()
    loss(on_cpu).backward()
    torch.compile(loss, fullgraph=True)(on_device).backward()
    assert_close(on_device.grad.cpu(), on_cpu.grad)


def test_a_wrong_index_in_a_branch_is_an_error():
    with pytest.raises(IndexError, match="out of"):
        torch.compile(looked_up, fullgraph=True)(X.to("tpu")).cpu()


def test_random_numbers_in_a_branch_are_refused():
    def noisy(x):
        return torch.cond(x.sum() > 0, lambda x: x + torch.rand_like(x), lambda x: x * 1, (x,))

    with pytest.raises(Exception, match="random numbers inside the body"):
        torch.compile(noisy, fullgraph=True)(X.abs().to("tpu"))


def rel_bias(score, b, h, q, k):
    return score + (q - k) * 0.1


def causal(b, h, q, k):
    return q >= k


@pytest.mark.parametrize("heads", [(2, 2), (4, 2)])
@pytest.mark.parametrize("masked", [False, True])
def test_flex_attention(heads, masked):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, h, 16, 8, generator=generator) for h in (heads[0], heads[1], heads[1]))
    table = torch.randn(heads[0], generator=generator)

    def attend(q, k, v, table):
        mask = create_block_mask(causal, None, None, 16, 16, device=q.device.type) if masked else None
        mod = lambda s, b, h, i, j: rel_bias(s, b, h, i, j) * table[h]  # noqa: E731
        return flex_attention(q, k, v, score_mod=mod, block_mask=mask, enable_gqa=True)

    def reference(q, k, v, table):
        k, v = (x.repeat_interleave(heads[0] // heads[1], 1) for x in (k, v))
        i, j = torch.arange(16)[:, None], torch.arange(16)[None]
        scores = (q @ k.mT / 8**0.5 + (i - j) * 0.1) * table[:, None, None]
        return (scores.masked_fill(i < j, -torch.inf) if masked else scores).softmax(-1) @ v

    on_cpu = [t.clone().requires_grad_() for t in (q, k, v, table)]
    on_device = [t.to("tpu").requires_grad_() for t in (q, k, v, table)]
    expected = reference(*on_cpu)
    actual = torch.compile(attend)(*on_device)
    assert_close(actual.cpu(), expected, rtol=1e-4, atol=1e-4)
    expected.square().sum().backward()
    actual.square().sum().backward()
    for a, e in zip(on_device, on_cpu, strict=True):
        assert_close(a.grad.cpu(), e.grad, rtol=1e-3, atol=1e-3)
