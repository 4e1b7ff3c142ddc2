"""The suite over ``module_db``: forward, backward and buffers, in train and eval."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.testing._internal.common_modules import module_db
from torch.utils._pytree import tree_leaves

from conformance.case import Case
from conformance.compare import Tolerance, tolerances
from conformance.suites import Suite
from conformance.suites.operators import cotangent, differentiable
from conformance.transfer import DEVICE

__all__ = ["SUITES"]


@functools.cache
def entries() -> dict[str, Any]:
    """The database by name."""
    return {i.name: i for i in module_db}


def _cases(entry: str, dtype: str) -> tuple[Iterator[Case], Tolerance]:
    info = entries()[entry]
    wanted = getattr(torch, dtype)

    def cases() -> Iterator[Case]:
        for training in (True, False) if info.train_and_eval_differ else (True,):
            torch.manual_seed(0)
            inputs = info.module_inputs_func(info, device="cpu", dtype=wanted, requires_grad=True, training=training)
            for n, given in enumerate(inputs):
                if given.forward_input is None:
                    continue
                forward = (tuple(given.forward_input.args), dict(given.forward_input.kwargs))
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    module = info.module_cls(*given.constructor_input.args, **given.constructor_input.kwargs)
                    module = module.to(wanted).train(training)
                    if info.is_lazy:
                        with torch.no_grad():
                            module(*forward[0], **forward[1])
                exact = not (training and _has_dropout(module))
                mode = "train" if training else "eval"
                run = functools.partial(_run, {"cpu": module, DEVICE: copy.deepcopy(module)})
                yield Case(f"{mode} {given.desc or n}", run, forward, exact=exact)

    return cases(), tolerances(info, entry)


def _has_dropout(module: torch.nn.Module) -> bool:
    return any(
        "Dropout" in type(m).__name__
        or "RReLU" in type(m).__name__
        or "Fractional" in type(m).__name__
        or getattr(m, "dropout", 0) not in (0, 0.0)
        for m in module.modules()
    )


def _run(modules: dict[str, torch.nn.Module], args: Any, kwargs: Any) -> Any:
    """Outputs, gradients of parameters and inputs, and buffers after one step."""
    kind = next((t.device.type for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)), "cpu")
    module = modules[kind].to(kind)
    if any(t.dtype is torch.float64 for t in differentiable((args, kwargs))):
        module = copy.deepcopy(module).double()  # the run that judges float32 results, or a float64 module itself
    module.zero_grad()
    out = module(*args, **kwargs)
    outs = differentiable(out)
    leaves = [*module.parameters(), *differentiable((args, kwargs))]
    grads: Any = ()
    if outs and leaves:
        grads = torch.autograd.grad(outs, leaves, [cotangent(o, n) for n, o in enumerate(outs)], allow_unused=True)
    return out, grads, list(module.buffers())


def _tasks() -> list[tuple[str, str]]:
    return [
        (n, str(d).removeprefix("torch."))
        for n, i in entries().items()
        for d in i.dtypes
        if d in (torch.float32, torch.float64)
    ]


SUITES: dict[str, Suite] = {"modules": Suite(_tasks, _cases)}
"""The module database."""
