"""Compiled traces, found by what was recorded."""

from __future__ import annotations

import warnings
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from torchtpu.eager import growth
from torchtpu.eager.executable import Variant, build, needed_first
from torchtpu.eager.program import Program
from torchtpu.runtime import meshes
from torchtpu.runtime.compiler import statistics as compiler_statistics
from torchtpu.runtime.observe import log

if TYPE_CHECKING:
    from torchtpu.eager.trace import Trace

__all__ = ["RecompileWarning", "TraceCache"]


WORTH_A_WARNING = 16
"""Traces of fewer operators compile in no time; trying things out in a shell makes many."""
SHORT_GROWS_AFTER = 3
"""Compiles of a trace shorter than that for different sizes, after which it is compiled for buckets."""
PLANS_KEPT = 64
"""Of one trace: what is wanted and what is free hardly changes from one run to the next."""
WARNINGS = 3
"""Recompile warnings for traces that begin with one operator; text that grows by a token a step would give hundreds."""


class RecompileWarning(UserWarning):
    """A trace was compiled anew although it nearly equals an earlier one."""


@dataclass(frozen=True)
class Plan:
    """How a trace runs.

    Attributes:
        variant: the executable.
        positions: which of its results are those wanted; None: all, in order.
        more_bytes: how much more memory than tensors hold before is in use while it runs.
    """

    variant: Variant
    positions: tuple[int, ...] | None
    more_bytes: int


@dataclass
class _Known:
    """A trace that has been compiled, and the plans made for it: by what was wanted, free and waited for."""

    programs: list[Program]
    variants: list[Variant] = field(default_factory=list)
    plans: dict[tuple[bytes, bytes, int], Plan] = field(default_factory=dict)


