"""Mixtures of experts of Transformers, divided: tokens travel to the devices of their experts and back.

A layer's experts are one operator, forward and backward, which on the mesh is what ``torchtpu check`` compiles
(``torchtpu.aot.experts``): each device sorts its own tokens, and two all-to-alls carry them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import torch

from torchtpu.aot.experts import experts_on_mesh
from torchtpu.aot.layout import Layout
from torchtpu.integrations import experts
from torchtpu.lowering.registry import lowering
from torchtpu.runtime import devices
from torchtpu.spmd.modules import Divided

__all__ = ["use"]

IMPLEMENTATION = "torchtpu_spmd"
"""The name under which Transformers knows it."""

_layouts: list[Layout] = []

_library = torch.library.Library("torchtpu", "FRAGMENT")
_GIVEN = "Tensor hidden, Tensor index, Tensor weights, Tensor[] parameters, str body, int layout"
_library.define(f"divided_experts({_GIVEN}) -> Tensor")
_library.define(f"divided_experts_backward(Tensor gradient, {_GIVEN}) -> (Tensor, Tensor, Tensor[])")


@torch.library.register_fake("torchtpu::divided_experts", lib=_library)
def _fake(hidden: torch.Tensor, index: Any, weights: Any, parameters: Any, body: str, layout: int) -> torch.Tensor:
    return torch.empty_like(hidden, memory_format=torch.contiguous_format)


@torch.library.register_fake("torchtpu::divided_experts_backward", lib=_library)
def _fake_backward(
    gradient: Any, hidden: Any, index: Any, weights: Any, parameters: Any, body: str, layout: int
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    like = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in (hidden, weights, *parameters)]
    return like[0], like[1], like[2:]


@lowering("torchtpu::divided_experts")
def forward(
    hidden: jax.Array,
    index: jax.Array,
    weights: jax.Array,
    parameters: Sequence[jax.Array],
    body: str,
    layout: int,
) -> jax.Array:
    """The sum over each token's experts of their results, weighted: see ``integrations.experts.experts``."""
    return experts_on_mesh(_layouts[layout], None, hidden, index, weights, parameters, body)  # type: ignore[arg-type]


@lowering("torchtpu::divided_experts_backward")
def backward(
    gradient: jax.Array,
    hidden: jax.Array,
    index: jax.Array,
    weights: jax.Array,
    parameters: Sequence[jax.Array],
    body: str,
    layout: int,
) -> tuple[jax.Array, jax.Array, list[jax.Array]]:
    """Gradients of hidden states, weights and parameters; the experts are computed once more."""

    def run(hidden: jax.Array, weights: jax.Array, *parameters: jax.Array) -> jax.Array:
        return forward(hidden, index, weights, parameters, body, layout)

    _, pullback = jax.vjp(run, hidden, weights, *parameters)
    found = pullback(gradient)
    return found[0], found[1], list(found[2:])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    hidden, index, weights, parameters, ctx.body, ctx.layout = inputs
    ctx.save_for_backward(hidden, index, weights, *parameters)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    hidden, index, weights, *parameters = ctx.saved_tensors
    d_hidden, d_weights, d_parameters = torch.ops.torchtpu.divided_experts_backward.default(
        gradient, hidden, index, weights, parameters, ctx.body, ctx.layout
    )
    return d_hidden, None, d_weights, d_parameters, None, None


torch.library.register_autograd("torchtpu::divided_experts", _backward, setup_context=_setup, lib=_library)


def use(model: torch.nn.Module, divided: Divided) -> bool:
    """Let a model's experts be the operator, if it is of Transformers and has some; says whether it is."""
    if not experts.use(model):
        return False
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    if IMPLEMENTATION not in ALL_EXPERTS_FUNCTIONS:
        ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _forward)
    choose: Any = model.set_experts_implementation
    choose(IMPLEMENTATION)
    _layouts.append(Layout(divided.plan, divided.mesh, devices.platform()))
    for module in model.modules():
        if "_experts_body" in module.__dict__:
            module.__dict__["_experts_layout"] = len(_layouts) - 1
    return True


def _forward(
    self: torch.nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    parameters = [getattr(self, name) for name in experts.NAMES if self._parameters.get(name) is not None]
    own = self.__dict__
    return torch.ops.torchtpu.divided_experts.default(
        hidden_states, top_k_index, top_k_weights, parameters, own["_experts_body"], own["_experts_layout"]
    )
