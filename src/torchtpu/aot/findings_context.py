"""What the search for waste looks things up in: the operator behind a scope, its time, the sizes of a device's part."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from torchtpu.aot.blocks import Loop
from torchtpu.aot.count import Counts, OpCost
from torchtpu.aot.evaluate import Value
from torchtpu.aot.graph import Graph, module_path, source_line
from torchtpu.aot.hlo import Hlo
from torchtpu.aot.report import Finding
from torchtpu.aot.roofline import Prediction, ScopeTime, predict
from torchtpu.aot.step import Step
from torchtpu.aot.topology import Topology

__all__ = ["Context", "Dimension", "Places", "merge", "percent", "seconds_text", "size_text", "tensor", "tensors", "up"]

_aten = torch.ops.aten


@dataclass(frozen=True)
class Dimension:
    """A dimension of a weight.

    Attributes:
        size: of the whole weight.
        parts: devices it is divided over while it is used.
        index: its position in the weight.
    """

    size: int
    parts: int
    index: int

    @property
    def local(self) -> int:
        """The size on a device."""
        return self.size // self.parts


class Places:
    """The operators of a graph and where in the model they are.

    Args:
        graph: the graph.
        loops: its loops.

    Attributes:
        nodes: the operators that are computed, each block of a loop once.
    """

    def __init__(self, graph: Graph, loops: Sequence[Loop]) -> None:
        again = {n for loop in loops for block in loop.blocks[1:] for n in block}
        self.nodes = [n for n in graph.fx.nodes if n.op == "call_function" and n not in again]
        self._labels = {n: loop.label(module_path(n)) for loop in loops for n in loop.blocks[0]}

    def module(self, node: torch.fx.Node) -> str:
        """Dotted name of an operator's module, with all layers of a loop."""
        return self._labels.get(node) or module_path(node)

    def finding(
        self,
        kind: str,
        what: str,
        advice: str,
        nodes: Sequence[torch.fx.Node],
        cost: float | None,
        count: int | None = None,
        module: str | None = None,
    ) -> Finding:
        """A finding at the place of the first of some operators."""
        line, code = "", ""
        if nodes:
            found = source_line(nodes[0])
            if found is not None:
                line, code = f"{found[0]}:{found[1]}", found[2]
            if module is None:
                module = self.module(nodes[0])
        cost = None if cost is None else min(1.0, max(0.0, cost))
        return Finding(kind, what, advice, module or "", line, code, cost, count or max(1, len(nodes)))


