"""From one operator call to a compiled program.

The call's tensors are windows on storages. The program takes the storages' values and the call's numbers, reads the
windows,
runs the lowering, and returns the values of the new tensors' storages and the new values of the storages it wrote to.
Results' sizes, strides and dtypes are those of
PyTorch's own meta kernel; a lowering that disagrees is reported as a bug.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import Sharding
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves, tree_map

from torchtpu import _C
from torchtpu.eager.arrays import make_spec, physical_shape
from torchtpu.eager.schema import Derived
from torchtpu.eager.views import ViewPlan, physical_order, plan_view, read_view, row_major, write_view
from torchtpu.lowering.apply import apply, short_name
from torchtpu.lowering.context import Trace, tracing
from torchtpu.lowering.dtypes import rounded, to_jax, to_torch
from torchtpu.lowering.promotion import cast
from torchtpu.runtime import meshes
from torchtpu.runtime.compiler import compile_program
from torchtpu.runtime.disk_cache import digest

__all__ = ["Call", "Constant", "Meta", "Program", "WrongOutSize", "describe", "trace_function"]


@dataclass(frozen=True)
class Window:
    """A tensor argument: which operand holds its storage, and which window it is."""

    operand: int
    plan: ViewPlan
    starts: tuple[int, ...] = field(compare=False, repr=False)
    dtype: torch.dtype = torch.float32
    stride: tuple[int, ...] = ()
    conj: bool = False
    neg: bool = False


@dataclass(frozen=True)
class Number:
    """A number argument: which operand holds it, and its Python type; ``dtype`` is None for a Python number (weakly
    typed).
    """

    operand: int
    dtype: torch.dtype | None
    kind: type


@dataclass(frozen=True)
class Storage:
    """An operand that is a storage: the shape and dtype of its value, and whether it was never written."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    uninitialised: bool


