"""How much of a TPU's matrix unit the products of a program would use, told from its StableHLO.

A TPU holds arrays in tiles of 8 x 128 elements of 32 bits (16 x 128 of 16 bits), and multiplies in squares of 128 or
256: what is not a multiple is filled up with zeros, which cost as much. XLA may choose another order of dimensions,
or batch differently, so the figures are estimates. A product in the body of a loop, or in a function of the module,
counts once.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["LANES", "UNITS", "Product", "products"]

LANES = 128
UNITS = 128, 256
"""Edges of the matrix unit: up to v5p, and from v6e on."""

_TENSOR = r"tensor<((?:[^<>]|<[^<>]*>)*)>"
_TYPES = rf": \({_TENSOR}, {_TENSOR}\) -> {_TENSOR}"
_LIST = r"\[([\d, ]*)\]"
_DOT = re.compile(
    rf"stablehlo\.dot_general [^\n]*?(?:batching_dims = {_LIST} x {_LIST}, )?contracting_dims = {_LIST} x {_LIST}"
    rf"[^\n]*?{_TYPES}"
)
_CONVOLUTION = re.compile(
    r"stablehlo\.convolution\([^\n]*?dim_numbers = \[([^\]]*)\]x\[([^\]]*)\]->\[([^\]]*)\]"
    rf"[^\n]*?batch_group_count = (\d+)[^\n]*?feature_group_count = (\d+)[^\n]*?{_TYPES}"
)


@dataclass(frozen=True)
class Product:
    """A matrix product, or a convolution seen as one: ``batch`` times (m, k) by (k, n).

    Attributes:
        kind: ``"dot"`` or ``"convolution"``.
        dtype: element type of the operands, as StableHLO calls it.
    """

    kind: str
    batch: int
    m: int
    k: int
    n: int
    dtype: str

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        return 2 * self.batch * self.m * self.k * self.n

    @property
    def sublanes(self) -> int:
        """Rows of a tile for this type."""
        bits = re.search(r"\d+", self.dtype)
        return 8 * max(1, 32 // int(bits[0])) if bits else 8

    def wasted(self, unit: int) -> float:
        """The fraction of the work of a matrix unit of edge ``unit`` that goes into zeros."""
        filled = _up(self.m, self.sublanes) * _up(self.k, unit) * _up(self.n, unit)
        return 1 - self.m * self.k * self.n / filled if filled else 0.0

    def unaligned(self) -> list[str]:
        """The dimensions that are not multiples of a tile: ``"n 130 of 128"``."""
        wanted = {"m": self.sublanes, "k": LANES, "n": LANES}
        return [f"{name} {size} of {tile}" for name, tile in wanted.items() if (size := getattr(self, name)) % tile]

    def as_dict(self, count: int) -> dict[str, Any]:
        """Plain data; ``count`` says how often it occurs."""
        return {
            "kind": self.kind,
            **{name: getattr(self, name) for name in ("batch", "m", "k", "n", "dtype", "sublanes", "flops")},
            "count": count,
            "unaligned": self.unaligned(),
            **{f"wasted_{unit}": round(self.wasted(unit), 4) for unit in UNITS},
        }


def products(text: str) -> list[tuple[Product, int]]:
    """The products of a StableHLO module and how often each occurs, those with most work first."""
    found = Counter([*_dots(text), *_convolutions(text)])
    return sorted(found.items(), key=lambda item: -item[0].flops * item[1])


def _dots(text: str) -> Iterator[Product]:
    for match in _DOT.finditer(text):
        lhs_batch, rhs_batch, lhs_contracted, rhs_contracted = (_numbers(x) for x in match.groups()[:4])
        (lhs, dtype), (rhs, _) = _type(match[5]), _type(match[6])
        yield Product(
            "dot",
            batch=math.prod(lhs[i] for i in lhs_batch),
            m=math.prod(n for i, n in enumerate(lhs) if i not in (*lhs_batch, *lhs_contracted)),
            k=math.prod(lhs[i] for i in lhs_contracted),
            n=math.prod(n for i, n in enumerate(rhs) if i not in (*rhs_batch, *rhs_contracted)),
            dtype=dtype,
        )


def _convolutions(text: str) -> Iterator[Product]:
    for match in _CONVOLUTION.finditer(text):
        kernel_layout, result_layout = (re.split(r",\s*", x) for x in match.groups()[1:3])
        groups = int(match[4]) * int(match[5])
        (kernel, dtype), (result, _) = _type(match[7]), _type(match[8])
        features = kernel[kernel_layout.index("o")]
        yield Product(
            "convolution",
            batch=groups,
            m=math.prod(result) // result[result_layout.index("f")],
            k=math.prod(kernel) // features,
            n=features // groups,
            dtype=dtype,
        )


def _numbers(text: str | None) -> Sequence[int]:
    return [int(x) for x in text.split(",")] if text else []


def _type(text: str) -> tuple[list[int], str]:
    """Sizes and element type of ``10x12xf32``."""
    found = re.fullmatch(r"((?:\d+x)*)(.*)", text)
    assert found is not None  # the pattern takes any text
    return [int(n) for n in found[1].split("x") if n], found[2]


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
