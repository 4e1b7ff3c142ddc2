"""A PyTorch model as a graph of functional operators, taken on the meta device: no weights are needed.

The graph keeps attention whole, and knows for every operator the module and the source line it comes from.
"""

from __future__ import annotations

import contextlib
import functools
import linecache
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.export.decomp_utils import CustomDecompTable
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind

from torchtpu.aot.decode import PREFIX, Decoder, has_cache
from torchtpu.aot.masks import simplify_attention

__all__ = ["Graph", "GraphError", "Input", "capture"]

_aten = torch.ops.aten
_KEPT = (_aten.scaled_dot_product_attention.default, _aten.linear.default, _aten.detach.default)
"""Operators that have a form of their own here, and are not to become others."""
_ASSERTIONS = (
    _aten._assert_tensor_metadata.default,
    _aten._assert_scalar.default,
    _aten._assert_async.msg,
    _aten.sym_constrain_range.default,
    _aten.sym_constrain_range_for_size.default,
)


class GraphError(RuntimeError):
    """The model cannot be made a graph; the message says where and what to do."""


@dataclass(frozen=True)
class Input:
    """An argument of the graph.

    Attributes:
        node: its placeholder.
        kind: ``"parameter"``, ``"buffer"`` or ``"input"``.
        name: dotted name in the model, or the name of an argument of ``forward``.
        trained: a parameter that asks for a gradient.
    """

    node: torch.fx.Node
    kind: str
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trained: bool = False


@dataclass
class Graph:
    """What ``capture`` returns.

    Attributes:
        fx: the graph.
        inputs: its arguments, in order; those that are constants are left out.
        constants: values of the placeholders that are constants.
        outputs: (node, its path in the result such as ``"loss"``) of what ``forward`` returns.
        writes: {name of a buffer: node of its new value}.
        blocks: dotted names of the lists of modules in the model, the outer ones first.
        functions: names of the model's own ``torch.autograd.Function``s, whose forward alone is in the graph.
        loops: what ``blocks.find_loops`` found in it; None until it has looked.
    """

    fx: torch.fx.Graph
    inputs: list[Input]
    constants: dict[torch.fx.Node, Any]
    outputs: list[tuple[torch.fx.Node, str]]
    writes: dict[str, torch.fx.Node]
    blocks: list[str]
    functions: list[str] = field(default_factory=list)
    loops: list[Any] | None = field(default=None, repr=False, compare=False)

    def output(self, name: str) -> torch.fx.Node | None:
        """The node of a result by its name, or None."""
        return next((node for node, path in self.outputs if path == name), None)


def capture(model: torch.nn.Module, arguments: Mapping[str, Any]) -> Graph:
    """Trace a model. One that is given a cache writes it: the cache's tensors are buffers of the graph.

    Args:
        model: on the meta device, in the mode (train or eval) it is wanted in.
        arguments: keyword arguments of its ``forward``; tensors on the meta device.

    Raises:
        GraphError: ``torch.export`` cannot trace it.
    """
    prefix = ""
    if has_cache(arguments):
        decoder = Decoder(model, arguments)
        model, arguments = decoder, {k: v for k, v in arguments.items() if k not in decoder.caches}
        prefix = PREFIX
    table = CustomDecompTable()
    for op in _KEPT:
        table.pop(op, None)
    try:
        with warnings.catch_warnings(), _functions_called() as functions:
            warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)  # PyTorch's own use of it
            program = torch.export.export(model, (), dict(arguments), strict=False)
            _detach_without_grad(program.graph)
            program = program.run_decompositions(table)
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        raise GraphError(
            f"torch.export cannot trace {type(model).__name__}: {type(error).__name__}: {reason}. "
            f"A model that is checked must not branch on the values of tensors{_where(error)}"
        ) from error
    graph = _read(program, model, prefix)
    graph.functions = list(functions)
    return graph


@contextlib.contextmanager
def _functions_called() -> Iterator[dict[str, None]]:
    """Names of the ``torch.autograd.Function``s that are applied meanwhile, PyTorch's own left out."""
    called: dict[str, None] = {}
    kind: Any = torch.autograd.Function
    original = kind.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if not cls.__module__.startswith("torch."):
            called.setdefault(cls.__qualname__)
        return original.__get__(None, cls)(*args, **kwargs)

    kind.apply = classmethod(apply)
    try:
        yield called
    finally:
        kind.apply = original


def _detach_without_grad(graph: torch.fx.Graph) -> None:
    """Mark what ``torch.no_grad`` makes: its graph is part of the others' from here on, and has no gradient."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.higher_order.wrap_with_set_grad_enabled):
        if node.args[0]:
            continue
        for result in list(node.users):
            value = result.meta.get("val")
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                with graph.inserting_after(result):
                    detached = graph.call_function(_aten.detach.default, (result,))
                detached.meta = dict(result.meta)
                result.replace_all_uses_with(detached, delete_user_cb=lambda user, own=detached: user is not own)


def _where(error: BaseException) -> str:
    """The deepest line of the user's that an error passed through."""
    found = ""
    trace = error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if not re.search(r"/(torch|torchtpu)/", name) and not name.startswith("<"):
            found = f" (at {name}:{trace.tb_lineno})"
        trace = trace.tb_next
    return found