@dataclass
class Described:
    """Arguments with their tensors and numbers replaced by descriptions, and the operands those refer to.

    Attributes:
        args, kwargs: the arguments; a ``Window`` for every tensor, a ``Number`` for every operand that is a number.
        operands: for each operand of the program, its storage, or None for a number.
        windows: every window, in order.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    operands: list[Storage | None]
    windows: list[Window]

    def base(self, window: Window, operands: Sequence[Any]) -> jax.Array:
        """The value of the storage that a window is on; zeros if nothing was ever written there."""
        storage = self.operands[window.operand]
        assert storage is not None
        return jnp.zeros(storage.shape, to_jax(storage.dtype)) if storage.uninitialised else operands[window.operand]

    @staticmethod
    def number(x: Any, operands: Sequence[Any]) -> Any:
        """The operand behind a number; anything else is itself."""
        if not isinstance(x, Number):
            return x
        return operands[x.operand] if x.dtype is None else operands[x.operand].astype(to_jax(x.dtype))

    def starts(self) -> np.ndarray | None:
        """Where the windows that are not static start, as one vector; None when all are static."""
        moving = [s for w in self.windows for s in w.starts if not w.plan.static]
        if not moving:
            return None
        return np.asarray(moving, np.int64 if max(moving) >= 2**31 else np.int32)


@dataclass
class Call(Described):
    """A described operator call; calls of equal structure share one program, wherever their slices start."""

    op: OpOverload
    device: int

    def structure(self) -> tuple[Any, ...]:
        """What two calls must have in common to run the same program."""
        leaves = tree_leaves((self.args, self.kwargs), is_leaf=lambda x: isinstance(x, Window | Number))
        keys = tuple(
            (type(x), x) if isinstance(x, bool | int | float) else x
            for x in leaves
            if not isinstance(x, torch.Generator)
        )
        shape = repr(tree_map(lambda _: 0, (self.args, self.kwargs), is_leaf=lambda x: isinstance(x, Window | Number)))
        settings = (torch.get_default_dtype(), torch.get_float32_matmul_precision())
        return keys, shape, tuple(self.operands), self.device, settings


class _Describer:
    """Describes arguments one after the other, numbering operands in the order in which ``_C.flatten`` lists them."""

    def __init__(self) -> None:
        self.operands: list[Storage | None] = []
        self.windows: list[Window] = []
        self.seen: dict[int, int] = {}

    def leaf(self, x: Any, operand: bool) -> Any:
        """Describe one argument; ``operand`` says whether a Python number is one."""
        if isinstance(x, torch.Tensor):
            return self.tensor(x)
        if isinstance(x, bool | int | float | complex) and operand:
            self.operands.append(None)
            return Number(len(self.operands) - 1, None, type(x))
        if isinstance(x, tuple | list):
            return [self.leaf(y, operand) for y in x]
        return x

    def tensor(self, t: torch.Tensor) -> Any:
        if t.device.type == "cpu":
            self.operands.append(None)
            return Number(len(self.operands) - 1, None if _C.is_wrapped_number(t) else t.dtype, type(t.item()))
        identity, nbytes = _C.storage_of(t)
        size, stride = tuple(t.shape), tuple(t.stride())
        if identity not in self.seen:
            value, shape, dtype = _C.get_value(t)
            if value is None:
                dtype = t.dtype
                elements = nbytes // dtype.itemsize
                dense = physical_order(size, stride) is not None and t.numel() == elements
                shape = physical_shape(size, stride) if dense else (elements,)
            self.seen[identity] = len(self.operands)
            self.operands.append(Storage(tuple(shape), dtype, value is None))
        operand = self.seen[identity]
        storage = self.operands[operand]
        assert storage is not None
        plan, starts = plan_view(storage.shape, size, stride, t.storage_offset())
        window = Window(operand, plan, starts, t.dtype, stride, t.is_conj(), t.is_neg())
        self.windows.append(window)
        return window


def describe(
    op: OpOverload, operand_flags: dict[str, bool], args: Sequence[Any], kwargs: dict[str, Any], device: int
) -> Call:
    """Describe an operator call."""
    d = _Describer()
    names = [a.name for a in op._schema.arguments]
    described = tuple(d.leaf(x, operand_flags[n]) for n, x in zip(names, args, strict=False))
    named = {n: d.leaf(x, operand_flags[n]) for n, x in kwargs.items()}
    return Call(described, named, d.operands, d.windows, op, device)


def describe_values(values: Sequence[Any]) -> Described:
    """Describe the inputs of a graph; numbers among them are constants."""
    d = _Describer()
    return Described(tuple(d.leaf(x, False) for x in values), {}, d.operands, d.windows)


_CALLED = 3
"""Equations of an operator that is called where it is part of a larger program; a shorter one is copied there."""


class Program:
    """What a call computes, traced but not compiled: to be compiled alone, or recorded and compiled with others.

    Attributes:
        uid: a number of its own; what a trace is recognised by.
        digest: what it computes, the same in every process.
        name: the operator, for messages.
        operators: the aten overloads in it, where it is a graph of several.
        function: on flat arrays: storage values and numbers (those that are not None), then the starts, then the seed.
        part: the same as a part of a larger program: an operator's is traced once, and called.
        kinds: for each operand, how it is passed: see ``Kind``.
        complex: positions of the operands that are complex numbers.
        recorded: the same for C++ (``_C.record``).
        starts: how many numbers say where slices start.
        random: whether it takes a seed.
        draws: how many draws it takes from the generator.
        reads: whether its results depend on any array it is given; a factory's do not.
        outputs: specs of the new tensors and constants, in order.
        writes: (operand, spec) of every storage that gets a new value.
        checks: messages and error types of the run-time checks; their values are the last array returned.
        nested: for each result that is not a written argument, whether it is a list.
        results, result_types, input_types: number of arrays returned, and the abstract values of all arrays.
        shapes: for each operand, the shape of the storage's value; None for a number.
        describes: shapes and dtypes of the storages it reads, for messages.
        growth: the call without its sizes, and its sizes, where they may change (``growth.Shape``).
        mesh: the devices over which it divides something by itself, if any.
    """

    _uids = itertools.count()

    def __init__(self, name: str, key: str, described: Described, closed: Any, notes: dict[str, Any]) -> None:
        self.uid = next(Program._uids)
        self.digest = digest(name, key)
        self.name = name
        self.operators: tuple[str, ...] = notes.get("operators", (name,))
        self.function = jax.extend.core.jaxpr_as_fun(closed)
        called = len(closed.eqns) >= _CALLED and "operators" not in notes
        self.part: Callable[..., Any] = jax.jit(self.function) if called else self.function
        self.random, self.draws = notes["random"], notes["draws"]
        used = {v for eqn in closed.jaxpr.eqns for v in eqn.invars if not isinstance(v, jax.extend.core.Literal)}
        self.reads = not used.isdisjoint(closed.jaxpr.invars) or not set(closed.jaxpr.invars).isdisjoint(
            v for v in closed.jaxpr.outvars if not isinstance(v, jax.extend.core.Literal)
        )
        self.starts = notes.get("starts") or sum(len(w.starts) for w in described.windows if not w.plan.static)
        self.outputs = [output_spec(m, self.name) for m in notes["outputs"]]
        self.writes = [(i, storage_spec(described.operands[i])) for i in notes["writes"]]
        self.checks = notes["checks"]
        self.nested = notes["nested"]
        self.results = len(closed.out_avals)
        self.result_types = list(closed.out_avals)
        self.input_types = [v.aval for v in closed.jaxpr.invars]
        self.kinds = list(_kinds(described, self.input_types))
        self.complex = [i for i, kind in enumerate(self.kinds) if kind == Kind.COMPLEX]
        self.recorded = _C.make_recorded(self.uid, self.kinds, self.results, self.reads)
        self.shapes = [None if s is None else s.shape for s in described.operands]
        self.describes = [
            f"{s.dtype}{list(s.shape)}".removeprefix("torch.") for s in described.operands if s is not None
        ]
        self.growth: Any = None
        self.mesh = meshes.mesh_in(closed)
        self.run: Callable[..., Any] | None = None
        self.on_meshes: dict[tuple[int, ...], Callable[..., Any]] = {}

    def compiled(self, operands: Sequence[Any], device: jax.Device) -> Callable[..., Any]:
        """The program compiled alone: takes all operands in order, returns its arrays."""
        if self.run is None:
            self.run = compile_program(
                self._alone, operands, device, self.name, key=self.digest, operators=self.operators
            )
        return self.run

    def compiled_on(self, placement: meshes.Placement, operands: Sequence[Any]) -> Callable[..., Any]:
        """As ``compiled``, for operands some of which are divided over several devices."""
        run = self.on_meshes.get(placement.key)
        if run is None:
            run = self.on_meshes[placement.key] = compile_program(
                self._alone,
                operands,
                placement.mesh.devices.flat[0],
                self.name,
                operators=self.operators,
                mesh=placement.mesh,
                results=results_in_place(self, placement.lies, placement.everywhere),
            )
        return run

    def _alone(self, *given: Any) -> Any:
        return self.function(*(x for x in given if x is not None))


def results_in_place(
    program: Program, operands: Sequence[Sharding | None], everywhere: Sharding | None
) -> list[Sharding | None]:
    """Where each result of a program on a mesh lies, None where XLA chooses.

    The new value of a storage is divided as the old one was, and what a factory makes like a divided value
    (``zeros_like``) as that.

    Args:
        program: the program.
        operands: for each operand that is a divided array, how it is divided.
        everywhere: where single numbers lie, so that each of several processes can read them; checks are such.
    """
    lies: list[Sharding | None] = [None] * program.results
    made = sum(not isinstance(s, Constant) for s in program.outputs)
    for n, (i, _) in enumerate(program.writes):
        lies[made + n] = operands[i]
    if not program.reads:
        for n in range(made):
            size = program.result_types[n].shape
            like = (x for x, shape in zip(operands, program.shapes, strict=False) if shape == size and x is not None)
            lies[n] = next(like, None)
    if everywhere is not None:
        for n, kind in enumerate(program.result_types):
            if not kind.shape or (program.checks and n == program.results - 1):
                lies[n] = lies[n] or everywhere
    return lies


class Kind:
    """How an operand reaches a recorded program."""

    ARRAY, ABSENT, FLOAT, INTEGER, COMPLEX = range(5)


def _kinds(described: Described, types: Sequence[Any]) -> Iterator[int]:
    position = 0
    for storage in described.operands:
        if storage is not None:
            yield Kind.ABSENT if storage.uninitialised else Kind.ARRAY
            position += not storage.uninitialised
        else:
            kind = np.dtype(types[position].dtype).kind
            yield {"f": Kind.FLOAT, "c": Kind.COMPLEX}.get(kind, Kind.INTEGER)
            position += 1


class WrongOutSize(Exception):
    """An out= argument has not the size of the result, which only tracing reveals where there is no meta kernel."""

    def __init__(self, name: str, size: tuple[int, ...]) -> None:
        super().__init__(f"{name} must have size {size}")
        self.name, self.size = name, size


@dataclass(frozen=True)
class Constant:
    """A result that is no tensor: None, or a number known when the program is traced."""

    value: bool | int | float | None


@dataclass(frozen=True)
class Meta:
    """A result according to PyTorch's meta kernel."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


