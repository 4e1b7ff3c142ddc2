"""An exported program as a function that JAX can export: weights and inputs are its arguments, what it writes are
results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind, TensorArgument
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from torchtpu.compile.draws import Draws, takes_draws
from torchtpu.export.package import ExportError
from torchtpu.export.signature import describe_tree, leaf_paths
from torchtpu.lowering.apply import NoLowering, run_graph, short_name
from torchtpu.lowering.context import Trace, tracing
from torchtpu.lowering.dtypes import to_jax
from torchtpu.lowering.registry import find

__all__ = ["Traced", "trace_program"]

_aten = torch.ops.aten
_ASSERTIONS = {
    # What they assert of sizes and dtypes, the loaded program checks before it runs.
    _aten._assert_tensor_metadata.default,
    _aten._assert_scalar.default,
    _aten.sym_constrain_range.default,
    _aten.sym_constrain_range_for_size.default,
}


@dataclass
class Traced:
    """A program ready to be exported.

    Attributes:
        function: (weights by name, *inputs[, seed]) -> {"outputs": list, "buffers": {name: new value},
            "inputs": {position: new value}, "checks": vector}; empty ones are left out.
        arguments: types of the function's arguments, as ``jax.export`` takes them.
        weights: CPU tensors by name.
        signature: the manifest's part on arguments and results; ``checks`` and ``draws`` are there once the function
            has been traced.
    """

    function: Callable[..., dict[str, Any]]
    arguments: tuple[Any, ...]
    weights: dict[str, torch.Tensor]
    signature: dict[str, Any]


def trace_program(program: ExportedProgram, given: Mapping[str, torch.Tensor] | None, dims: Any) -> Traced:
    """Describe a program and make it a function.

    Args:
        program: what ``torch.export.export`` returned, for any device.
        given: weights in place of its own, by name.
        dims: its ``dynamic_shapes``, for the names of dimensions; None if they are not known.

    Raises:
        ExportError: it needs something that a package does not have.
    """
    program = _decompose(program)
    graph = program.graph
    for module in program.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            _drop_assertions(module.graph)
    reader = _Reader(program, given or {}, dims)
    results = _results(program)
    random = any(takes_draws(n) for n in graph.nodes)
    arguments: list[Any] = [reader.weight_types(), *(t for _, t in reader.inputs)]
    seed = jax.ShapeDtypeStruct((4,), np.uint32)
    signature: dict[str, Any] = {
        "arguments": reader.arguments,
        "inputs": {"tree": reader.tree, "leaves": reader.leaves},
        "outputs": results.outputs,
        "dims": reader.dims.ranges,
    }

    def function(weights: dict[str, jax.Array], *inputs: jax.Array) -> dict[str, Any]:
        trace = Trace()
        draws = Draws(trace, inputs[len(reader.inputs)] if random else None)
        values = [x(weights, inputs) for x in reader.placeholders]
        with tracing(trace):
            made = run_graph(graph, values, _Runner(draws, list(reader.dims.ranges)).run)
        signature["draws"] = draws.count
        signature["checks"] = [[c.error.__name__, c.message] for c in trace.checks]
        return results.collect(made, trace)

    if random:
        with jax.enable_x64(True):
            jax.eval_shape(function, *arguments, seed)
        random = signature["draws"] > 0  # attention without dropout could have drawn, and has not
    return Traced(function, (*arguments, seed) if random else tuple(arguments), reader.weights, signature)


def _drop_assertions(graph: torch.fx.Graph) -> None:
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in _ASSERTIONS and not node.users:
            graph.erase_node(node)
    graph.eliminate_dead_code()


def _decompose(program: ExportedProgram) -> ExportedProgram:
    """The program in functional core operators."""
    try:
        return program.run_decompositions()
    except Exception as error:
        raise ExportError(f"torch.export cannot make the program functional: {error}") from error


class _Runner:
    """Runs the operators of a graph; what fails is reported by the operator's name."""

    def __init__(self, draws: Draws, dims: list[str]) -> None:
        self.draws, self.dims = draws, dims

    def run(self, target: OpOverload | HigherOrderOperator, args: Any, kwargs: dict[str, Any]) -> Any:
        entry = find(short_name(target)) if isinstance(target, OpOverload) else None
        if entry is not None and entry.dynamic:
            raise ExportError(f"the size of the result of {target} depends on values, which a package cannot hold")
        try:
            return self.draws.run(target, args, kwargs)
        except NoLowering as error:
            raise ExportError(f"{target} has no program on the device: {error}") from error
        except Exception as error:
            if not self.dims:
                raise
            raise ExportError(
                f"{target} cannot be exported with sizes that are left open ({', '.join(self.dims)}): {error}. "
                "Save a package for each size, or leave fewer dimensions open"
            ) from error


