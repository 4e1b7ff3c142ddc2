"""What a divided model does when it is called: its inputs are cut, its parameters gathered for use, its results laid
out as the plan says. All of it by hooks, so that names, classes and ``state_dict`` stay the model's own.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import torch
from jax.sharding import Mesh
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map

from torchtpu import _C
from torchtpu.eager.arrays import host_array, wrap_array
from torchtpu.eager.hidden import hide_from_dynamo
from torchtpu.runtime import meshes
from torchtpu.sharding import Plan
from torchtpu.spmd.operator import constrain

__all__ = ["Divided", "attach", "cut", "join"]


@dataclass(frozen=True)
class Divided:
    """A plan on a mesh."""

    plan: Plan
    mesh: Mesh

    def place(self, *spec: Sequence[str]) -> str:
        """A place as operators take it: axes by dimension, the dimensions after the last one whole."""
        return meshes.text(self.mesh, spec)

    def __deepcopy__(self, memo: Any) -> Divided:
        return self  # devices cannot be copied


def attach(model: torch.nn.Module, divided: Divided) -> None:
    """Put the hooks on a model."""
    plan = divided.plan
    for path, module in model.named_modules():
        _parameters(path, module, divided)
        rule = next((r for r in plan.activations if re.search(r.pattern, path)), None)
        if rule is not None:
            module.register_forward_hook(_Result(divided.place(*rule.spec)))
    between = _Result(divided.place(plan.batch, plan.sequence, ()), divided.place(plan.batch, ()))
    for module in model.modules():
        if isinstance(module, torch.nn.ModuleList):
            for layer in module:
                layer.register_forward_hook(between)
        elif isinstance(module, torch.nn.Embedding):
            module.register_forward_hook(between)
    model.register_forward_pre_hook(_Inputs(divided), with_kwargs=True)
    if plan.gathered:
        around = _Gathered()
        model.register_forward_pre_hook(around.enter)
        model.register_forward_hook(around.leave, always_call=True)


# ---- inputs ---------------------------------------------------------------------------------------------------------


def cut(x: torch.Tensor, divided: Divided) -> torch.Tensor:
    """An input divided over the mesh, each device given only its part where the values are at hand: the batch first,
    and the sequence where it is tokens (integers of two dimensions).
    """
    if x.dim() == 0:
        return x
    place = _place(x, divided)
    if not torch.compiler.is_compiling() and not x.requires_grad:
        made = _cut_now(x, place)
        if made is not None:
            return made
    return constrain(x if x.device.type == "tpu" else x.to("tpu"), place, place)


def _place(x: torch.Tensor, divided: Divided) -> str:
    tokens = x.dim() == 2 and not x.dtype.is_floating_point
    return divided.place(divided.plan.batch, divided.plan.sequence) if tokens else divided.place(divided.plan.batch)


def join(x: torch.Tensor, divided: Divided) -> torch.Tensor:
    """An input of the whole batch of which each process gives its part, divided over the mesh.

    Raises:
        RuntimeError: the plan does not give each process a part of its own.
    """
    count = len({d.process_index for d in divided.mesh.devices.flat})
    if x.dim() == 0:
        return x
    size = (count * x.shape[0], *x.shape[1:])
    where = meshes.sharding(_place(x, divided), size)
    if where is None or meshes.rows_apart(where, size) != count:
        raise RuntimeError(
            f"local=True: the plan {dict(divided.plan.mesh)} does not divide a batch of {count} x {x.shape[0]} rows "
            f"(size {list(size)}) over the {count} processes, each with its own: its batch axes are "
            f"{', '.join(divided.plan.batch) or 'none'}. Give the whole batch in every process, without local"
        )
    host = host_array((x if x.device.type == "cpu" else x.cpu()).contiguous())
    with jax.enable_x64(True):
        array = jax.make_array_from_process_local_data(where, host.copy(), size)
    return wrap_array(array, 0, x.dtype)


def _cut_now(x: torch.Tensor, place: str) -> torch.Tensor | None:
    """The tensor if its values are at hand, with no program."""
    where = meshes.sharding(place, tuple(x.shape))
    if where is None:
        return x
    if x.device.type == "cpu":
        return wrap_array(meshes.from_host(host_array(x.contiguous()), where), 0, x.dtype)
    if x.device.type != "tpu" or not x.is_contiguous() or x.storage_offset() or x.is_conj() or x.is_neg():
        return None
    value, shape, dtype = _C.get_value(x)
    if not isinstance(value, jax.Array) or tuple(shape) != tuple(x.shape) or dtype is not x.dtype:
        return None
    if meshes.divided(value):
        return x if value.sharding.is_equivalent_to(where, value.ndim) else None
    return wrap_array(meshes.put(value, where), 0, x.dtype)


hide_from_dynamo(_cut_now)


class _Inputs:
    """Cuts what the model is called with."""

    def __init__(self, divided: Divided) -> None:
        self.divided = divided

    def __call__(self, module: torch.nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return tree_map(self.part, args), tree_map(self.part, kwargs)

    def part(self, x: Any) -> Any:
        return cut(x, self.divided) if isinstance(x, torch.Tensor) and x.device.type == "tpu" else x


# ---- results --------------------------------------------------------------------------------------------------------


class _Result:
    """Lays out a module's result, or the first of several.

    Args:
        place: where it lies.
        other: where one lies that has not three dimensions (batch, sequence, width), if elsewhere.
    """

    def __init__(self, place: str, other: str | None = None) -> None:
        self.place, self.other = place, other or place

    def __call__(self, module: torch.nn.Module, args: Any, result: Any) -> Any:
        if type(result) is tuple and result:
            return (self.placed(result[0]), *result[1:])
        return self.placed(result)

    def placed(self, x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or x.device.type != "tpu" or not x.dtype.is_floating_point or x.dim() < 2:
            return x
        place = self.place if x.dim() == 3 else self.other
        return constrain(x, place, place)


# ---- parameters -----------------------------------------------------------------------------------------------------


def _parameters(path: str, module: torch.nn.Module, divided: Divided) -> None:
    """Hooks that put in place of a module's parameters, while it runs, what they are gathered to."""
    places: dict[str, tuple[str, str]] = {}
    for name, p in module.named_parameters(recurse=False):
        full, shape = f"{path}.{name}" if path else name, tuple(p.shape)
        stored, used = divided.plan.spec(full, shape), divided.plan.used(full, shape)
        if p.dtype.is_floating_point and (stored != used or p.requires_grad):
            places[name] = divided.place(*used), divided.place(*stored)
    if not places:
        return

    def enter(module: torch.nn.Module, args: Any) -> None:
        for name, (used, stored) in places.items():
            p = module._parameters[name]
            if p is not None and (used != stored or (torch.is_grad_enabled() and p.requires_grad)):
                # An attribute of the instance is found before a parameter, which keeps its name and its place.
                module.__dict__[name] = _gather(p, used, stored)

    def leave(module: torch.nn.Module, args: Any, result: Any) -> None:
        for name in places:
            module.__dict__.pop(name, None)

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave, always_call=True)


def _gather(p: torch.Tensor, used: str, stored: str) -> torch.Tensor:
    made = constrain(p, used, stored)
    if used != stored and not torch.compiler.is_compiling():
        _note(made, p, used, stored)
    return made


_gathered: dict[int, tuple[weakref.ref[torch.Tensor], Any]] = {}
"""By storage: a gathered parameter that is alive, and what it was made of."""


def _note(made: torch.Tensor, p: torch.Tensor, used: str, stored: str) -> None:
    storage = _C.storage_of(made)[0]
    source = p.detach(), p._version, used, stored
    _gathered[storage] = weakref.ref(made, lambda _: _gathered.pop(storage, None)), source


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
