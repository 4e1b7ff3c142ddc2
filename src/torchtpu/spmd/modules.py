"""What a divided model does when it is called: its inputs are cut, its parameters gathered for use, its results laid
out as the plan says. All of it by hooks, so that names, classes and ``state_dict`` stay the model's own.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map

from torchtpu import _C
from torchtpu.aot.layout import Layout
from torchtpu.eager.arrays import force, from_host, wrap_array
from torchtpu.eager.arrays import host_array as elements
from torchtpu.eager.hidden import hide_from_dynamo
from torchtpu.runtime import devices, meshes
from torchtpu.sharding import Spec
from torchtpu.spmd.operator import constrain

__all__ = ["attach", "cut"]


def attach(model: torch.nn.Module, layout: Layout) -> list[Any]:
    """Put the hooks on a model; returns their handles."""
    handles: list[Any] = []
    for path, module in model.named_modules():
        handles += _parameters(path, module, layout)
        handles += _results(path, module, layout)
    for module in model.modules():
        if isinstance(module, torch.nn.ModuleList):
            handles += [layer.register_forward_hook(_Hidden(layout)) for layer in module]
        elif isinstance(module, torch.nn.Embedding):
            handles.append(module.register_forward_hook(_Hidden(layout)))
    handles.append(model.register_forward_pre_hook(_Inputs(layout), with_kwargs=True))
    if layout.plan.gathered:
        around = _Gathered()
        handles.append(model.register_forward_pre_hook(around.enter))
        handles.append(model.register_forward_hook(around.leave, always_call=True))
    return handles


def cut(x: torch.Tensor, layout: Layout, spec: Spec) -> torch.Tensor:
    """A tensor divided over the mesh, each device given only its part where the values are at hand."""
    place = meshes.text(layout.mesh, spec)
    if not torch.compiler.is_compiling() and not x.requires_grad:
        made = _cut_now(x, layout, spec)
        if made is not None:
            return made
    return constrain(x if x.device.type == "tpu" else x.to("tpu"), place, place)


def _cut_now(x: torch.Tensor, layout: Layout, spec: Spec) -> torch.Tensor | None:
    where = layout.sharding(spec)
    if x.device.type == "cpu":
        host = elements(x.detach().contiguous())
        return wrap_array(meshes.from_host(host, where), 0, x.dtype)
    if x.device.type != "tpu" or not x.is_contiguous() or x.storage_offset() or x.is_conj() or x.is_neg():
        return None
    value, shape, dtype = _C.get_value(x)
    if not isinstance(value, jax.Array) or tuple(shape) != tuple(x.shape) or dtype is not x.dtype:
        return None
    if meshes.divided(value):
        return x if value.sharding.is_equivalent_to(where, value.ndim) else None
    return wrap_array(jax.device_put(value, where), 0, x.dtype)


hide_from_dynamo(_cut_now)


class _Inputs:
    """Cuts what the model is called with: the batch, and the sequence of tokens."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    def __call__(self, module: torch.nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return tree_map(self.part, args), tree_map(self.part, kwargs)

    def part(self, x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or x.device.type != "tpu" or x.dim() == 0:
            return x
        return cut(x, self.layout, input_spec(self.layout, x)) if any(input_spec(self.layout, x)) else x


def input_spec(layout: Layout, x: torch.Tensor) -> Spec:
    """Axes of an input: the batch first; tokens' second dimension is the sequence."""
    tokens = x.dim() == 2 and not x.dtype.is_floating_point
    axes = (layout.plan.batch, layout.plan.sequence if tokens else ())
    return layout.fitting(tuple(x.shape), axes[: x.dim()])


class _Hidden:
    """Lays out what a layer hands to the next."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    def __call__(self, module: torch.nn.Module, args: Any, result: Any) -> Any:
        if isinstance(result, tuple) and result and _is_hidden(result[0]):
            return (self.placed(result[0]), *result[1:])
        return self.placed(result) if _is_hidden(result) else None

    def placed(self, x: torch.Tensor) -> torch.Tensor:
        place = meshes.text(self.layout.mesh, self.layout.hidden(tuple(x.shape)))
        return constrain(x, place, place)


def _is_hidden(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.device.type == "tpu" and x.dim() > 1 and x.dtype.is_floating_point


def _results(path: str, module: torch.nn.Module, layout: Layout) -> list[Any]:
    """Hooks for a module whose result the plan names."""
    if not any(re.search(rule.pattern, path) for rule in layout.plan.activations):
        return []

    def hook(module: torch.nn.Module, args: Any, result: Any) -> Any:
        if not _is_hidden(result):
            return None
        spec = layout.plan.activation(path, tuple(result.shape))
        if spec is None:
            return None
        place = meshes.text(layout.mesh, layout.fitting(tuple(result.shape), spec))
        return constrain(result, place, place)

    return [module.register_forward_hook(hook)]


def _parameters(path: str, module: torch.nn.Module, layout: Layout) -> list[Any]:
    """Hooks that put in place of a module's parameters, while it runs, what they are gathered to."""
    places: dict[str, tuple[str, str]] = {}
    for name, p in module.named_parameters(recurse=False):
        full, shape = f"{path}.{name}" if path else name, tuple(p.shape)
        stored, used = layout.plan.spec(full, shape), layout.plan.used(full, shape)
        if p.dtype.is_floating_point and (stored != used or p.requires_grad):
            places[name] = meshes.text(layout.mesh, used), meshes.text(layout.mesh, stored)
    if not places:
        return []

    def enter(module: torch.nn.Module, args: Any) -> None:
        for name, (used, stored) in places.items():
            p = module._parameters[name]
            if p is not None and (used != stored or (torch.is_grad_enabled() and p.requires_grad)):
                # An attribute of the instance is found before a parameter, which keeps its name and its place.
                module.__dict__[name] = _gather(p, used, stored)

    def leave(module: torch.nn.Module, args: Any, result: Any) -> None:
        for name in places:
            module.__dict__.pop(name, None)

    return [
        module.register_forward_pre_hook(enter),
        module.register_forward_hook(leave, always_call=True),
    ]


def _gather(p: torch.Tensor, used: str, stored: str) -> torch.Tensor:
    made = constrain(p, used, stored)
    if used != stored and not torch.compiler.is_compiling():
        _note(made, p, used, stored)
    return made


_gathered: dict[int, tuple[weakref.ref[torch.Tensor], Any]] = {}
"""By storage: a gathered parameter that is alive, and what it was made of."""


def _note(made: torch.Tensor, p: torch.Tensor, used: str, stored: str) -> None:
    storage = _C.storage_of(made)[0]
    _gathered[storage] = weakref.ref(made, lambda _: _gathered.pop(storage, None)), (p.detach(), p._version, used, stored)


hide_from_dynamo(_note)


class _Gathered:
    """Autograd keeps parameters for the backward pass as they are stored, and gathers them when it reads them."""

    def __init__(self) -> None:
        self.open: list[Any] = []

    def enter(self, module: torch.nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling():
            self.open.append(saved_tensors_hooks(_pack, _unpack))
            self.open[-1].__enter__()

    def leave(self, module: torch.nn.Module, args: Any, result: Any) -> None:
        if not torch.compiler.is_compiling() and self.open:
            self.open.pop().__exit__(None, None, None)


def _pack(t: torch.Tensor) -> Any:
    found = _gathered.get(_C.storage_of(t)[0]) if t.device.type == "tpu" and t.layout is torch.strided else None
    if found is None or found[0]() is None or t.dtype is not found[1][0].dtype:
        return t
    return *found[1], tuple(t.shape), tuple(t.stride()), t.storage_offset()


def _unpack(kept: Any) -> torch.Tensor:
    if isinstance(kept, torch.Tensor):
        return kept
    p, version, used, stored, size, stride, offset = kept
    if p._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a "
            f"parameter of size {list(p.shape)} is at version {p._version}; expected version {version} instead"
        )
    with torch.no_grad():
        return constrain(p, used, stored, again=True).as_strided(size, stride, offset)


hide_from_dynamo(_pack)
hide_from_dynamo(_unpack)
