"""Programs of single operators for buckets of sizes, for eager traces whose sizes grow.

An operator whose calls differ in sizes alone (``torchtpu.eager.growth``) is traced once with sizes that are operands,
by the rules of ``padding_rules``, and recorded like any other. A result is a dense tensor of its own size at the front
of a storage of bucket size, where the next operator reads it; so the trace of a loop's next step equals the last one's.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import sympy
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, statically_known_true
from torch.utils._pytree import tree_leaves

from torchtpu import _C
from torchtpu.compile.padding import Buckets, padded_flat
from torchtpu.compile.padding_layout import Dim, Frame, NotUnderstood, Padded, expression, is_padded, normal
from torchtpu.compile.padding_rules import Interpreter, Size
from torchtpu.eager import growth
from torchtpu.eager.kernels import Kernel
from torchtpu.eager.launch import examples
from torchtpu.eager.program import (
    Call,
    Constant,
    Described,
    Meta,
    Number,
    Program,
    Storage,
    Window,
    key_of,
    name_of,
    output_spec,
    stacked_checks,
)
from torchtpu.eager.views import physical_order, row_major
from torchtpu.lowering.apply import apply
from torchtpu.lowering.context import Trace, tracing
from torchtpu.lowering.dtypes import rounded, to_jax, to_torch
from torchtpu.lowering.promotion import cast
from torchtpu.runtime import observe

__all__ = ["grown"]

_SHAPES_KEPT = 4
"""Kinds of sizes (all apart, two always equal, ...) of one operator that are traced symbolically."""


class _Symbolic:
    """An operator's call with symbols for the sizes that change.

    Attributes:
        symbols: of each distinct size, in order.
        args, kwargs: the call's, with a dimension tuple for a window and ``Size`` for a size.
        value: what PyTorch says about the result: fake tensors.
    """

    def __init__(self, kernel: Kernel, call: Call, sizes: Sequence[int], changing: frozenset[int]) -> None:
        self.env = ShapeEnv()
        numbers = list(dict.fromkeys(sizes[i] for i in sorted(changing)))
        nodes = []
        for i, n in enumerate(numbers):
            source = ConstantSource(f"s{i}")
            symbol = self.env.create_symbol(n, source, DimDynamic.DYNAMIC)
            nodes.append(self.env.create_symintnode(symbol, hint=n, source=source))
        self.symbols = [expression(n) for n in nodes]
        symbolic = [nodes[numbers.index(n)] if i in changing else n for i, n in enumerate(sizes)]
        position = itertools.count()
        fakes: dict[int, torch.Tensor] = {}

        def sizes_of(x: Window) -> list[Any]:
            return [symbolic[next(position)] for _ in x.plan.size]

        def leaf(x: Any, is_size: bool) -> tuple[Any, Any]:
            """An argument for the rules, and for the fake operator."""
            if isinstance(x, Window):
                size = sizes_of(x)
                fakes[id(x)] = torch.empty(size, dtype=x.dtype, device=f"tpu:{call.device}")
                return _Place(x, tuple(_dim(n) for n in size)), fakes[id(x)]
            if isinstance(x, Number):
                number = torch.empty((), dtype=x.dtype, device="cpu") if x.dtype is not None else x.kind(1)
                return x, number
            if isinstance(x, tuple | list):
                pairs = [leaf(y, is_size) for y in x]
                return [a for a, _ in pairs], [b for _, b in pairs]
            if is_size and type(x) is int:
                n = symbolic[next(position)]
                return (Size(n.node.expr) if isinstance(n, torch.SymInt) else n), n
            return x, x

        op, are_sizes = call.op, growth.sizes_among(call.op, kernel.flags)
        with FakeTensorMode(shape_env=self.env), enable_python_dispatcher():
            pairs = [leaf(x, are_sizes[a.name]) for a, x in zip(op._schema.arguments, call.args, strict=False)]
            named = {n: leaf(x, are_sizes[n]) for n, x in call.kwargs.items()}
            dropped = kernel.derived.dropped if kernel.derived is not None else frozenset()
            given = {n: b for n, (_, b) in named.items() if n not in dropped}
            self.value = kernel.target(*[b for _, b in pairs], **given)
        self.args, self.kwargs = [a for a, _ in pairs], {n: a for n, (a, _) in named.items()}
        self.guards = [g.expr for g in self.env.guards]

    def fresh(self, kernel: Kernel) -> Sequence[Any]:
        """What PyTorch says about the new tensors, without what is written to arguments."""
        several = len(kernel.target._schema.returns) > 1
        values = list(self.value) if several else [self.value]
        return values if kernel.derived is None else values[: kernel.derived.first_write]

    def holds(self, counts: dict[sympy.Symbol, int]) -> bool:
        """Whether it is also the call with other sizes."""
        return all(sympy.simplify(g.xreplace(counts)) == sympy.true for g in self.guards)

    def implied(self, relation: Any) -> bool:
        """Whether a relation of sizes follows from the guards."""
        return statically_known_true(torch.SymBool(SymNode(relation, self.env, bool, None)))


@dataclass(frozen=True)
class _Place:
    """A tensor argument: its window, and its dimensions with symbols."""

    window: Window
    dims: tuple[Dim, ...]


def _dim(n: Any) -> Dim:
    return normal((n.node.expr if isinstance(n, torch.SymInt) else n,))


@dataclass(frozen=True)
class _Read:
    """How a tensor is read from its storage.

    Attributes:
        order: the storage's order of its dimensions, if it is dense and at the front; None: it goes by strides.
        total: places that it takes, dense.
        whole: whether the storage is nothing else.
    """

    order: tuple[int, ...] | None
    total: int
    whole: bool


class _Given(Described):
    """The operands of a program, with the numbers that say how large and where."""

    def __init__(self, operands: list[Storage | None], numbers: list[int]) -> None:
        super().__init__((), {}, operands, [])
        self.numbers = numbers

    def starts(self) -> np.ndarray | None:
        return np.asarray(self.numbers, np.int64) if self.numbers else None


_symbolic: dict[Any, list[_Symbolic]] = {}
_programs: dict[Any, Program] = {}


def grown(
    kernel: Kernel,
    call: Call,
    shape: growth.Shape,
    metas: Sequence[Meta | None] | None,
    operands: Sequence[Any],
    tensors: Sequence[torch.Tensor],
) -> Callable[..., Any] | None:
    """How to run a call that differs from earlier ones in sizes, for all sizes of its buckets.

    Args:
        kernel: the operator.
        call: the call.
        shape: its sizes, and what else it is.
        metas: its new tensors according to PyTorch.
        operands: values of its storages and its numbers.
        tensors: its tensors, in the order of its windows.

    Returns:
        The function kept for the call's signature; None if it is to be compiled for exactly these sizes.
    """
    structure, sizes = shape
    changing, buckets = growth.varying(structure), Buckets()
    if changing is None or buckets.exact or metas is None:
        return None
    changing = frozenset(i for i in changing if sizes[i] > 1)  # PyTorch treats 0 and 1 apart
    try:
        return _build(kernel, call, structure, sizes, changing, buckets, list(metas), operands, tensors)
    except Exception as why:  # exact sizes may do; if it was no fault of the sizes, they raise it again
        observe.exact(f"{name_of(call.op)}: {why}")
        growth.refuse(structure)
        return None


def _build(
    kernel: Kernel,
    call: Call,
    structure: Any,
    sizes: tuple[int, ...],
    changing: frozenset[int],
    buckets: Buckets,
    metas: list[Any],
    operands: Sequence[Any],
    tensors: Sequence[torch.Tensor],
) -> Callable[..., Any]:
    numbers = list(dict.fromkeys(sizes[i] for i in sorted(changing)))
    pattern = tuple(numbers.index(n) if i in changing else -1 - n for i, n in enumerate(sizes))
    kinds = _symbolic.setdefault((structure, pattern), [])
    found = next((s for s in kinds if s.holds(dict(zip(s.symbols, numbers, strict=True)))), None)
    if found is None:
        if len(kinds) >= _SHAPES_KEPT:
            raise NotUnderstood("its result depends on its sizes in too many ways")
        try:
            found = _Symbolic(kernel, call, sizes, changing)
        except Exception as error:
            raise NotUnderstood(f"{type(error).__name__}: {error}") from error
        kinds.append(found)
    frame = Frame(dict(zip(found.symbols, map(buckets, numbers), strict=True)), {})
    places = [x for x in tree_leaves((found.args, found.kwargs)) if isinstance(x, _Place)]
    reads, starts = [], list(numbers)
    targets = {i: math.prod(s.shape) for i, s in enumerate(call.operands) if s is not None}
    for place, t in zip(places, tensors, strict=True):
        read = _how(place, t, frame)
        reads.append(read)
        i = place.window.operand
        starts += [int(t.storage_offset()), *t.stride()]
        absent = call.operands[i].uninitialised  # type: ignore[union-attr]
        if read.order is not None and targets[i] < read.total and (absent or isinstance(operands[i], jax.Array)):
            targets[i] = read.total
    storages, padded = [], {}
    for i, s in enumerate(call.operands):
        if s is not None and targets[i] != math.prod(s.shape):
            if not s.uninitialised:
                padded[i] = targets[i]
            s = Storage((targets[i],), s.dtype, s.uninitialised)
        storages.append(s)
    given = _Given(storages, starts)
    results = tuple(_result(m, f, buckets) for m, f in zip(metas, tree_leaves(list(found.fresh(kernel))), strict=True))
    key = structure, pattern, kinds.index(found), tuple(frame.buckets.values()), tuple(reads), tuple(storages), results
    program = _programs.get(key)
    if program is None:
        notes: dict[str, Any] = {"random": kernel.random, "outputs": [], "starts": len(starts)}
        with jax.enable_x64(True):
            traced = _traced(kernel, found, frame.buckets, reads, given, results, notes)
            closed = jax.make_jaxpr(traced)(*examples(given, operands, call.device, kernel.random))
            if kernel.random and not notes["draws"]:
                notes["random"] = False
                closed = jax.make_jaxpr(traced)(*examples(given, operands, call.device, False))
        program = _programs[key] = Program(name_of(call.op), repr(key), given, closed, notes)
        program.growth, program.writes, program.outputs = (structure, sizes), notes["written"], notes["constants"]
    # Results have sizes of their own at every call, unlike the program.
    specs = [
        constant if r is None else _spec(m, r, program.name)
        for constant, m, r in zip(program.outputs, metas, results, strict=True)
    ]
    run = kernel.runner(program, given, specs)

    def call_padded(args: Any, kwargs: Any, operands: list[Any], owners: list[Any], device: int) -> Any:
        for i, total in padded.items():
            operands[i] = padded_flat(operands[i], total, device)
        return run(args, kwargs, operands, owners, device)

    return call_padded if padded else run


def _how(place: _Place, t: torch.Tensor, frame: Frame) -> _Read:
    size, stride = tuple(t.shape), tuple(t.stride())
    order = physical_order(size, stride) if t.storage_offset() == 0 else None
    whole = order is not None and t.numel() * t.dtype.itemsize == _C.storage_of(t)[1]
    return _Read(order, math.prod(frame.shape(place.dims)), whole)


_Result = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, bool]


def _result(meta: Meta | None, fake: Any, buckets: Buckets) -> _Result | None:
    """Of a new tensor: places along each dimension, order in memory, dtype, and whether a size changes."""
    if meta is None:
        return None
    changes = [isinstance(n, torch.SymInt) for n in fake.shape]
    extents = tuple(buckets(n) if c else n for n, c in zip(meta.size, changes, strict=True))
    return extents, _order(meta), meta.dtype, any(changes)


def _spec(meta: Meta, result: _Result, name: str) -> Any:
    extents, _, dtype, changes = result
    return (
        _C.make_spec(meta.size, meta.stride, (math.prod(extents),), dtype, name) if changes else output_spec(meta, name)
    )


def _order(meta: Meta) -> tuple[int, ...]:
    order = physical_order(meta.size, meta.stride)
    assert order is not None  # metas are dense
    return order


def _traced(
    kernel: Kernel,
    found: _Symbolic,
    rounded_up: dict[sympy.Symbol, int],
    reads: Sequence[_Read],
    given: _Given,
    results: Sequence[_Result | None],
    notes: dict[str, Any],
) -> Callable[..., list[jax.Array]]:
    """The function that JAX traces: operands -> [values of new tensors..., new values of written storages..., checks].

    Args:
        kernel: the operator.
        found: the call with symbols.
        rounded_up: the bucket of each symbol.
        reads: how its tensors lie in their storages.
        given: the operands.
        results: of the new tensors.
        notes: says whether it draws; receives what only tracing reveals, see ``trace_function``.
    """

    def traced(*operands: Any) -> list[jax.Array]:
        values = list(operands)
        seed = values.pop() if notes["random"] else None
        numbers = list(values.pop()) if given.numbers else []
        counts = {s: numbers.pop(0) for s in found.symbols}
        frame = Frame(rounded_up, counts, found.implied)
        for i, s in enumerate(given.operands):
            if s is not None and s.uninitialised:
                values[i] = jnp.zeros(s.shape, to_jax(s.dtype))
        how = iter(reads)
        lies: dict[int, tuple[_Read, Any, list[Any]]] = {}

        def value(x: Any) -> Any:
            if isinstance(x, list):
                return [value(y) for y in x]
            if isinstance(x, _Place):
                read, offset = next(how), numbers.pop(0)
                strides = [numbers.pop(0) for _ in x.dims]
                lies[id(x)] = read, offset, strides
                return _load(frame, x, read, values[x.window.operand], offset, strides)
            return given.number(x, values)

        trace = Trace(None if seed is None else lambda: key_of(seed))
        args, kwargs = [value(x) for x in found.args], {n: value(x) for n, x in found.kwargs.items()}
        with tracing(trace):
            interpreter = Interpreter(frame, trace, lambda o, a, k: apply(o, tuple(a), k))
            dropped = kernel.derived.dropped if kernel.derived is not None else frozenset()
            kept = {n: x for n, x in kwargs.items() if n not in dropped}
            returned = interpreter.operator(kernel.target, args, kept, found.value)
        several = len(kernel.target._schema.returns) > 1
        returned = list(returned) if several else [returned]
        first = len(returned) if kernel.derived is None else kernel.derived.first_write
        fresh = returned[:first]
        notes["nested"] = [isinstance(r, tuple | list) for r in fresh]
        made = []
        flat = tree_leaves(fresh, is_leaf=lambda r: isinstance(r, Padded))
        notes["constants"] = [None if isinstance(r, Padded) else Constant(r) for r in flat]
        for r, result in zip(flat, results, strict=True):
            if not isinstance(r, Padded):
                if result is not None or isinstance(r, Size):
                    raise NotUnderstood("has a result that is a size")
                continue
            if result is None:
                raise NotUnderstood("has a result that PyTorch does not know")
            extents, order, dtype, changes = result
            stored = _store(frame, _checked(r, dtype), order, extents)
            made.append(stored if changes else stored.reshape([extents[i] for i in order]))
        written: dict[int, jax.Array] = {}
        if kernel.derived is not None:
            arguments = dict(zip(kernel.names, found.args, strict=False)) | found.kwargs
            for name, r in zip(kernel.derived.written, returned[first:], strict=True):
                place = arguments.get(name)
                if not isinstance(place, _Place) or place.window.conj or place.window.neg:
                    raise NotUnderstood(f"writes to {name}")
                new = _like(frame, _checked(r, place.window.dtype), place.dims)
                i = place.window.operand
                written[i] = _write(frame, new, written.get(i, values[i]), *lies[id(place)])
        notes["written"] = [
            (i, _C.make_spec(a.shape, row_major(a.shape), a.shape, to_torch(a.dtype))) for i, a in written.items()
        ]
        notes["writes"] = []
        notes["draws"] = int(trace.keys_used > 0)
        notes["checks"] = tuple((c.message, c.error) for c in trace.checks)
        return [*made, *written.values(), *stacked_checks(trace)]

    return traced


def _checked(x: Any, dtype: torch.dtype) -> Padded:
    if not isinstance(x, Padded):
        raise NotUnderstood("has a result that is no tensor")
    return Padded(rounded(cast(x.array, to_jax(dtype)), dtype), x.dims)


def _like(frame: Frame, x: Padded, dims: Sequence[Dim]) -> Padded:
    """The padded array in other layouts of the same dimensions; those of one element are repeated."""
    shape = frame.shape(dims)
    for axis, d in enumerate(dims):
        if x.dims[axis] not in ((), d):
            x = frame.relayout(x, axis, d)
    return Padded(jnp.broadcast_to(x.array, shape), tuple(dims))


def _load(frame: Frame, place: _Place, read: _Read, value: jax.Array, offset: Any, strides: Sequence[Any]) -> Padded:
    """The padded array of a tensor, from its storage's value."""
    flat = value.reshape(-1)
    if read.order is None:
        index = _index(frame.shape(place.dims), strides, offset)
        array = jnp.take(flat, index, mode="clip")
    else:
        array = _dense(frame, flat, [place.dims[i] for i in read.order])
        array = array.transpose(sorted(range(len(read.order)), key=read.order.__getitem__))
    array = jnp.conj(array) if place.window.conj else array
    return Padded(-array if place.window.neg else array, place.dims)


