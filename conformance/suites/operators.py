"""Suites over ``op_db``: forward, out=, in-place, non-contiguous inputs, gradients, error inputs and views."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.autograd.forward_ad as fwAD
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import SampleInput
from torch.utils._pytree import tree_leaves, tree_map

from conformance.case import Case
from conformance.compare import Tolerance, tolerances
from conformance.suites import Suite
from conformance.tolerances import (
    ANY_EQUAL,
    CPU_IGNORES_STRIDES,
    CPU_KEEPS_SIZES,
    NOT_DIFFERENTIATED,
    NOT_EXPANDED,
    RENORMALISES,
    is_random,
)
from conformance.transfer import copied

__all__ = ["SUITES", "full_name"]

Cases = Iterator[Case]


def full_name(info: Any) -> str:
    """An entry's name with its variant."""
    return f"{info.name}.{info.variant_test_name}" if info.variant_test_name else info.name


@functools.cache
def entries() -> dict[str, Any]:
    """The database by full name."""
    return {full_name(i): i for i in op_db}


def short(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def samples(info: Any, dtype: torch.dtype, requires_grad: bool = False) -> Iterator[tuple[str, Any]]:
    """The database's sample inputs, numbered; a factory without a device gets the one of its results."""
    for n, sample in enumerate(info.sample_inputs("cpu", dtype, requires_grad=requires_grad)):
        if info.is_factory_function:
            sample.kwargs.setdefault("device", "cpu")
        yield f"sample {n}", sample


def _inputs(sample: Any) -> tuple[Any, ...]:
    return sample.input, tuple(sample.args), dict(sample.kwargs)


def _leaves(sample: Any) -> tuple[Any, ...]:
    """The inputs as leaves of the graph, as their copies on the device are: the database passes slices of a tensor that
    requires grad, taken without recording them, and PyTorch finds no gradient of some.
    """
    return copied(_inputs(sample))


def sample_is_random(info: Any, sample: Any) -> bool:
    """Random entries, and attention that drops out; the database seeds those inside the call, so they look constant."""
    dropout = sample.kwargs.get("dropout_p") or (
        sample.kwargs.get("training") and any(isinstance(a, float) and a > 0 for a in sample.args)
    )
    return is_random(info.name) or bool(dropout) or info.has_nondeterministic_output


SAVES_STATISTICS = ("native_layer_norm", "native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update")
"""Entries that return statistics beside their result."""


def essence(info: Any, sample: Any) -> Callable[[Any], Any]:
    """What of a result is unique, for results that differ: asked only then."""
    if info.name in ANY_EQUAL and not sample.kwargs.get("stable"):
        position, _ = ANY_EQUAL[info.name]
        dim = sample.kwargs.get("dim", sample.args[position] if len(sample.args) > position else -1)

        def values(result: Any) -> Any:
            """The values, and those at the indices."""
            index = result[1] if result[1].dim() == sample.input.dim() else result[1].unsqueeze(dim)
            return result[0], sample.input.to(index.device).gather(dim, index)

        return values
    if info.name == "argsort" and not sample.kwargs.get("stable"):
        dim = sample.kwargs.get("dim", sample.args[0] if sample.args else -1)
        return lambda index: sample.input.to(index.device).gather(dim, index) if index.dim() else index
    if info.name in SAVES_STATISTICS:
        # The saved statistics are for the backward pass of the same device. The CPU keeps them in low precision and
        # leaves them out in evaluation; the meta kernel, which decides ours, does neither.
        return lambda result: result[0]
    return sample.output_process_fn_grad


def call(function: Callable[..., Any], info: Any) -> Callable[..., Any]:
    """``function`` on (input, args, kwargs); a factory without a device argument gets the one of its inputs from the
    context.
    """

    def run(input: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if info.is_factory_function and kwargs.get("device") is not None:
            with torch.device(kwargs["device"]):
                return function(input, *args, **kwargs)
        return function(input, *args, **kwargs)

    return run


def _forward(info: Any, dtype: torch.dtype) -> Cases:
    run = call(info.op, info)
    for label, sample in samples(info, dtype):
        random = sample_is_random(info, sample)
        repeat = random and "empty" not in info.name and "resize" not in info.name
        process = essence(info, sample)
        yield Case(label, run, _inputs(sample), exact=not random, repeat=repeat, process=process)


def _noncontiguous(info: Any, dtype: torch.dtype) -> Cases:
    run = call(info.op, info)
    for label, sample in samples(info, dtype):
        random = sample_is_random(info, sample)
        process = essence(info, sample)
        tensor = isinstance(sample.input, torch.Tensor)
        if tensor or isinstance(sample.input, list | tuple):
            yield Case(
                f"{label}, noncontiguous", run, _inputs(sample.noncontiguous()), exact=not random, process=process
            )
        rows = tensor and sample.input.layout is torch.strided and sample.input.dim() and sample.input.shape[0] > 1
        writes = sample.kwargs.get(RENORMALISES.get(info.name, "")) is not None
        if rows and info.name not in NOT_EXPANDED and not writes:
            expanded = SampleInput(sample.input[:1].expand(sample.input.shape), args=sample.args, kwargs=sample.kwargs)
            expanded.output_process_fn_grad = sample.output_process_fn_grad
            process = essence(info, expanded)
            yield Case(f"{label}, expanded", run, _inputs(expanded), exact=not random, process=process)


def _out(info: Any, dtype: torch.dtype) -> Cases:
    """Each sample with outs of the right size, transposed in memory, of a wrong size, and of a wrong dtype."""
    op = info.op
    for label, sample in samples(info, dtype):
        random = sample_is_random(info, sample)
        with torch.no_grad():
            torch.manual_seed(0)
            try:
                expected = op(sample.input, *sample.args, **sample.kwargs)
            except Exception:  # a sample that the CPU refuses has no out= variant to test
                continue
        if any(not isinstance(t, torch.Tensor) or t.layout is not torch.strided for t in tree_leaves(expected)):
            continue
        unique = essence(info, sample)

        def process(result: Any, unique: Callable[[Any], Any] = unique) -> Any:
            return unique(tuple(result[0]) if len(result[0]) > 1 else result[0][0]), result[1]

        def run(input: Any, args: Any, kwargs: Any, out: Any, dtypes: Any) -> Any:
            result = op(input, *args, out=out, **kwargs)
            same = [
                a is b or a.data_ptr() == b.data_ptr()
                for a, b in zip(tree_leaves(result), tree_leaves(out), strict=True)
            ]
            return [t.to(d) for t, d in zip(tree_leaves(out), dtypes, strict=True)], all(same)

        def outs(make: Callable[[torch.Tensor], torch.Tensor], expected: Any = expected) -> Any:
            return tree_map(make, tuple(expected) if isinstance(expected, tuple) else expected)

        variants: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
            "right size": lambda t: torch.zeros_like(t, memory_format=torch.contiguous_format),
            "strided": lambda t: torch.zeros([*t.shape, 2], dtype=t.dtype)[..., 0],
            "wrong size": lambda t: torch.zeros([*t.shape, 2], dtype=t.dtype),
            "empty": lambda t: torch.zeros(0, dtype=t.dtype),
            "wrong dtype": lambda t: torch.zeros(
                t.shape, dtype=torch.int32 if t.dtype is not torch.int32 else torch.int16
            ),
            "wider dtype": lambda t: torch.zeros(
                t.shape, dtype=torch.float64 if not t.dtype.is_complex else torch.complex128
            ),
        }
        for name, make in variants.items():
            if name == "strided" and info.name in CPU_IGNORES_STRIDES:
                continue
            if name == "wrong size" and info.name in CPU_KEEPS_SIZES:
                continue
            if name == "wrong size" and not any(t.numel() for t in tree_leaves(expected)):
                continue  # some operators resize by the number of elements only
            # A wider out holds a result computed in the inputs' dtype.
            kept = variants["right size"] if name == "wider dtype" else None
            yield Case(
                f"{label}, out of {name}",
                run,
                (*_inputs(sample), outs(make), [t.dtype for t in tree_leaves(outs(kept or make))]),
                not random,
                must_raise=True,
                process=process,
            )


def _inplace(info: Any, dtype: torch.dtype) -> Cases:
    """``x.op_()`` on a fresh tensor and on a strided window; errors count too."""
    variant = info.inplace_variant

    def run(input: Any, args: Any, kwargs: Any) -> Any:
        result = variant(input, *args, **kwargs)
        return input, result is input

    for label, sample in samples(info, dtype):
        if (
            sample.broadcasts_input
            or not isinstance(sample.input, torch.Tensor)
            or sample.input.layout is not torch.strided
        ):
            continue
        random = sample_is_random(info, sample)
        rest = (tuple(sample.args), dict(sample.kwargs))
        yield Case(label, run, (sample.input.clone(), *rest), not random, must_raise=True)
        if sample.input.dim():
            window = torch.stack([sample.input, sample.input], -1)[..., 0]
            yield Case(f"{label}, strided", run, (window, *rest), not random, must_raise=True)


def cotangent(t: torch.Tensor, n: int) -> torch.Tensor:
    """A fixed random tensor of the size and dtype of a result: the same on every device and in every precision."""
    generator = torch.Generator().manual_seed(zlib.crc32(repr((tuple(t.shape), n)).encode()))
    drawn = torch.randn(t.shape, dtype=torch.complex64 if t.is_complex() else torch.float32, generator=generator)
    return drawn.to(t.dtype).to(t.device)


def differentiable(tree: Any) -> list[torch.Tensor]:
    """The tensors of a tree that require grad."""
    return [t for t in tree_leaves(tree) if isinstance(t, torch.Tensor) and t.requires_grad]


def wrapped(info: Any, process: Callable[[Any], Any]) -> Callable[..., Any]:
    """The function that PyTorch's own gradient tests differentiate."""

    def function(input: Any, args: Any, kwargs: Any) -> Any:
        return process(info.gradcheck_wrapper(info.op, input, *args, **kwargs))

    return function


def _grad(info: Any, dtype: torch.dtype) -> Cases:
    for label, sample in samples(info, dtype, requires_grad=True):
        if (info.name, dtype, next((a for a in sample.args if isinstance(a, float)), None)) in NOT_DIFFERENTIATED:
            continue
        function = wrapped(info, sample.output_process_fn_grad)

        def run(input: Any, args: Any, kwargs: Any, function: Any = function) -> Any:
            leaves = differentiable((input, args, kwargs))
            outs = differentiable(function(input, args, kwargs))
            if not outs or not leaves:
                return ()
            grads = [cotangent(o, n) for n, o in enumerate(outs)]
            return torch.autograd.grad(outs, leaves, grads, allow_unused=True)

        yield Case(label, run, _leaves(sample), exact=not sample_is_random(info, sample))


def _forward_grad(info: Any, dtype: torch.dtype) -> Cases:
    for label, sample in samples(info, dtype, requires_grad=True):
        function = wrapped(info, sample.output_process_fn_grad)

        def run(input: Any, args: Any, kwargs: Any, function: Any = function) -> Any:
            def dual(t: Any) -> Any:
                if isinstance(t, torch.Tensor) and t.requires_grad:
                    return fwAD.make_dual(t.detach(), cotangent(t, 0))
                return t

            with fwAD.dual_level():
                out = function(*tree_map(dual, (input, args, kwargs)))
                return [fwAD.unpack_dual(t).tangent for t in tree_leaves(out) if isinstance(t, torch.Tensor)]

        yield Case(label, run, _leaves(sample), exact=not sample_is_random(info, sample))


def _errors(info: Any, dtype: torch.dtype) -> Cases:
    for n, error in enumerate(info.error_inputs("cpu")):
        sample = error.sample_input
        yield Case(f"error input {n}", call(info.op, info), _inputs(sample), must_raise=True, reference=False)


def _views(info: Any, dtype: torch.dtype) -> Cases:
    """Results share memory with the input exactly where the CPU's do, and writing to one shows in the other."""

    def run(input: Any, args: Any, kwargs: Any) -> Any:
        out = info.op(input, *args, **kwargs)
        sources = {input.untyped_storage()._cdata: input}
        shared = []
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor) and t.layout is torch.strided:
                shared.append(t.untyped_storage()._cdata in sources)
                if shared[-1]:
                    t[...] = torch.ones((), dtype=t.dtype, device=t.device) if t.dim() else 1
        return [sources[k] for k in sources], shared

    for label, sample in samples(info, dtype):
        if isinstance(sample.input, torch.Tensor) and sample.input.layout is torch.strided and not is_random(info.name):
            yield Case(label, run, _inputs(sample), reference=False, exact=True)


