"""Memory that the processes of a host share: how large values go from one to the others without a socket.

Every rank owns two segments and uses them in turn: while a collective writes one, ranks that are still reading the
collective before have the other. The segments have no name (memfd), so a killed process leaves nothing behind.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from torchtpu.distributed.errors import CollectiveError

__all__ = ["SharedMemory", "segment"]

_SMALLEST = 1 << 20


class SharedMemory:
    """The segments of one group's ranks.

    Args:
        store: the store of the group; every rank makes its object with it.
        rank, size: this rank in the group, and the number of ranks.

    Attributes:
        usable: whether all ranks run on one host and can open each other's memory: the same answer on each.
        processes: the ranks' process numbers.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        store = dist.PrefixStore("memory", store)
        self._own: list[tuple[int, torch.Tensor]] = [segment(4096), segment(4096)]
        self._peers: dict[tuple[int, int], tuple[int, torch.Tensor]] = {}
        store.set(f"place/{rank}", f"{_place()} {os.getpid()} {self._own[0][0]}")
        places = [store.get(f"place/{r}").decode().rsplit(" ", 2) for r in range(size)]
        self.processes = [int(pid) for _, pid, _ in places]
        alike = len({place for place, _, _ in places}) == 1
        store.set(f"open/{rank}", str(int(alike and self._opens([int(fd) for _, _, fd in places]))))
        self.usable = all(store.get(f"open/{r}") == b"1" for r in range(size))

    def _opens(self, descriptors: Sequence[int]) -> bool:
        try:
            for rank, descriptor in enumerate(descriptors):
                os.close(os.open(self._path(rank, descriptor), os.O_RDONLY))
        except OSError:
            return False
        return True

    def _path(self, rank: int, descriptor: int) -> str:
        return f"/proc/{self.processes[rank]}/fd/{descriptor}"

    def write(self, turn: int, data: Sequence[torch.Tensor]) -> int:
        """Put bytes in this rank's segment of a turn, one tensor after the other.

        Returns:
            The segment's descriptor, which the others need to read it.
        """
        half = turn % 2
        nbytes = sum(d.numel() for d in data)
        descriptor, memory = self._own[half]
        if memory.numel() < nbytes:
            os.close(descriptor)
            descriptor, memory = self._own[half] = segment(max(_SMALLEST, 1 << (nbytes - 1).bit_length()))
        at = 0
        for d in data:
            memory[at : at + d.numel()].copy_(d)
            at += d.numel()
        return descriptor

    def read(self, turn: int, rank: int, descriptor: int, nbytes: int) -> torch.Tensor:
        """What a rank wrote; it stays there until that rank's turn after the next."""
        half = turn % 2
        if rank == self.rank:
            return self._own[half][1][:nbytes]
        known = self._peers.get((rank, half))
        # A descriptor comes again when its segment was replaced by a larger one.
        if known is None or known[0] != descriptor or known[1].numel() < nbytes:
            known = self._peers[rank, half] = descriptor, self.opened(rank, descriptor)
        return known[1][:nbytes]

    def opened(self, rank: int, descriptor: int) -> torch.Tensor:
        """The bytes of another rank's segment.

        Raises:
            CollectiveError: it ended after it said what it would share.
        """
        try:
            opened = os.open(self._path(rank, descriptor), os.O_RDWR)
        except OSError as error:
            raise CollectiveError(f"rank {rank} has gone: its memory cannot be read") from error
        try:
            return _mapped(opened)
        finally:
            os.close(opened)

    def close(self) -> None:
        """Give the segments back; nothing can be written afterwards."""
        for descriptor, _ in self._own:
            os.close(descriptor)
        self._own, self.usable = [], False
        self._peers.clear()


def _place() -> str:
    """What processes that can open each other's memory have in common."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.stat('/proc/self/ns/pid').st_ino} {os.getuid()}"


def segment(nbytes: int) -> tuple[int, torch.Tensor]:
    """Memory of this process that others of its user can open: its descriptor, and its bytes."""
    descriptor = os.memfd_create("torchtpu")
    os.ftruncate(descriptor, nbytes)
    return descriptor, _mapped(descriptor)


def _mapped(descriptor: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(descriptor, 0), dtype=torch.uint8)
