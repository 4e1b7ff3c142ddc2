"""The processes of a job, as torchrun (or another launcher) describes them in the environment."""

from __future__ import annotations

import os
from dataclasses import dataclass

__all__ = ["Job", "attempt", "job", "libtpu_environment"]


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


def attempt() -> str:
    """What tells the keys of this start of the processes from those of an earlier one in the same store.

    torchrun's agents keep the store when they restart the processes (``--max-restarts``), and what a process that was
    killed has written there stays.
    """
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "WORLD_SIZE")
    return "torchtpu/" + "/".join(os.environ.get(name, "0") for name in names)


_BOUNDS = {4: "2,2,1", 8: "2,4,1"}
_PORT = 8476


def libtpu_environment(job: Job) -> dict[str, str]:
    """Variables with which libtpu gives each process of a host one of its chips, and lets them form one topology.

    They are those of PyTorch/XLA's and JAX's instructions for several processes on one TPU host of 4 or 8 chips.

    Raises:
        RuntimeError: for other numbers of processes, or several hosts: the variables have to be set from outside.
    """
    if job.local_size != job.size or job.local_size not in _BOUNDS:
        raise RuntimeError(
            f"{job.local_size} processes on this host and {job.size} in all: libtpu has to be told which chips each "
            "process uses (TPU_VISIBLE_CHIPS, TPU_CHIPS_PER_PROCESS_BOUNDS, TPU_PROCESS_BOUNDS, TPU_PROCESS_ADDRESSES, "
            "TPU_PROCESS_PORT, CLOUD_TPU_TASK_ID); without that, 4 or 8 processes on one host work"
        )
    return {
        "TPU_VISIBLE_CHIPS": str(job.local_rank),
        "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
        "TPU_PROCESS_BOUNDS": _BOUNDS[job.local_size],
        "TPU_PROCESS_ADDRESSES": ",".join(f"localhost:{_PORT + i}" for i in range(job.local_size)),
        "TPU_PROCESS_PORT": str(_PORT + job.local_rank),
        "CLOUD_TPU_TASK_ID": str(job.local_rank),
    }
