"""Find the layers of a model in its graph: runs of equal blocks that can be one loop.

A block is what the operators of one element of a list of modules do. Blocks that follow one another with the same
operators, wired in the same way, differ only in their weights and in what one hands to the next; a period of several
blocks (a window of attention every second layer) is found too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from torchtpu.aot.graph import Graph, module_path

__all__ = ["Loop", "find_loops"]

_LONGEST = 8
"""Blocks of the longest period looked for."""


@dataclass
class Loop:
    """Equal blocks, run one after the other.

    Attributes:
        name: the list of modules, such as ``"model.layers"``.
        first: position of the first block's first element in the list.
        period: elements of the list that make a block.
        blocks: for each block its operators, in order.
        reads: for each block what it reads from outside, in the same order for all.
        makes: for each block the operators whose results others read, in the same order for all.
        carried: {position in ``reads``: position in ``makes``}: what a block reads of the one before it.
        shared: positions in ``reads`` that are the same value for every block.
    """

    name: str
    first: int
    period: int
    blocks: list[list[torch.fx.Node]]
    reads: list[list[torch.fx.Node]] = field(default_factory=list)
    makes: list[list[torch.fx.Node]] = field(default_factory=list)
    carried: dict[int, int] = field(default_factory=dict)
    shared: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        """How often the block runs."""
        return len(self.blocks)

    @property
    def varying(self) -> list[int]:
        """Positions in ``reads`` that each block has its own value of: weights, and caches."""
        return [i for i in range(len(self.reads[0])) if i not in self.carried and i not in self.shared]

    def label(self, path: str) -> str:
        """A module's path with the elements the loop runs over in place of one of them: ``model.layers.0-93.mlp``."""
        found = re.match(rf"{re.escape(self.name)}\.(\d+)(?=\.|$)", path)
        if found is None:
            return path
        offset = (int(found[1]) - self.first) % self.period
        last = self.first + (self.length - 1) * self.period + offset
        step = f":{self.period}" if self.period > 1 else ""
        return f"{self.name}.{self.first + offset}-{last}{step}{path[found.end() :]}"


def find_loops(graph: Graph) -> list[Loop]:
    """The loops of a graph, in the order in which they run. They do not depend on a plan, and are looked for once."""
    if graph.loops is None:
        graph.loops = _find(graph)
    return graph.loops


def _find(graph: Graph) -> list[Loop]:
    loops: list[Loop] = []
    taken: list[str] = []
    for name in graph.blocks:
        if any(name.startswith(outer + ".") for outer in taken):
            continue
        found = _in_list(graph, name)
        if found:
            taken.append(name)
            loops += found
    order = {n: i for i, n in enumerate(graph.fx.nodes)}
    return sorted(loops, key=lambda loop: order[loop.blocks[0][0]])


def _in_list(graph: Graph, name: str) -> list[Loop]:
    prefix = re.compile(rf"{re.escape(name)}\.(\d+)(?:\.|$)")
    parts: list[tuple[int, list[torch.fx.Node]]] = []
    for node in graph.fx.nodes:
        if node.op in ("placeholder", "output"):
            continue
        found = prefix.match(module_path(node))
        if found is None:
            if node.op != "get_attr" and not _free(node):
                parts.append((-1, []))
            continue
        if parts and parts[-1][0] == int(found[1]):
            parts[-1][1].append(node)
        else:
            parts.append((int(found[1]), [node]))
    loops = []
    at = 0
    while at < len(parts):
        loop = _longest(name, parts, at)
        if loop is None:
            at += 1
        else:
            loops.append(loop)
            at += loop.length * loop.period
    return loops


def _free(node: torch.fx.Node) -> bool:
    """An operator that may stand between two blocks: what it makes depends on nothing."""
    return not node.all_input_nodes


def _longest(name: str, parts: Sequence[tuple[int, list[torch.fx.Node]]], at: int) -> Loop | None:
    """The loop that begins with a part and takes in most of those that follow."""
    best: Loop | None = None
    for period in range(1, min(_LONGEST, (len(parts) - at) // 2) + 1):
        blocks: list[list[torch.fx.Node]] = []
        expected = None
        for start in range(at, len(parts) - period + 1, period):
            group = parts[start : start + period]
            if any(index != parts[at][0] + start - at + i for i, (index, _) in enumerate(group)):
                break
            block = [n for _, nodes in group for n in nodes]
            signature = _signature(block, parts[start][0], name)
            if expected is None:
                expected = signature
            elif signature != expected:
                break
            blocks.append(block)
        if len(blocks) >= 2:
            loop = _wire(Loop(name, parts[at][0], period, blocks))
            if loop is not None and (best is None or loop.length * loop.period > best.length * best.period):
                best = loop
    return best


def _signature(block: list[torch.fx.Node], first: int, name: str) -> tuple[Any, ...]:
    """What a block computes, without saying with which values."""
    inside = {n: i for i, n in enumerate(block)}
    outside: dict[torch.fx.Node, int] = {}

    def token(n: torch.fx.Node) -> Any:
        if n in inside:
            return _Token("own", inside[n])
        value = n.meta.get("val")
        place = outside.setdefault(n, len(outside))
        return _Token("read", place, *(_type(value)))

    lines = []
    for n in block:
        arguments = torch.fx.node.map_arg((n.args, dict(n.kwargs)), token)
        lines.append((str(n.target), repr(arguments), n.meta.get("window")))
    makes = tuple(i for i, n in enumerate(block) if any(u not in inside for u in n.users))
    return tuple(lines), makes


class _Token:
    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    def __repr__(self) -> str:
        return repr(self.parts)


def _type(value: Any) -> tuple[Any, ...]:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), str(value.dtype)
    return (repr(value),)


def _wire(loop: Loop) -> Loop | None:
    """Tell apart what the blocks hand on, share, and have each for themselves; None if one reads what it may not."""
    for block in loop.blocks:
        inside = set(block)
        reads: dict[torch.fx.Node, None] = {}
        for n in block:
            for source in n.all_input_nodes:
                if source not in inside:
                    reads.setdefault(source)
        loop.reads.append(list(reads))
        loop.makes.append([n for n in block if any(u not in inside for u in n.users)])
    made = [{n: i for i, n in enumerate(makes)} for makes in loop.makes]
    everything = {n for block in loop.blocks for n in block}
    for position in range(len(loop.reads[0])):
        values = [reads[position] for reads in loop.reads]
        if all(v is values[0] for v in values) and values[0] not in everything:
            loop.shared.append(position)
            continue
        sources = [made[i - 1].get(values[i]) for i in range(1, loop.length)]
        if sources[0] is not None and all(s == sources[0] for s in sources) and values[0] not in everything:
            loop.carried[position] = sources[0]
        elif any(v in everything for v in values):
            return None
    return loop
