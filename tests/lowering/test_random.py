"""Random operators: shape, dtype, range, moments, and the same numbers for the same key."""

from __future__ import annotations

import pytest
import torch
from checker import check, run_lowering

aten = torch.ops.aten
N = 20_000
x = torch.zeros(N)
half = torch.full((N,), 0.5)
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def assert_moments(sample, mean, std):
    """The sample's mean and standard deviation lie within 5 standard errors or so of the distribution's."""
    sample = sample.double()
    assert abs(sample.mean().item() - mean) < 6 * std / N**0.5 + 1e-3 * abs(mean)
    assert abs(sample.std().item() - std) < 0.05 * std


# operator, arguments, mean, standard deviation, least value, largest value
DISTRIBUTIONS = [
    (aten.rand.default, ([N],), 0.5, 12**-0.5, 0, 1),
    (aten.rand_like.default, (x,), 0.5, 12**-0.5, 0, 1),
    (aten.uniform.default, (x, -2.0, 4.0), 1, 6 * 12**-0.5, -2, 4),
    (aten.randn.default, ([N],), 0, 1, -7, 7),
    (aten.randn_like.default, (x,), 0, 1, -7, 7),
    (aten.normal_functional.default, (x, 3.0, 2.0), 3, 2, -11, 17),
    (aten.normal.Tensor_float, (half, 2.0), 0.5, 2, -14, 15),
    (aten.normal.float_Tensor, (1.0, half), 1, 0.5, -3, 5),
    (aten.normal.Tensor_Tensor, (half, half), 0.5, 0.5, -3, 4),
    (aten.normal.float_float, (1.0, 0.5, [N]), 1, 0.5, -3, 5),
    (aten.randint.default, (10, [N]), 4.5, 8.25**0.5, 0, 9),
    (aten.randint.low, (-3, 7, [N]), 1.5, 8.25**0.5, -3, 6),
    (aten.randint_like.default, (x, 10), 4.5, 8.25**0.5, 0, 9),
    (aten.randint_like.low_dtype, (x, 5, 15), 9.5, 8.25**0.5, 5, 14),
    (aten.randint_like.Tensor, (x, torch.tensor(10)), 4.5, 8.25**0.5, 0, 9),
    (aten.bernoulli.default, (torch.full((N,), 0.3),), 0.3, 0.21**0.5, 0, 1),
    (aten.bernoulli.p, (x, 0.3), 0.3, 0.21**0.5, 0, 1),
    (aten.bernoulli.Tensor, (x, torch.tensor(0.3)), 0.3, 0.21**0.5, 0, 1),
    (aten.exponential.default, (x, 2.0), 0.5, 0.5, 1e-38, 10),
    (aten.geometric.default, (x, 0.5), 2, 2**0.5, 1, 30),
    (aten.log_normal.default, (x, 0.0, 0.25), 1.0317, 0.262, 0.2, 5),
    (aten.random.to, (x, 10), 4.5, 8.25**0.5, 0, 9),
    (aten.random.default, (torch.zeros(N, dtype=torch.uint8),), 127.5, 73.9, 0, 255),
    (aten.random.default, (torch.zeros(N, dtype=torch.bool),), 0.5, 0.5, 0, 1),
    (aten.poisson.default, (torch.full((N,), 4.0),), 4, 2, 0, 25),
    (aten.binomial.default, (torch.full((N,), 10.0), half), 5, 2.5**0.5, 0, 10),
    (aten._standard_gamma.default, (torch.full((N,), 4.0),), 4, 2, 0.01, 30),
]


@pytest.mark.parametrize(
    ("op", "arguments", "mean", "std", "least", "largest"), DISTRIBUTIONS, ids=lambda v: str(v)[:30]
)
def test_distribution(op, arguments, mean, std, least, largest):
    sample = run_lowering(op, *arguments)
    expected = op(*arguments)
    assert sample.shape == expected.shape and sample.dtype == expected.dtype
    assert sample.double().min() >= least and sample.double().max() <= largest
    assert_moments(sample, mean, std)


@pytest.mark.parametrize("op", [aten.rand_like.default, aten.normal_functional.default, aten.exponential.default])
def test_the_same_key_gives_the_same_numbers(op):
    assert torch.equal(run_lowering(op, x), run_lowering(op, x))


@pytest.mark.parametrize("dtype", FLOATS)
def test_16_and_64_bit_floats(dtype):
    sample = run_lowering(aten.randn.default, [N], dtype=dtype)
    assert sample.dtype is dtype
    assert_moments(sample, 0, 1)
    sample = run_lowering(aten.uniform.default, x.to(dtype))
    assert sample.dtype is dtype and sample.min() >= 0 and sample.max() < 1
    assert_moments(sample, 0.5, 12**-0.5)


def test_complex():
    sample = run_lowering(aten.randn.default, [N], dtype=torch.complex64)
    assert_moments(sample.real, 0, 0.5**0.5)
    assert_moments(sample.imag, 0, 0.5**0.5)
    assert abs(run_lowering(aten.rand.default, [N], dtype=torch.complex64).imag.mean() - 0.5) < 0.02


