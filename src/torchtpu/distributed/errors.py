"""What goes wrong between ranks, said in full."""

from __future__ import annotations

import torch.distributed as dist

__all__ = ["CollectiveError", "CollectiveTimeout", "MismatchError"]


class CollectiveError(dist.DistBackendError):
    """A collective failed: a rank died, or a connection broke. The message says what every rank was doing."""


class CollectiveTimeout(CollectiveError):
    """A collective did not finish in time."""


class MismatchError(CollectiveError):
    """The ranks of a group called different collectives, or the same one with other sizes or dtypes."""
