"""One functional FX graph of aten operators as a program: read the inputs' storages, replay the lowerings, wrap the
results. In fused mode a graph is recorded like an operator, so that what surrounds it is compiled with it.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from typing import Any

import jax
import torch
from torch._ops import OperatorBase

from torchtpu import _C
from torchtpu.compile.aliases import Aliases
from torchtpu.compile.draws import Draws, takes_draws
from torchtpu.compile.grouped import share_heads
from torchtpu.compile.padding import Buckets, PaddedProgram, has_changing_size
from torchtpu.compile.padding_layout import NotUnderstood
from torchtpu.eager import modes
from torchtpu.eager.arrays import prepare_storage
from torchtpu.eager.launch import block, examples, launcher
from torchtpu.eager.program import (
    Constant,
    Inputs,
    Meta,
    Program,
    dense,
    describe_values,
    physical_value,
    stacked_checks,
)
from torchtpu.eager.views import row_major
from torchtpu.lowering.apply import run_graph
from torchtpu.lowering.context import Trace, tracing
from torchtpu.lowering.dtypes import rounded, to_torch
from torchtpu.runtime import checks, observe

__all__ = ["GraphProgram"]


class GraphProgram:
    """A graph and its programs, one for each combination of input sizes, strides and dtypes.

    Args:
        module: a graph of functional aten operators (what AOTAutograd gives a compiler).
        buckets: which sizes programs are compiled for where a size changes; None for exact sizes.

    Attributes:
        padded: the programs for buckets; None where sizes do not change, or are compiled for exactly.
        exact_because: why sizes that change are compiled for exactly: operators, and what is not known of them.
    """

    def __init__(self, module: torch.fx.GraphModule, buckets: Buckets | None = None) -> None:
        self.module = module
        self.padded: PaddedProgram | None = None
        self.exact_because: list[str] = []
        placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
        self.handle = _C.register_signature([n.name for n in placeholders], [False] * len(placeholders))
        self.random = any(takes_draws(n) for n in module.graph.nodes)
        self.programs: dict[bytes, Callable[..., Any]] = {}
        output = next(n for n in module.graph.nodes if n.op == "output")
        self.aliases = Aliases(placeholders, output.args[0])
        self.metas = [_meta_of(n) for n in output.args[0]]
        self.from_cpu = [i for i, n in enumerate(placeholders) if _is_on_cpu(n) and n.meta["val"].dim()]
        self.on_cpu = [i for i, n in enumerate(output.args[0]) if _is_on_cpu(n)]
        self.operators = tuple(str(n.target) for n in module.graph.nodes if isinstance(n.target, OperatorBase))
        self.name = f"a graph of {len(self.operators)} operators"
        if (
            buckets is not None
            and not buckets.exact
            and any(has_changing_size(n.meta.get("val")) for n in placeholders)
        ):
            try:
                self.padded = PaddedProgram(module, buckets, self.name)
            except NotUnderstood as error:
                self._give_up(error)
        if self.padded is None:
            share_heads(module.graph)

    def _give_up(self, why: NotUnderstood) -> None:
        """Compile for exact sizes from now on."""
        self.padded = None
        self.exact_because.append(str(why))
        observe.exact(f"{self.name}: {why}")

    @functools.cached_property
    def text(self) -> str:
        """What the graph computes. Not asked for while Dynamo compiles, when constants cannot be read."""
        return _text(self.module)

    def __call__(self, *inputs: Any) -> list[Any]:
        """Run the graph on tensors (and sizes) and return its results. What it reads or gives on the CPU is copied."""
        if self.from_cpu:
            inputs = tuple(t.to("tpu") if i in self.from_cpu else t for i, t in enumerate(inputs))
        results = self._run(inputs)
        self.aliases.restore(inputs, results)
        for i in self.on_cpu:
            results[i] = results[i].cpu()
        return results

    def _run(self, inputs: tuple[Any, ...]) -> list[Any]:
        if self.padded is not None:
            try:
                found = self.padded(inputs)
                if found is not None:
                    return found
            except NotUnderstood as error:
                self._give_up(error)
        key, operands, _, device = _C.flatten(self.handle, inputs, {})
        run = self.programs.get(key)
        if run is None:
            tensors = [t for t in inputs if isinstance(t, torch.Tensor) and t.device.type == "tpu"]
            if sum(prepare_storage(t) for t in tensors):
                key, operands, _, device = _C.flatten(self.handle, inputs, {})
            run = self.programs[key] = self._build(inputs, operands, device)
        return run(operands, device)

    def _build(self, inputs: tuple[Any, ...], operands: list[Any], device: int) -> Callable[..., Any]:
        described = describe_values(inputs)
        notes: dict[str, Any] = {"random": self.random, "writes": [], "nested": [], "operators": self.operators}

        def traced(*given: Any) -> list[jax.Array]:
            values = Inputs(described, given, self.random)
            trace = Trace()
            draws = Draws(trace, values.seed)
            with tracing(trace):
                results = run_graph(self.module.graph, [values.value(x) for x in described.args], draws.run)
            arrays: list[jax.Array] = []
            outputs: list[Meta | Constant] = []
            for result, meta in zip(results, self.metas, strict=True):
                if not isinstance(result, jax.Array):
                    outputs.append(Constant(result))
                    continue
                size = tuple(result.shape)
                if meta is None or meta.size != size:
                    meta = Meta(size, row_major(size), to_torch(result.dtype))
                outputs.append(meta)
                arrays.append(physical_value(rounded(result, meta.dtype), meta))
            notes["outputs"], notes["draws"] = outputs, draws.count
            notes["checks"] = tuple((c.message, c.error) for c in trace.checks)
            return [*arrays, *stacked_checks(trace)]

        with jax.enable_x64(True):
            closed = jax.make_jaxpr(traced)(*examples(described, operands, device, self.random))
        settings = torch.get_default_dtype(), torch.get_float32_matmul_precision(), device
        key = repr((self.text, self.metas, described.args, described.operands, settings))
        program = Program(self.name, key, described, closed, notes)
        launch, outputs, messages, wrap = launcher(program, described), program.outputs, program.checks, _C.wrap

        def call(operands: list[Any], device: int) -> list[Any]:
            values = launch((), {}, operands, device)
            if messages:
                checks.note(values[-1], messages, program.name)
            if modes.blocking:
                block(program.name, values, device)
            made = iter(values)
            return [s.value if isinstance(s, Constant) else wrap(s, next(made), device) for s in outputs]

        return call


def _text(module: torch.fx.GraphModule) -> str:
    """What a graph computes, the same in every process: nodes, and by their contents constants and subgraphs."""
    parts = [str(module.graph)]
    for node in module.graph.find_nodes(op="get_attr"):
        held = getattr(module, node.target)
        if isinstance(held, torch.fx.GraphModule):
            parts.append(f"{node.target}: {_text(held)}")
        elif isinstance(held, torch.Tensor):
            content = held.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
            parts.append(f"{node.target}: {hashlib.sha256(content).hexdigest()}")
        else:
            parts.append(f"{node.target}: {held!r}")
    return "\n".join(parts)


def _is_on_cpu(node: Any) -> bool:
    value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
    return isinstance(value, torch.Tensor) and value.device.type == "cpu"


def _meta_of(node: Any) -> Meta | None:
    """What AOTAutograd expects of a result; None for numbers and for sizes known only when the graph runs."""
    value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
    if not isinstance(value, torch.Tensor) or not all(isinstance(n, int) for n in (*value.shape, *value.stride())):
        return None
    return dense(Meta(tuple(value.shape), tuple(value.stride()), value.dtype))