def _read(program: torch.export.ExportedProgram, model: torch.nn.Module, prefix: str) -> Graph:
    graph, signature = program.graph, program.graph_signature
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in _ASSERTIONS and not node.users:
            graph.erase_node(node)
    weights = dict(model.named_parameters(remove_duplicate=False))
    trained = {n.removeprefix(prefix) for n, p in weights.items() if p.requires_grad}
    inputs, constants = [], {}
    names = _argument_names(program)
    first: dict[int, torch.fx.Node] = {}
    for node, spec in zip(graph.find_nodes(op="placeholder"), signature.input_specs, strict=True):
        value = node.meta.get("val")
        if isinstance(spec.arg, ConstantArgument):
            constants[node] = spec.arg.value
        elif spec.kind is InputKind.CONSTANT_TENSOR and not _abstract(held := program.constants[str(spec.target)]):
            constants[node] = held
        elif (weight := weights.get(str(spec.target))) is not None and first.setdefault(id(weight), node) is not node:
            node.replace_all_uses_with(first[id(weight)])  # a tied weight is one
        elif isinstance(value, torch.Tensor):
            name = (spec.target or names.get(node.name, node.name)).removeprefix(prefix)
            kinds = {InputKind.PARAMETER: "parameter", InputKind.USER_INPUT: "input"}
            kind = kinds.get(spec.kind, "buffer")
            inputs.append(Input(node, kind, name, tuple(map(int, value.shape)), value.dtype, name in trained))
        else:
            raise GraphError(f"the model takes {spec.arg.name} ({spec.kind.name}), which is not a tensor")
    simplify_attention(graph, constants)
    graph.eliminate_dead_code()
    results = graph.output_node().args[0]
    assert isinstance(results, Sequence)
    outputs: list[tuple[torch.fx.Node, str]] = []
    writes: dict[str, torch.fx.Node] = {}
    paths = iter(_result_paths(program))
    for node, spec in zip(results, signature.output_specs, strict=True):
        if spec.kind is OutputKind.USER_OUTPUT:
            path = next(paths)
            if isinstance(node, torch.fx.Node):
                outputs.append((node, path))
        elif spec.kind in (OutputKind.BUFFER_MUTATION, OutputKind.USER_INPUT_MUTATION):
            writes[names.get(str(spec.target), str(spec.target)).removeprefix(prefix)] = node
        else:
            raise GraphError(f"the model has a result of the kind {spec.kind.name}")
    lists = (torch.nn.ModuleList, torch.nn.Sequential)
    blocks = [
        name.removeprefix(prefix)
        for name, module in model.named_modules()
        if isinstance(module, lists) and len(module) > 1
    ]
    if prefix:
        for node in graph.nodes:
            stack = node.meta.get("nn_module_stack", {})
            node.meta["nn_module_stack"] = {k: (path.removeprefix(prefix), kind) for k, (path, kind) in stack.items()}
    return Graph(graph, inputs, constants, outputs, writes, blocks)


def _abstract(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and (isinstance(tensor, FakeTensor) or tensor.device.type == "meta")


def _argument_names(program: torch.export.ExportedProgram) -> dict[str, str]:
    """{name of a placeholder: path of the argument it stands for}."""
    spec = program.call_spec.in_spec
    assert spec is not None
    tree = torch.utils._pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    paths = {}
    for path, position in torch.utils._pytree.tree_flatten_with_path(tree[1])[0]:
        paths[position] = _dotted(path)
    return {str(n): paths.get(i, str(n)) for i, n in enumerate(program.graph_signature.user_inputs)}


def _result_paths(program: torch.export.ExportedProgram) -> Sequence[str]:
    spec = program.call_spec.out_spec
    assert spec is not None
    tree = torch.utils._pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    try:
        return [_dotted(path) for path, _ in torch.utils._pytree.tree_flatten_with_path(tree)[0]]
    except ValueError:  # a class that was registered without names; what is a mapping has them nevertheless
        flat = isinstance(tree, Mapping) and len(tree) == spec.num_leaves
        return [str(k) for k in tree] if flat else [str(i) for i in range(spec.num_leaves)]


def _dotted(path: Sequence[Any]) -> str:
    keys = [getattr(k, "key", getattr(k, "idx", getattr(k, "name", k))) for k in path]
    return ".".join(str(k) for k in keys)


def module_path(node: torch.fx.Node) -> str:
    """The dotted name of the module an operator belongs to; empty for the model itself."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = str(list(stack.values())[-1][0])
    return re.sub(r"@\d+", "", path)  # torch.export marks the second call of a module


@functools.lru_cache(maxsize=65536)
def _line_of(stack: str) -> tuple[str, int, str] | None:
    found = None
    for file, number in re.findall(r'File "([^"]+)", line (\d+)', stack):
        if not re.search(r"/(torch|torchtpu)/", file):
            found = file, int(number)
    if found is None:
        return None
    file, line = found
    return re.sub(r"^.*?/(?:site|dist)-packages/", "", file), line, linecache.getline(file, line).strip()


def source_line(node: torch.fx.Node) -> tuple[str, int, str] | None:
    """(file, line, text) of the model's code that made an operator, or None."""
    stack = node.meta.get("stack_trace")
    return _line_of(stack) if stack else None
