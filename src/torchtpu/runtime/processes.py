"""The processes of a job, as torchrun (or another launcher) describes them in the environment."""

from __future__ import annotations

import os
from dataclasses import dataclass

__all__ = ["Job", "job"]


@dataclass(frozen=True)
class Job:
    """One process's place among those of a job.

    Attributes:
        rank, size: this process, and how many there are.
        local_rank, local_size: the same among those of this host.
        address, port: where the job's store is.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str
    port: int


def job() -> Job | None:
    """The job that this process belongs to; None if it runs alone.

    Raises:
        ValueError: the variables contradict each other or are no numbers.
    """
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    found = [os.environ.get(name) for name in names]
    if None in found:
        return None
    numbers = {}
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        value = os.environ.get(name)
        if value is not None:
            if not value.isdecimal():
                raise ValueError(f"{name} must be a number, not {value!r}")
            numbers[name] = int(value)
    rank, size = numbers["RANK"], numbers["WORLD_SIZE"]
    local = numbers.get("LOCAL_RANK", rank)
    local_size = numbers.get("LOCAL_WORLD_SIZE", max(local + 1, size if "LOCAL_RANK" not in numbers else 1))
    if not (0 <= rank < size and 0 <= local < local_size):
        raise ValueError(f"RANK={rank} of WORLD_SIZE={size}, LOCAL_RANK={local} of LOCAL_WORLD_SIZE={local_size}")
    if size == 1:
        return None
    return Job(rank, size, local, local_size, os.environ["MASTER_ADDR"], numbers["MASTER_PORT"])
