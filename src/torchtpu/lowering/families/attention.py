"""Scaled dot-product attention in the forms PyTorch's dispatcher may ask for.

Scores, softmax and log-sum-exp are float32 (float64 for float64 inputs) whatever the inputs are. A row that may attend
to nothing gives zeros. Gradients recompute the probabilities from the log-sum-exp, so that no (query x key) matrix is
kept between forward and backward.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from torchtpu.lowering.context import random_key
from torchtpu.lowering.precision import einsum, einsum_of_wide
from torchtpu.lowering.promotion import cast
from torchtpu.lowering.registry import lowering

_STATIC = ("dropout_p", "scale")


def _groups(query, key) -> tuple[int, int]:
    """(key heads, query heads that share each): grouped-query attention when there are fewer key heads."""
    heads, shared = query.shape[-3], key.shape[-3]
    if shared == 0 or heads % shared:
        raise RuntimeError(f"attention: {heads} query heads cannot share {shared} key heads evenly")
    return shared, heads // shared


def _by_group(x, shared: int):
    """Split the heads axis in (key heads, queries of each)."""
    return x.reshape(*x.shape[:-3], shared, x.shape[-3] // shared, *x.shape[-2:])


def _mask_by_group(mask, batch, shared, each):
    """A mask that broadcasts to (*batch, heads, L, S), in grouped form."""
    mask = mask.reshape((1,) * max(0, len(batch) + 3 - mask.ndim) + mask.shape)
    if mask.shape[-3] == 1:
        return mask[..., None, :, :]
    return mask.reshape(*mask.shape[:-3], shared, each, *mask.shape[-2:])


def _scores(query, key, mask, is_causal, scale):
    """Grouped scores (*batch, key heads, queries of each, L, S), masked with -inf."""
    shared, each = _groups(query, key)
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    s = einsum("...ngld,...nsd->...ngls", _by_group(query, shared), key)
    s = s * jnp.asarray(factor, s.dtype)
    if is_causal:
        rows = jax.lax.broadcasted_iota(jnp.int32, s.shape[-2:], 0)
        columns = jax.lax.broadcasted_iota(jnp.int32, s.shape[-2:], 1)
        s = jnp.where(rows >= columns, s, -jnp.inf)
    if mask is not None:
        mask = _mask_by_group(mask, query.shape[:-3], shared, each)
        s = jnp.where(mask, s, -jnp.inf) if mask.dtype == jnp.bool_ else s + cast(mask, s.dtype)
    return s


def _softmax(s):
    """(Softmax over the keys, log-sum-exp); both are 0, as on the CPU, where nothing may be attended to."""
    if s.shape[-1] == 0:
        return s, jnp.zeros(s.shape[:-1], s.dtype)
    top = s.max(-1, keepdims=True)
    none = jnp.isneginf(top)
    powers = jnp.exp(s - jnp.where(none, 0, top))
    total = powers.sum(-1, dtype=s.dtype, keepdims=True)
    lse = jnp.where(none, 0, jnp.log(total) + top)
    return powers / jnp.where(none, 1, total), lse[..., 0]


def _softmax_again(s, lse, exact):
    """Softmax from the log-sum-exp; where that is large its last digit is a factor common to a row, which ``exact``
    takes out.
    """
    p = jnp.exp(s - jnp.where(jnp.isneginf(lse), 0, lse)[..., None])
    if not exact:
        return p
    total = p.sum(-1, dtype=p.dtype, keepdims=True)
    return p / jnp.where(total == 0, 1, total)


def _keep(key_data, shape, dropout_p):
    """The dropout factors: 0, or 1 / (1 - p)."""
    kept = jax.random.bernoulli(jax.random.wrap_key_data(key_data), jnp.float32(1 - dropout_p), shape)
    return jnp.where(kept, jnp.float32(1 / (1 - dropout_p)) if dropout_p < 1 else 0, 0)


def _pack(key_data):
    """A PRNG key as one int64, which is what the schemas can carry to the backward."""
    high, low = (key_data[i].astype(jnp.int64) for i in (0, 1))
    return (high << 32) | low


def _unpack(seed):
    bits = seed.reshape(()).astype(jnp.uint64)
    return jnp.stack([bits >> 32, bits & 0xFFFFFFFF]).astype(jnp.uint32)


def forward(query, key, value, mask, dropout_p, is_causal, scale, key_data=None):
    """(output, log-sum-exp [*batch, heads, L], probabilities after dropout, grouped)."""
    s = _scores(query, key, mask, is_causal, scale)
    p, lse = _softmax(s)
    if key_data is not None:
        p = p * cast(_keep(key_data, p.shape, dropout_p), p.dtype)
    out = einsum_of_wide("...ngls,...nsd->...ngld", p, value)
    out = cast(out, query.dtype).reshape(*query.shape[:-1], value.shape[-1])
    return out, lse.reshape(query.shape[:-1]), p


def backward(
    grad_out, query, key, value, mask, out, logsumexp, dropout_p, is_causal, scale, key_data=None, all_keys=False
):
    """Gradients of query, key, value, and of the scores (grouped), which is that of a mask before broadcasting.

    ``all_keys`` says that the log-sum-exp is that of these keys; in ring attention it is that of all devices' keys.
    """
    shared, _ = _groups(query, key)
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    s = _scores(query, key, mask, is_causal, scale)
    if logsumexp.dtype == s.dtype:
        p = _softmax_again(s, logsumexp.reshape(s.shape[:-1]), exact=all_keys and query.dtype == s.dtype)
    else:  # what the forward pass saved is float32, too coarse for float64
        p, _ = _softmax(s)
    grad, q = _by_group(cast(grad_out, query.dtype), shared), _by_group(query, shared)
    dp = einsum("...ngld,...nsd->...ngls", grad, value)
    dropped = p
    if key_data is not None:
        keep = cast(_keep(key_data, p.shape, dropout_p), p.dtype)
        dropped, dp = p * keep, dp * keep
    dv = einsum_of_wide("...ngls,...ngld->...nsd", dropped, grad)
    delta = (cast(grad, s.dtype) * _by_group(cast(out, s.dtype), shared)).sum(-1, dtype=s.dtype, keepdims=True)
    ds = p * (dp - delta)
    dq = einsum_of_wide("...ngls,...nsd->...ngld", ds, key) * jnp.asarray(factor, s.dtype)
    dk = einsum_of_wide("...ngls,...ngld->...nsd", ds, q) * jnp.asarray(factor, s.dtype)
    return cast(dq, query.dtype).reshape(query.shape), cast(dk, key.dtype), cast(dv, value.dtype), ds


def _mask_gradient(ds, mask, query):
    """The scores' gradient summed over what the mask was broadcast along."""
    ds = ds.reshape(*query.shape[:-1], ds.shape[-1])
    ds = ds.sum(tuple(range(ds.ndim - mask.ndim)), dtype=ds.dtype)
    axes = tuple(i for i, (n, m) in enumerate(zip(ds.shape, mask.shape, strict=True)) if m == 1 and n != 1)
    return cast(ds.sum(axes, keepdims=True, dtype=ds.dtype) if axes else ds, mask.dtype)


