"""Run one aten operator on JAX arrays: its lowering, or PyTorch's decomposition of it into operators that have one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_map

from torchtpu.lowering.dtypes import to_jax, to_torch
from torchtpu.lowering.registry import Lowering, find

__all__ = ["NoLowering", "apply", "can_lower", "constant_array", "run_graph", "short_name", "walk"]

_DROPPED = ("generator", "device", "layout", "pin_memory")


class NoLowering(NotImplementedError):
    """An operator has neither a lowering nor a usable decomposition."""


def short_name(op: OpOverload) -> str:
    """``aten.add.Tensor`` -> ``"add.Tensor"``; other namespaces keep theirs: ``"torchvision::nms.default"``."""
    base = op._schema.name
    return f"{base.removeprefix('aten::')}.{op._overloadname}"


@functools.cache
def _decompositions() -> dict[Any, Any]:
    from torch._decomp import core_aten_decompositions, decomposition_table

    return {**core_aten_decompositions(), **decomposition_table}


def decomposition(op: OpOverload) -> Any | None:
    """PyTorch's own decomposition of an operator, or None."""
    return _decompositions().get(op)


def can_lower(op: OpOverload) -> bool:
    """Whether ``apply`` has a way to run the operator."""
    return find(short_name(op)) is not None or decomposition(op) is not None


def apply(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``op`` on JAX arrays (see ``registry`` for what each argument must be).

    Raises:
        NoLowering: there is neither a lowering nor a decomposition.
    """
    entry = find(short_name(op))
    if entry is not None:
        # A generator may also be given by position.
        kept = [x for x, a in zip(args, op._schema.arguments, strict=False) if a.name != "generator"]
        return call(entry, tuple(kept), kwargs)
    function = decomposition(op)
    if function is None:
        raise NoLowering(f"{op} has no lowering and no decomposition")
    return _interpret(function, args, kwargs)


def call(entry: Lowering, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a lowering, leaving out the arguments that mean nothing to XLA."""
    kept = {
        k: v for k, v in kwargs.items() if k not in _DROPPED or (entry.parameters is not None and k in entry.parameters)
    }
    return entry.function(*args, **kept)


def _interpret(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Trace the decomposition to a graph of simpler operators on meta tensors, and run that graph on the arrays."""
    arrays: list[jax.Array] = []

    def stand_in(x: Any) -> Any:
        if isinstance(x, jax.Array):
            arrays.append(x)
            return torch.empty(x.shape, dtype=to_torch(x.dtype), device="meta")
        return x

    meta_args, meta_kwargs = tree_map(stand_in, (args, kwargs))
    if "device" in meta_kwargs:
        meta_kwargs["device"] = torch.device("meta")
    leaves, rebuild = torch.utils._pytree.tree_flatten((meta_args, meta_kwargs))
    slots = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def run(*tensors: torch.Tensor) -> Any:
        filled = list(leaves)
        for i, tensor in zip(slots, tensors, strict=True):
            filled[i] = tensor
        a, k = torch.utils._pytree.tree_unflatten(filled, rebuild)
        return function(*a, **k)

    graph = make_fx(run)(*(leaves[i] for i in slots)).graph
    return run_graph(graph, arrays)


def walk(
    graph: torch.fx.Graph,
    inputs: Sequence[Any],
    compute: Callable[[torch.fx.Node, dict[torch.fx.Node, Any]], Any],
    constant: Callable[[torch.Tensor], Any],
) -> Any:
    """The results of an FX graph.

    Args:
        graph: the graph.
        inputs: values of its placeholders.
        compute: the value of a node that calls something, from those before it.
        constant: the value of a tensor that the graph holds.
    """
    values: dict[torch.fx.Node, Any] = {}
    remaining = iter(inputs)
    for node in graph.nodes:
        if node.op == "placeholder":
            values[node] = next(remaining)
        elif node.op == "output":
            return torch.fx.node.map_arg(node.args[0], values.__getitem__)
        elif node.op == "get_attr":
            held = getattr(graph.owning_module, node.target)
            values[node] = constant(held) if isinstance(held, torch.Tensor) else held
        else:
            values[node] = compute(node, values)
    raise AssertionError("a graph without an output")


def run_graph(graph: torch.fx.Graph, inputs: list[Any], run: Callable[..., Any] = apply) -> Any:
    """Interpret an FX graph of functional aten operators on JAX arrays.

    Args:
        graph: the graph.
        inputs: values of its placeholders.
        run: runs one operator; takes it, its arguments and its keyword arguments.

    Raises:
        NoLowering: the graph mutates a tensor or calls something that is not an aten operator.
    """

    def compute(node: torch.fx.Node, values: dict[torch.fx.Node, Any]) -> Any:
        target: Any = node.target
        if not callable(target):
            raise NoLowering(f"cannot interpret {node.format_node()}")
        args: Any
        kwargs: Any
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        if target is torch.ops.aten.sym_size.int:
            return args[0].shape[args[1]]
        if isinstance(target, OpOverload) and target._schema.is_mutable:
            raise NoLowering(f"the decomposition mutates a tensor: {target}")
        if isinstance(target, OpOverload) or (isinstance(target, HigherOrderOperator) and run is not apply):
            return run(target, tuple(args), dict(kwargs))
        return target(*args, **kwargs)

    return walk(graph, inputs, compute, constant_array)


def constant_array(tensor: torch.Tensor) -> jax.Array:
    """A tensor that a graph holds, wherever it lives; its bits are taken, since NumPy does not know every dtype."""
    flat = tensor.detach().cpu().reshape(-1)
    return jax.numpy.asarray(flat.view(torch.uint8).numpy().view(to_jax(tensor.dtype)).reshape(tensor.shape))
