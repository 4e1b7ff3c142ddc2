"""Grouped-query attention on keys and values that a model has repeated for it.

Models written for kernels that want as many key heads as query heads repeat each one by ``expand`` and ``reshape``.
The lowering of attention takes fewer key heads: reading the tensors from before the repetition gives the same numbers
and saves the copy, which in a decode step is most of what attention reads.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["share_heads"]

_aten = torch.ops.aten
_ATTENTION = _aten._scaled_dot_product_fused_attention_overrideable.default
_RESHAPES = (_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default)
_SAME = (_aten.clone.default, _aten.slice.Tensor, _aten.alias.default)


def share_heads(graph: torch.fx.Graph) -> None:
    """Let attention read keys and values from before their heads were repeated, where both were, in static sizes."""
    for node in graph.find_nodes(op="call_function", target=_ATTENTION):
        key, value = (_before_repeat(x) for x in node.args[1:3])
        if key is not None and value is not None and key.meta["val"].shape[1] == value.meta["val"].shape[1]:
            for position, before in ((1, key), (2, value)):
                unused: Any = node.args[position]
                node.update_arg(position, before)
                while not unused.users and unused is not before:
                    behind = unused.args[0]
                    graph.erase_node(unused)
                    unused = behind


def _before_repeat(node: Any) -> torch.fx.Node | None:
    """``x`` where the node is ``x[:, :, None].expand(b, heads, times, s, d).reshape(b, heads * times, s, d)``."""
    if not isinstance(node, torch.fx.Node) or node.target not in _RESHAPES:
        return None
    whole = _shape(node)
    wide = _skip(node.args[0])
    if wide is None or wide.target is not _aten.expand.default:
        return None
    narrow = _skip(wide.args[0])
    if narrow is None or narrow.target is not _aten.unsqueeze.default or narrow.args[1] not in (2, -3):
        return None
    found = narrow.args[0]
    if not isinstance(found, torch.fx.Node):
        return None
    small, large = _shape(found), _shape(wide)
    if small is None or large is None or len(small) != 4 or len(large) != 5:
        return None
    batch, heads, length, width = small
    same = large == (batch, heads, large[2], length, width) and whole == (batch, heads * large[2], length, width)
    return found if same else None


def _skip(node: Any) -> torch.fx.Node | None:
    """The node behind copies and slices that leave everything in place."""
    while isinstance(node, torch.fx.Node) and node.target in _SAME:
        before = node.args[0]
        if not isinstance(before, torch.fx.Node) or _shape(before) is None or _shape(before) != _shape(node):
            return None
        node = before
    return node if isinstance(node, torch.fx.Node) else None


def _shape(node: torch.fx.Node) -> tuple[int, ...] | None:
    """The sizes of a node's tensor; None where one is not a number."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not all(isinstance(n, int) for n in value.shape):
        return None
    return tuple(value.shape)
