"""Compiled steps on disk: what ``torchtpu check --save`` writes, and a TPU VM runs without compiling.

Example, on a VM of the topology::

    step = load("llama-step")
    state = step.place(arrays_by_name)         # "parameters.model.norm.weight" and so on: see step.arguments
    state, results = step(state, batch)
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from torchtpu.aot.step import Step
from torchtpu_cli import versions

__all__ = ["EXECUTABLE", "SavedError", "SavedStep", "load", "write_manifest"]

EXECUTABLE = "executable.bin"
_MANIFEST = "manifest.json"
_FORMAT = 1
_PARTS = ("topology", "platform", "versions", "sha256", "mesh", "coordinates", "arguments", "results")
"""What the manifest of this format has at least."""
_VERSIONED = {"tpu": ("jaxlib", "libtpu"), "cpu": ("jaxlib",)}
"""What must have the same version where the executable was made and where it runs."""


class SavedError(RuntimeError):
    """A saved step that cannot run here; the message says what differs and what to do."""


def write_manifest(
    folder: Path, step: Step, topology: str, model: str, coordinates: Any, platform: str = "tpu"
) -> None:
    """Describe the executable that lies in a folder.

    Args:
        folder: holds the file ``EXECUTABLE``.
        step: what was compiled.
        topology: for which machine.
        model: its name, for people.
        coordinates: of the chip of each device, in the order of the mesh.
        platform: of the executable.
    """
    names, types = _flat((step.state, step.batch))
    results = jax.eval_shape(step.function, step.state, step.batch)
    result_names, result_types = _flat(results)
    _, shardings = _flat(step.results)
    manifest = {
        "format": _FORMAT,
        "model": model,
        "kind": step.kind,
        "topology": topology,
        "platform": platform,
        "versions": {n: versions()[n] for n in _VERSIONED[platform]},
        "sha256": hashlib.sha256((folder / EXECUTABLE).read_bytes()).hexdigest(),
        "mesh": dict(step.plan.mesh),
        "coordinates": [list(c) for c in coordinates],
        "arguments": [_described(n, t, t.sharding) for n, t in zip(names, types, strict=True)],
        "results": [_described(n, t, s) for n, t, s in zip(result_names, result_types, shardings, strict=True)],
    }
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")


def _flat(tree: Any) -> tuple[list[str], list[Any]]:
    """(dotted names, leaves); a step's state comes before its batch, new state before results."""
    found = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [".".join(str(getattr(k, "key", k)) for k in path[1:]) for path, _ in found], [leaf for _, leaf in found]


def _described(name: str, of: Any, sharding: NamedSharding) -> dict[str, Any]:
    spec = [[] if a is None else [a] if isinstance(a, str) else list(a) for a in sharding.spec]
    return {"name": name, "shape": list(of.shape), "dtype": str(np.dtype(of.dtype)), "spec": spec}


