"""Recognise attention as it was meant: the mask a model builds from positions alone is causal or a sliding window, and
keys repeated for grouped queries need not be repeated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["simplify_attention"]

_aten = torch.ops.aten
_ATTENTION = _aten.scaled_dot_product_attention.default
LARGEST = 1 << 27
"""Elements of the largest mask that is worked out."""
_PASSED = (_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default, _aten.clone.default)


def simplify_attention(graph: torch.fx.Graph, constants: Mapping[torch.fx.Node, Any]) -> None:
    """Rewrite the attention operators of a graph in place.

    A mask that depends on no input is worked out. If it is causal, ``is_causal`` says so and the mask goes; if it lets
    everything through, it goes; a causal sliding window is kept, with its width as ``node.meta["window"]``.
    """
    worked_out: dict[torch.fx.Node, tuple[str, int]] = {}
    for node in graph.find_nodes(op="call_function", target=_ATTENTION):
        arguments = _arguments(node)
        for name in ("key", "value"):
            arguments[name] = _ungrouped(arguments[name])
        if arguments["key"].meta["val"].shape[1] != node.args[0].meta["val"].shape[1]:
            arguments["enable_gqa"] = True
        mask = arguments["attn_mask"]
        if isinstance(mask, torch.fx.Node) and mask.meta["val"].dtype is torch.bool:
            if mask not in worked_out:
                worked_out[mask] = _kind(mask, constants)
            kind, width = worked_out[mask]
            if kind in ("causal", "all"):
                arguments["attn_mask"], arguments["is_causal"] = None, kind == "causal"
            elif kind == "window":
                node.meta["window"] = width
        node.args = tuple(arguments[k] for k in ("query", "key", "value", "attn_mask", "dropout_p", "is_causal"))
        node.kwargs = {k: arguments[k] for k in ("scale", "enable_gqa")}


def _arguments(node: torch.fx.Node) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for i, argument in enumerate(_ATTENTION._schema.arguments):
        name = argument.name
        given[name] = node.args[i] if i < len(node.args) else node.kwargs.get(name, argument.default_value)
    return given


def _ungrouped(node: torch.fx.Node) -> torch.fx.Node:
    """The keys before each head was repeated: (B, heads, S, D) through (B, heads, 1, S, D) and (B, heads, n, S, D)."""
    at: Any = node
    while at.target in _PASSED and len(at.all_input_nodes) == 1:
        at = at.all_input_nodes[0]
        if at.target is _aten.expand.default:
            break
    if at.target is not _aten.expand.default:
        return node
    source = at.args[0]
    if source.target is not _aten.unsqueeze.default or source.args[1] not in (2, -3):
        return node
    before, expanded = source.args[0].meta["val"].shape, at.meta["val"].shape
    if len(before) != 4 or (*before[:2], *before[2:]) != (*expanded[:2], *expanded[3:]):
        return node
    b, heads, s, d = before
    if tuple(node.meta["val"].shape) != (b, heads * expanded[2], s, d):
        return node
    return source.args[0]


def _kind(mask: torch.fx.Node, constants: Mapping[torch.fx.Node, Any]) -> tuple[str, int]:
    """("causal" | "all" | "window" | "other", width of the window)."""
    shape = mask.meta["val"].shape
    rows, columns = shape[-2:]
    if rows * columns > LARGEST or len(shape) != 4 or shape[1] != 1:
        return "other", 0
    if any(n.op == "placeholder" and not isinstance(constants.get(n), torch.Tensor) for n in _needed(mask)):
        return "other", 0
    value = _Sample(constants, shape[0], 0).value(mask)[0, 0]
    if shape[0] > 1 and not torch.equal(value, _Sample(constants, shape[0], shape[0] - 1).value(mask)[0, 0]):
        return "other", 0
    if bool(value.all()):
        return "all", 0
    if rows != columns:
        return "other", 0
    lower = torch.ones_like(value).tril_()
    if torch.equal(value, lower):
        return "causal", 0
    width = int(value[-1].sum())
    if torch.equal(value, lower.triu_(1 - width)):
        return "window", width
    return "other", 0


def _needed(node: torch.fx.Node) -> set[torch.fx.Node]:
    """A node and what it depends on."""
    seen = {node}
    pending = [node]
    while pending:
        for n in pending.pop().all_input_nodes:
            if n not in seen:
                seen.add(n)
                pending.append(n)
    return seen


class _Sample:
    """Values on the CPU of one sample of a batch, worked out without those of the others.

    Args:
        constants: values of placeholders.
        batch: the size that dimension 0 has.
        sample: which of them.
    """

    def __init__(self, constants: Mapping[torch.fx.Node, Any], batch: int, sample: int) -> None:
        self.constants, self.batch, self.sample = constants, batch, sample
        self.whole: dict[torch.fx.Node, Any] = {}
        self.cut: dict[torch.fx.Node, Any] = {}

    def value(self, node: torch.fx.Node) -> Any:
        """A node's value with dimension 0 cut to the sample, if it is the batch."""
        if node not in self.cut:
            self.cut[node] = self._cut(node)
        return self.cut[node]

    def _is_batch(self, node: Any, ndim: int) -> bool:
        value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
        return isinstance(value, torch.Tensor) and value.ndim == ndim and value.shape[0] == self.batch > 1

    def _cut(self, node: torch.fx.Node) -> Any:
        shape = node.meta["val"].shape
        if not self._is_batch(node, len(shape)):
            return self._whole(node)
        target: Any = node.target
        given: Any = node.args
        pick = lambda n: self.value(n) if self._is_batch(n, len(shape)) else self._whole(n)  # noqa: E731
        if isinstance(target, torch._ops.OpOverload):
            if torch.Tag.pointwise in target.tags:
                args, kwargs = torch.fx.node.map_arg((given, dict(node.kwargs)), pick)
                return target(*args, **kwargs)
            if target is _aten.expand.default and len(given[0].meta["val"].shape) == len(shape):
                return pick(given[0]).expand(1, *shape[1:])
            if target is _aten.index.Tensor and not self._is_batch(given[0], given[0].meta["val"].ndim):
                args = self._whole(given[0]), [None if i is None else pick(i) for i in given[1]]
                return target(*args)
            if target in (_aten.unsqueeze.default, _aten.slice.Tensor) and given[1] not in (0, -len(shape)):
                source = given[0].meta["val"].ndim
                if self._is_batch(given[0], source):
                    return target(self.value(given[0]), *given[1:])
        return self._whole(node)[self.sample : self.sample + 1]

    def _whole(self, node: torch.fx.Node) -> Any:
        if node not in self.whole:
            self.whole[node] = self._compute(node)
        return self.whole[node]

    def _compute(self, node: torch.fx.Node) -> Any:
        if node.op == "placeholder":
            return self.constants[node]
        if node.op == "get_attr":
            return getattr(node.graph.owning_module, str(node.target))
        args, kwargs = torch.fx.node.map_arg((node.args, dict(node.kwargs)), self._whole)
        if "device" in kwargs:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        assert callable(node.target)
        return node.target(*args, **kwargs)
