"""Changing sizes under torch.compile: results are those of eager PyTorch CPU at every size, and the number of programs
is bounded by the number of buckets.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from torchtpu.compile.graph import GraphProgram
from torchtpu.compile.padding import Buckets


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[GraphProgram]]:
    """The graphs compiled during a test."""
    torch._dynamo.reset()
    made: list[GraphProgram] = []
    original = GraphProgram.__init__

    def init(self: GraphProgram, *args: Any) -> None:
        original(self, *args)
        made.append(self)

    monkeypatch.setattr(GraphProgram, "__init__", init)
    yield made
    torch._dynamo.reset()


def _moved(x: Any) -> Any:
    return torch.utils._pytree.tree_map(lambda t: t.to("tpu") if isinstance(t, torch.Tensor) else t, x)


def _same(found: Any, wanted: Any, **tolerance: float) -> None:
    flat = torch.utils._pytree.tree_leaves
    for i, (a, b) in enumerate(zip(flat(found), flat(wanted), strict=True)):
        a = a.detach().cpu() if isinstance(a, torch.Tensor) else a
        b = b.detach() if isinstance(b, torch.Tensor) else b
        torch.testing.assert_close(a, b, equal_nan=True, msg=lambda m, i=i: f"result {i}: {m}", **tolerance)


def _compiles() -> int:
    return torch.tpu.compile_stats()["compiles"]


def _exact(graphs: list[GraphProgram]) -> list[str]:
    return [reason for g in graphs for reason in g.exact_because]


def _programs(graphs: list[GraphProgram]) -> int:
    """The most programs of one graph."""
    padded = [g.padded for g in graphs if g.padded is not None]
    assert padded, "no graph has a size that changes"
    return max(len(p.programs) for p in padded)


def check(
    graphs: list[GraphProgram],
    function: Callable[..., Any],
    inputs: Callable[[int], tuple[Any, ...]],
    sizes: tuple[int, ...] = (3, 4, 7, 6),
    changing: tuple[int, ...] = (0,),
    rtol: float = 2e-4,
    atol: float = 2e-5,
) -> None:
    """Compare a function of tensors at several sizes with the CPU. All graphs must understand their padding, and
    compile once for each bucket.
    """
    compiled = torch.compile(function, backend="tpu")
    for n in sizes:
        given = inputs(n)
        moved = _moved(given)
        for t in moved:
            if isinstance(t, torch.Tensor):
                torch._dynamo.mark_dynamic(t, changing)
        _same(compiled(*moved), function(*given), rtol=rtol, atol=atol)
    assert _exact(graphs) == []
    assert _programs(graphs) <= len({Buckets()(n) for n in sizes})


def _batch(*shape: int) -> Callable[[int], tuple[Any, ...]]:
    return lambda n: (torch.randn(n, *shape),)


ONE_DIMENSION = {
    "pointwise": lambda x: (x * 2 + 1).relu() / (x.abs() + 1),
    "sum": lambda x: (x.sum(), x.sum(0), x.sum(1), x.sum(0, keepdim=True)),
    "mean": lambda x: (x.mean(), x.mean(0), x.mean((0, 1), keepdim=True)),
    "extrema": lambda x: (x.max(), x.amin(0), x.max(0), x.min(dim=0), x.argmax(), x.argmin(0), (-x.abs() - 1).amax(0)),
    "logic": lambda x: ((x > 9).any(0), (x < 9).all(), (x > 0).sum(0), torch.count_nonzero(x)),
    "products": lambda x: (x.abs().prod(0), x.cumsum(0), x.cumprod(0), x.logcumsumexp(0)),
    "moments": lambda x: (x.var(0), x.std(), x.var(0, correction=0), torch.var_mean(x, 0)),
    "norms": lambda x: (x.norm(), x.norm(dim=0), torch.linalg.vector_norm(x, 1, 0), x.logsumexp(0)),
    "softmax": lambda x: (x.softmax(0), x.log_softmax(0), F.softmin(x, 0)),
    "matrix products": lambda x: (x.t() @ x, x @ x.t(), x[:, 0] @ x[:, 1], x.t().mv(x[:, 0])),
    "views": lambda x: (x.view(-1), x.t().reshape(-1), x.view(-1, 2, 3).sum(0), x[None].expand(3, -1, -1) + 1),
    "views that cross": lambda x: x.t().reshape(-1) + x.reshape(-1),
    "slices": lambda x: (x[:2], x[1:], x[:-1], x[-1], x[-2:], x[1:-1], x[::2], x[0], x[:, 1:3]),
    "joined": lambda x: (
        torch.cat([x, x + 1]), torch.cat([x, x[:1], x * 2]), torch.cat([x, x], 1), torch.stack([x, x], 1),
        torch.cat([x[:1], x]).sum(0),
    ),
    "counting": lambda x: (
        torch.arange(x.shape[0]), torch.arange(x.shape[0]) * x.shape[0], torch.full((x.shape[0],), x.shape[0]),
        x * x.shape[0], torch.ones(x.shape[0], 2).sum(0), torch.zeros_like(x) + x.shape[0] / 2,
    ),
    "sizes": lambda x: (x.shape[0], x.numel(), x.sum() + 1),
    "order": lambda x: (x.sort(0), torch.sort(x, dim=0, descending=True, stable=True), x.topk(2, 0), x.argsort(0)),
    "turned": lambda x: (x.flip(0), x.roll(1, 0), x.flip(1), x.roll(-2, 1)),
    "repeated": lambda x: (x.repeat(2, 1), x.repeat(1, 3), x.repeat(2, 1).sum(0), x.repeat_interleave(2, 0)),
    "triangles": lambda x: (x @ x.t()).tril() + (x @ x.t()).triu(1) * 2,
    "padded by the user": lambda x: (
        F.pad(x, (0, 0, 1, 2), value=3.0), F.pad(x, (1, 0)), F.pad(x, (0, 0, 0, 1)).sum(0),
    ),
    "indexed": lambda x: (x[torch.tensor([0, 2, -1])], x[torch.arange(x.shape[0] - 1)], x[:, torch.tensor([1, 0])]),
    "written": lambda x: torch.zeros(3, 6).index_add(0, torch.arange(x.shape[0]) % 3, x),
    "masked": lambda x: (x.masked_fill(x > 0, 0.0), torch.where(x > 0, x, 7.0).sum(), x.clamp(-1, 1).mean()),
}  # fmt: skip


def _on(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with new tensors made where its argument is."""

    def run(x: torch.Tensor) -> Any:
        with torch.device(x.device):
            return function(x)

    return run