def _write(frame: Frame, new: Padded, value: jax.Array, read: _Read, offset: Any, strides: Sequence[Any]) -> jax.Array:
    """A storage's value with a tensor written to it."""
    if read.whole:
        assert read.order is not None
        made = _store(frame, new, read.order, new.array.shape)
        return made.reshape(value.shape) if made.size == value.size else made
    index = _index(new.array.shape, strides, offset)
    mask = frame.mask(new)
    index = index if mask is None else jnp.where(mask, index, value.size)
    return value.reshape(-1).at[index].set(new.array, mode="drop").reshape(value.shape)


def _rows(dims: Sequence[Dim]) -> int:
    """How many dimensions come before those at the end that have no padding: what moves as rows."""
    last = max((i for i, d in enumerate(dims) if is_padded(d)), default=-1)
    return last + 1


def _dense(frame: Frame, flat: jax.Array, dims: Sequence[Dim]) -> jax.Array:
    """A padded array from elements that lie at the front of a vector, row-major."""
    shape = frame.shape(dims)
    flat = _resized(flat, math.prod(shape))
    split = _rows(dims)
    if all(frame.extent(d) == 1 for d in dims[: max(split - 1, 0)]):
        return flat.reshape(shape)
    counts = [frame.count(d) for d in dims[:split]]
    strides = [math.prod(counts[i + 1 :]) for i in range(split)]
    row = math.prod(shape[split:])
    rows = _index(shape[:split], strides, 0)
    return jnp.take(flat.reshape(-1, row), rows, axis=0, mode="clip").reshape(shape)


