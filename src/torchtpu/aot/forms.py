"""Operators in the form they take on a mesh of TPU devices: attention as a kernel on each device's heads, losses that
reduce over all devices.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch

from torchtpu.aot.experts import experts_on_mesh
from torchtpu.aot.layout import Layout
from torchtpu.lowering.families import attention as plain
from torchtpu.lowering.families.indexing import embedding as plain_embedding
from torchtpu.lowering.families.losses import nll_loss_forward
from torchtpu.lowering.promotion import cast

__all__ = ["attention", "detach", "embedding", "form_of", "negative_log_likelihood", "without_kernel"]

_aten = torch.ops.aten
_LANES = 128
_NARROWEST = 64
"""Width of the heads from which the kernel, which fills them up to whole lanes, is worth it."""
_ROWS = 1024
"""Queries whose scores are held at once where there is no kernel."""


def form_of(target: Any) -> Callable[..., Any] | None:
    """The form of an operator on a mesh: a function of (layout, node, *arguments), or None."""
    if target is torch.ops.torchtpu.experts.default:
        return experts_on_mesh
    return _FORMS.get(target)


def without_kernel(query: Any, key: Any, value: Any, masked: bool = False, dropout_p: float = 0.0) -> str | None:
    """Why attention on a TPU does not run as the splash kernel, as a clause; None if it does.

    Args:
        query, key, value: arrays or tensors; shapes and dtypes count.
        masked: it has a mask that is not known to be causal or a sliding window.
        dropout_p: probability that a score is dropped.
    """
    reason = _without_shards(query, masked, dropout_p)
    if reason is not None:
        return reason
    length, width = query.shape[-2:]
    if width < _NARROWEST:
        return f"its heads are {width} wide, and the kernel takes them from {_NARROWEST}"
    if value.shape[-1] != width:
        return f"its values are {value.shape[-1]} wide and its queries {width}; the kernel takes one width"
    lengths = {"queries": length, "keys": key.shape[-2]}
    odd = [f"{n} {what}" for what, n in lengths.items() if n % _LANES]
    if odd:
        return f"it has {' and '.join(odd)}, and the kernel takes multiples of {_LANES}"
    dtype = str(query.dtype).removeprefix("torch.")
    return None if dtype in ("bfloat16", "float32") else f"it is {dtype}, and the kernel takes bfloat16 and float32"


def _without_shards(query: Any, masked: bool, dropout_p: float) -> str | None:
    """Why attention is not done by each device on its own heads, or None."""
    if query.ndim != 4:
        return f"its queries have {query.ndim} dimensions, not 4 (batch, heads, length, width)"
    if masked:
        return "its mask is not recognised as causal or as a sliding window"
    return f"it drops scores with probability {dropout_p:g}" if dropout_p > 0 else None


def attention(
    layout: Layout,
    node: torch.fx.Node,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    attn_mask: jax.Array | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> jax.Array:
    """Scaled dot-product attention, each device on its part of the batch and of the heads.

    On a TPU, causal, windowed and full attention without dropout run as the splash attention kernel, which never holds
    the scores; whatever else, as products with the queries in parts.

    Args:
        query: (B, H, L, D).
        key: (B, G, S, D); H is a multiple of G.
        value: (B, G, S, E).
    """
    run = functools.partial(_local, layout, node.meta.get("window"), is_causal, scale)
    if _without_shards(query, attn_mask is not None and "window" not in node.meta, dropout_p):
        return plain.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)
    if "window" in node.meta:
        attn_mask = None
    batch, heads, *_ = layout.fitting(query.shape, (layout.plan.batch, layout.plan.heads))
    if not layout.divides(key.shape[1], heads):
        times = query.shape[1] // key.shape[1]  # fewer groups than parts: every query head gets its own key head
        key, value = (jnp.repeat(x, times, axis=1) for x in (key, value))
    spec = layout.partition((batch, heads, (), ()))
    run = jax.shard_map(run, mesh=layout.mesh, in_specs=(spec,) * 3, out_specs=spec, check_vma=False)
    return run(query, key, value)


def _local(
    layout: Layout,
    window: int | None,
    is_causal: bool,
    scale: float | None,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
) -> jax.Array:
    if layout.platform == "tpu" and without_kernel(query, key, value) is None:
        return _splash(window, is_causal, scale, query, key, value)
    return _in_parts(window, is_causal, scale, query, key, value)


def _splash(
    window: int | None, is_causal: bool, scale: float | None, query: jax.Array, key: jax.Array, value: jax.Array
) -> jax.Array:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    heads, rows, width = query.shape[1:]
    columns = key.shape[2]
    shape = (rows, columns)
    if window is not None:
        mask: Any = masks.LocalMask(shape, (window - 1, 0), 0)
    else:
        mask = masks.CausalMask(shape) if is_causal else masks.FullMask(shape)
    q, k = _block(rows), _block(columns)
    sizes = kernels.BlockSizes(
        block_q=q,
        block_kv=k,
        block_kv_compute=k,
        block_q_dkv=q,
        block_kv_dkv=k,
        block_kv_dkv_compute=k,
        block_q_dq=q,
        block_kv_dq=k,
    )
    padding = -width % _LANES  # the kernel takes whole lanes; zeros add nothing to a score
    if padding:
        query, key, value = (jnp.pad(x, ((0, 0),) * 3 + ((0, padding),)) for x in (query, key, value))
    factor = 1 / math.sqrt(width) if scale is None else scale

    def run(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        kernel = kernels.make_splash_mha(
            masks.MultiHeadMask([mask] * heads), head_shards=1, q_seq_shards=1, block_sizes=sizes
        )
        return jax.vmap(kernel)(query * jnp.asarray(factor, query.dtype), key, value)

    return cast(_in_32_bits(run, query, key, value)[..., :width], query.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _in_32_bits(function: Callable[..., jax.Array], *arguments: jax.Array) -> jax.Array:
    """Call a function whose kernels index in 32 bits, forward and backward, from a program with 64-bit types."""
    with jax.enable_x64(False):
        return function(*arguments)


def _in_32_bits_forward(function: Callable[..., jax.Array], *arguments: jax.Array) -> tuple[jax.Array, Any]:
    with jax.enable_x64(False):
        return jax.vjp(function, *arguments)


def _in_32_bits_backward(function: Callable[..., jax.Array], pullback: Any, g: jax.Array) -> Any:
    with jax.enable_x64(False):
        return pullback(g)


_in_32_bits.defvjp(_in_32_bits_forward, _in_32_bits_backward)


def _block(size: int) -> int:
    """The largest block of at most 512 that divides a length."""
    return next(b for b in (512, 384, 256, 128) if size % b == 0)


def _in_parts(
    window: int | None, is_causal: bool, scale: float | None, query: jax.Array, key: jax.Array, value: jax.Array
) -> jax.Array:
    """Attention with some rows of queries at a time, whose scores are computed again in the backward pass."""
    rows, columns = query.shape[-2], key.shape[-2]
    step = math.gcd(rows, _ROWS)

    @jax.checkpoint
    def part(start: jax.Array, q: jax.Array) -> jax.Array:
        mask = None
        if is_causal or window is not None:
            at = start + jax.lax.broadcasted_iota(jnp.int32, (q.shape[-2], columns), 0)
            to = jax.lax.broadcasted_iota(jnp.int32, (q.shape[-2], columns), 1)
            mask = at >= to
            if window is not None:
                mask &= at - to < window
        return plain.forward(q, key, value, mask, 0.0, False, scale)[0]

    if rows <= _ROWS or step < _LANES:
        return part(jnp.int32(0), query)
    count = rows // step
    parts = jnp.moveaxis(query.reshape(*query.shape[:-2], count, step, query.shape[-1]), -3, 0)
    starts = jnp.arange(count, dtype=jnp.int32) * step
    result = jax.lax.map(lambda x: part(*x), (starts, parts))
    return jnp.moveaxis(result, 0, -3).reshape(*query.shape[:-1], value.shape[-1])


def negative_log_likelihood(
    layout: Layout,
    node: torch.fx.Node,
    self: jax.Array,
    target: jax.Array,
    weight: jax.Array | None,
    reduction: int,
    ignore_index: int,
) -> tuple[jax.Array, jax.Array]:
    """``nll_loss_forward`` whose sum runs over every device: the loss of each token is divided over all axes first.

    A sum over one core of each chip, which is what the usual form makes when an axis holds copies of the loss, crashes
    libtpu's code generation on 8,192 chips.
    """
    if self.ndim != 2 or weight is not None or reduction == 0:
        return nll_loss_forward(self, target, weight, reduction, ignore_index)
    ignored = target == ignore_index
    index = jnp.where(ignored, 0, target).astype(jnp.int32)
    # A comparison in place of a gather: the classes may be divided, and then each device looks at its own.
    here = jax.lax.broadcasted_iota(jnp.int32, self.shape, 1) == index[:, None]
    picked = jnp.sum(jnp.where(here, self, 0), axis=1, dtype=jnp.float32)
    losses = layout.place(jnp.where(ignored, jnp.float32(0), -picked), layout.everywhere(target.shape))
    counted = layout.place(jnp.where(ignored, jnp.float32(0), jnp.float32(1)), layout.everywhere(target.shape))
    total, count = losses.sum(dtype=jnp.float32), counted.sum(dtype=jnp.float32)
    loss = total / count if reduction == 1 else total
    return loss.astype(self.dtype), count.astype(self.dtype)


def embedding(
    layout: Layout,
    node: torch.fx.Node,
    weight: jax.Array,
    indices: jax.Array,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> jax.Array:
    """``embedding`` whose padding row gets no gradient, and whose result is divided as hidden states are."""
    indices = indices.astype(jnp.int32)
    if indices.ndim == 2:
        indices = layout.place(indices, layout.hidden((*indices.shape, 1))[:2])
    found = plain_embedding(weight, indices)
    if indices.ndim == 2:
        found = layout.place(found, layout.hidden(found.shape))
    if padding_idx < 0:
        return found
    return jnp.where((indices == padding_idx)[..., None], jax.lax.stop_gradient(found), found)


def detach(layout: Layout, node: torch.fx.Node, self: jax.Array) -> jax.Array:
    """The same values, through which no gradient flows: JAX differentiates the graph, not autograd."""
    return jax.lax.stop_gradient(self)


_FORMS: dict[Any, Callable[..., Any]] = {
    _aten.scaled_dot_product_attention.default: attention,
    _aten.detach.default: detach,
    _aten.embedding.default: embedding,
    _aten.nll_loss_forward.default: negative_log_likelihood,
}
