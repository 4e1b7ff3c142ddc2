"""Programs for bucket sizes: one serves every call whose sizes round up to the same buckets.

Inputs are read into padded arrays, the operators run by rules that know what padding does to each of them
(``padding_rules``), and results leave as windows of their own sizes on storages of the buckets' sizes. Nothing is
compiled for a size: an input that is not on such a storage already is padded by the host.
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import sympy
import torch
import torch.utils._pytree as pytree
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import statically_known_true

from torchtpu import _C
from torchtpu.compile import padding_indexing, padding_products, padding_reductions, padding_views  # noqa: F401 - rules
from torchtpu.compile.draws import Draws, takes_draws
from torchtpu.compile.padding_layout import (
    Dim,
    Frame,
    NotUnderstood,
    Padded,
    evaluate,
    expression,
    factors,
    normal,
    product,
)
from torchtpu.compile.padding_rules import Interpreter, Size
from torchtpu.eager import modes
from torchtpu.eager.arrays import force, number_operand, prepare_storage
from torchtpu.eager.errors import translate
from torchtpu.eager.launch import block, examples, reserve_seed, seed_words
from torchtpu.eager.program import Inputs, describe_values, stacked_checks
from torchtpu.eager.views import physical_order, row_major
from torchtpu.lowering.context import Trace, tracing
from torchtpu.lowering.dtypes import rounded, to_jax, to_torch
from torchtpu.runtime import checks, devices, meshes
from torchtpu.runtime.compiler import compile_program

__all__ = ["Buckets", "PaddedProgram", "padded_flat"]


_CONSTRAIN = "torchtpu.constrain.default"
_SIZES_KEPT = 4096
"""How many combinations of sizes a graph remembers what follows from."""


class Buckets:
    """Which size a program is compiled for.

    Args:
        policy: ``"powers"`` (of two), ``"exact"`` (none: a program for each size), or sizes, as numbers or as text with
            commas; beyond the largest of them, powers of two. None: ``TORCHTPU_BUCKETS``, or powers.

    Raises:
        ValueError: it is none of these.
    """

    def __init__(self, policy: Any = None) -> None:
        policy = os.environ.get("TORCHTPU_BUCKETS", "powers") if policy is None else policy
        self.exact = policy == "exact"
        self.sizes: list[int] = []
        if policy in ("exact", "powers"):
            return
        try:
            parts = policy.split(",") if isinstance(policy, str) else policy
            self.sizes = sorted(int(n) for n in parts)
        except (TypeError, ValueError):
            self.sizes = []
        if not self.sizes or self.sizes[0] < 1:
            raise ValueError(f'buckets are "powers", "exact" or sizes such as "128,512,2048", not {policy!r}')

    def __call__(self, size: int, most: int | None = None) -> int:
        """The bucket of a size; ``most`` is the largest size there can be, if one was declared."""
        found = next((b for b in self.sizes if b >= size), 1 << (size - 1).bit_length())
        return found if most is None else max(size, min(found, most))


@dataclass(frozen=True)
class _Where:
    """Where a size is found: it is an input, or dimension ``dim`` of one."""

    position: int
    dim: int | None

    def read(self, inputs: Sequence[Any]) -> int:
        """The size in this call."""
        found = inputs[self.position]
        return int(found) if self.dim is None else found.shape[self.dim]


def has_changing_size(value: Any) -> bool:
    """Whether an input has a size that changes from call to call, or is one."""
    sizes = value.shape if isinstance(value, torch.Tensor) else [value]
    return any(isinstance(n, torch.SymInt) for n in sizes)


class _Sizes:
    """The sizes of a call, and what follows from them.

    Attributes:
        read: the sizes, in the order of the symbols.
        counts, buckets: by symbol, the size and what it is rounded up to.
        rounded: the buckets in order, part of what a program is found by.
        specs: the C++ descriptions of results of these sizes.
    """

    def __init__(
        self,
        read: tuple[int, ...],
        counts: dict[sympy.Symbol, int],
        buckets: dict[sympy.Symbol, int],
        dims: dict[int, tuple[Dim, ...]],
    ) -> None:
        self.read, self.counts, self.buckets, self.rounded = read, counts, buckets, tuple(buckets.values())
        self.specs: dict[_Spec, Any] = {}
        frame = Frame(buckets, counts)
        self.places = {i: frame.shape(d) for i, d in dims.items()}

    def shape(self, i: int, order: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the storage's value of an input."""
        places = self.places[i]
        return tuple([places[k] for k in order])