OUT_DECIDES = {
    **{f"aten::{name}": "dtype" for name in ("cumprod", "cumsum", "mean", "nansum", "prod", "sum")},
    "aten::_scaled_mm": "out_dtype",
}
"""Operators that compute in the dtype of an out= argument where no dtype is given, and what that argument is called."""


def trace_function(
    call: Call, target: OpOverload, derived: Derived | None, metas: list[Meta | None] | None, notes: dict[str, Any]
) -> Callable[..., Any]:
    """The function that JAX traces: operands -> [values of new tensors..., new values of written storages..., checks].

    ``notes`` receives what only tracing reveals: ``outputs`` (Meta of every new tensor), ``writes``, ``draws`` (how
    many were taken from the generator) and ``checks``.
    """
    names = [a.name for a in call.op._schema.arguments]

    def traced(*given: Any) -> list[jax.Array]:
        inputs = Inputs(call, given, notes["random"])
        bases, value = inputs.bases, inputs.value
        seed = inputs.seed
        trace = Trace(None if seed is None else lambda: key_of(seed))
        given_names = dict(zip(names, call.args, strict=False)) | call.kwargs
        dropped = derived.dropped if derived is not None else frozenset()
        args = tuple(value(x) for n, x in zip(names, call.args, strict=False) if n not in dropped)
        kwargs = {n: value(x) for n, x in call.kwargs.items() if n not in dropped}
        asked = OUT_DECIDES.get(target._schema.name)
        if asked is not None and dropped and given_names.get(asked) is None:
            at, dtype = names.index(asked), given_names["out"].dtype
            if at < len(args):
                args = (*args[:at], dtype, *args[at + 1 :])
            else:
                kwargs[asked] = dtype
        with tracing(trace):
            result = apply(target, args, kwargs)
        returns = len(target._schema.returns)
        results = list(result) if returns > 1 else [result] if returns else []
        fresh = results if derived is None else results[: derived.first_write]
        notes["nested"] = [isinstance(r, tuple | list) for r in fresh]
        flat = tree_leaves(fresh)
        values: list[jax.Array] = []
        described: list[Meta | Constant] = []
        for i, array in enumerate(flat):
            meta = metas[i] if metas is not None and metas[i] is not None else None
            if array is None or isinstance(array, bool | int | float):
                described.append(Constant(array))
                continue
            if meta is None:
                size = tuple(array.shape)
                meta = Meta(size, row_major(size), to_torch(array.dtype))
            described.append(meta)
            values.append(physical_value(_agree(array, meta, call), meta))
        notes["outputs"] = described
        written: list[int] = []
        if derived is not None:
            new_values = results[derived.first_write :]
            for name, new in zip(derived.written, new_values, strict=True):
                destination = given_names.get(name)
                pairs = zip(destination, new, strict=True) if isinstance(destination, list) else [(destination, new)]
                for window, array in pairs:
                    if not isinstance(window, Window):
                        continue
                    base = bases[window.operand]
                    if name in derived.dropped and array.shape != window.plan.size:
                        raise WrongOutSize(name, tuple(array.shape))
                    array = jnp.broadcast_to(array, window.plan.size) if array.shape != window.plan.size else array
                    array = rounded(cast(array, to_jax(window.dtype)), window.dtype)
                    array = jnp.conj(array) if window.conj else array
                    array = -array if window.neg else array
                    bases[window.operand] = write_view(base, window.plan, array, inputs.starts[id(window)])
                    if window.operand not in written:
                        written.append(window.operand)
        notes["writes"] = written
        notes["draws"] = int(trace.keys_used > 0)
        notes["checks"] = tuple((c.message, c.error) for c in trace.checks)
        return [*values, *(bases[i] for i in written), *stacked_checks(trace)]

    return traced


