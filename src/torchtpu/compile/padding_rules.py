"""What padding does to operators: a table of rules, and the interpreter that runs a graph by them.

A rule takes the call with padded arrays in it and gives padded arrays. An operator without a rule may not touch
padding: the graph is compiled for exact sizes instead, and says which operator it was.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import sympy
import torch
from torch._higher_order_ops.effects import with_effects
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils._pytree import tree_leaves, tree_map

from torchtpu.compile.padding_layout import (
    Dim,
    Frame,
    NotUnderstood,
    Padded,
    evaluate,
    expression,
    factors,
    normal,
    product,
)
from torchtpu.lowering.apply import constant_array, short_name, walk
from torchtpu.lowering.context import Trace
from torchtpu.lowering.registry import find

__all__ = ["Call", "Interpreter", "Size", "broadcast", "rule"]


@dataclass(frozen=True)
class Size:
    """A size that changes, as an argument of an operator or a result."""

    expr: Any


Rule = Callable[["Call"], Any]
_RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register what padding does to operators, by their names without overload."""

    def register(function: Rule) -> Rule:
        for name in names:
            assert name not in _RULES, name
            _RULES[name] = function
        return function

    return register


class Call:
    """One operator call of a graph, its arguments by name.

    Attributes:
        op: the operator.
        given: the arguments that were given: ``Padded`` for tensors, ``Size`` for sizes that change.
        value: what PyTorch says about the result: fake tensors.
        frame: the sizes of the program.
    """

    def __init__(self, op: OpOverload, given: dict[str, Any], value: Any, interpreter: Interpreter) -> None:
        self.op, self.given, self.value, self.interpreter = op, given, value, interpreter
        self.frame = interpreter.frame
        self.name = op._schema.name.removeprefix("aten::")

    def __getitem__(self, name: str) -> Any:
        """An argument, or its default."""
        if name in self.given:
            return self.given[name]
        return next(a.default_value for a in self.op._schema.arguments if a.name == name)

    def has(self, name: str) -> bool:
        """Whether the operator has such an argument."""
        return any(a.name == name for a in self.op._schema.arguments)

    def tensors(self) -> list[Padded]:
        """Every tensor among the arguments."""
        leaves = tree_leaves(list(self.given.values()), is_leaf=lambda x: isinstance(x, Padded))
        return [x for x in leaves if isinstance(x, Padded)]

    def sizes(self, index: int | None = None) -> list[Any]:
        """The sizes of the result, or of one of several."""
        value = self.value if index is None else self.value[index]
        return [expression(n) for n in value.shape]

    def run(self, op: OpOverload | None = None, /, **changed: Any) -> Any:
        """The operator on arrays (or another operator with the arguments given here): its arrays, without their
        layouts.
        """
        given = {**self.given, **changed} if op is None else changed
        return self.interpreter.apply(op or self.op, given)

    def refuse(self, why: str) -> NotUnderstood:
        """The error to raise where a rule does not know what padding does."""
        return NotUnderstood(why)


