"""What each rank is doing, published through the store, so that an error on one rank can tell about all of them.

A thread writes this rank's state once in ``PERIOD`` seconds: the collective it is in, or the last one it finished, and
the line of Python that it runs. Others read it only when something went wrong.
"""

from __future__ import annotations

import datetime
import functools
import json
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch

from torchtpu.distributed.pending import Pending

__all__ = ["Call", "Watch", "dead", "process_start", "user_line"]

PERIOD = 1.0
"""Seconds between two reports of a rank."""
SILENCE = 4 * PERIOD
"""Seconds without a report after which it is said that a rank may be dead or stopped."""
_ANSWER = datetime.timedelta(seconds=2)
_TORCH = os.path.dirname(os.path.abspath(torch.__file__))
_LIBRARIES = (
    *(os.path.dirname(os.path.abspath(f)) + os.sep for f in (torch.__file__, __file__, os.__file__)),
    *(os.path.join(os.path.dirname(_TORCH), name) + os.sep for name in ("jax", "jaxlib", "numpy")),
)
_COMPILER = os.path.join("jax", "_src", "compiler.py")
_MAIN = threading.main_thread().ident or 0
_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def user_line(frame: FrameType | None) -> str:
    """file:line of the innermost frame that is neither a library's that this package uses, nor its own.

    In a thread that has none, such as autograd's, it is the main thread's, which called for it.
    """
    first = frame
    for top in (frame, sys._current_frames().get(_MAIN)):
        frame = top
        while frame is not None:
            name = frame.f_code.co_filename
            if not name.startswith((*_LIBRARIES, _OWN, "<frozen")):
                return f"{name}:{frame.f_lineno}"
            frame = frame.f_back
    return "an unknown line" if first is None else f"{first.f_code.co_filename}:{first.f_lineno}"


