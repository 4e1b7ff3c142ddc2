"""Waste of memory: padding, arrays that are rearranged, and what every device holds whole."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from torchtpu.aot.evaluate import Value
from torchtpu.aot.findings_context import Context, seconds_text, size_text, up
from torchtpu.aot.hlo import Copy
from torchtpu.aot.hlo_types import arrays
from torchtpu.aot.report import Finding
from torchtpu.aot.scope import split_scope
from torchtpu.lowering.apply import short_name

__all__ = ["layouts", "padding", "parameter_of", "unsharded"]

_aten = torch.ops.aten
_PADDED = 1.05
"""What an array takes over its bytes, from which its padding is a finding."""
_ODD = 1.01
"""The same of a dimension that is named for it."""
_PARAMETER = re.compile(r"\['(?:parameters|buffers|m|v)'\]\['([^']+)'\]")
_BATCH_INPUT = re.compile(r"batch\['([^']+)'\]")


def parameter_of(op_name: str) -> str | None:
    """The name of the argument of the step that an ``op_name`` of the compiled program is, or None."""
    text = op_name.replace("\\", "")
    found = _PARAMETER.search(text) or _BATCH_INPUT.search(text)
    return found[1] if found else None


def padding(ctx: Context) -> Iterator[Finding]:
    """Arrays in HBM that take more than their elements, because their last dimensions are no whole tiles."""
    for p in ctx.hlo.padding if ctx.hlo else ():
        if p.padded_bytes < _PADDED * p.bytes:
            continue
        array = arrays(p.type)[0]
        argument = parameter_of(p.what)
        value = next((v for v in ctx.evaluator.values if v.name == argument), None)
        if p.what == "parameter":  # of a part of the program: told by its sizes
            value = _of_shape(ctx, array.shape)
            argument = value.name if value is not None else None
        node = ctx.user(value) if value is not None else ctx.node(split_scope(p.what.rpartition("/")[0])[0])
        name = argument or (f"the result of {_operator(node)}" if node is not None else "an array of the compiler's")
        last = [array.shape[i] for i in array.order[: len(array.tile)]]
        tile = list(reversed(array.tile))
        small = [f"{n} to {up(n, t)}" for n, t in zip(last, tile, strict=False) if up(n, t) >= _ODD * n]
        what = (
            f"{name} ({array.dtype}[{', '.join(map(str, array.shape))}] on a device) takes {size_text(p.padded_bytes)} "
            f"of HBM for {size_text(p.bytes)} of numbers: memory is in tiles of {' x '.join(map(str, array.tile))}, "
            f"and it is filled up from {' and '.join(small)}"
        )
        advice = (
            "put a large dimension last (permute the array where it is made), fold the small one into its neighbour, "
            "or keep several such arrays as one"
        )
        cost = ctx.hbm_share(p.padded_bytes - p.bytes)
        yield ctx.finding("padding", what, advice, [node] if node is not None else [], cost, 1)


def _of_shape(ctx: Context, shape: Sequence[int]) -> Value | None:
    """The argument of the step whose part on a device has this shape, if it is the only one."""
    found = []
    for value in ctx.evaluator.values:
        if [n // ctx.plan.size(axes) for n, axes in zip(value.shape, value.spec, strict=True)] == list(shape):
            found.append(value)
    return found[0] if len(found) == 1 else None


def _operator(node: torch.fx.Node) -> str:
    target = node.target
    return short_name(target) if isinstance(target, torch._ops.OpOverload) else str(target)


@dataclass
class _Moved:
    copies: list[Copy] = field(default_factory=list)
    bytes: float = 0.0


def layouts(ctx: Context) -> Iterator[Finding]:
    """Arrays that are written again in another order of dimensions."""
    found: dict[torch.fx.Node | str, _Moved] = {}
    traffic: dict[str, float] = {}
    for memory in ctx.hlo.memory if ctx.hlo else ():
        traffic[memory.scope] = traffic.get(memory.scope, 0.0) + memory.bytes
    copies = [c for c in ctx.hlo.layout_copies if c.kind == "layout"] if ctx.hlo else []
    keys = [ctx.node(c.scope) or _weight_like(ctx, c) or "" for c in copies]
    for key, copy in sorted(zip(keys, copies, strict=True), key=lambda x: x[0] == ""):
        # What is written to vector memory is not written to HBM, and between parts of it nothing is read either.
        most = copy.bytes * copy.executions / (2 if "S(" in copy.to else 1)
        taken = min(most, traffic.get(copy.scope, 0.0))
        if taken:
            traffic[copy.scope] -= taken
            moved = found.setdefault(key, _Moved())
            moved.copies.append(copy)
            moved.bytes += taken
    for key, moved in found.items():
        seconds = moved.bytes / ctx.chip.hbm_bandwidth
        largest = max(moved.copies, key=lambda c: c.bytes * c.executions)
        times = f"{sum(c.executions for c in moved.copies)} times" if len(moved.copies) > 1 else "once"
        if len(moved.copies) == 1 and largest.executions > 1:
            times = f"{largest.executions} times"
        array = arrays(largest.to)[0]
        shape = f"{array.dtype}[{', '.join(map(str, array.shape))}]"
        cost = ctx.share(seconds)
        figures = f"{times} a step, {size_text(moved.bytes)} in all: {seconds_text(seconds)} at HBM's bandwidth"
        if isinstance(key, torch.fx.Node):
            what = (
                f"{_operator(key)} makes the compiler write an array ({shape}) in another order of dimensions, "
                f"{figures}"
            )
            advice = _layout_advice(key)
            yield ctx.finding("layout", what, advice, [key], cost, 1)
        elif key:
            value = next(v for v in ctx.evaluator.values if v.name == key)
            users = _users(ctx, value)
            what = f"the weight {key} ({shape}) is written in another order of dimensions, {figures}"
            kinds = sorted({_operator(u) for u in users})
            if len(kinds) > 1:
                what += f"; {' and '.join(kinds)} read it in different orders"
            advice = (
                "the copy goes if the weight is not shared: untie the embedding and the head"
                if any(u.target is _aten.embedding.default for u in users) and len(users) > 1
                else "store the weight the other way round (transposed) if it is read in one way only"
            )
            yield ctx.finding("layout", what, advice, users[:1], cost, 1)
        else:
            what = f"the compiler rearranges arrays between operators (the largest is {shape}), {figures}"
            advice = (
                "nothing in the model asks for it by name; fewer transposes and reshapes between products leave the "
                "compiler less to rearrange"
            )
            yield ctx.finding("layout", what, advice, [], cost, len(moved.copies))


def _weight_like(ctx: Context, copy: Copy) -> str | None:
    """A parameter of which a copy without a scope is one, told by its sizes."""
    if copy.scope:
        return None
    found = arrays(copy.to)
    if not found or len(found[0].shape) < 2 or min(found[0].shape) == 1:
        return None
    shape = sorted(found[0].shape)
    same = [
        v.name for v in ctx.evaluator.values if v.kind == "parameter" and not v.stacked and sorted(v.shape) == shape
    ]
    return same[0] if len(same) == 1 else None


def _users(ctx: Context, value: Value) -> list[torch.fx.Node]:
    """Operators that read a parameter, past the views of it."""
    placeholder = next(i.node for i in ctx.evaluator.graph.inputs if i.name == value.members[0])
    found, pending = [], [placeholder]
    while pending:
        for user in pending.pop().users:
            if user.target in (_aten.t.default, _aten.permute.default, _aten.transpose.int):
                pending.append(user)
            elif user.op == "call_function":
                found.append(user)
    return found


def _layout_advice(node: torch.fx.Node) -> str:
    name = _operator(node).partition(".")[0]
    if name in ("transpose", "permute", "t", "movedim", "swapaxes"):
        return "leave out the transpose, or make the array in this order: an einsum says the order of its result"
    if name in ("view", "reshape", "_unsafe_view", "clone", "contiguous"):
        return (
            "the reshape joins or splits dimensions that do not lie together; reshape before the dimensions are "
            "permuted, or let the product make them apart (einsum)"
        )
    if name in ("mm", "addmm", "bmm", "baddbmm", "scaled_dot_product_attention", "convolution"):
        return "what feeds the product comes in another order than it reads; make it in the order it is used in"
    return "make the array in the order in which the next operator reads it"


def unsharded(ctx: Context) -> Iterator[Finding]:
    """Weights, buffers and inputs that several devices hold whole though the plan could divide them."""
    if ctx.topology.devices == 1:
        return
    found: dict[tuple[str, str], list[tuple[float, Value, str, str]]] = {}
    for value in ctx.evaluator.values:
        for reason, advice, group, axes in _undivided(ctx, value):
            parts = ctx.plan.size([a for dims in value.spec for a in dims])
            own = math.prod(value.shape) * _itemsize(ctx, value) / parts
            waste = own * (1 - 1 / ctx.plan.size(axes))
            found.setdefault((group, value.kind), []).append((waste, value, reason, advice))
    for (group, kind), values in found.items():
        values.sort(key=lambda x: -x[0])
        waste, value, reason, advice = values[0]
        total = sum(x[0] for x in values)
        devices = ctx.topology.devices
        node = ctx.user(value)
        if group == "all":
            name = f"{len(values)} {'weights' if kind == 'parameter' else kind + 's'} (the largest is {value.name})"
            verb = "are"
        else:
            name, verb = value.name, "is"
        with_moments = kind == "parameter" and value.trained and "m" in ctx.step.state
        what = (
            f"{name} {verb} not divided{reason}: {size_text(total)} of each device's HBM"
            f"{', with its moments,' if with_moments else ''} could be saved ({size_text(total * devices)} on "
            f"{devices} devices)"
        )
        if group != "all" and len(values) > 1:
            what += f"; likewise {len(values) - 1} other{'s' * (len(values) > 2)}"
        module = re.sub(r"\.[^.]+$", "", value.name) if kind != "input" and "." in value.name else None
        nodes = [node] if node is not None else []
        yield ctx.finding("unsharded", what, advice, nodes, ctx.hbm_share(total), len(values), module)


def _itemsize(ctx: Context, value: Value) -> int:
    """Bytes of an element, with those of AdamW's moments, which are divided in the same way."""
    moments = 8 if value.trained and "m" in ctx.step.state else 0
    return value.dtype.itemsize + moments


