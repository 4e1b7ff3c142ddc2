"""Models of Diffusers, an optional package, built from a configuration alone."""

from __future__ import annotations

from typing import Any

import torch

from torchtpu.zoo.shrink import shrink
from torchtpu.zoo.source import ModelError, ModelSource, Published, Units, check_kind, construction

__all__ = ["DiffusersSource"]

_TEXT_TOKENS = 512
"""What the FLUX.1 pipeline pads a prompt to, at most (``max_sequence_length``)."""


class DiffusersSource(ModelSource):
    """A model of Diffusers' own classes; inputs are known for ``FluxTransformer2DModel``.

    Args:
        name: as the user gave it.
        config: what a ``config.json`` holds. ``_class_name`` decides the class.
        published: the publisher's parameter count.
        tiny: fields that ``tiny`` sets beside those it knows.

    Raises:
        ModelError: Diffusers is missing, or does not have the class.
    """

    def __init__(
        self, name: str, config: dict[str, Any], published: Published | None = None, tiny: dict[str, Any] | None = None
    ) -> None:
        try:
            import diffusers
        except ImportError as error:
            reason = "is not installed" if error.name == "diffusers" else f"cannot be imported ({error})"
            raise ModelError(f"{name} is a model of Diffusers, which {reason}: pip install diffusers pillow") from None
        self.name, self.config, self.published, self._tiny = name, config, published, tiny
        wanted = config["_class_name"]
        self.model_class: Any = getattr(diffusers, wanted, None)
        if self.model_class is None or not issubclass(self.model_class, torch.nn.Module):
            raise ModelError(f"{name}: Diffusers {diffusers.__version__} has no model {wanted!r}")

    def build(
        self, device: str | torch.device = "meta", dtype: torch.dtype | None = None, seed: int = 0
    ) -> torch.nn.Module:
        try:
            with construction(device, dtype, seed):
                model = self.model_class.from_config(dict(self.config))
        except Exception as error:
            line = f"{type(error).__name__}: {error}".splitlines()[0]
            raise ModelError(f"{self.name}: {self.model_class.__name__} cannot be built: {line}") from error
        return model.to(device)

    def example_inputs(
        self,
        kind: str,
        batch: int,
        seq: int,
        device: str | torch.device = "cpu",
        dtype: torch.dtype | None = None,
    ) -> dict[str, Any]:
        """Latents of ``seq`` image tokens and a prompt of up to 512; 4096 image tokens are 1024 x 1024 pixels."""
        check_kind(kind)
        if kind == "decode":
            raise ModelError(f"{self.name} has no decode: a diffusion model generates no tokens")
        if self.model_class.__name__ != "FluxTransformer2DModel":
            raise ModelError(
                f"{self.name}: it is not known what {self.model_class.__name__} takes: write a factory that returns "
                "(model, inputs), and pass module:factory"
            )
        config, text = self.config, min(_TEXT_TOKENS, seq)
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> torch.Tensor:
            if torch.device(device).type == "meta":
                return torch.empty(shape, dtype=dtype, device="meta")
            return torch.randn(shape, generator=generator).to(device, dtype)

        made = {
            "hidden_states": normal(batch, seq, config["in_channels"]),
            "encoder_hidden_states": normal(batch, text, config["joint_attention_dim"]),
            "pooled_projections": normal(batch, config["pooled_projection_dim"]),
            "timestep": torch.full((batch,), 0.5, dtype=dtype, device=device),
            "img_ids": _positions(seq, device),
            "txt_ids": torch.zeros((text, 3), device=device),
        }
        if config.get("guidance_embeds"):
            made["guidance"] = torch.full((batch,), 3.5, dtype=dtype, device=device)
        return made

    def units(self, kind: str, batch: int, seq: int) -> Units:
        check_kind(kind)
        return Units(batch, "images", batch)

    def loss(self, outputs: Any) -> torch.Tensor:
        """The mean square of the predicted velocity: flow matching's loss for a target of zeros."""
        return outputs.sample.float().square().mean()

    def tiny(self) -> DiffusersSource:
        return DiffusersSource(f"{self.name} (tiny)", shrink(self.config, self._tiny))


def _positions(tokens: int, device: str | torch.device) -> torch.Tensor:
    """Rows and columns of image tokens, nearly square: shape (tokens, 3)."""
    width = max(1, int(tokens**0.5))
    index = torch.arange(tokens, device=device)
    return torch.stack([torch.zeros_like(index), index // width, index % width], dim=1).float()