class Inputs:
    """What the arguments of a program being traced hold.

    Args:
        described: the arguments.
        given: the operands: storage values and numbers, then the starts, then the seed.
        random: whether the seed is among them.

    Attributes:
        seed: (seed, offset) of the generator as four words, or None.
        bases: by operand, the value of its storage.
        starts: by ``id`` of a window, where it starts.
    """

    def __init__(self, described: Described, given: Sequence[Any], random: bool) -> None:
        self._operands = list(given)
        self.seed: jax.Array | None = self._operands.pop() if random else None
        moving = iter(self._operands.pop() if any(not w.plan.static for w in described.windows) else ())
        self.bases = {w.operand: described.base(w, self._operands) for w in described.windows}
        self.starts: dict[int, list[jax.Array]] = {
            id(w): [] if w.plan.static else [next(moving) for _ in w.starts] for w in described.windows
        }
        self._number = described.number

    def value(self, x: Any) -> Any:
        """A described argument: an array for a tensor, its conjugate and negative bits resolved."""
        if isinstance(x, list):
            return [self.value(y) for y in x]
        if not isinstance(x, Window):
            return self._number(x, self._operands)
        array = read_view(self.bases[x.operand], x.plan, self.starts[id(x)])
        array = jnp.conj(array) if x.conj else array
        return -array if x.neg else array


