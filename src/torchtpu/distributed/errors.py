"""What goes wrong between ranks, said in full."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

__all__ = ["CollectiveError", "CollectiveTimeout", "MismatchError", "check_splits"]


class CollectiveError(dist.DistBackendError):
    """A collective failed: a rank died, or a connection broke. The message says what every rank was doing."""


class CollectiveTimeout(CollectiveError):
    """A collective did not finish in time."""


class MismatchError(CollectiveError):
    """The ranks of a group called different collectives, or the same one with other sizes or dtypes."""


def check_splits(table: Sequence[Sequence[int]]) -> None:
    """Refuse, on every rank alike, an all_to_all in which somebody expects another number of elements than is sent.

    Args:
        table: for each rank, how many elements it sends to each, then how many it expects from each.

    Raises:
        MismatchError: they do not fit.
    """
    ranks = len(table)
    for sender, row in enumerate(table):
        for receiver, sent in enumerate(row[:ranks]):
            expected = table[receiver][ranks + sender]
            if sent != expected:
                raise MismatchError(
                    f"rank {sender} of the group sends {sent} elements to rank {receiver}, which expects {expected}: "
                    "input_split_sizes and output_split_sizes do not fit"
                )
