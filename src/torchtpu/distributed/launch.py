"""Joining the processes of a job in one JAX runtime, which XLA's collectives need.

JAX must be told before its client starts. So a process that a launcher started joins when its device starts, and any
other when it makes the default process group, which then has to come before the first tensor on the device.
"""

from __future__ import annotations

import datetime
import socket
from typing import Any

from torchtpu.distributed.transports import chosen
from torchtpu.runtime import devices, processes

__all__ = ["join", "join_at_start", "joined", "leave", "serves"]

_joined: tuple[int, int] | None = None
_store: Any = None
_meeting: Any = None
TIMEOUT = datetime.timedelta(seconds=300)
_KEY = "torchtpu/coordinator"


def join_at_start() -> None:
    """Before the client starts: join the job that the environment describes, if XLA carries its collectives or the
    processes' devices may form a mesh.
    """
    global _store
    job = processes.job()
    if job is None or _joined is not None or not _needed():
        return
    import os

    import torch.distributed as dist

    # The launcher's agent may be the host of the store already; otherwise it is rank 0, as init_process_group does it.
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    _store = dist.TCPStore(
        job.address, job.port, job.size, job.rank == 0 and not agent, TIMEOUT, wait_for_workers=False, multi_tenant=True
    )
    _initialise(dist.PrefixStore(processes.attempt(), _store), job.rank, job.size)
    from torchtpu.distributed.create import start_watch

    start_watch(_store, job.rank)  # at exit this rank waits for the others, process group or not


def join(store: Any, rank: int, size: int) -> None:
    """Join the ranks of the default process group, unless the device has done it.

    Raises:
        RuntimeError: the device runs already, and alone.
    """
    if size == 1 or not _needed():
        return
    if _joined is not None:
        if _joined != (rank, size):
            raise RuntimeError(
                f"the tpu device was started by rank {_joined[0]} of {_joined[1]}, and init_process_group makes it "
                f"rank {rank} of {size}: RANK and WORLD_SIZE must be what init_process_group is given"
            )
        return
    if devices.is_initialised():
        raise RuntimeError(
            "the tpu device was used before init_process_group, in a process that no launcher described: start the "
            "processes with torchrun (or set RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), or call init_process_group "
            "before the first tensor on the device"
        )
    _initialise(store, rank, size)


def _needed() -> bool:
    """Whether this process has to be one of a JAX runtime's: for XLA's collectives, or for programs on the devices of
    several hosts, which there are where a launcher started one process on each for all of its devices.
    """
    job = processes.job()
    several = job is not None and job.local_size == 1 and devices.count() > 1
    return several or chosen(devices.choose_platform()) == "xla"


def joined() -> tuple[Any, int, int] | None:
    """The store through which this process joined a JAX runtime, its rank and the number of processes, if it has."""
    return None if _joined is None else (_meeting, *_joined)


def _initialise(store: Any, rank: int, size: int) -> None:
    global _joined, _meeting
    import jax

    if devices.choose_platform() == "cpu":
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if rank == 0:
        store.set(_KEY, f"{socket.gethostname() if _elsewhere(store) else '127.0.0.1'}:{_free_port()}")
    store.wait([_KEY], TIMEOUT)
    address = store.get(_KEY).decode()
    # A rank that dies is an error in the others' next collective, not the end of them (but rank 0, where the runtime's
    # service is); and SIGTERM, by which torchrun ends a process, is no business of JAX's.
    jax.config.update("jax_enable_recoverability", True)
    jax.config.update("jax_enable_preemption_service", False)
    seconds = int(TIMEOUT.total_seconds())
    try:
        jax.distributed.initialize(
            address,
            size,
            rank,
            initialization_timeout=seconds,
            heartbeat_timeout_seconds=30,
            shutdown_timeout_seconds=30,
        )
    except Exception as error:
        raise RuntimeError(
            f"rank {rank} of {size} could not join the others at {address} within {TIMEOUT.total_seconds():.0f} s: "
            f"{error}"
        ) from error
    _joined, _meeting = (rank, size), store


def leave() -> None:
    """Leave the JAX runtime: before this rank tells the others that it has left, unless it is rank 0."""
    global _joined
    if _joined is not None:
        import jax

        _joined = None
        jax.distributed.shutdown()


def serves() -> int:
    """How many ranks, this one included, lose the JAX runtime when this process ends."""
    return _joined[1] if _joined is not None and _joined[0] == 0 else 0


def _elsewhere(store: Any) -> bool:
    """Whether other hosts may have to reach this one."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return getattr(store, "host", "127.0.0.1") not in ("127.0.0.1", "localhost")


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("", 0))
        return int(s.getsockname()[1])
