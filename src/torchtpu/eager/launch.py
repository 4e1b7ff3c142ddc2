"""Run a traced program, or record it: the part that operators and compiled graphs have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import torch

from torchtpu import _C
from torchtpu.eager import modes, trace
from torchtpu.eager.arrays import number_operand
from torchtpu.eager.errors import translate
from torchtpu.eager.program import Described, Program
from torchtpu.lowering.dtypes import to_jax
from torchtpu.runtime import checks, devices, meshes

__all__ = ["block", "examples", "find_generator", "launcher", "reserve_seed", "seed_words"]


def examples(described: Described, operands: Sequence[Any], device: int, random: bool) -> list[Any]:
    """Operands in the form in which a program of its own takes them; for tracing, their types are what matters."""
    found: list[Any] = []
    for storage, x in zip(described.operands, operands, strict=True):
        if storage is None:
            found.append(number_operand(x, device))
        elif storage.uninitialised:
            found.append(None)
        else:
            found.append(jax.ShapeDtypeStruct(storage.shape, to_jax(storage.dtype)))
    starts = described.starts()
    if starts is not None:
        found.append(starts)
    if random:
        found.append(np.zeros(4, np.uint32))
    return found


def launcher(program: Program, described: Described) -> Callable[..., list[Any]]:
    """The function that runs or records a program: (args, kwargs, operands, device) -> its arrays or pending values.

    ``args`` and ``kwargs`` are the call's, searched for a generator.
    """
    numbers = [i for i, s in enumerate(described.operands) if s is None]
    moving = described.starts()
    moving_list = moving.tolist() if moving is not None else []
    random, draws, name, note, record = program.random, program.draws, program.name, devices.note, trace.record
    on_device: list[Any] = []

    def launch(args: Any, kwargs: Any, operands: list[Any], device: int) -> list[Any]:
        seed = reserve_seed(find_generator(args, kwargs), device, draws) if random else None
        if modes.fused:
            return record(program, operands, moving_list, seed, device)
        plain = [operands[i] for i in numbers] if meshes.active else []
        for i in numbers:
            operands[i] = number_operand(operands[i], device)
        if moving is not None:
            if not on_device:
                with jax.enable_x64(True):
                    on_device.append(jax.device_put(moving, devices.device(device)))
            operands.append(on_device[0])
        if seed is not None:
            operands.append(seed_words(seed))
        placement = meshes.placement(operands, [program.mesh]) if meshes.active else None
        if placement is None:
            run = program.run or program.compiled(operands, devices.device(device))
        else:
            operands = placement.spread(operands)
            run = program.compiled_on(placement, operands)
        try:
            if placement is None:
                values = run(*operands)
            else:
                given = lambda: repr((seed, moving_list, plain)).encode()  # noqa: E731
                values = meshes.enqueue(placement, program.digest, name, given, lambda: run(*operands))
        except Exception as error:
            raise translate(error, name, device) from error
        if values:
            note(device, values[-1])  # the results of a program become ready together
        return values

    return launch


def block(name: str, values: list[Any], device: int) -> None:
    """Wait for a program and look at its checks: debug mode."""
    try:
        jax.block_until_ready(values)
    except Exception as error:
        raise translate(error, name, device) from error
    checks.raise_failed()


def reserve_seed(generator: torch.Generator | None, device: int, draws: int = 1) -> tuple[int, int]:
    """(seed, offset) for a program's PRNG, of draws reserved from the generator: one for each operator that draws."""
    if generator is not None and generator.device.type != "tpu":
        raise RuntimeError(f"Expected a 'tpu' device type for generator but found '{generator.device.type}'")
    return _C.reserve_draws(generator, device, draws)


def seed_words(seed: tuple[int, int]) -> np.ndarray:
    """(seed, offset) in the form in which a program takes them."""
    return np.array(seed, np.uint64).view(np.uint32)


def find_generator(args: Any, kwargs: Any) -> torch.Generator | None:
    """The generator given to a call, if any."""
    for x in (*kwargs.values(), *args):
        if isinstance(x, torch.Generator):
            return x
    return None