class PaddedProgram:
    """A graph and its programs, one for each combination of buckets.

    Args:
        module: a graph with sizes that change.
        buckets: which sizes programs are compiled for.
        name: what the graph is called in messages.

    Raises:
        NotUnderstood: a size does not follow from those of the inputs.
    """

    def __init__(self, module: torch.fx.GraphModule, buckets: Buckets, name: str) -> None:
        self.module, self.buckets, self.name = module, buckets, name
        self.values = [n.meta.get("val") for n in module.graph.nodes if n.op == "placeholder"]
        self.changing = [i for i, v in enumerate(self.values) if isinstance(v, torch.Tensor) and has_changing_size(v)]
        self.fixed = [
            i for i, v in enumerate(self.values) if i not in self.changing and not isinstance(v, torch.SymInt)
        ]
        self.symbols = self._find_symbols()
        self.shape_env = next(
            n.node.shape_env
            for v in self.values
            for n in (v.shape if isinstance(v, torch.Tensor) else [v])
            if isinstance(n, torch.SymInt)
        )
        # A number that no tensor's size depends on is an operand like the others, but needs no bucket.
        metas = [v for n in module.graph.nodes for v in pytree.tree_leaves(n.meta.get("val"))]
        sizes = [expression(n) for v in metas if isinstance(v, torch.Tensor) for n in v.shape]
        self.pads = set().union(*(n.free_symbols for n in sizes if not isinstance(n, int)))
        self.most = {s: self._most(s) for s in self.symbols}
        self.where = list(self.symbols.values())
        self.sizes: dict[tuple[int, ...], _Sizes] = {}
        self.dims = {i: tuple(factors(n) for n in self.values[i].shape) for i in self.changing}
        self.handle = _C.register_signature([f"x{i}" for i in self.fixed], [False] * len(self.fixed))
        self.random = any(takes_draws(n) for n in module.graph.nodes)
        self.named = [meshes.mesh_of(n.args[1]) for n in module.graph.nodes if str(n.target) == _CONSTRAIN]
        self.outputs = list(next(n for n in module.graph.nodes if n.op == "output").args[0])
        self.programs: dict[Any, Callable[..., Any]] = {}

    def _find_symbols(self) -> dict[sympy.Symbol, _Where]:
        """How to read each symbol off the inputs."""
        found: dict[sympy.Symbol, _Where] = {}
        for i, value in enumerate(self.values):
            if isinstance(value, torch.SymInt):
                found.setdefault(expression(value), _Where(i, None))
            elif isinstance(value, torch.Tensor):
                for d, n in enumerate(value.shape):
                    found.setdefault(expression(n), _Where(i, d))
        found = {s: where for s, where in found.items() if isinstance(s, sympy.Symbol)}
        for value in self.values:
            sizes = list(value.shape) if isinstance(value, torch.Tensor) else [value]
            for n in sizes:
                if isinstance(n, torch.SymInt):
                    missing = n.node.expr.free_symbols - found.keys()
                    if missing:
                        raise NotUnderstood(f"the size {n} of an input does not tell what {min(map(str, missing))} is")
        return found

    def _implied(self, relation: Any) -> bool:
        """Whether Dynamo's guards make sure of a relation of sizes."""
        return statically_known_true(torch.SymBool(SymNode(relation, self.shape_env, bool, None)))

    def _most(self, symbol: sympy.Symbol) -> int | None:
        """The largest size that a symbol can have, if the user declared one."""
        upper = self.shape_env.bound_sympy(symbol).upper
        return int(upper) if upper.is_Integer and upper < 2**31 else None

    def __call__(self, inputs: Sequence[Any]) -> list[Any] | None:
        """Run the graph on tensors and sizes. None where this call is not one for a padded program: a size is zero.

        Raises:
            NotUnderstood: what an operator does to padding is not known; nothing has been computed.
        """
        read = tuple([where.read(inputs) for where in self.where])
        sizes = self.sizes.get(read)
        if sizes is None:
            counts = dict(zip(self.symbols, read, strict=True))
            if any(n < 1 for s, n in counts.items() if s in self.pads):
                return None
            if len(self.sizes) >= _SIZES_KEPT:
                self.sizes.clear()
            buckets = {s: self.buckets(n, self.most[s]) for s, n in counts.items() if s in self.pads}
            sizes = self.sizes[read] = _Sizes(read, counts, buckets, self.dims)
        fixed = tuple([inputs[i] for i in self.fixed])
        key, operands, _, device = _C.flatten(self.handle, fixed, {})
        if self.changing:
            device = inputs[self.changing[0]].device.index
        padded = [_padding.pad(inputs[i], i, sizes, device) for i in self.changing]
        changing = [array for array, _ in padded]
        whole: tuple[Any, ...] = (key, device, sizes.rounded, *[(order, array.shape) for array, order in padded])
        placement = None
        if meshes.active:
            operands = [force(x) for x in operands]
            placement = meshes.placement([*changing, *operands], self.named)
        if placement is not None:
            whole = (*whole, placement.key)
            operands, changing = placement.spread(operands), placement.spread(changing)
        run = self.programs.get(whole)
        if run is None:
            if sum(prepare_storage(t) for t in fixed if isinstance(t, torch.Tensor) and t.device.type == "tpu"):
                return self(inputs)
            orders = [order for _, order in padded]
            run = self.programs[whole] = self._build(inputs, operands, changing, orders, sizes, device, placement)
        return run([force(x) for x in operands], changing, inputs, sizes, device)

    def _build(
        self,
        inputs: Sequence[Any],
        operands: list[Any],
        changing: list[jax.Array],
        orders: list[tuple[int, ...]],
        sizes: _Sizes,
        device: int,
        placement: meshes.Placement | None,
    ) -> Callable[..., Any]:
        everywhere = placement.spread if placement is not None else list
        fixed = describe_values([inputs[i] for i in self.fixed])
        numbers = [i for i, s in enumerate(fixed.operands) if s is None]
        notes: dict[str, Any] = {}

        def traced(arrays: list[jax.Array], counts: list[jax.Array], *given: Any) -> list[jax.Array]:
            trace = Trace()
            frame = Frame(sizes.buckets, dict(zip(self.symbols, counts, strict=True)), self._implied)
            held = Inputs(fixed, given, self.random)
            draws = Draws(trace, held.seed)
            values: dict[int, Any] = {i: _unpadded(held.value(x)) for i, x in zip(self.fixed, fixed.args, strict=True)}
            for i, order, array in zip(self.changing, orders, arrays, strict=True):
                values[i] = _unpack(frame, self.dims[i], order, array)
            for i, v in enumerate(self.values):
                if isinstance(v, torch.SymInt):
                    values[i] = Size(expression(v))
            with tracing(trace):
                interpreter = Interpreter(frame, trace, draws.run)
                results = interpreter.run(self.module.graph, [values[i] for i in range(len(self.values))])
            leaving: list[jax.Array] = []
            specs = []
            for result, node in zip(results, self.outputs, strict=True):
                spec, made = self._leave(frame, result, node, sizes.counts)
                specs.append(spec)
                if made is not None:
                    leaving.append(made)
            notes["specs"], notes["draws"] = specs, draws.count
            notes["checks"] = tuple((c.message, c.error) for c in trace.checks)
            checked = stacked_checks(trace)
            if placement is not None and placement.everywhere is not None:
                checked = [jax.lax.with_sharding_constraint(c, placement.everywhere) for c in checked]
            return [*leaving, *checked]

        given = examples(fixed, [force(x) for x in operands], device, self.random)
        if placement is not None:  # where they lie counts, not only their types
            known = [x if isinstance(x, jax.Array) else g for g, x in zip(given, operands, strict=False)]
            given = placement.spread([*known, *given[len(known) :]])
        run = compile_program(
            traced,
            [
                changing,
                everywhere([number_operand(n, device) for n in sizes.read]),
                *given,
            ],
            devices.device(device),
            self.name,
            mesh=None if placement is None else placement.mesh,
        )
        specs, messages, draws = notes["specs"], notes["checks"], notes["draws"]
        starts = fixed.starts()

        def call(
            operands: list[Any], changing: list[Any], inputs: Sequence[Any], sizes: _Sizes, device: int
        ) -> list[Any]:
            plain = None if placement is None else (sizes.read, [operands[i] for i in numbers])
            for i in numbers:
                operands[i] = number_operand(operands[i], device)
            if starts is not None:
                operands.append(_put(starts, device))
            if self.random:
                operands.append(seed_words(reserve_seed(None, device, draws)))
            try:
                counts = [number_operand(n, device) for n in sizes.read]
                enqueue = lambda: run(changing, everywhere(counts), *everywhere(operands))  # noqa: E731
                if placement is None:
                    values = enqueue()
                else:
                    kind, given = f"{self.name} {sizes.rounded}", lambda: repr(plain).encode()
                    values = meshes.enqueue(placement, kind, self.name, given, enqueue)
            except Exception as error:
                raise translate(error, self.name, device) from error
            if values:
                devices.note(device, values[-1])
            if messages:
                checks.note(values[-1], messages, self.name)
            if modes.blocking:
                block(self.name, values, device)
            made = iter(values)
            return [s(inputs, made, sizes, device) for s in specs]

        return call

    def _leave(
        self, frame: Frame, result: Any, node: Any, counts: dict[sympy.Symbol, int]
    ) -> tuple[Callable[..., Any], jax.Array | None]:
        """How a result becomes what PyTorch gets, and the array that the program returns for it."""
        if isinstance(node, torch.fx.Node) and node.op == "placeholder":
            position = next(i for i, n in enumerate(self._placeholders()) if n is node)
            return lambda inputs, made, sizes, device: inputs[position], None
        if isinstance(result, Size):
            return lambda inputs, made, sizes, device: evaluate(result.expr, sizes.counts), None
        if not isinstance(result, Padded):
            return lambda inputs, made, sizes, device: result, None
        sizes = [product(d) for d in result.dims]
        value = node.meta["val"]
        strides = [expression(n) for n in value.stride()]
        order = physical_order([evaluate(n, counts) for n in sizes], [evaluate(n, counts) for n in strides])
        if order is None or len(order) != len(sizes):
            order = tuple(range(len(sizes)))
        moved = Padded(
            result.array if order == tuple(range(len(order))) else result.array.transpose(order),
            tuple(result.dims[i] for i in order),
        )
        dtype = value.dtype if value.dtype is torch.complex32 else to_torch(result.array.dtype)
        # A value may be folded in any way; that of the padded array itself is what the next graph expects.
        array = frame.reshape(moved, _stored(moved.dims)).array.reshape(moved.array.shape)
        return _Spec(sizes, order, tuple(array.shape), dtype, self.name), rounded(array, dtype)

    def _placeholders(self) -> list[torch.fx.Node]:
        return [n for n in self.module.graph.nodes if n.op == "placeholder"]