class TraceCache:
    """Finds the executable of a trace, or compiles it and says why it had to."""

    def __init__(self) -> None:
        self.known: dict[bytes, _Known] = {}
        self.by_head: dict[str, deque[list[Program]]] = {}
        self.counts: Counter[str] = Counter()
        self.misses: deque[str] = deque(maxlen=32)
        self.warned: Counter[str] = Counter()

    def find(
        self, trace: Trace, placement: meshes.Placement | None, wanted: bytes, free: bytes, urgent: int = -1
    ) -> Plan:
        """How to run a trace.

        Args:
            trace: what was recorded.
            placement: where it runs if not on one device.
            wanted: numbers of the results that something refers to, as int32.
            free: positions of the arrays that nothing but the trace refers to, as int32.
            urgent: number of the result that Python waits for; -1 where it waits for none or for all.
        """
        self.counts["flushes"] += 1
        self.counts["operators"] += len(trace.programs)
        key = trace.key()
        if placement is not None:
            key += repr(placement.key).encode()
        known = self.known.get(key)
        plan = None if known is None else known.plans.get((wanted, free, urgent))
        if plan is not None:
            self.counts["cache_hits"] += 1
            return plan
        need, may = (tuple(np.frombuffer(given, np.int32).tolist()) for given in (wanted, free))
        first: frozenset[int] = frozenset()
        if placement is not None:  # an array that is copied to every device stays whose it is
            may = tuple(i for i in may if placement.lies[i] is not None)
        elif urgent >= 0:
            first = needed_first(trace, urgent)
        variant = self._variant(key, known, trace, placement, need, may, first)
        known = self.known[key]
        numbers = list(variant.sizes)
        positions = None if numbers == list(need) else tuple(numbers.index(i) for i in need)
        more = variant.working_memory - sum(variant.sizes[i] for i in need) + sum(trace.arrays[i].nbytes for i in may)
        if len(known.plans) >= PLANS_KEPT:
            known.plans.clear()
        plan = known.plans[wanted, free, urgent] = Plan(variant, positions, more)
        return plan

    def _variant(
        self,
        key: bytes,
        known: _Known | None,
        trace: Trace,
        placement: meshes.Placement | None,
        wanted: tuple[int, ...],
        free: tuple[int, ...],
        first: frozenset[int],
    ) -> Variant:
        """The executable for a trace, compiled if there is none."""
        need, may = frozenset(wanted), frozenset(free)
        if known is not None:
            for variant in known.variants:
                if first and variant.first != first:
                    continue
                # Computing more than is needed is cheaper than compiling again; memory still in use must not be taken.
                if variant.donated <= may and need <= variant.sizes.keys():
                    self.counts["cache_hits"] += 1
                    return variant
        self._explain(trace, placement, known)
        variant = build(trace, placement, wanted, free, first)
        if known is None:
            known = self.known[key] = _Known(list(trace.programs))
            self.by_head.setdefault(_head(trace, placement), deque(maxlen=8)).append(known.programs)
        known.variants.append(variant)
        return variant

    def _explain(self, trace: Trace, placement: meshes.Placement | None, known: _Known | None) -> None:
        """Note why a trace is compiled; warn if one of the same operators has been compiled before."""
        length = len(trace.programs)
        if known is not None:
            self._miss(f"{length} operators seen before, but other results of them are still referenced or waited for")
            return
        head = _head(trace, placement)
        best: tuple[int, list[Program]] | None = None
        for earlier in self.by_head.get(head, ()):
            same = sum(a.name == b.name for a, b in zip(earlier, trace.programs, strict=False))
            if best is None or same >= best[0]:  # the latest of those equally alike
                best = same, earlier
        if best is None or best[0] < 0.5 * max(length, len(best[1])):
            self._miss(f"{length} operators not seen before, the first is {trace.programs[0].name}")
            return
        reason = _difference(best[1], trace.programs)
        self._miss(reason)
        if best[0] < max(length, len(best[1])):
            return
        # The same operators: other sizes or other constants.
        if length >= WORTH_A_WARNING or self._often(trace, head):
            apart = [(a, b) for a, b in zip(best[1], trace.programs, strict=True) if a is not b]
            explained = [growth.explains(a, b) for a, b in apart] if meshes.may_grow(placement) else [False]
            if apart and all(explained):
                return  # the next sizes will need no compile
        if length >= WORTH_A_WARNING:
            self.warned[trace.programs[0].name] += 1
            often = self.warned[trace.programs[0].name]
            if often <= WARNINGS:
                last = " (further ones are only counted: torch.tpu.compile_stats())" if often == WARNINGS else ""
                warnings.warn(f"torchtpu compiles again: {reason}{last}", RecompileWarning, stacklevel=2)

    def _often(self, trace: Trace, head: str) -> bool:
        """Whether a short trace has been compiled for several sizes; it may take some before that pays."""
        names = [p.name for p in trace.programs]
        alike = sum([p.name for p in earlier] == names for earlier in self.by_head[head])
        return alike >= SHORT_GROWS_AFTER

    def _miss(self, reason: str) -> None:
        self.misses.append(reason)
        log.info("compiles because: %s", reason)

    def statistics(self) -> dict[str, Any]:
        """The counters, and the reasons of the latest compiles of traces."""
        return {
            "compiles": compiler_statistics.compiles,
            "compile_seconds": compiler_statistics.compile_seconds,
            "compile_processor_seconds": compiler_statistics.compile_processor_seconds,
            "disk_hits": compiler_statistics.disk_hits,
            "disk_seconds": compiler_statistics.disk_seconds,
            "cache_hits": self.counts["cache_hits"],
            "flushes": self.counts["flushes"],
            "operators": self.counts["operators"],
            "misses": list(self.misses),
        }


def _head(trace: Trace, placement: meshes.Placement | None) -> str:
    """What traces are compared by: the first operator, and the mesh if it runs on one."""
    where = "" if placement is None else f" on {dict(placement.mesh.shape)}"
    return trace.programs[0].name + where


def _difference(earlier: list[Program], now: list[Program]) -> str:
    """Where two traces part, in words."""
    for i, (a, b) in enumerate(zip(earlier, now, strict=False)):
        if a is b:
            continue
        place = f"operator {i + 1} of {len(now)}"
        if a.name != b.name:
            return f"{place} is {b.name} where it was {a.name}"
        if a.describes != b.describes:
            return f"{place}, {b.name}, got {', '.join(b.describes)} where it had {', '.join(a.describes)}"
        return f"{place}, {b.name}, was called with other constant arguments"
    if len(earlier) != len(now):
        return f"{len(now)} operators where there were {len(earlier)}"
    return "the same operators on other results of each other"
