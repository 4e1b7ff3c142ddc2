"""Random numbers. The numbers differ from PyTorch CPU's; distribution, range and dtype do not.

16-bit floats are drawn in float32 and rounded once, except where rounding could reach an end that is excluded.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import torch

from torchtpu.lowering.context import check, random_key
from torchtpu.lowering.dtypes import default_float, to_jax
from torchtpu.lowering.promotion import cast, promote
from torchtpu.lowering.registry import lowering


def _compute(dtype: np.dtype) -> np.dtype:
    """The floating dtype to draw in for a result of ``dtype``."""
    return np.dtype(np.float64 if np.dtype(dtype) == np.float64 else np.float32)


def _real_parts(dtype: np.dtype) -> np.dtype | None:
    """The dtype of a complex dtype's parts, None for a real dtype."""
    return np.finfo(dtype).dtype if np.dtype(dtype).kind == "c" else None


def _uniform(shape, dtype) -> jax.Array:
    """Uniform in [0, 1), both parts of a complex number too."""
    parts = _real_parts(dtype)
    if parts is not None:
        return jax.lax.complex(_uniform(shape, parts), _uniform(shape, parts))
    return jax.random.uniform(random_key(), tuple(shape), dtype)


def _normal(shape, dtype) -> jax.Array:
    """Standard normal; a complex number has variance 1, half in each part."""
    drawn = dtype if np.dtype(dtype).kind == "c" else _compute(dtype)
    return jax.random.normal(random_key(), tuple(shape), drawn).astype(dtype)


def _open_uniform(shape, dtype) -> jax.Array:
    """Uniform in (0, 1]: its logarithm is finite."""
    return 1 - jax.random.uniform(random_key(), tuple(shape), _compute(dtype))


def _integers(shape, low, high, dtype) -> jax.Array:
    """Uniform integers in [low, high) for Python ints, as ``dtype``; 32 bits are drawn where they are enough."""
    if high <= low:
        raise RuntimeError(f"random_ expects 'from' to be less than 'to', but got from={low} >= to={high}")
    narrow = low >= -(2**31) and high <= 2**31 - 1
    drawn = jax.random.randint(random_key(), tuple(shape), low, high, jnp.int32 if narrow else jnp.int64)
    return drawn.astype(dtype)


def _or_default(dtype: torch.dtype | None) -> np.dtype:
    return default_float() if dtype is None else to_jax(dtype)


@lowering("rand", "rand.generator", random=True)
def rand(size, dtype=None):
    return _uniform(size, _or_default(dtype))


@lowering("randn", "randn.generator", random=True)
def randn(size, dtype=None):
    return _normal(size, _or_default(dtype))


@lowering("rand_like", "rand_like.generator", random=True)
def rand_like(self, dtype=None, memory_format=None):
    return _uniform(self.shape, self.dtype if dtype is None else to_jax(dtype))


@lowering("randn_like", "randn_like.generator", random=True)
def randn_like(self, dtype=None, memory_format=None):
    return _normal(self.shape, self.dtype if dtype is None else to_jax(dtype))


@lowering("randint", "randint.generator", random=True)
def randint(high, size, dtype=torch.int64):
    return _integers(size, 0, high, to_jax(dtype))


@lowering("randint.low", "randint.low_generator", random=True)
def randint_low(low, high, size, dtype=torch.int64):
    return _integers(size, low, high, to_jax(dtype))


@lowering("randint_like", "randint_like.generator", random=True)
def randint_like(self, high, dtype=None, memory_format=None):
    return _integers(self.shape, 0, high, self.dtype if dtype is None else to_jax(dtype))


@lowering("randint_like.low_dtype", "randint_like.low_generator_dtype", random=True)
def randint_like_low(self, low, high, dtype=None, memory_format=None):
    return _integers(self.shape, low, high, self.dtype if dtype is None else to_jax(dtype))


@lowering("randint_like.Tensor", "randint_like.Tensor_generator", random=True)
def randint_like_tensor(self, high, dtype=None, memory_format=None):
    drawn = jax.random.randint(random_key(), self.shape, 0, high.reshape(()), jnp.int64)
    return drawn.astype(self.dtype if dtype is None else to_jax(dtype))


@lowering("randperm", "randperm.generator", random=True)
def randperm(n, dtype=torch.int64):
    return jax.random.permutation(random_key(), jnp.arange(n, dtype=jnp.int32)).astype(to_jax(dtype))


