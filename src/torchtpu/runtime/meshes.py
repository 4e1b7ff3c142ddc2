"""Values divided over several devices, of this process or of all processes of a job, and where programs that read them
run.

A storage's array may lie on a mesh of devices (``NamedSharding``) instead of on one. A program that reads such an array
runs on all devices of the mesh, and XLA divides its work (GSPMD): what else it reads is copied to every device first.
Until a mesh has been made nobody asks any of this.

Where a mesh spans processes, each holds the parts of its own devices, and all of them run the same programs
(``distributed.together``). What is whole on every device can be read by each process alone; the rest is gathered first,
by all of them together.
"""

from __future__ import annotations

import hashlib
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.extend import core
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from torchtpu.runtime import devices, processes

__all__ = [
    "Placement",
    "as_stored",
    "divided",
    "enqueue",
    "from_host",
    "local",
    "make",
    "may_grow",
    "meet",
    "mesh_in",
    "mesh_of",
    "normal",
    "options",
    "others",
    "placement",
    "put",
    "readable",
    "rows_apart",
    "sharding",
    "sharding_of",
    "spans",
    "text",
]

active = False
"""Whether this process has made a mesh."""

_all: Any = None
"""``distributed.together.Together`` once a mesh spans processes."""
_meshes: list[Mesh] = []
_numbers: dict[Any, int] = {}
_texts: dict[tuple[int, ...], str] = {}
_copies: dict[tuple[int, int], tuple[weakref.ref[Any], jax.Array]] = {}


def make(sizes: Mapping[str, int]) -> Mesh:
    """The mesh with these axes over the first devices of the process, or over those of all processes of the job; the
    same one when asked again.

    Args:
        sizes: sizes of the axes by name, the slowest first.

    Raises:
        RuntimeError: there are fewer devices, or those of several processes that are not all of the job's.
    """
    global active, _all
    wanted = math.prod(sizes.values())
    found = devices.own()
    if wanted > len(found):
        everywhere = devices.everywhere() if devices.may_share() else found
        if wanted != len(everywhere):
            raise RuntimeError(_too_few(sizes, wanted, len(found), len(everywhere)))
        found = everywhere
        if _all is None:
            from torchtpu.distributed.together import together

            _all = together()
    mesh = Mesh(mesh_utils.create_device_mesh(tuple(sizes.values()), found[:wanted]), tuple(sizes))
    if mesh not in _meshes:
        _meshes.append(mesh)
    active = True
    return _meshes[_meshes.index(mesh)]


def _too_few(sizes: Mapping[str, int], wanted: int, own: int, everywhere: int) -> str:
    job = processes.job()
    text = f"a mesh of {' x '.join(f'{a}={n}' for a, n in sizes.items())} needs {wanted} devices, and this process has "
    if everywhere > own:
        return f"{text}{own}, all processes of the job {everywhere}: a mesh is over all of them or within one process"
    if job is not None and (job.local_size > 1 or own == 1):
        return (
            f"{text}{own}, alone: start one process on each host (torchrun --nproc-per-node 1), which has all devices "
            "of its host and forms the mesh with those of the others"
        )
    emulate = f"; TORCHTPU_CPU_DEVICES={wanted} emulates them" if devices.platform() == "cpu" else ""
    return f"{text}{own}{emulate}"


def text(mesh: Mesh, spec: Sequence[Sequence[str]]) -> str:
    """A place as an operator takes it: the mesh and, for each dimension, the axes that divide it."""
    return f"{_meshes.index(mesh)}:{';'.join(','.join(axes) for axes in spec)}"


def mesh_of(place: str) -> Mesh:
    """The mesh behind ``text``."""
    return _meshes[int(place.partition(":")[0])]


def sharding(place: str, shape: Sequence[int]) -> NamedSharding | None:
    """The sharding behind ``text`` for an array of some shape, without the axes that do not divide it; None where the
    place has more dimensions than the array.
    """
    mesh, spec = mesh_of(place), place.partition(":")[2]
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
    return array if array.sharding == before.sharding else put(array, before.sharding)


def spans(where: Any) -> bool:
    """Whether a sharding (or mesh) has devices of other processes."""
    if isinstance(where, Mesh):
        return where.is_multi_process
    return isinstance(where, Sharding) and not where.is_fully_addressable


def rows_apart(where: Sharding, shape: Sequence[int]) -> int:
    """Over how many processes the first dimension is divided, each with as many rows, which no other has; 1 if two
    processes have the same rows.
    """
    rows: dict[int, set[int]] = {}
    parts: Any = where.devices_indices_map(tuple(shape))
    for device, index in parts.items():
        rows.setdefault(device.process_index, set()).update(range(shape[0])[index[0]])
    sizes = {len(r) for r in rows.values()}
    apart = len(sizes) == 1 and sum(map(len, rows.values())) == shape[0]
    return len(rows) if apart else 1