def _stored(dims: Sequence[Dim]) -> list[Dim]:
    """The dimensions of a storage's value: all elements at the front, in the storage's order, so that the tensor is a
    dense window on them. The array's own dimensions if only the first has padding.
    """
    atoms = normal([a for d in dims for a in d])
    if all(isinstance(a, int) for a in atoms[1:]):
        return list(dims)
    whole = math.prod(a for a in atoms if isinstance(a, int))
    return [normal((sympy.expand(product([a for a in atoms if not isinstance(a, int)])),)), normal((whole,))]


def _unpadded(x: Any) -> Any:
    return Padded(x, tuple(normal((n,)) for n in x.shape)) if isinstance(x, jax.Array) else x


def _unpack(frame: Frame, dims: tuple[Dim, ...], order: tuple[int, ...], array: jax.Array) -> Padded:
    """The padded array of an input, from its storage's value."""
    ordered = [dims[i] for i in order]
    stored = _stored(ordered)
    moved = frame.reshape(Padded(array.reshape(frame.shape(stored)), tuple(stored)), ordered)
    back = sorted(range(len(order)), key=order.__getitem__)
    return moved if back == list(range(len(back))) else Padded(moved.array.transpose(back), dims)


class _Spec:
    """A tensor to be wrapped, whatever the sizes are."""

    def __init__(self, sizes: list[Any], order: tuple[int, ...], shape: tuple[int, ...], dtype: Any, name: str) -> None:
        self.sizes, self.order, self.shape, self.dtype, self.name = sizes, order, shape, dtype, name

    def __call__(self, inputs: Sequence[Any], made: Any, sizes: _Sizes, device: int) -> torch.Tensor:
        spec = sizes.specs.get(self)
        if spec is None:
            size = tuple(evaluate(n, sizes.counts) for n in self.sizes)
            inner = row_major([size[i] for i in self.order])
            stride = [0] * len(size)
            for i, s in zip(self.order, inner, strict=True):
                stride[i] = s
            spec = sizes.specs[self] = _C.make_spec(size, tuple(stride), self.shape, self.dtype, self.name)
        return _C.wrap(spec, next(made), device)