def _bernoulli(shape, p) -> jax.Array:
    """Bool array, true with probability ``p`` (a number or an array)."""
    p = jnp.asarray(p)
    compute = _compute(p.dtype)
    return jax.random.uniform(random_key(), tuple(shape), compute) < p.astype(compute)


@lowering("bernoulli", random=True)
def bernoulli(self):
    return _bernoulli(self.shape, self).astype(self.dtype)


@lowering("bernoulli.p", "bernoulli.Tensor", random=True)
def bernoulli_p(self, p=0.5):
    return _bernoulli(self.shape, p).astype(self.dtype)


def _bounds(defaults: tuple, given: tuple, named: dict, names: tuple[str, str]) -> list:
    """Two arguments of which one is called ``from``, a Python keyword."""
    return [given[i] if i < len(given) else named.get(name, defaults[i]) for i, name in enumerate(names)]


@lowering("uniform", random=True)
def uniform(self, *bounds, **named):
    low, high = _bounds((0.0, 1.0), bounds, named, ("from", "to"))
    wrong = jnp.asarray(low).astype(jnp.float64) > jnp.asarray(high).astype(jnp.float64)
    check(wrong, wrong.astype(jnp.int64), "uniform_ expects to return a [from, to) range, but found from > to")
    parts = _real_parts(self.dtype)
    if parts is not None:
        empty = jnp.zeros(self.shape, parts)
        return jax.lax.complex(uniform(empty, low, high), uniform(empty, low, high))
    compute = _compute(self.dtype)
    low, high = cast(low, compute), cast(high, compute)
    drawn = (jax.random.uniform(random_key(), self.shape, compute) * (high - low) + low).astype(self.dtype)
    return jnp.where(drawn.astype(compute) < high, drawn, low.astype(self.dtype))  # rounding may reach the open end


def _scaled_normal(shape, mean, std, dtype) -> jax.Array:
    compute = dtype if np.dtype(dtype).kind == "c" else _compute(dtype)
    return (_normal(shape, compute) * cast(std, compute) + cast(mean, compute)).astype(dtype)


@lowering("normal_functional", random=True)
def normal_functional(self, mean=0.0, std=1.0):
    return _scaled_normal(self.shape, mean, std, self.dtype)


@lowering("normal.Tensor_float", random=True)
def normal_tensor_float(mean, std=1.0):
    return _scaled_normal(mean.shape, mean, std, mean.dtype)


@lowering("normal.float_Tensor", random=True)
def normal_float_tensor(mean, std):
    return _scaled_normal(std.shape, mean, std, std.dtype)


@lowering("normal.Tensor_Tensor", random=True)
def normal_tensor_tensor(mean, std):
    (mean, std), result = promote(mean, std)
    return _scaled_normal(jnp.broadcast_shapes(mean.shape, std.shape), mean, std, result)


@lowering("normal.float_float", random=True)
def normal_float_float(mean, std, size, dtype=None):
    return _scaled_normal(size, mean, std, _or_default(dtype))


@lowering("exponential", random=True)
def exponential(self, lambd=1.0):
    compute = _compute(self.dtype)
    # -log of numbers in (0, 1] may be 0, which PyTorch excludes.
    drawn = jnp.maximum(-jnp.log(_open_uniform(self.shape, compute)), jnp.finfo(compute).tiny)
    return (drawn / cast(lambd, compute)).astype(self.dtype)


@lowering("geometric", random=True)
def geometric(self, p):
    compute = _compute(self.dtype)
    trials = jnp.floor(jnp.log(_open_uniform(self.shape, compute)) / jnp.log1p(-cast(p, compute))) + 1
    return trials.astype(self.dtype)


@lowering("log_normal", random=True)
def log_normal(self, mean=1.0, std=2.0):
    return jnp.exp(_scaled_normal(self.shape, mean, std, _compute(self.dtype))).astype(self.dtype)


@lowering("cauchy", random=True)
def cauchy(self, median=0.0, sigma=1.0):
    compute = _compute(self.dtype)
    drawn = jax.random.cauchy(random_key(), self.shape, compute)
    return (drawn * cast(sigma, compute) + cast(median, compute)).astype(self.dtype)


def _largest(dtype: np.dtype) -> int:
    """The last integer that ``random_`` draws: all of an integer type, and where a float still counts in ones."""
    if dtype == np.bool_:
        return 1
    if jnp.issubdtype(dtype, jnp.floating):
        return 2 ** (jnp.finfo(dtype).nmant + 1)
    return jnp.iinfo(dtype).max