class Interpreter:
    """Runs a graph on padded arrays.

    Args:
        frame: the sizes of the program.
        trace: the program being traced.
        run: runs one operator on arrays.
    """

    def __init__(self, frame: Frame, trace: Trace, run: Callable[..., Any]) -> None:
        self.frame, self.trace, self.execute = frame, trace, run

    def run(self, graph: torch.fx.Graph, inputs: list[Any]) -> list[Any]:
        """The graph's results.

        Raises:
            NotUnderstood: an operator that has no rule touches padding; the message says which.
        """
        return walk(graph, inputs, self._node, lambda held: _plain(constant_array(held)))

    def _node(self, node: torch.fx.Node, values: dict[torch.fx.Node, Any]) -> Any:
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt | torch.SymFloat):
            return Size(expression(value))
        if isinstance(value, bool | int | float):
            return value
        args: Any
        kwargs: Any
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        if isinstance(node.target, OpOverload):
            name = short_name(node.target)
            try:
                return self.operator(node.target, args, kwargs, value)
            except NotUnderstood as error:
                raise NotUnderstood(f"aten.{name}: {error}") from None
            except Exception as error:
                # Exact sizes may do; if it was no fault of the padding, they raise it again.
                raise NotUnderstood(f"aten.{name}: {type(error).__name__}: {error}") from error
        if node.target is with_effects:  # the token keeps operators in order, which a program does by itself
            _, *values_of = value or (None,)
            result = self.operator(args[1], args[2:], kwargs, values_of[0] if len(values_of) == 1 else values_of)
            return args[0], *(result if isinstance(result, tuple) else (result,))
        if node.target is operator.getitem:
            return args[0][args[1]]
        leaves = tree_leaves((args, kwargs, value))
        if any(isinstance(x, Size) or (isinstance(x, Padded) and x.padded) or _changes(x) for x in leaves):
            raise NotUnderstood(f"{getattr(node.target, '__name__', node.target)}: has no rule")
        if isinstance(node.target, HigherOrderOperator):
            arrays = tree_map(self._plain_value, (args, kwargs))
            return tree_map(_plain, self.execute(node.target, *arrays))
        return node.target(*args, **kwargs)  # type: ignore[operator]

    def operator(self, op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], value: Any) -> Any:
        """One operator: its results, as ``Padded``.

        Args:
            op: the operator.
            args, kwargs: its arguments: ``Padded`` for tensors, ``Size`` for sizes that change.
            value: what PyTorch says about the result: fake tensors.

        Raises:
            NotUnderstood: it touches padding and has no rule.
        """
        if op._schema.is_mutable:
            raise NotUnderstood("writes to a tensor")
        given = dict(zip([a.name for a in op._schema.arguments], args, strict=False)) | kwargs
        call = Call(op, given, value, self)
        checks = len(self.trace.checks)
        found = _RULES.get(call.name)
        if not self._touches_padding(call):
            result = tree_map(_plain, self.apply(call.op, call.given))
        elif found is not None:
            result = found(call)
        elif torch.Tag.pointwise in op.tags and not _draws(op):
            result = pointwise(call)
            if len(self.trace.checks) > checks:
                raise NotUnderstood("checks values, and those in the padding would be wrong")
        else:
            padded = [f"dimension {i} of size {product(x.dims[i])}" for x in call.tensors() for i in x.axes()]
            raise NotUnderstood(f"has no rule for {padded[0] if padded else 'a size that changes'}")
        return self._checked(result, value)

    def _touches_padding(self, call: Call) -> bool:
        if any(x.padded for x in call.tensors()):
            return True
        if any(_changes(x) for x in tree_leaves(call.value)):
            return True
        scalars = {a.name for a in call.op._schema.arguments if "Scalar" in str(a.type) or "number" in str(a.type)}
        entry = find(short_name(call.op))
        static = frozenset() if entry is None else entry.static
        for name, x in call.given.items():
            leaves = tree_leaves(x, is_leaf=lambda y: isinstance(y, Size | Padded))
            if any(isinstance(y, Size) for y in leaves) and (name not in scalars or name in static):
                return True
        return False

    def apply(self, op: OpOverload, given: dict[str, Any]) -> Any:
        """One operator on arrays; numbers that are sizes become the sizes of this call."""
        plain = tree_map(self._plain_value, given, is_leaf=lambda x: isinstance(x, Padded | Size))
        args, kwargs, in_order = [], {}, True
        for a in op._schema.arguments:
            if a.name not in plain:
                in_order = False
            elif in_order and not a.kwarg_only:
                args.append(plain[a.name])
            else:
                kwargs[a.name] = plain[a.name]
        return self.execute(op, args, kwargs)

    def _plain_value(self, x: Any) -> Any:
        if isinstance(x, Padded):
            return x.array
        return evaluate(x.expr, self.frame.counts) if isinstance(x, Size) else x

    def _checked(self, result: Any, value: Any) -> Any:
        """The results, if their sizes are what PyTorch says."""
        results = result if isinstance(result, tuple | list) else [result]
        values = value if isinstance(value, tuple | list) else [value]
        for r, v in zip(results, values, strict=True):
            if not isinstance(r, Padded) or not isinstance(v, torch.Tensor):
                continue
            sizes = [expression(n) for n in v.shape]
            right = len(sizes) == len(r.dims) and all(
                self.frame.same(product(d), n) for d, n in zip(r.dims, sizes, strict=True)
            )
            if not right or tuple(r.array.shape) != self.frame.shape(r.dims):
                raise NotUnderstood(f"has a result of size {sizes}, and its rule gives {[product(d) for d in r.dims]}")
        return result


def _plain(x: Any) -> Any:
    """An array without padding."""
    return Padded(x, tuple(normal((n,)) for n in x.shape)) if isinstance(x, jax.Array) else x


