"""Where a value lies on a mesh of devices."""

from __future__ import annotations

import jax

from torchtpu.lowering.registry import lowering
from torchtpu.runtime import meshes

__all__: list[str] = []


@lowering("torchtpu::constrain")
def constrain(self: jax.Array, place: str, gradient: str, again: bool) -> jax.Array:
    """The value itself, laid out as ``place`` says (``meshes.text``), as far as its axes divide it."""
    where = meshes.sharding(place, self.shape)
    if where is None:
        return self
    if again:  # gathered once more: without the barrier XLA finds the first gathering, and keeps its result until here
        self = jax.lax.optimization_barrier(self)
    return jax.lax.with_sharding_constraint(self, where)
