"""Blocks that repeat are compiled once: the same results, and a compile that does not grow with depth."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.extend.core import jaxpr_as_fun
from torch import nn
from torch.testing import assert_close

import torchtpu  # noqa: F401
from torchtpu.runtime import repeats
from torchtpu.runtime.pieces import Pieces


@pytest.fixture(autouse=True)
def mode():
    """Whole steps are compiled in this mode only."""
    with torch.tpu.set_eager_mode("fused"):
        yield "fused"


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.query, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        q, k, v = self.query(self.norm(x)).chunk(3, -1)
        x = x + self.out(torch.softmax(q @ k.mT * scale, -1) @ v)
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self, depth: int, width: int = 16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for n, block in enumerate(self.blocks):
            x = block(x, 0.1 + n / 100)  # a number that differs from layer to layer
        return x


def step(model: nn.Module, x: torch.Tensor) -> tuple[float, list[torch.Tensor]]:
    model.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    return loss.item(), [p.grad.cpu().clone() for p in model.parameters()]


@pytest.fixture
def found(monkeypatch):
    """The pieces of every program that is compiled."""
    seen = []
    original = repeats.split

    def split(closed):
        pieces = original(closed)
        seen.append(pieces)
        return pieces

    monkeypatch.setattr(repeats, "split", split)
    return seen


@pytest.mark.parametrize("compiled", [False, True])
def test_layers_are_compiled_once_and_compute_the_same(compiled, found):
    torch.manual_seed(0)
    model, x = Stack(10), torch.randn(4, 6, 16)
    expected_loss, expected = step(model, x)
    model.to("tpu")
    run = torch.compile(model) if compiled else model
    before = torch.tpu.compile_stats()["compiles"]
    for _ in range(2):
        loss, gradients = step(run, x.to("tpu"))
        assert loss == pytest.approx(expected_loss, rel=1e-5)
        assert_close(gradients, expected, rtol=1e-4, atol=1e-5)
    pieces = [p for p in found if p is not None]
    assert pieces
    functions = [len({id(p.function) for p in ps}) for ps in pieces]
    assert all(len(ps) >= 2 * repeats.FEWEST for ps in pieces)
    assert max(functions) <= 6  # before, layer, between, layer backward, after
    assert torch.tpu.compile_stats()["compiles"] - before <= 12


@pytest.mark.parametrize("before", [True, False])
def test_what_belongs_to_a_layer_is_part_of_it(before):
    """Preparing operands before all layers, and results after all of them, makes the parts around them no larger."""

    def layers(x, weights, scale):
        prepared = [w.T * 2 for w in weights]
        made = []
        shift = jnp.arange(4.0) * 3
        for w in prepared:
            y = x @ w
            for f in (jnp.sin, jnp.cos, jnp.tanh, jnp.exp, jnp.square, jnp.arctan, jnp.sinh, jnp.log1p):
                y = f(y) * scale + 0.5
            x = x + y
            made.append(y)
        if not before:
            shift = jnp.arange(4.0) * 5  # what is added to it cannot come earlier
        return x, [(y + shift).T * 0.5 for y in made]

    def pieces(depth):
        weights = [jnp.eye(4) * (1 + n / 10) for n in range(depth)]
        operands = jnp.ones((3, 4)), weights, jnp.float32(0.3)
        closed = jax.make_jaxpr(layers)(*operands)
        found = repeats.split(closed)
        functions = {id(p.function): p.function for p in found}
        compiled = {k: jax.jit(jaxpr_as_fun(f)).lower(*f.in_avals).compile() for k, f in functions.items()}
        runs = [compiled[id(p.function)] for p in found]
        results = Pieces(closed, found, runs, jax.devices("cpu")[0])(*operands)
        for a, b in zip(results, jax.tree.leaves(layers(*operands)), strict=True):
            assert_close(torch.from_numpy(np.array(a)), torch.from_numpy(np.array(b)), rtol=1e-6, atol=1e-6)
        return len(found), sorted(len(f.eqns) for f in functions.values())

    shallow, deep = pieces(9), pieces(18)
    assert deep[0] == shallow[0] + 9
    assert not before or deep[1] == shallow[1]


def test_whole_programs_on_request(found, monkeypatch):
    monkeypatch.setenv("TORCHTPU_REPEATS", "0")
    torch.manual_seed(0)
    model = Stack(9, 8).to("tpu")
    step(model, torch.randn(2, 3, 8).to("tpu"))
    assert not found


def test_dropout_differs_from_layer_to_layer():
    x = torch.ones(64, 64, device="tpu")
    torch.manual_seed(0)
    y = x
    outputs = []
    for _ in range(12):
        y = nn.functional.dropout(y * 1.0 + 0.5, 0.5) * 0.5 + 0.25
        y = torch.sigmoid(y) + torch.tanh(y) * y.mean() - y.amax() * 0.1 + y.std() + y.cumsum(0) * 1e-3
        outputs.append(y)
    kept = [o.cpu() for o in outputs]
    with torch.tpu.set_eager_mode("strict"):
        torch.manual_seed(0)
        y = x
        for k in kept:
            y = nn.functional.dropout(y * 1.0 + 0.5, 0.5) * 0.5 + 0.25
            y = torch.sigmoid(y) + torch.tanh(y) * y.mean() - y.amax() * 0.1 + y.std() + y.cumsum(0) * 1e-3
            assert_close(y.cpu(), k, rtol=1e-4, atol=1e-4)
