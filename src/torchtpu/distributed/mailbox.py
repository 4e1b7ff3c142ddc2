"""The first message of a collective between the processes of a host: in memory that they share, read by the thread that
called, which a socket and gloo's threads would cost several times.

Every rank has a mailbox, of two slots that it uses in turn: a rank can be at most one message ahead of another, whose
message before must stay to be read. Its turn, a number that counts the messages, says what is there; who waits for it
sleeps on that word (futex), and now and then asks whether the process it waits for still lives.
"""

from __future__ import annotations

import ctypes
import os
import platform
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

from torchtpu.distributed.errors import CollectiveError, CollectiveTimeout
from torchtpu.distributed.shared import SharedMemory, segment
from torchtpu.distributed.watch import process_start

__all__ = ["Mailboxes", "available"]

_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
"""Number of the system call."""
_WAIT, _WAKE = 0, 1
_HEAD = 64
"""Bytes before the slots: the turn, and whether the rank has closed its mailbox, as 32 bits each."""
_SPINS = 20
"""How often a rank looks, and lets others run, before it sleeps: about what the fastest answer takes."""
_PATIENCE = 0.1
"""Seconds between two looks at whether a process still lives, and at Ctrl-C."""
_WORD = 1 << 32

_libc = ctypes.CDLL(None, use_errno=True)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_patience = _Timespec(0, int(_PATIENCE * 1e9))


class Mailboxes:
    """The mailboxes of one group's ranks.

    Args:
        store: the store of the group; every rank makes its object with it.
        memory: the group's shared memory, which must be usable.
        room: bytes of a message.
    """

    def __init__(self, store: Any, memory: SharedMemory, room: int) -> None:
        store = dist.PrefixStore("mailbox", store)
        self.rank, self.size, self.room = memory.rank, memory.size, room
        self._descriptor, own = segment(_HEAD + 2 * room)
        store.set(str(self.rank), f"{self._descriptor} {process_start(os.getpid())}")
        self._started: list[str] = []
        self.boxes: list[torch.Tensor] = []
        for rank in range(self.size):
            descriptor, started = store.get(str(rank)).decode().split()
            self._started.append(started)
            self.boxes.append(own if rank == self.rank else memory.opened(rank, int(descriptor)))
        store.set(f"open/{self.rank}", "")  # no rank may leave before the others have opened its mailbox
        store.wait([f"open/{rank}" for rank in range(self.size)])
        self._processes = memory.processes
        self._bytes = [box.numpy() for box in self.boxes]
        self._words = [b[:8].view("uint32") for b in self._bytes]
        self._addresses = [ctypes.c_void_p(box.data_ptr()) for box in self.boxes]
        self._fence = threading.Lock()
        self.turn = 0

    def own(self) -> Any:
        """Where this rank writes its next message, as a NumPy array of bytes; ``post`` sends it."""
        return self._bytes[self.rank][self._at(self.turn + 1) :][: self.room]

    def post(self) -> None:
        """Let the others read what was written."""
        self.turn += 1
        with self._fence:  # the message is there before its turn
            pass
        self._words[self.rank][0] = self.turn % _WORD
        _libc.syscall(_FUTEX, self._addresses[self.rank], _WAKE, self.size, None, None, 0)

    def read(self, deadline: float) -> list[Any]:
        """Every rank's message of this turn, as NumPy arrays that stay as they are until this rank posts again.

        Raises:
            CollectiveTimeout: one had not come by ``deadline`` (of ``time.monotonic``).
            CollectiveError: a rank that should send one has ended.
        """
        for rank in range(self.size):
            if rank != self.rank and not self._has(rank):
                self._await(rank, deadline)
        with self._fence:  # no message is read before its turn
            pass
        at = self._at(self.turn)
        return [b[at : at + self.room] for b in self._bytes]

    def tensor(self, rank: int, begin: int, end: int) -> torch.Tensor:
        """Some bytes of a rank's message of this turn."""
        at = self._at(self.turn)
        return self.boxes[rank][at + begin : at + end]

    def close(self) -> None:
        """Tell the others that nothing comes any more."""
        if self._descriptor >= 0:
            self._words[self.rank][1] = 1
            os.close(self._descriptor)
            self._descriptor = -1

    def _at(self, turn: int) -> int:
        return _HEAD + turn % 2 * self.room

    def _has(self, rank: int) -> bool:
        return (int(self._words[rank][0]) - self.turn) % _WORD < _WORD // 2

    def _await(self, rank: int, deadline: float) -> None:
        for _ in range(_SPINS):
            os.sched_yield()
            if self._has(rank):
                return
        word, address = self._words[rank], self._addresses[rank]
        while True:
            seen = int(word[0])
            if self._has(rank):
                return
            _libc.syscall(_FUTEX, address, _WAIT, ctypes.c_uint32(seen), ctypes.byref(_patience), None, 0)
            if self._has(rank):
                return
            if int(word[1]):
                raise CollectiveError(f"rank {rank} of the group has left it")
            if int(word[0]) == seen and process_start(self._processes[rank]) != self._started[rank]:
                raise CollectiveError(f"rank {rank} of the group has gone: its process has ended")
            if time.monotonic() > deadline:
                raise CollectiveTimeout("it did not finish in time")


def available() -> bool:
    """Whether the system call is known here."""
    return _FUTEX is not None
