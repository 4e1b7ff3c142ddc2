"""Mixtures of experts in Transformers: one operator for a layer's experts, in place of a loop over those that were hit.

Transformers lets a backend name its own implementation (``model.set_experts_implementation("torchtpu")``). Ours is the
operator ``torchtpu::experts``, which keeps the experts whole in a graph, so that a mesh can divide them and send tokens
to them. What an expert does to its tokens is still the model's own code, traced when the operator is lowered.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["IMPLEMENTATION", "body_of", "install", "use"]

IMPLEMENTATION = "torchtpu"
"""The name under which Transformers knows it."""

_modules: dict[str, tuple[str, torch.nn.Module]] = {}
_numbers = itertools.count()
NAMES = ("gate_up_proj", "gate_up_proj_bias", "up_proj", "up_proj_bias", "down_proj", "down_proj_bias")


@torch.library.custom_op("torchtpu::experts", mutates_args=())
def experts(
    hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, parameters: Sequence[torch.Tensor], body: str
) -> torch.Tensor:
    """The sum over each token's experts of their results, weighted.

    Args:
        hidden: (tokens, width).
        index: (tokens, k) numbers of experts.
        weights: (tokens, k).
        parameters: those of the experts, the experts being the first dimension of each.
        body: which module they belong to.
    """
    module = _with(_modules[body][1], parameters)
    expert = index.flatten()
    order = torch.argsort(expert, stable=True)
    token = order // index.shape[1]
    ends = torch.bincount(expert, minlength=len(parameters[0])).cumsum(0).to(torch.int32)
    made = torch.empty(len(order), hidden.shape[1], dtype=hidden.dtype, device=hidden.device)
    made[order] = apply_sorted(module, hidden[token], ends, expert[order])
    return (made.view(*index.shape, -1) * weights.unsqueeze(-1)).sum(1).to(hidden.dtype)


@experts.register_fake
def _(hidden: torch.Tensor, index: Any, weights: Any, parameters: Any, body: str) -> torch.Tensor:
    return torch.empty_like(hidden)


@torch.library.custom_op("torchtpu::grouped_mm", mutates_args=())
def grouped_mm(hidden: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """``torch._grouped_mm`` of rows, for every dtype; its own shape function knows bfloat16 alone."""
    return torch._grouped_mm(hidden, weight.contiguous(), offs=ends)


@grouped_mm.register_fake
def _(hidden: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return hidden.new_empty(len(hidden), weight.shape[-1])


def install() -> None:
    """Register the implementation with Transformers."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    if IMPLEMENTATION not in ALL_EXPERTS_FUNCTIONS:
        ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _forward)


def use(model: torch.nn.Module) -> bool:
    """Let a model's experts be the operator, if it is of Transformers and has some."""
    choose: Any = getattr(model, "set_experts_implementation", None)
    if choose is None:
        return False
    install()
    choose(IMPLEMENTATION)
    for module in model.modules():
        if any(isinstance(module._parameters.get(name), torch.nn.Parameter) for name in NAMES[::2]):
            module.__dict__["_experts_body"] = _name(module)
    return True


def _forward(
    self: torch.nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    parameters = [p for name in NAMES if (p := self._parameters.get(name)) is not None]
    return experts(hidden_states, top_k_index, top_k_weights, parameters, self.__dict__["_experts_body"])


def _name(module: torch.nn.Module) -> str:
    """A name for what modules like this one do: layers of a model share it."""
    plain = {k: v for k, v in vars(module).items() if isinstance(v, int | float | bool | str) and k != "_experts_body"}
    shapes = [(n, tuple(p.shape), p.dtype) for n, p in module.named_parameters(recurse=False)]
    described = repr((type(module).__module__, type(module).__qualname__, plain, shapes))
    for name, (known, _) in _modules.items():
        if known == described:
            return name
    name = f"{type(module).__name__}.{next(_numbers)}"
    _modules[name] = described, module
    return name


def _with(module: torch.nn.Module, parameters: Sequence[torch.Tensor]) -> Any:
    """The module with other parameters, perhaps of fewer experts."""
    own = copy.copy(module)
    own._parameters = {}
    names = [name for name in NAMES if module._parameters.get(name) is not None]
    for name, p in zip(names, parameters, strict=True):
        own.__dict__[name] = p
    own.__dict__["num_experts"] = len(parameters[0])
    return own


def apply_sorted(module: Any, hidden: torch.Tensor, ends: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
    """What experts do to tokens that are sorted by expert.

    Args:
        module: the experts, as Transformers' ``use_experts_implementation`` marks them.
        hidden: (rows, width).
        ends: for each expert where its rows end, int32.
        expert: (rows,) the expert of each.
    """

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        weight = getattr(module, name)
        weight = weight if module.is_transposed else weight.transpose(-2, -1)
        made = grouped_mm(x.to(weight.dtype), weight, ends)
        return made + getattr(module, f"{name}_bias")[expert] if module.has_bias else made

    made = linear(hidden, "gate_up_proj" if module.has_gate else "up_proj")
    made = module._apply_gate(made) if module.has_gate else module.act_fn(made)
    made = linear(made, "down_proj")
    return module.post_expert_norm(made) if module.has_post_expert_norm else made


def body_of(name: str, rows: int, width: int, parameters: Sequence[tuple[Any, Any]], dtype: Any) -> torch.fx.Graph:
    """The graph of ``apply_sorted`` for some sizes: of (hidden, ends, expert, *parameters).

    Args:
        name: what the operator was given.
        rows: tokens.
        width: of the hidden states.
        parameters: (shape, dtype) of each.
        dtype: of the hidden states.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    empty = lambda shape, dtype: torch.empty(shape, dtype=dtype, device="meta")  # noqa: E731
    count = parameters[0][0][0]

    def run(hidden: torch.Tensor, ends: torch.Tensor, expert: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        return apply_sorted(_with(_modules[name][1], weights), hidden, ends, expert)

    given = empty((rows, width), dtype), empty((count,), torch.int32), empty((rows,), torch.int64)
    return make_fx(run)(*given, *(empty(shape, d) for shape, d in parameters)).graph