def _index(shape: Sequence[int], strides: Sequence[Any], offset: Any) -> jax.Array:
    """Where the elements of a strided array are."""
    index = jnp.asarray(offset, jnp.int32)
    for axis, (n, s) in enumerate(zip(shape, strides, strict=True)):
        along = jnp.arange(n, dtype=jnp.int32) * jnp.asarray(s, jnp.int32)
        index = index + along.reshape([-1 if k == axis else 1 for k in range(len(shape))])
    return jnp.broadcast_to(index, tuple(shape))


def _resized(flat: jax.Array, total: int) -> jax.Array:
    return flat[:total] if flat.size >= total else jnp.pad(flat, (0, total - flat.size))


def _store(frame: Frame, x: Padded, order: Sequence[int], extents: Sequence[int]) -> jax.Array:
    """The elements of a padded array, row-major in the given order, at the front of a vector of bucket size."""
    for axis in x.axes():
        x = frame.leading(x, axis)
    array = x.array
    for axis, n in enumerate(extents):
        have = array.shape[axis]
        if have > n:
            array = jax.lax.slice_in_dim(array, 0, n, axis=axis)
        elif have < n:
            array = jnp.pad(array, [(0, n - have) if i == axis else (0, 0) for i in range(array.ndim)])
    array = array.transpose(order)
    dims, shape = [x.dims[i] for i in order], array.shape
    split = _rows(dims)
    if all(n == 1 for n in shape[: max(split - 1, 0)]):
        return array.reshape(-1)
    counts = [frame.count(d) for d in dims[:split]]
    row = math.prod(shape[split:])
    position = jnp.arange(math.prod(shape[:split]), dtype=jnp.int32)
    parts = []
    for count in reversed(counts[1:]):
        parts.append(position % jnp.asarray(count, jnp.int32))
        position = position // jnp.asarray(count, jnp.int32)
    source = jnp.zeros_like(position)
    for part, places in zip([position, *reversed(parts)], shape[:split], strict=True):
        source = source * places + part
    return jnp.take(array.reshape(-1, row), source, axis=0, mode="clip").reshape(-1)
