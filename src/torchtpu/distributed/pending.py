"""Collectives that were enqueued on the device and may not have finished: XLA's have this instead of a wait.

Python does not wait for a collective that XLA carries, and whoever waits for its result later waits inside the runtime.
So the thread that publishes this rank's state also looks at what has not finished. When a collective takes more than a
second it reads what the others do: whether the same collective of the group has another fingerprint there, or whether a
rank has gone. That, or the group's time limit, is an error in every wait of this process for a value of the device; a
process that does not come out of the runtime to hear of it is ended. Nothing is compared while collectives finish.
"""

from __future__ import annotations

import collections
import functools
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchtpu.distributed.errors import CollectiveError, CollectiveTimeout, MismatchError
from torchtpu.runtime import devices

if TYPE_CHECKING:
    from torchtpu.distributed.watch import Call, Watch

__all__ = ["Pending", "raise_failed", "wait"]

PATIENCE = 1.0
"""Seconds after which the other ranks are asked what they are in."""
GRACE = 20.0
"""Seconds that the process has to notice that a collective has failed before it is ended."""

_all: weakref.WeakSet[Pending] = weakref.WeakSet()


@dataclass
class _Entry:
    call: Call
    deadline: float  # of time.monotonic()
    marker: Any = None  # an output of the collective's program, ready when all of it is


class Pending:
    """What a group has enqueued.

    Args:
        key: the group's name, the same on all its ranks.
        ranks: global ranks of the members.
        explain: makes the error to raise of what went wrong with a call, and marks the group as broken.
    """

    def __init__(self, key: str, ranks: Sequence[int], explain: Callable[[Exception, Call], Exception]) -> None:
        self.key, self.ranks, self._explain = key, tuple(ranks), explain
        self._entries: collections.deque[_Entry] = collections.deque()
        self._lock = threading.Lock()
        self.begun = 0
        self.error: Exception | None = None
        self.heard = False
        self._failed_at = 0.0
        _all.add(self)
        _hook()

    def begin(self, call: Call, seconds: float) -> _Entry:
        """A collective is about to be compiled and enqueued; ``enqueued`` is called then."""
        entry = _Entry(call, time.monotonic() + seconds)
        with self._lock:
            self._entries.append(entry)
            self.begun = call.number + 1
        return entry

    def enqueued(self, entry: _Entry, marker: Any) -> None:
        """A collective has been enqueued.

        Args:
            entry: what ``begin`` gave.
            marker: an array that is ready when its program has run; None if it has none.
        """
        with self._lock:
            entry.marker = marker
            if marker is None:
                self._entries.remove(entry)
                entry.call.done = True

    def oldest(self) -> Call | None:
        """The first call that has not finished."""
        with self._lock:
            return self._entries[0].call if self._entries else None

    def past(self) -> list[tuple[int, str, str]]:
        """What the others may compare of what has been enqueued: number, digest and description."""
        return []

    def look(self, watch: Watch) -> None:
        """Drop what has finished, and see what is wrong with what has not."""
        if self.error is not None:
            self._insist()
            return
        entry = self._unfinished()
        if entry is None:
            return
        problem: Exception | None = None
        if time.time() - entry.call.started > PATIENCE:
            problem = self._compare(entry.call, watch)
        if problem is None and time.monotonic() > entry.deadline:
            problem = CollectiveTimeout("it did not finish in time")
        if problem is not None:
            self._fail(problem, entry.call)

    def _unfinished(self) -> _Entry | None:
        while True:
            with self._lock:
                if not self._entries:
                    return None
                entry = self._entries[0]
            if entry.marker is None or not entry.marker.is_ready():
                return entry
            try:
                entry.marker.block_until_ready()
            except Exception as error:
                self._fail(CollectiveError(str(error).splitlines()[0]), entry.call)
                return None
            entry.call.done = True
            with self._lock:
                self._entries.popleft()

    def _compare(self, call: Call, watch: Watch) -> Exception | None:
        told = [f"  rank {watch.rank}: {call.describe()}"]
        states = watch.read(self.ranks)
        for rank, state in states.items():
            number, text, description = state["pending"].get(self.key, (-1, "", ""))
            if number == call.number and text != call.text:
                told.append(f"  rank {rank}: {description}")
        if len(told) > 1:
            return MismatchError("the ranks of a group called different collectives:\n" + "\n".join(told))
        gone = [rank for rank, state in states.items() if state["ended"] and self._missed(state, call)]
        return CollectiveError(f"rank {', '.join(map(str, gone))} has gone") if gone else None

    def _missed(self, state: dict[str, Any], call: Call) -> bool:
        """Whether a rank that has ended cannot have taken part in a call."""
        return not state["left"] or state["begun"].get(self.key, call.number + 1) <= call.number

    def _fail(self, problem: Exception, call: Call) -> None:
        self.error, self._failed_at = self._explain(problem, call), time.monotonic()

    def _insist(self) -> None:
        """End a process that has not heard of the error: its main thread waits in the runtime, or computes for ever."""
        if not self.heard and time.monotonic() - self._failed_at > GRACE:
            name = type(self.error).__name__
            print(f"{name}: {self.error}\nNothing in this process hears of it: ending it", file=sys.stderr, flush=True)
            os._exit(1)


@functools.cache
def _hook() -> None:
    devices.on_wait(wait)


def raise_failed() -> None:
    """Raise the error of a collective that has failed meanwhile, if there is one."""
    for group in _all:
        if group.error is not None:
            group.heard = True
            raise group.error


def wait(array: Any) -> None:
    """Wait for an array of the device; raises the error of a collective that fails meanwhile.

    While the wait is short it costs what ``block_until_ready`` costs, within a few microseconds.
    """
    pause = 1e-5
    while not array.is_ready():
        raise_failed()
        time.sleep(pause)
        pause = min(2 * pause, 1e-3)
