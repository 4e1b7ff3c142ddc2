"""Attention and recurrent networks against PyTorch CPU."""

from __future__ import annotations

import math
import re

import jax
import jax.numpy as jnp
import pytest
import torch
from checker import check, run_lowering
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as sdpa

from torchtpu.lowering.families import attention

aten = torch.ops.aten


def qkv(heads=4, shared=4, length=5, keys=6, dtype=torch.float64):
    return [torch.randn(2, h, n, 8, dtype=dtype) for h, n in ((heads, length), (shared, keys), (shared, keys))]


def mask(kind, length=5, keys=6):
    made = {"bool": torch.rand(length, keys) > 0.4, "float": torch.randn(2, 1, length, keys, dtype=torch.float64)}
    if kind == "bool":
        made["bool"][1] = False  # a row that may attend to nothing
    return made.get(kind)


@pytest.mark.parametrize("kind", [None, "causal", "bool", "float"])
@pytest.mark.parametrize("shared", [4, 2])
def test_overrideable_and_its_gradient(kind, shared):
    leaves = [t.requires_grad_() for t in qkv(shared=shared)]
    bias, causal = mask(kind), kind == "causal"
    if kind == "float":
        leaves.append(bias.requires_grad_())
    expected = sdpa(*leaves[:3], bias, is_causal=causal, scale=0.3, enable_gqa=True)
    grad = torch.randn_like(expected)
    args = [*leaves[:3], bias]
    out, lse, _, _, length, keys, seed, offset, _ = run_lowering(
        aten._scaled_dot_product_fused_attention_overrideable.default, *args, 0.0, causal, scale=0.3
    )
    assert lse.dtype == torch.float32 and lse.shape == (2, 4, 5) and (length, keys) == (5, 6)
    torch.testing.assert_close(out, expected)
    back = run_lowering(
        aten._scaled_dot_product_fused_attention_overrideable_backward.default, grad, *args, [True] * 4, out, lse,
        None, None, length, keys, 0.0, causal, seed, offset, scale=0.3,
    )  # fmt: skip
    for actual, wanted in zip(back, torch.autograd.grad(expected, leaves, grad), strict=False):
        torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-6)  # the log-sum-exp is float32


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_flash_for_cpu(causal, dtype):
    q, k, v = qkv(dtype=dtype)
    check(aten._scaled_dot_product_flash_attention_for_cpu.default, q, k, v, 0.0, causal)
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    back = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    check(back, torch.randn_like(out), q, k, v, out, lse, 0.0, causal)


def test_bfloat16_is_computed_in_float32():
    q, k, v = qkv(dtype=torch.bfloat16)
    expected = sdpa(q.float(), k.float(), v.float()).bfloat16()
    torch.testing.assert_close(run_lowering(aten.scaled_dot_product_attention.default, q, k, v), expected)


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_products_on_a_tpu_are_as_narrow_as_the_inputs(platform):
    """Elsewhere the probabilities stay float32."""

    def step(q, k, v):
        out, lse, _ = attention.forward(q, k, v, None, 0.0, True, None)
        return attention.backward(out, q, k, v, None, out, lse, 0.0, True, None)[:3]

    operand = jax.ShapeDtypeStruct((2, 4, 8, 16), jnp.bfloat16)
    text = jax.jit(step).trace(operand, operand, operand).lower(lowering_platforms=(platform,)).as_text()
    products = re.findall(r"dot_general .*: \((.*)\) ->", text)
    assert len(products) == 7  # scores twice, the result, and four of the gradients
    wide = [p for p in products if "f32>" in p.replace("bf16>", "")]
    assert len(wide) == (0 if platform == "tpu" else 4)


@pytest.mark.parametrize("kind", [None, "bool", "float"])
def test_math(kind):
    q, k, v = qkv()
    expected = sdpa(q, k, v, mask(kind))
    bias = mask(kind)
    if bias is not None:
        expected = sdpa(q, k, v, bias)
    torch.testing.assert_close(
        run_lowering(aten._scaled_dot_product_attention_math.default, q, k, v, bias)[0], expected
    )
    torch.testing.assert_close(run_lowering(aten.scaled_dot_product_attention.default, q, k, v, bias), expected)


