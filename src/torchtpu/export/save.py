"""``torchtpu.export.save``."""

from __future__ import annotations

import importlib.metadata
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.export
import torch

import torchtpu
from torchtpu.export import package
from torchtpu.export.package import ExportError, require_extras
from torchtpu.runtime import devices, disk_cache
from torchtpu.runtime.compiler import compile_program

if TYPE_CHECKING:  # torch.export brings Dynamo, which takes seconds to import: who only loads packages needs neither
    from torch.export import ExportedProgram

    from torchtpu.export.trace import Traced

__all__ = ["save"]

PLATFORMS = ("cpu", "tpu")


def save(
    model: torch.nn.Module | ExportedProgram,
    path: str | os.PathLike[str],
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    platforms: Sequence[str] = PLATFORMS,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    executables: Sequence[str] = (),
) -> dict[str, Any]:
    """Save a model as a package: one file that runs without its code.

    Args:
        model: a module, on any device and in the mode (training, evaluation) it is to run in; or what
            ``torch.export.export`` made of one.
        path: the file.
        args, kwargs: examples of the arguments, for a module; their sizes are fixed but for ``dynamic_shapes``.
        dynamic_shapes: sizes left open, as ``torch.export.export`` takes them; names of ``Dim`` appear in messages.
        platforms: what it can run on: ``"cpu"``, ``"tpu"``.
        state_dict: weights in place of the model's own, by name; needed for a model on the meta device.
        executables: compiled programs to put beside: ``"cpu"`` for this machine. A TPU topology such as ``"v6e:2x2"``
            is compiled for as a test, whose result the manifest holds; without libtpu it warns.

    Returns:
        The manifest.

    Raises:
        ExportError: the model needs something that a package does not have; the message names it.
        ModuleNotFoundError: flatbuffers or safetensors is not installed.
        ValueError: an unknown platform, or executables of a program with open sizes.
    """
    require_extras()
    from torch.export import ExportedProgram

    from torchtpu.export.trace import trace_program

    unknown = [p for p in platforms if p not in PLATFORMS]
    if unknown or not platforms:
        raise ValueError(f"platforms are some of {', '.join(PLATFORMS)}; got {', '.join(unknown) or 'none'}")
    devices.initialise()
    if isinstance(model, ExportedProgram):
        if args or kwargs or dynamic_shapes is not None:
            raise ValueError("an exported program has its arguments already: give only args for a module")
        program = model
    else:
        with torch.no_grad():  # there are no gradients to prepare, and blocks without them need no mark in the graph
            program = torch.export.export(model, args, kwargs, dynamic_shapes=dynamic_shapes, strict=False)
    traced = trace_program(program, state_dict, dynamic_shapes)
    exported = _export(traced, platforms)
    if executables and traced.signature["dims"]:
        dims = ", ".join(traced.signature["dims"])
        raise ValueError(f"executables of a program with sizes that are left open ({dims}): there are none yet")
    parts = {package.PROGRAM: bytes(exported.serialize()), package.WEIGHTS: _weights(traced.weights)}
    manifest: dict[str, Any] = {
        "versions": {
            "torchtpu": torchtpu.__version__,
            "torch": torch.__version__,
            **{name: importlib.metadata.version(name) for name in ("jax", "jaxlib")},
        },
        "calling_convention": exported.calling_convention_version,
        "platforms": list(platforms),
        **traced.signature,
        "executables": [],
        "topologies": {},
    }
    for wanted in executables:
        if wanted == devices.platform():
            entry, parts[entry["part"]] = _executable(traced, exported)
            manifest["executables"].append(entry)
        elif ":" in wanted:
            manifest["topologies"][wanted] = _try_topology(traced, wanted)
        else:
            raise ValueError(
                f"executables are {devices.platform()!r}, which this process runs on, or TPU topologies such as "
                f"'v6e:2x2'; got {wanted!r}"
            )
    package.write(path, manifest, parts)
    return manifest


def _export(traced: Traced, platforms: Sequence[str]) -> jax.export.Exported:
    try:
        with jax.enable_x64(True):
            return jax.export.export(jax.jit(traced.function), platforms=tuple(platforms))(*traced.arguments)
    except ExportError:
        raise
    except Exception as error:
        dims = ", ".join(traced.signature["dims"])
        where = f" with sizes that are left open ({dims})" if dims else ""
        raise ExportError(f"JAX cannot export the program for {' and '.join(platforms)}{where}: {error}") from error


def _weights(weights: dict[str, torch.Tensor]) -> bytes:
    import safetensors.torch

    # Names share memory where the program writes one of them, or they are views; in the file each has its own.
    seen: set[int] = set()
    own = {}
    for name, w in weights.items():
        address = w.untyped_storage().data_ptr()
        whole = w.nbytes == w.untyped_storage().nbytes()
        own[name] = w if whole and address not in seen else w.clone()
        seen.add(address)
    return safetensors.torch.save(own)


def _executable(traced: Traced, exported: jax.export.Exported) -> tuple[dict[str, Any], bytes]:
    """The program compiled for the first device of this process, and what the manifest says of it."""
    device = devices.device(0)
    compiled = compile_program(exported.call, traced.arguments, device, "a package")
    entry = {
        "part": f"executables/{device.platform}",
        "platform": device.platform,
        "device": device.id,
        "fingerprint": disk_cache.fingerprint(device),
    }
    return entry, disk_cache.pack(compiled, exported.mlir_module())


def _try_topology(traced: Traced, topology: str) -> dict[str, Any]:
    """Whether the program compiles for a TPU that is not there."""
    from torchtpu import aot

    missing = aot.libtpu_missing()
    if missing is not None:
        warnings.warn(f"the package is saved without having been compiled for {topology}: {missing}", stacklevel=3)
        return {"status": "not tried", "message": missing}
    result = aot.compile_for(traced.function, traced.arguments, topology)
    if not result.ok:
        raise ExportError(f"the program does not compile for {topology}: {result.message}")
    return {"status": result.status, "code_bytes": result.code_bytes}