@dataclass
class _Results:
    """What the graph returns, in order."""

    kinds: list[tuple[str, Any]] = field(default_factory=list)
    outputs: dict[str, Any] = field(default_factory=dict)

    def collect(self, made: Any, trace: Trace) -> dict[str, Any]:
        """The results of a run, sorted."""
        sorted_: dict[str, Any] = {"outputs": [], "buffers": {}, "inputs": {}}
        for (kind, what), value in zip(self.kinds, made, strict=True):
            if kind == "outputs":
                sorted_[kind].append(jnp.asarray(value))
            elif kind != "constant":
                sorted_[kind][what] = value
        found = {k: v for k, v in sorted_.items() if v}
        if trace.checks:
            found["checks"] = jnp.stack([c.value.astype(jnp.int64) for c in trace.checks])
        return found


def _results(program: ExportedProgram) -> _Results:
    leaves: list[Any] = []
    results = _Results()
    user_inputs = [s.arg.name for s in program.graph_signature.input_specs if isinstance(s.arg, TensorArgument)]
    user_inputs = [n for n in user_inputs if n in program.graph_signature.user_inputs]
    names = _weight_names(program)
    for spec in program.graph_signature.output_specs:
        if spec.kind is OutputKind.USER_OUTPUT:
            if isinstance(spec.arg, ConstantArgument):
                leaves.append({"constant": spec.arg.value})
                results.kinds.append(("constant", None))
            elif isinstance(spec.arg, TensorArgument):
                leaves.append({})
                results.kinds.append(("outputs", None))
            else:
                raise ExportError(f"the program returns {spec.arg}: only tensors and constants can be returned")
        elif spec.kind in (OutputKind.BUFFER_MUTATION, OutputKind.PARAMETER_MUTATION):
            results.kinds.append(("buffers", names[str(spec.target)]))
        elif spec.kind is OutputKind.USER_INPUT_MUTATION:
            results.kinds.append(("inputs", str(user_inputs.index(str(spec.target)))))
        else:
            raise ExportError(f"the program has a result of the kind {spec.kind.name}, which a package cannot hold")
    try:
        tree = describe_tree(program.call_spec.out_spec, results=True)
    except TypeError as error:
        raise ExportError(str(error)) from error
    results.outputs = {"tree": tree, "leaves": leaves}
    return results


def _weight_names(program: ExportedProgram) -> dict[str, str]:
    """The name in the package of each parameter, buffer and constant: tied ones have one, unless they are written."""
    signature = program.graph_signature
    written = {s.target for s in signature.output_specs if s.kind is not OutputKind.USER_OUTPUT}
    first: dict[Any, str] = {}
    names: dict[str, str] = {}
    for spec in signature.input_specs:
        if spec.target is None or spec.kind is InputKind.CUSTOM_OBJ:
            continue
        value = _own_weight(program, spec.target)
        identity = (value.untyped_storage()._cdata, value.storage_offset(), value.shape, value.stride(), value.dtype)
        shared = spec.target not in written and value.device.type != "meta"
        names[spec.target] = first.setdefault(identity, spec.target) if shared else spec.target
    return names