def _fresh_key(dropout_p):
    return jax.random.key_data(random_key()) if dropout_p > 0 else None


def _seed(key_data):
    return jnp.zeros((), jnp.int64) if key_data is None else _pack(key_data)


def _kept_key(dropout_p, seed):
    return _unpack(seed) if dropout_p > 0 else None


@lowering("_scaled_dot_product_fused_attention_overrideable", static=_STATIC, random=True)
def overrideable(
    query, key, value, attn_bias=None, dropout_p=0.0, is_causal=False, return_debug_mask=False, scale=None
):
    key_data = _fresh_key(dropout_p)
    out, lse, _ = forward(query, key, value, attn_bias, dropout_p, is_causal, scale, key_data)
    lse = cast(lse, jnp.float32).reshape(-1, *lse.shape[-2:]) if query.ndim == 3 else cast(lse, jnp.float32)
    zero = jnp.zeros((), jnp.int64)
    return out, lse, None, None, query.shape[-2], key.shape[-2], _seed(key_data), zero, None


@lowering("_scaled_dot_product_fused_attention_overrideable_backward", static=_STATIC)
def overrideable_backward(
    grad_out, query, key, value, attn_bias, grad_input_mask, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k,
    dropout_p, is_causal, philox_seed, philox_offset, scale=None,
):  # fmt: skip
    key_data = _kept_key(dropout_p, philox_seed)
    *grads, ds = backward(
        grad_out, query, key, value, attn_bias, out, logsumexp, dropout_p, is_causal, scale, key_data, all_keys=True
    )
    wanted = attn_bias is not None and attn_bias.dtype != jnp.bool_ and grad_input_mask[3]
    bias = _mask_gradient(ds, attn_bias, query) if wanted else None
    if attn_bias is not None and bias is None:
        bias = jnp.zeros_like(attn_bias)
    return *grads, bias


