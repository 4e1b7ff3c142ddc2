"""Attention in a captured graph takes its cheapest form, and only where that computes the same."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.testing import assert_close

import torchtpu  # noqa: F401
from torchtpu.compile.attention import simplify_attention

LENGTH = 6


@pytest.fixture(autouse=True)
def fresh():
    """Every test compiles the same function."""
    torch._dynamo.reset()


def mask_by_indices(length: int, device: torch.device) -> torch.Tensor:
    """As Transformers makes it: indices compared, and sequences packed in one told apart."""
    positions = torch.arange(length, device=device).unsqueeze(0).expand(2, -1)
    packed = (torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    batch = torch.arange(2, device=device)[:, None, None, None]
    rows = torch.arange(length, device=device)[None, None, :, None]
    columns = torch.arange(length, device=device)[None, None, None, :]
    mask = columns.new_ones((), dtype=torch.bool) & (columns <= rows)
    return (mask & (packed[batch, rows] == packed[batch, columns])).expand(2, -1, length, length)


def lower_triangle(length: int, device: torch.device) -> torch.Tensor:
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()


def everything(length: int, device: torch.device) -> torch.Tensor:
    return torch.ones(1, 1, length, length, dtype=torch.bool, device=device)


def band(length: int, device: torch.device) -> torch.Tensor:
    rows, columns = torch.arange(length, device=device)[:, None], torch.arange(length, device=device)
    return (columns <= rows) & (columns > rows - 3)


def written(length: int, device: torch.device) -> torch.Tensor:
    mask = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    row = mask[3]
    row.logical_not_()
    return mask


def run(make_mask, repeat: str):
    """A function of query, key and value with fewer heads than the query."""

    def attend(q, k, v):
        mask = make_mask(LENGTH, q.device)
        if repeat == "expand":
            k, v = (x[:, :, None].expand(2, 2, 3, LENGTH, 4).reshape(2, 6, LENGTH, 4) for x in (k, v))
        elif repeat == "interleave":
            k, v = (torch.repeat_interleave(x, 3, 1) for x in (k, v))
        else:  # heads in another order: nothing that sharing heads could express
            k, v = (x[:, None].expand(2, 3, 2, LENGTH, 4).reshape(2, 6, LENGTH, 4) for x in (k, v))
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.5)

    return attend


@pytest.mark.parametrize(
    ("make_mask", "repeat", "causal", "masked", "shared"),
    [
        (mask_by_indices, "expand", True, False, True),
        (lower_triangle, "interleave", True, False, True),
        (everything, "expand", False, False, True),
        (band, "expand", None, True, True),
        (written, "expand", None, True, True),
        (lower_triangle, "tile", True, False, False),
    ],
)
def test_form_and_values(make_mask, repeat, causal, masked, shared):
    torch.manual_seed(0)
    shapes = (2, 6, LENGTH, 4), (2, 2, LENGTH, 4), (2, 2, LENGTH, 4)
    given = [torch.randn(s, requires_grad=True) for s in shapes]
    expected = run(make_mask, repeat)(*given)
    expected_grads = torch.autograd.grad(expected.square().sum(), given)

    seen = []

    def watch(module, inputs):
        simplify_attention(module)
        (node,) = module.graph.find_nodes(op="call_function", target=scaled_dot_product_attention)
        seen.append(dict(node.kwargs))
        return module.forward

    on_device = [x.detach().to("tpu").requires_grad_() for x in given]
    torch.compile(run(make_mask, repeat), backend=watch, fullgraph=True)(*on_device)
    found = torch.compile(run(make_mask, repeat), fullgraph=True)(*on_device)
    grads = torch.autograd.grad(found.square().sum(), on_device)
    (form,) = seen
    assert (form.get("attn_mask") is not None) == masked
    assert form.get("is_causal") == causal or causal is None
    assert bool(form.get("enable_gqa")) == shared
    assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-6)
    assert_close([g.cpu() for g in grads], list(expected_grads), rtol=1e-5, atol=1e-5)


def test_a_mask_that_is_given_stays():
    q = torch.randn(1, 2, 4, 4, device="tpu")
    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    compiled = torch.compile(lambda q, m: scaled_dot_product_attention(q, q, q, attn_mask=m))
    for m in (mask, mask.T.contiguous()):
        expected = scaled_dot_product_attention(*[q.cpu()] * 3, attn_mask=m)
        assert_close(compiled(q, m.to("tpu")).cpu(), expected, rtol=1e-5, atol=1e-6)
