"""Waste of the matrix unit: sizes that do not fill it, types it has to go over several times, attention without its
kernel.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch._ops import OpOverload

from torchtpu.aot.count import OpCost
from torchtpu.aot.evaluate import Value
from torchtpu.aot.findings_context import Context, Dimension, percent, size_text, tensor, tensors, up
from torchtpu.aot.forms import without_kernel
from torchtpu.aot.report import Finding
from torchtpu.compile.tiles import LANES, Product

__all__ = ["attention", "dtypes", "heads", "tiles"]

_aten = torch.ops.aten
_ATTENTION = _aten.scaled_dot_product_attention.default
_OPERANDS = {
    _aten.mm.default: (0, 1),
    _aten.addmm.default: (1, 2),
    _aten.bmm.default: (0, 1),
    _aten.baddbmm.default: (1, 2),
}
"""Where the operands of a product are among its arguments."""
_TYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "int8": "i8", "uint8": "ui8"}
_FULL = 0.0025
"""Zeros, as a share of a size, that are not worth another size."""
_PLACES = 3
"""Places at which a fault is told one by one; more are one fault of the model."""


@dataclass(frozen=True)
class _Sizes:
    """The matrices of a product on a device: (m, k) by (k, n), with the weight that k and n are of if there is one."""

    m: int
    k: Dimension
    n: Dimension
    weight: Value | None
    batch: int = 1


@dataclass
class _Odd:
    """A size that does not fill the matrix unit, with every product it is in."""

    dimension: Dimension
    places: list[tuple[float, torch.fx.Node, _Sizes, int]] = field(default_factory=list)
    added: float = 0.0
    zeros: float = 0.0
    work: float = 0.0


def tiles(ctx: Context) -> Iterator[Finding]:
    """Sizes of products that are no multiples of the matrix unit on a device; one in many weights is one finding."""
    unit = ctx.chip.mxu
    odd: dict[tuple[int, int], _Odd] = {}
    for node in ctx.nodes:
        for sizes in _products(ctx, node):
            added = _added(ctx, node, sizes)
            total = sum(added.values())
            if total <= 0:
                continue
            work = sum(ctx.mxu_seconds(op) for op in ctx.ops.get(node, ()))
            longer = ctx.visible(node, added)
            fills = {d: math.log(up(d.local, unit) / d.local) for d in (sizes.k, sizes.n)}
            fills = {d: fill for d, fill in fills.items() if fill > _FULL}
            if not fills:
                continue
            for dimension, part in fills.items():
                fraction = part / sum(fills.values())
                found = odd.setdefault((dimension.size, dimension.parts), _Odd(dimension))
                found.places.append((longer * fraction, node, sizes, dimension.index))
                found.added += longer * fraction
                found.zeros += total * fraction
                found.work += work / sum((d.size, d.parts) == (dimension.size, dimension.parts) for d in fills)
    for found in odd.values():
        yield _odd_finding(ctx, found)


def _odd_finding(ctx: Context, found: _Odd) -> Finding:
    places = sorted(found.places, key=lambda x: -x[0])
    nodes = list(dict.fromkeys(x[1] for x in places))
    _, _, sizes, index = places[0]
    d, unit, parts = found.dimension, ctx.chip.mxu, found.dimension.parts
    others = len({x[2].weight.name if x[2].weight else x[1].name for x in places}) - 1
    if sizes.weight is not None:
        where = f"dimension {index} of {sizes.weight.name} is {d.size}"
        if others:
            where += f", as it is in {others} other weight{'s' * (others > 1)}"
    else:
        where = f"a matrix product has a dimension of {d.size}"
    local = f": {d.local} on each device once it is divided over {parts}" if parts > 1 else ""
    what = (
        f"{where}{local}. The matrix unit of {ctx.chip.generation} works on blocks of {unit} x {unit}, "
        f"so about {percent(found.zeros / (found.zeros + found.work))} of the work of its products is on zeros"
    )
    better = up(d.local, unit) * parts
    if d.size % unit == 0 and d.local < unit:
        advice = (
            f"{d.size} itself is a multiple of {unit}: divide it over fewer devices (a smaller tp), so that each has "
            f"at least {unit}"
        )
    elif _is_vocabulary(ctx, d.size):
        advice = (
            f"pad the vocabulary from {d.size} to {better} with tokens that never occur (in Transformers: "
            f"model.resize_token_embeddings({better})); the extra rows cost {percent(better / d.size - 1)}"
        )
    elif d.size < unit:
        advice = f"where the model leaves a choice, use {better}, or do several such products as one"
    else:
        down = d.local // unit * unit * parts
        advice = f"use {better} or {down} instead of {d.size}: the chip takes as long for {better} as for {d.size}"
    return ctx.finding("tile", what, advice, nodes, ctx.share(found.added, extra=True))


def _is_vocabulary(ctx: Context, size: int) -> bool:
    for node in ctx.nodes:
        if node.target is _aten.embedding.default:
            weight = ctx.weight(node.args[0])
            if weight is not None and weight[1][0].size == size:
                return True
    return False


def _products(ctx: Context, node: torch.fx.Node) -> Iterator[_Sizes]:
    """The products of an operator that have a size to choose."""
    batch_parts = ctx.plan.size(ctx.plan.batch)
    if node.target in _OPERANDS:
        left, right = (node.args[i] for i in _OPERANDS[node.target])
        a, b = tensor(left), tensor(right)
        if a is None or b is None:
            return
        weight, dims = None, [Dimension(int(n), 1, i) for i, n in enumerate(b.shape)]
        for operand, order in ((right, (0, 1)), (left, (1, 0))):
            found = ctx.weight(operand) if a.ndim == 2 else None
            if found is not None and len(found[1]) == 2:
                weight, dims = found[0], [found[1][i] for i in order]
                break
        rows = int(b.shape[1] if weight is not None and operand is left else a.shape[-2])
        m = max(1, rows // (batch_parts if weight is not None else 1))
        k, n = dims[-2:]
        if 1 not in (rows, k.size, n.size):  # with a vector it is no work for the matrix unit
            yield _Sizes(m, k, n, weight, int(a.shape[0]) if a.ndim == 3 else 1)
    elif node.target is _aten.linear.default:
        a, found = tensor(node.args[0]), ctx.weight(node.args[1])
        if a is None or found is None or len(found[1]) != 2:
            return
        n, k = found[1]
        rows = a.numel() // int(a.shape[-1])
        if 1 not in (rows, k.size, n.size):
            yield _Sizes(max(1, rows // batch_parts), k, n, found[0])
    elif node.target is _aten.convolution.default:
        found, result = ctx.weight(node.args[1]), tensor(node)
        if found is None or result is None or node.args[6]:
            return
        outputs = found[1][0]
        groups = int(node.args[8])  # type: ignore[arg-type]
        taps = math.prod(d.size for d in found[1][1:])
        if groups == 1 and taps > 1:  # how XLA arranges the taps is its own choice: only the outputs are certain
            m = max(1, result.numel() // outputs.size // batch_parts)
            yield _Sizes(m, Dimension(up(taps, ctx.chip.mxu), 1, 1), outputs, found[0])
    elif node.target is torch.ops.torchtpu.experts.default:
        hidden = tensor(node.args[0])
        assert hidden is not None and isinstance(node.args[3], Sequence)
        for p in node.args[3]:
            found = ctx.weight(p)
            if found is not None and len(found[1]) == 3:
                yield _Sizes(max(1, int(hidden.shape[0]) // batch_parts), found[1][1], found[1][2], found[0])


def _added(ctx: Context, node: torch.fx.Node, s: _Sizes) -> dict[str, float]:
    """Seconds on the matrix unit that zeros add to an operator, by phase; they are not in the prediction."""
    unit = ctx.chip.mxu
    if not (s.k.local % unit or s.n.local % unit):
        return {}
    ops = [op for op in ctx.ops.get(node, ()) if op.is_mxu]
    if node.target is torch.ops.torchtpu.experts.default:  # its products are of all its weights
        own = math.prod((s.k.size, s.n.size))
        ops = [op for op in ops if any(math.prod(shape[1:]) == own for shape in op.shapes if len(shape) == 3)] or ops
    found: dict[str, float] = {}
    for op in ops:
        filled = _filled(op, s, unit)
        found[op.phase] = found.get(op.phase, 0.0) + ctx.mxu_seconds(op) * (filled - 1)
    return found


def _filled(op: OpCost, s: _Sizes, unit: int) -> float:
    """The work with zeros over the work without; where the compiler may turn a product around, the better way."""
    kind = _TYPES.get(op.dtype, "f32")

    def times(m: int, k: int, n: int) -> float:
        return 1 / (1 - Product("dot", s.batch, m, k, n, kind).wasted(unit))

    k, n = s.k.local, s.n.local
    forward = times(s.m, k, n)
    if n < unit:
        forward = min(forward, times(n, k, s.m))
    if op.phase != "backward" or s.weight is None:
        return forward
    pair = sorted((s.k.size, s.n.size))
    if any(sorted(shape) == pair for shape in op.shapes if len(shape) == 2):  # the gradient of what was multiplied
        return min(times(s.m, n, k), times(k, n, s.m)) if k < unit else times(s.m, n, k)
    return min(times(k, s.m, n), times(n, s.m, k))


def heads(ctx: Context) -> Iterator[Finding]:
    """Attention whose heads are narrower than a tile has lanes."""
    found: dict[int, list[tuple[float, torch.fx.Node]]] = {}
    added_on_top: dict[int, bool] = {}
    for node, query, key, value in _attentions(ctx):
        width = int(query.shape[-1])
        if width >= LANES or _is_single(query):
            continue
        inside = _reason(node, query, key, value) is None  # the kernel's work is counted with the zeros
        factor = width / LANES - 1 if inside else LANES / width - 1
        added: dict[str, float] = {}
        for op in ctx.ops.get(node, ()):
            added[op.phase] = added.get(op.phase, 0.0) + ctx.mxu_seconds(op) * factor
        found.setdefault(width, []).append((abs(ctx.visible(node, added)), node))
        added_on_top[width] = not inside
    for width, places in found.items():
        places.sort(key=lambda x: -x[0])
        what = (
            f"attention heads are {width} wide; a TPU works on {LANES} lanes, so {percent(1 - width / LANES)} of the "
            "work of attention is on zeros"
        )
        advice = (
            f"heads of {LANES} use all lanes: {LANES // width if LANES % width == 0 else 'correspondingly'} times "
            "fewer heads of that width keep the hidden size and the number of parameters. For a model that is already "
            "trained this is a property to know, not to change"
        )
        cost = ctx.share(sum(x[0] for x in places), extra=added_on_top[width])
        yield ctx.finding("tile", what, advice, [x[1] for x in places], cost)


def _attentions(ctx: Context) -> Iterator[tuple[torch.fx.Node, torch.Tensor, torch.Tensor, torch.Tensor]]:
    for node in ctx.nodes:
        if node.target is _ATTENTION:
            q, k, v = (tensor(x) for x in node.args[:3])
            if q is not None and k is not None and v is not None:
                yield node, q, k, v


def _is_single(query: torch.Tensor) -> bool:
    """One token at a time: bound by reading the cache, whatever the form."""
    return query.ndim >= 2 and query.shape[-2] == 1


def _masked(node: torch.fx.Node) -> bool:
    return node.args[3] is not None and "window" not in node.meta


def _reason(node: torch.fx.Node, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> str | None:
    dropout = node.args[4]
    assert isinstance(dropout, float | int)
    return without_kernel(query, key, value, _masked(node), dropout)


def attention(ctx: Context) -> Iterator[Finding]:
    """Attention that is not the kernel, with the time beyond what its traffic or its products take at least."""
    for node, query, key, value in _attentions(ctx):
        reason = _reason(node, query, key, value)
        if reason is None or _is_single(query):
            continue
        if _masked(node):
            reason += _mask_detail(ctx, node)
        result = tensor(node)
        assert result is not None
        parts = 1
        if query.ndim == 4:
            spec = ctx.evaluator.layout.fitting(query.shape, (ctx.plan.batch, ctx.plan.heads))
            parts = math.prod(ctx.plan.size(axes) for axes in spec)
        moved = sum(x.numel() * x.element_size() for x in (query, key, value, result)) / parts
        loop = next((lo.length for lo in ctx.evaluator.loops if node in lo.blocks[0]), 1)
        took: dict[str, float] = {}
        for time in ctx.times.get(node, ()):
            took[time.phase] = took.get(time.phase, 0.0) + time.seconds
        more = 0.0
        for phase, seconds in took.items():
            ops = [op for op in ctx.ops.get(node, ()) if op.phase == phase]
            products = sum(ctx.mxu_seconds(op) / op.passes for op in ops)  # the kernel's, in one pass
            least = moved * loop * (2 if phase == "backward" else 1) / ctx.chip.hbm_bandwidth
            more += max(0.0, seconds - max(least, products))
        scores = math.prod(query.shape[:-1]) * int(key.shape[-2]) * 4 / parts
        what = (
            f"attention does not run as the TPU's attention kernel: {reason}. It is computed as products with all its "
            f"scores between them ({size_text(scores)} in float32 on a device for a layer)"
        )
        yield ctx.finding("attention", what, _attention_advice(node, query, key, value), [node], ctx.share(more))


def _mask_detail(ctx: Context, node: torch.fx.Node) -> str:
    mask = node.args[3]
    given = tensor(mask)
    if given is None or not isinstance(mask, torch.fx.Node):
        return ""
    if given.dtype is not torch.bool:
        return f" (it is {_name(given.dtype)} and is added to the scores)"
    seen, pending = {mask}, [mask]
    while pending:
        for n in pending.pop().all_input_nodes:
            if n not in seen:
                seen.add(n)
                pending.append(n)
    inputs = sorted(v.name for n in seen if (v := ctx.value(n)) is not None and v.kind == "input")
    return f" (it depends on {', '.join(inputs)})" if inputs else ""


def _attention_advice(node: torch.fx.Node, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> str:
    if _masked(node):
        return (
            "pass is_causal=True, or a boolean mask that is made from positions alone; for texts of different lengths, "
            "pad on the right and leave the padding out of the loss: a causal mask is then enough"
        )
    if query.ndim != 4:
        return "give the queries, keys and values a batch and a dimension of heads"
    if node.args[4]:
        return "set the dropout of attention to 0 (attention_dropout in a configuration); dropout elsewhere may stay"
    if query.shape[-1] < LANES // 2:
        return f"use fewer, wider heads: {LANES} is best"
    if value.shape[-1] != query.shape[-1]:
        return "pad the narrower of the two with zeros to the other's width, and cut the result"
    odd = sorted({int(x.shape[-2]) for x in (query, key) if x.shape[-2] % LANES})
    if odd:
        return "pad the sequence: " + ", ".join(f"{n} to {up(n, LANES)}" for n in odd)
    return "compute attention in bfloat16"


def dtypes(ctx: Context) -> Iterator[Finding]:
    """Products of float32 in several passes, float64, and float16."""
    yield from _passes(ctx)
    for dtype in (torch.float64, torch.complex128, torch.float16):
        nodes = [n for n in ctx.nodes if any(x.dtype is dtype and x.numel() > 1 for x in tensors(n))]
        nodes = [n for n in nodes if n in ctx.ops]
        if not nodes:
            continue
        took = {n: sum(t.seconds for t in ctx.times.get(n, ())) for n in nodes}
        nodes.sort(key=lambda n: -took[n])
        where = f"{len(nodes)} operator{'s' * (len(nodes) > 1)} compute{'s' * (len(nodes) == 1)} in {_name(dtype)}"
        products = any(op.is_mxu and op.dtype == _name(dtype) for n in nodes for op in ctx.ops[n])
        cost = ctx.share(sum(took.values()))
        if dtype is torch.float16:
            what = f"{where}. A TPU's matrix unit multiplies bfloat16; float16 has to be converted"
            advice = "use bfloat16: the same size, the range of float32, and no loss scaling"
        else:
            what = f"{where}, which a TPU does not have: each operation is many of float32"
            if products and dtype is not torch.float16:
                what += ". What its matrix products take is not in the prediction"
                cost = None
            advice = "use float32 (or bfloat16): look for .double(), torch.float64 or NumPy arrays, which are float64"
        yield ctx.finding("dtype", what, advice, nodes, cost)


def _passes(ctx: Context) -> Iterator[Finding]:
    saved: list[tuple[float, torch.fx.Node, int]] = []
    products = 0.0
    whole = 0.0
    for node, ops in ctx.ops.items():
        several = [op for op in ops if op.is_mxu and op.passes > 1] if _is_float32(node) else []
        whole += sum(ctx.mxu_seconds(op) for op in ops)
        if not several:
            continue
        less: dict[str, float] = {}
        for op in several:
            less[op.phase] = less.get(op.phase, 0.0) - ctx.mxu_seconds(op) * (1 - 1 / op.passes)
        products += sum(ctx.mxu_seconds(op) for op in several)
        saved.append((-ctx.visible(node, less), node, max(op.passes for op in several)))
    saved.sort(key=lambda x: -x[0])
    advice = (
        "run the model in bfloat16 (model.to(torch.bfloat16), or torch.autocast), or call "
        "torch.set_float32_matmul_precision({}), which makes it {}"
    )
    for group in [saved] if len(saved) > _PLACES else [[x] for x in saved]:
        if not group:
            continue
        passes = max(x[2] for x in group)
        weights = {w[0].dtype for n in group if (w := _weight_of(ctx, n[1])) is not None}
        where = "a matrix product is" if len(group) == 1 else f"{len(group)} matrix products are"
        what = (
            f"{where} float32, which the matrix unit does in {passes} passes of bfloat16"
            f"{' (' + percent(products / whole) + ' of its time in this step)' if whole and len(group) > 1 else ''}"
        )
        if weights == {torch.bfloat16}:
            what += "; the weight is bfloat16, and the input was made float32 before"
        say = advice.format("'high'", "3 passes") if passes > 3 else advice.format("'medium'", "1 pass")
        cost = ctx.share(sum(x[0] for x in group))
        yield ctx.finding("dtype", what, say, [x[1] for x in group], cost)


def _is_float32(node: torch.fx.Node) -> bool:
    """Whether an operator multiplies numbers that have the digits of float32: XLA takes back a conversion from
    bfloat16 before a product, as the gradient of a product of bfloat16 has it."""
    found = []
    taken: tuple[int, ...] | None = _OPERANDS.get(cast(OpOverload, node.target))
    if node.target is _aten.linear.default:
        taken = 0, 1
    if node.target is _aten.convolution.default:
        taken = (0, 1)
    elif node.target is _ATTENTION:
        taken = (0, 1, 2)
    elif node.target is torch.ops.torchtpu.experts.default:
        taken = (0,)
    operands: Sequence[object] = node.all_input_nodes if taken is None else [node.args[i] for i in taken]
    for source in operands:
        while isinstance(source, torch.fx.Node) and source.target in _PASSED_ON:
            source = source.args[0]
        value = tensor(source)
        found += [] if value is None else [value.dtype]
    return torch.float32 in found


_PASSED_ON = {
    *(_aten._to_copy.default, _aten.view.default, _aten._unsafe_view.default, _aten.permute.default),
    *(_aten.transpose.int, _aten.t.default, _aten.expand.default, _aten.clone.default, _aten.unsqueeze.default),
}
"""Operators that change no number, or convert them."""


def _weight_of(ctx: Context, node: torch.fx.Node) -> tuple[Value, list[Dimension]] | None:
    operands = itertools.chain(node.args, node.kwargs.values())
    return next((w for x in operands if (w := ctx.weight(x)) is not None and len(w[1]) > 1), None)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
