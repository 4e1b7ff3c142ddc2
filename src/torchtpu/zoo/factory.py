"""A model made by a function of the user's: ``module:factory``."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.util
import inspect
import os
import pkgutil
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchtpu.zoo.source import ModelError, ModelSource, Units, check_kind, construction

__all__ = ["FactorySource"]


class FactorySource(ModelSource):
    """A model made by ``module:factory``.

    The factory takes no arguments and returns a module, or a module and its example inputs: a mapping, or a tuple of
    positional arguments. Inputs may also come from a function or method ``example_inputs(batch, seq)``, of the Python
    module or of the ``nn.Module``; with a parameter ``kind`` it is told what for. Inputs that the factory returns have
    the batch that it gave them.

    Raises:
        ModelError: the module or the factory cannot be found, or importing it raises.
    """

    def __init__(self, text: str) -> None:
        self.name = text
        path, _, attribute = text.partition(":")
        if not path or not attribute:
            raise ModelError(f"a factory is written module:factory, such as my_package.models:small; got {text!r}")
        self._module = _import(path)
        self._factory = _attribute(self._module, attribute)
        if not callable(self._factory):
            raise ModelError(
                f"{text} is {_kind(self._factory)}, not a function that returns a model: write one around it"
            )

    def build(
        self, device: str | torch.device = "meta", dtype: torch.dtype | None = None, seed: int = 0
    ) -> torch.nn.Module:
        return self._make(device, dtype, seed)[0]

    def example_inputs(
        self,
        kind: str,
        batch: int,
        seq: int,
        device: str | torch.device = "cpu",
        dtype: torch.dtype | None = None,
    ) -> dict[str, Any]:
        check_kind(kind)
        offered = getattr(self._module, "example_inputs", None)
        if offered is None:
            model, inputs = self._make(device, None, 0)
            offered = getattr(model, "example_inputs", None)
        else:
            model, inputs = self.build("meta"), None
        if inputs is None and offered is None:
            raise ModelError(
                f"{self.name} gives no inputs: return (model, inputs) from it, or write example_inputs(batch, seq) "
                f"beside it in {self._module.__name__}"
            )
        if inputs is None:
            assert offered is not None
            takes_kind = "kind" in inspect.signature(offered).parameters
            if kind == "decode" and not takes_kind:
                raise self._no_decode()
            with construction(device, None, 0):
                more = {"kind": kind} if takes_kind else {}
                inputs = self._call(offered, f"example_inputs of {self.name}", batch=batch, seq=seq, **more)
        elif kind == "decode":
            raise self._no_decode()
        named = self._by_name(model, inputs)
        return pytree.tree_map_only(
            torch.Tensor, lambda x: x.to(device, dtype if x.is_floating_point() else None), named
        )

    def units(self, kind: str, batch: int, seq: int) -> Units:
        inputs = self.example_inputs(kind, batch, seq, "meta")
        tokens = inputs.get("input_ids")
        if isinstance(tokens, torch.Tensor):
            return Units(tokens.numel(), "tokens", tokens.shape[0])
        tensors = [x for x in pytree.tree_leaves(inputs) if isinstance(x, torch.Tensor) and x.dim()]
        samples = tensors[0].shape[0] if tensors else batch
        return Units(samples, "samples", samples)

    def _no_decode(self) -> ModelError:
        return ModelError(
            f"{self.name} has no decode step that is known: write example_inputs(batch, seq, kind) beside the factory"
        )

    def _make(self, device: str | torch.device, dtype: torch.dtype | None, seed: int) -> tuple[torch.nn.Module, Any]:
        """The model, and the inputs that its factory returned with it or None."""
        with construction(device, None, seed):
            made = self._call(self._factory, self.name + _without_memory(device))
        model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
        if not isinstance(model, torch.nn.Module):
            raise ModelError(f"{self.name} returned {_kind(made)}: it must return an nn.Module, or (nn.Module, inputs)")
        # A factory may have chosen a device itself, or loaded weights.
        return model.to(device=device, dtype=dtype), inputs

    def _call(self, function: Callable[..., Any], what: str, **arguments: Any) -> Any:
        """Call the user's code; what it raises becomes a ModelError that holds their traceback."""
        try:
            return function(**arguments)
        except Exception as error:
            raise ModelError(f"{what} raised {type(error).__name__}", _their_traceback(error)) from error

    def _by_name(self, model: torch.nn.Module, inputs: Any) -> dict[str, Any]:
        if isinstance(inputs, Mapping):
            return dict(inputs)
        arguments = tuple(inputs) if isinstance(inputs, Sequence) else (inputs,)
        try:
            bound = inspect.signature(model.forward).bind(*arguments)
        except TypeError as error:
            raise ModelError(f"the inputs of {self.name} do not fit its forward: {error}") from None
        for name, value in bound.signature.parameters.items():
            if value.kind is value.VAR_POSITIONAL and name in bound.arguments:
                raise ModelError(f"forward of {self.name} takes *{name}, and its inputs must have names: use a mapping")
        return dict(bound.arguments)


def _without_memory(device: str | torch.device) -> str:
    return (
        " (called with tensors on the meta device, which have no values)" if torch.device(device).type == "meta" else ""
    )


def _import(path: str) -> ModuleType:
    """Import a module by its dotted name, from the current folder too."""
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    importlib.invalidate_caches()
    try:
        return importlib.import_module(path)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name and (path + ".").startswith(error.name + "."):
            raise ModelError(_no_module(path, error.name)) from None
        raise ModelError(f"importing {path} raised {type(error).__name__}", _their_traceback(error)) from error


def _no_module(path: str, missing: str) -> str:
    parent = missing.rpartition(".")[0]
    folders: Sequence[str] = [os.getcwd()]
    if parent:
        spec = None
        with contextlib.suppress(ImportError, ValueError):
            spec = importlib.util.find_spec(parent)
        if spec is None or spec.submodule_search_locations is None:
            return f"there is no module {path!r}: {parent} is not a package"
        folders = list(spec.submodule_search_locations)
    found = sorted(info.name for info in pkgutil.iter_modules(list(folders)))
    where = parent or f"the current folder ({Path(folders[0]).name})"
    return f"there is no module {missing!r}; {where} has {_list(found, missing.rpartition('.')[2])}"


def _attribute(module: ModuleType, dotted: str) -> Any:
    value: Any = module
    for part in dotted.split("."):
        if not hasattr(value, part):
            own = [
                name
                for name, x in vars(value).items()
                if not name.startswith("_") and callable(x) and getattr(x, "__module__", None) == module.__name__
            ]
            raise ModelError(f"{module.__name__} has no {dotted!r}; it has {_list(sorted(own), part)}")
        value = getattr(value, part)
    return value


def _list(found: list[str], wanted: str) -> str:
    """Names, the closest first, a dozen at most."""
    close = difflib.get_close_matches(wanted, found, n=3)
    ordered = [*close, *(name for name in found if name not in close)]
    more = f" and {len(ordered) - 12} more" if len(ordered) > 12 else ""
    return ", ".join(ordered[:12]) + more if ordered else "nothing to choose from"


def _their_traceback(error: BaseException) -> str:
    """The traceback from the user's first frame on."""
    frames = error.__traceback__
    ours = (
        str(Path(__file__)),
        importlib.__file__,
        "<frozen importlib._bootstrap>",
        "<frozen importlib._bootstrap_external>",
    )
    while frames is not None and frames.tb_next is not None and frames.tb_frame.f_code.co_filename in ours:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))


def _kind(value: Any) -> str:
    return f"a tuple of {len(value)}" if isinstance(value, tuple) else f"an object of type {type(value).__name__}"
