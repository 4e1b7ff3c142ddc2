"""The connectionist temporal classification loss and its gradient, in log space."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from torchtpu.lowering.registry import lowering

Array = jax.Array
Lengths = Sequence[int] | Array


def _table(targets: Array, target_lengths: np.ndarray) -> Array:
    """The targets as an int32 (N, S) table, from a table or from one concatenated row."""
    longest = int(target_lengths.max(initial=0))
    if targets.ndim == 1:
        starts = np.cumsum(target_lengths) - target_lengths
        place = np.minimum(starts[:, None] + np.arange(longest), max(targets.shape[0] - 1, 0))
        table = targets[place] if targets.shape[0] else jnp.zeros(place.shape, np.int32)
    else:
        table = targets[:, :longest]
    return table.astype(np.int32)


def _lengths(lengths: Lengths) -> np.ndarray:
    return np.asarray(lengths, np.int32).reshape(-1)


def _extended(table: Array, blank: int) -> tuple[Array, Array]:
    """(labels with blanks between them as (N, 2S+1), whether each may be reached by skipping the blank before it)."""
    n, longest = table.shape
    labels = jnp.full((n, 2 * longest + 1), blank, np.int32)
    labels = labels.at[:, 1::2].set(table)
    skips = jnp.zeros(labels.shape, bool).at[:, 3::2].set(table[:, 1:] != table[:, :-1])
    return labels, skips


def _emissions(log_probs: Array, labels: Array) -> Array:
    """(T, N, 2S+1): the log-probability of every label at every time."""
    return jnp.take_along_axis(log_probs, jnp.broadcast_to(labels, (log_probs.shape[0], *labels.shape)), axis=2)


def _shift(a: Array, by: int) -> Array:
    """Move the last dimension right by ``by`` (left if negative) and fill with -inf."""
    if abs(by) >= a.shape[-1]:
        return jnp.full_like(a, -jnp.inf)
    pad = ((0, 0), (by, 0)) if by > 0 else ((0, 0), (0, -by))
    kept = a[:, :-by] if by > 0 else a[:, -by:]
    return jnp.pad(kept, pad, constant_values=-jnp.inf)


@functools.partial(jax.jit, static_argnames=("blank",))
def _forward(
    log_probs: Array, table: Array, input_lengths: Array, target_lengths: Array, blank: int
) -> tuple[Array, Array]:
    """(-log likelihood (N,), log alpha (N, T, 2S+1)). The lengths are operands: a new batch needs no new program."""
    labels, skips = _extended(table, blank)
    emitted = _emissions(log_probs, labels)
    place = jnp.arange(labels.shape[1], dtype=np.int32)
    impossible = jnp.asarray(-jnp.inf, log_probs.dtype)
    valid = place <= 2 * target_lengths[:, None]

    def step(alpha: Array, emission: Array) -> tuple[Array, Array]:
        skipped = jnp.where(skips, _shift(alpha, 2), impossible)
        alpha = jnp.logaddexp(jnp.logaddexp(alpha, _shift(alpha, 1)), skipped) + emission
        alpha = jnp.where(valid, alpha, impossible)
        return alpha, alpha

    first = jnp.where((place < 2) & valid, emitted[0], impossible)
    _, later = jax.lax.scan(step, first, emitted[1:])
    log_alpha = jnp.concatenate([first[None], later]).transpose(1, 0, 2)
    last = jnp.take_along_axis(log_alpha, jnp.maximum(input_lengths - 1, 0)[:, None, None], axis=1)[:, 0]
    ends = [jnp.take_along_axis(last, (2 * target_lengths)[:, None], axis=1)[:, 0]]
    before = jnp.take_along_axis(last, jnp.maximum(2 * target_lengths - 1, 0)[:, None], axis=1)[:, 0]
    ends.append(jnp.where(target_lengths > 0, before, impossible))
    likelihood = jnp.logaddexp(*ends)
    # Without any input only the empty target is possible.
    likelihood = jnp.where(input_lengths > 0, likelihood, jnp.where(target_lengths == 0, 0, impossible))
    return -likelihood, log_alpha


@functools.partial(jax.jit, static_argnames=("blank", "zero_infinity"))
def _backward(
    grad: Array,
    log_probs: Array,
    table: Array,
    input_lengths: Array,
    target_lengths: Array,
    neg_log_likelihood: Array,
    log_alpha: Array,
    blank: int,
    zero_infinity: bool,
) -> Array:
    """The gradient by ``log_probs`` as PyTorch defines it: through the log-softmax that made them."""
    labels, skips = _extended(table, blank)
    emitted = _emissions(log_probs, labels)
    times, n, classes = log_probs.shape
    place = jnp.arange(labels.shape[1], dtype=np.int32)
    impossible = jnp.asarray(-jnp.inf, log_probs.dtype)
    last_place = 2 * target_lengths[:, None]
    ends = (place == last_place) | ((place == last_place - 1) & (place >= 0))
    skips_next = jnp.pad(skips, ((0, 0), (0, 2)))[:, 2:]

    def step(beta: Array, now: tuple[Array, Array]) -> tuple[Array, Array]:
        emission, time = now
        skipped = jnp.where(skips_next, _shift(beta, -2), impossible)
        inner = jnp.logaddexp(jnp.logaddexp(beta, _shift(beta, -1)), skipped)
        final = jnp.where(ends, jnp.zeros((), beta.dtype), impossible)
        last = (time == input_lengths - 1)[:, None]
        beta = jnp.where(last, final, inner) + emission
        beta = jnp.where((place <= last_place) & (time < input_lengths)[:, None], beta, impossible)
        return beta, beta

    start = jnp.full(labels.shape, -jnp.inf, log_probs.dtype)
    _, log_beta = jax.lax.scan(step, start, (emitted, jnp.arange(times, dtype=np.int32)), reverse=True)

    # log of the sum, over the places of a class, of alpha * beta: a scatter of exponentials around each row's peak.
    # Where beta is impossible, alpha may be anything: PyTorch CPU leaves it uninitialised.
    joint = jnp.where(log_beta == impossible, impossible, log_alpha.transpose(1, 0, 2) + log_beta)
    peak = jnp.max(joint, axis=2, keepdims=True)
    peak = jnp.where(jnp.isfinite(peak), peak, jnp.zeros((), peak.dtype))
    rows, columns = jnp.arange(times)[:, None, None], jnp.arange(n)[None, :, None]
    mass = jnp.zeros((times, n, classes), log_probs.dtype).at[rows, columns, labels[None]].add(jnp.exp(joint - peak))
    log_mass = jnp.log(mass) + peak
    result = jnp.exp(log_probs) - jnp.exp(log_mass + neg_log_likelihood[None, :, None] - log_probs)
    result = result * grad.reshape(1, -1, 1)
    zero = jnp.zeros((), result.dtype)
    if zero_infinity:
        result = jnp.where(jnp.isinf(neg_log_likelihood)[None, :, None], zero, result)
    return jnp.where(jnp.arange(times)[:, None, None] < input_lengths[None, :, None], result, zero)


@lowering("_ctc_loss", "_ctc_loss.Tensor", dynamic=True)
def _ctc_loss(log_probs, targets, input_lengths, target_lengths, blank=0, zero_infinity=False):
    inputs, lengths = _lengths(input_lengths), _lengths(target_lengths)
    return _forward(log_probs, _table(targets, lengths), inputs, lengths, blank)


@lowering("_ctc_loss_backward", "_ctc_loss_backward.Tensor", dynamic=True)
def _ctc_loss_backward(
    grad,
    log_probs,
    targets,
    input_lengths,
    target_lengths,
    neg_log_likelihood,
    log_alpha,
    blank,
    zero_infinity=False,
):
    inputs, lengths = _lengths(input_lengths), _lengths(target_lengths)
    table = _table(targets, lengths)
    return _backward(grad, log_probs, table, inputs, lengths, neg_log_likelihood, log_alpha, blank, zero_infinity)
