"""What a model's source offers: the module without its weights or with random ones, inputs, and what is known of it."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

__all__ = [
    "KINDS",
    "ModelError",
    "ModelSource",
    "Published",
    "Units",
    "check_kind",
    "construction",
    "count_parameters",
    "find_loss",
    "repeated_layers",
]

KINDS = ("train", "infer", "decode")
"""What a model is run for: a training step's forward, a forward over whole sequences, one token with a full cache."""


class ModelError(Exception):
    """A model cannot be found, built or fed; the message is one line that says what to do.

    Attributes:
        traceback: where the user's own code raised, as text; empty when no code of theirs ran.
    """

    def __init__(self, message: str, traceback: str = "") -> None:
        super().__init__(message)
        self.traceback = traceback


@dataclass(frozen=True)
class Published:
    """The number of parameters that a model's publisher states.

    Attributes:
        parameters: the number.
        exact: False when the publisher rounds it, as in "110M".
        source: where it is stated.
        as_buffers: how many of them the model's class keeps as buffers.
    """

    parameters: int
    exact: bool
    source: str
    as_buffers: int = 0


@dataclass(frozen=True)
class Units:
    """What a step is fed: ``count`` "tokens", "images" or "samples", in a batch of ``batch``."""

    count: int
    name: str
    batch: int


class ModelSource(abc.ABC):
    """A model that can be built and fed.

    Attributes:
        name: as the user gave it.
        published: the publisher's parameter count, where known.
    """

    name: str
    published: Published | None = None

    @property
    def published_parameters(self) -> int | None:
        """The publisher's parameter count; ``published`` says whether it is rounded, and where it is from."""
        return self.published.parameters if self.published else None

    @abc.abstractmethod
    def build(
        self, device: str | torch.device = "meta", dtype: torch.dtype | None = None, seed: int = 0
    ) -> torch.nn.Module:
        """The model, newly built.

        Args:
            device: ``"meta"``: no memory, every parameter and buffer is a meta tensor, those that are not saved (such
                as a rotary embedding's frequencies) too, since a forward on meta tensors reads no values and may not
                mix devices. Anything else: built on the CPU with random weights, then moved.
            dtype: of the parameters; what the model's class keeps in float32 stays so. By default the model's own.
            seed: of the random weights. The global generator is left as it was.

        Raises:
            ModelError: it cannot be built.
        """

    @abc.abstractmethod
    def example_inputs(
        self,
        kind: str,
        batch: int,
        seq: int,
        device: str | torch.device = "cpu",
        dtype: torch.dtype | None = None,
    ) -> dict[str, Any]:
        """Arguments of the model's ``forward`` by name, the same at every call.

        Args:
            kind: ``"train"``, with labels where the model takes them; ``"infer"``; ``"decode"``: one token each, and a
                static cache of ``seq`` positions that is full but for the last.
            batch: how many samples.
            seq: tokens in each; models of images have a fixed number.
            device: where the tensors are; ``"meta"`` for none of their memory.
            dtype: of tensors that are not integers, caches included: the model's. By default float32, and what a
                factory's inputs have as they are.

        Raises:
            ModelError: the model has no such step, or it is not known what it takes.
        """

    @abc.abstractmethod
    def units(self, kind: str, batch: int, seq: int) -> Units:
        """What a batch of ``example_inputs`` holds; for throughput."""

    def loss(self, outputs: Any) -> torch.Tensor:
        """The loss in what ``forward`` returned for inputs of kind ``"train"``.

        Raises:
            ModelError: there is none.
        """
        found = find_loss(outputs)
        if found is None:
            raise ModelError(f"{self.name} returns no loss: return a scalar, or an output with a `loss`")
        return found

    def layers(self, model: torch.nn.Module) -> list[str]:
        """Dotted names of the lists of repeated layers; see ``repeated_layers``."""
        return repeated_layers(model)

    def tiny(self) -> ModelSource:
        """The same structure with small dimensions, for running on a CPU; the source itself if it cannot be reduced."""
        return self


def check_kind(kind: str) -> None:
    """Raise unless this is one of ``KINDS``.

    Raises:
        ValueError: it is not.
    """
    if kind not in KINDS:
        raise ValueError(f"a model is run for one of {', '.join(KINDS)}: got {kind!r}")


@contextlib.contextmanager
def construction(device: str | torch.device, dtype: torch.dtype | None, seed: int) -> Iterator[None]:
    """Where new modules are made: on meta or on the CPU, with a default dtype and a seed, all put back afterwards."""
    place = "meta" if torch.device(device).type == "meta" else "cpu"
    before = torch.get_default_dtype()
    with torch.random.fork_rng(devices=[]), torch.device(place):
        torch.default_generator.manual_seed(seed)
        try:
            if dtype is not None:
                torch.set_default_dtype(dtype)
            yield
        finally:
            torch.set_default_dtype(before)


def repeated_layers(model: torch.nn.Module) -> list[str]:
    """Dotted names of the outermost ``ModuleList``s and ``Sequential``s of at least two modules of one class.

    Lists of layers without parameters are left out.
    """
    found: list[str] = []
    for name, module in model.named_modules():
        if not isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential)) or len(module) < 2:
            continue
        alike = len({type(child) for child in module}) == 1
        if alike and any(True for _ in module.parameters()) and not any(name.startswith(f"{x}.") for x in found):
            found.append(name)
    return found


def count_parameters(model: torch.nn.Module) -> int:
    """How many parameters a model has; one that is used in two places counts once."""
    return sum(p.numel() for p in model.parameters())


def find_loss(outputs: Any) -> torch.Tensor | None:
    """A scalar tensor, or the one called ``loss`` in an output or a mapping, or a tuple's first; else None."""
    if isinstance(outputs, Mapping):
        candidate = outputs.get("loss")
    elif isinstance(outputs, (tuple, list)):
        candidate = outputs[0] if outputs else None
    else:
        candidate = getattr(outputs, "loss", outputs)
    if isinstance(candidate, torch.Tensor) and candidate.numel() == 1 and candidate.is_floating_point():
        return candidate.reshape(())
    return None