def test_cauchy_by_quantiles():
    sample = run_lowering(aten.cauchy.default, x, 1.0, 2.0)
    quartiles = sample.quantile(torch.tensor([0.25, 0.5, 0.75]))
    torch.testing.assert_close(quartiles, torch.tensor([-1.0, 1.0, 3.0]), atol=0.2, rtol=0)


def test_random_covers_the_type():
    narrow = run_lowering(aten.random.default, torch.zeros(N, dtype=torch.int8))
    assert narrow.min() == 0 and narrow.max() == 127
    wide = run_lowering(getattr(aten.random, "from"), torch.zeros(N, dtype=torch.int64), -(2**63), None)
    assert wide.min() < -(2**62) and wide.max() > 2**62
    counted = run_lowering(aten.random.default, torch.zeros(N))
    assert counted.max() <= 2**24 and counted.max() > 2**23


def test_randperm():
    for n, dtype in ((0, torch.int64), (1, torch.int32), (1000, torch.int64)):
        order = run_lowering(aten.randperm.default, n, dtype=dtype)
        assert order.dtype is dtype and order.sort().values.tolist() == list(range(n))
    assert order.tolist() != list(range(1000))


def test_multinomial_with_replacement():
    p = torch.tensor([[1.0, 0.0, 3.0], [5.0, 5.0, 0.0]])
    sample = run_lowering(aten.multinomial.default, p, 5000, True)
    assert sample.shape == (2, 5000) and sample.dtype is torch.int64
    frequencies = torch.stack([row.bincount(minlength=3) for row in sample]) / 5000
    torch.testing.assert_close(frequencies, p / p.sum(1, keepdim=True), atol=0.03, rtol=0)


def test_multinomial_without_replacement():
    p = torch.rand(300, 6)
    p[:, 2] = 0
    sample = run_lowering(aten.multinomial.default, p, 5)
    assert (sample != 2).all()
    assert all(len(set(row)) == 5 for row in sample.tolist())
    assert run_lowering(aten.multinomial.default, p[0], 1).shape == (1,)
    first = run_lowering(aten.multinomial.default, torch.tensor([[1.0, 3.0]]).expand(5000, 2), 1)
    assert abs(first.double().mean() - 0.75) < 0.03


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_native_dropout(dtype):
    out, mask = run_lowering(aten.native_dropout.default, torch.ones(N).to(dtype), 0.25, True)
    assert out.dtype is dtype and mask.dtype is torch.bool
    assert abs(mask.double().mean() - 0.75) < 0.02
    torch.testing.assert_close(out, mask.to(dtype) * torch.tensor(1 / 0.75).to(dtype))
    check(aten.native_dropout_backward.default, torch.randn(N).to(dtype), mask, 1 / 0.75)


def test_native_dropout_edges():
    y = torch.randn(3, 4)
    out, mask = run_lowering(aten.native_dropout.default, y, 1.0, True)
    assert (out == 0).all() and not mask.any()
    out, mask = run_lowering(aten.native_dropout.default, y, 0.5, False)
    assert torch.equal(out, y) and mask.all()
    out, mask = run_lowering(aten.native_dropout.default, torch.full((100,), float("nan")), 0.5, True)
    assert (out[~mask] == 0).all() and out[mask].isnan().all()


def test_sample_dirichlet():
    sample = run_lowering(aten._sample_dirichlet.default, torch.tensor([1.0, 2.0, 5.0]).expand(N, 3))
    torch.testing.assert_close(sample.sum(1), torch.ones(N))
    torch.testing.assert_close(sample.mean(0), torch.tensor([0.125, 0.25, 0.625]), atol=0.01, rtol=0)


def test_standard_gamma_grad():
    alpha = torch.tensor([0.5, 1.0, 4.0, 20.0])
    result = run_lowering(aten._standard_gamma_grad.default, alpha, alpha * 1.25)
    # Both are approximations; PyTorch CPU's is good to four digits.
    torch.testing.assert_close(result, aten._standard_gamma_grad(alpha, alpha * 1.25), rtol=1e-3, atol=0)


def test_empty_and_zero_dimensional():
    assert run_lowering(aten.rand.default, [0, 3]).shape == (0, 3)
    assert run_lowering(aten.normal_functional.default, torch.tensor(0.0)).shape == ()
    assert run_lowering(aten.bernoulli.p, torch.zeros(0), 0.5).shape == (0,)


def test_draws_of_one_program_differ():
    both = run_lowering(aten.rand.default, [2000], dtype=torch.complex64)
    assert abs(torch.corrcoef(torch.stack([both.real, both.imag]))[0, 1]) < 0.1


def test_an_empty_range_is_an_error():
    with pytest.raises(RuntimeError, match="'from' to be less than 'to'"):
        run_lowering(aten.randint.low, 3, 3, [2])
