"""The suite over ``optim_db``: every configuration with every implementation (for-loop, foreach, fused and others)."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch.testing._internal.common_optimizers import optim_db
from torch.utils._pytree import tree_map

from conformance.case import Case
from conformance.compare import Tolerance, tolerances
from conformance.suites import Suite
from conformance.transfer import DEVICE

__all__ = ["SUITES"]

STEPS = 3


@functools.cache
def entries() -> dict[str, Any]:
    """The database by name."""
    return {i.name: i for i in optim_db}


def _implementations(info: Any) -> list[str]:
    return ["forloop", *info.supported_impls, *(["capturable"] if info.has_capturable_arg else [])]


def _cases(entry: str, dtype: str) -> tuple[Iterator[Case], Tolerance]:
    name, implementation = entry.split(".")
    info = entries()[name]
    wanted = getattr(torch, dtype)

    def cases() -> Iterator[Case]:
        generator = torch.Generator().manual_seed(0)
        shapes = [(4, 3), (5, 6)] if name == "Muon" else [(4, 3), (5,), ()]
        params = [torch.randn(s, generator=generator).to(wanted) for s in shapes]
        grads = [[torch.randn(s, generator=generator).to(wanted) for s in shapes] for _ in range(STEPS)]
        for given in info.optim_inputs_func(device="cpu"):
            if {"foreach", "fused", "capturable", "differentiable"} & set(given.kwargs):
                continue
            if info.only_supports_sparse_grads:
                inputs = ([p.clone() for p in params[:1]], [[g[0].to_sparse()] for g in grads])
            else:
                inputs = ([p.clone() for p in params], grads)
            run = functools.partial(_run, info, implementation, given.kwargs)
            yield Case(given.desc or str(given.kwargs), run, inputs, reference=False)

    return cases(), tolerances(info, entry)


def _run(
    info: Any, implementation: str, kwargs: dict[str, Any], params: list[torch.Tensor], grads: list[list[torch.Tensor]]
) -> Any:
    """Parameters after some steps with given gradients; the CPU runs its for-loop, which all others must match."""
    device = params[0].device
    flags: dict[str, Any] = {"foreach": False} if "foreach" in info.supported_impls else {}
    if device.type == DEVICE and implementation != "forloop":
        flags = {implementation: True}
    kwargs = tree_map(
        lambda x: x.to(device) if isinstance(x, torch.Tensor) and device.type == DEVICE else x, copy.deepcopy(kwargs)
    )
    leaves = [p.detach().clone().requires_grad_(implementation != "differentiable") for p in params]
    optimizer = info.optim_cls(leaves, **kwargs, **flags)
    # A closure evaluates one fixed function: the line search of LBFGS relies on it.
    for step in grads[:1] if info.step_requires_closure else grads:
        for p, g in zip(leaves, step, strict=True):
            p.grad = g
        if info.step_requires_closure:
            optimizer.step(functools.partial(_closure, leaves, step))
        else:
            optimizer.step()
    return [p.detach() for p in leaves]


def _closure(leaves: list[torch.Tensor], grads: list[torch.Tensor]) -> torch.Tensor:
    loss = leaves[0].new_zeros(())
    for p, g in zip(leaves, grads, strict=True):
        p.grad = g + p.detach()
        loss = loss + (p.detach() * (g + 0.5 * p.detach())).sum()
    return loss


def _tasks() -> list[tuple[str, str]]:
    return [(f"{n}.{impl}", "float32") for n, i in entries().items() for impl in _implementations(i)]


SUITES: dict[str, Suite] = {"optims": Suite(_tasks, _cases)}
"""The optimizer database."""