def stacked_checks(trace: Trace) -> list[jax.Array]:
    """The values of a program's run-time checks, as its last array; nothing where there are none."""
    return [jnp.stack([c.value.astype(jnp.int64) for c in trace.checks])] if trace.checks else []


def key_of(seed: jax.Array) -> jax.Array:
    """An operator's PRNG key, from four words: the generator's seed and its offset, low word first."""
    key = jax.random.wrap_key_data(seed[:2], impl="threefry2x32")
    return jax.random.fold_in(jax.random.fold_in(key, seed[2]), seed[3])


def _agree(array: Any, meta: Meta, call: Call) -> jax.Array:
    """The array, if its shape and dtype are what PyTorch says; a Python number or weak type takes the dtype, and what
    was computed from complex32 is wider than PyTorch's result.
    """
    array = jnp.asarray(array)
    wanted = to_jax(meta.dtype)
    convertible = jax.typeof(array).weak_type or any(w.dtype is torch.complex32 for w in call.windows)
    if tuple(array.shape) != meta.size or (array.dtype != wanted and not convertible):
        raise AssertionError(
            f"the lowering of {call.op} gives {array.dtype}{list(array.shape)}; "
            f"PyTorch gives {meta.dtype}{list(meta.size)}"
        )
    return rounded(cast(array, wanted), meta.dtype)


def physical_value(array: jax.Array, meta: Meta) -> jax.Array:
    """The array in the memory order of a dense tensor: the value of its storage."""
    order = physical_order(meta.size, meta.stride)
    assert order is not None, meta
    return array if order == tuple(range(len(order))) else array.transpose(order)


def output_spec(meta: Meta | Constant, op: str) -> Any:
    """The C++ description of a new tensor; a constant is its own."""
    if isinstance(meta, Constant):
        return meta
    return make_spec(meta.size, meta.stride, meta.dtype, op)


def storage_spec(storage: Storage | None) -> Any:
    """The C++ description of a storage's value."""
    assert storage is not None  # an operand that is written is a storage
    return make_spec(storage.shape, row_major(storage.shape), storage.dtype)


def dense(meta: Meta) -> Meta:
    """The same result with strides that leave no gaps; PyTorch's own where they have none."""
    if physical_order(meta.size, meta.stride) is None or math.prod(meta.size) == 0:
        return Meta(meta.size, row_major(meta.size), meta.dtype)
    return meta


def name_of(op: OpOverload) -> str:
    """How messages call an operator."""
    return f"aten.{short_name(op)}"
