"""Suites over smaller databases: foreach, reductions, sparse, masked and nested tensors, ``torch.func``, autocast."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.testing._internal import common_methods_invocations as invocations
from torch.testing._internal.autocast_test_lists import AutocastTestLists
from torch.testing._internal.opinfo.core import ReductionOpInfo, SampleInput
from torch.utils._pytree import tree_leaves, tree_map

from conformance.case import Case
from conformance.compare import Tolerance, tolerances
from conformance.suites import Suite
from conformance.suites.operators import (
    SAVES_STATISTICS,
    _inputs,
    call,
    cotangent,
    entries,
    full_name,
    sample_is_random,
    samples,
    short,
)
from conformance.tolerances import is_random
from conformance.transfer import DEVICE

__all__ = ["SUITES"]

Cases = Iterator[Case]
_MAIN = ("float32", "int64", "bfloat16")


@functools.cache
def _foreach() -> dict[str, Any]:
    groups = ("unary", "binary", "pointwise", "reduce", "other")
    return {full_name(i): i for g in groups for i in getattr(invocations, f"foreach_{g}_op_db")}


def _foreach_tasks() -> list[tuple[str, str]]:
    return [(n, d) for n, i in _foreach().items() for d in _MAIN if getattr(torch, d) in i.supported_dtypes("cpu")]


def _foreach_cases(entry: str, dtype: str) -> tuple[Cases, Tolerance]:
    info = _foreach()[entry]

    def cases() -> Cases:
        for label, sample in samples(info, getattr(torch, dtype)):
            inputs = _inputs(sample)
            if info.op is not None:
                yield Case(label, call(info.op, info), inputs, exact="empty" not in entry)
            if info.inplace_variant is not None:

                def inplace(input: Any, args: Any, kwargs: Any) -> Any:
                    info.inplace_variant(input, *args, **kwargs)
                    return input

                fresh = (
                    [t.clone() for t in sample.input] if isinstance(sample.input, list) else sample.input,
                    *inputs[1:],
                )
                if isinstance(fresh[0], list):
                    yield Case(f"{label}, in place", inplace, fresh, must_raise=True)

    return cases(), tolerances(info, entry)


@functools.cache
def _reductions() -> dict[str, Any]:
    return {n: i for n, i in entries().items() if isinstance(i, ReductionOpInfo)}


def _reduction_cases(entry: str, dtype: str) -> tuple[Cases, Tolerance]:
    """Reductions over none, one and several dimensions, of empty, expanded and 0-d inputs, NaN and infinities."""
    info = _reductions()[entry]
    wanted = getattr(torch, dtype)

    def cases() -> Cases:
        generator = torch.Generator().manual_seed(0)
        shapes = ((), (3,), (2, 3, 4), (0, 3), (2, 0, 3), (1, 1))
        for shape in shapes:
            x = torch.randn(shape, generator=generator).mul(3).to(wanted)
            dims: list[Any] = [None, *range(-len(shape), len(shape))]
            if info.supports_multiple_dims and len(shape) > 1:
                dims += [(0, 1), (0, -1), tuple(range(len(shape))), ()]
            extra = next(iter(info.generate_args_kwargs(x, dim=None, keepdim=False)), ((), {}))
            for dim, keep in itertools.product(dims, (False, True)):
                kwargs = dict(extra[1]) | ({} if dim is None else {"dim": dim, "keepdim": keep})
                if dim is None and keep:
                    continue
                yield Case(
                    f"size {shape} dim {dim} keepdim {keep}",
                    call(info.op, info),
                    (x, extra[0], kwargs),
                    must_raise=True,
                )
        if wanted.is_floating_point:
            special = torch.tensor(
                [[1.0, float("nan"), 2.0], [float("inf"), 1.0, -1.0], [float("-inf"), 0.0, 3.0]], dtype=wanted
            )
            extra = next(iter(info.generate_args_kwargs(special, dim=1)), ((), {}))
            for label, value in (
                ("special values", special),
                ("transposed", special.t()),
                ("expanded", special[:1].expand(4, 3)),
            ):
                yield Case(label, call(info.op, info), (value, extra[0], dict(extra[1]) | {"dim": 1}), must_raise=True)

    return cases(), tolerances(info, entry)


def _sparse_samples(info: Any, layout: str, dtype: torch.dtype) -> Iterator[Any]:
    """The database's samples for a layout; where it has none, its dense ones with the first tensor made sparse."""
    if getattr(info, f"sample_inputs_sparse_{layout}_func").__name__ != "_sample_inputs_unspecified":
        yield from getattr(info, f"sample_inputs_sparse_{layout}")("cpu", dtype)
        return
    for sample in info.sample_inputs("cpu", dtype):
        x = sample.input
        if layout == "coo" and x.dim():
            yield SampleInput(x.to_sparse(), args=sample.args, kwargs=sample.kwargs)
            if x.dim() > 1:
                yield SampleInput(x.to_sparse(1), args=sample.args, kwargs=sample.kwargs)
        elif layout == "csr" and x.dim() > 1:
            yield SampleInput(x.to_sparse_csr(), args=sample.args, kwargs=sample.kwargs)


