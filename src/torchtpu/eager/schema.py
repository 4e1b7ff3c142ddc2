"""In-place and out= operators, derived from the functional ones by their schemas.

``add_.Tensor`` and ``add.out`` mean: run ``add.Tensor`` and write the result into the argument that the schema marks
as written. Nothing
about an individual operator is stated here except where PyTorch's names do not follow its own rule.
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
    "aten::normal_": "aten::normal_functional.default",
    "aten::bernoulli_.float": "aten::bernoulli.p",
    "aten::bernoulli_.Tensor": "aten::bernoulli.Tensor",
    "aten::random_": "aten::random.default",
    "aten::_index_put_impl_": "aten::_index_put_impl.default",
    "aten::rrelu_with_noise_": "aten::rrelu_with_noise_functional.default",
    "aten::rrelu_with_noise": "aten::rrelu_with_noise_functional.default",
    "aten::_native_batch_norm_legit": "aten::_native_batch_norm_legit_functional.default",
    "aten::_batch_norm_with_update": "aten::_batch_norm_with_update_functional.default",
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


def _lookup(qualified: str) -> OpOverload | None:
    name, _, overload = qualified.removeprefix("aten::").partition(".")
    packet = getattr(torch.ops.aten, name, None)
    if packet is None or (overload or "default") not in packet.overloads():
        return None
    return getattr(packet, overload or "default")


@functools.cache
def _functional_overloads(base: str) -> tuple[OpOverload, ...]:
    packet = getattr(torch.ops.aten, base, None)
    if packet is None:
        return ()
    return tuple(o for n in packet.overloads() if not (o := getattr(packet, n))._schema.is_mutable)


def _types(op: OpOverload, without: frozenset[str]) -> list[tuple[str, str]]:
    return [(a.name, str(a.type)) for a in op._schema.arguments if a.name not in without]


@functools.cache
def derive(op: OpOverload) -> Derived | None:
    """The functional operator behind an in-place or out= operator, or None when there is none with a lowering or
    decomposition.
    """
    written = written_arguments(op)
    if not written:
        return None
    schema = op._schema
    name = schema.name.removeprefix("aten::")
    outs = frozenset(a.name for a in schema.arguments if a.kwarg_only and a.name in written)
    # the aliased results are the written arguments; whatever else is returned comes first from the functional form
    extra = sum(1 for r in schema.returns if r.alias_info is None)
    partner = _PARTNERS.get(
        f"aten::{name}" + (f".{schema.overload_name}" if schema.overload_name else "")
    ) or _PARTNERS.get(f"aten::{name}")
    candidates: list[OpOverload] = []
    if partner is not None:
        candidates = [o for o in [_lookup(partner)] if o is not None]
    if not candidates:
        base = name if outs else name.removesuffix("_")
        candidates = list(_functional_overloads(base))
        if not outs and base != name:
            candidates.sort(key=lambda o: o._schema.overload_name != schema.overload_name)
    mine = _types(op, outs)
    for functional in candidates:
        theirs = _types(functional, frozenset())
        if (
            theirs == mine
            or [t for t in theirs if t[0] not in _FACTORY] == [t for t in mine if t[0] not in _FACTORY]
            or partner
        ):
            if can_lower(functional):
                # A functional form gives new values of arguments that are both read and written after its results.
                order = tuple(sorted(written, key=lambda n: n not in outs))
                return Derived(functional, order, outs, extra)
            return None
    return None
