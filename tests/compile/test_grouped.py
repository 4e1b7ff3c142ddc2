"""Attention on keys and values that a model repeats for it reads them from before the repetition."""

from __future__ import annotations

import pytest
import torch

import torchtpu  # noqa: F401
from torchtpu.compile.grouped import share_heads


def repeated(x: torch.Tensor, times: int) -> torch.Tensor:
    """As Transformers writes it."""
    batch, heads, length, width = x.shape
    return x[:, :, None, :, :].expand(batch, heads, times, length, width).reshape(batch, heads * times, length, width)


def tiled(x: torch.Tensor, times: int) -> torch.Tensor:
    """The heads in another order, which is another attention."""
    batch, heads, length, width = x.shape
    return x[:, None].expand(batch, times, heads, length, width).reshape(batch, heads * times, length, width)


@pytest.mark.parametrize(("keys", "values", "shared"), [(repeated, repeated, True), (tiled, repeated, False)])
def test_repeated_heads_are_read_once(keys, values, shared, monkeypatch):
    read = []

    def watched(graph: torch.fx.Graph) -> None:
        share_heads(graph)
        target = torch.ops.aten._scaled_dot_product_fused_attention_overrideable.default
        read.extend(n.args[1].meta["val"].shape[1] for n in graph.find_nodes(op="call_function", target=target))

    monkeypatch.setattr("torchtpu.compile.graph.share_heads", watched)

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        k, v = keys(k * 2, 3), values(v, 3)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    torch.manual_seed(0)
    q, k, v = torch.randn(2, 6, 4, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    mask = torch.rand(2, 1, 4, 5) > 0.3
    mask[..., 0] = True
    given = [x.requires_grad_() for x in (q, k, v)]
    moved = [x.detach().to("tpu").requires_grad_() for x in given]
    attention(*given, mask).square().sum().backward()
    torch.compile(attention, fullgraph=True)(*moved, mask.to("tpu")).square().sum().backward()
    assert read[0] == (2 if shared else 6)
    for a, b in zip(moved, given, strict=True):
        torch.testing.assert_close(a.grad.cpu(), b.grad, rtol=1e-4, atol=1e-5)
