"""Results that are views, where sizes change.

PyTorch makes a result that is a view of an input, or of another result, again from that tensor. Where the view depends
on a size that changes, it takes sizes, strides and offset from what the graph returned: that has to be the view itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchtpu.compile.padding_layout import evaluate, expression

__all__ = ["Aliases"]


@dataclass(frozen=True)
class _View:
    """Result ``result`` is a window on an input or on another result."""

    result: int
    base: int
    of_input: bool
    size: tuple[Any, ...]
    stride: tuple[Any, ...]
    offset: Any


class Aliases:
    """The results of a graph that are views in which a size changes.

    Args:
        placeholders, results: the nodes of its inputs and results.
    """

    def __init__(self, placeholders: Sequence[torch.fx.Node], results: Sequence[Any]) -> None:
        given = [n.meta.get("val") for n in placeholders]
        made = [n.meta.get("val") if isinstance(n, torch.fx.Node) and n not in placeholders else None for n in results]
        bases = [(v, i, True) for i, v in enumerate(given) if isinstance(v, torch.Tensor)]
        bases += [(v, i, False) for i, v in enumerate(made) if isinstance(v, torch.Tensor) and _is_whole(v)]
        self.sources: list[tuple[Any, int, int | None]] = [
            (expression(v), i, None) for i, v in enumerate(given) if isinstance(v, torch.SymInt)
        ]
        self.sources += [
            (expression(n), i, d)
            for i, v in enumerate(given)
            if isinstance(v, torch.Tensor)
            for d, n in enumerate(v.shape)
            if isinstance(n, torch.SymInt)
        ]
        known = {s for s, _, _ in self.sources if s.is_Symbol}
        self.views: list[_View] = []
        for k, value in enumerate(made):
            if not isinstance(value, torch.Tensor):
                continue
            window = (*value.shape, *value.stride(), value.storage_offset())
            if not any(isinstance(n, torch.SymInt) for n in window):
                continue
            size, stride = tuple(map(expression, value.shape)), tuple(map(expression, value.stride()))
            for base, position, of_input in bases:
                if base is value or not _shares(base, value) or base.dtype is not value.dtype:
                    continue
                offset = expression(value.storage_offset()) - expression(base.storage_offset())
                free = set().union(*(n.free_symbols for n in (*size, *stride, offset) if not isinstance(n, int)))
                if offset != 0 and free <= known:
                    self.views.append(_View(k, position, of_input, size, stride, offset))
                    break

    def restore(self, inputs: Sequence[Any], results: list[Any]) -> None:
        """Replace results by the views that they stand for."""
        if not self.views:
            return
        counts = {s: int(inputs[i]) if d is None else inputs[i].shape[d] for s, i, d in self.sources if s.is_Symbol}
        for v in self.views:
            base = (inputs if v.of_input else results)[v.base]
            size, stride = ([evaluate(n, counts) for n in ns] for ns in (v.size, v.stride))
            results[v.result] = base.as_strided(size, stride, base.storage_offset() + evaluate(v.offset, counts))


def _is_whole(a: torch.Tensor) -> bool:
    """Whether a tensor is all of its storage."""
    return bool(expression(a.numel()) * a.dtype.itemsize == expression(a.untyped_storage().nbytes()))


def _shares(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata
