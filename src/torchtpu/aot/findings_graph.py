"""Operators that a TPU is bad at: 64-bit integers, gathers and sorts, what runs on the host or not at all."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from typing import Any, cast

import jax
import torch
from torch._ops import OpOverload

from torchtpu.aot.findings_context import Context, Places, size_text, tensor, tensors
from torchtpu.aot.forms import form_of
from torchtpu.aot.report import Finding
from torchtpu.compile.tiles import LANES
from torchtpu.lowering.apply import apply, can_lower, short_name
from torchtpu.lowering.dtypes import to_jax
from torchtpu.lowering.host_call import host_call
from torchtpu.lowering.registry import find

__all__ = ["gathers", "host", "integers", "unsupported"]

_LARGE = 1 << 20
"""Elements on a device from which an operator that takes them one by one is told whatever the prediction says."""


def integers(ctx: Context) -> Iterator[Finding]:
    """64-bit integers that cost something: a TPU has none, and makes each of two of 32 bits."""
    state = [v for v in ctx.evaluator.values if v.dtype is torch.int64]
    for value in state:
        parts = ctx.plan.size([a for axes in value.spec for a in axes])
        held = math.prod(value.shape) * 8 / parts
        user = ctx.user(value)
        what = f"the {value.kind} {value.name} is int64 and takes {size_text(held)} of each device's HBM"
        advice = "int32 takes half, and is enough for numbers up to 2,147,483,647"
        yield ctx.finding("int64", what, advice, [user] if user else [], ctx.hbm_share(held / 2), 1)
    inside = {n for loop in ctx.evaluator.loops for n in loop.blocks[0]}
    for node in ctx.nodes:
        made = tensors(node)
        if not made or any(x.dtype is not torch.int64 for x in made) or not _is_arithmetic(node):
            continue
        seconds = sum(t.seconds for t in ctx.times.get(node, ()))
        loop = "in every layer, " if node in inside else ""
        what = (
            f"{_name(node)} computes {made[0].numel():,} integers of 64 bits ({loop}"
            f"{size_text(made[0].numel() * 8)} on all devices), each of which a TPU makes of two of 32 bits, with "
            "several instructions"
        )
        advice = "use torch.int32: dtype=torch.int32 where the numbers are made, or .int()"
        yield ctx.finding("int64", what, advice, [node], ctx.share(seconds / 2))


_COMPUTING = {"sum", "prod", "cumsum", "arange", "amax", "amin", "bmm", "mm"}


def _is_arithmetic(node: torch.fx.Node) -> bool:
    """An operator that computes each element, or sums; not one that only passes integers on."""
    target = node.target
    if not isinstance(target, OpOverload):
        return False
    name = short_name(target).partition(".")[0]
    return torch.Tag.pointwise in target.tags or name in _COMPUTING


_GATHERS = {"gather", "take", "take_along_dim", "index", "index_select", "_unsafe_index"}
_SCATTERS = {
    *("scatter", "scatter_add", "scatter_reduce", "index_put", "_unsafe_index_put", "index_add", "index_copy"),
    *("index_fill", "put", "masked_scatter", "index_reduce"),
}
_SORTS = {"sort", "topk", "argsort", "kthvalue", "median", "mode", "msort", "searchsorted", "bucketize"}
_SCANS = {"cumsum", "cumprod", "cummax", "cummin", "logcumsumexp"}


def gathers(ctx: Context) -> Iterator[Finding]:
    """Operators on much data that go through it one by one, or many times."""
    for node in ctx.nodes:
        if not isinstance(node.target, OpOverload):
            continue
        name = short_name(node.target).partition(".")[0]
        source = tensor(node.args[0]) if node.args else None
        if source is None:
            continue
        parts = ctx.plan.size(ctx.plan.batch)
        seconds = sum(t.seconds for t in ctx.times.get(node, ()))
        told = _told(node, name, source, parts)
        if told is None:
            continue
        what, advice, steps = told
        # the prediction counts the traffic alone, which is the least of it
        cost = ctx.share(seconds)
        if steps >= _LARGE or (cost is not None and cost >= 0.02):
            yield ctx.finding("gather", what, advice, [node], cost)


def _told(node: torch.fx.Node, name: str, source: torch.Tensor, parts: int) -> tuple[str, str, float] | None:
    """(what, advice, how many things are done one after another on a device) of an operator."""
    result = tensors(node)[0]
    if name in _GATHERS or name in _SCATTERS:
        index, row = _indices(node, name, source, result)
        if index is None or (row >= LANES and name in _GATHERS):  # whole rows come at the memory's speed
            return None
        steps = index / parts
        each = "single elements" if row == 1 else f"rows of {row:,}"
        if name in _SCATTERS:
            what = (
                f"{name} writes {index:,} {each} at places that are data. A TPU has no scatter in hardware: it sorts "
                "the places and goes through them one after another; the cost is that of the traffic alone"
            )
            advice = (
                "for few different places, a product with a one-hot matrix; for places that follow a pattern, a slice, "
                "torch.where with a mask, or torch.cat"
            )
        else:
            what = (
                f"{name} reads {index:,} {each} from places that are data. A TPU reads whole tiles of {LANES} lanes "
                "and picks one after another out of them; the cost is that of the traffic alone"
            )
            advice = (
                "gather whole rows (put what is read together in the last dimension), use a product with a one-hot "
                "matrix where there are few rows, or slices where the places follow a pattern"
            )
        return what, advice, steps
    if name in _SORTS:
        steps = source.numel() / parts
        what = (
            f"{name} sorts {source.numel():,} elements ({' x '.join(map(str, source.shape))}): a TPU goes over them "
            "about log2(n)^2 / 2 times; the cost is that of one time"
        )
        advice = (
            "take the k largest of parts first and then of those, use a threshold instead of an order, or torch.argmax "
            "if one is enough"
        )
        return what, advice, steps
    if name in _SCANS:
        steps = source.numel() / parts
        what = (
            f"{name} runs over {source.numel():,} elements ({' x '.join(map(str, source.shape))}): each depends on the "
            "one before, so a TPU does it in log2(n) rounds; the cost is that of one round"
        )
        advice = (
            "run it along the shorter dimension or in blocks, or write it as a product with a triangular matrix of "
            "ones, which the matrix unit does"
        )
        return what, advice, steps
    return None


def _indices(node: torch.fx.Node, name: str, source: torch.Tensor, result: torch.Tensor) -> tuple[int | None, int]:
    """(places that are read or written, elements that lie together at each)."""
    if name in ("index", "_unsafe_index", "index_put", "_unsafe_index_put"):
        given = node.args[1]
        assert isinstance(given, list | tuple)
        at = [i for i, x in enumerate(given) if x is not None]
        places = [t for i in at if (t := tensor(given[i])) is not None]
        if not places or any(p.dtype is torch.bool for p in places):
            return None, 0
        row = math.prod(source.shape[at[-1] + 1 :])
        before = math.prod(source.shape[: at[0]])
        return math.prod(torch.broadcast_shapes(*(p.shape for p in places))) * before, row
    if name in ("index_select", "index_add", "index_copy", "index_fill", "index_reduce"):
        dim = node.args[1]
        index = tensor(node.args[2])
        assert isinstance(dim, int)
        if index is None or not source.ndim:
            return None, 0
        dim %= source.ndim
        return index.numel() * math.prod(source.shape[:dim]), math.prod(source.shape[dim + 1 :])
    if name in ("gather", "scatter", "scatter_add", "scatter_reduce"):
        index = tensor(node.args[2])
        return (None, 0) if index is None else (index.numel(), 1)
    return result.numel(), 1


def host(places: Places) -> Iterator[Finding]:
    """Operators that are computed on the host, and those whose result has a size that depends on data."""
    for node in places.nodes:
        target = node.target
        if not isinstance(target, OpOverload) or form_of(target) is not None:
            continue
        entry = find(short_name(target))
        if entry is None:
            continue
        if entry.dynamic or _is_open(node):
            what = f"the size of the result of {_name(node)} depends on the values in it; a TPU program has fixed sizes"
            advice = (
                "use a form of a fixed size: a mask with torch.where, topk with a fixed k, or the largest size with "
                "padding"
            )
            yield places.finding("host", what, advice, [node], None)
        elif _calls_host(node, entry.function):
            what = (
                f"{_name(node)} has no form for TPUs and is computed on the host with NumPy: the chip waits while its "
                "arrays travel there and back, and a step that is compiled ahead of time cannot have it"
            )
            advice = (
                "compute it before the step, on the CPU, or use another method (linalg.eigh for a symmetric matrix)"
            )
            yield places.finding("host", what, advice, [node], None)


def _is_open(node: torch.fx.Node) -> bool:
    return any(not isinstance(n, int) for x in tensors(node) for n in x.shape)


def _calls_host(node: torch.fx.Node, function: Any) -> bool:
    """Whether an operator's lowering calls back to the host; those whose family never does are not traced."""
    module = inspect.getmodule(inspect.unwrap(function))
    if module is None or getattr(module, "host_call", None) is not host_call:
        return False
    inputs = node.all_input_nodes
    if any(tensor(n) is None for n in inputs):
        return False

    def run(*arrays: jax.Array) -> Any:
        values = dict(zip(inputs, arrays, strict=True))
        args: Any
        kwargs: Any
        args, kwargs = torch.fx.node.map_arg((node.args, dict(node.kwargs)), cast(Any, values.__getitem__))
        assert isinstance(node.target, OpOverload)
        return apply(node.target, tuple(args), dict(kwargs))

    types = [jax.ShapeDtypeStruct(tuple(x.shape), to_jax(x.dtype)) for n in inputs if (x := tensor(n)) is not None]
    with jax.enable_x64(True):
        return "callback" in str(jax.make_jaxpr(run)(*types))


def unsupported(places: Places) -> Iterator[Finding]:
    """Every operator of the graph that has no form for TPUs."""
    found: dict[Any, list[torch.fx.Node]] = {}
    for node in places.nodes:
        target = node.target
        if not isinstance(target, OpOverload) or target is torch.ops.aten.sym_size.int:
            continue
        if form_of(target) is None and not can_lower(target):
            found.setdefault(target, []).append(node)
    for nodes in found.values():
        by_line: dict[str, list[torch.fx.Node]] = {}
        for node in nodes:
            by_line.setdefault(str(node.meta.get("stack_trace", node.name)), []).append(node)
        for same in by_line.values():
            what = f"{same[0].target} has no form for TPUs, and PyTorch has no decomposition of it"
            advice = (
                "write it with PyTorch's own operators in place of a custom one, or register a lowering for it "
                "(torchtpu.lowering.registry.lowering): a function on JAX arrays"
            )
            yield places.finding("unsupported", what, advice, same, None)


def _name(node: torch.fx.Node) -> str:
    return short_name(node.target) if isinstance(node.target, OpOverload) else str(node.target)
