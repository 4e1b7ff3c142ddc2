"""Sampling at coordinates given by a tensor: ``grid_sample``, and the affine grid that feeds it."""

from __future__ import annotations

import itertools
import math

import jax
import jax.numpy as jnp

from torchtpu.lowering.precision import accumulator, einsum
from torchtpu.lowering.promotion import cast
from torchtpu.lowering.registry import lowering

_BILINEAR, _NEAREST, _BICUBIC = range(3)
_ZEROS, _BORDER, _REFLECTION = range(3)


def _unnormalize(x, size: int, align: bool):
    """[-1, 1] to element coordinates; the ends are centres of the corner elements, or their outer edges."""
    return (x + 1) / 2 * (size - 1) if align else ((x + 1) * size - 1) / 2


def _reflect(x, size: int, align: bool):
    low, high = (0, 2 * (size - 1)) if align else (-1, 2 * size - 1)
    if low == high:
        return jnp.zeros_like(x)
    start, span = low / 2, (high - low) / 2
    x = jnp.abs(x - start)
    extra = jnp.fmod(x, jnp.asarray(span, x.dtype))
    flips = jnp.floor(x / span)
    return jnp.where(flips % 2 == 0, extra + start, span - extra + start)


def _pad(x, size: int, padding: int, align: bool):
    if padding == _BORDER:
        return jnp.clip(x, 0, size - 1)
    if padding == _REFLECTION:
        return jnp.clip(_reflect(x, size, align), 0, size - 1)
    return x


def _read(image, at):
    """Elements of ``image`` (C, *sizes) at float coordinates ``at`` (one array for each dimension); 0 outside."""
    sizes = image.shape[1:]
    # Written so that NaN is outside.
    inside = jnp.stack([(a >= 0) & (a <= n - 1) for a, n in zip(at, sizes, strict=True)]).all(0)
    where = [jnp.where(inside, a, 0).astype(jnp.int32) for a in at]
    flat = where[0]
    for n, a in zip(sizes[1:], where[1:], strict=True):
        flat = flat * n + a
    return jnp.where(inside, jnp.take(image.reshape(image.shape[0], math.prod(image.shape[1:])), flat, axis=1), 0)


def _linear(image, at):
    low = [jax.lax.stop_gradient(jnp.floor(a)) for a in at]
    total = 0
    for corner in itertools.product((0, 1), repeat=len(at)):
        weight = 1
        for a, b, c in zip(at, low, corner, strict=True):
            weight = weight * ((a - b) if c else (b + 1 - a))
        total = total + weight * _read(image, [b + c for b, c in zip(low, corner, strict=True)])
    return total


def _cubic_weights(t):
    a = -0.75

    def near(x):
        return ((a + 2) * x - (a + 3)) * x * x + 1

    def far(x):
        return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a

    return far(t + 1), near(t), near(1 - t), far(2 - t)


def _sample(image, grid, mode: int, padding: int, align: bool):
    """One image (C, *sizes) at ``grid`` (*out, dims); the grid's last axis counts dimensions from the last one."""
    sizes = image.shape[1:]
    raw = [_unnormalize(grid[..., len(sizes) - 1 - d], n, align) for d, n in enumerate(sizes)]
    if mode == _BICUBIC:
        low = [jax.lax.stop_gradient(jnp.floor(a)) for a in raw]
        weights = [_cubic_weights(a - b) for a, b in zip(raw, low, strict=True)]
        total = 0
        for i, j in itertools.product(range(4), repeat=2):
            at = [_pad(b + k - 1, n, padding, align) for b, k, n in zip(low, (i, j), sizes, strict=True)]
            total = total + weights[0][i] * weights[1][j] * _read(image, at)
        return total
    at = [_pad(a, n, padding, align) for a, n in zip(raw, sizes, strict=True)]
    if mode == _NEAREST:
        return _read(image, [jax.lax.stop_gradient(jnp.round(a)) for a in at])
    return _linear(image, at)


def _grid_sampler(input, grid, mode, padding, align):
    wide = accumulator(input.dtype)
    return jax.vmap(lambda i, g: _sample(i, g, mode, padding, align))(cast(input, wide), cast(grid, wide))


@lowering("grid_sampler_2d", "grid_sampler_3d", "grid_sampler", "_grid_sampler_2d_cpu_fallback")
def grid_sampler(input, grid, interpolation_mode, padding_mode, align_corners):
    return cast(_grid_sampler(input, grid, interpolation_mode, padding_mode, align_corners), input.dtype)


@lowering("grid_sampler_2d_backward", "grid_sampler_3d_backward")
def grid_sampler_backward(
    grad_output, input, grid, interpolation_mode, padding_mode, align_corners, output_mask=(True, True)
):
    wide = accumulator(input.dtype)

    def sample(i, g):
        return _grid_sampler(i, g, interpolation_mode, padding_mode, align_corners)

    _, pull = jax.vjp(sample, cast(input, wide), cast(grid, wide))
    grad_input, grad_grid = pull(cast(grad_output, wide))
    return cast(grad_input, input.dtype) if output_mask[0] else None, cast(grad_grid, grid.dtype)


def _base_grid(size, align: bool, dtype):
    """Homogeneous coordinates (*size, dims + 1) in [-1, 1], last dimension first."""
    axes = []
    for n in size:
        at = jnp.linspace(-1, 1, n, dtype=dtype) if n > 1 else jnp.zeros((n,), dtype)
        axes.append(at if align or n <= 1 else at * jnp.asarray((n - 1) / n, dtype))
    mesh = jnp.meshgrid(*axes, indexing="ij")
    return jnp.stack([*reversed(mesh), jnp.ones(tuple(size), dtype)], axis=-1)


@lowering("affine_grid_generator")
def affine_grid_generator(theta, size, align_corners):
    base = _base_grid(list(size)[2:], align_corners, accumulator(theta.dtype))
    out = einsum("sk,nck->nsc", base.reshape(-1, base.shape[-1]), cast(theta, base.dtype))
    return cast(out, theta.dtype).reshape(theta.shape[0], *list(size)[2:], theta.shape[1])


@lowering("affine_grid_generator_backward")
def affine_grid_generator_backward(grad, size, align_corners):
    base = _base_grid(list(size)[2:], align_corners, accumulator(grad.dtype))
    flat = cast(grad, base.dtype).reshape(grad.shape[0], -1, grad.shape[-1])
    return cast(einsum("nsc,sk->nck", flat, base.reshape(-1, base.shape[-1])), grad.dtype)
