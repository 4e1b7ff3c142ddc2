"""Attention of a captured graph in the form that costs least: a mask that is only the causal one becomes
``is_causal``, one that hides nothing is dropped, and heads of keys and values are not repeated for the queries that
share them.

Transformers leaves mask and repetition out by itself where it can look at the values, which it cannot while Dynamo
captures. Here both are seen in the graph, before it is differentiated, so that the backward is that of the better form.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

__all__ = ["simplify_attention"]

_HOST = torch.device("cpu")
_ATTENTION = torch.nn.functional.scaled_dot_product_attention
_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_LARGEST = 2**27
"""Elements of the largest mask that is looked at: its computation on the host takes about a second."""
# fmt: off
_PURE = frozenset({
        "arange", "ones", "zeros", "full", "new_ones", "new_zeros", "new_full", "ones_like", "zeros_like", "full_like",
        "tril", "triu", "diff", "cumsum", "add", "sub", "mul", "rsub", "neg", "le", "lt", "ge", "gt", "eq", "ne",
        "and_", "or_", "xor", "invert", "not_", "logical_and", "logical_or", "logical_not", "__and__", "__or__",
        "__xor__", "bitwise_and", "bitwise_or", "bitwise_not", "where", "masked_fill", "to", "bool", "int", "long",
        "getitem", "expand", "expand_as", "broadcast_to", "unsqueeze", "squeeze", "view", "reshape", "flatten",
        "transpose", "permute", "contiguous", "clone", "select", "narrow",
})
# fmt: on
"""Functions whose result depends on their arguments alone, and that change none of them."""


def simplify_attention(module: GraphModule) -> int:
    """Rewrite calls of ``scaled_dot_product_attention`` in a graph captured by Dynamo, in place.

    Returns:
        How many were rewritten.
    """
    calls = module.graph.find_nodes(op="call_function", target=_ATTENTION)
    constants = _Constants(module)
    changed = sum([_simplify(node, constants) for node in calls])
    if changed:
        module.recompile()
    return changed


def _simplify(node: Node, constants: _Constants) -> bool:
    if len(node.args) > len(_NAMES):
        return False
    given = dict(zip(_NAMES, node.args, strict=False)) | node.kwargs
    before = dict(given)
    mask = given.get("attn_mask")
    if isinstance(mask, Node) and given.get("is_causal") in (None, False):
        kind = constants.mask(mask, *(_shape(given[x]) for x in ("query", "key")))
        if kind is not None:
            given["attn_mask"], given["is_causal"] = None, kind == "causal"
    if not given.get("enable_gqa"):
        key, value = _before_repetition(given["key"]), _before_repetition(given["value"])
        if key is not None and value is not None and key[1] == value[1]:
            given["key"], given["value"], given["enable_gqa"] = key[0], value[0], True
    if given == before:
        return False
    node.args, node.kwargs = (), given
    return True


def _shape(node: Any) -> tuple[int, ...] | None:
    """The size of a node's tensor, where it is fixed."""
    example = node.meta.get("example_value") if isinstance(node, Node) else None
    if not isinstance(example, torch.Tensor) or not all(type(n) is int for n in example.shape):
        return None
    return tuple(example.shape)


def _before_repetition(node: Any) -> tuple[Node, int] | None:
    """The tensor (batch, heads, length, width) whose heads ``node`` repeats each in turn, and how often.

    Recognised as ``x[:, :, None].expand(...).reshape(...)`` and as ``repeat_interleave``.
    """
    shape, repeated = _shape(node), node
    if shape is None or len(shape) != 4:
        return None
    if _name(node) == "repeat_interleave":
        source, times, axis = (_argument(node, i, n) for i, n in enumerate(("input", "repeats", "dim")))
        if axis not in (1, -3) or type(times) is not int:
            return None
    else:
        while _name(node) in ("contiguous", "reshape", "view", "flatten"):
            node = _argument(node, 0, "input")
        expanded = _shape(node)
        if _name(node) != "expand" or expanded is None or len(expanded) != 5:
            return None
        batch, heads, times, length, width = expanded
        source = _without_new_axis(_argument(node, 0, "input"))
        if shape != (batch, heads * times, length, width) or _shape(source) != (batch, heads, length, width):
            return None
    before = _shape(source)
    if before is None or times < 2 or shape != (before[0], before[1] * times, *before[2:]):
        return None
    if source.meta["example_value"].dtype != repeated.meta["example_value"].dtype:  # a view as another dtype
        return None
    return source, times


