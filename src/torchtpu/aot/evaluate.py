"""Run a captured graph on JAX arrays laid out on a mesh, with equal blocks as one loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch._ops import HigherOrderOperator, OpOverload

from torchtpu.aot.blocks import Loop, find_loops
from torchtpu.aot.forms import form_of
from torchtpu.aot.graph import Graph, Input, module_path
from torchtpu.aot.layout import Layout
from torchtpu.compile.draws import Draws
from torchtpu.lowering.apply import NoLowering, constant_array
from torchtpu.lowering.context import Trace, tracing
from torchtpu.lowering.precision import narrow_gradients
from torchtpu.sharding import Spec

__all__ = ["Evaluator", "Value"]

_aten = torch.ops.aten
_APART = 1 << 16
"""Draws set aside for each block of a loop, so that blocks draw different numbers."""


@dataclass(frozen=True)
class Value:
    """An argument of the step: one of the graph's, or those of all blocks of a loop stacked.

    Attributes:
        name: dotted name; ``model.layers.0-31.mlp.up_proj.weight`` when stacked.
        kind: ``"parameter"``, ``"buffer"`` or ``"input"``.
        shape: with the blocks as the first dimension when stacked.
        spec: mesh axes by dimension.
        used: the axes it still has once it is gathered for use; without the blocks' dimension.
        members: names in the model, in the order of the blocks.
        stacked: whether it is.
        trained: asks for a gradient.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    spec: Spec
    used: Spec
    members: tuple[str, ...]
    stacked: bool = False
    trained: bool = False