def test_dropout_is_the_same_in_the_backward():
    q, k, v = qkv(length=64, keys=64)
    p, name = 0.25, "_scaled_dot_product_fused_attention_overrideable"
    out, lse, *_, seed, offset, _ = run_lowering(getattr(aten, name).default, q, k, v, None, p)
    # With values that are one-hot in the key, the output shows the dropped probabilities.
    eye = torch.eye(64, dtype=q.dtype).expand(2, 4, 64, 64)
    kept = run_lowering(getattr(aten, name).default, q, k, eye, None, p)[0]
    torch.testing.assert_close(kept @ v, out)
    assert abs((kept == 0).double().mean() - p) < 0.02
    torch.testing.assert_close(kept[kept > 0], (sdpa(q, k, eye) / (1 - p))[kept > 0])
    grad = torch.randn_like(out)
    back = getattr(aten, f"{name}_backward").default
    _, _, dv, _ = run_lowering(
        back, grad, q, k, v, None, [True] * 4, out, lse, None, None, 64, 64, p, False, seed, offset
    )
    torch.testing.assert_close(dv, kept.mT @ grad, rtol=1e-5, atol=1e-6)


def test_efficient_pads_its_log_sum_exp():
    q, k, v = qkv(dtype=torch.float32)
    out, lse, _, _ = run_lowering(aten._scaled_dot_product_efficient_attention.default, q, k, v, None, True)
    torch.testing.assert_close(out, sdpa(q, k, v))
    assert lse.shape == (2, 4, 32)
    torch.testing.assert_close(lse[..., :5], (q @ k.mT / math.sqrt(8)).logsumexp(-1))


@pytest.mark.parametrize("bias", [False, True])
def test_lstm_cell(bias):
    x, h, c = torch.randn(3, 20), torch.randn(3, 20), torch.randn(3, 5)
    biases = [torch.randn(20) if bias else None for _ in range(2)]
    leaves = [t.requires_grad_() for t in (x, h, c)]
    i, f, g, o = (x + h + (sum(biases) if bias else 0)).chunk(4, -1)
    cy = f.sigmoid() * c + i.sigmoid() * g.tanh()
    hy = o.sigmoid() * cy.tanh()
    out = run_lowering(aten._thnn_fused_lstm_cell.default, *[t.detach() for t in leaves], *biases)
    torch.testing.assert_close(list(out[:2]), [hy.detach(), cy.detach()])
    gh, gc = torch.randn_like(hy), torch.randn_like(cy)
    wanted = torch.autograd.grad([hy, cy], leaves, [gh, gc])
    back = aten._thnn_fused_lstm_cell_backward_impl.default
    gates, dc, db = run_lowering(back, gh, gc, c.detach(), out[1], out[2], bias)
    torch.testing.assert_close([gates, gates, dc], list(wanted))
    assert (db is not None) == bias and (db is None or torch.allclose(db, gates.sum(0)))


@pytest.mark.parametrize("bias", [False, True])
def test_gru_cell(bias):
    x, h, hx = torch.randn(3, 15), torch.randn(3, 15), torch.randn(3, 5)
    biases = [torch.randn(15) if bias else None for _ in range(2)]
    leaves = [t.requires_grad_() for t in (x, h, hx)]
    ir, iz, inew = (x + (biases[0] if bias else 0)).chunk(3, -1)
    hr, hz, hnew = (h + (biases[1] if bias else 0)).chunk(3, -1)
    new = (inew + (ir + hr).sigmoid() * hnew).tanh()
    hy = new + (iz + hz).sigmoid() * (hx - new)
    out, workspace = run_lowering(aten._thnn_fused_gru_cell.default, *[t.detach() for t in leaves], *biases)
    torch.testing.assert_close(out, hy.detach())
    grad = torch.randn_like(hy)
    wanted = torch.autograd.grad(hy, leaves, grad)
    gradients = run_lowering(aten._thnn_fused_gru_cell_backward.default, grad, workspace, bias)
    torch.testing.assert_close(list(gradients[:3]), list(wanted))


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("kind", ["lstm", "gru", "rnn_tanh", "rnn_relu"])
def test_sequences(kind, bidirectional):
    options = {"num_layers": 2, "bidirectional": bidirectional, "bias": kind != "gru" or bidirectional}
    if kind == "lstm":
        module = nn.LSTM(4, 5, proj_size=3 if bidirectional else 0, **options)
    else:
        module = nn.GRU(4, 5, **options) if kind == "gru" else nn.RNN(4, 5, nonlinearity=kind[4:], **options)
    states = 4 if bidirectional else 2
    h = torch.randn(states, 3, 3 if kind == "lstm" and bidirectional else 5)
    hx = [h, torch.randn(states, 3, 5)] if kind == "lstm" else h
    parameters = [p.detach() for p in module._flat_weights]
    rest = (parameters, options["bias"], 2, 0.0, False, bidirectional)
    check(getattr(aten, kind).input, torch.randn(6, 3, 4), hx, *rest, False)
    check(getattr(aten, kind).input, torch.randn(3, 6, 4), hx, *rest, True)
    packed = nn.utils.rnn.pack_sequence([torch.randn(n, 4) for n in (5, 3, 1)])
    check(getattr(aten, kind).data, packed.data, packed.batch_sizes, hx, *rest)
