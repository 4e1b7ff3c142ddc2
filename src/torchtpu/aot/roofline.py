"""How long a step takes at best, from what it computes, moves and exchanges, and the published peaks of a TPU.

An estimate to compare programs and machines with, not a prediction of a stopwatch: no program reaches the peaks, and
what is left out (see ``Prediction.assumptions``) only adds time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torchtpu.aot.count import Counts
from torchtpu.aot.hlo import Collective, Memory
from torchtpu.aot.topology import Topology
from torchtpu.aot.torus import Torus

__all__ = ["CollectiveTime", "Prediction", "ScopeTime", "predict"]


@dataclass(frozen=True)
class ScopeTime:
    """Time of a scope on a device, without communication.

    Attributes:
        scope, phase: as in ``OpCost``.
        mxu_seconds: of its products at the peak rates of their types.
        hbm_seconds: of its traffic with memory at the peak bandwidth.
        seconds: the two together, each as far as the other does not hide it.
        flops: of its products, on a device.
        hbm_bytes: to and from memory, on a device.
    """

    scope: str
    phase: str
    mxu_seconds: float
    hbm_seconds: float
    seconds: float
    flops: float
    hbm_bytes: float


@dataclass(frozen=True)
class CollectiveTime:
    """Time of a collective.

    Attributes:
        kind, scope, phase, bytes, group_size, executions, asynchronous: as in ``Collective``.
        seconds: of all executions.
        over: the rings and lines that it uses.
    """

    kind: str
    scope: str
    phase: str
    bytes: int
    group_size: int
    executions: int
    asynchronous: bool
    seconds: float
    over: str


@dataclass
class Prediction:
    """Estimates for a step. ``dataclasses.asdict`` makes it plain data.

    Attributes:
        topology, devices: the machine.
        estimate: always True: none of the times is measured.
        mxu_seconds, hbm_seconds: of products and of memory alone.
        compute_seconds: of both together, scope by scope.
        ici_seconds: of communication alone.
        serial_seconds: everything after everything else.
        overlapped_seconds: communication beside computation, perfectly.
        bound: what the step waits for if it overlaps: ``"MXU"``, ``"HBM"`` or ``"ICI"``.
        model_flops: of all devices, without what is computed again.
        hardware_flops: with it.
        mfu_serial, mfu_overlapped: model FLOPs over the peak (bf16) in each of the two times.
        tokens_per_second_serial, tokens_per_second_overlapped: None if the number of tokens is not given.
        scopes: times of computation, the longest first.
        collectives: times of communication, the longest first.
        assumptions: sentences on what the figures rest on.
    """

    topology: str
    devices: int
    mxu_seconds: float
    hbm_seconds: float
    compute_seconds: float
    ici_seconds: float
    serial_seconds: float
    overlapped_seconds: float
    bound: str
    model_flops: float
    hardware_flops: float
    mfu_serial: float
    mfu_overlapped: float
    tokens_per_second_serial: float | None
    tokens_per_second_overlapped: float | None
    scopes: list[ScopeTime]
    collectives: list[CollectiveTime]
    assumptions: list[str] = field(default_factory=list)
    estimate: bool = True


def predict(
    counts: Counts,
    collectives: Iterable[Collective],
    topology: Topology,
    *,
    memory: Sequence[Memory] | None = None,
    coordinates: Sequence[Sequence[int]] | None = None,
    tokens: float | None = None,
    model_flops: float | None = None,
) -> Prediction:
    """Estimate the time of a step.

    Args:
        counts: of the whole program (``count.count``).
        collectives: of the compiled program (``Hlo.collectives``).
        topology: the machine.
        memory: traffic of a device with HBM as it was compiled (``Hlo.memory``); without it, the bytes of ``counts``
            over the number of devices.
        coordinates: the chip of each partition, in the order of the mesh
            (``[d.coords for d in mesh.devices.flat]``); without it, as JAX lists the devices.
        tokens: of a step, all devices together.
        model_flops: of a step, all devices together; without it, the products of the forward and backward pass.

    Raises:
        ValueError: ``coordinates`` are not as many as the topology has devices.
    """
    if coordinates is not None and len(coordinates) != topology.devices:
        raise ValueError(f"{len(coordinates)} coordinates for the {topology.devices} devices of {topology.name}")
    chip, devices = topology.chip, topology.devices
    assumptions = [
        *counts.assumptions,
        *topology.notes,
        f"Rates are the published peaks of {chip.generation}; no program reaches them.",
        f"The work of each operation is spread evenly over the {devices} devices.",
        "Elementwise arithmetic is taken to be hidden behind memory or products; latency of starting operations is 0.",
        "Float32 products go over the matrix unit as often as their precision says: 1, 3 or 6 times.",
    ]
    scopes = _scopes(counts, topology, memory)
    if memory is None:
        assumptions.append(
            "Memory traffic is that of the whole program over the devices, by a model of fusion: what each device "
            "reads whole, such as weights that are not sharded, is counted too low."
        )
    else:
        assumptions.append("Memory traffic is that of the compiled program; within a scope it overlaps with products.")
    if coordinates is None:
        assumptions.append("Partitions of the program are taken to be on the devices in JAX's order.")
    times = _collectives(collectives, Torus(topology, coordinates), assumptions)
    mxu, hbm = sum(x.mxu_seconds for x in scopes), sum(x.hbm_seconds for x in scopes)
    compute, ici = sum(x.seconds for x in scopes), sum(x.seconds for x in times)
    serial, overlapped = compute + ici, max(compute, ici)
    model = counts.model_flops() if model_flops is None else model_flops
    if model_flops is None:
        assumptions.append("Model FLOPs are the products of the forward and backward pass, as counted.")
    by_memory = sum(x.seconds for x in scopes if x.hbm_seconds > x.mxu_seconds)
    bound = "ICI" if ici > compute else "HBM" if 2 * by_memory > compute else "MXU"
    peak = devices * chip.peak("bfloat16")
    return Prediction(
        topology=topology.name,
        devices=devices,
        mxu_seconds=mxu,
        hbm_seconds=hbm,
        compute_seconds=compute,
        ici_seconds=ici,
        serial_seconds=serial,
        overlapped_seconds=overlapped,
        bound=bound,
        model_flops=model,
        hardware_flops=counts.mxu_flops(),
        mfu_serial=model / peak / serial if serial else 0.0,
        mfu_overlapped=model / peak / overlapped if overlapped else 0.0,
        tokens_per_second_serial=tokens / serial if tokens and serial else None,
        tokens_per_second_overlapped=tokens / overlapped if tokens and overlapped else None,
        scopes=scopes,
        collectives=times,
        assumptions=list(dict.fromkeys(assumptions)),
    )


def _scopes(counts: Counts, topology: Topology, memory: Sequence[Memory] | None) -> list[ScopeTime]:
    """Times of computation by scope: of each fusion, or with the compiler's traffic of each scope, the longer of the
    matrix unit's and the memory's."""
    chip, devices = topology.chip, topology.devices
    flops: defaultdict[tuple[str, str], float] = defaultdict(float)
    mxu: defaultdict[tuple[str, str], float] = defaultdict(float)
    moved: defaultdict[tuple[str, str], float] = defaultdict(float)
    fused: dict[int, list[float]] = {}
    owner: dict[int, tuple[str, str]] = {}
    for op in counts.ops:
        where = op.scope, op.phase
        seconds = op.flops * op.passes / chip.peak(op.dtype) / devices if op.is_mxu else 0.0
        size = (op.bytes_read + op.bytes_written) / devices
        flops[where] += op.flops / devices * op.is_mxu
        mxu[where] += seconds
        moved[where] += size
        both = fused.setdefault(op.group, [0.0, 0.0])
        both[0] += seconds
        both[1] += size / chip.hbm_bandwidth
        if op.is_mxu or op.group not in owner:
            owner[op.group] = where
    total: defaultdict[tuple[str, str], float] = defaultdict(float)
    if memory is None:
        for group, both in fused.items():
            total[owner[group]] += max(both)
    else:
        moved.clear()
        for m in memory:
            moved[m.scope, m.phase] += m.bytes
        for where in {*mxu, *moved}:
            total[where] = max(mxu[where], moved[where] / chip.hbm_bandwidth)
    found = [
        ScopeTime(*where, mxu[where], moved[where] / chip.hbm_bandwidth, total[where], flops[where], moved[where])
        for where in {**mxu, **moved, **total}
    ]
    return sorted(found, key=lambda x: -x.seconds)


def _collectives(collectives: Iterable[Collective], torus: Torus, assumptions: list[str]) -> list[CollectiveTime]:
    found = []
    for c in collectives:
        route = torus.route(c.kind, c.bytes, c.groups)
        if not route.regular:
            assumptions.append("A collective over chips that form no box on the torus is priced as a line of them.")
        if c.kind == "ragged-all-to-all":
            assumptions.append("A ragged all-to-all is priced as one of its full buffer, spread evenly.")
        values = c.kind, c.scope, c.phase, c.bytes, c.group_size, c.executions, c.asynchronous
        found.append(CollectiveTime(*values, seconds=route.seconds * c.executions, over=route.over))
    if found:
        chip = torus.topology.chip
        assumptions.append(
            f"A link carries {chip.link_bandwidth / 1e9:g} GB/s in one direction; collectives use the best algorithm "
            "for their rings and lines, one after another, and take at least 1 us for a hop."
        )
        if chip.devices_per_chip > 1:
            assumptions.append(
                "Exchange between the devices of one chip takes no time: its bandwidth is not published."
            )
    return sorted(found, key=lambda x: -x.seconds)
