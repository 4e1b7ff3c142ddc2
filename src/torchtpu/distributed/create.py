"""Making a process group."""

from __future__ import annotations

import atexit
import sys
from types import FunctionType
from typing import Any

import torch.distributed as dist

from torchtpu import _C
from torchtpu.distributed.group import Group
from torchtpu.distributed.watch import Watch
from torchtpu.distributed.work import Both, Lane, Work
from torchtpu.eager.hidden import hide_from_dynamo
from torchtpu.runtime.processes import attempt

__all__ = ["create_backend", "current_watch", "start_watch"]

_PATIENCE, _PATIENCE_AFTER_ERROR = 30.0, 5.0
"""Seconds that rank 0 waits at exit for the others, whose JAX runtime ends with it: they may have errors to tell."""

_watch: Watch | None = None

for _class in (Group, Work, Both, Lane, Watch):  # C++ and threads enter the package here
    for _function in vars(_class).values():
        if isinstance(_function, FunctionType):
            hide_from_dynamo(_function)


def create_backend(name: str, options: Any) -> Any:
    """The C++ backend for ``torch.distributed`` and the Python group behind it.

    Args:
        name: what the backend is called.
        options: c10d's ``DistributedBackendOptions``: store, rank, size, timeout, and the members' global ranks
            (none given: all ranks, in order).
    """
    from torchtpu.distributed import launch

    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    store = dist.PrefixStore(attempt(), options.store)
    if not dist.is_initialized():
        launch.join(store, options.group_rank, options.group_size)
    _C.define_process_group()
    timeout = options.timeout.total_seconds()
    watch = start_watch(store, dist.get_rank() if dist.is_initialized() else ranks[options.group_rank])
    group = Group(store, options.group_rank, options.group_size, timeout, options.group_id, ranks, watch)
    return _C.ProcessGroupTPU(options.group_rank, options.group_size, name, timeout, group)


def start_watch(store: Any, rank: int) -> Watch:
    """The process's watch; a new one for a new default group.

    Args:
        store: one that all ranks of the job reach; what prefixes it has do not count.
        rank: this process's rank in the job.
    """
    global _watch
    if _watch is None or not dist.is_initialized():
        before = _watch
        if before is not None:
            before.stop()
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        _watch = Watch(dist.PrefixStore(attempt(), store), rank)
        if before is not None:
            _watch.pending.update(before.pending)
    return _watch


def current_watch() -> Watch | None:
    """The process's watch, if it has one."""
    return _watch


def _leave() -> None:
    """At exit: Python ends a thread that is inside C++ by aborting the process, so none may be left there."""
    from torchtpu.distributed import launch

    serves = launch.serves()
    if not serves:
        launch.leave()
    if _watch is not None:
        _watch.stop()
        if serves:
            _watch.wait_for(range(1, serves), _PATIENCE_AFTER_ERROR if hasattr(sys, "last_value") else _PATIENCE)
    Lane.end_all()


atexit.register(_leave)
