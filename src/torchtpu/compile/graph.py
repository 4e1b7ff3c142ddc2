"""One functional FX graph of aten operators as a program: read the inputs' storages, replay the lowerings, wrap the
results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import torch

from torchtpu import _C
from torchtpu.compile.draws import Draws, takes_draws
from torchtpu.eager.arrays import force, make_spec, number_operand, prepare_storage
from torchtpu.eager.errors import translate
from torchtpu.eager.kernels import reserve_seed, seed_words
from torchtpu.eager.program import Constant, Meta, Window, dense, describe_values, physical_value, read_window
from torchtpu.eager.views import row_major
from torchtpu.lowering.apply import run_graph
from torchtpu.lowering.context import Trace, tracing
from torchtpu.lowering.dtypes import rounded, to_torch
from torchtpu.runtime import checks, devices
from torchtpu.runtime.compiler import compile_program

__all__ = ["GraphProgram"]


class GraphProgram:
    """A graph and its compiled programs, one for each combination of input sizes, strides and dtypes.

    Args:
        module: a graph of functional aten operators (what AOTAutograd gives a compiler).
    """

    def __init__(self, module: torch.fx.GraphModule) -> None:
        self.module = module
        placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
        self.handle = _C.register_signature([n.name for n in placeholders], [False] * len(placeholders))
        self.random = any(takes_draws(n) for n in module.graph.nodes)
        self.programs: dict[bytes, Callable[..., Any]] = {}
        output = next(n for n in module.graph.nodes if n.op == "output")
        self.metas = [_meta_of(n) for n in output.args[0]]
        self.operators = [str(n.target) for n in module.graph.nodes if n.op == "call_function"]
        self.name = f"a graph of {len(self.operators)} operators"

    def __call__(self, *inputs: Any) -> list[Any]:
        """Run the graph on tensors (and sizes) and return its results."""
        key, operands, _, device = _C.flatten(self.handle, inputs, {})
        run = self.programs.get(key)
        if run is None:
            tensors = [t for t in inputs if isinstance(t, torch.Tensor) and t.device.type == "tpu"]
            if sum(prepare_storage(t) for t in tensors):
                key, operands, _, device = _C.flatten(self.handle, inputs, {})
            run = self.programs[key] = self._build(inputs, [force(x) for x in operands], device)
        return run([force(x) for x in operands], device)

    def _build(self, inputs: tuple[Any, ...], operands: list[Any], device: int) -> Callable[..., Any]:
        described = describe_values(inputs)
        numbers = [i for i, s in enumerate(described.operands) if s is None]
        notes: dict[str, Any] = {}

        def traced(*given: Any) -> list[jax.Array]:
            values = list(given)
            trace = Trace()
            draws = Draws(trace, values.pop() if self.random else None)

            def value(x: Any) -> Any:
                if not isinstance(x, Window):
                    return described.number(x, values)
                return read_window(described.base(x, values), x, [jax.numpy.int32(s) for s in x.starts])

            with tracing(trace):
                results = run_graph(self.module.graph, [value(x) for x in described.args], draws.run)
            arrays, specs = [], []
            for result, meta in zip(results, self.metas, strict=True):
                if not isinstance(result, jax.Array):
                    specs.append(Constant(result))
                    continue
                size = tuple(result.shape)
                if meta is None or meta.size != size:
                    meta = Meta(size, row_major(size), to_torch(result.dtype))
                specs.append(make_spec(meta.size, meta.stride, meta.dtype, self.name))
                arrays.append(physical_value(rounded(result, meta.dtype), meta))
            notes["specs"], notes["draws"] = specs, draws.count
            notes["checks"] = tuple((c.message, c.error) for c in trace.checks)
            if trace.checks:
                arrays.append(jax.numpy.stack([c.value.astype(jax.numpy.int64) for c in trace.checks]))
            return arrays

        examples = [number_operand(x, device) if i in numbers else x for i, x in enumerate(operands)]
        if self.random:
            examples.append(np.zeros(4, np.uint32))
        run = compile_program(traced, examples, devices.device(device), self.name, operators=self.operators)
        specs, messages, draws = notes["specs"], notes["checks"], notes["draws"]

        def call(operands: list[Any], device: int) -> list[Any]:
            for i in numbers:
                operands[i] = number_operand(operands[i], device)
            if self.random:
                operands.append(seed_words(reserve_seed(None, device, draws)))
            try:
                values = run(*operands)
            except Exception as error:
                raise translate(error, self.name, device) from error
            if values:
                devices.note(device, values[-1])
            if messages:
                checks.note(values[-1], messages, self.name)
            made = iter(values)
            return [s.value if isinstance(s, Constant) else _C.wrap(s, next(made), device) for s in specs]

        return call


def _meta_of(node: Any) -> Meta | None:
    """What AOTAutograd expects of a result; None for numbers and for sizes known only when the graph runs."""
    value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
    if not isinstance(value, torch.Tensor) or not all(isinstance(n, int) for n in (*value.shape, *value.stride())):
        return None
    return dense(Meta(tuple(value.shape), tuple(value.stride()), value.dtype))