def put(array: Any, where: Any) -> jax.Array:
    """An array moved to a device or a sharding. Where that spans processes, each gives its own devices their parts of
    a value that all have, and a value that lies on such devices already is moved by a program that all run.
    """
    if not spans(where):
        return jax.device_put(array if not spans(getattr(array, "sharding", None)) else local(array), where)
    with jax.enable_x64(True):
        if isinstance(array, jax.Array) and spans(array.sharding) and not array.is_fully_replicated:
            return _moved(array, where)
        one = local(array) if divided(array) else array
        parts = [
            jax.device_put(one if _whole(index, one.shape) else one[index], device)
            for device, index in where.addressable_devices_indices_map(one.shape).items()
        ]
        return jax.make_array_from_single_device_arrays(one.shape, where, parts)


def _whole(index: Any, shape: Sequence[int]) -> bool:
    return all(part.indices(n) == (0, n, 1) for part, n in zip(index, shape, strict=True))


def _moved(array: jax.Array, where: Sharding) -> jax.Array:
    """A value of all processes laid out in another way, by a program that each of them runs."""
    kind = f"{array.dtype}{list(array.shape)}"
    digest = f"{kind} {normal(array.sharding)} -> {normal(where)}"
    with jax.enable_x64(True):
        return _all.enqueue(digest, f"a move of {kind}", b"", lambda: [_mover(where)(array)])[0]


def _mover(where: Sharding) -> Callable[[jax.Array], jax.Array]:
    found = _movers.get(where)
    if found is None:
        found = _movers[where] = jax.jit(_same_value, out_shardings=where)
    return found


_movers: dict[Sharding, Callable[[jax.Array], jax.Array]] = {}


def _same_value(x: jax.Array) -> jax.Array:
    return x


def may_grow(where: Placement | None) -> bool:
    """Whether operators may be learnt from a program's sizes to grow: of processes that may have a mesh in common, only
    from programs that all of them run. Otherwise they would record different programs later.
    """
    return (where is not None and spans(where.mesh)) or not devices.may_share()


def readable(array: jax.Array) -> jax.Array:
    """An array of the same elements that this process can read.

    Of one that is divided over several processes every process has to ask, and gets all of it.

    Raises:
        torchtpu.distributed.errors.CollectiveError: not every process asks for the same in time.
    """
    if not active or not spans(array.sharding) or array.is_fully_replicated:
        return array
    size = f"{list(array.shape)} ({array.dtype}, {array.nbytes:,} bytes)"
    _all.meet(f"reading a tensor of size {size} that is divided over processes")
    everywhere = NamedSharding(_mesh_of(array.sharding), PartitionSpec())
    return _moved(array, everywhere)


def local(array: jax.Array) -> jax.Array:
    """An array of the same elements on one device of this process; see ``readable``."""
    if not divided(array):
        return array
    if not spans(array.sharding):
        return jax.device_put(array, devices.device(0))
    return readable(array).addressable_data(0)


def others(error: Exception) -> str:
    """What the other processes of a mesh were doing, to be added to an error of XLA: one of them may have ended."""
    if _all is None or not isinstance(error, jax.errors.JaxRuntimeError):
        return ""
    return f"\nThe other ranks:\n{_all.watch.report(_all.ranks, broken=True)}"


def meet(what: str, digest: str) -> None:
    """Wait for all processes of a mesh that spans them, and compare what has to be the same in all."""
    _all.meet(what, digest=digest)


def enqueue(
    where: Placement, digest: str, name: str, numbers: Callable[[], bytes], run: Callable[[], list[Any]]
) -> list[Any]:
    """Enqueue a program on a mesh; where it spans processes all of them must do so.

    Args:
        where: where it runs.
        digest: what it computes, the same in every process.
        name: what it is, in words.
        numbers: gives its operands that are no arrays.
        run: enqueues it and returns its results.
    """
    if _all is None or not spans(where.mesh):
        return run()
    results: list[Any] = _all.enqueue(f"{digest} {where.text}", name, numbers(), run)
    return results


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

    @property
    def text(self) -> str:
        """Where its operands lie, the same in every process."""
        found = _texts.get(self.key)
        if found is None:
            found = _texts[self.key] = self._text()
        return found

    def _text(self) -> str:
        lies = [None if where is None else (dict(self.mesh.shape), normal(where)[1:]) for where in self.lies]
        return hashlib.sha256(repr((dict(self.mesh.shape), lies)).encode()).hexdigest()

    @property
    def everywhere(self) -> Sharding | None:
        """Whole on all devices, where these are of several processes."""
        return NamedSharding(self.mesh, PartitionSpec()) if spans(self.mesh) else None

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
        copies = put(x, NamedSharding(self.mesh, PartitionSpec()))
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