def _own_weight(program: ExportedProgram, target: str) -> torch.Tensor:
    """A weight that the program holds; those that are not saved with a state dict are among its constants."""
    found = program.state_dict.get(target)
    return program.constants[target] if found is None else found


class _Dims:
    """The sizes left open: each a symbol of PyTorch and a dimension of JAX.

    Attributes:
        ranges: {name: {"min": int, "max": int or None}}.
    """

    def __init__(self, program: ExportedProgram, names: dict[Any, str]) -> None:
        symbols = sorted({s for n in program.graph.nodes if n.op == "placeholder" for s in _symbols(n)}, key=str)
        self.ranges: dict[str, dict[str, int | None]] = {}
        constraints = []
        for symbol in symbols:
            name = names.get(symbol, str(symbol))
            interval = program.range_constraints.get(symbol)
            low = max(1, int(interval.lower)) if interval is not None else 1  # in JAX a size left open is never zero
            bounded = interval is not None and interval.upper.is_Integer
            high = int(interval.upper) if interval is not None and bounded else None
            self.ranges[name] = {"min": low, "max": high}
            constraints += [f"{name} >= {low}"] + ([f"{name} <= {high}"] if high is not None else [])
        found = jax.export.symbolic_shape(", ".join(self.ranges), constraints=constraints) if symbols else ()
        self.values = dict(zip(symbols, found, strict=True))

    def size(self, n: Any) -> Any:
        """A size as JAX has it."""
        if not isinstance(n, torch.SymInt):
            return int(n)
        return sympy_interp(PythonReferenceAnalysis, self.values, n.node.expr)


def _symbols(node: torch.fx.Node) -> set[Any]:
    value = node.meta.get("val")
    sizes = value.shape if isinstance(value, torch.Tensor) else [value]
    return {s for n in sizes if isinstance(n, torch.SymInt) for s in n.node.expr.free_symbols}


class _Reader:
    """The program's arguments: weights, inputs, and constants that were arguments when it was exported."""

    def __init__(self, program: ExportedProgram, given: Mapping[str, torch.Tensor], dynamic_shapes: Any) -> None:
        self.tree, self.arguments = _argument_tree(program)
        nodes = [n for n in program.graph.nodes if n.op == "placeholder"]
        specs = program.graph_signature.input_specs
        paths = [_named(path, self.arguments, len(self.tree["tuple"][0]["tuple"])) for path in leaf_paths(self.tree)]
        user = [n for n, s in zip(nodes, specs, strict=True) if s.kind is InputKind.USER_INPUT]
        self.dims = _Dims(program, _dimension_names(user, paths, dynamic_shapes))
        self.placeholders: list[Callable[[dict[str, Any], tuple[Any, ...]], Any]] = []
        self.weights: dict[str, torch.Tensor] = {}
        self.inputs: list[tuple[str, Any]] = []
        self.leaves: list[dict[str, Any]] = []
        names = _weight_names(program)
        outputs = program.graph_signature.output_specs
        self.written = {s.target for s in outputs if s.kind is not OutputKind.USER_OUTPUT}
        remaining = iter(paths)
        for node, spec in zip(nodes, specs, strict=True):
            if spec.kind is InputKind.USER_INPUT:
                self._input(node, spec.arg, next(remaining), node.name in self.written)
            elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
                assert spec.target is not None
                self._weight(program, node, spec.target, names[spec.target], given)
            else:
                raise ExportError(f"the program takes {spec.arg.name} ({spec.kind.name}), which a package cannot hold")

    def weight_types(self) -> dict[str, Any]:
        """Types of the weights, by name."""
        return {k: jax.ShapeDtypeStruct(tuple(w.shape), to_jax(w.dtype)) for k, w in self.weights.items()}

    def _input(self, node: torch.fx.Node, argument: Any, path: tuple[Any, ...], written: bool) -> None:
        name = path[0] + "".join(f"[{key!r}]" for key in path[1:])
        if isinstance(argument, ConstantArgument):
            self.leaves.append({"name": name, "constant": argument.value})
            self.placeholders.append(lambda weights, inputs: argument.value)
            return
        if not isinstance(argument, TensorArgument):
            raise ExportError(f"{name} is a number left open; a package takes tensors: pass it as a tensor")
        value = node.meta["val"]
        size = tuple(self.dims.size(n) for n in value.shape)
        described = [n if isinstance(n, int) else str(n) for n in size]
        self.leaves.append({"name": name, "shape": described, "dtype": _dtype_name(value.dtype, name)})
        if written:
            self.leaves[-1]["written"] = True
        position = len(self.inputs)
        self.inputs.append((name, jax.ShapeDtypeStruct(size, to_jax(value.dtype))))
        self.placeholders.append(lambda weights, inputs: inputs[position])

    def _weight(
        self,
        program: ExportedProgram,
        node: torch.fx.Node,
        target: str,
        name: str,
        given: Mapping[str, torch.Tensor],
    ) -> None:
        self.placeholders.append(lambda weights, inputs: weights.get(name))
        if name in self.weights or (not node.users and target not in self.written):
            return  # what the program neither reads nor writes is not saved
        own = _own_weight(program, target)
        weight = given.get(target, own)
        if weight.device.type == "meta":
            raise ExportError(f"{target} has no values (it is on the meta device): give them as state_dict=")
        if weight.shape != own.shape or weight.dtype is not own.dtype:
            raise ExportError(
                f"{target} is {own.dtype}{list(own.shape)} in the program, {weight.dtype}{list(weight.shape)} in "
                "state_dict"
            )
        if weight.dtype is torch.complex128:
            raise ExportError(f"{target} is of {weight.dtype}, which safetensors cannot hold")
        _dtype_name(weight.dtype, target)
        self.weights[name] = weight.detach().cpu().contiguous()


