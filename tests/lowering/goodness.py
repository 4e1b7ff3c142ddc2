"""Whether a sample follows a distribution. Seeds are fixed, so a test that passes once always does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from scipy import stats

N = 20_000
"""Enough to reject a normal sample that is shifted by a sixteenth of its standard deviation."""
DOUBT = 1e-4
"""The probability below which a sample is held not to follow the distribution."""


def numbers(sample: torch.Tensor) -> np.ndarray:
    """All elements as float64."""
    return sample.detach().cpu().double().flatten().numpy()


def fits(sample: torch.Tensor, distribution: Any) -> float:
    """Kolmogorov-Smirnov: the probability of a sample as far from the distribution (or its CDF) as this one."""
    cdf: Callable[..., Any] = getattr(distribution, "cdf", distribution)
    return float(stats.kstest(numbers(sample), cdf, method="asymp").pvalue)


def counts_fit(sample: torch.Tensor, probabilities: Sequence[float], first: int = 0) -> float:
    """Chi-squared: the same for integers; ``probabilities`` are those of ``first``, ``first + 1``, ..., and what they
    leave out is that of all larger ones.
    """
    values = numbers(sample)
    assert (values == values.round()).all() and values.min() >= first
    expected = np.append(probabilities, max(0.0, 1 - sum(probabilities))) * len(values)
    places = np.minimum(values - first, len(probabilities)).astype(int)
    seen = np.bincount(places, minlength=len(expected)).astype(float)
    assert (seen[expected < 1e-9] == 0).all()
    rare = expected < 8  # too few for the approximation: they count as one
    seen = np.append(seen[~rare], seen[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    kept = expected > 1e-6
    return float(stats.chisquare(seen[kept], expected[kept], sum_check=False).pvalue)


def pmf(distribution: Any, first: int, last: int) -> list[float]:
    """Probabilities of the integers from ``first`` to ``last``, both included, of a SciPy distribution."""
    return distribution.pmf(np.arange(first, last + 1)).tolist()
