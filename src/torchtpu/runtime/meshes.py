"""Values divided over several devices of one process, and where programs that read them run.

A storage's array may lie on a mesh of devices (``NamedSharding``) instead of on one. A program that reads such an array
runs on all devices of the mesh, and XLA divides its work (GSPMD): what else it reads is copied to every device first.
Until a mesh has been made nobody asks any of this.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.extend import core
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from torchtpu.runtime import devices

__all__ = [
    "Placement",
    "as_stored",
    "divided",
    "from_host",
    "make",
    "mesh_in",
    "normal",
    "options",
    "placement",
    "sharding",
    "sharding_of",
    "text",
]

active = False
"""Whether this process has made a mesh."""

_meshes: list[Mesh] = []
_numbers: dict[Any, int] = {}
_copies: dict[tuple[int, int], tuple[weakref.ref[Any], jax.Array]] = {}


def make(sizes: Mapping[str, int]) -> Mesh:
    """The mesh with these axes over the first devices of the process; the same one when asked again.

    Args:
        sizes: sizes of the axes by name, the slowest first.

    Raises:
        RuntimeError: there are fewer devices.
    """
    global active
    wanted = int(np.prod(list(sizes.values())))
    count = devices.initialise()
    found = [devices.device(i) for i in range(count)]
    if len(set(found)) < wanted:
        emulate = f"; TORCHTPU_CPU_DEVICES={wanted} emulates them" if devices.platform() == "cpu" else ""
        raise RuntimeError(
            f"a mesh of {' x '.join(f'{a}={n}' for a, n in sizes.items())} needs {wanted} devices, and this process "
            f"has {len(set(found))}{emulate}"
        )
    mesh = Mesh(mesh_utils.create_device_mesh(tuple(sizes.values()), found[:wanted]), tuple(sizes))
    if mesh not in _meshes:
        _meshes.append(mesh)
    active = True
    return _meshes[_meshes.index(mesh)]


def text(mesh: Mesh, spec: Sequence[Sequence[str]]) -> str:
    """A place as an operator takes it: the mesh and, for each dimension, the axes that divide it."""
    return f"{_meshes.index(mesh)}:{';'.join(','.join(axes) for axes in spec)}"


def sharding(place: str, shape: Sequence[int]) -> NamedSharding | None:
    """The sharding behind ``text`` for an array of some shape, without the axes that do not divide it; None where the
    place has more dimensions than the array.
    """
    number, _, spec = place.partition(":")
    mesh = _meshes[int(number)]
    parts = [[a for a in part.split(",") if a] for part in spec.split(";")] if spec else []
    if len(parts) > len(shape):
        return None
    kept = []
    for size, axes in zip(shape, parts, strict=False):
        fitting: list[str] = []
        for axis in axes:
            if size % math.prod(mesh.shape[a] for a in (*fitting, axis)) == 0:
                fitting.append(axis)
        kept.append(tuple(fitting) or None)
    return NamedSharding(mesh, PartitionSpec(*kept))


def divided(array: Any) -> bool:
    """Whether an array lies on several devices."""
    return active and isinstance(array, jax.Array) and array.sharding.num_devices > 1


def sharding_of(array: Any) -> Sharding | None:
    """How an array is divided; None for what is on one device, or no array."""
    return array.sharding if divided(array) else None


def from_host(host: np.ndarray, where: Sharding) -> jax.Array:
    """A divided array with the elements of one on the host; each device is given its own part only.

    The parts are copies: whoever holds the host's memory may write to it.
    """
    with jax.enable_x64(True):
        return jax.make_array_from_callback(host.shape, where, lambda index: host[index].copy())


def as_stored(array: Any, before: Any) -> Any:
    """An array laid out as the one whose place it takes, where that is divided and of the same shape."""
    if not divided(before) or not isinstance(array, jax.Array) or array.shape != before.shape:
        return array
    return array if array.sharding == before.sharding else jax.device_put(array, before.sharding)


def mesh_in(closed: core.ClosedJaxpr) -> Mesh | None:
    """The mesh that a traced program names."""
    return _mesh_in(closed.jaxpr) if active else None


def _mesh_in(jaxpr: Any) -> Mesh | None:
    for e in jaxpr.eqns:
        place = e.params.get("sharding")
        if isinstance(place, NamedSharding) and isinstance(place.mesh, Mesh):
            return place.mesh
        for value in e.params.values():
            for x in value if isinstance(value, tuple | list) else [value]:
                inner = x.jaxpr if isinstance(x, core.ClosedJaxpr) else x
                if isinstance(inner, core.Jaxpr) and (found := _mesh_in(inner)) is not None:
                    return found
    return None


@dataclass(frozen=True)
class Placement:
    """Where a program runs that some operand or constraint divides over several devices.

    Attributes:
        mesh: the devices.
        key: what of its operands' layout decides how it compiles.
        lies: for each operand, how it is divided; None for what is not.
    """

    mesh: Mesh
    key: tuple[int, ...]
    lies: tuple[Sharding | None, ...]

    def spread(self, operands: Sequence[Any]) -> list[Any]:
        """Operands with those of one device copied to all; numbers and divided arrays as they are."""
        return [
            self._everywhere(x) if isinstance(x, jax.Array) and x.sharding.num_devices == 1 else x for x in operands
        ]

    def _everywhere(self, x: jax.Array) -> jax.Array:
        # A constant is read at every step: its copies are kept as long as it lives.
        key = id(x), _number(self.mesh)
        known = _copies.get(key)
        if known is not None:
            return known[1]
        copies = jax.device_put(x, NamedSharding(self.mesh, PartitionSpec()))
        _copies[key] = weakref.ref(x, lambda _: _copies.pop(key, None)), copies
        return copies


def placement(operands: Sequence[Any], named: Sequence[Mesh | None] = ()) -> Placement | None:
    """Where a program with these operands runs; None for one device.

    Args:
        operands: arrays, numbers and None.
        named: meshes that the program itself names.

    Raises:
        RuntimeError: two of them lie on different devices.
    """
    mesh: Mesh | None = None
    key, lies = [], []
    for found in named:
        if found is not None:
            mesh = _same(mesh, found)
    for x in operands:
        where = sharding_of(x)
        lies.append(where)
        if where is None:
            key.append(-1)
            continue
        key.append(_number(normal(where)))
        mesh = _same(mesh, _mesh_of(where))
    return None if mesh is None else Placement(mesh, (_number(mesh), *key), tuple(lies))


def _same(mesh: Mesh | None, other: Mesh) -> Mesh:
    if mesh is not None and mesh is not other and tuple(mesh.devices.flat) != tuple(other.devices.flat):
        raise RuntimeError(
            f"one program was given tensors of two meshes of different devices, {dict(mesh.shape)} and "
            f"{dict(other.shape)}: move the values of one to the other through the CPU"
        )
    return mesh or other


def _mesh_of(where: Sharding) -> Mesh:
    if isinstance(where, NamedSharding) and isinstance(where.mesh, Mesh):
        return where.mesh
    for mesh in _meshes:
        if set(mesh.devices.flat) == where.device_set:
            return mesh
    raise RuntimeError(f"a tensor is divided over devices that torchtpu.spmd has made no mesh of: {where}")


def normal(where: Sharding | None) -> Any:
    """Equal for shardings that say the same."""
    if not isinstance(where, NamedSharding):
        return where
    spec = list(where.spec)
    while spec and spec[-1] is None:
        spec.pop()
    return where.mesh, tuple(spec)


def _number(x: Any) -> int:
    return _numbers.setdefault(x, len(_numbers))


def options(mesh: Mesh) -> dict[str, Any]:
    """How XLA compiles for a mesh.

    XLA:CPU, left to itself, gathers all parameters before the first layer and sums all gradients in one collective at
    the end: fast where devices are threads of one processor, but not what they stand for.
    """
    if mesh.devices.flat[0].platform != "cpu":
        return {}
    return {
        "xla_disable_hlo_passes": "cpu-all-reduce-combiner",
        "xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED",
    }
