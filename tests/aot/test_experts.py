"""Mixtures of experts on a mesh: what travels comes back right, what is dropped adds nothing, gradients are exact."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import Mesh
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from torchtpu.aot import experts
from torchtpu.aot.layout import Layout
from torchtpu.integrations import experts as integration
from torchtpu.sharding import Plan

TOKENS, WIDTH, EXPERTS, CHOSEN = 32, 8, 4, 2


@pytest.fixture(scope="module")
def module() -> torch.nn.Module:
    """The experts of one layer."""
    config = Qwen3MoeConfig(
        hidden_size=WIDTH, intermediate_size=16, moe_intermediate_size=16, num_experts=EXPERTS, num_hidden_layers=1,
        num_experts_per_tok=CHOSEN, num_attention_heads=2, num_key_value_heads=2, vocab_size=8,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config)
    assert integration.use(model)
    found: torch.nn.Module = model.model.layers[0].mlp.experts
    generator = torch.Generator().manual_seed(0)
    for p in found.parameters():
        p.data.normal_(generator=generator)
    return found


def layout(devices: int, capacity: float | None) -> Layout:
    plan = Plan({"ep": devices}, batch=("ep",), experts="ep" if devices > 1 else None, capacity=capacity)
    return Layout(plan, Mesh(np.array(jax.devices("cpu")[:devices]), ("ep",)), "cpu")


def routed(kind: str) -> np.ndarray[Any, Any]:
    """(tokens, chosen) numbers of experts, in a token all different."""
    rng = np.random.default_rng(1)
    if kind == "balanced":
        return (np.arange(TOKENS)[:, None] + np.arange(CHOSEN)[None, :] * 2) % EXPERTS
    if kind == "first":  # all to the first device
        return np.stack([rng.permutation(EXPERTS // 2)[:CHOSEN] for _ in range(TOKENS)])
    return np.stack([rng.permutation(EXPERTS)[:CHOSEN] for _ in range(TOKENS)])


def numbers() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    rng = np.random.default_rng(2)
    hidden = rng.standard_normal((TOKENS, WIDTH)).astype(np.float32)
    return hidden, rng.random((TOKENS, CHOSEN)).astype(np.float32)


def run(
    module: torch.nn.Module, where: Layout, index: Any, hidden: Any, weights: Any, *parameters: jax.Array
) -> jax.Array:
    given = parameters or tuple(jnp.asarray(p.detach().numpy()) for p in module.parameters())
    body = module.__dict__["_experts_body"]
    node: Any = None  # what the operator is called with does not depend on it
    function = jax.jit(lambda h, w, *p: experts.experts_on_mesh(where, node, h, jnp.asarray(index), w, p, body))
    made: jax.Array = function(hidden, weights, *given)
    return made


def contributions(module: Any, hidden: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """(tokens, chosen, width): what each of a token's experts makes of it, one expert and one token at a time."""
    rows = []
    for x, chosen in zip(hidden, index.tolist(), strict=True):
        for e in chosen:
            gate, up = (module.gate_up_proj[e] @ x).chunk(2)
            rows.append(module.down_proj[e] @ (torch.nn.functional.silu(gate) * up))
    return torch.stack(rows).view(*index.shape, -1)


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("kind", ["random", "first"])
def test_nothing_is_dropped_without_a_capacity(module: torch.nn.Module, devices: int, kind: str) -> None:
    """Results and gradients are PyTorch's of a plain loop."""
    hidden, weights = numbers()
    index = routed(kind)
    where = layout(devices, None)
    ours = tuple(jnp.asarray(p.detach().numpy()) for p in module.parameters())
    value, pullback = jax.vjp(lambda h, w, *p: run(module, where, index, h, w, *p), hidden, weights, *ours)
    h, w = torch.tensor(hidden, requires_grad=True), torch.tensor(weights, requires_grad=True)
    expected = (contributions(module, h, torch.tensor(index)) * w[..., None]).sum(1)
    np.testing.assert_allclose(value, expected.detach().numpy(), rtol=1e-4, atol=1e-4)
    g = torch.tensor(np.random.default_rng(3).standard_normal(value.shape).astype(np.float32))
    wanted = torch.autograd.grad(expected, [h, w, *module.parameters()], g)
    for actual, right in zip(pullback(jnp.asarray(g.numpy())), wanted, strict=True):
        np.testing.assert_allclose(actual, right.numpy(), rtol=1e-4, atol=1e-4 * float(right.abs().max()))


@pytest.mark.parametrize(("kind", "dropped"), [("balanced", 0), ("first", TOKENS * CHOSEN // 2)])
def test_what_is_over_the_capacity_is_dropped(module: torch.nn.Module, kind: str, dropped: int) -> None:
    """Each token has the sum of some of its experts' results, and of no other token's."""
    hidden, weights = numbers()
    index = routed(kind)
    made = np.asarray(run(module, layout(2, 1.0), index, hidden, weights))
    parts = contributions(module, torch.tensor(hidden), torch.tensor(index)).detach().numpy() * weights[..., None]
    missing = 0
    for row, of_token in zip(made, parts, strict=True):
        errors = {
            kept: np.abs(row - sum((of_token[i] for i in kept), np.zeros(WIDTH))).max()
            for n in range(CHOSEN + 1)
            for kept in itertools.combinations(range(CHOSEN), n)
        }
        best = min(errors, key=lambda kept: errors[kept])
        assert errors[best] < 1e-4 * np.abs(parts).max()
        missing += CHOSEN - len(best)
    assert missing == dropped


@pytest.mark.parametrize("kind", ["random", "first"])
def test_gradients_are_those_of_plain_gathers(
    module: torch.nn.Module, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With dropped tokens too: the functions that move tokens have gradients of their own, JAX's are the reference."""
    hidden, weights = numbers()
    index = routed(kind)
    where = layout(2, 1.0)
    ours = tuple(jnp.asarray(p.detach().numpy()) for p in module.parameters())
    seed = np.random.default_rng(3).standard_normal((TOKENS, WIDTH)).astype(np.float32)

    def gradients() -> Any:
        total = lambda h, w, *p: jnp.sum(run(module, where, index, h, w, *p) * seed)  # noqa: E731
        return jax.grad(total, argnums=tuple(range(2 + len(ours))))(hidden, weights, *ours)

    own = gradients()
    for name in ("_permute", "_dispatch", "_combine"):
        monkeypatch.setattr(experts, name, getattr(experts, name).__wrapped__)
    for actual, right in zip(own, gradients(), strict=True):
        assert np.abs(right).max() > 0
        np.testing.assert_allclose(actual, right, rtol=1e-4, atol=1e-4 * float(np.abs(right).max()))


def test_slots() -> None:
    """Each part has its own slots, taken in order; what has none is numbered past them all."""
    to = jnp.array([1, 0, 1, 1, 0, 1])
    slots, source = experts._bucketed(to, 2, 3)
    assert slots.tolist() == [3, 0, 4, 5, 1, 6]
    assert source.tolist() == [1, 4, 6, 0, 2, 3]
    place, order = experts._sorted(to, 6)
    assert order.tolist() == [1, 4, 0, 2, 3, 5] and place.tolist() == [2, 0, 3, 4, 1, 5]
