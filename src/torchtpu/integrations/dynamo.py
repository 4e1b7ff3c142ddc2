"""``torch.compile`` without a backend: graphs on tpu go to this package's compiler, all others to PyTorch's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

from torchtpu.integrations.imports import when_imported

__all__ = ["default_backend", "install"]

_REGISTRY = "torch._dynamo.backends.registry"


def install() -> None:
    """Make ``default_backend`` the default when Dynamo is imported, unless another default has been chosen."""
    when_imported(_REGISTRY, _set_default)


def _set_default(registry: ModuleType) -> None:
    if registry.get_default_backend() == "inductor":
        registry.set_default_backend(default_backend)


def default_backend(module: torch.fx.GraphModule, inputs: Sequence[Any], **choices: Any) -> Callable[..., Any]:
    """Compile a graph that Dynamo captured.

    Args:
        module: the graph.
        inputs: its inputs, fake tensors and sizes.
        choices: ``mode`` and ``options`` of ``torch.compile``.
    """
    if any(_on_tpu(x) for x in inputs) or any(_makes_tpu_tensors(n) for n in module.graph.nodes):
        from torchtpu.compile import backend

        return backend(module, inputs, **choices)
    mode, options = choices.get("mode"), choices.get("options")
    mode = "default" if mode is None and options is None else mode
    return torch._TorchCompileInductorWrapper(mode, options, None)(module, inputs)


def _on_tpu(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "tpu"


def _makes_tpu_tensors(node: torch.fx.Node) -> bool:
    return _on_tpu(node.meta.get("example_value"))
