"""``torchtpu.export.load``, and what it returns."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.export
import torch

from torchtpu import _C
from torchtpu.device._index import device_index
from torchtpu.eager.arrays import array_of, from_host, wrap_array
from torchtpu.eager.errors import translate
from torchtpu.eager.hidden import hide_from_dynamo
from torchtpu.eager.launch import reserve_seed, seed_words
from torchtpu.export.package import PROGRAM, WEIGHTS, Package, PackageError, require_extras
from torchtpu.export.signature import bind, build, leaves
from torchtpu.runtime import checks, devices, disk_cache
from torchtpu.runtime.compiler import compile_program

__all__ = ["Program", "load"]

_ERRORS = {e.__name__: e for e in (IndexError, RuntimeError, ValueError)}
"""What a run-time check may raise; a package cannot name others."""


def load(path: str | os.PathLike[str], *, device: Any = "tpu", trusted: bool = False) -> Program:
    """Load a package onto a device.

    Args:
        path: the file, or the folder that unzipping it makes.
        device: the tpu device where the weights live and the program runs.
        trusted: also use the compiled programs in it, if there are some for this machine. They are pickles, which can
            run any code when they are read: only for files whose author you trust. Nothing else in a package can.

    Raises:
        FileNotFoundError: there is no such file.
        PackageError: it is damaged or incomplete, too new, or for other platforms.
        ModuleNotFoundError: flatbuffers or safetensors is not installed.
    """
    require_extras()
    package = Package(path)
    index = device_index(device)
    target = devices.device(index)
    _check_versions(package, target.platform)
    import safetensors.torch

    content, weights = package.read(PROGRAM), package.read(WEIGHTS)
    try:
        exported = jax.export.deserialize(bytearray(content))
        tensors = safetensors.torch.load(weights)
    except Exception as error:
        raise PackageError(f"{path} cannot be read by jax {jax.__version__} and safetensors: {error}") from error
    # The tensors are views of the file's bytes, which a device on the host would keep alive and may not align.
    arrays = {name: from_host(t.clone(), index) for name, t in tensors.items()}
    compiled = _executable(package, target) if trusted else None
    return Program(package.manifest, exported, {k: wrap_array(x, index) for k, x in arrays.items()}, index, compiled)


def _check_versions(package: Package, platform: str) -> None:
    manifest = package.manifest
    convention = manifest.get("calling_convention")
    low = jax.export.minimum_supported_calling_convention_version
    high = jax.export.maximum_supported_calling_convention_version
    if type(convention) is not int or not low <= convention <= high:
        written = manifest.get("versions", {}).get("jax", "unknown")
        raise PackageError(
            f"{package.path} was written by jax {written} (calling convention {convention}); jax {jax.__version__} "
            f"reads conventions {low} to {high}: use a version of JAX nearer to it, or save it again"
        )
    if platform not in manifest["platforms"]:
        raise PackageError(
            f"{package.path} was saved for {', '.join(manifest['platforms'])}; the tpu device of this process is on "
            f"{platform}: save it with platforms=({platform!r},)"
        )


def _executable(package: Package, device: jax.Device) -> Any | None:
    """The compiled program for a device, or None, with a warning where there are only others."""
    found = package.manifest["executables"]
    here = {"platform": device.platform, "device": device.id, "fingerprint": disk_cache.fingerprint(device)}
    for entry in found:
        if all(entry[k] == v for k, v in here.items()):
            return disk_cache.unpack(package.read(entry["part"]), device)
    if found:
        warnings.warn(
            f"the compiled programs in {package.path} are for another machine, device or version: it is compiled here",
            stacklevel=3,
        )
    return None


class Program:
    """A loaded package: call it as the model was called.

    Tensors on its device are taken as they are; tensors on the CPU are copied there; results are on its device. Sizes
    and dtypes must be those it was saved with. It has no gradients: an argument that requires one is refused while
    gradients are enabled. Random operators draw from the device's generator.

    Attributes:
        manifest: what the package says of itself.
        arguments: names of the arguments, in order.
        device: where it runs.
    """

    def __init__(
        self,
        manifest: dict[str, Any],
        exported: jax.export.Exported,
        weights: dict[str, torch.Tensor],
        index: int,
        run: Callable[..., Any] | None,
    ) -> None:
        self.manifest, self.arguments = manifest, list(manifest["arguments"])
        self.device = torch.device("tpu", index)
        self._exported, self._weights = exported, weights
        self._tree, self._leaves = manifest["inputs"]["tree"], manifest["inputs"]["leaves"]
        self._checks = tuple((message, _ERRORS.get(error, RuntimeError)) for error, message in manifest["checks"])
        self._name = f"a package of {len(weights)} weights"
        self._given_run = run
        self._programs: dict[tuple[Any, ...], Callable[..., Any]] = {}

    def __repr__(self) -> str:
        return f"<Program({', '.join(self.arguments)}) on {self.device}>"

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The weights, on the device; buffers that the program writes have their latest values."""
        return dict(self._weights)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it.

        Raises:
            TypeError: arguments of another number, name, nesting or kind.
            ValueError: a size, a dtype or a constant that differs from what was saved.
            RuntimeError: a tensor on another device, or one that requires a gradient.
        """
        tensors = self._tensors(args, kwargs)
        operands: list[Any] = [{k: array_of(w) for k, w in self._weights.items()}]
        operands += [array_of(t.to(self.device)) for t in tensors]
        index = self.device.index
        draws = self.manifest["draws"]
        if draws:
            operands.append(seed_words(reserve_seed(None, index, draws)))
        shapes = tuple(tuple(t.shape) for t in tensors)
        run = self._programs.get(shapes)
        if run is None:
            run = self._programs[shapes] = self._given_run or compile_program(
                self._exported.call, operands, devices.device(index), self._name
            )
        try:
            with jax.enable_x64(True):
                results = run(*operands)
        except Exception as error:
            raise translate(error, self._name, index) from error
        return self._results(results, tensors, index)

    hide_from_dynamo(__call__)

    def _results(self, results: dict[str, Any], tensors: Sequence[torch.Tensor], index: int) -> Any:
        for array in jax.tree.leaves(results)[:1]:
            devices.note(index, array)
        if "checks" in results:
            checks.note(results["checks"], self._checks, self._name)
        for name, array in results.get("buffers", {}).items():
            _C.set_value(self._weights[name], array, tuple(array.shape), self._weights[name].dtype)
        for position, array in results.get("inputs", {}).items():
            tensors[int(position)].copy_(wrap_array(array, index))
        made = iter(results.get("outputs", ()))
        described = iter(self.manifest["outputs"]["leaves"])

        def next_leaf() -> Any:
            leaf = next(described)
            return leaf["constant"] if "constant" in leaf else wrap_array(next(made), index)

        return build(self.manifest["outputs"]["tree"], next_leaf)

    def _tensors(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """The tensors among the arguments, checked."""
        given = bind(self.arguments, args, kwargs)
        trees = [*self._tree["tuple"][0]["tuple"], *(t for _, t in self._tree["tuple"][1]["dict"])]
        named = zip(self.arguments, given, trees, strict=True)
        flat = [x for name, value, tree in named for x in leaves(tree, value, name)]
        sizes: dict[str, int] = {}
        tensors = []
        for x, leaf in zip(flat, self._leaves, strict=True):
            if "constant" in leaf:
                if type(x) is not type(leaf["constant"]) or x != leaf["constant"]:
                    raise ValueError(f"{leaf['name']} is fixed in the package as {leaf['constant']!r}, got {x!r}")
            else:
                tensors.append(self._tensor(x, leaf, sizes))
        return tensors

    def _tensor(self, x: Any, leaf: dict[str, Any], sizes: dict[str, int]) -> torch.Tensor:
        name, dtype = leaf["name"], getattr(torch, leaf["dtype"])
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
        if x.dtype is not dtype:
            raise ValueError(f"{name} must be of {dtype}, got {x.dtype}")
        self._check_size(tuple(x.shape), leaf, sizes)
        if x.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(f"{name} requires a gradient, which a package does not compute: use torch.no_grad()")
        if x.device.type != "cpu" and x.device != self.device:
            raise RuntimeError(f"{name} is on {x.device}, the program on {self.device}")
        return x

    def _check_size(self, shape: tuple[int, ...], leaf: dict[str, Any], sizes: dict[str, int]) -> None:
        """Compare a size with what was saved; ``sizes`` holds the open dimensions met so far."""
        name, expected = leaf["name"], leaf["shape"]
        if len(shape) != len(expected):
            raise ValueError(f"{name} must have {len(expected)} dimensions ({_shown(expected)}), got {list(shape)}")
        for i, (n, want) in enumerate(zip(shape, expected, strict=True)):
            if isinstance(want, int):
                if n != want:
                    raise ValueError(f"{name} must have size {_shown(expected)}, got {list(shape)}")
                continue
            limits = self.manifest["dims"].get(want)
            if limits is None:
                continue  # an expression of other dimensions, which JAX checks
            if n < limits["min"] or (limits["max"] is not None and n > limits["max"]):
                upper = "" if limits["max"] is None else f" and at most {limits['max']}"
                raise ValueError(f"dimension {i} of {name}, {want}, must be at least {limits['min']}{upper}, got {n}")
            if sizes.setdefault(want, n) != n:
                raise ValueError(f"dimension {i} of {name}, {want}, is {n} here and {sizes[want]} in another argument")


def _shown(shape: Sequence[Any]) -> str:
    return f"[{', '.join(map(str, shape))}]"
