"""How long a collective takes on the links of a torus of chips.

The bandwidths are those of ``chips``; every formula takes all groups of the collective to run at once, as they do.

* all-gather, reduce-scatter: a chip takes in all but its own part of the array, over every dimension that its group
  spans at once: both directions of a ring, one link at the end of a line. An all-reduce is the one and then the other.
* all-to-all: what goes through the middle of each dimension, where the load is the highest: of a ring of n chips
  n x bytes / 8 over a link, of a line n x bytes / 4.
* collective-permute: each pair by the shortest way, one dimension after another; the most loaded link counts.

A group that skips chips of a dimension shares its links with the groups in between. The devices of one chip share the
chip's links, and exchange among themselves at no cost. No collective takes less than a microsecond for each hop of its
longest way. https://jax-ml.github.io/scaling-book/sharding has the formulas of rings and this latency, and shows how
far from the links' rates real times are: gathering 33.6 MB over a line of 4 chips of v5e took 680 us, where this gives
503, and 128 kB took 8 us, where this gives 3.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torchtpu.aot.topology import Topology

__all__ = ["Route", "Torus"]

LATENCY = 1e-6
"""Seconds for a hop."""


@dataclass(frozen=True)
class Route:
    """What a collective uses.

    Attributes:
        seconds: of one execution.
        over: the rings and lines of its group, in words.
        regular: whether the group is a box of chips; if not, the time is a cruder estimate.
    """

    seconds: float
    over: str
    regular: bool = True


@dataclass(frozen=True)
class _Side:
    """A dimension that a group spans: its number of chips, the distance between them, and whether it is a ring."""

    size: int
    stride: int
    ring: bool

    @property
    def links(self) -> float:
        """Links into a chip at the end, as the groups in between leave of them."""
        return (2 if self.ring else 1) / self.stride

    @property
    def hops(self) -> int:
        return self.size // 2 if self.ring else (self.size - 1) * self.stride


class Torus:
    """The links of a topology, and where the partitions of a program are on it.

    Args:
        topology: the machine.
        coordinates: the chip of each partition; as the devices of the topology are listed, if left out.
    """

    def __init__(self, topology: Topology, coordinates: Sequence[Sequence[int]] | None = None) -> None:
        self.topology = topology
        size = len(topology.extent)
        given = topology.coordinates() if coordinates is None else coordinates
        self.places = [tuple(int(x) for x in at)[:size] for at in given]
        self.bandwidth = topology.chip.link_bandwidth
        self.route = functools.lru_cache(maxsize=1 << 12)(self._route)

    def _route(self, kind: str, size: int, groups: tuple[tuple[int, ...], ...]) -> Route:
        """The time of one execution.

        Args:
            kind: as in ``Collective``.
            size: its bytes.
            groups: its groups, or pairs of source and target.
        """
        if kind == "collective-permute":
            return self._permute(size, groups)
        found = [self._group(kind, size, g) for g in {groups[0], groups[-1]}] if groups else []
        return max(found, key=lambda r: r.seconds, default=Route(0.0, "no devices"))

    def _group(self, kind: str, size: int, group: tuple[int, ...]) -> Route:
        places = [self.places[i] for i in group]
        chips = sorted(set(places))
        if len(chips) < 2:
            return Route(0.0, "one chip")
        sides = self._sides(chips)
        if sides is None:
            # Neighbours in the order of the group are not neighbours on the torus: a line over the longest way.
            longest = max(self._distance(a, b) for a, b in zip(places, [*places[1:], places[0]], strict=True))
            sides, regular = [_Side(len(chips), max(1, longest), False)], False
        else:
            regular = True
        # Of the devices of a chip, those that are in other groups use the same links.
        sharing = self.topology.chip.devices_per_chip / (len(places) / len(chips))
        if kind in ("all-to-all", "ragged-all-to-all"):
            volume = size * self.topology.chip.devices_per_chip
            seconds = max(_exchange(s) for s in sides) * volume / self.bandwidth
        else:
            part = (len(chips) - 1) / len(chips)
            rounds = 2 if kind == "all-reduce" else 1
            seconds = rounds * size * part * sharing / (self.bandwidth * sum(s.links for s in sides))
        over = " x ".join(f"{'ring' if s.ring else 'line'} of {s.size}" for s in sides)
        return Route(max(seconds, LATENCY * sum(s.hops for s in sides)), over, regular)

    def _sides(self, chips: Sequence[tuple[int, ...]]) -> list[_Side] | None:
        """The dimensions of a box of chips; None if they are no box with equal distances."""
        values = [sorted({at[i] for at in chips}) for i in range(len(self.topology.extent))]
        if math.prod(len(v) for v in values) != len(chips):
            return None
        sides = []
        for v, extent, wraps in zip(values, self.topology.extent, self.topology.wraparound, strict=True):
            if len(v) == 1:
                continue
            steps = {b - a for a, b in itertools.pairwise(v)}
            if len(steps) > 1:
                return None
            stride = steps.pop()
            sides.append(_Side(len(v), stride, wraps and len(v) * stride == extent))
        return sides

    def _permute(self, size: int, pairs: tuple[tuple[int, ...], ...]) -> Route:
        loads: Counter[tuple[tuple[int, ...], int, int]] = Counter()
        longest = 0
        for source, target in pairs:
            hops = 0
            at = list(self.places[source])
            for axis, goal in enumerate(self.places[target]):
                steps, direction = self._steps(axis, at[axis], goal)
                for _ in range(steps):
                    loads[tuple(at), axis, direction] += 1
                    at[axis] = (at[axis] + direction) % self.topology.extent[axis]
                hops += steps
            longest = max(longest, hops)
        load = max(loads.values(), default=0)
        if not load:
            return Route(0.0, "one chip")
        return Route(max(load * size / self.bandwidth, LATENCY * longest), f"{longest} hops, {load} on a link")

    def _steps(self, axis: int, start: int, goal: int) -> tuple[int, int]:
        """Hops along a dimension and their direction."""
        extent = self.topology.extent[axis]
        ahead = (goal - start) % extent if self.topology.wraparound[axis] else goal - start
        if not self.topology.wraparound[axis]:
            return abs(ahead), 1 if ahead > 0 else -1
        return (ahead, 1) if ahead <= extent - ahead else (extent - ahead, -1)

    def _distance(self, a: Sequence[int], b: Sequence[int]) -> int:
        return sum(self._steps(i, x, y)[0] for i, (x, y) in enumerate(zip(a, b, strict=True)))


def _exchange(side: _Side) -> float:
    """Load on the middle link of a dimension in an all-to-all, over the bytes of a chip."""
    half = (side.size // 2) * -(-side.size // 2) / side.size
    return half * side.stride / (2 if side.ring else 1)