def _differentiable_dtypes(info: Any) -> list[torch.dtype]:
    wanted = (torch.float32, torch.float64, torch.complex64)
    return [d for d in wanted if info.supports_autograd and d in info.supported_backward_dtypes("cpu")]


def _suite(suite: str, cases: Callable[[Any, torch.dtype], Cases], dtypes: Callable[[Any], list[torch.dtype]]) -> Suite:
    def tasks() -> list[tuple[str, str]]:
        return [(name, short(d)) for name, info in entries().items() for d in sorted(dtypes(info), key=str)]

    def of(entry: str, dtype: str) -> tuple[Cases, Tolerance]:
        info = entries()[entry]
        return cases(info, getattr(torch, dtype)), tolerances(info, entry, suite)

    return Suite(tasks, of)


def _supported(info: Any) -> list[torch.dtype]:
    return list(info.supported_dtypes("cpu"))


def _main_dtype(info: Any) -> list[torch.dtype]:
    """float32 where supported, else the first supported type."""
    supported = sorted(info.supported_dtypes("cpu"), key=str)
    return [torch.float32] if torch.float32 in supported else supported[:1]


SUITES: dict[str, Suite] = {
    name: _suite(name, cases, dtypes)
    for name, cases, dtypes in (
        ("ops", _forward, _supported),
        ("out", _out, lambda i: _main_dtype(i) if i.supports_out else []),
        ("inplace", _inplace, lambda i: _main_dtype(i) if i.inplace_variant is not None else []),
        ("noncontig", _noncontiguous, _main_dtype),
        ("grad", _grad, _differentiable_dtypes),
        ("forward_grad", _forward_grad, lambda i: _differentiable_dtypes(i)[:1] if i.supports_forward_ad else []),
        ("errors", _errors, lambda i: _main_dtype(i) if i.error_inputs_func is not None else []),
        ("views", _views, _main_dtype),
    )
}
"""Suites over the operator database."""