class _Padding:
    """Brings tensors to bucket size without compiling anything; keeps what it padded while the original lives."""

    def __init__(self) -> None:
        self.kept: dict[int, tuple[Any, dict[Any, jax.Array]]] = {}

    def pad(self, t: torch.Tensor, i: int, sizes: _Sizes, device: int) -> tuple[jax.Array, tuple[int, ...]]:
        """A storage's value of bucket size that begins with the elements of input ``i``, and their order of dimensions.

        A tensor on a storage of that size is there already. Others go through the host: on XLA a program that pads
        would be compiled for each size, and transfers are not.
        """
        value, held, dtype = _C.get_value(t)
        if dtype is not t.dtype and prepare_storage(t):
            value, held, _ = _C.get_value(t)
        size = tuple(t.shape)
        order = tuple(range(len(size))) if t.is_contiguous() else physical_order(size, tuple(t.stride()))
        plain = order is not None and t.storage_offset() == 0 and not t.is_conj() and not t.is_neg()
        order = order if plain and order is not None else tuple(range(len(size)))
        shape = sizes.shape(i, order)
        if value is None:
            return _put(np.zeros(shape, to_jax(t.dtype)), device), order
        value = force(value)
        if plain and math.prod(held) == math.prod(shape):
            return value, order
        key = (size, tuple(t.stride()), t.storage_offset(), t.is_conj(), t.is_neg(), shape)
        known = self.of(value)
        if key not in known:
            known[key] = _put(_padded_on_host(value, t, order, shape), device)
        return known[key], order

    def of(self, value: jax.Array) -> dict[Any, jax.Array]:
        """What was padded from an array, until the array dies."""
        identity = id(value)
        found = self.kept.get(identity)
        if found is None:
            gone = weakref.ref(value, lambda _: self.kept.pop(identity, None))
            found = self.kept[identity] = (gone, {})
        return found[1]


