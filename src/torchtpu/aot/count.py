"""What a JAX program computes and moves, counted from its jaxpr: each operation, as often as it runs.

Everything is global: the sum over all devices. What a loop's body does counts as often as the loop goes round.

Bytes follow a model of XLA's fusion. In each body, these have their results in memory: products and convolutions,
reductions, gathers, scatters, sorts, cumulative sums, kernels, and the body itself, whose arguments and results (what a
loop carries, for one) are in memory. An elementwise value between them is computed again by each operation that reads
it, from what it is made of, if that moves fewer bytes than to write and read it; else it is made by the operation
before it, of which it is then a part, as is what the body returns. Reshapes, transposes and broadcasts are free. A
gather or a slice reads what it takes, and an update in place writes what it changes. Padding to tiles is not counted,
nor the reuse of what stays in a chip's vector memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torchtpu.aot.costs import flops, is_transcendental, passes
from torchtpu.aot.walk import Level, Node, Value, flatten

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
        replicas: devices that each do the same under ``shard_map``, all of which are in ``flops``.
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
    replicas: int = 1


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

    def model_flops(self) -> float:
        """Operations of products of the forward and backward pass: once, however many devices do the same."""
        return sum(x.flops / x.replicas for x in self._of(("forward", "backward")) if x.is_mxu)

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
    counter.add(level, [True] * len(level.outputs), executions=1, shards=1, replicas=1)
    return Counts(counter.ops, list(counter.assumptions))


class _Counter:
    def __init__(self) -> None:
        self.ops: list[OpCost] = []
        self.assumptions: dict[str, None] = {}
        self.groups = 0

    def assume(self, sentence: str) -> None:
        self.assumptions[sentence] = None

    def add(self, level: Level, wanted: list[bool], executions: int, shards: int, replicas: int) -> None:
        """Count a body: ``wanted`` says which of its results anything uses."""
        live, wanted_of = level.live(wanted)
        fusions = _Fusions(level, live, wanted)
        numbers: dict[int, int] = {}
        for node in live:
            if node.kind == "control":
                self._control(node, wanted_of[node.index], executions, shards, replicas)
                continue
            if node.kind == "alias":
                continue
            number = numbers.setdefault(fusions.group(node), self.groups + len(numbers))
            self.ops.append(self._cost(node, fusions, number, executions, shards, replicas))
        self.groups += len(numbers)

    def _control(self, node: Node, wanted: list[bool], executions: int, shards: int, replicas: int) -> None:
        if node.alternatives:  # a conditional: the branch with most work
            tried = []
            for body in node.bodies:
                other = _Counter()
                other.add(body, wanted, executions, shards, replicas)
                tried.append((sum(x.flops for x in other.ops), len(other.ops), body))
            self.assume("of the branches of a conditional, the one with most work is counted, every time")
            self.add(max(tried, key=lambda x: x[:2])[2], wanted, executions, shards, replicas)
            return
        for body in node.bodies:
            needed = node.wanted_of_body(body, wanted)
            self.add(body, needed, executions * node.trips, shards * node.shards, replicas * node.replicas)

    def _cost(self, node: Node, fusions: _Fusions, group: int, executions: int, shards: int, replicas: int) -> OpCost:
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
            replicas=replicas,
        )


@dataclass(frozen=True)
class _Source:
    """Something in memory that is read: a value, or a slice of it."""

    value: Value
    key: int
    bytes: int


class _Fusions:
    """Which operations of a body are one fusion, and what each reads and writes.

    An operation is at a stage: one after those whose results have to be complete before it, else that of what it reads.
    Operations of one stage that read from each other are a fusion, of which at most one is a product.
    """

    def __init__(self, level: Level, live: list[Node], wanted: list[bool]) -> None:
        self._parent = {node.index: node.index for node in live}
        self._has_product = {node.index: node.kind == "mxu" for node in live}
        self._read: set[tuple[int, int]] = set()
        self._virtual: dict[int, list[_Source]] = {}  # values that are never in memory, and what they are made of
        self._leaving = {id(v.root) for v, w in zip(level.outputs, wanted, strict=True) if w}
        uses: Counter[int] = Counter()
        kept = set(self._leaving)
        for node in live:
            if node.kind != "alias":
                uses.update({id(v.root) for v in node.inputs})
            if node.kind in ("control", "kernel"):
                kept.update(id(v.root) for v in node.inputs)
        stage: dict[int, int] = {}
        for node in live:
            if node.kind == "alias":
                continue
            sources = self._sources(node)
            if node.kind == "fused" and self._recomputed(node, sources, uses, kept):
                self._virtual.update((id(v), sources) for v in node.outputs)
                stage[node.index] = 0
                continue
            before = [s.value.producer for s in sources if s.value.producer is not None]
            closed = [p for p in before if p.kind not in ("fused", "mxu")]
            stage[node.index] = max([stage[p.index] + (p in closed) for p in before], default=0)
            if node.kind not in ("fused", "reduce"):
                stage[node.index] += bool(before)
                continue
            for p in before:
                if p not in closed and stage[p.index] == stage[node.index]:
                    self._join(p.index, node.index)
        for node in live:
            for source in self._sources(node) if node.kind != "alias" and not self.virtual(node) else ():
                maker = source.value.producer
                if maker is not None and (node.kind == "control" or self.group(maker) != self.group(node)):
                    self._leaving.add(id(source.value))

    def group(self, node: Node) -> int:
        """The number of a node's fusion."""
        return self._find(node.index)

    def virtual(self, node: Node) -> bool:
        """Whether a node's result is never in memory."""
        return bool(node.outputs) and id(node.outputs[0]) in self._virtual

    def traffic(self, node: Node) -> tuple[int, int]:
        """Bytes that a node reads from memory and writes to it."""
        if node.kind == "kernel" and node.kernel_bytes is not None:
            return node.kernel_bytes
        if self.virtual(node):
            return 0, 0
        read, group = 0, self.group(node)
        for source in self._sources(node):
            maker = source.value.producer
            if (group, source.key) in self._read or (maker is not None and self.group(maker) == group):
                continue
            self._read.add((group, source.key))
            read += source.bytes
        return read, sum(
            v.bytes for v in node.outputs if id(v) in self._leaving
        ) if node.writes is None else node.writes

    def _sources(self, node: Node) -> list[_Source]:
        """What a node reads, with what values that are not in memory are made of."""
        found: dict[int, _Source] = {}
        for i, value in enumerate(node.inputs):
            root = value.root
            if root.free:
                continue
            for source in self._virtual.get(id(root), [_Source(root, id(root), root.bytes)]):
                if i in node.reads:  # a part, which others do not share
                    source = _Source(source.value, id(node), min(source.bytes, node.reads[i]))
                found[source.key] = source
        return list(found.values())

    def _recomputed(self, node: Node, sources: list[_Source], uses: Counter[int], kept: set[int]) -> bool:
        """Whether a value is computed wherever it is read, because that moves fewer bytes than to keep it."""
        if any(id(v) in kept for v in node.outputs):
            return False
        size, made_of = sum(v.bytes for v in node.outputs), sum(s.bytes for s in sources)
        readers = max(uses[id(v)] for v in node.outputs)
        return readers * made_of < made_of + (1 + readers) * size

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
