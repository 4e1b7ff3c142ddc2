"""The suites by name: each lists its tasks and yields the cases of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from conformance.case import Case
from conformance.compare import Tolerance

__all__ = ["SUITES", "Suite"]


@dataclass(frozen=True)
class Suite:
    """A database and what is done with it.

    Attributes:
        tasks: gives every (entry, dtype) of the suite.
        cases: gives the cases and tolerances of one.
    """

    tasks: Callable[[], list[tuple[str, str]]]
    cases: Callable[[str, str], tuple[Iterator[Case], Tolerance]]


def _suites() -> dict[str, Any]:
    from conformance.suites import databases, modules, operators, optimizers

    return operators.SUITES | databases.SUITES | modules.SUITES | optimizers.SUITES


SUITES = _suites
"""Call it: importing the databases takes seconds."""
