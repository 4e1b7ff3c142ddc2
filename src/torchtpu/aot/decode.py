"""A model that makes one token, with its cache among its buffers: the form in which a step of generation is traced."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["PREFIX", "Decoder", "has_cache"]

PREFIX = "decoded."
"""What stands before the names of the model's own parameters."""


def has_cache(arguments: Mapping[str, Any]) -> bool:
    """Whether some argument of ``forward`` is a cache of Transformers."""
    return any(_layers(value) for value in arguments.values())


class Decoder(torch.nn.Module):
    """A model and its cache.

    Attributes:
        caches: the arguments that are caches.

    Args:
        model: whose ``forward`` takes a cache.
        arguments: keyword arguments of its ``forward``, the cache included. Its tensors become buffers of this module,
            named ``cache.LAYER.keys`` and the like.
    """

    def __init__(self, model: torch.nn.Module, arguments: Mapping[str, Any]) -> None:
        super().__init__()
        self.decoded = model
        self.caches = {k: v for k, v in arguments.items() if _layers(v)}
        self._places: list[tuple[Any, str, str]] = []
        for name, cache in self.caches.items():
            for i, layer in enumerate(_layers(cache)):
                for part, value in vars(layer).items():
                    if isinstance(value, torch.Tensor):
                        buffer = f"{name}_{i}_{part}"
                        self.register_buffer(buffer, value)
                        self._places.append((layer, part, buffer))

    def forward(self, **inputs: Any) -> Any:
        """The model's result for the inputs other than the cache, which it writes."""
        for layer, part, buffer in self._places:
            setattr(layer, part, getattr(self, buffer))
        result = self.decoded(**inputs, **self.caches)
        logits = getattr(result, "logits", None)
        return {"logits": logits} if isinstance(logits, torch.Tensor) else result


def _layers(cache: Any) -> list[Any]:
    """The layers of a cache, in both halves of an encoder-decoder's; empty if it is none."""
    halves = [getattr(cache, half, None) for half in ("self_attention_cache", "cross_attention_cache")]
    if any(half is not None for half in halves):
        return [layer for half in halves for layer in _layers(half)]
    layers = getattr(cache, "layers", None)
    return list(layers) if isinstance(layers, list) and hasattr(cache, "update") else []
