"""What each rank is doing, published through the store, so that an error on one rank can tell about all of them.

A thread writes this rank's state once in ``PERIOD`` seconds: the collective it is in, or the last one it finished, and
the line of Python that it runs. Others read it only when something went wrong.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch

__all__ = ["Call", "Watch", "user_line"]

PERIOD = 1.0
"""Seconds between two reports of a rank."""
_ANSWER = datetime.timedelta(seconds=2)
_LIBRARIES = tuple(os.path.dirname(os.path.abspath(str(f))) + os.sep for f in (torch.__file__, __file__, os.__file__))
_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def user_line(frame: FrameType | None) -> str:
    """file:line of the innermost frame that is neither PyTorch's, nor the standard library's, nor this package's."""
    first = frame
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((*_LIBRARIES, _OWN, "<frozen")):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return "an unknown line" if first is None else f"{first.f_code.co_filename}:{first.f_lineno}"


@dataclass
class Call:
    """One collective of one group on this rank.

    Attributes:
        group: the group's name and ranks, in words.
        number: how many collectives the group has run before it.
        text: the collective with its reduction, dtypes and sizes: equal on all ranks if they agree.
        line: the user's line that called it.
        started: when, in seconds since the epoch.
        done: whether it has finished.
    """

    group: str
    number: int
    text: str
    line: str
    started: float = field(default_factory=time.time)
    done: bool = False

    def describe(self) -> str:
        """In words, for an error message."""
        return f"{self.text}, collective {self.number} of {self.group}, called at {self.line}"


class Watch:
    """The state of this rank, and the thread that publishes it.

    Args:
        store: a store that all ranks reach.
        rank: this process's rank in the job.
    """

    def __init__(self, store: Any, rank: int) -> None:
        self.store, self.rank = _own_connection(store), rank
        self.current: Call | None = None
        self._stopped = threading.Event()
        self._main = threading.main_thread().ident
        self.publish()
        self._thread = threading.Thread(target=self._run, name="torchtpu-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread, and say that this rank has left."""
        if not self._stopped.is_set():
            self._stopped.set()
            self._thread.join(_ANSWER.total_seconds())
            self.publish(left=True)

    def state(self) -> dict[str, Any]:
        """What others read: seconds since the epoch, the collective, and the main thread's line."""
        call = self.current
        frame = sys._current_frames().get(self._main) if self._main is not None else None
        found: dict[str, Any] = {"time": time.time(), "line": user_line(frame)}
        if call is not None:
            found |= {"call": call.describe(), "done": call.done, "for": time.time() - call.started}
        return found

    def publish(self, left: bool = False) -> None:
        """Write this rank's state now. A store that is gone is found out by those who read it."""
        try:
            self.store.set(_key(self.rank), json.dumps(self.state() | {"left": left}))
        except Exception:
            self._stopped.set()  # the store's host has gone, and with it everybody who could read this

    def report(self, ranks: Iterable[int]) -> str:
        """What the other ranks were doing when they last wrote, a line for each."""
        return "\n".join(f"  rank {rank}: {self._describe(rank)}" for rank in ranks if rank != self.rank)

    def _describe(self, rank: int) -> str:
        try:
            if not self.store.check([_key(rank)]):
                return "has not started"
            state = json.loads(self.store.get(_key(rank)))
        except Exception as error:
            first = str(error).splitlines()[0][:100]
            return f"unknown, the store does not answer ({first}): its host, rank 0, may be dead"
        age = time.time() - state["time"]
        if state["left"]:
            return f"left the job {age:.0f} s ago, after {state.get('call', 'no collective')}"
        what = f"running {state['line']}"
        if "call" in state and not state["done"]:
            what = f"for {state['for']:.0f} s in {state['call']}"
        elif "call" in state:
            what += f", after {state['call']}"
        return f"no sign of life for {age:.0f} s (dead or stopped?), last {what}" if age > 4 * PERIOD else what

    def _run(self) -> None:
        while not self._stopped.wait(PERIOD):
            self.publish()


def _key(rank: int) -> str:
    return f"torchtpu/rank/{rank}"


def _own_connection(store: Any) -> Any:
    """The store through a connection of its own: nobody's wait on the shared one holds up a report."""
    own = store.clone()
    own.set_timeout(_ANSWER)
    return own