def _up_to(shape, low: int, last: int, dtype) -> jax.Array:
    """Uniform integers in [low, last], both included, without ever naming last + 1."""
    if last < 2**63 - 1:
        return _integers(shape, low, last + 1, dtype)
    if low == -(2**63):
        return jax.random.bits(random_key(), tuple(shape), jnp.uint64).astype(dtype)
    return (_integers(shape, low - 1, last, jnp.int64) + 1).astype(dtype)


@lowering("random", random=True)
def random(self):
    return _up_to(self.shape, 0, min(_largest(self.dtype), 2**63 - 1), self.dtype)


@lowering("random.to", random=True)
def random_to(self, to):
    return _integers(self.shape, 0, to, self.dtype)


@lowering("random.from", random=True)
def random_from(self, *bounds, **named):
    low, high = _bounds((None, None), bounds, named, ("from", "to"))
    if high is None:
        return _up_to(self.shape, low, min(_largest(self.dtype), 2**63 - 1), self.dtype)
    return _integers(self.shape, low, high, self.dtype)


@lowering("multinomial", random=True)
def multinomial(self, num_samples, replacement=False):
    if not jnp.issubdtype(self.dtype, jnp.floating):
        raise RuntimeError(f"multinomial only supports floating-point dtypes for input, got: {self.dtype}")
    if num_samples <= 0 or (not replacement and num_samples > self.shape[-1]):
        raise RuntimeError(f"cannot draw {num_samples} samples from {self.shape[-1]} categories")
    if self.shape[-1] > 2**24:
        raise RuntimeError("number of categories cannot exceed 2^24")
    p = self.astype(_compute(self.dtype))
    row = jnp.arange(self.size, dtype=jnp.int32).reshape(self.shape)
    message = "probability tensor contains either `inf`, `nan` or element < 0 (element {value})"
    check(~(jnp.isfinite(p) & (p >= 0)), row, message)
    check(~(p.sum(-1) > 0), row[..., 0], "invalid multinomial distribution (sum of probabilities <= 0)")
    if replacement:
        logits = jnp.log(p)
        shape = (*p.shape[:-1], num_samples)
        return jax.random.categorical(random_key(), logits[..., None, :], shape=shape).astype(jnp.int64)
    # Exponential races: the first arrivals are a sample without replacement, and impossible ones never arrive.
    _, winners = jax.lax.top_k(p / exponential(p), num_samples)
    return winners.astype(jnp.int64)


@lowering("poisson", random=True)
def poisson(self):
    return jax.random.poisson(random_key(), self.astype(_compute(self.dtype)), self.shape, jnp.int64).astype(self.dtype)


@lowering("binomial", random=True)
def binomial(count, prob):
    compute = _compute(count.dtype)
    shape = jnp.broadcast_shapes(count.shape, prob.shape)
    drawn = jax.random.binomial(random_key(), count.astype(compute), prob.astype(compute), shape, compute)
    return drawn.astype(count.dtype)


@lowering("native_dropout", random=True)
def native_dropout(input, p, train=None):
    if train is False:
        return input, jnp.ones(input.shape, bool)
    compute = _compute(input.dtype)
    keep = 1 - cast(p, compute)
    mask = _bernoulli(input.shape, keep)
    scale = jnp.where(keep > 0, 1 / keep, 0)
    return jnp.where(mask, input.astype(compute) * scale, 0).astype(input.dtype), mask


@lowering("native_dropout_backward")
def native_dropout_backward(grad_output, mask, scale):
    (grad, factor), result = promote(grad_output, scale)
    return cast(jnp.where(mask, grad * factor, 0), result)


@lowering("_fused_dropout", random=True)
def fused_dropout(self, p):
    """The older form, in which ``p`` is the probability to keep."""
    out, mask = native_dropout(self, 1 - p)
    return out, mask.astype(jnp.uint8)


@lowering("_masked_scale")
def masked_scale(self, mask, scale):
    return native_dropout_backward(self, mask.astype(bool), scale)


@lowering("_standard_gamma", random=True)
def standard_gamma(self):
    return jax.random.gamma(random_key(), self.astype(_compute(self.dtype))).astype(self.dtype)


@lowering("_standard_gamma_grad")
def standard_gamma_grad(self, output):
    compute = _compute(self.dtype)
    return jax.lax.random_gamma_grad(self.astype(compute), output.astype(compute)).astype(self.dtype)


@lowering("_sample_dirichlet", random=True)
def sample_dirichlet(self):
    return jax.random.dirichlet(random_key(), self.astype(_compute(self.dtype))).astype(self.dtype)