def padded_flat(value: Any, total: int, device: int) -> Any:
    """A vector of ``total`` elements that begins with those of a storage's value, kept as long as the value lives.
    Nothing is compiled.
    """
    value = force(value)
    known = _padding.of(value)
    if total not in known:
        whole = np.zeros(total, value.dtype)
        whole[: value.size] = np.asarray(meshes.readable(value)).reshape(-1)
        known[total] = _put(whole, device)
    return known[total]


def _put(host: np.ndarray, device: int) -> jax.Array:
    with jax.enable_x64(True):
        return jax.device_put(host, devices.device(device))


def _padded_on_host(value: jax.Array, t: torch.Tensor, order: Sequence[int], shape: tuple[int, ...]) -> np.ndarray:
    flat = np.asarray(meshes.readable(value)).reshape(-1)[t.storage_offset() :]
    strides = [s * flat.itemsize for s in t.stride()]
    elements = np.lib.stride_tricks.as_strided(flat, tuple(t.shape), strides, writeable=False).transpose(order)
    elements = elements.conj() if t.is_conj() else elements
    whole = np.zeros(math.prod(shape), flat.dtype)
    whole[: t.numel()] = (-elements if t.is_neg() else elements).reshape(-1)
    return whole.reshape(shape)


_padding = _Padding()