@pytest.mark.parametrize("name", ONE_DIMENSION)
def test_functions(graphs, name):
    check(graphs, _on(ONE_DIMENSION[name]), _batch(6), sizes=(5, 7, 4, 8))


# Where both sizes change these meet a size that does not.
NEED_A_SIZE = {"matrix products", "indexed", "written", "views", "joined"}


@pytest.mark.parametrize("name", sorted(ONE_DIMENSION.keys() - NEED_A_SIZE))
def test_two_sizes_change(graphs, name):
    function = _on(ONE_DIMENSION[name])
    compiled = torch.compile(function, backend="tpu", dynamic=True)
    sizes = [(5, 6), (8, 5), (7, 4)]
    for n, m in sizes:
        x = torch.randn(n, m)
        _same(compiled(x.to("tpu")), function(x), rtol=2e-4, atol=2e-5)
    assert _exact(graphs) == []
    assert _programs(graphs) <= 2


# ---- padding does not leak ------------------------------------------------------------------------------------------

LEAKS = {
    "sum": lambda x: (1 / x).sum(),
    "mean": lambda x: x.log().mean(0),
    "product": lambda x: x.log().t() @ x.reciprocal(),
    "rows": lambda x: (x / x).softmax(0),
    "norm": lambda x: x.rsqrt().norm(),
    "moments": lambda x: (1 / x).var(0),
    "extrema": lambda x: ((1 / x).max(0), (-1 / x).amin(), (1 / x).argmax(0)),
    "scan": lambda x: (x.log().flip(0).cumsum(0), x.log().cumsum(0).sum(0)),
    "order": lambda x: (1 / x).sort(0, descending=True),
    "attention": lambda x: F.scaled_dot_product_attention(*[(1 / x).reshape(1, 1, *x.shape)] * 3),
    "layer norm": lambda x: F.layer_norm(1 / x, (6,)).sum(0),
    "loss": lambda x: F.mse_loss(1 / x, x.log()),
    "convolution": lambda x: F.conv1d((1 / x).t()[None], x.new_ones(2, 6, 3), padding=1),
    "joined": lambda x: torch.cat([1 / x, x.log()]).sum(0),
    "infinite elements": lambda x: ((x * 0).log().amax(0), (x * 0).log().logsumexp(0), (x * 0).log().argmax(0)),
}


