"""Divide a model over the devices of this process, or of all processes of a job."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import torch

from torchtpu.eager.arrays import array_of, host_array, wrap_array
from torchtpu.lowering.dtypes import to_jax
from torchtpu.runtime import devices, meshes
from torchtpu.sharding import Plan, Spec, parse
from torchtpu.spmd import experts, optimizers
from torchtpu.spmd.modules import Divided, attach, cut, join

__all__ = ["Share", "describe", "divide_by", "shard", "shard_batch", "table"]

_DIVIDED = "_torchtpu_divided"


def divide_by(plan: Plan | str | Mapping[str, int]) -> Divided:
    """A plan on the first devices of this process, or on those of all processes that a launcher started one for each
    host.

    Args:
        plan: a plan, what ``torchtpu check --plan`` takes (``"fsdp=4,tp=2"``, a JSON file), or sizes of axes by name.

    Raises:
        PlanError: it is no plan.
        RuntimeError: it needs more devices than there are.
    """
    if isinstance(plan, Mapping):
        plan = ",".join(f"{a}={n}" for a, n in plan.items())
    if isinstance(plan, str):
        open_axis = not plan.endswith(".json") and any("=" not in p and ":" not in p for p in plan.split(","))
        # Presets drop tokens that are too many for an expert; PyTorch keeps them all.
        plan = replace(parse(plan, len(devices.everywhere()) if open_axis else None), capacity=None)
    return Divided(plan, meshes.make(plan.mesh))


def shard(module: torch.nn.Module, plan: Plan | str | Mapping[str, int]) -> torch.nn.Module:
    """Divide a module over several devices, in place: it trains and generates as on one.

    Where the plan is for the devices of all processes of a job, every process calls this with the same module, and runs
    the same program afterwards.

    Parameters and buffers move to the device, each device getting its part alone: from the CPU, from ``meta`` (they are
    made and initialised divided), or from the device. They stay ordinary tensors of their whole size.

    Args:
        module: the model. Optimizers are made afterwards, of its parameters.
        plan: see ``divide_by``.

    Returns:
        The module.

    Raises:
        PlanError: the plan does not divide a parameter, or is none.
        RuntimeError: there are too few devices, or a parameter on ``meta`` that nothing initialises.
        torchtpu.distributed.errors.MismatchError: the processes gave different modules or values.

    Example:
        >>> model = torchtpu.spmd.shard(model, "fsdp=4,tp=2")
    """
    if _DIVIDED in module.__dict__:
        raise RuntimeError("this module is divided already")
    divided = divide_by(plan)
    names = _names(module)
    specs = {name: divided.plan.spec(name, tuple(t.shape)) for name, t in names.values()}
    if meshes.spans(divided.mesh):
        meshes.meet("torchtpu.spmd.shard", _summary(names, plan))
    fresh = [m for m in module.modules() if any(t.is_meta for t in _own(m))]
    _move(module, names, specs, divided)
    module.__dict__[_DIVIDED] = divided
    if divided.plan.experts is not None:
        experts.use(module, divided)
    attach(module, divided)
    optimizers.install()
    _initialise(module, fresh)
    return module


def shard_batch(x: Any, plan: torch.nn.Module | Plan | str | Mapping[str, int], local: bool = False) -> Any:
    """Inputs on the device, divided as the plan divides the batch (and the sequence of tokens).

    Args:
        x: a tensor, on the CPU or the device, or a nest of them.
        plan: a divided module, or its plan.
        local: ``x`` is this process's part of the batch, such as a ``DistributedSampler`` gives it; the batch is those
            of all processes, one after the other, and what is returned has its size. Otherwise every process gives the
            whole batch. The same for a mesh within the process.

    Raises:
        RuntimeError: ``local``, and the plan does not divide this tensor's first dimension evenly over the processes.
    """
    divided = _divided_by(plan) if isinstance(plan, torch.nn.Module) else divide_by(plan)
    place = join if local and meshes.spans(divided.mesh) else cut
    return torch.utils._pytree.tree_map(lambda t: place(t, divided) if isinstance(t, torch.Tensor) else t, x)


def _divided_by(module: torch.nn.Module) -> Divided:
    found = module.__dict__.get(_DIVIDED)
    if found is None:
        raise RuntimeError("this module has not been divided: call torchtpu.spmd.shard(module, plan)")
    return found


def _names(module: torch.nn.Module) -> dict[int, tuple[str, torch.Tensor]]:
    """Parameters and buffers by identity; one that several modules share has its first name."""
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for name, t in itertools.chain(module.named_parameters(), module.named_buffers()):
        found.setdefault(id(t), (name, t))
    return found


def _summary(names: dict[int, tuple[str, torch.Tensor]], plan: Any) -> str:
    """A digest of a model that has to be the same in every process: of its structure and of some of its values, which
    shows that the processes were not seeded alike.
    """
    found = hashlib.sha256(repr(plan).encode())
    for name, t in names.values():
        found.update(f"{name} {tuple(t.shape)} {t.dtype} {t.requires_grad} {t.device.type}".encode())
        if t.numel() and t.device.type == "cpu":
            flat = t.detach().contiguous().reshape(-1)
            step = max(flat.numel() // 64, 1)
            found.update(host_array(flat[::step].contiguous()).tobytes())
    return found.hexdigest()


def _own(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)


def _move(
    module: torch.nn.Module, names: dict[int, tuple[str, torch.Tensor]], specs: dict[str, Spec], divided: Divided
) -> None:
    """Give a model's parameters and buffers divided values. The tensors stay the same objects where PyTorch can do that
    (all but those on meta), and tied ones stay tied.
    """
    moved: dict[int, torch.Tensor] = {}
    for owner in module.modules():
        for group in (owner._parameters, owner._buffers):
            for key, t in group.items():
                if t is None:
                    continue
                if id(t) not in moved:
                    name = names[id(t)][0]
                    moved[id(t)] = _moved(t, name, specs[name], divided)
                group[key] = moved[id(t)]  # type: ignore[assignment]


def _moved(t: torch.Tensor, name: str, spec: Spec, divided: Divided) -> torch.Tensor:
    made = _divided(t, name, spec, divided)
    gradient = None if t.grad is None else _divided(t.grad, name, spec, divided)
    if t.is_meta:
        new = torch.nn.Parameter(made, t.requires_grad) if isinstance(t, torch.nn.Parameter) else made
        new.__dict__.update(t.__dict__)
        return new
    t.grad = None
    t.data = made
    t.grad = gradient
    return t


def _divided(t: torch.Tensor, name: str, spec: Spec, divided: Divided) -> torch.Tensor:
    """A tensor on the device with the elements of another (zeros for one on meta), divided."""
    where = meshes.sharding(divided.place(*spec), tuple(t.shape))
    assert where is not None
    array: jax.Array
    if t.is_meta:
        zeros = np.zeros((), to_jax(t.dtype))
        parts = lambda index: np.broadcast_to(zeros, where.shard_shape(tuple(t.shape)))  # noqa: E731
        with jax.enable_x64(True):
            array = jax.make_array_from_callback(tuple(t.shape), where, parts)
    elif t.device.type == "cpu":
        array = meshes.from_host(host_array(t.contiguous()), where)
    elif t.device.type == "tpu":
        array = meshes.put(array_of(t.detach()), where)
    else:
        raise RuntimeError(f"{name} is on {t.device}: move it to the CPU or the tpu device first")
    return wrap_array(array, 0, t.dtype)


def _initialise(module: torch.nn.Module, fresh: list[torch.nn.Module]) -> None:
    """Fill what was on meta, as the model's own classes do."""
    if not fresh:
        return
    whole: Callable[[], None] | None = getattr(module, "init_weights", None)
    with torch.no_grad():
        if callable(whole):
            for m in module.modules():  # Transformers marks what it has initialised, and leaves it
                m.__dict__.pop("_is_hf_initialized", None)
                for t in _own(m):
                    t.__dict__.pop("_is_hf_initialized", None)
            whole()
            return
        for m in fresh:
            reset = getattr(m, "reset_parameters", None)
            if not callable(reset):
                path = next(n for n, x in module.named_modules() if x is m)
                raise RuntimeError(
                    f"{path or 'the module'} ({type(m).__name__}) has parameters or buffers on meta and no "
                    "reset_parameters() to fill them: give it one, or the model init_weights(), or build it on the CPU"
                )
            reset()


