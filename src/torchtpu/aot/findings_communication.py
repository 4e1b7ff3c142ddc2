"""Waste of the links between chips: exchanges that bound the step, and activations that are gathered whole."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from torchtpu.aot.findings_context import Context, seconds_text, size_text, tensors
from torchtpu.aot.findings_memory import parameter_of
from torchtpu.aot.hlo import Collective
from torchtpu.aot.report import Finding

__all__ = ["communication", "replicated"]

_MOST = 4
"""Kinds of exchange that are told of a step that waits for its links."""
_HUGE = 0.02
"""Share of HBM from which an activation that is gathered over any axis is told."""
_ITEMSIZE = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "f64": 8, "s64": 8, "u64": 8}


@dataclass
class _Exchange:
    seconds: float = 0.0
    bytes: float = 0.0
    count: int = 0
    nodes: dict[torch.fx.Node, float] = field(default_factory=dict)


def _timed(ctx: Context) -> Iterator[tuple[Collective, float]]:
    """The collectives with the seconds predicted for them."""
    times: dict[tuple[object, ...], list[float]] = {}
    for t in ctx.prediction.collectives:
        key = t.kind, t.scope, t.phase, t.bytes, t.group_size, t.executions, t.asynchronous
        times.setdefault(key, []).append(t.seconds)
    for c in ctx.hlo.collectives if ctx.hlo else ():
        found = times.get((c.kind, c.scope, c.phase, c.bytes, c.group_size, c.executions, c.asynchronous))
        if found:
            yield c, found.pop(0)


def _axes(ctx: Context, collective: Collective) -> tuple[str, ...]:
    """The mesh axes that a collective runs over; partitions are numbered in the order of the mesh."""
    sizes = list(ctx.plan.mesh.items())
    found = set()
    for group in collective.groups:
        places = []
        for device in group:
            at = []
            for _, size in reversed(sizes):
                device, own = divmod(device, size)
                at.append(own)
            places.append(at[::-1])
        for i, (axis, _) in enumerate(sizes):
            if len({p[i] for p in places}) > 1:
                found.add(axis)
    return tuple(a for a in ctx.plan.mesh if a in found)


def communication(ctx: Context) -> Iterator[Finding]:
    """The largest exchanges of a step that waits for its links."""
    if ctx.hlo is None or ctx.prediction.bound != "ICI":
        return
    found: dict[tuple[str, tuple[str, ...], bool], _Exchange] = {}
    for c, seconds in _timed(ctx):
        exchange = found.setdefault((c.kind, _axes(ctx, c), _moves_activations(ctx, c)), _Exchange())
        exchange.seconds += seconds
        exchange.bytes += c.bytes * c.executions
        exchange.count += c.executions
        node = ctx.node(c.scope)
        if node is not None:
            exchange.nodes[node] = exchange.nodes.get(node, 0.0) + seconds
    largest = sorted(found.items(), key=lambda x: -x[1].seconds)[:_MOST]
    for (kind, axes, activations), exchange in largest:
        over = " x ".join(f"{a}={ctx.plan.mesh[a]}" for a in axes) or "all devices"
        nodes = sorted(exchange.nodes, key=lambda n: -exchange.nodes[n])
        share = ctx.share(exchange.seconds)
        what = (
            f"the step waits for the links between chips, and {kind} over {over} takes "
            f"{seconds_text(exchange.seconds)} of it: {exchange.count} of them with {size_text(exchange.bytes)}"
        )
        yield ctx.finding("communication", what, _advice(ctx, kind, axes, activations), nodes[:1], share, 1)


def _moves_activations(ctx: Context, c: Collective) -> bool:
    """Whether a collective is known to move activations rather than weights or their gradients."""
    node = ctx.node(c.scope)
    if node is None or parameter_of(c.source):
        return False
    return _is_activation(ctx, node, c.bytes // _ITEMSIZE.get(c.dtype, 4))


def _advice(ctx: Context, kind: str, axes: Sequence[str], activations: bool) -> str:
    plan = ctx.plan
    if kind in ("all-to-all", "ragged-all-to-all"):
        capacity = "" if plan.capacity is not None else " and give the plan a capacity"
        return f"these are tokens on their way to experts: use fewer devices for ep{capacity}"
    if set(axes) & {*plan.heads, *plan.sequence}:
        tensor = [a for a in plan.heads or plan.sequence if a in axes]
        name = tensor[0] if tensor else axes[0]
        return (
            f"these are activations, as many as there are tokens: a smaller {name} (and a larger fsdp) makes them "
            f"less; {name} belongs on the last axis of the mesh, whose devices are neighbours"
        )
    if activations:
        return (
            "these are activations, which the compiler could not keep divided by the batch: keep the batch as a "
            "dimension of its own, or give the plan a rule for the module's result"
        )
    if kind == "collective-permute":
        return "another order of the axes, or another plan (--shard auto), may exchange less"
    if axes and set(axes) <= set(plan.gathered) and ctx.step.kind != "train":
        return (
            "these are weights, gathered in every step: tp uses them where they lie (--shard tp), and dp keeps them "
            "whole where they fit; a larger batch makes them a smaller share"
        )
    if axes and set(axes) <= set(plan.gathered):
        return (
            "these are weights and their gradients, the same for any batch: a larger batch on each device makes them a "
            "smaller share; so does a smaller fsdp with dp beside it, if the memory allows"
        )
    if axes and set(axes) <= set(plan.batch) and ctx.step.kind == "train":
        return "these are gradients, the same for any batch: a larger batch on each device makes them a smaller share"
    return "another order of the axes, or another plan (--shard auto), may exchange less"


def replicated(ctx: Context) -> Iterator[Finding]:
    """Activations that the partitioner gathers over the axes that divide the batch, and very large ones over any.

    Sequence parallelism gathers activations over other axes as it should. So does the gradient of an embedding, over
    all of them: each device adds up the rows of its part of the table.
    """
    batch = {a for a in ctx.plan.batch if ctx.plan.mesh[a] > 1}
    for c, seconds in _timed(ctx):
        node = ctx.node(c.scope)
        axes = _axes(ctx, c)
        over = batch.intersection(axes) or (axes if ctx.hbm_share(c.bytes) >= _HUGE else ())
        if c.kind != "all-gather" or node is None or not over or parameter_of(c.source):
            continue
        if node.target is torch.ops.aten.embedding.default:
            continue
        elements = c.bytes // _ITEMSIZE.get(c.dtype, 4)
        if not _is_activation(ctx, node, elements):
            continue
        operator = str(node.target).removeprefix("aten.")
        what = (
            f"{operator} gathers its activations over {' and '.join(sorted(over))} ({size_text(c.bytes)}, "
            f"{c.executions} time{'s' * (c.executions > 1)} a step, {c.phase}): each device then holds what is on the "
            "others"
        )
        advice = "the compiler found no way to keep it divided here: give the plan a rule for this module's result"
        if batch.intersection(axes):
            advice += ", and keep the batch as a dimension of its own (do not fold it into others or index across it)"
        cost = max(ctx.share(seconds) or 0.0, ctx.hbm_share(c.bytes))
        yield ctx.finding("unsharded", what, advice, [node], cost, 1)


def _is_activation(ctx: Context, node: torch.fx.Node, elements: int) -> bool:
    """Whether an array of so many elements is an activation of an operator, not one of its weights."""
    sizes = list(ctx.plan.mesh.values())
    parts = {math.prod(c) for r in range(len(sizes) + 1) for c in itertools.combinations(sizes, r)}
    weights: set[int] = set()
    activations = {x.numel() for x in tensors(node)}
    for source in node.all_input_nodes:
        if ctx.weight(source) is not None:
            weights.update(x.numel() for x in tensors(source))
        else:
            activations.update(x.numel() for x in tensors(source))
    of = lambda sizes: {n // p for n in sizes for p in parts}  # noqa: E731
    return elements in of(activations) and elements not in of(weights)
