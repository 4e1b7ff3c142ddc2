"""Streams of random numbers: the same in every mode, saved and restored, and repeated where a backward needs them."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import torchtpu  # noqa: F401

TPU = "tpu"


@pytest.fixture(autouse=True)
def mode():
    """Each test names its modes."""
    with torch.tpu.set_eager_mode("fused"):
        yield


def offset(device: int = 0) -> int:
    """Draws taken from a device's generator since it was seeded."""
    return torch.tpu.default_generators[device].get_offset()


def flat(results) -> list[torch.Tensor]:
    return [r.detach().cpu() for r in torch.utils._pytree.tree_leaves(results)]


def run(function, mode: str, parameters=(), seed: int = 0):
    """Results, gradients of the parameters, the number drawn next, and how many draws that took."""
    if mode == "compiled":
        torch._dynamo.reset()
        function = torch.compile(function, backend="tpu")
    with torch.tpu.set_eager_mode("strict" if mode == "strict" else "fused"):
        torch.manual_seed(seed)
        results = function()
        if parameters:
            gradients = torch.autograd.grad(results.sum(), parameters)
            results = [results, *gradients]
        return flat([results, torch.rand(3, device=TPU)]), offset()


def assert_one_stream(function, draws: int, parameters=(), modes=("strict", "fused", "compiled")):
    """All modes give the same numbers and take the same number of draws, and another seed gives others."""
    expected, taken = run(function, modes[0], parameters)
    assert taken == draws + 1
    for mode in modes[1:]:
        actual, taken = run(function, mode, parameters)
        assert taken == draws + 1, mode
        for a, e in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, e, msg=lambda m, mode=mode: f"{mode}: {m}")
    if draws and not parameters:
        others, _ = run(function, modes[0], seed=1)
        assert any(not torch.equal(a, b) for a, b in zip(others[:-1], expected[:-1], strict=True))


def ones(*size: int) -> torch.Tensor:
    return torch.ones(size, device=TPU)


def leaf(*size: int) -> torch.Tensor:
    return torch.linspace(-1, 1, torch.Size(size).numel()).reshape(size).to(TPU).requires_grad_()


def test_samplers():
    def samplers():
        x = ones(40)
        return (
            *(torch.rand(5, device=TPU), torch.randn(5, device=TPU), torch.randint(99, (5,), device=TPU)),
            *(torch.randperm(9, device=TPU), torch.empty_like(x).uniform_(), torch.empty_like(x).normal_()),
            *(torch.empty_like(x).exponential_(), torch.empty_like(x).bernoulli_(0.5), torch.multinomial(x, 5)),
            torch.rand(5, device=TPU, dtype=torch.complex64),  # one draw, though its parts take two keys
        )

    assert_one_stream(samplers, 10)


def test_dropout_forms():
    def dropouts():
        x = ones(4, 6, 2, 2)
        return (
            *(F.dropout(x, 0.5), F.dropout(x, 0.5), F.dropout2d(x, 0.5), F.alpha_dropout(x, 0.5, True)),
            *(F.rrelu(-x, training=True), F.dropout(x, 0.5, False), F.fractional_max_pool2d(x, 1, output_size=1)),
        )

    assert_one_stream(dropouts, 6)


def test_distributions_whose_arguments_are_checked():
    p = torch.full((6,), 0.5, device=TPU, requires_grad=True)
    modes = ("fused", "compiled")
    assert_one_stream(lambda: torch.distributions.Beta(p + 1, p + 1).rsample(), 1, [p], modes)
    assert_one_stream(lambda: torch.distributions.OneHotCategorical(p.detach()).sample(), 1, (), modes)
    # OneHotCategorical checks with an assertion that stays in the graph.
    compiled = torch.compile(lambda x: (torch._assert_async(x.all(), "not {all}"), x + 1)[1], backend="tpu")
    compiled(ones(3))
    with pytest.raises(RuntimeError, match=r"not \{all\}"):
        compiled(ones(3) * 0).cpu()


def test_what_draws_nothing_takes_no_draw():
    q, x, gru = ones(1, 2, 4, 4), ones(3, 2, 4), torch.nn.GRU(4, 4, 2, dropout=0.5).to(TPU).eval()
    norm = torch.nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).to(TPU).eval()
    assert_one_stream(lambda: (F.scaled_dot_product_attention(q, q, q), F.dropout(q, 0.5, False), norm(x)), 0)
    torch.manual_seed(0)
    gru(x)
    assert offset() == 0


def test_draws_with_gradients():
    x = leaf(8, 8)
    assert_one_stream(lambda: F.dropout(F.dropout(x, 0.5).sin(), 0.3) * torch.rand(8, device=TPU), 3, [x])


