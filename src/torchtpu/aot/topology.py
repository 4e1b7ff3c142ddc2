"""Machines by name: a generation of TPU and the extent of its torus in chips; and whether libtpu is there for them."""

from __future__ import annotations

import importlib.util
import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from torchtpu.aot.chips import CHIPS, Chip

__all__ = ["TOPOLOGIES", "Topology", "libtpu_missing", "require_libtpu", "standard_topologies"]

_NAME = re.compile(r"\d+(x\d+)*")


@dataclass(frozen=True)
class Topology:
    """A slice of TPU chips in a torus or mesh.

    Attributes:
        chip: the generation.
        extent: chips in each dimension; two or three numbers, as the generation has it.
        notes: what is unusual about it, as sentences; libtpu does not check that such a machine exists.
    """

    chip: Chip
    extent: tuple[int, ...]
    notes: tuple[str, ...] = ()

    @classmethod
    def parse(cls, name: str) -> Topology:
        """The topology of a name such as ``"v6e:4x4"`` or ``"tpu7x:4x4x8"``.

        Raises:
            ValueError: the generation is not known, or the extent is not of its form; the message says what is.
        """
        generation, _, text = name.strip().lower().partition(":")
        if generation not in CHIPS:
            raise ValueError(f"{name!r}: no generation {generation!r}; known are {', '.join(CHIPS)}")
        chip = CHIPS[generation]
        form = f"a topology of {generation} has {chip.dimensions} dimensions, such as {generation}:{chip.sizes[-5]}"
        if not _NAME.fullmatch(text) or text.count("x") != chip.dimensions - 1:
            raise ValueError(f"{name!r}: {form}")
        extent = tuple(int(n) for n in text.split("x"))
        if any(n == 0 for n in extent):
            raise ValueError(f"{name!r}: a dimension is empty; {form}")
        if math.prod(extent) > 1 and any(n % h for n, h in zip(extent, chip.host, strict=True)):
            host = "x".join(map(str, chip.host))
            raise ValueError(f"{name!r}: machines of {generation} are made of hosts of {host} chips, or one chip")
        return cls(chip, extent, tuple(_notes(chip, extent)))

    @property
    def name(self) -> str:
        """What the compiler calls it."""
        return f"{self.chip.generation}:{'x'.join(map(str, self.extent))}"

    @property
    def chips(self) -> int:
        """Number of chips."""
        return math.prod(self.extent)

    @property
    def devices(self) -> int:
        """Number of JAX devices."""
        return self.chips * self.chip.devices_per_chip

    @property
    def hosts(self) -> int:
        """Number of hosts (VMs), of which a single chip is one."""
        return max(1, self.chips // math.prod(self.chip.host))

    @property
    def wraparound(self) -> tuple[bool, ...]:
        """For each dimension, whether there are links from its end to its beginning.

        v5e and v6e: along a dimension of 16. v4, v5p and TPU7x: along all dimensions of a slice of whole cubes of
        4 x 4 x 4 chips. Source: https://jax-ml.github.io/scaling-book/tpus, "TPU Networking".
        """
        if self.chip.dimensions == 2:
            return tuple(n == self.chip.wraps_at for n in self.extent)
        whole = all(n % self.chip.wraps_at == 0 for n in self.extent)
        return (whole,) * len(self.extent)

    def coordinates(self) -> list[tuple[int, ...]]:
        """The chip of each device, in the order in which JAX lists the devices: host by host, the first dimension
        fastest."""
        hosts = [range(n // h) for n, h in zip(self.extent, self._host, strict=True)]
        inside = [range(h) for h in self._host]
        return [
            tuple(at * h + i for at, h, i in zip(corner[::-1], self._host, chip[::-1], strict=True))
            for corner in itertools.product(*reversed(hosts))
            for chip in itertools.product(*reversed(inside))
            for _ in range(self.chip.devices_per_chip)
        ]

    @property
    def _host(self) -> tuple[int, ...]:
        return self.chip.host if self.chips > 1 else (1,) * len(self.extent)


def standard_topologies(generation: str) -> list[Topology]:
    """The usual sizes of a generation, from the smallest to a full pod.

    Raises:
        ValueError: the generation is not known.
    """
    if generation not in CHIPS:
        raise ValueError(f"no generation {generation!r}; known are {', '.join(CHIPS)}")
    return [Topology.parse(f"{generation}:{size}") for size in CHIPS[generation].sizes]


TOPOLOGIES = {name: f"{name}:{'x'.join(map(str, CHIPS[name].host))}" for name in ("v5e", "v6e", "tpu7x")}
"""The topology of one host for each generation that the project supports, by generation."""


def libtpu_missing() -> str | None:
    """Why nothing can be compiled for a TPU here, or None."""
    if importlib.util.find_spec("libtpu") is None:
        return "compiling for a TPU needs libtpu, which is not installed (pip install 'torchtpu[tpu]')"
    return None


def require_libtpu() -> None:
    """Raise if libtpu is not installed.

    Raises:
        ModuleNotFoundError: it is not; the message says how to install it.
    """
    reason = libtpu_missing()
    if reason is not None:
        raise ModuleNotFoundError(reason, name="libtpu")


def _notes(chip: Chip, extent: Sequence[int]) -> list[str]:
    chips, size = math.prod(extent), "x".join(map(str, extent))
    if chips > chip.pod or (chip.dimensions == 2 and max(extent) > chip.wraps_at):
        return [f"{size} is larger than a pod of {chip.generation}, which has {chip.pod} chips: no such machine exists"]
    cubes = chip.dimensions == 3 and all(n % chip.wraps_at == 0 for n in extent)
    if "x".join(map(str, extent)) in chip.sizes or (cubes and list(extent) == sorted(extent)):
        return []
    return [f"{size} is not a usual size of {chip.generation}; usual are {', '.join(chip.sizes)}"]