def _sparse_cases(entry: str, dtype: str) -> tuple[Cases, Tolerance]:
    info = entries()[entry]

    def cases() -> Cases:
        for layout, supported in (("coo", info.supports_sparse), ("csr", info.supports_sparse_csr)):
            if not supported:
                continue
            for n, sample in enumerate(_sparse_samples(info, layout, getattr(torch, dtype))):
                run, exact = call(info.op, info), not is_random(info.name)
                yield Case(f"sparse {layout} sample {n}", run, _inputs(sample), exact, reference=False)

    return cases(), tolerances(info, entry)


def _masked_tasks() -> list[tuple[str, str]]:
    return [(f"MaskedTensor.{n}", "float32") for n in _MASKED]


_MASKED: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b,
    "where": lambda a, b: torch.where(a.get_mask(), a, b),
    "exp": lambda a, b: a.exp(),
    "sqrt": lambda a, b: a.abs().sqrt(),
    "neg": lambda a, b: -a,
    "sum": lambda a, b: a.sum(1),
    "sum_all": lambda a, b: a.sum(),
    "mean": lambda a, b: a.mean(0),
    "prod": lambda a, b: a.prod(1),
    "amax": lambda a, b: a.amax(1),
    "amin": lambda a, b: a.amin(1),
    "to_tensor": lambda a, b: a,
}


def _masked_cases(entry: str, dtype: str) -> tuple[Cases, Tolerance]:
    """``torch.masked.MaskedTensor``; the functions of ``torch.masked`` are entries of ``op_db``."""
    from torch.masked import as_masked_tensor

    function = _MASKED[entry.removeprefix("MaskedTensor.")]

    def run(a: torch.Tensor, b: torch.Tensor, mask: torch.Tensor) -> Any:
        return function(as_masked_tensor(a, mask), as_masked_tensor(b, mask)).to_tensor(7.0)

    def cases() -> Cases:
        generator = torch.Generator().manual_seed(0)
        for shape in ((3, 4), (1, 2), (5, 3)):
            a, b = (torch.randn(shape, generator=generator) for _ in range(2))
            yield Case(f"size {shape}", run, (a, b, torch.rand(shape, generator=generator) > 0.4))

    return cases(), {}


@functools.cache
def _nested() -> dict[str, Any]:
    from torch.testing._internal.opinfo.definitions.nested import njt_op_db

    return {full_name(i): i for i in njt_op_db if i.supports_njt}


def _nested_cases(entry: str, dtype: str) -> tuple[Cases, Tolerance]:
    info = _nested()[entry]

    def cases() -> Cases:
        for label, sample in samples(info, getattr(torch, dtype)):
            yield Case(label, call(info.op, info), _inputs(sample), not is_random(info.name), reference=False)

    return cases(), tolerances(info, entry)


def _func_tasks() -> list[tuple[str, str]]:
    chosen = [
        n for n, i in entries().items() if i.supports_autograd and torch.float32 in i.dtypes and not is_random(i.name)
    ]
    return [(n, "float32") for n in chosen[::4]]


def _func_cases(entry: str, dtype: str) -> tuple[Cases, Tolerance]:
    """``vmap``, ``grad`` and ``jvp`` of every fourth differentiable entry."""
    info = entries()[entry]

    def plain(out: Any) -> Any:
        return [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]

    def batched(input: torch.Tensor, args: Any, kwargs: Any) -> Any:
        return torch.func.vmap(lambda x: plain(info.op(x, *args, **kwargs)))(input)

    def gradient(input: torch.Tensor, args: Any, kwargs: Any) -> Any:
        def total(x: torch.Tensor) -> torch.Tensor:
            return sum(t.abs().sum() for t in plain(info.op(x, *args, **kwargs)) if t.is_floating_point())

        return torch.func.grad(total)(input)

    def forward(input: torch.Tensor, args: Any, kwargs: Any) -> Any:
        return torch.func.jvp(lambda x: plain(info.op(x, *args, **kwargs)), (input,), (cotangent(input, 0),))

    def cases() -> Cases:
        for label, sample in itertools.islice(samples(info, getattr(torch, dtype)), 4):
            if not isinstance(sample.input, torch.Tensor):
                continue
            stacked = (torch.stack([sample.input, sample.input * 0.5]), tuple(sample.args), dict(sample.kwargs))
            exact = not sample_is_random(info, sample)
            first = info.name in SAVES_STATISTICS  # see essence()
            one, of_each = (lambda r: r[0], lambda r: [x[0] for x in r]) if first else (None, None)
            yield Case(f"vmap, {label}", batched, stacked, exact, process=one)
            yield Case(f"grad, {label}", gradient, _inputs(sample), exact)
            yield Case(f"jvp, {label}", forward, _inputs(sample), exact, process=of_each)

    return cases(), tolerances(info, entry)


