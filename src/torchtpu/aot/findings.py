"""What wastes the chip, each with the line of the model it comes from and what to change."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from torchtpu.aot.blocks import find_loops
from torchtpu.aot.count import Counts
from torchtpu.aot.findings_communication import communication, replicated
from torchtpu.aot.findings_context import Context, Places, merge
from torchtpu.aot.findings_graph import gathers, host, integers, unsupported
from torchtpu.aot.findings_memory import layouts, padding, unsharded
from torchtpu.aot.findings_products import attention, dtypes, heads, tiles
from torchtpu.aot.graph import Graph
from torchtpu.aot.hlo import Hlo
from torchtpu.aot.report import Finding
from torchtpu.aot.roofline import Prediction
from torchtpu.aot.step import Step
from torchtpu.aot.topology import Topology

__all__ = ["find", "refused"]

SMALL = 2e-3
"""Share of the step or of HBM below which a finding is left out if there are larger ones of its kind."""
NEGLIGIBLE = 1e-3
"""Share below which it is left out always."""
_FIRST = ("unsupported", "host")
"""What keeps a model off the chip comes before what wastes it."""


def find(
    step: Step, counts: Counts, hlo: Hlo | None, prediction: Prediction | None, topology: Topology
) -> list[Finding]:
    """The findings on a step, the costliest first.

    Args:
        step: the step; ``step.evaluator.scopes`` maps scopes to operators of the graph.
        counts: of its jaxpr; empty if the step could not be lowered.
        hlo: what was compiled; None if it was not.
        prediction: its times; None likewise, and shares are then of what the counted operations take.
        topology: the machine.
    """
    ctx = Context(step, counts, hlo, prediction, topology)
    if not counts.ops:
        return _ordered(_worth_telling(merge([*unsharded(ctx), *host(ctx), *unsupported(ctx)])))
    searches = [tiles, heads, padding, layouts, dtypes, integers, gathers, attention, unsharded, replicated]
    found = itertools.chain.from_iterable(search(ctx) for search in [*searches, host, communication, unsupported])
    return _ordered(_worth_telling(merge(found)))


def refused(graph: Graph) -> list[Finding]:
    """What keeps a model off the chip: operators without a form for TPUs, on the host, or with results of open size.

    Nothing has to be lowered for it, and a plan does not matter.

    Args:
        graph: the model.
    """
    places = Places(graph, find_loops(graph))
    return _ordered(merge([*unsupported(places), *host(places)]))


def _worth_telling(findings: Iterable[Finding]) -> list[Finding]:
    kept = [f for f in findings if f.cost is None or f.cost >= NEGLIGIBLE]
    large = {f.kind for f in kept if f.cost is None or f.cost >= SMALL}
    return [f for f in kept if f.cost is None or f.cost >= SMALL or f.kind not in large]


def _ordered(findings: list[Finding]) -> list[Finding]:
    def rank(f: Finding) -> tuple[int, float]:
        return _FIRST.index(f.kind) if f.kind in _FIRST else len(_FIRST), -(f.cost or 0.0)

    return sorted(findings, key=rank)
