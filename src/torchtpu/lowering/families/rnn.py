"""Recurrent networks: the cells PyTorch asks a device for, and whole sequences as one ``lax.scan`` per direction."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from torchtpu.lowering.context import random_key
from torchtpu.lowering.precision import accumulator, product
from torchtpu.lowering.promotion import cast
from torchtpu.lowering.registry import lowering


def _gates(x, wide, bias, count: int):
    """The last axis split in ``count`` gates, with the bias added, in the dtype of the arithmetic."""
    x = cast(x, wide)
    return jnp.split(x if bias is None else x + cast(bias, wide), count, axis=-1)


@lowering("_thnn_fused_lstm_cell")
def fused_lstm_cell(input_gates, hidden_gates, cx, input_bias=None, hidden_bias=None):
    """(hidden, cell, workspace); the workspace holds the activated gates for the backward."""
    wide = accumulator(cx.dtype)
    a, b = _gates(input_gates, wide, input_bias, 4), _gates(hidden_gates, wide, hidden_bias, 4)
    i, f, g, o = (x + y for x, y in zip(a, b, strict=True))
    i, f, g, o = jax.nn.sigmoid(i), jax.nn.sigmoid(f), jnp.tanh(g), jax.nn.sigmoid(o)
    c = f * cast(cx, wide) + i * g
    return cast(o * jnp.tanh(c), cx.dtype), cast(c, cx.dtype), cast(jnp.concatenate([i, f, g, o], -1), cx.dtype)


@lowering("_thnn_fused_lstm_cell_backward_impl")
def fused_lstm_cell_backward(grad_hy, grad_cy, cx, cy, workspace, has_bias):
    """(gradient of the gates, of the old cell, of one bias)."""
    wide = accumulator(cx.dtype)
    i, f, g, o = _gates(workspace, wide, None, 4)
    tanh_c = jnp.tanh(cast(cy, wide))
    dh = jnp.zeros_like(tanh_c) if grad_hy is None else cast(grad_hy, wide)
    dc = dh * o * (1 - tanh_c * tanh_c)
    if grad_cy is not None:
        dc = dc + cast(grad_cy, wide)
    gates = jnp.concatenate(
        [dc * g * i * (1 - i), dc * cast(cx, wide) * f * (1 - f), dc * i * (1 - g * g), dh * tanh_c * o * (1 - o)], -1
    )
    bias = cast(gates.sum(0, dtype=wide), cx.dtype) if has_bias else None
    return cast(gates, workspace.dtype), cast(dc * f, cx.dtype), bias


@lowering("_thnn_fused_gru_cell")
def fused_gru_cell(input_gates, hidden_gates, hx, input_bias=None, hidden_bias=None):
    """(hidden, workspace); the workspace is reset, update, new, old hidden, and the hidden part of new."""
    wide = accumulator(hx.dtype)
    ir, iz, inew = _gates(input_gates, wide, input_bias, 3)
    hr, hz, hnew = _gates(hidden_gates, wide, hidden_bias, 3)
    r, z = jax.nn.sigmoid(ir + hr), jax.nn.sigmoid(iz + hz)
    n = jnp.tanh(inew + r * hnew)
    h = cast(hx, wide)
    return cast(n + z * (h - n), hx.dtype), cast(jnp.concatenate([r, z, n, h, hnew], -1), hx.dtype)


@lowering("_thnn_fused_gru_cell_backward")
def fused_gru_cell_backward(grad_hy, workspace, has_bias):
    """(gradient of the input gates, of the hidden gates, of the old hidden, of both biases)."""
    wide = accumulator(grad_hy.dtype)
    r, z, n, h, hnew = _gates(workspace, wide, None, 5)
    grad = cast(grad_hy, wide)
    dn = grad * (1 - z) * (1 - n * n)
    dz = grad * (h - n) * z * (1 - z)
    dr = dn * hnew * r * (1 - r)
    input_gates = jnp.concatenate([dr, dz, dn], -1)
    hidden_gates = jnp.concatenate([dr, dz, dn * r], -1)
    dtype = grad_hy.dtype
    biases = [cast(x.sum(0, dtype=wide), dtype) if has_bias else None for x in (input_gates, hidden_gates)]
    return cast(input_gates, dtype), cast(hidden_gates, dtype), cast(grad * z, dtype), *biases


def _lstm_step(state, x, w_hh, b_hh, project):
    h, c = state
    gates = x + _linear(h, w_hh, b_hh)
    i, f, g, o = jnp.split(gates, 4, axis=-1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    h = jax.nn.sigmoid(o) * jnp.tanh(c)
    return (h if project is None else product(h, project.T), c)


def _gru_step(state, x, w_hh, b_hh, project):
    (h,) = state
    ir, iz, inew = jnp.split(x, 3, axis=-1)
    hr, hz, hnew = jnp.split(_linear(h, w_hh, b_hh), 3, axis=-1)
    r, z = jax.nn.sigmoid(ir + hr), jax.nn.sigmoid(iz + hz)
    n = jnp.tanh(inew + r * hnew)
    return (n + z * (h - n),)


def _elman_step(activation):
    def step(state, x, w_hh, b_hh, project):
        return (activation(x + _linear(state[0], w_hh, b_hh)),)

    return step


def _linear(x, weight, bias):
    y = product(x, weight.T)
    return y if bias is None else y + bias


def _direction(step, x, state, parameters, has_biases, reverse, active):
    """One layer in one direction over (T, B, F): the projection of all inputs is one product, the rest a scan.

    ``active`` (T, B) says which sequences of the batch are still running; the others keep their state.
    """
    w_ih, w_hh, *rest = parameters
    b_ih, b_hh = rest[:2] if has_biases else (None, None)
    project = rest[2 if has_biases else 0] if len(rest) > (2 if has_biases else 0) else None
    inputs = _linear(x, w_ih, b_ih)

    def advance(state, item):
        x, running = item
        new = step(state, x, w_hh, b_hh, project)
        if running is not None:
            new = tuple(jnp.where(running[:, None], a, b) for a, b in zip(new, state, strict=True))
        return new, new[0]

    return jax.lax.scan(advance, state, (inputs, active), reverse=reverse)


def _run(step, x, states, params, has_biases, num_layers, dropout, train, bidirectional, active=None):
    """All layers; ``states`` are (layers * directions, B, H). Returns the output and the last states."""
    dtype, wide = x.dtype, accumulator(x.dtype)
    x, states, params = cast(x, wide), [cast(s, wide) for s in states], [cast(p, wide) for p in params]
    directions = 2 if bidirectional else 1
    each = len(params) // (num_layers * directions)
    last = []
    for layer in range(num_layers):
        outputs = []
        for direction in range(directions):
            k = layer * directions + direction
            state, y = _direction(
                step, x, tuple(s[k] for s in states), params[k * each : (k + 1) * each], has_biases, direction == 1,
                active,
            )  # fmt: skip
            last.append(state)
            outputs.append(y)
        x = jnp.concatenate(outputs, -1) if bidirectional else outputs[0]
        if dropout and train and layer + 1 < num_layers:
            kept = jax.random.bernoulli(random_key(), jnp.float32(1 - dropout), x.shape)
            x = jnp.where(kept, x / jnp.asarray(1 - dropout, wide) if dropout < 1 else 0, 0)
    finals = [cast(jnp.stack([state[i] for state in last]), dtype) for i in range(len(states))]
    return cast(x, dtype), *finals


def _unpack(data, batch_sizes):
    """Packed rows as (T, B, F), which (T, B) are real, and where those are once flattened."""
    starts = np.concatenate([[0], np.cumsum(batch_sizes)[:-1]])
    columns = np.arange(batch_sizes[0])
    active = columns[None, :] < batch_sizes[:, None]
    rows = np.where(active, starts[:, None] + columns[None, :], 0)
    return data[rows], active, np.flatnonzero(active)


def _register(name: str, step, lstm: bool) -> None:
    def whole(input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first):
        x = input.swapaxes(0, 1) if batch_first else input
        states = hx if lstm else [hx]
        y, *last = _run(step, x, states, params, has_biases, num_layers, dropout, train, bidirectional)
        return y.swapaxes(0, 1) if batch_first else y, *last

    def packed(data, batch_sizes, hx, params, has_biases, num_layers, dropout, train, bidirectional):
        sizes = np.asarray(batch_sizes)
        x, active, real = _unpack(data, sizes)
        states = hx if lstm else [hx]
        y, *last = _run(
            step, x, states, params, has_biases, num_layers, dropout, train, bidirectional, jnp.asarray(active)
        )
        return y.reshape(-1, y.shape[-1])[real], *last

    lowering(f"{name}.input", static=("dropout",), random=True)(whole)
    # The batch sizes are a tensor that decides shapes: they must be known, so the call stays outside any trace.
    lowering(f"{name}.data", static=("dropout",), random=True, dynamic=True)(packed)


_register("lstm", _lstm_step, lstm=True)
_register("gru", _gru_step, lstm=False)
_register("rnn_tanh", _elman_step(jnp.tanh), lstm=False)
_register("rnn_relu", _elman_step(jax.nn.relu), lstm=False)