@dataclass
class SavedStep:
    """A step that is loaded and ready to run.

    Attributes:
        manifest: what is known of it.
        mesh: the devices it runs on.
    """

    manifest: dict[str, Any]
    mesh: Mesh
    _executable: Any

    @property
    def arguments(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """(shape, dtype) of what the step takes, by name, in order."""
        return {a["name"]: (tuple(a["shape"]), a["dtype"]) for a in self.manifest["arguments"]}

    def place(self, arrays: Mapping[str, Any]) -> dict[str, jax.Array]:
        """Put arrays where the step takes them.

        Args:
            arrays: NumPy or JAX arrays by name; not all need be given.

        Raises:
            SavedError: one is not an argument, or has another shape.
        """
        described = {a["name"]: a for a in self.manifest["arguments"]}
        placed = {}
        for name, array in arrays.items():
            if name not in described:
                raise SavedError(f"the step takes no {name!r}; it takes {', '.join(described)}")
            a = described[name]
            if list(array.shape) != a["shape"]:
                raise SavedError(f"{name} has the shape {list(array.shape)}; the step takes {a['shape']}")
            with jax.enable_x64(True):
                placed[name] = jax.device_put(np.asarray(array).astype(a["dtype"]), self._sharding(a))
        return placed

    def __call__(self, arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Run the step once. Arguments that are state are used up: take the new ones from the results.

        Args:
            arrays: every argument, by name, as ``place`` returns them.

        Returns:
            The new state, under the names it was given by, and the results.

        Raises:
            SavedError: an argument is missing.
        """
        missing = [a["name"] for a in self.manifest["arguments"] if a["name"] not in arrays]
        if missing:
            raise SavedError(f"the step also takes {', '.join(missing)}")
        given = [arrays[a["name"]] for a in self.manifest["arguments"]]
        made = self._executable.execute_sharded(given).disassemble_into_single_device_arrays()
        with jax.enable_x64(True):
            return {
                r["name"]: jax.make_array_from_single_device_arrays(tuple(r["shape"]), self._sharding(r), shards)
                for r, shards in zip(self.manifest["results"], made, strict=True)
            }

    def _sharding(self, described: dict[str, Any]) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec(*(tuple(axes) or None for axes in described["spec"])))


def load(folder: str | Path) -> SavedStep:
    """Load a saved step on the machine it was compiled for.

    Raises:
        SavedError: the folder is not one, is damaged, or was made for another machine or with other versions.
    """
    folder = Path(folder)
    manifest, content = _read(folder)
    platform = manifest["platform"]
    for name, wanted in manifest["versions"].items():
        found = versions().get(name)
        if found != wanted:
            raise SavedError(
                f"{folder} was compiled with {name} {wanted}, and {found or 'none'} is installed: "
                f"pip install {name}=={wanted}, or compile again with torchtpu check --save"
            )
    try:
        devices = jax.devices(platform)
    except RuntimeError as error:
        raise SavedError(
            f"{folder} is for {manifest['topology']}, and this machine has no {platform}: {error}"
        ) from error
    count = int(np.prod(list(manifest["mesh"].values())))
    if len(devices) != count:
        raise SavedError(
            f"{folder} is for the {count} devices of {manifest['topology']}; this machine has {len(devices)}"
        )
    ordered = _ordered(devices, manifest, folder)
    from jax._src import compiler
    from jaxlib import _jax

    options = compiler.get_compile_options(
        num_replicas=1, num_partitions=count, device_assignment=np.array([d.id for d in ordered])[None, :]
    )
    try:
        executable = ordered[0].client.deserialize_executable(content, _jax.DeviceList(tuple(ordered)), options)
    except (RuntimeError, ValueError) as error:
        raise SavedError(f"{folder} cannot be loaded here: {error}") from error
    mesh = Mesh(np.array(ordered).reshape(tuple(manifest["mesh"].values())), tuple(manifest["mesh"]))
    return SavedStep(manifest, mesh, executable)


def _read(folder: Path) -> tuple[dict[str, Any], bytes]:
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        content = (folder / EXECUTABLE).read_bytes()
    except (OSError, ValueError) as error:
        raise SavedError(f"{folder} holds no saved step: {error}") from error
    if not isinstance(manifest, dict):
        raise SavedError(f"{folder} holds no saved step: {_MANIFEST} is not a JSON object")
    if manifest.get("format") != _FORMAT:
        raise SavedError(f"{folder} has format {manifest.get('format')}; this version reads {_FORMAT}")
    absent = [part for part in _PARTS if part not in manifest]
    if absent:
        raise SavedError(f"{folder} holds no saved step: {_MANIFEST} lacks {', '.join(absent)}")
    if hashlib.sha256(content).hexdigest() != manifest["sha256"]:
        raise SavedError(f"{folder} is damaged: the executable is not the one that was written. Compile it again")
    return manifest, content


def _ordered(devices: list[Any], manifest: dict[str, Any], folder: Path) -> list[Any]:
    """The devices in the order in which the step was compiled for them."""
    wanted = [tuple(c) for c in manifest["coordinates"]]
    if not wanted:
        return devices
    left: dict[tuple[int, ...], list[Any]] = {}
    for device in devices:
        left.setdefault(tuple(device.coords), []).append(device)
    try:
        return [left[c].pop(0) for c in wanted]
    except (KeyError, IndexError) as error:
        raise SavedError(
            f"{folder} is for {manifest['topology']}; the chips of this machine are placed otherwise"
        ) from error
