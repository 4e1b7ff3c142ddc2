"""Host time of one operator call: what Python and the dispatcher cost before the device computes anything."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.measure import Measure, interleave

__all__ = ["measure_operators"]


def _cases(device: str) -> dict[str, Callable[[], object]]:
    x, y = torch.ones(8, 8, device=device), torch.ones(8, 8, device=device)
    target = torch.ones(8, 8, device=device)
    index = torch.tensor([0, 3, 5], device=device)
    return {
        "add": lambda: x + y,
        "mul by a number": lambda: x * 1.5,
        "add in place": lambda: target.add_(y),
        "view": lambda: x.view(64),
        "transpose": lambda: x.t(),
        "slice": lambda: x[2:5],
        "add of a slice": lambda: x[2:5] + y[2:5],
        "mm": lambda: x @ y,
        "sum": lambda: x.sum(),
        "softmax": lambda: torch.softmax(x, 1),
        "index_select": lambda: x.index_select(0, index),
        "cat": lambda: torch.cat([x, y]),
        "copy into": lambda: target.copy_(x),
        "empty": lambda: torch.empty(8, 8, device=device),
        "zeros": lambda: torch.zeros(8, 8, device=device),
    }


def measure_operators(mode: str, calls: int = 300, rounds: int = 9) -> list[Measure]:
    """Small operators in an eager mode, enqueued or recorded without waiting, against the same on the CPU."""
    goals = {"add": 12.0} if mode == "strict" else {}
    ours, theirs = _cases("tpu"), _cases("cpu")
    found = []
    with torch.no_grad(), torch.tpu.set_eager_mode(mode):
        for name in ours:
            found.append(
                interleave(
                    name,
                    ours[name],
                    theirs[name],
                    rounds=rounds,
                    calls=calls,
                    unit="us",
                    settle=torch.tpu.synchronize,
                    goal=goals.get(name),
                )
            )
    return found
