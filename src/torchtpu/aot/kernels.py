"""FLOPs of Pallas kernels that do not say them: those of JAX's splash attention and megablox, by their formulas."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Kernel", "kernel_flops", "register_kernel"]


@dataclass(frozen=True)
class Kernel:
    """A call of a Pallas kernel.

    Attributes:
        name: of the kernel, or of the function that calls it.
        operands: types of its arguments (``shape`` and ``dtype``).
        results: types of its results.
        values: arguments whose value is known when the program is traced, by position.
        metadata: what the caller noted with it.
    """

    name: str
    operands: Sequence[Any]
    results: Sequence[Any]
    values: Mapping[int, np.ndarray]
    metadata: Mapping[str, Any]


Formula = Callable[[Kernel], tuple[float, str | None]]
_FORMULAS: list[tuple[re.Pattern[str], Formula]] = []


def register_kernel(pattern: str, formula: Formula) -> None:
    """Say how many FLOPs one call of a kernel takes.

    Args:
        pattern: regular expression that the whole name matches.
        formula: Kernel -> (FLOPs on the matrix unit, what had to be assumed as a sentence or None).
    """
    _FORMULAS.append((re.compile(pattern), formula))


def kernel_flops(kernel: Kernel) -> tuple[float, str | None] | None:
    """FLOPs of a kernel and what was assumed; None if no formula is registered for its name."""
    for pattern, formula in _FORMULAS:
        if pattern.fullmatch(kernel.name):
            return formula(kernel)
    return None


_PRODUCTS = {"fwd": (1, 1), "dq": (2, 1), "dkv": (2, 2)}
"""Products of blocks with the width of a query and with the width of a value: forward qk, pv; for dq: qk again, dsk,
do v; for dk and dv: qk again, dsq, do v, p do."""
_BLOCKS = {"fwd": ("block_q", "block_kv"), "dq": ("block_q_dq", "block_kv_dq"), "dkv": ("block_q_dkv", "block_kv_dkv")}


def _splash(kernel: Kernel) -> tuple[float, str | None]:
    """Splash attention: 2 x area x width for each product, over the blocks that the mask leaves.

    A block that the mask covers in part is computed whole. Source: the kernels in
    ``jax/experimental/pallas/ops/tpu/splash_attention/splash_attention_kernel.py``.
    """
    found = re.fullmatch(r"splash_(mha|mqa)_(fwd|dq|dkv).*", kernel.name)
    assert found is not None  # it is registered for this pattern
    q, k, v = [x for x in kernel.operands if np.dtype(x.dtype).kind not in "iub"][:3]
    with_queries, with_values = _PRODUCTS[found[2]]
    if found[2] == "dkv" and any(len(x.shape) > len(q.shape) for x in kernel.results):
        with_queries += 1  # the kernel that makes dq as well, in parts that are added up later
    heads, area, assumed = math.prod(q.shape[:-2]), float(q.shape[-2] * k.shape[-2]), None
    masks = [i for i, x in enumerate(kernel.operands) if len(x.shape) == 3 and np.dtype(x.dtype).kind in "iu"]
    options = json.loads(kernel.metadata.get("xprof_metadata", "{}"))
    sizes = [options.get(name) for name in _BLOCKS[found[2]]]
    if len(masks) > 1 and masks[1] in kernel.values and all(sizes):
        blocks = kernel.values[masks[1]]
        area = int(np.count_nonzero(blocks)) / blocks.shape[0] * sizes[0] * sizes[1]
    else:
        assumed = f"the mask of {kernel.name} is not known when the program is traced: all of its blocks are counted"
    return 2 * heads * area * (with_queries * q.shape[-1] + with_values * v.shape[-1]), assumed


def _grouped(kernel: Kernel) -> tuple[float, str | None]:
    """Megablox gmm, (m, k) by (groups, k, n), and tgmm, (m, k) by (m, n) to (groups, k, n): 2 m k n."""
    left = next(x for x in kernel.operands if np.dtype(x.dtype).kind not in "iub")
    return 2.0 * math.prod(left.shape) * kernel.results[0].shape[-1], None


register_kernel(r"splash_(mha|mqa)_(fwd|dq|dkv).*", _splash)
register_kernel(r"t?gmm", _grouped)