class Noisy(torch.autograd.Function):
    """Draws in its backward too."""

    @staticmethod
    def forward(ctx, x):
        return x * torch.rand(8, device=TPU)

    @staticmethod
    def backward(ctx, g):
        return g * torch.rand(8, device=TPU)


def test_a_backward_that_draws():
    x = leaf(8, 8)
    assert_one_stream(lambda: Noisy.apply(F.dropout(x, 0.5)), 3, [x])


def test_checkpoint_repeats_the_mask():
    x, w = leaf(8, 8), leaf(8, 8)

    def block(x):
        return F.dropout(torch.sin(F.dropout(x @ w, 0.5)), 0.3) * torch.cos(x)

    def twice():
        y = checkpoint(block, x, use_reentrant=False)
        return checkpoint(block, F.dropout(y, 0.2), use_reentrant=False)

    assert_one_stream(twice, 5, [x, w])
    plain, _ = run(lambda: block(F.dropout(block(x), 0.2)), "strict", [x, w])
    for a, e in zip(run(twice, "compiled", [x, w])[0], plain, strict=True):
        torch.testing.assert_close(a, e)


def test_checkpoint_of_attention_and_reentrant():
    q = leaf(1, 2, 8, 4)

    def attend(q):
        return F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)

    assert_one_stream(lambda: checkpoint(attend, q, use_reentrant=False), 1, [q], ("fused", "compiled"))
    plain, _ = run(lambda: attend(q), "fused", [q])
    torch.manual_seed(0)
    checkpoint(attend, q, use_reentrant=True).sum().backward()
    torch.testing.assert_close(q.grad.cpu(), plain[1])
    assert offset() == 1


def test_layers():
    x = leaf(2, 5, 8)
    encoder = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True).to(TPU)
    assert_one_stream(lambda: encoder(x), 4, [x, encoder.linear1.weight], ("fused", "compiled"))
    rnn = torch.nn.RNN(8, 4, 2, dropout=0.5, batch_first=True).to(TPU).requires_grad_(False)
    packed = torch.nn.utils.rnn.pack_padded_sequence(x.detach(), [5, 3], batch_first=True)
    for read in (lambda: rnn(x.detach())[0], lambda: rnn(packed)[0].data):
        torch.manual_seed(0)
        first = read().detach().cpu()
        torch.manual_seed(0)
        assert torch.equal(read().detach().cpu(), first) and offset() == 1


def test_recompiling_and_calling_again_go_on_with_the_stream():
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: F.dropout(x, 0.5) + torch.rand_like(x), backend="tpu", dynamic=False)
    torch.manual_seed(3)
    actual = [compiled(ones(n)).cpu() for n in (4, 4, 6, 4)]
    torch.manual_seed(3)
    expected = [(F.dropout(ones(n), 0.5) + torch.rand(n, device=TPU)).cpu() for n in (4, 4, 6, 4)]
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e)


def test_a_graph_near_the_end_of_the_offset_words():
    generator = torch.tpu.default_generators[0]
    torch._dynamo.reset()
    compiled = torch.compile(lambda: tuple(torch.rand(3, device=TPU) for _ in range(3)), backend="tpu")
    for start in (2**32 - 1, 2**40):
        generator.manual_seed(2**63 + 5)
        generator.set_offset(start)
        actual = flat(compiled())
        generator.set_offset(start)
        for a in actual:
            assert torch.equal(a, torch.rand(3, device=TPU).cpu())
        assert generator.get_offset() == start + 3