@pytest.mark.parametrize("name", LEAKS)
def test_what_is_in_the_padding_does_not_matter(graphs, name):
    # Zeros in the padding become infinities and NaN.
    check(graphs, LEAKS[name], lambda n: (torch.rand(n, 6) + 0.5,), sizes=(5, 7))


@pytest.mark.parametrize("name", sorted(LEAKS.keys() - {"infinite elements", "order", "extrema", "scan"}))
def test_nor_for_gradients(graphs, name):
    function = LEAKS[name]
    compiled = torch.compile(lambda x: function(x).sum(), backend="tpu")
    for n in (5, 7):
        x = (torch.rand(n, 6) + 0.5).requires_grad_()
        y = x.detach().to("tpu").requires_grad_()
        torch._dynamo.mark_dynamic(y, 0)
        compiled(y).backward()
        function(x).sum().backward()
        _same(y.grad, x.grad, rtol=2e-3, atol=2e-4)
    assert _exact(graphs) == []


# ---- models ---------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Attention and a feed-forward layer, as in a transformer."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.norm, self.norm2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.up, self.down = nn.Linear(16, 40), nn.Linear(40, 16)

    def forward(self, x: torch.Tensor, keep: torch.Tensor | None = None) -> torch.Tensor:
        b, s, _ = x.shape
        q, k, v = (y.view(b, s, 2, 8).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1))
        mask = None if keep is None else keep[:, None, None, :]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=self.causal)
        x = x + self.out(y.transpose(1, 2).reshape(b, s, 16))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Convolutional(nn.Module):
    """Convolutions and batch normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 5, 3, stride=2)
        self.norm, self.groups = nn.BatchNorm2d(4), nn.GroupNorm(1, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(self.norm(self.first(x)).relu(), 2)
        return self.groups(self.second(x)).mean((2, 3))


class Embedded(nn.Module):
    """A bag of words with a positional embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.out = nn.Embedding(11, 6, padding_idx=0), nn.Embedding(20, 6), nn.Linear(6, 3)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words) + self.places(torch.arange(words.shape[1], device=words.device))
        keep = (words != 0).unsqueeze(-1)
        return self.out((x * keep).sum(1) / keep.sum(1).clamp(min=1))


def check_training(
    graphs: list[GraphProgram],
    model: nn.Module,
    loss: Callable[..., torch.Tensor],
    inputs: Callable[[int, int], tuple[torch.Tensor, ...]],
    sizes: tuple[tuple[int, int], ...],
    programs: int,
    changing: tuple[int, ...] = (0, 1),
) -> None:
    """Compare losses, gradients and updated parameters with the CPU."""
    there = copy.deepcopy(model).to("tpu")
    compiled = torch.compile(loss, backend="tpu")
    steps = [torch.optim.SGD(m.parameters(), 0.05) for m in (model, there)]
    for size in sizes:
        given = inputs(*size)
        moved = _moved(given)
        for t in moved:
            torch._dynamo.mark_dynamic(t, [i for i in changing if i < t.dim()])
        found, wanted = compiled(there, *moved), loss(model, *given)
        _same(found, wanted, rtol=1e-3, atol=1e-4)
        for step in steps:
            step.zero_grad()
        found.backward()
        wanted.backward()
        _same([p.grad for p in there.parameters()], [p.grad for p in model.parameters()], rtol=2e-3, atol=2e-4)
        for step in steps:
            step.step()
    _same(dict(there.state_dict()), dict(model.state_dict()), rtol=2e-3, atol=2e-4)
    assert _exact(graphs) == []
    assert _programs(graphs) <= programs


