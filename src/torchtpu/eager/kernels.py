"""The kernel of every operator on the tpu device: look the call up, or build its program; then run it.

``make_kernel(op)`` gives the Python function registered for ``op``. Its way, decided once per overload:

1. a lowering (or that of the functional operator it derives from): one program per signature,
2. PyTorch's decomposition, traced into one program as well,
3. PyTorch CPU, with a warning and a count (``fallback.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from torchtpu import _C
from torchtpu.eager import modes
from torchtpu.eager.arrays import array_of, prepare_storage, wrap_array
from torchtpu.eager.fallback import run_on_cpu
from torchtpu.eager.growth import Shape, measure, varying
from torchtpu.eager.launch import block, examples, find_generator, launcher, reserve_seed, seed_words
from torchtpu.eager.meta import Unknown, metas_of, raise_as_cpu, run_meta
from torchtpu.eager.preconditions import require_no_overlap, require_one_device, warn_emulated
from torchtpu.eager.program import (
    Call,
    Constant,
    Described,
    Program,
    WrongOutSize,
    describe,
    key_of,
    name_of,
    trace_function,
)
from torchtpu.eager.schema import Derived, derive, written_arguments
from torchtpu.lowering.apply import NoLowering, can_lower, short_name
from torchtpu.lowering.context import Trace, tracing
from torchtpu.lowering.registry import Lowering, find
from torchtpu.runtime import checks, devices, meshes, observe

__all__ = ["make_kernel", "operand_flags"]

_NUMBER_TYPES = ("number", "float", "Tensor")
_CPU_INDICES_ALLOWED = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put")


def operand_flags(op: OpOverload, entry: Lowering | None) -> dict[str, bool]:
    """For each argument, whether a Python number is an operand of the program (True) or part of its signature."""
    static = entry.static if entry is not None else None
    flags = {}
    for a in op._schema.arguments:
        kind = str(a.type).replace("Optional[", "").replace("List[", "").rstrip("]")
        flags[a.name] = static is not None and kind in _NUMBER_TYPES and a.name not in static
    return flags


def make_kernel(op: OpOverload) -> Callable[..., Any]:
    """The function that runs ``op`` on tpu tensors."""
    derived = derive(op)
    if op._schema.is_mutable and derived is None:
        return lambda *args, **kwargs: run_on_cpu(op, args, kwargs)
    target = derived.functional if derived is not None else op
    if not can_lower(target):
        return lambda *args, **kwargs: run_on_cpu(op, args, kwargs)
    entry = find(short_name(target))
    if entry is not None and entry.dynamic:
        return _Dynamic(op, entry, derived)
    return Kernel(op, target, derived, entry).calls


class Kernel:
    """One overload: its programs by signature."""

    def __init__(self, op: OpOverload, target: OpOverload, derived: Derived | None, entry: Lowering | None) -> None:
        self.op, self.target, self.derived, self.entry = op, target, derived, entry
        self.flags = operand_flags(op, entry)
        names = [a.name for a in op._schema.arguments]
        self.names = names
        self.handle = _C.register_signature(names, [self.flags[n] for n in names])
        self.random = entry.random if entry is not None else False
        self.calls = _C.Kernel(self.handle, self.miss)
        self.programs: dict[Any, Program] = {}
        self.returns = self._returned_arguments()
        base = op._schema.name.removeprefix("aten::")
        self.cpu_indices = base in _CPU_INDICES_ALLOWED

    def _returned_arguments(self) -> list[str | None]:
        """For each result, the argument it is (in-place and out= operators return what they wrote), or None for a new
        tensor.
        """
        owners = {}
        for a in self.op._schema.arguments:
            if a.alias_info is not None and a.alias_info.is_write:
                for name in a.alias_info.before_set:
                    owners[name] = a.name
        return [
            next((owners[n] for n in r.alias_info.before_set if n in owners), None)
            if r.alias_info is not None
            else None
            for r in self.op._schema.returns
        ]

    def miss(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """First call of a signature: check it, build its program, run it."""
        args, kwargs = self._move_indices(args, kwargs)
        require_one_device(self.op, args, kwargs)
        if self.derived is not None:
            require_no_overlap(self.op, self._written(args, kwargs), tree_leaves((args, kwargs)))
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.device.type != "cpu"]
        warn_emulated(tensors)
        for _ in range(len(tensors) + 1):
            if sum(prepare_storage(t) for t in tensors) == 0:
                break
        else:
            return self._split_dtypes(args, kwargs)
        metas, resized = self._metas(args, kwargs)
        if self.derived is not None and self.derived.dropped:
            resized |= self._fit_outs(args, kwargs)
        if resized:
            return self.calls(*args, **kwargs)
        key, operands, owners, device = _C.flatten(self.handle, args, kwargs)
        call = describe(self.op, self.flags, args, kwargs, device)
        if len(call.operands) != len(operands):
            raise AssertionError(
                f"{name_of(self.op)}: {len(call.operands)} operands described, {len(operands)} flattened"
            )
        shape = measure(call, self.flags, self.derived)
        if shape is not None and varying(shape[0]) is not None:
            from torchtpu.compile.growing import grown  # which needs Dynamo's symbols

            run = grown(self, call, shape, metas, operands, _tensors(args, kwargs))
            if run is not None:
                self.calls.add(key, run, getattr(run, "recording", None))
                return run(args, kwargs, operands, owners, device)
        try:
            program = self._program(call, operands, metas, shape)
        except WrongOutSize as wrong:
            kwargs[wrong.name].resize_(wrong.size)
            return self.calls(*args, **kwargs)
        except NoLowering:
            self.calls.add(key, lambda a, k, *_: run_on_cpu(self.op, a, k), None)
            return run_on_cpu(self.op, args, kwargs)
        except Exception as error:
            # JAX words its complaints about wrong arguments in its own terms: PyTorch's are better known.
            raise_as_cpu(self.op, args, kwargs)
            error.add_note(f"while building the program of {name_of(self.op)} on tpu:{device}")
            raise
        run = self.runner(program, call, program.outputs)
        self.calls.add(key, run, getattr(run, "recording", None))
        return run(args, kwargs, operands, owners, device)

    def _move_indices(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Indices may live on the CPU, as with CUDA."""
        if not self.cpu_indices or not isinstance(args[0], torch.Tensor):
            return args, kwargs
        indices = [
            i.to(args[0].device) if isinstance(i, torch.Tensor) and i.device != args[0].device else i for i in args[1]
        ]
        return (args[0], indices, *args[2:]), kwargs

    def _written(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """The tensors that this call writes to."""
        given = dict(zip(self.names, args, strict=False)) | kwargs
        return [t for n in written_arguments(self.op) for t in tree_leaves(given.get(n)) if isinstance(t, torch.Tensor)]

    def _split_dtypes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Two arguments see one storage with different dtypes: read the later ones from copies."""
        first = {_C.storage_of(t)[0]: t.dtype for t in self._written(args, kwargs)}

        def copied(x: Any) -> Any:
            if not isinstance(x, torch.Tensor) or x.device.type == "cpu":
                return x
            return x.clone() if first.setdefault(_C.storage_of(x)[0], x.dtype) is not x.dtype else x

        new_args = torch.utils._pytree.tree_map(copied, args)
        new_kwargs = torch.utils._pytree.tree_map(copied, kwargs)
        return self.calls(*new_args, **new_kwargs)

    def _metas(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, bool]:
        """Descriptions of the new tensors (None: ask the lowering), and whether an out= tensor was resized to fit."""
        try:
            result, stand_ins = run_meta(self.op, args, kwargs)
        except Unknown:
            return None, False
        resized = False
        for tensor in self._written(args, kwargs):
            stand_in = stand_ins.get(id(tensor))
            if stand_in is not None and stand_in.shape != tensor.shape:
                tensor.resize_(stand_in.shape)
                if stand_in.stride() != tensor.stride():
                    tensor.as_strided_(stand_in.shape, stand_in.stride())
                resized = True
        results = list(result) if isinstance(result, tuple | list) and len(self.returns) > 1 else [result]
        fresh = [r for r, owner in zip(results, self.returns, strict=False) if owner is None]
        return metas_of(fresh), resized

    def _fit_outs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Let the CPU judge outs of another dtype than the result; resize those of another size and say if any was."""
        assert self.derived is not None
        dropped = self.derived.dropped
        try:
            result, _ = run_meta(self.derived.functional, args, {k: v for k, v in kwargs.items() if k not in dropped})
        except Unknown:
            return False
        results = result if isinstance(result, tuple) else [result]
        outs = [kwargs.get(n) for n in self.derived.written if n in dropped]
        pairs = [(o, r) for o, r in zip(outs, results, strict=False) if isinstance(o, torch.Tensor)]
        if any(o.dtype is not r.dtype for o, r in pairs):
            raise_as_cpu(self.op, args, kwargs)
        wrong = [(o, r) for o, r in pairs if o.shape != r.shape and o.numel() != r.numel()]
        for out, new in wrong:
            out.resize_(new.shape)
        return bool(wrong)

    def _program(self, call: Call, operands: list[Any], metas: Any, shape: Shape | None) -> Program:
        structure = call.structure()
        program = self.programs.get(structure)
        if program is None:
            notes: dict[str, Any] = {"random": self.random}
            traced = trace_function(call, self.target, self.derived, metas, notes)
            with jax.enable_x64(True):
                closed = jax.make_jaxpr(traced)(*examples(call, operands, call.device, self.random))
                if self.random and not notes["draws"]:  # such as attention without dropout: it takes no seed
                    notes["random"] = False
                    closed = jax.make_jaxpr(traced)(*examples(call, operands, call.device, False))
            program = self.programs[structure] = Program(name_of(self.op), repr(structure), call, closed, notes)
            program.growth = shape
        return program

    def runner(self, program: Program, call: Described, outputs: list[Any]) -> Callable[..., Any]:
        """The function kept for a signature: launches the program and wraps the results as ``outputs`` says."""
        launch, messages = launcher(program, call), program.checks
        # a storage's position among the owners is its rank among the storages
        rank = {i: n for n, i in enumerate(i for i, s in enumerate(call.operands) if s is not None)}
        writes = [(rank[i], spec) for i, spec in program.writes]
        wrap, store, name = _C.wrap, _C.store, program.name

        if len(outputs) == 1 and not (writes or messages or program.nested[0] or isinstance(outputs[0], Constant)):
            spec = outputs[0]

            def simple(args: Any, kwargs: Any, operands: list[Any], owners: list[Any], device: int) -> Any:
                values = launch(args, kwargs, operands, device)
                if modes.blocking:
                    block(name, values, device)
                return wrap(spec, values[0], device)

            simple.recording = self._recording(program, call, outputs, writes)  # type: ignore[attr-defined]
            return simple

        nested = program.nested
        arrays = sum(1 for spec in outputs if not isinstance(spec, Constant))
        returned = self.returns
        names = self.names

        def general(args: Any, kwargs: Any, operands: list[Any], owners: list[Any], device: int) -> Any:
            values = launch(args, kwargs, operands, device)
            if messages:
                checks.note(values[-1], messages, name)
            if modes.blocking:
                block(name, values, device)
            for n, (place, spec) in enumerate(writes):
                store(owners[place], values[arrays + n], spec)
            made = iter(values)
            tensors = iter([s.value if isinstance(s, Constant) else wrap(s, next(made), device) for s in outputs])
            if not returned:
                return None
            results = []
            fresh = iter(nested)
            for owner in returned:
                if owner is not None:
                    results.append(kwargs[owner] if owner in kwargs else args[names.index(owner)])
                else:
                    is_list = next(fresh)
                    results.append(list(tensors) if is_list else next(tensors))
            return results[0] if len(results) == 1 else tuple(results)

        general.recording = self._recording(program, call, outputs, writes)  # type: ignore[attr-defined]
        return general

    def _recording(
        self, program: Program, call: Described, outputs: list[Any], writes: list[tuple[int, Any]]
    ) -> tuple[Any, ...] | None:
        """What C++ needs to record calls of a signature by itself (``_C.Kernel.add``); None for those that draw random
        numbers, leave checks behind, or return anything but tensors.
        """
        fresh = sum(owner is None for owner in self.returns)
        plain = not (program.random or program.checks or program.complex or any(program.nested))
        if not plain or fresh != len(outputs) or any(isinstance(s, Constant) for s in outputs):
            return None
        starts = call.starts()
        returned = [-1 if owner is None else self.names.index(owner) for owner in self.returns]
        moving = [] if starts is None else starts.tolist()
        return program, program.recorded, moving, outputs, writes, returned


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors of a call, in the order in which it is described."""
    return [
        t for t in tree_leaves((args, list(kwargs.values()))) if isinstance(t, torch.Tensor) and t.device.type != "cpu"
    ]


class _Dynamic:
    """An operator whose result's shape depends on values: it waits for its inputs and computes outside any trace."""

    def __init__(self, op: OpOverload, entry: Lowering, derived: Derived | None) -> None:
        self.op, self.entry, self.derived = op, entry, derived
        self.names = [a.name for a in op._schema.arguments]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        require_one_device(self.op, args, kwargs)
        if self.derived is not None:
            given = dict(zip(self.names, args, strict=False)) | kwargs
            require_no_overlap(self.op, [given[n] for n in self.derived.written], tree_leaves((args, kwargs)))
        device = next(
            t.device.index
            for t in tree_leaves((args, kwargs))
            if isinstance(t, torch.Tensor) and t.device.type == "tpu"
        )
        dropped = self.derived.dropped if self.derived is not None else frozenset()
        observe.wait(f"{name_of(self.op)}, whose size depends on values")

        def value(x: Any) -> Any:
            if isinstance(x, torch.Tensor):
                array = array_of(x) if x.device.type == "tpu" else x.item()
                return meshes.put(array, devices.device(device)) if meshes.divided(array) else array
            return [value(y) for y in x] if isinstance(x, tuple | list) else x

        plain = [value(x) for n, x in zip(self.names, args, strict=False) if n not in dropped]
        named = {
            n: value(x)
            for n, x in kwargs.items()
            if n not in dropped and n not in ("generator", "device", "layout", "pin_memory")
        }
        checks.raise_failed()
        generator = find_generator(args, kwargs)
        trace = Trace(lambda: key_of(jnp.asarray(seed_words(reserve_seed(generator, device)))))
        with jax.enable_x64(True), jax.default_device(devices.device(device)), tracing(trace):
            result = self.entry.function(*plain, **named)
            arrays = [
                jax.device_put(a, devices.device(device))
                for a in (result if isinstance(result, tuple | list) else [result])
            ]
        halves = any(isinstance(t, torch.Tensor) and t.dtype is torch.complex32 for t in tree_leaves((args, kwargs)))
        narrow = torch.complex32 if halves else None
        tensors = [wrap_array(a, device, narrow if a.dtype.kind == "c" else None) for a in arrays]
        if self.derived is not None:
            given = dict(zip(self.names, args, strict=False)) | kwargs
            for name, new in zip(self.derived.written, tensors, strict=True):
                if given[name].dtype is not new.dtype:
                    raise_as_cpu(self.op, args, kwargs)
                if given[name].shape != new.shape:
                    given[name].resize_(new.shape)
                given[name].copy_(new)
            tensors = [given[name] for name in self.derived.written]
        if len(self.op._schema.returns) == 1 and not isinstance(result, list):
            return tensors[0]
        return tensors if isinstance(result, list) else tuple(tensors)
