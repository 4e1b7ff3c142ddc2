"""Which part of a captured training step is forward and which backward, where parameters are gathered for use.

PyTorch's partitioner hands what the forward pass has made to the backward pass; of gathered parameters that would be
the whole model. Here the backward pass gathers them again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._functorch.partitioners import default_partition

__all__ = ["partition"]

_aten = torch.ops.aten
_CHEAP = {
    *(_aten.t.default, _aten.transpose.int, _aten.permute.default, _aten.view.default, _aten.reshape.default),
    *(_aten._unsafe_view.default, _aten.expand.default, _aten.unsqueeze.default, _aten.squeeze.dim),
    *(_aten.detach.default, _aten.alias.default, _aten._to_copy.default, _aten.clone.default),
}
"""What is done again to a parameter that is gathered again."""


def partition(joint: torch.fx.GraphModule, inputs: Any, **options: Any) -> tuple[Any, Any]:
    """As PyTorch's ``default_partition``, after ``constrain`` of parameters has been repeated where the backward pass
    reads them.
    """
    constrain = _constrain()
    if constrain is not None and any(_gathers(n, constrain) for n in joint.graph.nodes):
        _repeat(joint, constrain)
    return default_partition(joint, inputs, **options)


def _constrain() -> Any:
    """The operator, if anything has been divided in this process."""
    found = getattr(torch.ops.torchtpu, "constrain", None)
    return None if found is None else found.default


def _gathers(node: torch.fx.Node, constrain: Any) -> bool:
    return node.target is constrain and node.args[1] != node.args[2]


def _repeat(joint: torch.fx.GraphModule, constrain: Any) -> None:
    graph = joint.graph
    nodes = list(graph.nodes)
    ends = [i for i, n in enumerate(nodes) if n.meta.get("partitioner_tag") == "is_forward" or _is_primal(n)]
    last = ends[-1] if ends else -1
    place = {n: i for i, n in enumerate(nodes)}
    # Gathered parameters of the forward pass, and what is made of each of them alone.
    derived: set[torch.fx.Node] = set()
    for n in nodes[: last + 1]:
        made_of = n.all_input_nodes
        if _gathers(n, constrain) or (n.target in _CHEAP and made_of and derived.issuperset(made_of)):
            derived.add(n)
    again: dict[torch.fx.Node, torch.fx.Node] = {}

    def repeated(n: torch.fx.Node, before: torch.fx.Node) -> torch.fx.Node:
        if n not in derived:
            return n
        if n not in again:
            args = torch.fx.map_arg(n.args, lambda a: repeated(a, before))
            kwargs = torch.fx.map_arg(n.kwargs, lambda a: repeated(a, before))
            if _gathers(n, constrain):
                args = (*args[:3], True)
            target: Any = n.target
            with graph.inserting_before(before):
                again[n] = graph.call_function(target, args, kwargs)
            again[n].meta = {k: v for k, v in n.meta.items() if k != "partitioner_tag"}
        return again[n]

    for user in nodes[last + 1 :]:
        if user.op == "output":
            continue
        for n in [n for n in user.all_input_nodes if n in derived and place[n] <= last]:
            user.replace_input_with(n, repeated(n, user))
    graph.lint()
    joint.recompile()


def _is_primal(node: torch.fx.Node) -> bool:
    return node.op == "placeholder" and "tangents" not in str(node.target)
