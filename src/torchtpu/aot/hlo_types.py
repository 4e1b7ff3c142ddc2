"""Types, layouts and groups of devices as XLA prints them."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["ArrayType", "arrays", "parse_groups"]

_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<= ]*)\](?:\{([^}]*)\})?")
_TILE = re.compile(r"T\(([\d,*]*)\)")
_SPACE = re.compile(r"S\((\d+)\)")
_BITS = re.compile(r"\d+")
_AXIS = re.compile(r"'?([^'=,\s]+)'?=(\d+)")
_GROUP_AXIS = re.compile(r"'?([^':,\s{}]+)'?(?::\((\d+)\)(\d+))?")


@dataclass(frozen=True)
class ArrayType:
    """An array with its layout: ``bf16[8,128]{1,0:T(8,128)(2,1)S(1)}``.

    Attributes:
        dtype: as XLA calls it.
        shape: sizes.
        order: dimensions from the fastest to the slowest.
        tile: sizes of a tile, over the fastest dimensions, the slowest of them first; empty without tiling.
        tiling: tiles and sub-tiles as printed.
        space: memory space: 0 is HBM, 1 is vector memory.
    """

    dtype: str
    shape: tuple[int, ...]
    order: tuple[int, ...]
    tile: tuple[int, ...] = ()
    tiling: str = ""
    space: int = 0

    @property
    def bytes(self) -> int:
        """Bytes of its elements."""
        return _bytes(math.prod(self.shape), self.dtype)

    @property
    def padded_bytes(self) -> int:
        """Bytes it takes: the dimensions under the tile are filled up to whole tiles."""
        sizes = [self.shape[i] for i in self.order]
        for i, tile in enumerate(reversed(self.tile[-len(sizes) :] if sizes else ())):
            sizes[i] = -(-sizes[i] // tile) * tile
        return _bytes(math.prod(sizes), self.dtype)


def _bytes(elements: int, dtype: str) -> int:
    if dtype == "pred":
        return elements
    found = _BITS.search(dtype)
    bits = int(found[0]) if found else 0  # tokens and opaque values have none
    return elements * bits // 8 if bits >= 8 else -(-elements * bits // 8)


def arrays(text: str) -> list[ArrayType]:
    """The arrays of a type, those of a tuple in order."""
    return [_array(*match.groups()) for match in _ARRAY.finditer(text)]


@functools.lru_cache(maxsize=1 << 14)
def _array(dtype: str, shape: str, layout: str | None) -> ArrayType:
    sizes = tuple(int(n.strip(" <=")) for n in shape.split(",") if n.strip())
    order_text, _, rest = (layout or "").partition(":")
    order = tuple(int(n) for n in order_text.split(",") if n) or tuple(reversed(range(len(sizes))))
    tile, space = _TILE.search(rest), _SPACE.search(rest)
    return ArrayType(
        dtype,
        sizes,
        order,
        tuple(int(n) for n in tile[1].split(",")) if tile and tile[1] and "*" not in tile[1] else (),
        rest[: space.start()] if space else rest,
        int(space[1]) if space else 0,
    )


@functools.lru_cache(maxsize=1 << 10)
def parse_groups(text: str, devices: int) -> tuple[tuple[int, ...], ...]:
    """Groups of devices.

    Args:
        text: the value of ``replica_groups``: lists (``{{0,1},{2,3}}``, ``{}`` for all devices in one), an iota
            (``[2,2]<=[2,2]T(1,0)``), or axes of a mesh (``mesh['a'=2,'b'=2] {'b'}``).
        devices: number of partitions of the program.

    Raises:
        ValueError: it is none of these.
    """
    text = text.strip()
    if text.startswith("{"):
        groups = [tuple(int(n) for n in g.split(",")) for g in re.findall(r"\{([\d,]+)\}", text.replace(" ", ""))]
        return tuple(groups) or (tuple(range(devices)),)
    if text.startswith("["):
        shape, _, order = text.partition("<=")
        return _rows(_iota(order).reshape(_numbers(shape)))
    if text.lstrip("@").startswith("mesh"):
        return _mesh_groups(text)
    raise ValueError(f"replica groups of an unknown form: {text[:80]}")


def _mesh_groups(text: str) -> tuple[tuple[int, ...], ...]:
    found = re.fullmatch(r"@?mesh[\[<](.*?)[\]>](?:,\s*device_ids=\((.*)\))?\s*\{(.*)\}", text)
    if found is None:
        raise ValueError(f"replica groups of an unknown form: {text[:80]}")
    axes = {name: int(size) for name, size in _AXIS.findall(found[1])}
    total = math.prod(axes.values())
    ids = np.arange(total)
    if found[2]:
        ids = _iota(found[2]) if found[2].startswith("[") else np.array(_numbers(found[2]))
    # An axis of which a part is used, 'x':(before)size, is three: what is before it, the part, and what comes after.
    sizes, chosen = [], []
    wanted = {name: (before, size) for name, before, size in _GROUP_AXIS.findall(found[3])}
    for name, full in axes.items():
        before, size = wanted.get(name, ("", ""))
        if size:
            sizes += [int(before), int(size), full // int(before) // int(size)]
            chosen.append(len(sizes) - 2)
        else:
            sizes.append(full)
            if name in wanted:
                chosen.append(len(sizes) - 1)
    rest = [i for i in range(len(sizes)) if i not in chosen]
    grid = ids.reshape(sizes).transpose([*rest, *chosen])
    return _rows(grid.reshape(-1, math.prod(sizes[i] for i in chosen)))


def _iota(text: str) -> np.ndarray:
    """The numbers of ``[2,4]T(1,0)``, in order."""
    shape, _, order = text.partition("T")
    grid = np.arange(math.prod(_numbers(shape))).reshape(_numbers(shape))
    return (grid.transpose(_numbers(order)) if order else grid).reshape(-1)


def _numbers(text: str) -> Sequence[int]:
    return [int(n) for n in re.findall(r"\d+", text)]


def _rows(grid: np.ndarray) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(row) for row in grid.tolist())
