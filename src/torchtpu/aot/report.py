"""What ``torchtpu check`` finds out about a model on a topology, as plain data."""

from __future__ import annotations

import dataclasses
import math
import numbers
from dataclasses import dataclass, field
from typing import Any

from torchtpu.aot.roofline import Prediction

__all__ = ["Finding", "Fit", "MemoryUse", "Report", "Timing"]


@dataclass
class MemoryUse:
    """HBM of one device, in bytes.

    Attributes:
        parameters, optimizer, buffers, inputs: of the step's arguments, as the plan divides them.
        outputs: results that share no memory with an argument.
        temporaries: activations, gradients and whatever else lives within the step, as the compiler laid it out.
        code: the program.
        total: all of these.
        available: what libtpu lets a program have on this chip.
        compiled: whether temporaries, outputs and code are the compiler's; if not, they are not known and count as 0.
    """

    parameters: int
    optimizer: int
    buffers: int
    inputs: int
    outputs: int
    temporaries: int
    code: int
    total: int
    available: int
    compiled: bool

    @property
    def fits(self) -> bool:
        """Whether the step fits."""
        return self.total <= self.available


@dataclass
class Fit:
    """Whether the step would fit another topology, which was not compiled for.

    Attributes:
        topology: its name.
        devices: how many it has.
        plan: the preset, resized.
        state_bytes: parameters, optimizer and buffers of a device, as the plan divides them.
        temporary_bytes: temporaries and outputs that were compiled, scaled by the number of devices: an estimate.
        fits: whether both are within the HBM.
    """

    topology: str
    devices: int
    plan: str
    state_bytes: int
    temporary_bytes: int
    fits: bool


@dataclass
class Finding:
    """Something that wastes the chip, or keeps the model off it.

    Attributes:
        kind: ``"tile"``, ``"padding"``, ``"layout"``, ``"dtype"``, ``"int64"``, ``"gather"``, ``"attention"``,
            ``"unsharded"``, ``"communication"``, ``"host"`` or ``"unsupported"``.
        what: the fact, with its figures.
        advice: what to change.
        module: dotted name of the module, layers of a loop as ``model.layers.0-31``.
        line: ``file:number`` of the model's source, or empty.
        code: that line's text.
        cost: the share of the step's time or of the HBM it takes, from 0 to 1; None where it is not known.
        count: how many places are alike.
    """

    kind: str
    what: str
    advice: str
    module: str = ""
    line: str = ""
    code: str = ""
    cost: float | None = None
    count: int = 1


@dataclass
class Timing:
    """Seconds that a part of the check took on this machine, and memory of the compiler in bytes."""

    build: float = 0.0
    trace: float = 0.0
    lower: float = 0.0
    compile: float = 0.0
    analyse: float = 0.0
    compiler_bytes: int = 0


@dataclass
class Report:
    """A model on a topology.

    Attributes:
        model: as it was named.
        parameters: their number, tied ones once.
        published: the publisher's number, or None; ``published_source`` says where from.
        kind: ``"train"``, ``"infer"`` or ``"decode"``.
        batch, sequence: of the whole step, all devices together.
        units: how many "tokens", "images" or "samples" (``unit``) a step takes.
        dtype: of the parameters.
        topology, chips, devices: the machine.
        plan: the sharding plan, as ``Plan.as_dict`` gives it; ``plan_name`` in short.
        loops: the layers that are compiled once: (name, how often they run).
        status: ``"ok"``; ``"memory"``: it does not fit; ``"fail"``: the compiler refused it; ``"lower"``: an operator
            has no form for TPUs; ``"crash"``: the compiler's process ended; ``"timeout"``.
        message: the error's text, empty when it compiled.
        memory: HBM of a device.
        prediction: times; None when it did not compile.
        findings: what wastes the chip, the costliest first.
        fits: other topologies of the generation, from the smallest.
        assumptions: what the figures rest on, in sentences.
        versions: of torch, jax, libtpu and torchtpu.
        saved: the folder that holds the executable, or empty.
        tried: with ``--shard auto``, the plans that were compiled: (plan, status, bytes per device, seconds).
    """

    model: str
    parameters: int
    published: int | None
    published_source: str
    kind: str
    batch: int
    sequence: int
    units: int
    unit: str
    dtype: str
    topology: str
    chips: int
    devices: int
    plan: dict[str, Any]
    plan_name: str
    loops: list[tuple[str, int]]
    status: str = "ok"
    message: str = ""
    memory: MemoryUse | None = None
    prediction: Prediction | None = None
    findings: list[Finding] = field(default_factory=list)
    fits: list[Fit] = field(default_factory=list)
    assumptions: list[str] = field(default_factory=list)
    timing: Timing = field(default_factory=Timing)
    versions: dict[str, str | None] = field(default_factory=dict)
    saved: str = ""
    tried: list[tuple[str, str, int, float]] = field(default_factory=list)

    @property
    def smallest(self) -> Fit | None:
        """The smallest topology of the generation that the step is estimated to fit."""
        return next((f for f in self.fits if f.fits), None)

    def to_json(self) -> dict[str, Any]:
        """Plain data that ``json.dumps(…, allow_nan=False)`` takes: what is not a finite number is None."""
        data: dict[str, Any] = _plain(dataclasses.asdict(self))
        if self.memory is not None:
            data["memory"]["fits"] = self.memory.fits
        data["smallest"] = self.smallest.topology if self.smallest else None
        return data


def _plain(value: Any) -> Any:
    """Lists for tuples, strings for keys, Python's numbers for NumPy's, None for infinity and what is no number."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, bool | str) or value is None:
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value) if math.isfinite(value) else None
    raise TypeError(f"a report holds {value!r}, which is no plain data")