class Context(Places):
    """A step with everything that was found out about it.

    Attributes:
        seconds: predicted for the step; 0 where nothing is known of it. Without a compiled program it is what the
            counted operations take, without communication.
        hbm: bytes of HBM that a program may have on a device.
    """

    def __init__(
        self, step: Step, counts: Counts, hlo: Hlo | None, prediction: Prediction | None, topology: Topology
    ) -> None:
        super().__init__(step.evaluator.graph, step.evaluator.loops)
        self.step, self.counts, self.hlo, self.topology = step, counts, hlo, topology
        self.evaluator, self.plan, self.chip = step.evaluator, step.plan, topology.chip
        self.prediction = prediction or predict(counts, (), topology)
        self.seconds = self.prediction.serial_seconds
        self.hbm = self.chip.usable_hbm_bytes
        self._values = {member: v for v in self.evaluator.values for member in v.members}
        self._names = {i.node: i.name for i in self.evaluator.graph.inputs}
        self._found: dict[str, torch.fx.Node | None] = {}
        self.times: dict[torch.fx.Node, list[ScopeTime]] = {}
        for time in self.prediction.scopes:
            node = self.node(time.scope)
            if node is not None:
                self.times.setdefault(node, []).append(time)
        self.ops: dict[torch.fx.Node, list[OpCost]] = {}
        for op in counts.ops:
            node = self.node(op.scope)
            if node is not None:
                self.ops.setdefault(node, []).append(op)

    def node(self, scope: str) -> torch.fx.Node | None:
        """The operator that a scope of the program belongs to."""
        if scope not in self._found:
            names, known = scope.split("/"), self.evaluator.scopes
            pairs = ("/".join(pair) for pair in itertools.pairwise(names))
            self._found[scope] = next((known[p] for p in pairs if p in known), None)
        return self._found[scope]

    def value(self, node: torch.fx.Node) -> Value | None:
        """The parameter, buffer or input that a node of the graph is, or None."""
        name = self._names.get(node)
        return None if name is None else self._values.get(name)

    def user(self, value: Value) -> torch.fx.Node | None:
        """The first operator that reads a parameter."""
        for node, name in self._names.items():
            if name == value.members[0]:
                return next((u for u in node.users if u.op == "call_function"), None)
        return None

    def weight(self, node: object) -> tuple[Value, list[Dimension]] | None:
        """The parameter that an operand is a view of, and its dimensions in the operand's order; None if it is none."""
        views: list[torch.fx.Node] = []
        at = node
        while isinstance(at, torch.fx.Node) and at.op == "call_function" and at.target in _VIEWS:
            views.append(at)
            at = at.args[0]
        value = self.value(at) if isinstance(at, torch.fx.Node) else None
        if value is None or value.kind != "parameter":
            return None
        shape = value.shape[1:] if value.stacked else value.shape
        found = [
            Dimension(n, self.plan.size(axes), i) for i, (n, axes) in enumerate(zip(shape, value.used, strict=True))
        ]
        for view in reversed(views):
            if view.target is _aten.t.default:
                found.reverse()
            elif view.target is _aten.transpose.int:
                a, b = view.args[1:3]
                found[a], found[b] = found[b], found[a]  # type: ignore[index]
            elif view.target is _aten.permute.default:
                found = [found[i] for i in view.args[1]]  # type: ignore[union-attr, index]
        return value, found

    def visible(self, node: torch.fx.Node, added: dict[str, float]) -> float:
        """Seconds by which an operator takes longer for time added on the matrix unit, as far as its traffic with
        memory does not hide it; negative where time is taken away.

        Args:
            node: the operator.
            added: seconds by phase.
        """
        longer = 0.0
        by_phase: dict[str, list[float]] = {}
        for time in self.times.get(node, ()):
            both = by_phase.setdefault(time.phase, [0.0, 0.0])
            both[0] += time.mxu_seconds
            both[1] += time.hbm_seconds
        for phase, more in added.items():
            mxu, hbm = by_phase.get(phase, (0.0, 0.0))
            longer += max(mxu + more, hbm) - max(mxu, hbm)
        return longer

    def mxu_seconds(self, op: OpCost) -> float:
        """Seconds that a device's matrix unit takes for an operation at its peak rate."""
        return op.flops * op.passes / self.chip.peak(op.dtype) / self.topology.devices if op.is_mxu else 0.0

    def share(self, seconds: float, extra: bool = False) -> float | None:
        """Seconds as a share of the step; ``extra`` ones are not in the prediction and come on top of it."""
        whole = self.seconds + (seconds if extra else 0.0)
        return seconds / whole if whole else None

    def hbm_share(self, count: float) -> float:
        """Bytes on a device as a share of its HBM."""
        return count / self.hbm


_VIEWS = {
    *(_aten.t.default, _aten.transpose.int, _aten.permute.default, _aten.clone.default, _aten.detach.default),
    *(_aten.alias.default, _aten._to_copy.default),
}
"""Operators whose result has the dimensions of their argument, perhaps in another order."""


def merge(findings: Iterable[Finding]) -> list[Finding]:
    """Findings that say the same of the same line as one, with the sum of their costs."""
    found: dict[tuple[str, ...], Finding] = {}
    for f in findings:
        key = f.kind, f.line, f.what, f.advice
        before = found.get(key)
        if before is None:
            found[key] = f
            continue
        costs = [c for c in (before.cost, f.cost) if c is not None]
        found[key] = replace(before, cost=min(1.0, sum(costs)) if costs else None, count=before.count + f.count)
    return list(found.values())


def tensor(node: object) -> torch.Tensor | None:
    """The value of a node if it is a tensor."""
    value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def tensors(node: torch.fx.Node) -> list[torch.Tensor]:
    """The tensors that a node makes."""
    value = node.meta.get("val")
    several = value if isinstance(value, tuple | list) else (value,)
    return [x for x in several if isinstance(x, torch.Tensor)]


def up(size: int, multiple: int) -> int:
    """The next multiple."""
    return -(-size // multiple) * multiple


def percent(share: float) -> str:
    """A share as it is read: ``"0.4 %"``, ``"37 %"``."""
    return f"{100 * share:.{0 if share >= 0.0995 else 1 if share >= 0.00995 else 2}f} %"


def size_text(count: float) -> str:
    """Bytes as they are read."""
    for unit, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= unit:
            return f"{count / unit:.3g} {name}" if count / unit < 999.5 else f"{count / unit:.0f} {name}"
    return f"{count:.0f} bytes"


def seconds_text(seconds: float) -> str:
    """Seconds as they are read."""
    for unit, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds / 1e-9:.3g} ns"