def _without_new_axis(node: Any) -> Node | None:
    """``x`` of ``x[:, :, None, :, :]`` or ``x.unsqueeze(2)``."""
    if _name(node) == "unsqueeze" and _argument(node, 1, "dim") in (2, -3):
        return _argument(node, 0, "input")
    if _name(node) == "getitem" and isinstance(node.args[1], tuple):
        everything = slice(None, None, None)
        index = node.args[1]
        if index[:3] == (everything, everything, None) and all(i in (everything, Ellipsis) for i in index[3:]):
            return node.args[0]
    return None


def _argument(node: Node, position: int, name: str) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name)


def _name(node: Any) -> str:
    """What a node calls, without its module."""
    if not isinstance(node, Node) or node.op not in ("call_function", "call_method"):
        return ""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


class _Constants:
    """Tensors of a graph that depend on no input: computed on the host, each once.

    Args:
        module: the graph.
    """

    def __init__(self, module: GraphModule) -> None:
        self.values: dict[Node, torch.Tensor | None] = {}
        self.kinds: dict[tuple[Any, ...], str | None] = {}
        self.fixed: dict[Node, bool] = {}
        for node in module.graph.nodes:
            self.fixed[node] = _name(node) in _PURE and all(self.fixed[n] for n in node.all_input_nodes)
        # What something else may write to, directly or through a view, is not fixed.
        if any(self.fixed[n] for node in module.graph.nodes if _writes(node) for n in node.all_input_nodes):
            self.fixed = dict.fromkeys(self.fixed, False)

    def mask(self, node: Node, query: Sequence[int] | None, key: Sequence[int] | None) -> str | None:
        """What a mask hides: "causal" for what comes later, "nothing", or None for anything else or not known."""
        at = node, tuple(query or ()), tuple(key or ())
        if at not in self.kinds:
            self.kinds[at] = self._mask(node, query, key)
        return self.kinds[at]

    def _mask(self, node: Node, query: Sequence[int] | None, key: Sequence[int] | None) -> str | None:
        shape = _shape(node)
        if not self.fixed[node] or not shape or query is None or key is None or torch.Size(shape).numel() > _LARGEST:
            return None
        with _disable_current_modes(), torch.device(_HOST), torch.no_grad():
            value = self._value(node)
        if value.dtype != torch.bool:
            return None
        if value.all():
            return "nothing"
        rows, columns = query[-2], key[-2]
        if rows > 1 and value.shape[-2:] == (rows, columns):
            causal = torch.ones(rows, columns, dtype=torch.bool).tril()
            if torch.equal(value, causal.expand_as(value)):
                return "causal"
        return None

    def _value(self, node: Node) -> Any:
        if node not in self.values:
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), self._value)
            args, kwargs = tree_map(_on_host, (args, kwargs))
            if node.op == "call_method":
                self.values[node] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
            else:
                self.values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        return self.values[node]


def _on_host(x: Any) -> Any:
    """An argument, where it names the device: the host instead."""
    is_device = isinstance(x, torch.device) or (isinstance(x, str) and x.split(":")[0] == "tpu")
    return _HOST if is_device else x


def _writes(node: Node) -> bool:
    """Whether a node changes one of its arguments."""
    name = _name(node)
    return (
        node.target in (operator.setitem, operator.delitem)
        or "out" in node.kwargs
        or (name.endswith("_") and not name.endswith("__") and name not in ("and_", "or_", "not_"))
        or name.startswith("__i")
        or name in ("iadd", "isub", "imul", "iand", "ior", "ixor")
    )
