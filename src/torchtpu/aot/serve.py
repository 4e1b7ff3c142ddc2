"""The process that holds libtpu: reads StableHLO programs as JSON lines and compiles each.

It runs as a script, not as part of the package: it needs JAX and libtpu, and importing the package would load PyTorch.
"""

from __future__ import annotations

import functools
import json
import os
import resource
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax._src import compiler
from jax._src.interpreters import mlir
from jax.experimental import mesh_utils, topologies
from jaxlib import _jax
from jaxlib.mlir import ir

_MEMORY = {
    "argument_bytes": "argument_size_in_bytes",
    "output_bytes": "output_size_in_bytes",
    "alias_bytes": "alias_size_in_bytes",
    "temporary_bytes": "temp_size_in_bytes",
    "peak_bytes": "peak_memory_in_bytes",
    "code_bytes": "generated_code_size_in_bytes",
}


@functools.cache
def _devices(topology: str) -> Sequence[Any]:
    """The devices of a topology; their client compiles and cannot run anything."""
    return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices


def _placed(topology: str, mesh: Sequence[int] | None, boxes: bool) -> list[Any]:
    """The devices of a mesh, flat: neighbours on the mesh are neighbours on the torus where JAX knows how.

    With ``boxes`` the devices of an axis are a box as near a cube as can be, rather than a line: what everyone
    exchanges with everyone crosses fewer links.
    """
    devices = _devices(topology)
    if mesh is None:
        return [devices[0]]
    if boxes and (found := _in_boxes(devices, mesh)) is not None:
        return found
    try:
        return list(mesh_utils.create_device_mesh(mesh, devices, allow_split_physical_axes=True).flat)
    except (NotImplementedError, ValueError):
        return sorted(devices, key=lambda d: (*d.coords[::-1], d.core_on_chip))


def _in_boxes(devices: Sequence[Any], mesh: Sequence[int]) -> list[Any] | None:
    """Devices in the order of a mesh whose axes are boxes on the torus; None if the sizes do not allow it."""
    where = np.array([(*d.coords, d.core_on_chip) for d in devices])
    extent = where.max(0) + 1
    if extent.prod() != len(devices):
        return None
    left = list(extent)
    factors: list[list[int]] = []  # of each axis, the last first: its size along every dimension of the torus
    for n in reversed(mesh):
        own = [1] * len(left)
        if n == left[-1] > 1:  # the cores of a chip
            own[-1], left[-1], n = n, 1, 1
        while n > 1:
            prime = next(p for p in range(2, n + 1) if n % p == 0)
            open_ = [i for i, size in enumerate(left) if size % prime == 0]
            if not open_:
                return None
            i = min(open_, key=lambda i: (own[i], -left[i]))
            own[i], left[i], n = own[i] * prime, left[i] // prime, n // prime
        factors.insert(0, own)
    grid = np.empty(tuple(extent), dtype=object)
    for device, at in zip(devices, where, strict=True):
        grid[tuple(at)] = device
    dimensions, axes = len(extent), len(mesh)
    split = grid.reshape([factors[a][d] for d in range(dimensions) for a in range(axes)])
    order = [d * axes + a for a in range(axes) for d in range(dimensions)]
    return list(split.transpose(order).reshape(-1))


def _compile(request: dict[str, Any]) -> dict[str, Any]:
    """Compile one program."""
    start = time.perf_counter()
    answer: dict[str, Any] = {"status": "ok", "message": ""}
    try:
        devices = _placed(request["topology"], request.get("mesh"), request.get("boxes", False))
        options = compiler.get_compile_options(
            num_replicas=1,
            num_partitions=len(devices),
            device_assignment=np.array([d.id for d in devices])[None, :],
            env_options_overrides=request.get("options") or None,
        )
        with open(request["program"], "rb") as file, mlir.make_ir_context():
            module = ir.Module.parse(file.read())
            executable = devices[0].client.compile(module, _jax.DeviceList(tuple(devices)), options)
        memory = executable.get_compiled_memory_stats()
        answer |= {name: getattr(memory, field) for name, field in _MEMORY.items()}
        answer["coordinates"] = [list(d.coords) for d in devices]
        if request.get("save"):
            with open(request["save"], "wb") as file:
                file.write(executable.serialize())
    except (jax.errors.JaxRuntimeError, RuntimeError, ValueError, ir.MLIRError) as error:
        answer = {"status": "fail", "message": str(error)}
    answer["seconds"] = round(time.perf_counter() - start, 3)
    answer["compiler_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return answer


def main() -> None:
    """Answer until standard input ends; whatever libtpu prints on standard output goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        answers.write(json.dumps(_compile(json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