GIVEN = {
    "rand": lambda g: torch.rand(9, device=TPU, generator=g),
    "randn": lambda g: torch.randn(9, device=TPU, generator=g),
    "randint": lambda g: torch.randint(99, (9,), device=TPU, generator=g),
    "randint low": lambda g: torch.randint(5, 99, (9,), device=TPU, generator=g),
    "randperm": lambda g: torch.randperm(9, device=TPU, generator=g),
    "rand_like": lambda g: torch.rand_like(ones(9), generator=g),
    "randn_like": lambda g: torch.randn_like(ones(9), generator=g),
    "randint_like": lambda g: torch.randint_like(ones(9), 99, generator=g),
    "uniform_": lambda g: ones(9).uniform_(generator=g),
    "normal_": lambda g: ones(9).normal_(generator=g),
    "bernoulli_": lambda g: ones(9).bernoulli_(0.5, generator=g),
    "bernoulli": lambda g: torch.bernoulli(ones(9) / 2, generator=g),
    "exponential_": lambda g: ones(9).exponential_(generator=g),
    "geometric_": lambda g: ones(9).geometric_(0.1, generator=g),
    "log_normal_": lambda g: ones(9).log_normal_(generator=g),
    "cauchy_": lambda g: ones(9).cauchy_(generator=g),
    "random_": lambda g: ones(9).random_(generator=g),
    "random_ from": lambda g: ones(9).random_(3, 99, generator=g),
    "multinomial": lambda g: torch.multinomial(ones(9), 9, generator=g),
    "normal": lambda g: torch.normal(ones(9), ones(9), generator=g),
    "normal float": lambda g: torch.normal(1.0, 2.0, (9,), device=TPU, generator=g),
    "normal out": lambda g: torch.normal(ones(9), 2.0, out=ones(9), generator=g),
    "poisson": lambda g: torch.poisson(ones(9) * 9, generator=g),
    "binomial": lambda g: torch.binomial(ones(9) * 99, ones(9) / 2, generator=g),
    "gamma": lambda g: torch._standard_gamma(ones(9), generator=g),
    "dirichlet": lambda g: torch._sample_dirichlet(ones(9), generator=g),
    "rrelu": lambda g: torch.ops.aten.rrelu_with_noise(-ones(9), ones(9), 0.1, 0.3, True, g),
    "trunc_normal_": lambda g: torch.nn.init.trunc_normal_(ones(9), generator=g),
    "kaiming_uniform_": lambda g: torch.nn.init.kaiming_uniform_(ones(3, 3), generator=g),
}


def test_a_generator_given_is_the_one_used():
    generator = torch.Generator(TPU)
    torch.manual_seed(0)
    with torch.tpu.set_eager_mode("strict"):
        for name, sampler in GIVEN.items():
            first = sampler(generator.manual_seed(7)).cpu()
            assert generator.get_offset() == 1, name
            assert not torch.equal(sampler(generator).cpu(), first), name
            assert torch.equal(sampler(generator.manual_seed(7)).cpu(), first), name
            assert not torch.equal(sampler(generator.manual_seed(8)).cpu(), first), name
    assert offset() == 0  # the default generator was left alone


def test_a_generator_given_inside_a_compiled_function():
    generator = torch.Generator(TPU).manual_seed(7)
    expected = torch.rand(4, device=TPU, generator=generator).cpu() + 1
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: x + torch.rand(4, device=TPU, generator=generator), backend="tpu")
    generator.manual_seed(7)
    torch.testing.assert_close(compiled(ones(4)).cpu(), expected)


def test_states_continue_the_stream():
    torch.manual_seed(5)
    assert torch.tpu.initial_seed() == torch.initial_seed() == 5
    torch.rand(3, device=TPU)
    state, states = torch.tpu.get_rng_state(), torch.tpu.get_rng_state_all()
    expected = torch.rand(4, device=TPU).cpu()
    torch.tpu.set_rng_state(state)
    assert torch.equal(torch.rand(4, device=TPU).cpu(), expected)
    torch.tpu.seed()
    torch.tpu.set_rng_state_all(states)
    with torch.random.fork_rng(devices=range(torch.tpu.device_count()), device_type=TPU):
        torch.tpu.manual_seed_all(99)
        assert not torch.equal(torch.rand(4, device=TPU).cpu(), expected)
    assert torch.equal(torch.rand(4, device=TPU).cpu(), expected)


