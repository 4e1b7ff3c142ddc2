"""Sparse tensors on the device, judged against PyTorch CPU."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.testing import assert_close
from torch.utils._pytree import tree_map

import torchtpu  # noqa: F401
from torchtpu.eager.fallback import fallback_count, reset_fallbacks


def coo(
    *shape: int, sparse_dim: int = 0, nnz: int = 7, coalesced: bool = False, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """A random COO tensor on the CPU; with more elements than places it has duplicates."""
    dims = sparse_dim or len(shape)
    generator = torch.Generator().manual_seed(len(shape) * 100 + nnz)
    indices = torch.stack([torch.randint(0, s, (nnz,), generator=generator) for s in shape[:dims]])
    values = torch.randn(nnz, *shape[dims:], generator=generator).mul(3).to(dtype)
    t = torch.sparse_coo_tensor(indices, values, shape, check_invariants=True)
    return t.coalesce() if coalesced else t


def csr(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3)).relu().to_sparse_csr()


def dense(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5))


def moved(tree: Any) -> Any:
    return tree_map(
        lambda t: t.detach().to("tpu").requires_grad_(t.requires_grad) if isinstance(t, torch.Tensor) else t, tree
    )


def check(function: Callable[..., Any], *args: torch.Tensor) -> None:
    """The same result on both sides: layout, pattern, values and gradients, computed on the device."""
    on_device = moved(args)
    expected, before = function(*args), fallback_count()
    actual = function(*on_device)
    assert actual.device.type == "tpu" and actual.layout is expected.layout
    assert_close(actual.detach().cpu(), expected.detach())
    leaves = [a for a in args if a.requires_grad]
    if leaves:
        weight = torch.arange(1.0, 1 + expected.numel()).reshape(expected.shape)
        wanted = torch.autograd.grad(expected, leaves, weight)
        got = torch.autograd.grad(actual, [a for a in on_device if a.requires_grad], weight.to("tpu"))
        for g, w in zip(got, wanted, strict=True):
            assert g.layout is w.layout
            assert_close(g.to_dense().cpu(), w.to_dense())
    assert fallback_count() == before


def test_construction():
    indices, values = torch.tensor([[0, 1, 1], [2, 0, 2]]), torch.tensor([3.0, 4.0, 5.0])
    t = torch.sparse_coo_tensor(indices, values, (2, 4), device="tpu")
    assert t.is_sparse and t.device.type == "tpu" and t._nnz() == 3 and not t.is_coalesced()
    assert (t.sparse_dim(), t.dense_dim(), t.dtype) == (2, 0, torch.float32)
    assert torch.sparse_coo_tensor(indices.to("tpu"), values.to("tpu")).shape == (2, 3)
    assert torch.empty(3, 4, layout=torch.sparse_coo, device="tpu")._nnz() == 0
    assert torch.zeros_like(t)._nnz() == 0
    assert_close(t.cpu().to_dense(), torch.tensor([[0.0, 0, 3, 0], [4, 0, 5, 0]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
@pytest.mark.parametrize("sparse_dim", [1, 2])
def test_coalescing_adds_duplicates(dtype, sparse_dim):
    t = coo(3, 4, sparse_dim=sparse_dim, nnz=20, dtype=dtype)
    moved_t = t.to("tpu")
    result = moved_t.coalesce()
    assert result.is_coalesced() and not moved_t.is_coalesced()
    assert torch.equal(result.indices().cpu(), t.coalesce().indices())
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype is torch.bfloat16 else {}
    assert_close(result.values().cpu(), t.coalesce().values(), **tolerance)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr])
def test_round_trips(layout):
    block = (2, 2) if layout is torch.sparse_bsr else None
    x = dense(4, 6).relu()
    sparse = x.to("tpu").to_sparse(layout=layout, blocksize=block)
    assert sparse.layout is layout and sparse.device.type == "tpu"
    assert_close(sparse.to_dense().cpu(), x)
    assert_close(sparse.cpu(), x.to_sparse(layout=layout, blocksize=block))
    assert_close(sparse.cpu().to("tpu").to_dense().cpu(), x)
    assert_close(sparse.to(torch.float64).to_dense().cpu(), x.double())
    assert_close(sparse.clone(), sparse)


@pytest.mark.parametrize(
    "function",
    [torch.sin, torch.neg, torch.tanh, torch.relu, torch.sign, torch.isnan, torch.erf, lambda t: t * 2 / 3],
)
@pytest.mark.parametrize("make", [partial(coo, 4, 5, nnz=30), partial(coo, 4, 5, sparse_dim=1), partial(csr, 4, 5)])
def test_functions_of_values(function, make):
    t = make()
    if t.layout is torch.sparse_csr and "lambda" in function.__name__:
        function = partial(torch.mul, other=2)
    check(lambda x: function(x).to_dense(), t)


@pytest.mark.parametrize("kinds", ["uu", "cc", "uc"])
@pytest.mark.parametrize("sparse_dim", [1, 2])
def test_sparse_with_sparse(kinds, sparse_dim):
    a, b = (coo(4, 5, sparse_dim=sparse_dim, nnz=n, coalesced=k == "c") for n, k in zip((6, 9), kinds, strict=True))
    for function in (torch.add, torch.sub, torch.mul):
        check(lambda x, y, f=function: f(x, y).to_dense(), a, b)
    check(lambda x, y: torch.add(x, y, alpha=3).to_dense(), a, b)
    check(lambda x, y: x.clone().add_(y).to_dense(), a, b)
    check(lambda x, y: (x + y).coalesce(), a, b)


def test_sparse_with_dense():
    t, h = coo(4, 5), coo(4, 5, 3, sparse_dim=2)
    check(lambda x, y: torch.add(x, y, alpha=-2), dense(4, 5), t)
    check(lambda x, y: x.clone().add_(y), dense(4, 5, 3), h)
    check(lambda x, y: x.clone().t().add_(y), dense(5, 4), t)
    check(lambda x, y: x * y, t, dense(4, 5))
    check(lambda x, y: x * y, dense(5), t)
    check(lambda x, y: x * y, h, dense(5, 3))
    check(lambda x, y: (x * y).to_dense(), dense(2, 4, 5), t)
    check(lambda x, y: x.sparse_mask(y), dense(4, 5), coo(4, 5, coalesced=True))
    with pytest.raises(RuntimeError, match="Use add\\(dense, sparse\\)"):
        t.to("tpu") + dense(4, 5).to("tpu")


def test_shapes_and_reductions():
    t, h = coo(4, 5, coalesced=True), coo(4, 5, 3, sparse_dim=2)
    for function in (
        lambda x: x.t(),
        lambda x: x.unsqueeze(0),
        lambda x: x.narrow_copy(1, 1, 3),
        lambda x: x[1],
        lambda x: x.index_select(0, torch.tensor([3, 0, 0], device=x.device)),
        lambda x: x.index_select(1, torch.tensor([-1, 0, 2], device=x.device) % 5).coalesce(),
        lambda x: torch.cat([x, x], 1),
        lambda x: torch.stack([x, x]),
        lambda x: x.norm(),
        lambda x: x.sum(),
        lambda x: torch.sparse.sum(x, 0),
        lambda x: torch.sparse.softmax(x, 1),
        lambda x: torch.sparse.log_softmax(x, 0),
    ):
        check(function, t)
    check(lambda x: torch.sparse.sum(x, [0, 2]), h)
    check(lambda x: x.permute(1, 0, 2), h)
    check(lambda x: torch.sparse.softmax(x, 2), h)


def test_products():
    t, b = coo(4, 5), dense(5, 3)
    for function in (torch.mm, torch.sparse.mm, torch.matmul, torch.hspmm):
        check(lambda x, y, f=function: f(x, y).to_dense(), t, b)
    check(torch.mv, t, dense(5))
    check(torch.bmm, coo(2, 4, 5), dense(2, 5, 3))
    check(partial(torch.addmm, beta=2, alpha=3), dense(4, 3), t, b)
    check(torch.sparse.mm, t, coo(5, 3))
    check(torch.sspaddmm, coo(4, 3), t, b)
    check(torch.mm, csr(4, 5), b)
    check(lambda x, y: x @ y, dense(3, 4), csr(4, 5))
    check(lambda x, y: x @ y, dense(3, 4), t)
    check(lambda x, y: torch.mm(x, y).to_dense(), csr(4, 5), csr(4, 5).t())
    check(lambda x, y: torch.mv(x, y), csr(4, 5), dense(5))


def test_products_accumulate_low_precision_in_float32():
    x, y = torch.ones(1, 600).bfloat16(), torch.ones(600, 1).bfloat16()
    assert torch.mm(x.to_sparse().to("tpu"), y.to("tpu")).item() == 600


def leaf(t: torch.Tensor) -> torch.Tensor:
    return t.requires_grad_()


def test_gradients():
    a = partial(coo, 4, 5, coalesced=True)
    check(torch.sparse.mm, leaf(a()), leaf(dense(5, 3)))
    check(torch.sparse.addmm, leaf(dense(4, 3)), leaf(a()), leaf(dense(5, 3)))
    check(lambda x, y: torch.sparse.mm(x, y).to_dense(), leaf(a()), leaf(coo(5, 3, coalesced=True)))
    check(torch.bmm, leaf(coo(2, 4, 5, coalesced=True)), leaf(dense(2, 5, 3)))
    check(lambda x, y: (x * y).to_dense(), leaf(a()), leaf(a()))
    check(lambda x: torch.sparse.sum(x, 0).to_dense(), leaf(a()))
    check(lambda x: torch.sparse.softmax(x, 1).to_dense(), leaf(a()))
    check(lambda x: torch.sparse.log_softmax(x, 2).to_dense(), leaf(coo(4, 5, 3, sparse_dim=2, coalesced=True)))
    check(lambda x: x.to_sparse().coalesce().values(), leaf(dense(4, 5)))
    check(lambda x, y: x.sparse_mask(y).to_dense(), leaf(dense(4, 5)), a())
    check(lambda x: x.coalesce().to_dense(), leaf(coo(4, 5)))


@pytest.mark.parametrize("reduce", ["sum", "mean", "amax", "amin"])
def test_csr_products_with_gradients(reduce):
    check(lambda x, y: torch.sparse.mm(x, y, reduce), leaf(csr(4, 5)), leaf(dense(5, 3)))


def test_sampled_product():
    function = partial(torch.sparse.sampled_addmm, alpha=2, beta=3)
    check(lambda *x: function(*x).to_dense(), leaf(csr(4, 5)), leaf(dense(4, 7)), leaf(dense(7, 5)))


OPTIMIZERS = {
    "SparseAdam": lambda p: torch.optim.SparseAdam(list(p), lr=0.1),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("bag", [False, True])
def test_embedding_training(optimizer, bag):
    def train(device: str) -> tuple[list[float], torch.Tensor]:
        torch.manual_seed(0)
        kind = torch.nn.EmbeddingBag if bag else torch.nn.Embedding
        model = kind(10, 4, padding_idx=2, sparse=True).to(device)
        steps = OPTIMIZERS[optimizer](model.parameters())
        losses = []
        for k in range(3):
            rows = torch.tensor([[1, 2, 1, 4], [0, 9, 9, 9], [3, 1, 2, 2]])[k].to(device)
            steps.zero_grad()
            loss = (model(rows.reshape(2, 2)) ** 2).sum()
            loss.backward()
            assert model.weight.grad.layout is torch.sparse_coo
            steps.step()
            losses.append(loss.item())
        return losses, model.weight.detach().cpu()

    before = fallback_count()
    assert_close(train("tpu"), train("cpu"))
    assert fallback_count() == before


def test_values_alias():
    t = coo(4, 5, coalesced=True).to("tpu")
    t.values().mul_(0)
    assert t.sum().item() == 0
    made = torch.sparse_coo_tensor(torch.tensor([[0], [1]], device="tpu"), torch.ones(1, device="tpu"), (2, 2))
    made._values().add_(4)
    assert made.to_dense()[0, 1].item() == 5
    kept = made.clone()
    made._values().zero_()
    assert kept._values().item() == 5


def test_devices():
    x = dense(4, 5).relu()
    t = x.to("tpu:1").to_sparse()
    for made in (t, x.to_sparse().to("tpu:1"), t.clone(), t + t, t * t, t.sin(), t.to_sparse_csr()):
        assert made.device == torch.device("tpu:1") and made.values().device == made.device
    assert torch.empty(2, 2, layout=torch.sparse_coo, device="tpu:1").device.index == 1
    assert_close(t.to("tpu:0").cpu(), x.to_sparse())
    with pytest.raises(RuntimeError, match="same device"):
        t + t.to("tpu:0")
    with pytest.raises(RuntimeError, match="same device"):
        t @ dense(5, 3)


def test_writing():
    check(lambda x, y: x.clone().copy_(y), coo(4, 5), coo(4, 5, nnz=3))
    check(lambda x: x.clone().zero_(), coo(4, 5))
    check(lambda x: x.clone().mul_(2), coo(4, 5))
    empty = partial(torch.empty, 1, 1, layout=torch.sparse_coo)
    check(lambda x, y: torch.add(x, y, out=empty(device=x.device)).coalesce(), coo(4, 5), coo(4, 5))
    check(lambda x: torch.sin(x, out=empty(device=x.device)), coo(4, 5))


@pytest.mark.parametrize("make", [partial(coo, 4, 5, coalesced=True), partial(csr, 4, 5)])
def test_printing_and_saving(make):
    t = make()
    on_device = t.to("tpu")
    assert repr(on_device).replace("device='tpu:0', ", "").split() == repr(t).split()
    file = io.BytesIO()
    torch.save(on_device, file)
    for back in (
        torch.load(io.BytesIO(file.getvalue())),
        torch.load(io.BytesIO(file.getvalue()), map_location="cpu").to("tpu"),
        pickle.loads(pickle.dumps(on_device)),
    ):
        assert back.device.type == "tpu" and back.layout is t.layout
        assert_close(back.cpu(), t)
        assert_close(back, on_device)
        assert torch.equal(back.values(), on_device.values())


@pytest.mark.parametrize(
    "function",
    [
        lambda d: torch.sparse_coo_tensor(
            torch.tensor([[0, 5]], device=d), torch.ones(2, device=d), (2,), check_invariants=True
        ),
        lambda d: torch.sparse_coo_tensor(torch.tensor([[0, -1]], device=d), torch.ones(2, device=d)),
        lambda d: torch.sparse_coo_tensor(torch.tensor([[0, 1]], device=d), torch.ones(3, device=d)),
        lambda d: coo(4, 5).to(d).values(),
        lambda d: coo(4, 5).to(d).sin_(),
        lambda d: coo(4, 5).to(d).cos(),
        lambda d: coo(4, 5).to(d).reshape(5, 4),
        lambda d: coo(4, 5).to(d) + coo(5, 4).to(d),
        lambda d: coo(4, 5).to(d) * coo(5, 4).to(d),
        lambda d: coo(4, 5).to(d) @ dense(4, 5).to(d),
        lambda d: coo(4, 5).to(d).index_select(0, torch.tensor([9], device=d)),
        lambda d: coo(4, 5, dtype=torch.int64).to(d).mul_(coo(4, 5).to(d)),
        lambda d: dense(4, 5).to(d).sparse_mask(coo(5, 4).to(d)),
        lambda d: csr(4, 5).to(d) @ dense(4, 5).to(d),
        lambda d: csr(4, 5).to(d) / 2,
    ],
)
def test_errors(function):
    with pytest.raises(Exception) as expected:
        function("cpu")
    with pytest.raises(type(expected.value)):
        function("tpu")


def test_fallback():
    """Operators without a kernel run on the CPU, count, and return tensors of the device."""
    reset_fallbacks()
    with pytest.warns(UserWarning, match="runs on the CPU"):
        result = csr(4, 6).to("tpu").to_sparse_bsr((2, 2))
    assert torch.tpu.fallbacks() == {"aten._to_sparse_bsr.default": 1} and result.device.type == "tpu"
    assert_close(result.cpu(), csr(4, 6).to_sparse_bsr((2, 2)))