def _changes(x: Any) -> bool:
    """Whether what PyTorch says of a tensor has a size that changes."""
    return isinstance(x, torch.Tensor) and any(isinstance(n, torch.SymInt) for n in x.shape)


def _draws(op: OpOverload) -> bool:
    entry = find(short_name(op))
    return entry is not None and entry.random


def broadcast(frame: Frame, values: Sequence[Padded]) -> tuple[list[Padded], tuple[Dim, ...]]:
    """Tensors that are combined element by element, with the same layout wherever a dimension is not repeated; and the
    dimensions of what they make.
    """
    rank = max((len(x.dims) for x in values), default=0)
    dims: list[Dim] = []
    for k in range(-rank, 0):
        there = [x.dims[k] for x in values if len(x.dims) >= -k and x.dims[k] != ()]
        # Of different layouts of one size the one with most atoms: what can be split later is kept.
        dims.append(max(there, key=len) if there else ())
    aligned = []
    for x in values:
        for axis in range(len(x.dims)):
            wanted = dims[rank - len(x.dims) + axis]
            if x.dims[axis] not in ((), wanted):
                x = frame.relayout(x, axis, wanted)
        aligned.append(x)
    return aligned, tuple(dims)


def aligned(call: Call) -> tuple[dict[str, Any], tuple[Dim, ...]]:
    """The call's arguments with its tensors in one layout, and the dimensions of their combination."""
    names = [n for n, x in call.given.items() if isinstance(x, Padded)]
    values, dims = broadcast(call.frame, [call.given[n] for n in names])
    return dict(zip(names, values, strict=True)), dims


def pointwise(call: Call) -> Any:
    """An operator that computes each element from those at its place: what it makes of padding is padding."""
    changed, dims = aligned(call)
    result = call.run(**changed)
    if isinstance(result, tuple | list):
        return type(result)(Padded(x, dims) for x in result)
    return Padded(result, dims)


_POINTWISE = (
    "_to_copy alias alias_copy complex contiguous copy detach detach_copy elu_backward fill floor_divide "
    "hardshrink_backward hardsigmoid_backward hardswish hardswish_backward hardtanh_backward isclose "
    "leaky_relu_backward lift lift_fresh "
    "lift_fresh_copy log_sigmoid_backward masked_fill mish_backward polar real imag rsub softplus_backward "
    "softshrink_backward where zero empty_like zeros_like ones_like full_like special_ndtr special_polygamma "
    "_conj _neg_view resolve_conj resolve_neg _masked_scale log_sigmoid_forward"
)
for _name in _POINTWISE.split():
    rule(_name)(pointwise)


# ---- new tensors ----------------------------------------------------------------------------------------------------


def extents(call: Call, sizes: Sequence[Any]) -> tuple[list[int], tuple[Dim, ...]]:
    """Places and layout of a new tensor of the given sizes."""
    dims = tuple(factors(n) for n in sizes)
    return [call.frame.extent(d) for d in dims], dims


@rule("full", "zeros", "ones", "empty", "new_zeros", "new_ones", "new_full", "new_empty")
def factory(call: Call) -> Padded:
    """A new tensor whose elements are alike."""
    size, dims = extents(call, call.sizes())
    return Padded(call.run(size=size), dims)


@rule("empty_strided", "new_empty_strided", "empty_permuted")
def factory_strided(call: Call) -> Padded:
    """A new tensor in another order of memory, which arrays do not have."""
    size, dims = extents(call, call.sizes())
    made = call.run(torch.ops.aten.zeros.default, size=size, dtype=call.value.dtype)
    return Padded(made, dims)


@rule("arange")
def arange(call: Call) -> Padded:
    """start, start + step, ... as many as the bucket has places."""
    (size,) = call.sizes()
    whole, rest = sympy.sympify(size).as_coeff_Mul()
    dim = normal((rest, int(whole)))
    start, step = call.given.get("start", 0), call.given.get("step", 1)
    places = jnp.arange(call.frame.extent(dim), dtype=jnp.int64)
    if call.value.dtype.is_floating_point:
        places = places.astype(jnp.float64)
    moved = call.interpreter._plain_value(start) + places * call.interpreter._plain_value(step)
    from torchtpu.lowering.dtypes import to_jax

    return Padded(moved.astype(to_jax(call.value.dtype)), (dim,))


@rule("scalar_tensor")
def scalar_tensor(call: Call) -> Padded:
    """A number as a tensor."""
    return Padded(call.run(), ())