_AUTOCAST = (
    "torch_fp16",
    "torch_fp32",
    "nn_fp16",
    "nn_fp32",
    "torch_need_autocast_promote",
    "torch_expect_builtin_promote",
    "methods_fp32",
)


@functools.cache
def _autocast() -> dict[str, tuple[str, tuple[Any, ...]]]:
    torch.manual_seed(0)
    lists = AutocastTestLists("cpu")
    found = {}
    for group in _AUTOCAST:
        for n, line in enumerate(getattr(lists, group, [])):
            found[f"{group}.{line[0]}.{n}"] = (group, tuple(line))
    return found


def _autocast_cases(entry: str, dtype: str) -> tuple[Cases, Tolerance]:
    """PyTorch's lists of what autocast does: a result has low precision, float32, or the widest input's dtype."""
    group, line = _autocast()[entry]
    name, args = line[0], line[1]
    kwargs = line[2] if len(line) > 2 and isinstance(line[2], dict) else {}

    def run(args: Any, kwargs: Any) -> Any:
        device = next(t.device.type for t in tree_leaves(args) if isinstance(t, torch.Tensor))
        if group.startswith("methods"):
            function: Any = functools.partial(_method, name)
        else:
            home = torch.nn.functional if hasattr(torch.nn.functional, name) and group.startswith("nn") else torch
            function = getattr(home, name, None) or getattr(torch._C._nn, name)
        if device == DEVICE:
            with torch.autocast(DEVICE, torch.bfloat16):
                out = function(*args, **kwargs)
        else:
            cast = {"16": torch.bfloat16, "32": torch.float32}.get(group[-2:])
            out = function(*(_cast(a, cast) for a in args), **kwargs)
        return [(t.dtype, tuple(t.shape)) for t in tree_leaves(out) if isinstance(t, torch.Tensor)]

    args = tree_map(lambda t: t.bfloat16() if isinstance(t, torch.Tensor) and t.dtype is torch.float16 else t, args)
    return iter([Case(name, run, (args, kwargs), reference=False)]), {}


def _method(name: str, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    return getattr(x, name)(*args, **kwargs)


def _cast(x: Any, dtype: torch.dtype | None) -> Any:
    return tree_map(lambda t: t.to(dtype) if isinstance(t, torch.Tensor) and t.is_floating_point() and dtype else t, x)


def _dtypes(
    infos: Callable[[], dict[str, Any]], keep: Callable[[Any], bool] = lambda i: True
) -> Callable[[], list[tuple[str, str]]]:
    def tasks() -> list[tuple[str, str]]:
        return [
            (n, d)
            for n, i in infos().items()
            if keep(i)
            for d in _MAIN
            if getattr(torch, d) in i.supported_dtypes("cpu")
        ]

    return tasks


def _float32(
    infos: Callable[[], dict[str, Any]], keep: Callable[[Any], bool] = lambda i: True
) -> Callable[[], list[tuple[str, str]]]:
    def tasks() -> list[tuple[str, str]]:
        return [
            (n, short(torch.float32))
            for n, i in infos().items()
            if keep(i) and torch.float32 in i.supported_dtypes("cpu")
        ]

    return tasks


SUITES: dict[str, Suite] = {
    "foreach": Suite(_foreach_tasks, _foreach_cases),
    "reductions": Suite(_dtypes(_reductions), _reduction_cases),
    "sparse": Suite(_float32(entries, lambda i: i.supports_sparse or i.supports_sparse_csr), _sparse_cases),
    "masked": Suite(_masked_tasks, _masked_cases),
    "nested": Suite(_float32(_nested), _nested_cases),
    "func": Suite(_func_tasks, _func_cases),
    "autocast": Suite(lambda: [(n, "bfloat16") for n in _autocast()], _autocast_cases),
}
"""Suites over databases other than the plain operator tests."""
