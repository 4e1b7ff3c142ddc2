"""Random numbers of the device, in the names of torch.cuda.random. A generator is a seed and a count of draws."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from torchtpu.device._index import device_index

__all__ = [
    "get_rng_state",
    "get_rng_state_all",
    "initial_seed",
    "manual_seed",
    "manual_seed_all",
    "seed",
    "seed_all",
    "set_rng_state",
    "set_rng_state_all",
]


def default_generators() -> tuple[torch.Generator, ...]:
    """The default generator of each device. Starts nothing."""
    from torchtpu import _C

    return tuple(_C.default_generator(i) for i in range(_C.device_count()))


def _default(device: Any) -> torch.Generator:
    from torchtpu import _C

    return _C.default_generator(device_index(device))


def manual_seed(seed: int) -> None:
    """Seed the current device's generator."""
    _default(None).manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    """Seed the generators of all devices."""
    for generator in default_generators():
        generator.manual_seed(int(seed))


def seed() -> None:
    """Seed the current device's generator with a random number."""
    _default(None).seed()


def seed_all() -> None:
    """Seed the generators of all devices with one random number."""
    generators = default_generators()
    manual_seed_all(generators[0].seed())


def initial_seed() -> int:
    """The seed of the current device's generator."""
    return _default(None).initial_seed()


def get_rng_state(device: Any = "tpu") -> torch.Tensor:
    """State of a device's generator, a ByteTensor on the CPU."""
    return _default(device).get_state()


def set_rng_state(new_state: torch.Tensor, device: Any = "tpu") -> None:
    """Put a device's generator in a state that get_rng_state() returned."""
    _default(device).set_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    """States of the generators of all devices."""
    return [generator.get_state() for generator in default_generators()]


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    """Put the generators of all devices in the states that get_rng_state_all() returned."""
    for generator, state in zip(default_generators(), new_states, strict=False):
        generator.set_state(state)
