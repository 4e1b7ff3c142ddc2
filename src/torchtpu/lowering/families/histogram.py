"""Histograms with edges: over one dimension (``histogram``) and over several (``histogramdd``)."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np

from torchtpu.lowering.families.creation import evenly_spaced
from torchtpu.lowering.registry import lowering


def _edges(x, count: int, low, high):
    """Edges of ``count`` equal bins between bounds, which are the data's own where none are given."""
    half = np.asarray(0.5, x.dtype)
    if low is None:
        low, high = (x.min(), x.max()) if x.size else (jnp.zeros((), x.dtype), jnp.ones((), x.dtype))
    low, high = jnp.asarray(low, x.dtype), jnp.asarray(high, x.dtype)
    same = low == high
    return evenly_spaced(jnp.where(same, low - half, low), jnp.where(same, high + half, high), count + 1, x.dtype)


def _places(x, edges):
    """The bin of each value, -1 outside; the last bin holds its upper edge too."""
    place = jnp.searchsorted(edges, x, side="right").astype(np.int32) - 1
    place = jnp.where(x == edges[-1], edges.size - 2, place)
    return jnp.where((x >= edges[0]) & (x <= edges[-1]), place, -1)


def _count(points, edges, weight, density):
    """Histogram of points [n, d] in the grid of edges."""
    sizes = tuple(e.size - 1 for e in edges)
    place, inside = jnp.zeros(points.shape[0], np.int32), jnp.ones(points.shape[0], bool)
    for d, e in enumerate(edges):
        at = _places(points[:, d], e)
        place, inside = place * sizes[d] + at, inside & (at >= 0)
    amount = jnp.ones(points.shape[0], points.dtype) if weight is None else weight.reshape(-1)
    total = math.prod(sizes)
    hist = jnp.zeros(total + 1, points.dtype).at[jnp.where(inside, place, total)].add(amount)[:total].reshape(sizes)
    if density:
        hist = hist / hist.sum()
        for d, e in enumerate(edges):
            hist = hist / jnp.diff(e).reshape([-1 if i == d else 1 for i in range(len(sizes))])
    return hist


def _grid(self, bins, range):
    points = self.reshape(-1, self.shape[-1])
    bounds = (
        [(None, None)] * len(bins) if range is None else [(range[2 * i], range[2 * i + 1]) for i, _ in enumerate(bins)]
    )
    return points, [_edges(points[:, d], n, *bounds[d]) for d, n in enumerate(bins)]


@lowering("histogram.bin_ct")
def histogram_count(self, bins=100, range=None, weight=None, density=False):
    points, edges = _grid(self.reshape(-1, 1), [bins], range)
    return _count(points, edges, weight, density), edges[0]


@lowering("histogram.bins_tensor")
def histogram_edges(self, bins, weight=None, density=False):
    return _count(self.reshape(-1, 1), [bins], weight, density), bins


@lowering("_histogramdd_bin_edges")
def histogramdd_bin_edges(self, bins, range=None, weight=None, density=False):
    return _grid(self, bins, range)[1]


@lowering("_histogramdd_from_bin_cts")
def histogramdd_from_bin_counts(self, bins, range=None, weight=None, density=False):
    return _count(*_grid(self, bins, range), weight, density)


@lowering("_histogramdd_from_bin_tensors")
def histogramdd_from_bin_tensors(self, bins, weight=None, density=False):
    return _count(self.reshape(-1, self.shape[-1]), bins, weight, density)
