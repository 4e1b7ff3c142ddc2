"""Softmax and normalisation against PyTorch CPU."""

from __future__ import annotations

import pytest
import torch
from checker import check, compare, run_lowering
from own import failures

from torchtpu.lowering.families.normalization import native_batch_norm_functional
from torchtpu.lowering.registry import find

aten = torch.ops.aten
FAMILIES = {"normalization", "softmax"}
SWEEPS = [
    *("softmax", "_softmax_backward_data", "native_group_norm", "nn.functional.group_norm", "renorm"),
    *("native_layer_norm", "torch.ops.aten._safe_softmax.default", "masked.softmax", "log_softmax"),
]


@pytest.mark.parametrize("entry", SWEEPS)
def test_sweep(entry: str) -> None:
    # PyTorch CPU rounds the intermediates of a bfloat16 log_softmax and keeps a layer norm's statistics in bfloat16.
    half = () if entry in ("log_softmax", "native_layer_norm") else (torch.bfloat16,)
    assert not failures(entry, FAMILIES, (torch.float32, *half), limit=3)


def test_softmax_in_bfloat16_is_the_rounded_float32_result() -> None:
    x = torch.randn(4, 33).bfloat16()
    for name in ("_softmax", "_log_softmax"):
        op = getattr(aten, name).default
        compare(op, run_lowering(op, x, -1, False), op(x.float(), -1, False).bfloat16())


def test_softmax_of_nothing_and_of_masked_rows() -> None:
    masked = torch.full((2, 3), -torch.inf)
    for x in (masked, torch.zeros(0, 3), torch.zeros(3, 0), torch.tensor(2.0)):
        check(aten._softmax.default, x, -1, False)
        check(aten._log_softmax.default, x, 0, False)
        check(aten._safe_softmax.default, x, -1)


@pytest.mark.parametrize(("mask_type", "shape"), [(0, (4, 4)), (1, (2, 4)), (2, (2, 3, 4, 4))])
def test_masked_softmax(mask_type: int, shape: tuple[int, ...]) -> None:
    scores, mask = torch.randn(2, 3, 4, 4), torch.rand(shape) > 0.6
    mask[..., 0] = False
    check(aten._masked_softmax.default, scores, mask, 3, mask_type)


def test_masked_softmax_gradient_and_fully_masked_rows() -> None:
    scores, mask = torch.randn(2, 3, 4, 4), torch.rand(2, 3, 4, 4) > 0.6
    check(aten._masked_softmax.default, scores, torch.ones_like(mask), 3, 2)
    y = aten._masked_softmax.default(scores, mask, 3, 2)
    check(aten._masked_softmax_backward.default, torch.rand_like(y), y, mask, 3)


def test_layer_norm_in_bfloat16_keeps_float32_statistics() -> None:
    x, w, b = (torch.randn(s).bfloat16() for s in ((5, 16), (16,), (16,)))
    y, mean, rstd = run_lowering(aten.native_layer_norm.default, x, [16], w, b, 1e-5)
    expected = aten.native_layer_norm.default(x.float(), [16], w.float(), b.float(), 1e-5)
    torch.testing.assert_close((mean, rstd), expected[1:])
    torch.testing.assert_close(y, expected[0].bfloat16())
    g = torch.randn(5, 16).bfloat16()
    mask = [True, True, True]
    actual = run_lowering(aten.native_layer_norm_backward.default, g, x, [16], mean, rstd, w, b, mask)
    f = [t.float() for t in (g, x, w, b)]
    exact = aten.native_layer_norm_backward.default(f[0], f[1], [16], mean, rstd, f[2], f[3], mask)
    for a, e in zip(actual, exact, strict=True):
        torch.testing.assert_close(a, e.bfloat16())


def test_layer_norm_of_a_large_mean() -> None:
    check(aten.native_layer_norm.default, torch.randn(4, 256, dtype=torch.float64) + 1e6, [256], None, None, 1e-5)


def test_gradients_not_asked_for_are_none() -> None:
    x = torch.randn(3, 4)
    _, mean, rstd = aten.native_layer_norm.default(x, [4], None, None, 1e-5)
    out = run_lowering(aten.native_layer_norm_backward.default, x, x, [4], mean, rstd, None, None, [True, False, False])
    assert out[1] is None and out[2] is None