def test_a_saved_state_continues_in_another_process(tmp_path):
    generator = torch.Generator(TPU).manual_seed(6)
    torch.manual_seed(5)
    torch.rand(3, device=TPU), torch.rand(3, device=TPU, generator=generator)
    torch.save([torch.tpu.get_rng_state(), generator.get_state()], tmp_path / "state.pt")
    expected = [torch.rand(4, device=TPU).cpu(), torch.rand(4, device=TPU, generator=generator).cpu()]
    program = f"""
import torch, torchtpu
state, given = torch.load({str(tmp_path / "state.pt")!r})
torch.tpu.set_rng_state(state)
generator = torch.Generator("tpu")
generator.set_state(given)
numbers = [torch.rand(4, device="tpu").cpu(), torch.rand(4, device="tpu", generator=generator).cpu()]
torch.save(numbers, {str(tmp_path / "numbers.pt")!r})
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)
    for a, e in zip(torch.load(tmp_path / "numbers.pt"), expected, strict=True):
        assert torch.equal(a, e)


@pytest.mark.skipif("torch.tpu.device_count() < 2", reason="needs TORCHTPU_CPU_DEVICES=2")
def test_devices_have_streams_of_their_own():
    torch.manual_seed(5)
    first = [torch.rand(4, device="tpu:0").cpu(), torch.rand(4, device="tpu:0").cpu()]
    assert (offset(0), offset(1)) == (2, 0)
    assert torch.equal(torch.rand(4, device="tpu:1").cpu(), first[0])  # seeded alike, as CUDA's are
    with torch.tpu.device(1):
        torch.tpu.manual_seed(6)
    assert torch.tpu.default_generators[0].initial_seed() == 5
    assert not torch.equal(torch.rand(4, device="tpu:1").cpu(), first[0])
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: F.dropout(x, 0.5), backend="tpu")
    torch.manual_seed(5)
    assert torch.equal(compiled(torch.ones(9, device="tpu:1")).cpu(), compiled(torch.ones(9, device="tpu:0")).cpu())
    assert (offset(0), offset(1)) == (1, 1)


DROPOUTS = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "dropout in place": lambda x: F.dropout(x * 1, 0.5, inplace=True),
    "dropout1d": lambda x: F.dropout1d(x[0, 0], 0.5)[None, None],
    "dropout2d": lambda x: F.dropout2d(x, 0.5),
    "dropout3d": lambda x: F.dropout3d(x, 0.5),
    "native_dropout": lambda x: torch.native_dropout(x, 0.5, True)[0],
    "checkpoint": lambda x: checkpoint(lambda y: F.dropout(y, 0.5), x, use_reentrant=False),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])
def test_gradient_is_nonzero_where_the_output_is_kept(dtype):
    torch.manual_seed(1)
    x = torch.ones(4, 8, 4, 4, device=TPU, dtype=dtype, requires_grad=True)
    outs = {name: function(x) for name, function in DROPOUTS.items()}
    gradients = {name: torch.autograd.grad(out.sum(), x)[0] for name, out in outs.items()}
    for name, out in outs.items():
        kept = gradients[name][: out.shape[0], : out.shape[1]].cpu()
        assert torch.equal(kept, out.detach().cpu()) and set(kept.unique().tolist()) == {0, 2}, name


@pytest.mark.parametrize("name", ["alpha_dropout", "feature_alpha_dropout"])
def test_gradient_of_alpha_dropout(name):
    torch.manual_seed(1)
    x = torch.randn(40, 20, 2, device=TPU, requires_grad=True)
    out = getattr(F, name)(x, 0.5, True)
    (gradient,) = torch.autograd.grad(out.sum(), x)
    values, counts = out.detach().cpu().unique(return_counts=True)
    dropped = out.detach().cpu() == values[counts.argmax()]
    assert torch.equal(gradient.cpu() == 0, dropped) and 0.4 < dropped.float().mean() < 0.6


@pytest.mark.parametrize("form", ["mask", "grouped"])
def test_attention_gradients_are_those_of_its_mask(form):
    """The identity as values makes the output the dropped probabilities, from which the mask can be read."""
    torch.manual_seed(2)
    heads = 2 if form == "grouped" else 4
    q = torch.randn(2, 4, 16, 16)
    k, v = torch.randn(2, heads, 16, 16), torch.randn(2, heads, 16, 16)
    keywords = {"is_causal": form == "grouped", "enable_gqa": form == "grouped", "dropout_p": 0.25}
    bias = torch.randn(16, 16) if form == "mask" else None
    identity = torch.eye(16).expand(2, heads, 16, 16)

    def attend(q, k, v, device, **other):
        mask = None if bias is None else bias.to(device)
        return F.scaled_dot_product_attention(q, k, v, mask, **(keywords | other))

    torch.manual_seed(3)
    probabilities = attend(*(t.to(TPU) for t in (q, k, identity)), TPU).cpu()
    kept = torch.where(probabilities != 0, 1 / 0.75, 0.0)
    assert 0.1 < (kept[..., -1, :] == 0).double().mean() < 0.4
    leaves = [t.to(TPU).requires_grad_() for t in (q, k, v)]
    torch.manual_seed(3)
    out = attend(*leaves, TPU)
    actual = torch.autograd.grad((out * out.detach().cos()).sum(), leaves)

    on_cpu = [t.clone().requires_grad_() for t in (q, k, v)]
    weights = attend(on_cpu[0], on_cpu[1], identity, "cpu", dropout_p=0.0)
    values = on_cpu[2].repeat_interleave(4 // heads, 1)
    expected = (weights * kept) @ values
    torch.testing.assert_close(out.detach().cpu(), expected.detach(), rtol=1e-4, atol=1e-5)
    gradients = torch.autograd.grad((expected * expected.detach().cos()).sum(), on_cpu)
    for a, e in zip(actual, gradients, strict=True):
        torch.testing.assert_close(a.cpu(), e, rtol=1e-4, atol=1e-5)
