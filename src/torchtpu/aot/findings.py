"""What wastes the chip, each with the line of the model it comes from and what to change."""

from __future__ import annotations

from torchtpu.aot.count import Counts
from torchtpu.aot.hlo import Hlo
from torchtpu.aot.report import Finding
from torchtpu.aot.roofline import Prediction
from torchtpu.aot.step import Step
from torchtpu.aot.topology import Topology

__all__ = ["find"]


def find(
    step: Step, counts: Counts, hlo: Hlo | None, prediction: Prediction | None, topology: Topology
) -> list[Finding]:
    """The findings on a step, the costliest first.

    Args:
        step: the step; ``step.evaluator.scopes`` maps scopes to operators of the graph.
        counts: of its jaxpr.
        hlo: what was compiled; None if it was not.
        prediction: its times; None likewise.
        topology: the machine.
    """
    return []
