"""What the generations of TPU can do, from public sources.

Figures are the published peaks of a whole chip, which the table divides by the JAX devices of a chip: a device is what
JAX, and the compiler, place a program's shard on. Peaks are not reached: a program's real figures lie below them.

Sources, by the names that ``Chip.sources`` uses:

* "v4", "v5e", "v5p", "v6e", "tpu7x": Google's page on the generation,
  ``https://docs.cloud.google.com/tpu/docs/<generation>``.
* "book": "How to Scale Your Model", part 2, ``https://jax-ml.github.io/scaling-book/tpus``.
* "jax": JAX's table for Pallas, ``jax/_src/pallas/mosaic/tpu_info.py`` of JAX 0.10.2.
* "libtpu": what the compiler (libtpu 0.0.52) says in its message when a program does not fit.

Google publishes interconnect as a total for a chip, in both directions: 1200 GB/s for TPU7x, 1200 for v5p, 800 for v6e,
400 for v5e. A chip of a 3D torus has six links and one of a 2D torus has four, so a link carries in one direction
1200 / 6 / 2 = 100, 100, 800 / 4 / 2 = 100 and 400 / 4 / 2 = 50 GB/s, which is what the book says as well. No page of
v4 states it; 45 GB/s is from the book.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["CHIPS", "Chip", "number_kind"]

_GIB = 2**30
_MIB = 2**20
_PAGE = "https://docs.cloud.google.com/tpu/docs/"
_BOOK = "https://jax-ml.github.io/scaling-book/tpus"
_JAX = "jax/_src/pallas/mosaic/tpu_info.py (JAX 0.10.2)"
_LIBTPU = "the compiler's message for a program that does not fit (libtpu 0.0.52)"


@dataclass(frozen=True)
class Chip:
    """A generation of TPU. What is "per device" is the chip's figure over ``devices_per_chip``.

    Attributes:
        generation: the compiler's name, such as ``"v6e"``.
        kind: what JAX calls a device (``jax.Device.device_kind``).
        cores: TensorCores of a chip.
        devices_per_chip: JAX devices of a chip; two cores that work as one ("megacore") are one device.
        flops: peak operations per second and device by kind of number: "bf16", and where known "int8" and "fp8".
        hbm_bytes: memory per device.
        usable_hbm_bytes: what the compiler lets a program have of it.
        hbm_bandwidth: bytes per second and device.
        vmem_bytes: on-chip vector memory per device.
        mxu: edge of the matrix unit.
        dimensions: of the torus: 2 or 3.
        link_bandwidth: bytes per second that one link of a chip carries in one direction. The devices of a chip share
            its links.
        wraps_at: a dimension has links around it when it is this long (2D), or, when every dimension is a multiple of
            it, all have (3D).
        host: extent in chips of the machine that libtpu compiles for by default.
        pod: chips in the largest machine.
        sizes: extents that Google's pages or its tool xpk list, from the smallest up to a full pod; for 3D tori a
            selection, since every box of 4 x 4 x 4 cubes can be had.
        sources: where the figures are from, by field.
        unknown: what no public source was found for.
    """

    generation: str
    kind: str
    cores: int
    devices_per_chip: int
    flops: Mapping[str, float]
    hbm_bytes: int
    usable_hbm_bytes: int
    hbm_bandwidth: float
    vmem_bytes: int
    mxu: int
    dimensions: int
    link_bandwidth: float
    wraps_at: int
    host: tuple[int, ...]
    pod: int
    sizes: tuple[str, ...]
    sources: Mapping[str, str]
    unknown: tuple[str, ...] = ()

    @property
    def links(self) -> int:
        """Links of a chip: two for each dimension of the torus."""
        return 2 * self.dimensions

    def peak(self, dtype: str) -> float:
        """Peak operations per second and device for products of a dtype, as NumPy names it.

        What the matrix unit has no rate for (or none is published) runs at the rate of bfloat16.
        """
        return self.flops.get(number_kind(dtype), self.flops["bf16"])


def number_kind(dtype: str) -> str:
    """Which rate of the matrix unit a dtype has: ``"bf16"``, ``"int8"`` or ``"fp8"``."""
    if dtype.startswith("float8"):
        return "fp8"
    return "int8" if dtype in ("int8", "uint8", "int4", "uint4") else "bf16"


_SIZES_2D = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_SIZES_3D = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16", "16x16x16")


CHIPS: dict[str, Chip] = {
    chip.generation: chip
    for chip in (
        Chip(
            generation="v4",
            kind="TPU v4",
            cores=2,
            devices_per_chip=2,  # libtpu compiles for single cores here, though a running JAX has megacore
            flops={"bf16": 275e12 / 2, "int8": 275e12 / 2},
            hbm_bytes=16 * _GIB,
            usable_hbm_bytes=int(15.25 * _GIB),
            hbm_bandwidth=1200e9 / 2,
            vmem_bytes=16 * _MIB,
            mxu=128,
            dimensions=3,
            link_bandwidth=45e9,
            wraps_at=4,
            host=(2, 2, 1),
            pod=4096,
            sizes=_SIZES_3D,
            sources={
                "flops, hbm_bytes, hbm_bandwidth, pod": _PAGE + "v4",
                "link_bandwidth, wraps_at": _BOOK,
                "vmem_bytes, mxu": _JAX,
                "usable_hbm_bytes": _LIBTPU,
            },
            unknown=("fp8 (no unit for it)", "Google's own figure for a link"),
        ),
        Chip(
            generation="v5e",
            kind="TPU v5 lite",
            cores=1,
            devices_per_chip=1,
            flops={"bf16": 197e12, "int8": 393e12},
            hbm_bytes=16 * _GIB,
            usable_hbm_bytes=int(15.75 * _GIB),
            hbm_bandwidth=819e9,
            vmem_bytes=128 * _MIB,
            mxu=128,
            dimensions=2,
            link_bandwidth=50e9,
            wraps_at=16,
            host=(2, 2),
            pod=256,
            sizes=_SIZES_2D,
            sources={
                "flops, hbm_bytes, hbm_bandwidth, link_bandwidth, pod": _PAGE + "v5e",
                "wraps_at": _BOOK,
                "vmem_bytes, mxu": _JAX,
                "usable_hbm_bytes": _LIBTPU,
            },
            unknown=("fp8",),
        ),
        Chip(
            generation="v5p",
            kind="TPU v5",
            cores=2,
            devices_per_chip=1,
            flops={"bf16": 459e12, "int8": 918e12, "fp8": 459e12},
            hbm_bytes=96 * _GIB,
            usable_hbm_bytes=int(95.73 * _GIB),
            hbm_bandwidth=2765e9,
            vmem_bytes=2 * 64 * _MIB,
            mxu=128,
            dimensions=3,
            link_bandwidth=100e9,
            wraps_at=4,
            host=(2, 2, 1),
            pod=8960,
            sizes=(*_SIZES_3D, "16x16x24", "16x20x28"),
            sources={
                "flops (bf16, fp8), hbm_bytes, hbm_bandwidth, link_bandwidth, pod": _PAGE + "v5p",
                "flops (int8), wraps_at": _BOOK,
                "vmem_bytes, mxu": _JAX,
                "usable_hbm_bytes": _LIBTPU,
            },
        ),
        Chip(
            generation="v6e",
            kind="TPU v6 lite",
            cores=1,
            devices_per_chip=1,
            flops={"bf16": 918e12, "int8": 1836e12, "fp8": 918e12},
            hbm_bytes=32 * _GIB,
            usable_hbm_bytes=int(31.24 * _GIB),
            hbm_bandwidth=1638e9,
            vmem_bytes=128 * _MIB,
            mxu=256,
            dimensions=2,
            link_bandwidth=100e9,
            wraps_at=16,
            host=(2, 2),
            pod=256,
            sizes=_SIZES_2D,
            sources={
                "flops (bf16, int8), hbm_bytes, hbm_bandwidth, link_bandwidth, pod, mxu": _PAGE + "v6e",
                "flops (fp8)": _PAGE + "tpu7x",
                "wraps_at": _BOOK,
                "vmem_bytes": _JAX,
                "usable_hbm_bytes": _LIBTPU,
            },
        ),
        Chip(
            generation="tpu7x",
            kind="TPU7x",
            cores=2,
            devices_per_chip=2,
            flops={"bf16": 2307e12 / 2, "fp8": 4614e12 / 2},
            hbm_bytes=96 * _GIB,
            usable_hbm_bytes=int(94.74 * _GIB),
            hbm_bandwidth=7380e9 / 2,
            vmem_bytes=64 * _MIB,
            mxu=256,
            dimensions=3,
            link_bandwidth=100e9,
            wraps_at=4,
            host=(2, 2, 1),
            pod=9216,
            sizes=("1x1x1", *_SIZES_3D, "16x16x32", "16x24x24"),
            sources={
                "flops, hbm_bytes, hbm_bandwidth, link_bandwidth, pod": _PAGE + "tpu7x",
                "sizes": "https://github.com/AI-Hypercomputer/xpk, src/xpk/core/system_characteristics.py",
                "vmem_bytes, mxu": _JAX,
                "usable_hbm_bytes": _LIBTPU,
            },
            unknown=("int8", "bandwidth between the two devices of a chip", "wraps_at (taken to be as on v5p)"),
        ),
    )
}
"""The generations by name, the oldest first."""
