"""Which failures of a sweep belong to a family file."""

from __future__ import annotations

import functools
from unittest import mock

import checker
import torch

from torchtpu.lowering.registry import find, overloads

__all__ = ["failures"]


def failures(entry: str, families: set[str], dtypes: tuple[torch.dtype, ...], limit: int = 4) -> list[str]:
    """Failures of an op_db entry in the operators that these family files register, as ``"overload: error"``."""

    def ours(name: str) -> bool:
        lowering = find(name)
        return lowering is not None and lowering.function.__module__.rsplit(".", 1)[-1] in families

    # Other families' operators have tests of their own: leaving them out halves the time.
    only = {name.split(".")[0] for name in overloads() if ours(name)}
    with mock.patch.object(checker, "CheckLowerings", functools.partial(checker.CheckLowerings, only)):
        mode = checker.sweep(entry, dtypes, limit=limit)
    assert any(ours(name) for name in mode.seen), f"{entry} reaches no operator of {families}"
    return [f"{name}: {str(error)[:300]}" for name, error, _, _ in mode.failures if ours(name)]
