"""Changing sizes under torch.compile: results are those of eager PyTorch CPU at every size, and the number of programs is
bounded by the number of buckets.
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


def check(
    graphs: list[GraphProgram],
    function: Callable[..., Any],
    inputs: Callable[[int], tuple[Any, ...]],
    sizes: tuple[int, ...] = (3, 4, 6, 5, 8),
    programs: int | None = None,
    rtol: float = 2e-4,
    atol: float = 2e-5,
) -> None:
    """Compare a function of tensors at several sizes with the CPU. All graphs must understand their padding, and compile
    once for each bucket.
    """
    compiled = torch.compile(function, backend="tpu", dynamic=True)
    buckets = Buckets()
    for n in sizes:
        given = inputs(n)
        _same(compiled(*_moved(given)), function(*given), rtol=rtol, atol=atol)
    assert [g.exact_because for g in graphs if g.exact_because] == []
    padded = [g for g in graphs if g.padded is not None]
    assert padded, "no graph has a size that changes"
    most = len({buckets(n) for n in sizes}) if programs is None else programs
    assert max(len(g.padded.programs) for g in padded) <= most


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
    "views": lambda x: (x.view(-1), x.t().reshape(-1), x.view(-1, 2, 4).sum(0), x[None].expand(3, -1, -1) + 1),
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
    "order": lambda x: (x.sort(0), x.sort(0, descending=True, stable=True), x.topk(2, 0), x.argsort(0)),
    "turned": lambda x: (x.flip(0), x.roll(1, 0), x.flip(1), x.roll(-2, 1)),
    "repeated": lambda x: (x.repeat(2, 1), x.repeat(1, 3), x.repeat(2, 1).sum(0), x.repeat_interleave(2, 0)),
    "triangles": lambda x: (x @ x.t()).tril() + (x @ x.t()).triu(1) * 2,
    "padded by the user": lambda x: (F.pad(x, (0, 0, 1, 2), value=3.0), F.pad(x, (1, 0)), F.pad(x, (0, 0, 0, 1)).sum(0)),
    "indexed": lambda x: (x[torch.tensor([0, 2, -1])], x[torch.arange(x.shape[0] - 1)], x[:, torch.tensor([1, 0])]),
    "written": lambda x: torch.zeros(3, 8).index_add(0, torch.arange(x.shape[0]) % 3, x),
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
    check(graphs, _on(ONE_DIMENSION[name]), _batch(8))
