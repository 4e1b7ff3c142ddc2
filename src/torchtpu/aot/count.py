"""What a JAX program computes and moves, counted from its jaxpr: each operation, as often as it runs.

Everything is global: the sum over all devices. What a loop's body does counts as often as the loop goes round.

Bytes follow a model of XLA's fusion. In each body, these read their arguments from memory and write their results:
products and convolutions, gathers, scatters, sorts, cumulative sums, kernels, and the body itself, whose arguments and
results (what a loop carries, for one) are in memory. Elementwise operations are fused with what they read, up to the
result of a reduction, which has to be complete before anything reads it: a value counts only where it crosses from one
such group to another. An operation joins the product before it, never the one after it. Reshapes, transposes and
broadcasts are free; what is computed from constants alone is computed where it is needed. A gather or a slice reads
what it takes, and an update in place writes what it changes. Padding to tiles is not counted, nor the reuse of what
stays in a chip's vector memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torchtpu.aot.costs import flops, is_transcendental, passes
from torchtpu.aot.walk import Level, Node, flatten

__all__ = ["Counts", "OpCost", "ScopeCost", "count"]


@dataclass(frozen=True)
class OpCost:
    """An equation of a program.

    Attributes:
        scope: names of ``jax.named_scope`` around it, joined by ``/``.
        phase: ``"forward"``, ``"backward"`` or ``"recompute"`` (again, for ``jax.checkpoint``).
        primitive: JAX's name.
        flops: of all its executions on all devices.
        passes: times the matrix unit goes over the operands: 3 or 6 for float32 at higher precisions, else 1.
        transcendentals: exponentials, roots and the like, of all executions.
        bytes_read, bytes_written: from and to memory, of all executions on all devices.
        executions: how often it runs on a device.
        dtype: of its operands; the widest.
        shapes: of its operands, for one execution.
        is_mxu: whether the matrix unit does it.
        group: number of the fusion that it is part of.
    """

    scope: str
    phase: str
    primitive: str
    flops: float
    passes: int
    transcendentals: float
    bytes_read: float
    bytes_written: float
    executions: int
    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    is_mxu: bool
    group: int


@dataclass(frozen=True)
class ScopeCost:
    """What a scope, with those inside it, takes. Fields as in ``OpCost``; ``mxu_flops`` are those of products."""

    scope: str
    phase: str
    flops: float
    mxu_flops: float
    bytes_read: float
    bytes_written: float


@dataclass
class Counts:
    """What ``count`` found.

    Attributes:
        ops: the equations, in the order in which they run.
        assumptions: sentences on what could not be counted exactly.
    """

    ops: list[OpCost] = field(default_factory=list)
    assumptions: list[str] = field(default_factory=list)

    def flops(self, *phases: str) -> float:
        """All operations, or those of some phases."""
        return sum(x.flops for x in self._of(phases))

    def mxu_flops(self, *phases: str) -> float:
        """Operations of products and convolutions, without repeated passes."""
        return sum(x.flops for x in self._of(phases) if x.is_mxu)

    def mxu_flops_by_dtype(self) -> dict[str, float]:
        """Operations of products and convolutions by the type of their operands."""
        found: dict[str, float] = {}
        for x in self.ops:
            if x.is_mxu:
                found[x.dtype] = found.get(x.dtype, 0.0) + x.flops
        return found

    def bytes(self, *phases: str) -> float:
        """Bytes read and written."""
        return sum(x.bytes_read + x.bytes_written for x in self._of(phases))

    def by_scope(self, depth: int | None = None) -> list[ScopeCost]:
        """Costs by scope and phase, cut to the first ``depth`` names, in the order in which they first run."""
        found: dict[tuple[str, str], list[float]] = {}
        for x in self.ops:
            scope = x.scope if depth is None else "/".join(x.scope.split("/")[:depth])
            sums = found.setdefault((scope, x.phase), [0.0] * 4)
            for i, value in enumerate((x.flops, x.flops * x.is_mxu, x.bytes_read, x.bytes_written)):
                sums[i] += value
        return [ScopeCost(*key, *sums) for key, sums in found.items()]

    def _of(self, phases: tuple[str, ...]) -> Iterable[OpCost]:
        return (x for x in self.ops if not phases or x.phase in phases)


def count(program: Any) -> Counts:
    """Count what a program computes and moves.

    Args:
        program: what ``jax.make_jaxpr`` returns, or ``jax.jit(f).trace(...).jaxpr``.
    """
    counter = _Counter()
    level = flatten(program, counter.assume)
    counter.add(level, [True] * len(level.outputs), executions=1, shards=1)
    return Counts(counter.ops, list(counter.assumptions))


class _Counter:
    def __init__(self) -> None:
        self.ops: list[OpCost] = []
        self.assumptions: dict[str, None] = {}
        self.groups = 0

    def assume(self, sentence: str) -> None:
        self.assumptions[sentence] = None

    def add(self, level: Level, wanted: list[bool], executions: int, shards: int) -> None:
        """Count a body: ``wanted`` says which of its results anything uses."""
        live, wanted_of = level.live(wanted)
        fusions = _Fusions(level, live, wanted)
        numbers: dict[int, int] = {}
        for node in live:
            if node.kind == "control":
                self._control(node, wanted_of[node.index], executions, shards)
                continue
            if node.kind == "alias":
                continue
            number = numbers.setdefault(fusions.group(node), self.groups + len(numbers))
            self.ops.append(self._cost(node, fusions, number, executions, shards))
        self.groups += len(numbers)

    def _control(self, node: Node, wanted: list[bool], executions: int, shards: int) -> None:
        if node.alternatives:  # a conditional: the branch with most work
            tried = []
            for body in node.bodies:
                other = _Counter()
                other.add(body, wanted, executions, shards)
                tried.append((sum(x.flops for x in other.ops), len(other.ops), body))
            self.assume("of the branches of a conditional, the one with most work is counted, every time")
            self.add(max(tried, key=lambda x: x[:2])[2], wanted, executions, shards)
            return
        for body in node.bodies:
            needed = node.wanted_of_body(body, wanted)
            self.add(body, needed, executions * node.trips, shards * node.shards)

    def _cost(self, node: Node, fusions: _Fusions, group: int, executions: int, shards: int) -> OpCost:
        eqn, times = node.eqn, executions * shards
        read, written = fusions.traffic(node)
        primitive = eqn.primitive.name
        work = node.kernel_flops if node.kind == "kernel" else flops(eqn)
        dtypes = [v.aval.dtype for v in eqn.invars if hasattr(v.aval, "dtype") and v.aval.shape] or [
            v.aval.dtype for v in eqn.outvars if hasattr(v.aval, "dtype")
        ]
        floats = [d for d in dtypes if getattr(d, "kind", "V") not in "iub"] or dtypes
        return OpCost(
            scope=node.scope,
            phase=node.phase,
            primitive=node.name or primitive,
            flops=work * times,
            passes=passes(eqn) if node.kind == "mxu" else 1,
            transcendentals=times * work if is_transcendental(primitive) else node.transcendentals * times,
            bytes_read=float(read * times),
            bytes_written=float(written * times),
            executions=executions,
            dtype=str(max(floats, key=lambda d: getattr(d, "itemsize", 0))) if floats else "",
            shapes=tuple(tuple(v.aval.shape) for v in eqn.invars if hasattr(v.aval, "shape")),
            is_mxu=node.kind == "mxu" or (node.kind == "kernel" and work > 0),
            group=group,
        )


class _Fusions:
    """Which operations of a body are one fusion, and what each reads and writes.

    An operation is at a stage: one after those whose results have to be complete before it, else that of what it reads.
    Operations of one stage that read from each other are a fusion, of which at most one is a product.
    """

    def __init__(self, level: Level, live: list[Node], wanted: list[bool]) -> None:
        self._parent = {node.index: node.index for node in live}
        self._has_product = {node.index: node.kind == "mxu" for node in live}
        self._read: set[tuple[int, int]] = set()
        stage: dict[int, int] = {}
        for node in live:
            before = [v.root.producer for v in node.inputs if v.root.producer is not None]
            closed = [p for p in before if p.kind not in ("fused", "mxu", "alias")]
            stage[node.index] = max([stage[p.index] + (p in closed) for p in before], default=0)
            if node.kind not in ("fused", "reduce"):
                stage[node.index] += node.kind != "alias" and bool(before)
                continue
            for p in before:
                if p not in closed and stage[p.index] == stage[node.index]:
                    self._join(p.index, node.index)
        self._leaving: set[int] = {id(v.root) for v, w in zip(level.outputs, wanted, strict=True) if w}
        for node in live:
            for value in node.inputs:
                maker = value.root.producer
                if maker is not None and (node.kind == "control" or self.group(maker) != self.group(node)):
                    self._leaving.add(id(value.root))

    def group(self, node: Node) -> int:
        """The number of a node's fusion."""
        at = node.index
        while self._parent[at] != at:
            self._parent[at] = at = self._parent[self._parent[at]]
        return at

    def traffic(self, node: Node) -> tuple[int, int]:
        """Bytes that a node reads from memory and writes to it."""
        if node.kind == "kernel" and node.kernel_bytes is not None:
            return node.kernel_bytes
        read = 0
        for i, value in enumerate(node.inputs):
            root = value.root
            inside = root.producer is not None and self.group(root.producer) == self.group(node)
            key = (self.group(node), id(root))
            if inside or root.free or (key in self._read and not node.partial):
                continue
            self._read.add(key)
            read += node.reads.get(i, root.bytes)
        if node.kind == "fused" and all(v.root.free for v in node.outputs):
            return read, 0
        written = sum(v.bytes for v in node.outputs if id(v) in self._leaving) if node.writes is None else node.writes
        return read, written

    def _join(self, a: int, b: int) -> None:
        first, second = (self._find(x) for x in (a, b))
        if first == second or (self._has_product[first] and self._has_product[second]):
            return
        self._parent[second] = first
        self._has_product[first] |= self._has_product[second]

    def _find(self, at: int) -> int:
        while self._parent[at] != at:
            self._parent[at] = at = self._parent[self._parent[at]]
        return at
