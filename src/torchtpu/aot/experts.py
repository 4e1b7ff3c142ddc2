"""A mixture of experts on a mesh: each device sorts its own tokens, sends them to the experts' devices, and takes the
results back.

Tokens move by gathers in both directions: the gradient of a permutation is written as the inverse permutation, since
the scatter that a gather's gradient would be takes the TPU compiler half a minute and is slow on the chip.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from torchtpu.aot.layout import Layout
from torchtpu.integrations.experts import body_of
from torchtpu.lowering.apply import apply, run_graph
from torchtpu.lowering.dtypes import to_torch
from torchtpu.lowering.families.matmul import grouped_mm

__all__ = ["experts_on_mesh"]

_ROWS = 8  # rows of a tile


def experts_on_mesh(
    layout: Layout,
    node: torch.fx.Node,
    hidden: jax.Array,
    index: jax.Array,
    weights: jax.Array,
    parameters: Sequence[jax.Array],
    body: str,
) -> jax.Array:
    """``torchtpu::experts`` with tokens divided over every axis of the mesh, and experts over one of them.

    Args:
        layout: where things lie. Its plan's ``capacity`` bounds what a pair of devices exchanges.
        hidden: (tokens, width).
        index: (tokens, k) numbers of experts.
        weights: (tokens, k).
        parameters: those of the experts, the experts first.
        body: which experts they are.
    """
    plan = layout.plan
    index = index.astype(jnp.int32)
    tokens = hidden.shape[0]
    axes = (*plan.batch, *(a for a in plan.sequence if a not in plan.batch))
    spec = layout.fitting((tokens,), (axes,))[0]
    over = plan.experts if plan.experts in spec and layout.divides(len(parameters[0]), (plan.experts,)) else None
    rows = layout.partition((spec,))
    kept = layout.partition((((over,) if over else ()),))
    run = functools.partial(_local, body, over, plan.mesh[over] if over else 1, plan.capacity)
    return jax.shard_map(
        run,
        mesh=layout.mesh,
        in_specs=(rows, rows, rows, *([kept] * len(parameters))),
        out_specs=rows,
        check_vma=False,
    )(hidden, index, weights, *parameters)


def _local(
    body: str,
    over: str | None,
    parts: int,
    capacity: float | None,
    hidden: jax.Array,
    index: jax.Array,
    weights: jax.Array,
    *parameters: jax.Array,
) -> jax.Array:
    own = parameters[0].shape[0]
    tokens, k = index.shape
    pairs = tokens * k
    if over is None:
        slots, source = _sorted(index.reshape(-1), pairs)
        made = _run(
            body, _dispatch(hidden, source // k, slots.reshape(tokens, k)), index.reshape(-1)[source], parameters
        )
        return _combine(made, weights, slots.reshape(tokens, k), source)
    room = pairs if capacity is None else min(pairs, math.ceil(pairs / parts * capacity))
    room = -(-room // _ROWS) * _ROWS
    to = index.reshape(-1) // own
    slots, source = _bucketed(to, parts, room)
    slots = slots.reshape(tokens, k)
    sent = _dispatch(hidden, jnp.where(source < pairs, source // k, tokens), slots)
    expert = jnp.where(source < pairs, index.reshape(-1)[jnp.minimum(source, pairs - 1)] % own, own)
    received = jax.lax.all_to_all(sent.reshape(parts, room, -1), over, 0, 0, tiled=True).reshape(parts * room, -1)
    expert = jax.lax.all_to_all(expert.reshape(parts, room), over, 0, 0, tiled=True).reshape(-1)
    place, order = _sorted(expert, parts * room)
    made = _permute(_run(body, _permute(received, order, place), expert[order], parameters), place, order)
    made = jax.lax.all_to_all(made.reshape(parts, room, -1), over, 0, 0, tiled=True).reshape(parts * room, -1)
    return _combine(made, weights, slots, source)


def _run(body: str, rows: jax.Array, expert: jax.Array, parameters: Sequence[jax.Array]) -> jax.Array:
    """The experts' own computation; rows beyond the last expert's give zeros."""
    own = parameters[0].shape[0]
    ends = jnp.sum(expert[None, :] <= jnp.arange(own, dtype=expert.dtype)[:, None], axis=1, dtype=jnp.int32)
    tokens, width = rows.shape
    types = [(tuple(p.shape), to_torch(p.dtype)) for p in parameters]
    graph = body_of(body, tokens, width, types, to_torch(rows.dtype))
    real = (expert < own)[:, None]
    made = run_graph(graph, [jnp.where(real, rows, 0), ends, jnp.minimum(expert, own - 1), *parameters], _operator)
    return jnp.where(real, made, 0)


def _operator(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if target is torch.ops.torchtpu.grouped_mm.default:
        return grouped_mm(args[0], args[1], args[2])
    return apply(target, args, kwargs)


def _sorted(key: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """(where each goes, which one comes to each place) when sorted by a key, equal ones in order."""
    numbers = jnp.arange(size, dtype=jnp.int32)
    _, order = jax.lax.sort((key.astype(jnp.int32), numbers), num_keys=1, is_stable=True)
    _, place = jax.lax.sort((order, numbers), num_keys=1)
    return place, order


def _bucketed(to: jax.Array, parts: int, room: int) -> tuple[jax.Array, jax.Array]:
    """(slot of each, which one is in each slot), parts having ``room`` slots.

    What has no slot is at ``parts * room``; a slot that holds nothing has the number of them all.
    """
    size = len(to)
    place, order = _sorted(to, size)
    count = jnp.sum(to[None, :] == jnp.arange(parts, dtype=to.dtype)[:, None], axis=1, dtype=jnp.int32)
    first = jnp.cumsum(count, dtype=jnp.int32) - count
    rank = place - first[to]
    slots = jnp.where(rank < room, to * room + rank, parts * room)
    part = jnp.repeat(jnp.arange(parts, dtype=jnp.int32), room)
    rank = jnp.tile(jnp.arange(room, dtype=jnp.int32), parts)
    held = rank < jnp.minimum(count[part], room)
    source = jnp.where(held, order[jnp.minimum(first[part] + rank, size - 1)], size)
    return slots, source


def _take(x: jax.Array, at: jax.Array) -> jax.Array:
    """Rows; zeros for what lies beyond the last."""
    size = x.shape[0]
    rows = x.at[jnp.minimum(at, size - 1)].get(mode="promise_in_bounds")
    return jnp.where((at < size)[..., None], rows, jnp.zeros((), x.dtype))


@jax.custom_vjp
def _permute(x: jax.Array, order: jax.Array, place: jax.Array) -> jax.Array:
    """Rows in another order; ``place`` is the inverse of ``order``."""
    return _take(x, order)


_permute.defvjp(
    lambda x, order, place: (_take(x, order), place),
    lambda place, g: (_take(g, place), None, None),
)


@jax.custom_vjp
def _dispatch(x: jax.Array, token: jax.Array, slots: jax.Array) -> jax.Array:
    """Each slot's token; ``slots`` (tokens, k) says where each token went."""
    return _take(x, token)


