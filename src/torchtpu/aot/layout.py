"""Arrays on a mesh: where they lie, where they are gathered, and where they are cut again."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from torchtpu.sharding import Plan, Spec

__all__ = ["Layout"]


class Layout:
    """A plan on a mesh.

    Args:
        plan: the plan.
        mesh: a ``Mesh``, or an ``AbstractMesh`` when no device is at hand, with the plan's axes.
        platform: ``"tpu"`` or ``"cpu"``: decides where kernels are used.
    """

    def __init__(self, plan: Plan, mesh: Any, platform: str) -> None:
        self.plan, self.mesh, self.platform = plan, mesh, platform

    def sharding(self, spec: Spec) -> NamedSharding:
        """A spec of the plan as JAX takes it."""
        return NamedSharding(self.mesh, self.partition(spec))

    @staticmethod
    def partition(spec: Sequence[Sequence[str]]) -> PartitionSpec:
        """A spec of the plan as a ``PartitionSpec``."""
        return PartitionSpec(*(tuple(axes) or None for axes in spec))

    def place(self, x: jax.Array, spec: Spec) -> jax.Array:
        """Constrain an array to a spec; axes that do not divide it are left out."""
        return jax.lax.with_sharding_constraint(x, self.sharding(self.fitting(x.shape, spec)))

    def fitting(self, shape: Sequence[int], spec: Sequence[Sequence[str]]) -> Spec:
        """A spec without the axes that do not divide a shape."""
        kept = []
        for size, axes in zip(shape, [*spec, *[()] * (len(shape) - len(spec))], strict=True):
            fitting: tuple[str, ...] = ()
            for axis in axes:
                if size % self.plan.size((*fitting, axis)) == 0:
                    fitting = (*fitting, axis)
            kept.append(fitting)
        return tuple(kept)

    def gather(self, x: jax.Array, stored: Spec, used: Spec) -> jax.Array:
        """A parameter gathered for its use; its gradient is cut again at once, so that it is never held whole."""
        if stored == used:
            return x
        return _gather(self, stored, used, x)

    def hidden(self, shape: Sequence[int]) -> Spec:
        """Where hidden states lie between layers: (batch, sequence, …)."""
        if len(shape) < 2:
            return ((),) * len(shape)
        sequence = self.plan.sequence if len(shape) == 3 else ()
        return self.fitting(shape, (self.plan.batch, sequence))

    def everywhere(self, shape: Sequence[int]) -> Spec:
        """A spec that divides an array over as many axes as it can, for a reduction over all devices."""
        left = list(self.plan.mesh)
        spec = []
        for size in shape:
            axes: tuple[str, ...] = ()
            for axis in list(left):
                if size % self.plan.size((*axes, axis)) == 0:
                    axes = (*axes, axis)
                    left.remove(axis)
            spec.append(axes)
        return tuple(spec)

    def divides(self, size: int, axes: Sequence[str]) -> bool:
        """Whether some axes divide a dimension."""
        return size % math.prod(self.plan.mesh[a] for a in axes) == 0


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _gather(layout: Layout, stored: Spec, used: Spec, x: jax.Array) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, layout.sharding(used))


def _gather_forward(layout: Layout, stored: Spec, used: Spec, x: jax.Array) -> tuple[jax.Array, None]:
    return _gather(layout, stored, used, x), None


def _gather_backward(layout: Layout, stored: Spec, used: Spec, _: None, g: jax.Array) -> tuple[jax.Array]:
    return (jax.lax.with_sharding_constraint(g, layout.sharding(stored)),)


_gather.defvjp(_gather_forward, _gather_backward)