def _dtype_name(dtype: torch.dtype, owner: str) -> str:
    """A dtype as the manifest has it: without ``torch.``.

    Raises:
        ExportError: XLA has no such type.
    """
    try:
        to_jax(dtype)
    except NotImplementedError as error:
        raise ExportError(f"{owner}: {error}") from error
    if dtype is torch.complex32:
        raise ExportError(f"{owner} is of {dtype}, which XLA does not have")
    return str(dtype).removeprefix("torch.")


def _argument_tree(program: ExportedProgram) -> tuple[Any, list[str]]:
    """The tree of (args, kwargs), and the arguments' names in that order."""
    try:
        tree = describe_tree(program.call_spec.in_spec, results=False)
    except TypeError as error:
        raise ExportError(str(error)) from error
    positional, named = tree["tuple"]
    keywords = [key for key, _ in named["dict"]]
    call = program.module_call_graph[0].signature
    known = list(call.forward_arg_names or ()) if call is not None else []
    count = len(positional["tuple"])
    if len(known) < count:
        known = [f"argument_{i}" for i in range(count)]
    return tree, [*known[:count], *keywords]


def _named(path: tuple[Any, ...], arguments: list[str], positional: int) -> tuple[Any, ...]:
    """A path into (args, kwargs) as one that begins with the argument's name."""
    return (arguments[path[1]] if path[0] == 0 else path[1], *path[2:])


def _dimension_names(nodes: list[torch.fx.Node], paths: list[tuple[Any, ...]], dynamic_shapes: Any) -> dict[Any, str]:
    """{symbol: the name that the user gave its dimension}."""
    names: dict[Any, str] = {}
    if not isinstance(dynamic_shapes, Mapping):
        return names
    for node, path in zip(nodes, paths, strict=True):
        found: Any = dynamic_shapes
        for key in path:
            found = found[key] if isinstance(found, Mapping) and key in found else None
        if not isinstance(found, Mapping):
            continue
        for i, n in enumerate(node.meta["val"].shape):
            name = getattr(found.get(i), "__name__", None)
            if name is not None and isinstance(n, torch.SymInt) and n.node.expr.is_Symbol:
                names.setdefault(n.node.expr, name)
    return names