@lowering("_scaled_dot_product_flash_attention_for_cpu", static=_STATIC, random=True)
def flash_for_cpu(query, key, value, dropout_p=0.0, is_causal=False, attn_mask=None, scale=None):
    out, lse, _ = forward(query, key, value, attn_mask, dropout_p, is_causal, scale, _fresh_key(dropout_p))
    return out, lse


@lowering("_scaled_dot_product_flash_attention_for_cpu_backward", static=_STATIC)
def flash_for_cpu_backward(
    grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, attn_mask=None, scale=None
):
    return backward(grad_out, query, key, value, attn_mask, out, logsumexp, dropout_p, is_causal, scale)[:3]


@lowering("_scaled_dot_product_flash_attention", static=_STATIC, random=True)
def flash(query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, scale=None):
    key_data = _fresh_key(dropout_p)
    out, lse, _ = forward(query, key, value, None, dropout_p, is_causal, scale, key_data)
    state = jnp.stack([_seed(key_data).astype(jnp.uint64), jnp.zeros((), jnp.uint64)])
    debug = jnp.zeros((0,), query.dtype)
    return (
        out,
        cast(lse, jnp.float32),
        None,
        None,
        query.shape[-2],
        key.shape[-2],
        state,
        jnp.zeros((), jnp.uint64),
        debug,
    )


@lowering("_scaled_dot_product_flash_attention_backward", static=_STATIC)
def flash_backward(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
    philox_seed, philox_offset, scale=None,
):  # fmt: skip
    key_data = _kept_key(dropout_p, philox_seed[0]) if dropout_p > 0 else None
    return backward(grad_out, query, key, value, None, out, logsumexp, dropout_p, is_causal, scale, key_data)[:3]


@lowering("_scaled_dot_product_efficient_attention", static=_STATIC, random=True)
def efficient(query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, scale=None):
    key_data = _fresh_key(dropout_p)
    out, lse, _ = forward(query, key, value, attn_bias, dropout_p, is_causal, scale, key_data)
    rows = -(-query.shape[-2] // 32) * 32 if compute_log_sumexp else 0
    padded = jnp.full((*lse.shape[:-1], rows), jnp.inf, jnp.float32)
    lse = padded.at[..., : lse.shape[-1]].set(cast(lse, jnp.float32)) if rows else padded
    return out, lse, _seed(key_data), jnp.zeros((), jnp.int64)


@lowering("_scaled_dot_product_efficient_attention_backward", static=_STATIC)
def efficient_backward(
    grad_out_, query, key, value, attn_bias, out, logsumexp, philox_seed, philox_offset, dropout_p, grad_input_mask,
    is_causal=False, scale=None,
):  # fmt: skip
    lse = logsumexp[..., : query.shape[-2]]
    key_data = _kept_key(dropout_p, philox_seed)
    *grads, ds = backward(grad_out_, query, key, value, attn_bias, out, lse, dropout_p, is_causal, scale, key_data)
    return *grads, _mask_gradient(ds, attn_bias, query) if attn_bias is not None and grad_input_mask[3] else None


@lowering("_scaled_dot_product_attention_math", static=_STATIC, random=True)
def math_attention(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, dropout_mask=None, scale=None, enable_gqa=False
):
    """Returns the output and the attention weights."""
    if query.ndim < 3:
        out, weights = math_attention(
            *(x[None] for x in (query, key, value)), attn_mask, dropout_p, is_causal, dropout_mask, scale
        )
        return out[0], weights[0]
    if dropout_mask is None:
        out, _, p = forward(query, key, value, attn_mask, dropout_p, is_causal, scale, _fresh_key(dropout_p))
    else:
        _, _, p = forward(query, key, value, attn_mask, 0.0, is_causal, scale)
        dropped = p * cast(_mask_by_group(dropout_mask, query.shape[:-3], *_groups(query, key)), p.dtype)
        dropped = dropped / jnp.asarray(1 - dropout_p, p.dtype)
        out = einsum("...ngls,...nsd->...ngld", dropped, cast(value, p.dtype))
        out = cast(out, query.dtype).reshape(*query.shape[:-1], value.shape[-1])
    return out, cast(p, query.dtype).reshape(*query.shape[:-1], key.shape[-2])


@lowering("scaled_dot_product_attention", static=_STATIC, random=True)
def scaled_dot_product_attention(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    return math_attention(query, key, value, attn_mask, dropout_p, is_causal, None, scale)[0]
