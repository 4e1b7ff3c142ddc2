"""Time two ways to do the same thing, taking turns, so that a busy machine slows both."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Measure", "interleave", "markdown"]


@dataclass
class Measure:
    """One comparison.

    Attributes:
        name: what was done.
        unit: of the times.
        ours, theirs: the least time of the device and of what it is compared with. A busy machine disturbs it least.
        ours_median, theirs_median: the median times.
        goal: the largest ratio wanted, if there is one.
        note: what else was seen.
    """

    name: str
    unit: str
    ours: float
    theirs: float
    ours_median: float
    theirs_median: float
    goal: float | None = None
    note: str = ""

    @property
    def ratio(self) -> float:
        """Least time by least time."""
        return self.ours / self.theirs

    def as_dict(self) -> dict[str, Any]:
        """For a JSON file."""
        return asdict(self) | {"ratio": self.ratio}


def interleave(
    name: str,
    ours: Callable[[], object],
    theirs: Callable[[], object],
    *,
    rounds: int = 7,
    calls: int = 1,
    unit: str = "ms",
    settle: Callable[[], object] | None = None,
    goal: float | None = None,
) -> Measure:
    """Run each side in turn; the first round of both warms up and does not count.

    Args:
        name: of the measure.
        ours, theirs: the two sides.
        rounds: turns of each side that count.
        calls: calls in one turn; the time is per call.
        unit: "us", "ms" or "s".
        settle: called after a turn of `ours`, outside the time: waits for what was enqueued.
        goal: the largest ratio wanted.
    """
    scale = {"us": 1e6, "ms": 1e3, "s": 1.0}[unit]
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds + 1):
        for function, found in zip((ours, theirs), times, strict=True):
            start = time.perf_counter()
            for _ in range(calls):
                function()
            seconds = time.perf_counter() - start
            if function is ours and settle is not None:
                settle()
            if turn:
                found.append(seconds / calls * scale)
    a, b = times
    return Measure(name, unit, min(a), min(b), statistics.median(a), statistics.median(b), goal)


def markdown(title: str, measures: list[Measure], sides: tuple[str, str] = ("tpu", "PyTorch CPU")) -> str:
    """A section with a table."""
    lines = [
        f"## {title}",
        "",
        f"| | {sides[0]} least / median | {sides[1]} least / median | ratio | goal |",
        "|---|---:|---:|---:|---:|",
    ]
    for m in measures:
        goal = "" if m.goal is None else f"{m.goal:g}" + (" reached" if m.ratio <= m.goal else " **missed**")
        ours, theirs = (
            f"{m.ours:.3g} / {m.ours_median:.3g} {m.unit}",
            f"{m.theirs:.3g} / {m.theirs_median:.3g} {m.unit}",
        )
        lines.append(f"| {m.name} | {ours} | {theirs} | {m.ratio:.2f} | {goal} |")
    notes = [f"- {m.name}: {m.note}." for m in measures if m.note]
    return "\n".join([*lines, *(["", *notes] if notes else []), ""])