def _undivided(ctx: Context, value: Value) -> Iterator[tuple[str, str, str, Sequence[str]]]:
    """(reason, advice, what it is grouped by, axes that it lacks) of a value."""
    plan = ctx.plan
    used = {a for axes in value.spec for a in axes}
    shape = value.shape[1:] if value.stacked else value.shape
    if value.kind == "input":
        if not used and value.shape and math.prod(value.shape) > 1:
            yield _input(ctx, value)
        return
    if value.kind == "buffer" and len(shape) != 4:
        return
    if value.kind == "buffer":  # a cache
        lacking = [a for a in plan.heads if a not in used]
        if lacking:
            said = _axes(ctx, lacking)
            yield (
                f" over {said}: its dimension 1, the heads of keys and values, is {shape[1]}",
                f"use a number of devices in {' and '.join(lacking)} that divides {shape[1]}",
                f"cache {shape[1]}",
                lacking,
            )
        return
    if not plan.gathered and not plan.parameters:
        yield (
            f": the plan ({plan.name or 'given'}) divides the batch alone",
            f"divide the weights too: --shard fsdp={ctx.topology.devices}",
            "all",
            list(plan.mesh),
        )
        return
    rule = next((r for r in plan.parameters if re.search(r.pattern, value.members[0])), None)
    if rule is not None:
        for i, axes in enumerate(rule.spec):
            if axes and shape[i] % plan.size(axes):
                said = _axes(ctx, axes)
                size = plan.size(axes)
                better = up(shape[i], size * ctx.chip.mxu)
                yield (
                    f" over {said}: its dimension {i} ({shape[i]}) is no multiple of {size}",
                    f"a size of {better} divides (for a vocabulary: rows that are never used), or another size of "
                    f"{' and '.join(axes)}",
                    f"rule {i} {shape[i]}",
                    axes,
                )
    lacking = [a for a in plan.gathered if a not in used]
    if (
        lacking
        and plan.size(lacking) > 1
        and (rule is None or not all(a in used for axes in rule.spec for a in axes) or plan.gathered)
    ):
        size = plan.size(lacking)
        yield (
            f" over {_axes(ctx, lacking)}: none of its dimensions ({' x '.join(map(str, shape))}) is a multiple of "
            f"{size}",
            f"make one of them a multiple of {size}, or take a size of {' and '.join(lacking)} that divides one",
            f"gathered {shape}",
            lacking,
        )
    elif rule is None and not used and len(shape) > 1:
        of_rules = sorted({a for r in plan.parameters for dims in r.spec for a in dims} - {plan.experts})
        if of_rules and plan.size(of_rules) > 1:
            yield (
                f" over {_axes(ctx, of_rules)}: no rule of the plan is for it",
                f"add a rule for it to the plan, such as [{re.escape(value.members[0])!r}, [[{of_rules[0]!r}]]], or "
                "use fsdp, which divides every weight",
                f"no rule {value.name}",
                of_rules,
            )


def _input(ctx: Context, value: Value) -> tuple[str, str, str, Sequence[str]]:
    batch = ctx.plan.batch
    return (
        f": its dimension 0 ({value.shape[0]}) is no multiple of {_axes(ctx, batch)}",
        "give it the batch as its first dimension",
        f"input {value.name}",
        batch or list(ctx.plan.mesh),
    )


def _axes(ctx: Context, axes: Sequence[str]) -> str:
    return " x ".join(f"{a}={ctx.plan.mesh[a]}" for a in axes)
