"""Fused optimizer steps over lists of tensors, and the loss scaling of automatic mixed precision.

Learning rates and the like are operands of the program, so a schedule never recompiles. Scalars are combined in
float64, as PyTorch does on the host: ``1 - beta2 ** step`` loses digits in float32.
"""

from __future__ import annotations

import jax.numpy as jnp

from torchtpu.lowering.precision import accumulator
from torchtpu.lowering.promotion import cast
from torchtpu.lowering.registry import lowering


def _double(x):
    return cast(x, jnp.float64).reshape(())


def _is_zero(number) -> bool:
    """Whether a number is the constant 0."""
    return isinstance(number, int | float) and number == 0


class _Skip:
    """Keeps the old values when the gradients were found to hold an infinity."""

    def __init__(self, found_inf) -> None:
        self.found = None if found_inf is None else found_inf.reshape(()) == 1

    def __call__(self, old, new):
        new = cast(new, old.dtype)
        return new if self.found is None else jnp.where(self.found, old, new)


def _gradient(param, grad, weight_decay, maximize, grad_scale):
    """(gradient to step along, unscaled gradient to store), in the dtype of the arithmetic."""
    work = accumulator(param.dtype)
    g = cast(grad, work)
    if grad_scale is not None:
        g = g / cast(grad_scale, work).reshape(())
    stored = g
    if maximize:
        g = -g
    if weight_decay is not None and not _is_zero(weight_decay):
        g = g + cast(param, work) * cast(weight_decay, work)
    return g, stored


def _adam(decoupled: bool):
    def step(
        self, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps, lr, beta1, beta2, weight_decay, eps, amsgrad,
        maximize, grad_scale=None, found_inf=None,
    ):  # fmt: skip
        keep = _Skip(found_inf)
        lr, b1, b2 = _double(lr), _double(beta1), _double(beta2)
        params, unscaled, firsts, seconds, maxima = [], [], [], [], []
        for i, (param, grad) in enumerate(zip(self, grads, strict=True)):
            work = accumulator(param.dtype)
            g, stored = _gradient(param, grad, None if decoupled else weight_decay, maximize, grad_scale)
            p, m, v = (cast(x, work) for x in (param, exp_avgs[i], exp_avg_sqs[i]))
            if decoupled:
                p = p * cast(1 - lr * _double(weight_decay), work)
            m = m + (g - m) * cast(1 - b1, work)
            v = v * cast(b2, work) + g * g * cast(1 - b2, work)
            count = _double(state_steps[i])
            step_size = cast(lr / (1 - b1**count), work)
            root = cast(jnp.sqrt(1 - b2**count), work)
            top = v
            if amsgrad:
                top = jnp.maximum(cast(max_exp_avg_sqs[i], work), v)
                maxima.append(keep(max_exp_avg_sqs[i], top))
            p = p - step_size * m / (jnp.sqrt(top) / root + cast(eps, work))
            params.append(keep(param, p))
            unscaled.append(grad if grad_scale is None else keep(grad, stored))
            firsts.append(keep(exp_avgs[i], m))
            seconds.append(keep(exp_avg_sqs[i], v))
        return params, unscaled, firsts, seconds, maxima if amsgrad else list(max_exp_avg_sqs)

    return step


lowering("_fused_adam", "_fused_adam.tensor_lr")(_adam(decoupled=False))
lowering("_fused_adamw", "_fused_adamw.tensor_lr")(_adam(decoupled=True))


@lowering("_fused_sgd", "_fused_sgd.tensor_lr")
def fused_sgd(
    self, grads, momentum_buffer_list, weight_decay, momentum, lr, dampening, nesterov, maximize, is_first_step,
    grad_scale=None, found_inf=None,
):  # fmt: skip
    keep = _Skip(found_inf)
    params, unscaled, buffers = [], [], []
    for i, (param, grad) in enumerate(zip(self, grads, strict=True)):
        work = accumulator(param.dtype)
        g, stored = _gradient(param, grad, weight_decay, maximize, grad_scale)
        if momentum_buffer_list:
            buffer = g
            if not is_first_step:
                old = cast(momentum_buffer_list[i], work)
                buffer = old * cast(momentum, work) + g * cast(1 - _double(dampening), work)
            buffers.append(keep(momentum_buffer_list[i], buffer))
            g = g + buffer * cast(momentum, work) if nesterov else buffer
        params.append(keep(param, cast(param, work) - cast(_double(lr), work) * g))
        unscaled.append(grad if grad_scale is None else keep(grad, stored))
    return params, unscaled, buffers


@lowering("_fused_adagrad.tensor_lr")
def fused_adagrad(
    self, grads, state_sums, state_steps, lr, lr_decay, weight_decay, eps, maximize, grad_scale=None, found_inf=None
):
    keep = _Skip(found_inf)
    params, unscaled, sums = [], [], []
    for param, grad, total, count in zip(self, grads, state_sums, state_steps, strict=True):
        work = accumulator(param.dtype)
        g, stored = _gradient(param, grad, weight_decay, maximize, grad_scale)
        rate = cast(_double(lr) / (1 + (_double(count) - 1) * _double(lr_decay)), work)
        new = cast(total, work) + g * g
        params.append(keep(param, cast(param, work) - rate * g / (jnp.sqrt(new) + cast(eps, work))))
        sums.append(keep(total, new))
        unscaled.append(grad if grad_scale is None else keep(grad, stored))
    return params, unscaled, sums


@lowering("_fused_adagrad")
def fused_adagrad_float(
    self, grads, state_sums, state_steps, lr, lr_decay, weight_decay, eps, maximize, grad_scale=None, found_inf=None
):
    out = fused_adagrad(
        self, grads, state_sums, state_steps, lr, lr_decay, weight_decay, eps, maximize, grad_scale, found_inf
    )
    return *out, list(state_steps)


@lowering("_amp_foreach_non_finite_check_and_unscale")
def amp_unscale(self, found_inf, inv_scale):
    bad = jnp.zeros((), bool)
    out = []
    for x in self:
        wide = cast(x, accumulator(x.dtype))
        bad |= ~jnp.isfinite(wide).all()
        scale = cast(inv_scale, wide.dtype).reshape(())
        # A scale of one leaves even NaN payloads alone.
        out.append(jnp.where(scale == 1, x, cast(wide * scale, x.dtype)))
    return out, jnp.where(bad, jnp.ones_like(found_inf), found_inf)


@lowering("_amp_update_scale")
def amp_update_scale(self, growth_tracker, found_inf, scale_growth_factor, scale_backoff_factor, growth_interval):
    found = found_inf.reshape(()) != 0
    steps = growth_tracker + 1
    grows = steps == growth_interval
    grown = self * cast(scale_growth_factor, self.dtype)
    grown = jnp.where(grows & jnp.isfinite(grown), grown, self)
    scale = jnp.where(found, self * cast(scale_backoff_factor, self.dtype), grown)
    return scale, jnp.where(found | grows, jnp.zeros_like(growth_tracker), steps)
