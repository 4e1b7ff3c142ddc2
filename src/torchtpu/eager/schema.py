"""In-place and out= operators, derived from the functional ones by their schemas.

``add_.Tensor`` and ``add.out`` mean: run ``add.Tensor`` and write the result into the argument that the schema marks
as written. Nothing about an individual operator is stated here except where PyTorch's names do not follow its own rule.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch._ops import OpOverload

from torchtpu.lowering.apply import can_lower

__all__ = ["Derived", "derive", "written_arguments"]

# In-place names whose functional partner is called differently.
_PARTNERS = {
    "normal_.default": "normal_functional.default",
    "normal.out": "normal_functional.default",
    "bernoulli_.float": "bernoulli.p",
    "bernoulli_.Tensor": "bernoulli.Tensor",
    "rrelu_with_noise_.default": "rrelu_with_noise_functional.default",
    "rrelu_with_noise.out": "rrelu_with_noise_functional.default",
    "rrelu_with_noise.default": "rrelu_with_noise_functional.default",
    "_native_batch_norm_legit.default": "_native_batch_norm_legit_functional.default",
    "_native_batch_norm_legit.out": "_native_batch_norm_legit_functional.default",
    "_batch_norm_with_update.default": "_batch_norm_with_update_functional.default",
    "_batch_norm_with_update.out": "_batch_norm_with_update_functional.default",
}
_FACTORY = {"dtype", "layout", "device", "pin_memory"}


@dataclass(frozen=True)
class Derived:
    """How to run an operator that writes into its arguments.

    Attributes:
        functional: the operator that computes the new values.
        written: names of the arguments written, in schema order.
        dropped: arguments of the in-place/out form which the functional form does not have (the outs themselves).
        first_write: number of the functional form's results that precede the new values (they are returned as they
        are).
    """

    functional: OpOverload
    written: tuple[str, ...]
    dropped: frozenset[str]
    first_write: int


def written_arguments(op: OpOverload) -> tuple[str, ...]:
    """Names of the arguments an operator writes to, by its schema."""
    return tuple(a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write)


def _lookup(name: str) -> OpOverload | None:
    base, _, overload = name.partition(".")
    packet = getattr(torch.ops.aten, base, None)
    return getattr(packet, overload) if packet is not None and overload in packet.overloads() else None


@functools.cache
def _functional_overloads(base: str) -> tuple[OpOverload, ...]:
    packet = getattr(torch.ops.aten, base, None)
    if packet is None:
        return ()
    return tuple(o for n in packet.overloads() if not (o := getattr(packet, n))._schema.is_mutable)


def _types(op: OpOverload, without: frozenset[str] = frozenset()) -> list[tuple[str, str]]:
    """Names and types of the arguments, but for those that only factories and out= forms have."""
    return [(a.name, str(a.type)) for a in op._schema.arguments if a.name not in without | _FACTORY]


@functools.cache
def derive(op: OpOverload) -> Derived | None:
    """The functional operator behind one that writes; None if there is none with a lowering or decomposition."""
    written = written_arguments(op)
    if not written:
        return None
    schema = op._schema
    name = schema.name.removeprefix("aten::")
    outs = frozenset(a.name for a in schema.arguments if a.kwarg_only and a.name in written)
    partner = _PARTNERS.get(f"{name}.{schema.overload_name or 'default'}")
    if partner is not None:
        functional = _lookup(partner)
    else:
        candidates = _functional_overloads(name if outs else name.removesuffix("_"))
        if not outs:
            candidates = tuple(sorted(candidates, key=lambda o: o._schema.overload_name != schema.overload_name))
        functional = next((o for o in candidates if _types(o) == _types(op, outs)), None)
    if functional is None or not can_lower(functional):
        return None
    # The aliased results are the written arguments; whatever else is returned comes first from the functional form,
    # which gives new values of arguments that are both read and written after its results.
    extra = sum(1 for r in schema.returns if r.alias_info is None)
    order = tuple(sorted(written, key=lambda n: n not in outs))
    return Derived(functional, order, outs, extra)
