"""Losses against PyTorch CPU."""

from __future__ import annotations

import pytest
import torch
from checker import check, run_lowering
from own import failures

aten = torch.ops.aten
FAMILIES = {"losses", "ctc"}
SWEEPS = [
    *("cross_entropy", "binary_cross_entropy", "binary_cross_entropy_with_logits", "soft_margin_loss"),
    *("multi_margin_loss", "multilabel_margin_loss", "smooth_l1_loss", "mse_loss", "nll_loss", "huber_loss"),
]


@pytest.mark.parametrize("entry", SWEEPS)
def test_sweep(entry: str) -> None:
    assert not failures(f"nn.functional.{entry}", FAMILIES, (torch.float32, torch.bfloat16))


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("weighted", [False, True])
def test_nll_loss(reduction: int, weighted: bool) -> None:
    x, target = torch.randn(5, 4), torch.tensor([0, 3, -100, 1, 1])
    weight = torch.rand(4) if weighted else None
    loss, total = aten.nll_loss_forward.default(x, target, weight, reduction, -100)
    check(aten.nll_loss_forward.default, x, target, weight, reduction, -100)
    check(aten.nll_loss_backward.default, torch.rand_like(loss), x, target, weight, reduction, -100, total)
    image, labels = torch.randn(2, 4, 3, 3), torch.randint(0, 4, (2, 3, 3))
    loss, total = aten.nll_loss2d_forward.default(image, labels, weight, reduction, 1)
    check(aten.nll_loss2d_forward.default, image, labels, weight, reduction, 1)
    check(aten.nll_loss2d_backward.default, torch.rand_like(loss), image, labels, weight, reduction, 1, total)


def test_nll_loss_of_one_sample_and_of_none() -> None:
    check(aten.nll_loss_forward.default, torch.randn(4), torch.tensor(2), None, 1, -100)
    check(aten.nll_loss_forward.default, torch.randn(0, 4), torch.zeros(0, dtype=torch.int64), None, 1, -100)
    everything_ignored = torch.full((3,), -100)
    check(aten.nll_loss_forward.default, torch.randn(3, 4), everything_ignored, None, 1, -100)


@pytest.mark.parametrize("wrong", [4, -1])
def test_target_out_of_bounds(wrong: int) -> None:
    with pytest.raises(IndexError, match=f"Target {wrong} is out of bounds."):
        run_lowering(aten.nll_loss_forward.default, torch.randn(2, 4), torch.tensor([0, wrong]), None, 1, -100)


@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_smooth_l1_at_its_corners(beta: float) -> None:
    x, y = torch.tensor([0.0, 0.5, -0.5, 2.0]), torch.zeros(4)
    check(aten.smooth_l1_loss.default, x, y, 0, beta)
    if beta:
        check(aten.smooth_l1_loss_backward.default, torch.ones(4), x, y, 0, beta)
        check(aten.huber_loss_backward.default, torch.ones(4), x, y, 0, beta)


def test_binary_cross_entropy_at_zero_and_one() -> None:
    x, y = torch.tensor([0.0, 1.0, 0.0, 1.0]), torch.tensor([0.0, 1.0, 1.0, 0.0])
    check(aten.binary_cross_entropy.default, x, y, None, 0)
    check(aten.binary_cross_entropy_backward.default, torch.ones(4), x, y, None, 0)
    logits = torch.tensor([-1e4, 1e4, 0.0, 3.0])
    check(aten.binary_cross_entropy_with_logits.default, logits, y, torch.rand(4), torch.rand(4), 1)


def test_losses_promote_and_broadcast() -> None:
    check(aten.mse_loss.default, torch.randn(3, 1), torch.randn(3, 4).double(), 1)
    check(aten.mse_loss.default, torch.randn(300).bfloat16(), torch.randn(300).bfloat16(), 2)
    check(aten.mse_loss.default, torch.zeros(0), torch.zeros(0), 1)


@pytest.mark.parametrize("concatenated", [False, True])
@pytest.mark.parametrize("zero_infinity", [False, True])
def test_ctc(concatenated: bool, zero_infinity: bool) -> None:
    log_probs = torch.randn(7, 3, 5).log_softmax(-1)
    # The second target repeats a label and needs more steps than it has: an infinite loss. The third is empty.
    inputs, lengths = [7, 2, 5], [3, 3, 0]
    targets = torch.tensor([[1, 2, 2], [3, 3, 4], [1, 1, 1]])
    if concatenated:
        targets = torch.tensor([1, 2, 2, 3, 3, 4])
    arguments = (log_probs, targets, inputs, lengths, 0, zero_infinity)
    loss, alpha = aten._ctc_loss.default(*arguments)
    actual, our_alpha = run_lowering(aten._ctc_loss.default, *arguments)
    torch.testing.assert_close(actual, loss)
    assert our_alpha.shape == alpha.shape and our_alpha.dtype == alpha.dtype
    torch.testing.assert_close(our_alpha[0], alpha[0])
    rest = (actual, our_alpha, 0, zero_infinity)
    expected = aten._ctc_loss_backward.default(torch.ones(3), *arguments[:4], loss, alpha, 0, zero_infinity)
    grad = run_lowering(aten._ctc_loss_backward.default, torch.ones(3), *arguments[:4], *rest)
    torch.testing.assert_close(grad, expected, equal_nan=True)
    tensors = (torch.tensor(inputs), torch.tensor(lengths))
    again, _ = run_lowering(aten._ctc_loss.Tensor, log_probs, targets, *tensors, 0, zero_infinity)
    torch.testing.assert_close(again, loss)
