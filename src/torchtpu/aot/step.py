"""The step that is compiled: forward; forward, backward and AdamW; or the next token with a cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from torchtpu.aot.evaluate import Evaluator, Value
from torchtpu.aot.graph import Graph, GraphError
from torchtpu.aot.layout import Layout
from torchtpu.compile.draws import takes_draws
from torchtpu.lowering.dtypes import to_jax
from torchtpu.sharding import Plan, Spec

__all__ = ["ADAMW", "KINDS", "Step", "build_step"]

KINDS = ("train", "infer", "decode")
ADAMW = {"lr": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
"""AdamW as large language models are trained with (LLaMA, arXiv:2302.13971, section 2.3)."""


@dataclass
class Step:
    """A step as a function of arrays.

    Attributes:
        kind: one of ``KINDS``.
        function: (state, batch) -> (new state, results). ``state`` maps "parameters", "buffers" and, in training,
            "m", "v" and "count" to arrays by name; ``batch`` maps the inputs, and "seed" where something draws.
        state: types of the state, with their shardings.
        batch: types of the inputs.
        results: shardings of what is returned.
        evaluator: the graph behind it.
        assumptions: what was assumed of the model, in sentences.
    """

    kind: str
    function: Callable[[Any, Any], tuple[Any, Any]]
    state: dict[str, Any]
    batch: dict[str, Any]
    results: Any
    evaluator: Evaluator
    assumptions: list[str]

    @property
    def plan(self) -> Plan:
        """The plan it is laid out by."""
        return self.evaluator.layout.plan

    def jitted(self) -> Any:
        """``jax.jit`` of the function, with shardings; the state is donated."""
        shardings = jax.tree.map(lambda t: t.sharding, (self.state, self.batch))
        return jax.jit(self.function, in_shardings=shardings, out_shardings=self.results, donate_argnums=0)

    def jaxpr(self) -> Any:
        """The step as a closed jaxpr, for counting."""
        with jax.enable_x64(True):
            return jax.make_jaxpr(self.function)(self.state, self.batch)

    def stablehlo(self) -> str:
        """The step as StableHLO for TPUs, with shardings and the scope of every operator."""
        with jax.enable_x64(True):
            lowered = self.jitted().trace(self.state, self.batch).lower(lowering_platforms=("tpu",))
            return lowered.as_text(debug_info=True)

    def bytes_per_device(self) -> dict[str, int]:
        """Bytes that each part of the state takes on a device, as the shardings divide it."""
        found = {}
        for part, types in self.state.items():
            found[part] = sum(self._bytes(t) for t in jax.tree.leaves(types))
        found["inputs"] = sum(self._bytes(t) for t in jax.tree.leaves(self.batch))
        return found

    def _bytes(self, of: Any) -> int:
        spec = tuple(() if a is None else (a,) if isinstance(a, str) else tuple(a) for a in of.sharding.spec)
        return self.plan.bytes(of.shape, np.dtype(of.dtype).itemsize, spec)


def build_step(graph: Graph, layout: Layout, kind: str, remat: str = "full") -> Step:
    """Make a step of a captured model.

    Args:
        graph: the model.
        layout: plan, mesh and platform.
        kind: one of ``KINDS``.
        remat: what the backward pass keeps (see ``Evaluator``).

    Raises:
        PlanError: the plan does not divide a tensor.
        GraphError: training, and the model has no result or no parameter to train on.
    """
    evaluator = Evaluator(graph, layout, remat)
    by_kind = {k: [v for v in evaluator.values if v.kind == k] for k in ("parameter", "buffer", "input")}
    typed = lambda values: {v.name: _type(v, layout) for v in values}  # noqa: E731
    state: dict[str, Any] = {"parameters": typed(by_kind["parameter"]), "buffers": typed(by_kind["buffer"])}
    # Token numbers travel in 32 bits. Besides costing twice as much, a 64-bit input that is divided within the program
    # crashes libtpu on TPU7x.
    wide = [v.name for v in by_kind["input"] if v.dtype is torch.int64]
    batch = typed(by_kind["input"])
    batch |= {v.name: _type(v, layout, np.int32) for v in by_kind["input"] if v.name in wide}
    if any(_draws(n) for n in graph.fx.nodes):
        batch["seed"] = jax.ShapeDtypeStruct((4,), np.uint32, sharding=layout.sharding(((),)))
    assumptions = ["integer inputs, such as the numbers of tokens, travel to the device in 32 bits"] if wide else []
    loss_of = _loss(graph, assumptions) if kind == "train" else None

    def forward(parameters: Mapping[str, Any], buffers: Mapping[str, Any], inputs: Mapping[str, Any]) -> Any:
        given = {k: x.astype(jnp.int64) if k in wide else x for k, x in inputs.items() if k != "seed"}
        return evaluator.run({**parameters, **buffers, **given}, inputs.get("seed"))

    def run(state: Any, batch: Any) -> tuple[Any, Any]:
        outputs, written = forward(state["parameters"], state["buffers"], batch)
        return _with(state, written), outputs

    def train(state: Any, batch: Any) -> tuple[Any, Any]:
        assert loss_of is not None
        trained = {k: state["parameters"][k] for k in state["m"]}
        frozen = {k: x for k, x in state["parameters"].items() if k not in trained}

        def loss(trained: Any) -> Any:
            outputs, written = forward({**frozen, **trained}, state["buffers"], batch)
            return loss_of(outputs), written

        (value, written), gradients = jax.value_and_grad(loss, has_aux=True)(trained)
        with jax.named_scope("optimizer"):
            new = _adamw(state, trained, gradients)
        new["parameters"] |= frozen
        return _with({**new, "buffers": state["buffers"]}, written), {"loss": value}

    if kind == "train":
        moments = {v.name: _type(v, layout, np.float32) for v in by_kind["parameter"] if v.trained}
        if not moments:
            raise GraphError("no parameter of the model asks for a gradient, so there is nothing to train (--infer)")
        whole = layout.sharding(())
        state |= {"m": moments, "v": dict(moments), "count": jax.ShapeDtypeStruct((), np.int32, sharding=whole)}
        if graph.functions:
            assumptions.append(
                f"the backward of {', '.join(graph.functions)} is not used: what its forward computes is differentiated"
            )
        assumptions.append("the optimizer is AdamW with moments in float32; gradients are not clipped")
        if remat != "none" and evaluator.loops:
            kept = "matrix products and " if remat == "dots" else ""
            assumptions.append(f"the backward pass keeps {kept}what a layer hands on, and computes the rest again")
    function = train if kind == "train" else run
    results = jax.tree.map(lambda t: t.sharding, state), _result_shardings(graph, layout, kind)
    return Step(kind, function, state, batch, results, evaluator, assumptions)


def _draws(node: torch.fx.Node) -> bool:
    """Whether an operator takes random numbers; attention without dropout does not."""
    attention = node.target is torch.ops.aten.scaled_dot_product_attention.default
    return takes_draws(node) and not (attention and node.args[4] == 0.0)


def _type(value: Value, layout: Layout, dtype: Any = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(value.shape, dtype or to_jax(value.dtype), sharding=layout.sharding(value.spec))


def _with(state: Any, written: Mapping[str, Any]) -> Any:
    return {**state, "buffers": {k: written.get(k, x).astype(x.dtype) for k, x in state["buffers"].items()}}


def _loss(graph: Graph, assumptions: list[str]) -> Callable[[Mapping[str, Any]], Any]:
    """What is minimised: the result called loss, or a stand-in."""
    if graph.output("loss") is not None:
        return lambda outputs: outputs["loss"].astype(jnp.float32)
    for node, path in graph.outputs:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            if value.ndim:
                assumptions.append(
                    f"the model returns no loss; the mean square of its result {path or '0'} is trained on"
                )
            return lambda outputs: jnp.mean(jnp.square(outputs[path].astype(jnp.float32)))
    raise GraphError("the model returns nothing that can be trained on: no floating-point result (--infer)")


def _result_shardings(graph: Graph, layout: Layout, kind: str) -> dict[str, Any]:
    if kind == "train":
        return {"loss": layout.sharding(())}
    found = {}
    for node, path in graph.outputs:
        shape = tuple(map(int, node.meta["val"].shape)) if isinstance(node.meta.get("val"), torch.Tensor) else ()
        spec: Spec = layout.fitting(shape, (layout.plan.batch,)) if shape else ()
        if len(shape) == 3 and path.endswith("logits"):  # divided as the vocabulary is, and never gathered
            spec = layout.fitting(shape, (layout.plan.batch, (), layout.plan.heads))
        found[path] = layout.sharding(spec)
    return found


def _adamw(state: Any, parameters: Mapping[str, Any], gradients: Mapping[str, Any]) -> dict[str, Any]:
    """One step of AdamW (arXiv:1711.05101) in float32."""
    c = ADAMW
    count = state["count"] + 1
    rate1, rate2 = (1 - jnp.float32(c[b]) ** count.astype(jnp.float32) for b in ("beta1", "beta2"))
    new: dict[str, Any] = {"parameters": {}, "m": {}, "v": {}, "count": count}
    for name, p in parameters.items():
        g = gradients[name].astype(jnp.float32)
        m = c["beta1"] * state["m"][name] + (1 - c["beta1"]) * g
        v = c["beta2"] * state["v"][name] + (1 - c["beta2"]) * jnp.square(g)
        wide = p.astype(jnp.float32)
        step = (m / rate1) / (jnp.sqrt(v / rate2) + c["eps"]) + c["weight_decay"] * wide
        new["parameters"][name] = (wide - c["lr"] * step).astype(p.dtype)
        new["m"][name], new["v"][name] = m.astype(jnp.float32), v.astype(jnp.float32)
    return new
