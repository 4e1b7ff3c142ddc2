"""Models of Transformers, built from a configuration alone."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from torchtpu.zoo import inputs
from torchtpu.zoo.shrink import shrink
from torchtpu.zoo.source import ModelError, ModelSource, Published, Units, check_kind, construction

__all__ = ["TransformersSource"]

_AUTO = (
    "AutoModelForCausalLM",
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForSeq2SeqLM",
    "AutoModelForMaskedLM",
    "AutoModelForImageClassification",
    "AutoModel",
)
"""Where a configuration that names no architecture is looked up, in this order."""


class TransformersSource(ModelSource):
    """A model of Transformers' own classes.

    Args:
        name: as the user gave it.
        config: what a ``config.json`` holds. ``architectures`` decides the class.
        published: the publisher's parameter count.
        tiny: fields that ``tiny`` sets beside those it knows.

    Raises:
        ModelError: Transformers is missing, or does not know the configuration or the class.
    """

    def __init__(
        self, name: str, config: dict[str, Any], published: Published | None = None, tiny: dict[str, Any] | None = None
    ) -> None:
        self.name = name
        self.published = published
        self._tiny = tiny
        self.config = _make_config(name, config)
        self.model_class = _model_class(name, self.config, config)

    def build(
        self, device: str | torch.device = "meta", dtype: torch.dtype | None = None, seed: int = 0
    ) -> torch.nn.Module:
        dtype = dtype or getattr(self.config, "dtype", None) or torch.float32
        try:
            with construction(device, dtype, seed):
                model = self.model_class(self._fresh_config(dtype))
        except Exception as error:
            raise ModelError(f"{self.name}: {self.model_class.__name__} cannot be built: {_line(error)}") from error
        return model.to(device)

    def example_inputs(
        self,
        kind: str,
        batch: int,
        seq: int,
        device: str | torch.device = "cpu",
        dtype: torch.dtype | None = None,
    ) -> dict[str, Any]:
        check_kind(kind)
        return inputs.make(self, kind, batch, seq, torch.device(device), dtype or torch.float32)

    def units(self, kind: str, batch: int, seq: int) -> Units:
        check_kind(kind)
        return inputs.units(self, kind, batch, seq)

    def tiny(self) -> TransformersSource:
        config = shrink(self.config.to_dict(), self._tiny)
        config["architectures"] = [self.model_class.__name__]
        return TransformersSource(f"{self.name} (tiny)", config)

    def forward_parameters(self) -> set[str]:
        """Names that the class's ``forward`` takes."""
        return set(inspect.signature(self.model_class.forward).parameters)

    def _fresh_config(self, dtype: torch.dtype) -> Any:
        """A copy: building a model writes to its configuration."""
        config = type(self.config).from_dict(self.config.to_dict())
        config.dtype = dtype
        return config


def _make_config(name: str, fields: dict[str, Any]) -> Any:
    try:
        import transformers
    except ImportError:
        raise ModelError(
            f"{name} is a model of Transformers, which is not installed: pip install transformers"
        ) from None
    kind = fields.get("model_type")
    if not isinstance(kind, str):
        raise ModelError(f"{name}: its configuration has no model_type, so Transformers cannot tell what it is")
    known = transformers.CONFIG_MAPPING
    if kind not in known:
        raise ModelError(
            f"{name}: Transformers {transformers.__version__} has no model_type {kind!r}; a newer version may "
            "(pip install -U transformers). Code that comes with a model is not run: write module:factory for it"
        )
    try:
        return known[kind].from_dict(dict(fields))
    except Exception as error:
        raise ModelError(f"{name}: its configuration does not fit {known[kind].__name__}: {_line(error)}") from error


def _model_class(name: str, config: Any, fields: dict[str, Any]) -> Any:
    import transformers

    architectures = fields.get("architectures") or []
    for architecture in architectures:
        found = getattr(transformers, architecture, None)
        if found is not None:
            return found
    if architectures:
        raise ModelError(
            f"{name}: Transformers {transformers.__version__} has no class {architectures[0]!r}; a newer version may. "
            "Code that comes with a model is not run: write module:factory for it"
        )
    for auto in _AUTO:
        mapping = getattr(transformers, auto)._model_mapping
        if type(config) in mapping:
            found = mapping[type(config)]
            return found[0] if isinstance(found, tuple) else found
    raise ModelError(
        f"{name}: its configuration names no architecture, and Transformers has none for {config.model_type}"
    )


def _line(error: BaseException) -> str:
    """The first line of an error that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