def test_training_with_any_batch(graphs):
    model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 5))

    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x), y)

    def inputs(n: int, _: int) -> tuple[torch.Tensor, ...]:
        return torch.randn(n, 6), torch.randint(0, 5, (n,))

    sizes = tuple((n, 0) for n in (3, 7, 4, 5))
    check_training(graphs, model, loss, inputs, sizes, programs=2, changing=(0,))


@pytest.mark.parametrize("masked", ["causal", "mask", "neither"])
def test_training_attention_with_any_batch_and_length(graphs, masked):
    def loss(model: nn.Module, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        return (model(x, keep if masked == "mask" else None) * keep[..., None]).square().mean()

    def inputs(b: int, s: int) -> tuple[torch.Tensor, ...]:
        return torch.randn(b, s, 16), torch.arange(s) < torch.randint(1, s + 1, (b, 1))

    sizes = ((3, 5), (4, 7), (3, 12))
    check_training(graphs, Block(masked == "causal"), loss, inputs, sizes, programs=2)


def test_training_convolutions_with_any_batch(graphs):
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    def inputs(n: int, _: int) -> tuple[torch.Tensor, ...]:
        return (torch.randn(n, 3, 9, 9),)

    check_training(graphs, Convolutional(), loss, inputs, ((3, 0), (4, 0), (5, 0), (7, 0)), programs=2, changing=(0,))


def test_training_embeddings_with_any_batch_and_length(graphs):
    def loss(model: nn.Module, words: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(words), y, label_smoothing=0.1)

    def inputs(b: int, s: int) -> tuple[torch.Tensor, ...]:
        return torch.randint(0, 11, (b, s)), torch.randint(0, 3, (b,))

    check_training(graphs, Embedded(), loss, inputs, ((3, 5), (4, 7), (7, 6)), programs=2)


def test_losses(graphs):
    def losses(x: torch.Tensor, y: torch.Tensor, t: torch.Tensor) -> Any:
        some = torch.where(t == 2, -100, t)
        return (
            F.cross_entropy(x, t), F.cross_entropy(x, some), F.cross_entropy(x, t, reduction="sum"),
            F.cross_entropy(x, t, reduction="none"), F.mse_loss(x, y), F.l1_loss(x, y, reduction="sum"),
            F.smooth_l1_loss(x, y), F.huber_loss(x, y), F.binary_cross_entropy_with_logits(x, y.sigmoid()),
            F.binary_cross_entropy(x.sigmoid(), y.sigmoid()), F.kl_div(x, y.softmax(1), reduction="batchmean"),
            F.cosine_embedding_loss(x, y, (t > 1) * 2 - 1),
        )  # fmt: skip

    def inputs(n: int) -> tuple[torch.Tensor, ...]:
        return torch.randn(n, 6), torch.randn(n, 6), torch.randint(0, 6, (n,))

    check(graphs, losses, inputs)


def test_language_model_loss(graphs):
    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits[:, :-1].reshape(-1, 7), labels[:, 1:].reshape(-1), ignore_index=-1)

    compiled = torch.compile(loss, backend="tpu")
    for b, s in ((3, 5), (4, 7), (7, 9)):
        x, t = torch.randn(b, s, 7), torch.randint(-1, 7, (b, s))
        y, u = x.to("tpu"), t.to("tpu")
        for z in (y, u):
            torch._dynamo.mark_dynamic(z, (0, 1))
        y.requires_grad_()
        x.requires_grad_()
        found, wanted = compiled(y, u), loss(x, t)
        _same(found, wanted)
        found.backward()
        wanted.backward()
        _same(y.grad, x.grad)
    assert _exact(graphs) == []
    assert _programs(graphs) <= 3


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=61, hidden_size=16, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=61, hidden_size=16, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64,
    )  # fmt: skip
    return BertForSequenceClassification(config)