@dataclass(frozen=True)
class Share:
    """A parameter or buffer of a divided module.

    Attributes:
        name: its dotted name.
        shape, dtype: as PyTorch has them.
        spec: axes by dimension.
        nbytes: bytes on each device.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    spec: Spec
    nbytes: int


def table(module: torch.nn.Module) -> list[Share]:
    """How the parameters and buffers of a divided module lie."""
    divided = _divided_by(module)
    shares = []
    for name, t in _names(module).values():
        spec = divided.plan.spec(name, tuple(t.shape))
        parts = math.prod(divided.plan.size(axes) for axes in spec)
        shares.append(Share(name, tuple(t.shape), t.dtype, spec, t.numel() * t.element_size() // parts))
    return shares


def describe(module: torch.nn.Module) -> str:
    """``table`` for people: parameters with their axes and bytes a device."""
    divided, shares = _divided_by(module), table(module)
    lines = []
    for s in shares:
        sizes = " x ".join(f"{n}/{'.'.join(axes)}" if axes else str(n) for n, axes in zip(s.shape, s.spec, strict=True))
        lines.append((s.name, sizes or "scalar", str(s.dtype).removeprefix("torch."), f"{s.nbytes:,}"))
    widths = [max((len(line[i]) for line in lines), default=0) for i in range(4)]
    mesh = " x ".join(f"{a}={n}" for a, n in divided.plan.mesh.items())
    whole = sum(math.prod(s.shape) * s.dtype.itemsize for s in shares)
    return "\n".join(
        [
            *(f"{a:{widths[0]}}  {b:{widths[1]}}  {c:{widths[2]}}  {d:>{widths[3]}}" for a, b, c, d in lines),
            f"{mesh}: {sum(s.nbytes for s in shares):,} bytes a device of {whole:,}",
        ]
    )