class Evaluator:
    """A graph and where its values lie.

    Args:
        graph: what ``capture`` returned.
        layout: plan, mesh and platform.
        remat: ``"full"``: only what a block hands on is kept for the backward pass; ``"dots"``: results of matrix
            products too; ``"none"``: everything.

    Attributes:
        values: the arguments, parameters and buffers before inputs.
        loops: what runs as a loop.
        scopes: {scope of an operator: its node}, the scopes being names in the program.

    Raises:
        PlanError: the plan does not fit a tensor.
    """

    def __init__(self, graph: Graph, layout: Layout, remat: str = "full") -> None:
        self.graph, self.layout, self.remat = graph, layout, remat
        self.loops = find_loops(graph)
        self.scopes: dict[str, torch.fx.Node] = {}
        self._of_node: dict[torch.fx.Node, tuple[str, int | None]] = {}
        self._labels: dict[torch.fx.Node, str] = {}
        for loop in self.loops:
            for n in loop.blocks[0]:
                self._labels[n] = loop.label(module_path(n))
        self.values = self._arrange()
        self._by_name = {v.name: v for v in self.values}
        self._ends = self._results_of_modules()

    def _arrange(self) -> list[Value]:
        """The arguments of the step; weights of blocks are stacked."""
        by_node = {i.node: i for i in self.graph.inputs}
        values: list[Value] = []
        for loop in self.loops:
            for position in loop.varying:
                nodes = [reads[position] for reads in loop.reads]
                if any(n not in by_node or n in self._of_node for n in nodes):
                    continue
                inputs = [by_node[n] for n in nodes]
                one = self._value(inputs[0])
                name = loop.label(inputs[0].name)
                if name == inputs[0].name:
                    name = f"{name}.0-{len(nodes) - 1}"
                members = tuple(i.name for i in inputs)
                values.append(
                    Value(
                        name, one.kind, (len(nodes), *one.shape), one.dtype, ((), *one.spec), one.used, members,
                        stacked=True, trained=one.trained,
                    )
                )  # fmt: skip
                for i, n in enumerate(nodes):
                    self._of_node[n] = name, i
        for given in self.graph.inputs:
            if given.node not in self._of_node:
                values.append(self._value(given))
                self._of_node[given.node] = given.name, None
        order = {"parameter": 0, "buffer": 1, "input": 2}
        return sorted(values, key=lambda v: order[v.kind])

    def _value(self, given: Input) -> Value:
        plan = self.layout.plan
        if given.kind == "input" or (given.kind == "buffer" and len(given.shape) == 4):
            # inputs begin with the batch; buffers of four dimensions are caches: (batch, heads, length, width)
            tokens = len(given.shape) == 2 and not given.dtype.is_floating_point
            second = {4: plan.heads if given.kind == "buffer" else (), 2: plan.sequence if tokens else ()}
            axes = (plan.batch, second.get(len(given.shape), ()))
            spec = self.layout.fitting(given.shape, axes[: len(given.shape)])
            return Value(given.name, given.kind, given.shape, given.dtype, spec, spec, (given.name,))
        spec, used = plan.spec(given.name, given.shape), plan.used(given.name, given.shape)
        return Value(given.name, given.kind, given.shape, given.dtype, spec, used, (given.name,), trained=given.trained)

    def _results_of_modules(self) -> dict[torch.fx.Node, Spec]:
        """Operators whose result is a module's, with what the plan says of it."""
        if not self.layout.plan.activations:
            return {}
        found = {}
        for node in self.graph.fx.nodes:
            path, value = module_path(node), node.meta.get("val")
            if path and isinstance(value, torch.Tensor) and any(module_path(u) != path for u in node.users):
                spec = self.layout.plan.activation(path, tuple(map(int, value.shape)))
                if spec is not None:
                    found[node] = spec
        return found

    def run(
        self, arrays: Mapping[str, jax.Array], seed: jax.Array | None = None
    ) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        """Compute the graph.

        Args:
            arrays: the arguments by name.
            seed: (seed, offset) of the generator as four 32-bit words; None when nothing draws.

        Returns:
            The results by name, and new values of buffers by name; those of blocks are stacked as the buffers are.
        """
        env = _Environment(self, arrays)
        trace = Trace(checked=False)
        draws = Draws(trace, seed)
        firsts = {loop.blocks[0][0]: loop for loop in self.loops}
        inside = {n for loop in self.loops for block in loop.blocks for n in block}
        with tracing(trace), narrow_gradients():
            for node in self.graph.fx.nodes:
                if node in firsts:
                    self._loop(firsts[node], env, draws)
                elif node.op not in ("placeholder", "output") and node not in inside:
                    env.set(node, self._compute(node, env, draws))
        outputs = {path: jnp.asarray(env[node]) for node, path in self.graph.outputs}
        return outputs, self._writes(env)

    def _writes(self, env: _Environment) -> dict[str, jax.Array]:
        written: dict[str, jax.Array] = {}
        for value in self.values:
            nodes = [self.graph.writes.get(m) for m in value.members]
            if all(n is None for n in nodes):
                continue
            new = [
                env[n] if n is not None else env.member(value.name, i if value.stacked else None)
                for i, n in enumerate(nodes)
            ]
            stacked = env.stack([n for n in nodes if n is not None]) if len(nodes) > 1 else None
            array = stacked if stacked is not None else jnp.stack(new) if value.stacked else new[0]
            written[value.name] = self.layout.place(array, value.spec)
        return written

    def _loop(self, loop: Loop, env: _Environment, draws: Draws) -> None:
        """Run the blocks of a loop as one ``scan``."""
        block = loop.blocks[0]
        carried, varying = sorted(loop.carried), loop.varying
        given = [env[loop.reads[0][p]] for p in carried]
        stacks: list[Any] = []
        gathers: list[Value | None] = []
        for p in varying:
            nodes = [reads[p] for reads in loop.reads]
            name, _ = self._of_node.get(nodes[0], (None, None))
            value = self._by_name.get(name) if name is not None else None
            if value is not None and value.stacked:
                stacks.append(env.arrays[value.name])
                gathers.append(value)
            else:
                stacks.append(jnp.stack([jnp.asarray(env[n]) for n in nodes]))
                gathers.append(None)
        shared = {loop.reads[0][p]: env[loop.reads[0][p]] for p in loop.shared}
        kept = self._kept(loop)
        trace = draws.trace

        def body(state: list[jax.Array], xs: tuple[jax.Array, list[jax.Array]]) -> tuple[Any, Any]:
            index, slices = xs
            inner = _Environment(self, {}, dict(shared))
            for p, x in zip(carried, state, strict=True):
                inner.set(loop.reads[0][p], x)
            for p, x, value in zip(varying, slices, gathers, strict=True):
                if value is not None:
                    x = self.layout.gather(x, value.spec[1:], value.used)
                inner.set(loop.reads[0][p], x)
            own = Draws(trace, None if draws.seed is None else _later(draws.seed, index))
            for node in block:
                inner.set(node, self._compute(node, inner, own))
            handed = [inner[loop.makes[0][loop.carried[p]]] for p in carried]
            handed = [self.layout.place(x, self.layout.hidden(x.shape)) for x in handed]
            return handed, [inner[loop.makes[0][m]] for m in kept]

        if self.remat != "none":
            saved = jax.checkpoint_policies.dots_with_no_batch_dims_saveable if self.remat == "dots" else None
            body = jax.checkpoint(body, policy=saved, prevent_cse=False)
        given = [self.layout.place(x, self.layout.hidden(x.shape)) for x in given]
        indices = jnp.arange(loop.length, dtype=jnp.int32)
        with jax.named_scope(loop.name):
            last, made = jax.lax.scan(body, given, (indices, stacks))
        draws.count += 1
        for m, stacked in zip(kept, made, strict=True):
            env.keep([makes[m] for makes in loop.makes], stacked)
        for p, x in zip(carried, last, strict=True):
            env.set(loop.makes[-1][loop.carried[p]], x)

    def _kept(self, loop: Loop) -> list[int]:
        """Positions in ``makes`` that something after the loop reads, other than what the last block hands on."""
        everything = {n for block in loop.blocks for n in block}
        kept = []
        for m in range(len(loop.makes[0])):
            handed = m in loop.carried.values()
            nodes = [makes[m] for makes in (loop.makes[:-1] if handed else loop.makes)]
            if any(u not in everything for n in nodes for u in n.users):
                kept.append(m)
        return kept

    def _compute(self, node: torch.fx.Node, env: _Environment, draws: Draws) -> Any:
        if node.op == "get_attr":
            held = getattr(self.graph.fx.owning_module, str(node.target))
            return constant_array(held) if isinstance(held, torch.Tensor) else held
        target: Any = node.target
        args: Any
        kwargs: Any
        args, kwargs = torch.fx.node.map_arg((node.args, dict(node.kwargs)), env.__getitem__)
        if not isinstance(target, OpOverload | HigherOrderOperator):
            return target(*args, **kwargs)
        if target is _aten.sym_size.int:
            return args[0].shape[args[1]]
        scope = f"{self._labels.get(node) or module_path(node) or 'model'}/{node.name}"
        self.scopes.setdefault(scope, node)
        form = form_of(target)
        with jax.named_scope(scope):
            try:
                if form is not None:
                    draws.trace.begin_operator(draws.reserve)
                    result = form(self.layout, node, *args, **kwargs)
                else:
                    result = draws.run(target, args, kwargs)
            except NoLowering as error:
                raise NoLowering(f"{target} (in {module_path(node) or 'the model'}): {error}") from error
            spec = self._ends.get(node)
            return result if spec is None else self.layout.place(result, spec)