@pytest.mark.parametrize("eps", [None, 1e-6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm(dtype: torch.dtype, eps: float | None) -> None:
    x, w, g = torch.randn(2, 5, 8).to(dtype), torch.randn(8).to(dtype), torch.randn(2, 5, 8).to(dtype)
    check(aten._fused_rms_norm.default, x, [8], w, eps)
    check(aten._fused_rms_norm.default, x, [5, 8], None, eps)
    _, rstd = run_lowering(aten._fused_rms_norm.default, x, [8], w, eps)
    leaves = [t.detach().float().requires_grad_() for t in (x, w)]
    aten._fused_rms_norm.default(leaves[0], [8], leaves[1], 1.1920929e-07 if eps is None else eps)[0].backward(
        g.float()
    )
    grads = run_lowering(aten._fused_rms_norm_backward.default, g, x, [8], rstd, w, [True, True])
    for actual, leaf in zip(grads, leaves, strict=True):
        torch.testing.assert_close(actual, leaf.grad.to(dtype))


def batch_norm_arguments(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Input, weight, bias, running mean, running variance."""
    vectors = [torch.randn(3) for _ in range(3)]
    return [t.to(dtype) for t in (torch.randn(4, 3, 5) * 2 + 1, *vectors, torch.rand(3) + 0.5)]


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_and_its_updates(training: bool) -> None:
    x, w, b, mean, var = batch_norm_arguments()
    expected_mean, expected_var = mean.clone(), var.clone()
    y, save_mean, save_invstd = aten.native_batch_norm.default(
        x, w, b, expected_mean, expected_var, training, 0.3, 1e-5
    )
    op = aten._native_batch_norm_legit_functional.default
    actual = run_lowering(op, x, w, b, mean, var, training, 0.3, 1e-5)
    torch.testing.assert_close(actual[0], y)
    torch.testing.assert_close(actual[3:], (expected_mean, expected_var))
    if training:
        torch.testing.assert_close(actual[1:3], (save_mean, save_invstd))
    grad = torch.randn_like(x)
    arguments = (grad, x, w, mean, var, *actual[1:3], training, 1e-5, [True, True, True])
    check(aten.native_batch_norm_backward.default, *arguments)
    check(aten.batch_norm_backward.default, *arguments, torch.empty(0, dtype=torch.uint8))


def test_batch_norm_shapes_are_those_of_the_meta_kernels() -> None:
    x, w, b, mean, var = batch_norm_arguments(torch.bfloat16)
    meta = [t.to("meta") for t in (x, w, b, mean, var)]
    for op, rest in [
        (aten.native_batch_norm.default, (True, 0.1, 1e-5)),
        (aten.native_batch_norm.default, (False, 0.1, 1e-5)),
        (aten._native_batch_norm_legit_functional.default, (True, 0.1, 1e-5)),
        (aten._native_batch_norm_legit_functional.default, (False, 0.1, 1e-5)),
        (aten._native_batch_norm_legit_no_training.default, (0.1, 1e-5)),
        (aten._batch_norm_with_update_functional.default, (0.1, 1e-5)),
        (aten._batch_norm_no_update.default, (0.1, 1e-5)),
    ]:
        actual, expected = run_lowering(op, x, w, b, mean, var, *rest), op(*meta, *rest)
        assert [(a.dtype, a.shape) for a in actual] == [(e.dtype, e.shape) for e in expected], op


def test_batch_norm_without_statistics_or_weights() -> None:
    x = batch_norm_arguments()[0]
    check(aten._native_batch_norm_legit.no_stats, x, None, None, True, 0.1, 1e-5)
    check(aten.native_batch_norm.default, x, None, None, None, None, True, 0.1, 1e-5)
    y, *_, mean, var = native_batch_norm_functional(x.numpy(), None, None, None, None, True, 0.1, 1e-5)
    assert y.shape == x.shape and mean is None and var is None


def test_batch_norm_updates_keep_the_dtype_of_the_buffers() -> None:
    x, _, _, mean, var = batch_norm_arguments()
    *_, new_mean, new_var = native_batch_norm_functional(
        x.numpy(), None, None, mean.half().numpy(), var.half().numpy(), True, 0.1, 1e-5
    )
    assert str(new_mean.dtype) == str(new_var.dtype) == "float16"


def test_eps_is_an_operand() -> None:
    entry = find("native_layer_norm.default")
    assert entry is not None and not entry.static


def test_synchronised_batch_norm_keeps_the_layout_of_its_input() -> None:
    x = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    mean, scale = x.mean((0, 2, 3)), torch.rsqrt(x.var((0, 2, 3), correction=0) + 1e-5)
    weight, bias = torch.randn(3), torch.randn(3)
    moved = [t.to("tpu") for t in (x, weight, bias, mean, scale)]
    y = torch.batch_norm_elemt(*moved, 1e-5)
    expected = torch.nn.functional.batch_norm(x, None, None, weight, bias, training=True)
    torch.testing.assert_close(y.cpu(), expected, rtol=1e-5, atol=1e-5)
    assert y.stride() == x.stride()