@pytest.mark.parametrize("make", [_llama, _bert])
def test_transformers_with_any_batch_and_length(graphs, make):
    torch.manual_seed(0)
    model = make().eval()
    there = copy.deepcopy(model).to("tpu")
    compiled = torch.compile(there, backend="tpu", dynamic=True)
    with torch.no_grad():
        for b, s in ((3, 5), (4, 7), (2, 12)):
            words = torch.randint(1, 61, (b, s))
            keep = (torch.arange(s) < torch.randint(1, s + 1, (b, 1))).long()
            given = {"input_ids": words, "attention_mask": keep}
            _same(compiled(**_moved(given)).logits, model(**given).logits, rtol=1e-3, atol=1e-4)
    assert _exact(graphs) == []
    assert _programs(graphs) <= 2


@pytest.mark.parametrize("make", [_llama, _bert])
def test_training_transformers(graphs, make):
    torch.manual_seed(0)
    model = make().eval()  # without dropout, whose numbers differ from the CPU's

    def loss(model: nn.Module, words: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return model(input_ids=words, labels=labels).loss

    def inputs(b: int, s: int) -> tuple[torch.Tensor, ...]:
        return torch.randint(1, 61, (b, s)), torch.randint(0, 2, (b,) if make is _bert else (b, s))

    check_training(graphs, model, loss, inputs, ((3, 5), (4, 7)), programs=1)


# ---- counting, choosing and refusing --------------------------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [True, None, "marked"])
def test_a_thousand_sizes_are_eleven_programs(graphs, dynamic):
    # Dynamo compiles size 1 for itself; 2 to 1024 are the buckets 2, 4, ..., 1024.
    def function(x: torch.Tensor) -> torch.Tensor:
        return (x @ x.t()).softmax(0).mean(1, keepdim=True).sum(0) + x.log().mean(0)

    compiled = torch.compile(function, backend="tpu", dynamic=None if dynamic == "marked" else dynamic)
    before = _compiles()
    for n in range(2 if dynamic == "marked" else 1, 1025, 1 if dynamic is True else 31):
        x = torch.rand(n, 4)
        y = x.to("tpu")
        if dynamic == "marked":
            torch._dynamo.mark_dynamic(y, 0, min=2, max=1024)
        _same(compiled(y), function(x), rtol=1e-4, atol=1e-5)
    assert _compiles() - before <= 11


def test_a_training_loop_compiles_for_buckets_only(graphs):
    model = nn.Linear(4, 3).to("tpu")
    compiled = torch.compile(lambda x, y: F.cross_entropy(model(x), y), backend="tpu", dynamic=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    counted = []
    for n in (3, 5, 4, 7, 6, 8):
        before = _compiles()
        compiled(torch.randn(n, 4).to("tpu"), torch.randint(0, 3, (n,)).to("tpu")).backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.tpu.synchronize()
        counted.append(_compiles() - before)
    assert counted[2:] == [0, 0, 0, 0]


def test_results_are_padded_inputs_of_the_next_graph(graphs):
    first = torch.compile(lambda x: x * 2, backend="tpu", dynamic=True)
    second = torch.compile(lambda x: x.sum(0), backend="tpu", dynamic=True)
    for n in (5, 6, 7):
        x = torch.randn(n, 3)
        y = first(x.to("tpu"))
        assert y.shape == x.shape and y.is_contiguous()
        _same((y + 1, second(y)), (x * 2 + 1, (x * 2).sum(0)))
    assert _exact(graphs) == []
    assert _programs(graphs) == 1


def test_buckets_can_be_chosen(graphs, monkeypatch):
    def programs(sizes: tuple[int, ...], **options: Any) -> int:
        torch._dynamo.reset()
        graphs.clear()
        compiled = torch.compile(lambda x: x.sum(0), backend="tpu", dynamic=True, **options)
        for n in sizes:
            x = torch.randn(n, 7)
            _same(compiled(x.to("tpu")), x.sum(0))
        return sum(len(g.padded.programs if g.padded else g.programs) for g in graphs)

    sizes = (3, 5, 6, 9)
    assert programs(sizes) == 3
    assert programs(sizes, options={"buckets": [10, 20]}) == 1
    assert programs(sizes, options={"buckets": "6,12"}) == 2
    assert programs(sizes, options={"buckets": "exact"}) == 4
    monkeypatch.setenv("TORCHTPU_BUCKETS", "16")
    assert programs(sizes) == 1
    with pytest.raises(Exception, match="powers"):
        programs(sizes, options={"buckets": "some"})


def test_buckets():
    powers = Buckets("powers")
    assert [powers(n) for n in (1, 2, 3, 5, 64, 65)] == [1, 2, 4, 8, 64, 128]
    assert [powers(n, 100) for n in (65, 100)] == [100, 100]
    assert [Buckets([3, 100])(n) for n in (2, 4, 101)] == [3, 100, 128]
    for wrong in ("", "0,2", "x", [], 5.5):
        with pytest.raises(ValueError, match="exact"):
            Buckets(wrong)


def test_operators_without_a_rule_compile_for_exact_sizes_and_are_named(graphs):
    compiled = torch.compile(lambda x: torch.cdist(x, x).sum(0), backend="tpu", dynamic=True)
    for n in (3, 5, 6):
        x = torch.randn(n, 4)
        _same(compiled(x.to("tpu")), torch.cdist(x, x).sum(0), rtol=1e-3, atol=1e-3)
    (reason,) = _exact(graphs)
    assert "cdist" in reason and "dimension" in reason
    assert len(graphs[0].programs) == 3


def test_indices_are_checked_against_the_size_not_the_bucket(graphs):
    compiled = torch.compile(lambda x, i: x[i], backend="tpu", dynamic=True)
    for n in (5, 6):
        x, i = torch.randn(n, 3), torch.tensor([0, -1, n - 1])
        _same(compiled(x.to("tpu"), i.to("tpu")), x[i])
    assert _exact(graphs) == []
    compiled(torch.randn(5, 3).to("tpu"), torch.tensor([0, 6, 1]).to("tpu"))
    with pytest.raises(IndexError, match="index 6 is out of bounds"):
        torch.tpu.synchronize()


@pytest.mark.parametrize("shape", ["rows", "columns"])
def test_random_numbers_are_those_of_the_unpadded_tensor(graphs, shape):
    def draw(x: torch.Tensor) -> Any:
        return torch.rand_like(x), F.dropout(x, 0.5), torch.randn(x.shape, device=x.device), torch.rand_like(x[0])

    compiled = torch.compile(draw, backend="tpu")
    for n in (5, 7):
        x = torch.ones(n, 3, device="tpu") if shape == "rows" else torch.ones(3, n, device="tpu")
        torch._dynamo.mark_dynamic(x, 0 if shape == "rows" else 1)
        torch.manual_seed(n)
        found = compiled(x)
        torch.manual_seed(n)
        _same(found, [y.cpu() for y in draw(x)])
    assert _exact(graphs) == []


def test_sizes_that_are_no_tensors_size_need_no_bucket(graphs):
    compiled = torch.compile(lambda x, k: x * k + x[k % 3], backend="tpu", dynamic=True)
    for k in (3, 5, 7, 11, 20):
        x = torch.randn(6, 4)
        _same(compiled(x.to("tpu"), k), x * k + x[k % 3])
    assert _programs(graphs) == 1


def test_views_and_storages_as_inputs(graphs):
    compiled = torch.compile(lambda x: (x * 2, x.sum(1), x.t()), backend="tpu", dynamic=True)
    for n in (5, 6):
        x = torch.randn(9, 7)
        y = x.to("tpu")
        for view in (lambda t, n=n: t[1 : n + 1], lambda t, n=n: t[:, :n].t(), lambda t, n=n: t.t()[:n]):
            _same(compiled(view(y)), (view(x) * 2, view(x).sum(1), view(x).t()))
    assert _exact(graphs) == []