def _later(seed: jax.Array, index: jax.Array) -> jax.Array:
    """The generator's words for a block of a loop."""
    offset = jax.lax.bitcast_convert_type(seed[2:], jnp.uint64) + (index.astype(jnp.uint64) + 1) * _APART
    return jnp.concatenate([seed[:2], jax.lax.bitcast_convert_type(offset, jnp.uint32)])


class _Environment:
    """Values of nodes; arguments are gathered when they are first read, stacks cut when one of them is."""

    def __init__(
        self, evaluator: Evaluator, arrays: Mapping[str, jax.Array], known: dict[torch.fx.Node, Any] | None = None
    ) -> None:
        self.evaluator, self.arrays = evaluator, arrays
        self.known: dict[torch.fx.Node, Any] = known or {}
        self.stacks: dict[torch.fx.Node, tuple[jax.Array, int]] = {}

    def __getitem__(self, node: torch.fx.Node) -> Any:
        if node not in self.known:
            self.known[node] = self._read(node)
        return self.known[node]

    def set(self, node: torch.fx.Node, value: Any) -> None:
        self.known[node] = value

    def keep(self, nodes: Sequence[torch.fx.Node], stacked: jax.Array) -> None:
        """What each block made, as one array."""
        for i, node in enumerate(nodes):
            self.stacks[node] = stacked, i

    def stack(self, nodes: Sequence[torch.fx.Node]) -> jax.Array | None:
        """The array that holds just these values, in this order, or None."""
        found = [self.stacks.get(n) for n in nodes]
        first = found[0]
        if first is None or len(nodes) != len(first[0]):
            return None
        whole = all(f is not None and f[0] is first[0] and f[1] == i for i, f in enumerate(found))
        return first[0] if whole else None

    def member(self, name: str, index: int | None) -> jax.Array:
        """An argument, or one block's part of it."""
        array = self.arrays[name]
        return array if index is None else array[index]

    def _read(self, node: torch.fx.Node) -> Any:
        evaluator = self.evaluator
        if node in self.stacks:
            stacked, i = self.stacks[node]
            return stacked[i]
        if node in evaluator.graph.constants:
            held = evaluator.graph.constants[node]
            return constant_array(held) if isinstance(held, torch.Tensor) else held
        name, index = evaluator._of_node[node]
        value = evaluator._by_name[name]
        stored = value.spec[1:] if value.stacked else value.spec
        return evaluator.layout.gather(self.member(name, index), stored, value.used)
