"""Random operators: shape, dtype, range, distribution, and the same numbers for the same key."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from checker import check, run_lowering
from goodness import DOUBT, N, counts_fit, fits, numbers, pmf
from scipy import stats

import torchtpu  # noqa: F401

aten = torch.ops.aten
TPU = "tpu"
x = torch.zeros(N)
half = torch.full((N,), 0.5)
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
NEGATIVE = stats.uniform(-0.4, 0.3)
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]


def zeros(dtype):
    """Something to draw into."""
    return torch.zeros(N, dtype=dtype, device=TPU)


def x_tpu():
    return zeros(torch.float32)


def pair(dtype, a, b):
    """N rows of the same two numbers."""
    return torch.tensor([a, b]).to(TPU, dtype).expand(N, 2)


@pytest.mark.parametrize("op", [aten.rand_like.default, aten.normal_functional.default, aten.exponential.default])
def test_the_same_key_gives_the_same_numbers(op):
    assert torch.equal(run_lowering(op, x), run_lowering(op, x))


def test_complex():
    sample = run_lowering(aten.randn.default, [N], dtype=torch.complex64)
    assert fits(sample.real, stats.norm(0, 0.5**0.5)) > DOUBT
    assert fits(sample.imag, stats.norm(0, 0.5**0.5)) > DOUBT
    assert fits(run_lowering(aten.rand.default, [N], dtype=torch.complex64).imag, stats.uniform()) > DOUBT


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


def test_standard_gamma_grad():
    alpha = torch.tensor([0.5, 1.0, 4.0, 20.0])
    result = run_lowering(aten._standard_gamma_grad.default, alpha, alpha * 1.25)
    # Both are approximations; PyTorch CPU's is good to four digits.
    torch.testing.assert_close(result, aten._standard_gamma_grad(alpha, alpha * 1.25), rtol=1e-3, atol=0)


def test_dirichlet_grad():
    """In each of the regimes that PyTorch tells apart."""
    x = torch.tensor([1e-4, 0.01, 0.2, 0.45, 0.5, 0.7, 0.95, 0.999], dtype=torch.float64)
    alpha, beta = torch.tensor([0.2, 1, 3, 7, 40, 300], dtype=torch.float64), torch.tensor([0.5, 5, 7, 90.0])
    for dtype in (torch.float64, torch.float32):
        grid = [g.to(dtype).contiguous() for g in torch.meshgrid(x, alpha, beta.double(), indexing="ij")]
        arguments = grid[0], grid[1], grid[1] + grid[2]
        result, expected = run_lowering(aten._dirichlet_grad.default, *arguments), aten._dirichlet_grad(*arguments)
        tolerance = 1e-7 if dtype is torch.float64 else 1e-3
        near = expected.isfinite()  # float32 overflows on the CPU where its samples never are
        torch.testing.assert_close(result[near], expected[near], rtol=tolerance, atol=1e-30)


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


# ---- goodness of fit, through PyTorch's own functions on the device

CONTINUOUS = {
    "rand": (lambda d: torch.rand(N, dtype=d, device=TPU), stats.uniform()),
    "uniform_": (lambda d: zeros(d).uniform_(-2, 4), stats.uniform(-2, 6)),
    "randn": (lambda d: torch.randn(N, dtype=d, device=TPU), stats.norm()),
    "normal_": (lambda d: zeros(d).normal_(3, 2), stats.norm(3, 2)),
    "normal": (lambda d: torch.normal(zeros(d) + 1, zeros(d) + 2), stats.norm(1, 2)),
    "exponential_": (lambda d: zeros(d).exponential_(2), stats.expon(0, 0.5)),
    "log_normal_": (lambda d: zeros(d).log_normal_(0.5, 0.75), stats.lognorm(0.75, 0, np.exp(0.5))),
    "cauchy_": (lambda d: zeros(d).cauchy_(1, 2), stats.cauchy(1, 2)),
    "gamma": (lambda d: torch._standard_gamma(zeros(d) + 0.4), stats.gamma(0.4)),
    "dirichlet": (lambda d: torch._sample_dirichlet(pair(d, 2, 5))[:, 0], stats.beta(2, 5)),
    "rrelu": (lambda d: -F.rrelu(zeros(d) - 1, 0.1, 0.4, training=True), stats.uniform(0.1, 0.3)),
}


@pytest.mark.parametrize("name", CONTINUOUS)
def test_continuous(name):
    sampler, distribution = CONTINUOUS[name]
    torch.manual_seed(0)
    for dtype, sample in [(d, sampler(d)) for d in FLOATS]:
        assert sample.dtype is dtype and sample.device.type == "tpu"
        assert fits(sample, distribution) > DOUBT, dtype
        if name in ("rand", "uniform_"):
            assert sample.max() < distribution.support()[1], dtype
        if name in ("exponential_", "gamma") and dtype.itemsize > 2:
            assert sample.min() > 0, dtype


FORMS = {
    "rand_like": (lambda: torch.rand_like(x_tpu()), stats.uniform()),
    "randn_like": (lambda: torch.randn_like(x_tpu()), stats.norm()),
    "normal tensor, float": (lambda: torch.normal(x_tpu() + 1, 2.0), stats.norm(1, 2)),
    "normal float, tensor": (lambda: torch.normal(-1.0, x_tpu() + 0.5), stats.norm(-1, 0.5)),
    "normal float, float": (lambda: torch.normal(1.0, 2.0, (N,), device=TPU), stats.norm(1, 2)),
    "normal out": (lambda: torch.normal(x_tpu(), 2.0, out=x_tpu()), stats.norm(0, 2)),
    "normal functional out": (lambda: aten.normal.out(x_tpu(), 1.0, 2.0, out=x_tpu()), stats.norm(1, 2)),
    "rrelu out": (lambda: aten.rrelu_with_noise.out(x_tpu() - 1, x_tpu(), 0.1, 0.4, True, out=x_tpu()), NEGATIVE),
    "gamma 5": (lambda: torch._standard_gamma(x_tpu() + 5), stats.gamma(5)),
}


def test_other_forms():
    torch.manual_seed(1)
    for name, (sample, distribution) in {n: (f(), d) for n, (f, d) in FORMS.items()}.items():
        assert fits(sample, distribution) > DOUBT, name


def test_the_tests_reject_other_distributions():
    torch.manual_seed(0)
    sample = torch.randn(N, device=TPU)
    assert fits(sample, stats.norm()) > DOUBT
    assert fits(sample + 1 / 16, stats.norm()) < DOUBT
    assert fits(sample * 1.08, stats.norm()) < DOUBT
    heads = (sample > 0).int()
    assert counts_fit(heads, [0.5, 0.5]) > DOUBT > counts_fit(heads, [0.53, 0.47])
    assert counts_fit(torch.randint(10, (N,), device=TPU) % 9, [1 / 9] * 9) < DOUBT


DISCRETE = {
    "bernoulli": (lambda d: torch.bernoulli(zeros(d) + 0.25), [0.75, 0.25], 0),
    "bernoulli_": (lambda d: zeros(d).bernoulli_(0.3), [0.7, 0.3], 0),
    "geometric_": (lambda d: zeros(d).geometric_(0.3), pmf(stats.geom(0.3), 1, 20), 1),
    "poisson": (lambda d: torch.poisson(zeros(d) + 40), pmf(stats.poisson(40), 0, 80), 0),
    "binomial": (lambda d: torch.binomial(zeros(d) + 120, zeros(d) + 0.75), pmf(stats.binom(120, 0.75), 0, 120), 0),
    "multinomial": (lambda d: torch.multinomial(pair(d, 3, 1)[:1], N, True), [0.75, 0.25], 0),
}


@pytest.mark.parametrize("name", DISCRETE)
def test_discrete(name):
    sampler, probabilities, first = DISCRETE[name]
    torch.manual_seed(1)
    for dtype, sample in [(d, sampler(d)) for d in FLOATS]:
        assert sample.dtype is (torch.int64 if name == "multinomial" else dtype)
        assert counts_fit(sample, probabilities, first) > DOUBT, dtype


def test_other_discrete_forms():
    torch.manual_seed(2)
    p = torch.full((N,), 0.8, device=TPU)
    forms = {
        "bernoulli_ tensor": (x_tpu().bernoulli_(p), [0.2, 0.8]),
        "bernoulli p": (torch.bernoulli(x_tpu(), 0.8), [0.2, 0.8]),
        "poisson": (torch.poisson(x_tpu() + 0.5), pmf(stats.poisson(0.5), 0, 8)),
        "binomial": (torch.binomial(x_tpu() + 10, p), pmf(stats.binom(10, 0.8), 0, 10)),
        "randint_like": (torch.randint_like(x_tpu(), 2, 5) - 2, [1 / 3] * 3),
        "randint_like tensor": (torch.randint_like(x_tpu(), torch.tensor(7, device=TPU)), [1 / 7] * 7),
        "random_ to": (x_tpu().random_(6), [1 / 6] * 6),
        "integers bernoulli_": (zeros(torch.int32).bernoulli_(0.3), [0.7, 0.3]),
        "integers geometric_": (zeros(torch.int64).geometric_(0.5) - 1, pmf(stats.geom(0.5), 1, 6)),
        "booleans random_": (zeros(torch.bool).random_(), [0.5, 0.5]),
    }
    for name, (sample, probabilities) in forms.items():
        assert counts_fit(sample, probabilities) > DOUBT, name


@pytest.mark.parametrize("dtype", INTEGERS, ids=lambda d: str(d)[6:])
def test_integers(dtype):
    torch.manual_seed(2)
    info = torch.iinfo(dtype)
    counts = {
        "randint": (torch.randint(10, (N,), dtype=dtype, device=TPU), 0, 10),
        "random_": (zeros(dtype).random_(3, 8), 3, 5),
        "last ones": (torch.randint(info.max - 3, info.max, (N,), dtype=dtype, device=TPU) - (info.max - 3), 0, 3),
        "first ones": (torch.randint(info.min, info.min + 3, (N,), dtype=dtype, device=TPU) - info.min, 0, 3),
    }
    for name, (sample, first, number) in counts.items():
        assert sample.dtype is dtype
        assert counts_fit(sample, [1 / number] * number, first) > DOUBT, name


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64], ids=lambda d: str(d)[6:])
def test_integers_over_the_whole_type(dtype):
    torch.manual_seed(3)
    info = torch.iinfo(dtype)
    whole = {
        "random_": (zeros(dtype).random_(), 0, info.max),
        "random_ from": (zeros(dtype).random_(info.min, None), info.min, info.max),
        "randint": (torch.randint(info.min, info.max, (N,), dtype=dtype, device=TPU), info.min, info.max - 1),
    }
    for name, (sample, least, largest) in whole.items():
        assert sample.min() >= least and sample.max() <= largest
        # A number from a range of a few hundred, as any number between it and the next.
        spread = sample.double() + torch.rand(N, dtype=torch.float64, device=TPU)
        assert fits(spread, stats.uniform(least, largest - least + 1)) > DOUBT, name
        if largest - least < 256:
            assert (sample == least).any() and (sample == largest).any(), name
    low_bit = zeros(dtype).random_() & 1
    assert counts_fit(low_bit, [0.5, 0.5]) > DOUBT


@pytest.mark.parametrize(("dtype", "bits"), [(torch.float32, 24), (torch.float16, 11), (torch.bfloat16, 8)])
def test_random_of_floats_draws_what_they_count_exactly(dtype, bits):
    torch.manual_seed(4)
    sample = zeros(dtype).random_()
    assert sample.max() <= 2**bits
    spread = sample.double() + torch.rand(N, dtype=torch.float64, device=TPU)
    assert fits(spread, stats.uniform(0, 2**bits + 1)) > DOUBT


def test_every_permutation_is_as_likely():
    torch.manual_seed(6)
    with torch.tpu.set_eager_mode("strict"):
        orders = torch.stack([torch.randperm(3, device=TPU) for _ in range(600)]).cpu()
    assert counts_fit(orders[:, 0] * 2 + (orders[:, 1] > orders[:, 2]), [1 / 6] * 6) > DOUBT
    long = torch.randperm(N, device=TPU)
    assert fits(long[: N // 2], stats.uniform(0, N)) > DOUBT  # which half comes first
    assert abs(stats.spearmanr(numbers(long), range(N)).statistic) < 4 / N**0.5


def test_multinomial_without_replacement_in_order():
    torch.manual_seed(7)
    p = [0.1, 0.2, 0.3, 0.4]
    pairs = torch.multinomial(torch.tensor(p, device=TPU).expand(N, 4), 2)
    expected = [0 if i == j else p[i] * p[j] / (1 - p[i]) for i in range(4) for j in range(4)]
    assert counts_fit(pairs[:, 0] * 4 + pairs[:, 1], expected) > DOUBT


DROPOUTS = {
    "dropout": (F.dropout, (100, 200)),
    "dropout1d": (F.dropout1d, (20_000, 3)),
    "dropout2d": (F.dropout2d, (100, 200, 2, 2)),
    "dropout3d": (F.dropout3d, (100, 200, 1, 2, 2)),
    "feature_dropout": (torch.feature_dropout, (100, 200, 2)),
    "native_dropout": (lambda x, p, train: torch.native_dropout(x, p, train)[0], (100, 200)),
}


@pytest.mark.parametrize("name", DROPOUTS)
def test_dropout(name):
    torch.manual_seed(8)
    function, shape = DROPOUTS[name]
    for dtype, out in [(d, function(torch.ones(shape, device=TPU, dtype=d), 0.25, True)) for d in FLOATS]:
        assert out.dtype is dtype
        out = out.cpu().reshape(20_000, -1)
        assert (out == out[:, :1]).all()  # a channel is kept or dropped as a whole
        kept = out[:, 0] != 0
        assert counts_fit(kept, [0.25, 0.75]) > DOUBT, dtype
        torch.testing.assert_close(out[kept], torch.full_like(out[kept], 1 / 0.75))


@pytest.mark.parametrize("name", ["alpha_dropout", "feature_alpha_dropout"])
def test_alpha_dropout_keeps_mean_and_variance(name):
    torch.manual_seed(9)
    out = getattr(F, name)(torch.randn(200, 200, 2, device=TPU), 0.25, True)
    assert abs(out.mean()) < 0.02 and abs(out.std() - 1) < 0.02
    values, counts = out.cpu().unique(return_counts=True)
    dropped = (out == values[counts.argmax()].item()).cpu().reshape(-1, 2)  # all dropped elements have one value
    assert counts_fit(dropped[:, 0], [0.75, 0.25]) > DOUBT
    if name == "feature_alpha_dropout":
        assert (dropped[:, 0] == dropped[:, 1]).all()


def test_fractional_max_pool_windows():
    torch.manual_seed(10)
    rows = torch.arange(9.0).repeat(N, 1, 9, 1).to(TPU)
    _, where = F.fractional_max_pool2d(rows, 2, output_size=4, return_indices=True)
    u = np.arange(0.5, 100_000) / 100_000
    starts = np.floor((1 + u) * 7 / 3) - np.floor(u * 7 / 3)  # of the second window; its maximum is its last column
    expected = [float(np.mean(starts + 1 == k)) for k in range(8)]
    assert 0.2 < expected[3] < 0.8
    assert counts_fit(where[:, 0, 0, 1] % 9, expected) > DOUBT


def test_initialisation():
    torch.manual_seed(11)
    init, w = torch.nn.init, torch.empty(100, 200, device=TPU)
    bound = (6 / 300) ** 0.5
    assert fits(init.uniform_(w, -1, 3), stats.uniform(-1, 4)) > DOUBT
    assert fits(init.normal_(w, 1, 3), stats.norm(1, 3)) > DOUBT
    assert fits(init.trunc_normal_(w, 0.5, 2, -1, 3), stats.truncnorm(-0.75, 1.25, 0.5, 2)) > DOUBT
    assert fits(init.xavier_uniform_(w), stats.uniform(-bound, 2 * bound)) > DOUBT
    assert fits(init.kaiming_normal_(w), stats.norm(0, (2 / 200) ** 0.5)) > DOUBT
    q = init.orthogonal_(torch.empty(10, 20, device=TPU)).cpu()
    torch.testing.assert_close(q @ q.T, torch.eye(10), atol=1e-5, rtol=0)
    sparse = init.sparse_(torch.empty(500, 3, device=TPU), 0.1, 2.0).cpu()
    assert ((sparse == 0).sum(0) == 50).all() and fits(sparse[sparse != 0], stats.norm(0, 2)) > DOUBT


def test_attention_and_recurrent_dropout():
    torch.manual_seed(12)
    # Equal weights on 64 unit values: the output reads the mask.
    q = torch.zeros(1, 5, 64, 64, device=TPU)
    mask = F.scaled_dot_product_attention(q, q, torch.eye(64, device=TPU).expand(1, 5, 64, 64), dropout_p=0.25) * 48
    assert counts_fit(mask.round(), [0.25, 0.75]) > DOUBT
    torch.testing.assert_close(mask, mask.round(), atol=1e-4, rtol=0)
    rnn = torch.nn.RNN(1, 100, 2, dropout=0.25, nonlinearity="relu")
    for name, p in rnn.named_parameters():  # the first layer gives ones, the second copies what it gets
        p.data = torch.eye(100) if name == "weight_ih_l1" else torch.zeros_like(p)
    rnn.bias_ih_l0.data.fill_(1)
    out, _ = rnn.to(TPU)(torch.zeros(10, 20, 1, device=TPU))
    assert counts_fit((out * 0.75).round(), [0.25, 0.75]) > DOUBT
    packed = torch.nn.utils.rnn.pack_padded_sequence(torch.zeros(12, 20, 1, device=TPU), [12] * 20)
    assert counts_fit((rnn(packed)[0].data * 0.75).round(), [0.25, 0.75]) > DOUBT


def test_distributions():
    torch.manual_seed(13)
    d, size, p = torch.distributions, (N,), torch.tensor([0.1, 0.2, 0.3, 0.4], device=TPU)
    two, three = torch.tensor(2.0, device=TPU), torch.tensor(3.0, device=TPU)
    plain = {"validate_args": False}
    continuous = {
        "laplace": (d.Laplace(two, three, **plain), stats.laplace(2, 3)),
        "gumbel": (d.Gumbel(two, three, **plain), stats.gumbel_r(2, 3)),
        "beta": (d.Beta(two, three, **plain), stats.beta(2, 3)),
        "student": (d.StudentT(three, **plain), stats.t(3)),
        "weibull": (d.Weibull(two, three, **plain), stats.weibull_min(3, 0, 2)),
        "half cauchy": (d.HalfCauchy(two, **plain), stats.halfcauchy(0, 2)),
        "von mises": (d.VonMises(two * 0, three, **plain), stats.vonmises(3)),
    }
    discrete = {
        "categorical": (d.Categorical(p, **plain), p.tolist()),
        "geometric": (d.Geometric(p[2], **plain), pmf(stats.geom(0.3, -1), 0, 20)),
        "negative binomial": (d.NegativeBinomial(three, p[3], **plain), pmf(stats.nbinom(3, 0.6), 0, 20)),
    }
    samples = {name: made.sample(size) for name, (made, _) in (continuous | discrete).items()}
    for name, (_, distribution) in continuous.items():
        assert fits(samples[name], distribution) > DOUBT, name
    for name, (_, probabilities) in discrete.items():
        assert counts_fit(samples[name], probabilities) > DOUBT, name
    covariance = torch.tensor([[2.0, 1.0], [1.0, 3.0]])
    normal = d.MultivariateNormal(torch.zeros(2, device=TPU), covariance.to(TPU), **plain).sample(size).cpu()
    assert fits(normal[:, 1], stats.norm(0, 3**0.5)) > DOUBT
    torch.testing.assert_close(normal.T.cov(), covariance, atol=0.1, rtol=0)


def test_gradients_of_samples():
    """A sample moves with a parameter as its quantile does: dx/da = -(dF/da) / f."""
    torch.manual_seed(14)
    d, a = torch.distributions, torch.full((400,), 1.5, device=TPU, requires_grad=True)
    families = {
        "normal": (d.Normal(1.0, a, validate_args=False), lambda a: stats.norm(1, a)),
        "gamma": (d.Gamma(a, 2.0, validate_args=False), lambda a: stats.gamma(a, 0, 0.5)),
        "exponential": (d.Exponential(a, validate_args=False), lambda a: stats.expon(0, 1 / a)),
        "beta": (d.Beta(a, 2.0, validate_args=False), lambda a: stats.beta(a, 2)),
    }
    for name, (made, family) in families.items():
        sample = made.rsample()
        (gradient,) = torch.autograd.grad(sample.sum(), a)
        x, h = numbers(sample), 1e-4
        expected = -(family(1.5 + h).cdf(x) - family(1.5 - h).cdf(x)) / (2 * h) / family(1.5).pdf(x)
        np.testing.assert_allclose(numbers(gradient), expected, rtol=5e-3, atol=5e-3, err_msg=name)
