"""Graphs with collectives: what lies between two collectives is one program, and the collectives are called as eager
ones are, in the order of the graph. Results stay where they are: nothing but the transport decides whether the host
sees them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

__all__ = ["SegmentedProgram", "has_collectives"]

_NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd", "_dtensor")


def _is_collective(node: torch.fx.Node) -> bool:
    if isinstance(node.target, OpOverload):
        return node.target.namespace in _NAMESPACES
    # one of the results of a collective on several tensors
    return node.target is operator.getitem and isinstance(node.args[0], torch.fx.Node) and _is_collective(node.args[0])


def has_collectives(module: torch.fx.GraphModule) -> bool:
    """Whether a graph calls a collective."""
    return any(_is_collective(node) for node in module.graph.nodes)


class SegmentedProgram:
    """A graph as programs and the collectives between them.

    Args:
        module: a graph of functional operators, collectives among them.
        compile: makes the function of a graph without collectives.
    """

    def __init__(
        self, module: torch.fx.GraphModule, compile: Callable[[torch.fx.GraphModule], Callable[..., Any]]
    ) -> None:
        nodes = list(module.graph.nodes)
        self.inputs = [n for n in nodes if n.op == "placeholder"]
        (self.outputs,) = next(n for n in nodes if n.op == "output").args
        self.steps: list[Callable[[dict[Any, Any]], None]] = []
        self.programs: list[Callable[..., Any]] = []
        segment: list[torch.fx.Node] = []
        for node in nodes:
            if node.op in ("placeholder", "output"):
                continue
            if not _is_collective(node):
                segment.append(node)
                continue
            self._close(module, segment, compile)
            segment = []
            self.steps.append(_collective(node))
        self._close(module, segment, compile)
        self.last_use: list[list[torch.fx.Node]] = self._last_uses(module)

    def _close(self, module: torch.fx.GraphModule, segment: Sequence[torch.fx.Node], compile: Any) -> None:
        inside = set(segment)
        if not any(n.op != "get_attr" for n in segment):
            for node in segment:  # used by a collective itself
                self.steps.append(_attribute(module, node))
            return
        graph = torch.fx.Graph()
        given = list(dict.fromkeys(a for n in segment for a in n.all_input_nodes if a not in inside))
        copies: dict[torch.fx.Node, torch.fx.Node] = {}
        for node in given:
            copies[node] = graph.placeholder(node.name)
            copies[node].meta = dict(node.meta)
        for node in segment:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        made = [n for n in segment if any(u not in inside for u in n.users)]
        graph.output([copies[n] for n in made])
        program = compile(torch.fx.GraphModule(module, graph))
        self.programs.append(program)

        def step(values: dict[Any, Any]) -> None:
            values.update(zip(made, program(*[values[n] for n in given]), strict=True))

        step.reads = given  # type: ignore[attr-defined]
        self.steps.append(step)

    def _last_uses(self, module: torch.fx.GraphModule) -> list[list[torch.fx.Node]]:
        """After each step, the values that nothing reads any more."""
        kept = set(torch.fx.graph.Graph.output_node(module.graph).all_input_nodes)
        last: dict[torch.fx.Node, int] = {}
        for i, step in enumerate(self.steps):
            for node in step.reads:  # type: ignore[attr-defined]
                last[node] = i
        done: list[list[torch.fx.Node]] = [[] for _ in self.steps]
        for node, i in last.items():
            if node not in kept:
                done[i].append(node)
        return done

    def __call__(self, *inputs: Any) -> list[Any]:
        """Run the graph on tensors (and sizes)."""
        values = dict(zip(self.inputs, inputs, strict=True))
        del inputs
        for step, done in zip(self.steps, self.last_use, strict=True):
            step(values)
            for node in done:
                values.pop(node, None)
        return [values[o] if isinstance(o, torch.fx.Node) else o for o in self.outputs]


def _collective(node: torch.fx.Node) -> Callable[[dict[Any, Any]], None]:
    target: Any = node.target

    def step(values: dict[Any, Any]) -> None:
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), values.__getitem__)
        values[node] = target(*args, **kwargs)

    step.reads = node.all_input_nodes  # type: ignore[attr-defined]
    return step


def _attribute(module: torch.fx.GraphModule, node: torch.fx.Node) -> Callable[[dict[Any, Any]], None]:
    held = operator.attrgetter(str(node.target))(module)

    def step(values: dict[Any, Any]) -> None:
        values[node] = held

    step.reads = []  # type: ignore[attr-defined]
    return step