_dispatch.defvjp(
    lambda x, token, slots: (_take(x, token), slots),
    lambda slots, g: (_take(g, slots).sum(1, dtype=jnp.float32).astype(g.dtype), None, None),
)


@jax.custom_vjp
def _combine(made: jax.Array, weights: jax.Array, slots: jax.Array, source: jax.Array) -> jax.Array:
    """Sum over k of what each token's experts made, weighted; what was dropped adds nothing."""
    taken = _take(made, slots).astype(jnp.float32)
    return jnp.sum(taken * weights[..., None].astype(jnp.float32), axis=1).astype(made.dtype)


def _combine_forward(made: jax.Array, weights: jax.Array, slots: jax.Array, source: jax.Array) -> tuple[Any, Any]:
    return _combine(made, weights, slots, source), (made, weights, slots, source)


def _combine_backward(saved: Any, g: jax.Array) -> tuple[Any, ...]:
    made, weights, slots, source = saved
    tokens, k = slots.shape
    token = jnp.where(source < tokens * k, source // k, tokens)
    weight = _take(weights.reshape(-1, 1), source)
    d_made = (_take(g, token).astype(jnp.float32) * weight.astype(jnp.float32)).astype(made.dtype)
    taken = _take(made, slots).astype(jnp.float32)
    d_weights = jnp.sum(taken * g[:, None].astype(jnp.float32), axis=-1).astype(weights.dtype)
    return d_made, d_weights, None, None


_combine.defvjp(_combine_forward, _combine_backward)