def _compiles(frame: FrameType | None) -> bool:
    """Whether a thread is in XLA's compiler."""
    while frame is not None:
        if frame.f_code.co_filename.endswith(_COMPILER):
            return True
        frame = frame.f_back
    return False


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
        kind: what it is one of.
    """

    group: str
    number: int
    text: str
    line: str
    started: float = field(default_factory=time.time)
    done: bool = False
    kind: str = "collective"

    def describe(self) -> str:
        """In words, for an error message."""
        return f"{self.text}, {self.kind} {self.number} of {self.group}, called at {self.line}"


class Watch:
    """The state of this rank, and the thread that publishes it.

    Args:
        store: a store that all ranks reach.
        rank: this process's rank in the job.
    """

    def __init__(self, store: Any, rank: int) -> None:
        self.store, self.rank = _own_connection(store), rank
        self.current: Call | None = None
        self.pending: weakref.WeakSet[Pending] = weakref.WeakSet()
        self._process = process_start(os.getpid())
        self._stopped = threading.Event()
        self.publish()
        self._thread = threading.Thread(target=self._run, name="torchtpu-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread, and say that this rank has left."""
        if not self._stopped.is_set():
            self._stopped.set()
            self._thread.join(_ANSWER.total_seconds())
            self.publish(left=True)

    def wait_for(self, ranks: Iterable[int], seconds: float) -> None:
        """Wait until ranks have left the job, or died."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not all(map(self.gone, ranks)):
            time.sleep(0.05)

    def state(self) -> dict[str, Any]:
        """What others read: seconds since the epoch, the collective, and the main thread's line."""
        oldest = {p.key: call for p in list(self.pending) if (call := p.oldest()) is not None}
        call = min(oldest.values(), key=lambda c: c.started, default=self.current)
        frame = sys._current_frames().get(_MAIN)
        found: dict[str, Any] = {"time": time.time(), "line": user_line(frame), "compiles": _compiles(frame)}
        found["process"] = [_host(), os.getpid(), self._process]
        if call is not None:
            found |= {"call": call.describe(), "done": call.done, "for": time.time() - call.started}
        found["pending"] = {key: [c.number, c.text, c.describe()] for key, c in oldest.items()}
        found["begun"] = {p.key: p.begun for p in list(self.pending)}
        found["programs"] = [x for p in list(self.pending) for x in p.past()]
        return found

    def publish(self, left: bool = False) -> None:
        """Write this rank's state now. A store that is gone is found out by those who read it."""
        try:
            self.store.set(_key(self.rank), json.dumps(self.state() | {"left": left}))
        except Exception:
            self._stopped.set()  # the store's host has gone, and with it everybody who could read this

    def report(self, ranks: Iterable[int], broken: bool = False) -> str:
        """What the other ranks were doing when they last wrote, a line for each.

        Args:
            ranks: of whom.
            broken: a connection broke, so one of them has ended: wait a little until it is known which.
        """
        others = [rank for rank in ranks if rank != self.rank]
        end = time.monotonic() + SILENCE + PERIOD
        while broken and time.monotonic() < end and not any(map(self.gone, others)):
            time.sleep(0.05)
        return "\n".join(f"  rank {rank}: {self._describe(rank)}" for rank in others)

    def _read(self, rank: int) -> dict[str, Any] | None:
        """What a rank wrote last; None if it has not started."""
        if not self.store.check([_key(rank)]):
            return None
        state: dict[str, Any] = json.loads(self.store.get(_key(rank)))
        return state

    def read(self, ranks: Iterable[int]) -> dict[int, dict[str, Any]]:
        """What the others of some ranks wrote last; without those that have not started, or while nobody answers."""
        try:
            found = {rank: self._read(rank) for rank in ranks if rank != self.rank}
        except Exception:  # the store's host has gone, as `gone` says of every rank
            return {}
        return {
            rank: state | {"ended": state["left"] or dead(state)} for rank, state in found.items() if state is not None
        }

    def gone(self, rank: int) -> bool:
        """Whether a rank has ended, or cannot be asked."""
        try:
            state = self._read(rank)
        except Exception:
            return True  # the store's host has gone; the report says so
        return state is not None and (state["left"] or dead(state))

    def _describe(self, rank: int) -> str:
        try:
            state = self._read(rank)
        except Exception as error:
            first = str(error).splitlines()[0][:100]
            return f"unknown, the store does not answer ({first}): its host, rank 0, may be dead"
        if state is None:
            return "has not started"
        age = time.time() - state["time"]
        if state["left"]:
            return f"left the job {age:.0f} s ago, after {state.get('call', 'no collective')}"
        what = f"{'compiling a program for' if state['compiles'] else 'running'} {state['line']}"
        if "call" in state and not state["done"]:
            what = f"for {state['for']:.0f} s in {state['call']}"
        elif "call" in state:
            what += f", after {state['call']}"
        if dead(state):
            return f"dead, its process {state['process'][1]} has ended; last {what}"
        return f"no sign of life for {age:.0f} s (dead or stopped?), last {what}" if age > SILENCE else what

    def _run(self) -> None:
        while not self._stopped.wait(PERIOD):
            self.publish()
            for group in list(self.pending):
                group.look(self)


@functools.cache
def _host() -> str:
    """What processes that see each other in /proc have in common."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.stat('/proc/self/ns/pid').st_ino}"


def process_start(pid: int) -> str:
    """When a process started, in the kernel's ticks: its number may be another's later. Empty if it has ended."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]  # a killed process is a zombie until its parent asks


def dead(state: dict[str, Any]) -> bool:
    """Whether the process that wrote a state is known to have ended; only those of this host can be known."""
    host, pid, started = state["process"]
    return host == _host() and process_start(pid) != started


def _key(rank: int) -> str:
    return f"torchtpu/rank/{rank}"


def _own_connection(store: Any) -> Any:
    """The store through a connection of its own: nobody's wait on the shared one holds up a report."""
    own = store.clone()
    own.set_timeout(_ANSWER)
    return own
