"""Activation functions and their backward operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from torchtpu.lowering.context import random_key
from torchtpu.lowering.families.pointwise_unary import register_unary
from torchtpu.lowering.promotion import Kind, cast, promote
from torchtpu.lowering.registry import lowering

Array = jax.Array
SELU_ALPHA, SELU_SCALE = 1.6732632423543772848170429916717, 1.0507009873554804934193349852946


def _in_compute_dtype(f: Callable[..., Array]) -> Callable[..., Array]:
    """Call ``f`` with its arguments, numbers included, in the compute dtype, and round the result once."""

    def lower(*args: Any) -> Array:
        values, result = promote(*args)
        return cast(f(*values), result)

    return lower


def _softplus(x: Array) -> Array:
    return jnp.logaddexp(x, jnp.zeros_like(x))


def _hardswish(x: Array) -> Array:
    return x * jnp.clip(x + 3, 0, 6) / 6


register_unary(
    Kind.DEFAULT,
    {
        "relu": lambda x: jnp.maximum(x, jnp.zeros_like(x)),
        "relu6": lambda x: jnp.clip(x, jnp.zeros_like(x), jnp.full_like(x, 6)),
        "silu": lambda x: x * lax.logistic(x),
        "mish": lambda x: x * jnp.tanh(_softplus(x)),
        "hardswish": _hardswish,
        "hardsigmoid": lambda x: jnp.clip(x + 3, 0, 6) / 6,
        "selu": lambda x: jnp.where(x > 0, SELU_SCALE * x, SELU_SCALE * SELU_ALPHA * jnp.expm1(x)),
    },
)


@lowering("gelu")
def gelu(self, *, approximate="none"):
    (x,), result = promote(self)
    if approximate == "tanh":
        inner = np.sqrt(2 / np.pi).astype(x.dtype) * (x + 0.044715 * x * x * x)
        return cast(0.5 * x * (1 + jnp.tanh(inner)), result)
    return cast(0.5 * x * (1 + lax.erf(x * x.dtype.type(np.sqrt(0.5)))), result)


@lowering("gelu_backward")
def gelu_backward(grad_output, self, *, approximate="none"):
    (g, x), result = promote(grad_output, self)
    if approximate == "tanh":
        beta = np.sqrt(2 / np.pi).astype(x.dtype)
        t = jnp.tanh(beta * (x + 0.044715 * x * x * x))
        slope = 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * beta * (1 + 3 * 0.044715 * x * x)
    else:
        cdf = 0.5 * (1 + lax.erf(x * x.dtype.type(np.sqrt(0.5))))
        slope = cdf + x * jnp.exp(-0.5 * x * x) * x.dtype.type(1 / np.sqrt(2 * np.pi))
    return cast(g * slope, result)


@lowering("silu_backward")
@_in_compute_dtype
def silu_backward(grad_output, self):
    s = lax.logistic(self)
    # not conjugated for complex numbers, as in PyTorch's kernel
    return grad_output * s * (1 + self * (1 - s))


@lowering("mish_backward")
@_in_compute_dtype
def mish_backward(grad_output, self):
    t = jnp.tanh(_softplus(self))
    return grad_output * (t + self * lax.logistic(self) * (1 - t * t))


@lowering("sigmoid_backward")
@_in_compute_dtype
def sigmoid_backward(grad_output, output):
    return grad_output * jnp.conj((1 - output) * output)


@lowering("tanh_backward")
@_in_compute_dtype
def tanh_backward(grad_output, output):
    return grad_output * jnp.conj(1 - output * output)


@lowering("logit_backward")
def logit_backward(grad_output, self, eps=None):
    (g, x), result = promote(grad_output, self)
    if eps is None:
        slope = jnp.where((x < 0) | (x > 1), jnp.nan, g / (x * (1 - x)))
    else:
        low = cast(eps, x.dtype)
        slope = jnp.where((x < low) | (x > 1 - low), 0, g / (x * (1 - x)))
    return cast(slope, result)


@lowering("threshold")
def threshold(self, threshold, value):
    return jnp.where(self <= cast(threshold, self.dtype), cast(value, self.dtype), self)


@lowering("threshold_backward")
def threshold_backward(grad_output, self, threshold):
    return jnp.where(self <= cast(threshold, self.dtype), jnp.zeros_like(grad_output), grad_output)


@lowering("hardtanh")
def hardtanh(self, min_val=-1, max_val=1):
    return jnp.clip(self, cast(min_val, self.dtype), cast(max_val, self.dtype))


@lowering("hardtanh_backward")
def hardtanh_backward(grad_output, self, min_val, max_val):
    outside = (self <= cast(min_val, self.dtype)) | (self >= cast(max_val, self.dtype))
    return jnp.where(outside, jnp.zeros_like(grad_output), grad_output)


@lowering("hardsigmoid_backward")
@_in_compute_dtype
def hardsigmoid_backward(grad_output, self):
    return jnp.where((self > -3) & (self < 3), grad_output / 6, 0)


@lowering("hardswish_backward")
@_in_compute_dtype
def hardswish_backward(grad_output, self):
    return jnp.where(self <= -3, 0, jnp.where(self >= 3, grad_output, grad_output * (self / 3 + 0.5)))


@lowering("hardshrink")
def hardshrink(self, lambd=0.5):
    bound = cast(lambd, self.dtype)
    return jnp.where((self >= -bound) & (self <= bound), jnp.zeros_like(self), self)


@lowering("softshrink")
@_in_compute_dtype
def softshrink(self, lambd=0.5):
    inside = self * 0  # NaN stays NaN
    return jnp.where(self > lambd, self - lambd, jnp.where(self < -lambd, self + lambd, inside))


@lowering("hardshrink_backward", "softshrink_backward")
def shrink_backward(grad_output, self, lambd):
    bound = cast(lambd, self.dtype)
    return jnp.where((self >= -bound) & (self <= bound), jnp.zeros_like(grad_output), grad_output)


@lowering("softplus")
def softplus(self, beta=1, threshold=20):
    return _softplus_of(self, beta, threshold)


@_in_compute_dtype
def _softplus_of(x, beta, threshold):
    return jnp.where(x * beta > threshold, x, jnp.log1p(jnp.exp(jnp.minimum(x * beta, threshold))) / beta)


@lowering("softplus_backward")
@_in_compute_dtype
def softplus_backward(grad_output, self, beta, threshold):
    scaled = self * beta
    return jnp.where(scaled > threshold, grad_output, grad_output * lax.logistic(scaled))


@lowering("log_sigmoid_forward")
def log_sigmoid_forward(self):
    """(log sigmoid, buffer): the buffer is ``exp(-|x|)``, which the CPU kernel keeps for the backward pass."""
    (x,), result = promote(self)
    z = jnp.exp(-jnp.abs(x))
    return cast(jnp.minimum(x, 0) - jnp.log1p(z), result), cast(z, result)


@lowering("log_sigmoid_backward")
def log_sigmoid_backward(grad_output, self, buffer):
    (g, x), result = promote(grad_output, self)
    return cast(g * lax.logistic(-x), result)


@lowering("elu")
def elu(self, alpha=1, scale=1, input_scale=1):
    (x, a, s, i), result = promote(self, alpha, scale, input_scale)
    return cast(jnp.where(x > 0, x * s, jnp.expm1(x * i) * a * s), result)


@lowering("elu_backward")
def elu_backward(grad_output, alpha, scale, input_scale, is_result, self_or_result):
    (g, x, a, s, i), result = promote(grad_output, self_or_result, alpha, scale, input_scale)
    below = i * (x + a * s) if is_result else i * a * s * jnp.exp(x * i)
    return cast(jnp.where(x > 0, g * s, g * below), result)


@lowering("celu")
def celu(self, alpha=1.0):
    (x, a), result = promote(self, alpha)
    return cast(jnp.where(x > 0, x, a * jnp.expm1(x / a)), result)


@lowering("leaky_relu")
def leaky_relu(self, negative_slope=0.01):
    (x, slope), result = promote(self, negative_slope)
    return cast(jnp.where(x > 0, x, x * slope), result)


@lowering("leaky_relu_backward")
def leaky_relu_backward(grad_output, self, negative_slope, self_is_result):
    (g, x, slope), result = promote(grad_output, self, negative_slope)
    return cast(jnp.where(x > 0, g, g * slope), result)


@lowering("_prelu_kernel")
@_in_compute_dtype
def prelu(self, weight):
    return jnp.where(self > 0, self, self * weight)


@lowering("_prelu_kernel_backward")
def prelu_backward(grad_output, self, weight):
    (g, x, w), result = promote(grad_output, self, weight)
    g, x, w = jnp.broadcast_arrays(g, x, w)
    return cast(jnp.where(x > 0, g, g * w), result), cast(jnp.where(x > 0, 0, g * x), result)


@lowering("rrelu_with_noise_functional", random=True)
def rrelu_with_noise(self, noise, lower=0.125, upper=0.3333333333333333, training=False):
    """(output, noise): the slope of each non-positive element is drawn when training, else the mean of the bounds."""
    if not training:
        (x, low, high), result = promote(self, lower, upper)
        return cast(jnp.where(x > 0, x, x * ((low + high) / 2)), result), noise
    low, high = cast(lower, np.dtype(np.float32)), cast(upper, np.dtype(np.float32))
    drawn = jax.random.uniform(random_key(), self.shape, jnp.float32, low, high).astype(noise.dtype)
    slope = jnp.where(self > 0, jnp.ones_like(drawn), drawn)
    (x, s), result = promote(self, slope)
    return cast(x * s, result), slope


@lowering("rrelu_with_noise_backward")
def rrelu_with_noise_backward(grad_output, self, noise, lower, upper, training, self_is_result):
    (g, x, n, low, high), result = promote(grad_output, self, noise, lower, upper)
    slope = n if training else jnp.where(x > 0, jnp.ones_like(x), (low + high) / 2)
    return cast(g * slope, result)


def _halves(x: Array, dim: int) -> tuple[Array, Array]:
    first, second = jnp.split(x, 2, axis=dim)
    return first, second


@lowering("glu")
def glu(self, dim=-1):
    (x,), result = promote(self)
    value, gate = _halves(x, dim)
    return cast(value * lax.logistic(gate), result)


@lowering("glu_backward")
def glu_backward(grad_output, self, dim):
    (g, x), result = promote(grad_output, self)
    value, gate = _halves(x, dim)
    s = lax.logistic(gate)
    return cast(jnp.concatenate([g * s, g * value * s * (1 - s)], axis=dim), result)


@lowering("glu_jvp")
def glu_jvp(glu, x, dx, dim):
    (y, v, dv), result = promote(glu, x, dx)
    gate, (d_value, d_gate) = _halves(v, dim)[1], _halves(dv, dim)
    s = lax.logistic(gate)
    return cast(d_value * s + y * (d_gate - s * d_gate), result)
