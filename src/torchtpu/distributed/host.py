"""Collectives between the hosts' memories, through PyTorch's gloo: what carries the data on XLA:CPU, where the arrays
lie in host memory anyway, and messages between two ranks everywhere.

Every collective begins with one message of fixed size from each rank to all: its fingerprint, and the data itself if it
is small. It goes through mailboxes that the processes of a host share, or over gloo between hosts. So ranks that do not
agree find out before any data moves (gloo would abort the process, or return nonsense), and a small one takes one
exchange whatever it computes. Large data lies in memory that the processes share; between hosts gloo carries it.
"""

from __future__ import annotations

import collections
import ctypes
import datetime
import hashlib
import math
import queue
import re
import struct
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from torchtpu.distributed import buffers
from torchtpu.distributed.errors import CollectiveError, CollectiveTimeout, MismatchError, check_splits
from torchtpu.distributed.mailbox import Mailboxes, available
from torchtpu.distributed.reductions import Op, Reduction, combine, finish, working_dtype
from torchtpu.distributed.shared import SharedMemory
from torchtpu.distributed.watch import Call

__all__ = ["HostTransport", "Messages"]

SLOT = 1024
"""Bytes of the first message."""
_HEADER = struct.Struct("<qqqq")  # number, fingerprint, bytes of data or -1, descriptor of shared memory or -1
ROOM = SLOT - _HEADER.size
"""Bytes of data that the first message has room for."""
_LITTLE = 1 << 22
"""Bytes of all ranks together that each of them reads, rather than a part of them and the others' results."""
_SLICE = datetime.timedelta(seconds=0.5)
_GRACE = 5.0

_GLOO_DTYPES = {
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int8, torch.uint8, torch.int32, torch.int64),
}
_OPS = {
    Op.SUM: dist.ReduceOp.SUM,
    Op.AVG: dist.ReduceOp.SUM,
    Op.PREMUL_SUM: dist.ReduceOp.SUM,
    Op.PRODUCT: dist.ReduceOp.PRODUCT,
    Op.MIN: dist.ReduceOp.MIN,
    Op.MAX: dist.ReduceOp.MAX,
    Op.BAND: dist.ReduceOp.BAND,
    Op.BOR: dist.ReduceOp.BOR,
    Op.BXOR: dist.ReduceOp.BXOR,
}

Shape = Sequence[int]
_fingerprints: dict[str, int] = {}


def _fingerprint(text: str) -> int:
    found = _fingerprints.get(text)
    if found is None:
        digest = hashlib.sha256(text.encode()).digest()
        found = _fingerprints[text] = int.from_bytes(digest[:8], "little", signed=True)
    return found


def _numpy(x: torch.Tensor) -> Any:
    return x.numpy()


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1).view(torch.uint8)


def _short(text: str) -> str:
    """gloo's message without the place in its source and the advice after it."""
    return re.sub(r"^\[\S+:\d+\] ", "", text.splitlines()[0]).partition(". This is typically")[0]


def _wait(gloo: Any, work: Any, deadline: float) -> None:
    """Wait for gloo in slices, so that Ctrl-C is heard and a time limit is kept to.

    After a failure gloo's group is kept for ever: ending it would wait for operations that cannot finish.

    Raises:
        CollectiveTimeout: it took too long.
        CollectiveError: a connection broke.
    """
    while True:
        try:
            work.wait(_SLICE)
            return
        except RuntimeError as error:
            text = str(error)
            if work.is_completed() or "timed out" not in text.lower():
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(gloo))
                raise CollectiveError(_short(text)) from error
        if time.monotonic() > deadline:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(gloo))
            raise CollectiveTimeout("it did not finish in time")


def _wait_message(gloo: Any, work: Any, deadline: float) -> None:
    """Wait for a message, all at once: gloo gives up every connection of the group when a wait for one times out."""
    try:
        work.wait(datetime.timedelta(seconds=max(deadline - time.monotonic(), 0.1)))
    except RuntimeError as error:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(gloo))
        text = str(error)
        if "timed out" in text.lower():
            raise CollectiveTimeout("it did not finish in time") from error
        raise CollectiveError(_short(text)) from error


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Bytes one after the other, in memory of their own."""
    found = buffers.empty(sum(p.numel() for p in parts))
    at = 0
    for part in parts:
        found[at : at + part.numel()].copy_(part)
        at += part.numel()
    return found


class _ByGloo:
    """``Mailboxes`` for ranks that share no memory."""

    def __init__(self, gloo: Any, size: int) -> None:
        self._gloo, self._size = gloo, size
        self._out, self._in = torch.zeros(SLOT, dtype=torch.uint8), torch.zeros(size * SLOT, dtype=torch.uint8)

    def own(self) -> Any:
        return self._out.numpy()

    def post(self) -> None:
        self._work = self._gloo._allgather_base(self._in, self._out)

    def read(self, deadline: float) -> list[Any]:
        _wait(self._gloo, self._work, deadline)
        return list(self._in.numpy().reshape(self._size, SLOT))

    def tensor(self, rank: int, begin: int, end: int) -> torch.Tensor:
        return self._in[rank * SLOT + begin : rank * SLOT + end]

    def close(self) -> None:
        pass


class HostTransport:
    """The collectives of one group on CPU tensors.

    Tensors given are contiguous and only read; those returned are new.

    Args:
        store: what the ranks of this group, and only they, find each other by.
        rank, size: this rank in the group, and the number of ranks.
        timeout: seconds that a collective may take.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: float) -> None:
        self.rank, self.size = rank, size
        whole = datetime.timedelta(seconds=timeout + _GRACE)
        self.gloo: Any = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout=whole)
        self.notes = dist.PrefixStore("mismatch", store)
        self.deadline = math.inf
        self.memory = SharedMemory(store, rank, size)
        self.post: Mailboxes | _ByGloo
        if self.memory.usable and available():
            self.post = Mailboxes(store, self.memory, SLOT)
        else:
            self.post = _ByGloo(self.gloo, size)
        self.turn = 0
        self._call: Call | None = None

    def close(self) -> None:
        """Give the shared memory back; no collective may follow."""
        self.post.close()
        self.memory.close()

    # ---- the first message ------------------------------------------------------------------------------------------

    def begin(self, call: Call, timeout: float) -> None:
        """Say which collective the next call of a method belongs to, and how long it may take."""
        self._call = call
        self.deadline = time.monotonic() + timeout

    def _agree(self, data: Sequence[torch.Tensor] | None) -> list[torch.Tensor] | None:
        """Exchange the first message, and with it the data.

        Args:
            data: what this rank contributes, as bytes, one tensor after the other; None to have nothing exchanged.

        Returns:
            What each rank contributed, to be read before the next exchange; None if gloo has to carry it.

        Raises:
            MismatchError: the ranks are not in the same collective.
        """
        call = self._call
        assert call is not None
        self.turn += 1
        nbytes = sum(d.numel() for d in data) if data is not None else -1
        descriptor = -1
        message = self.post.own()
        if data is not None and nbytes <= ROOM:
            at = _HEADER.size
            for d in data:
                message[at : at + d.numel()] = d.numpy()
                at += d.numel()
        elif data is not None and self.memory.usable:
            descriptor = self.memory.write(self.turn, data)
        else:
            nbytes = -1
        _HEADER.pack_into(message, 0, call.number, _fingerprint(call.text), nbytes, descriptor)
        self.post.post()
        headers = [_HEADER.unpack_from(m) for m in self.post.read(self.deadline)]
        if any(h[:2] != headers[0][:2] for h in headers):
            self._disagree(call)
        if any(h[2] < 0 for h in headers):
            return None
        found = []
        for rank, (_, _, length, descriptor) in enumerate(headers):
            if descriptor >= 0:
                found.append(self.memory.read(self.turn, rank, descriptor, length))
            else:
                found.append(self.post.tensor(rank, _HEADER.size, _HEADER.size + length))
        return found

    def _disagree(self, call: Call) -> None:
        self.notes.set(str(self.rank), call.describe())
        keys = [str(r) for r in range(self.size)]
        self.notes.wait(keys, datetime.timedelta(seconds=_GRACE))
        told = "\n".join(f"  rank {r} of the group: {self.notes.get(str(r)).decode()}" for r in keys)
        raise MismatchError(f"the ranks of a group called different collectives:\n{told}")

    def _wait(self, work: Any) -> None:
        _wait(self.gloo, work, self.deadline)

    # ---- collectives ------------------------------------------------------------------------------------------------

    def all_reduce(self, x: torch.Tensor, reduction: Reduction) -> torch.Tensor:
        """The reduction of every rank's ``x``."""
        mine = self._scaled(x, reduction)
        given = self._agree([_bytes(mine)])
        if given is not None:
            return self._combined([b.view(mine.dtype) for b in given], reduction).view(x.shape).to(x.dtype)
        total, op = self._for_gloo(mine, x, reduction)
        options = dist.AllreduceOptions()
        options.reduceOp = op
        self._wait(self.gloo.allreduce([total], options))
        return self._from_gloo(total, mine.dtype, reduction).view(x.shape).to(x.dtype)

    def _combined(self, values: Sequence[torch.Tensor], reduction: Reduction) -> torch.Tensor:
        """The reduction of what every rank gave: all of it on each rank if it is little, else each rank a part."""
        elements = values[0].numel()
        if values[0].nbytes * self.size <= _LITTLE:
            return combine(values, reduction)
        begin, end = (elements * r // self.size for r in (self.rank, self.rank + 1))
        parts = self._agree([_bytes(combine([v[begin:end] for v in values], reduction))])
        assert parts is not None  # the ranks share memory, or had not come here
        return _joined(parts).view(values[0].dtype)

    def _scaled(self, x: torch.Tensor, reduction: Reduction) -> torch.Tensor:
        reduction.check(x.dtype)
        if reduction.op is Op.PREMUL_SUM:
            return (
                x * reduction.factor if x.is_floating_point() or x.is_complex() else (x * reduction.factor).to(x.dtype)
            )
        return x

    def _for_gloo(self, mine: torch.Tensor, x: torch.Tensor, reduction: Reduction) -> tuple[torch.Tensor, Any]:
        """A tensor of a dtype that gloo reduces, which it may write to, and gloo's name of the operation."""
        wide = working_dtype(mine.dtype)
        op = reduction.op
        if mine.dtype is torch.bool and op is Op.SUM:
            op = Op.MAX
        total = mine.to(wide) if wide is not mine.dtype else (mine.clone() if mine is x else mine)
        if wide.is_complex:
            if op is Op.PRODUCT:
                raise TypeError("ReduceOp.PRODUCT of complex numbers is not supported")
            total = torch.view_as_real(total)
        assert total.dtype in _GLOO_DTYPES
        return total.view(-1), _OPS[op]

    def _from_gloo(self, total: torch.Tensor, dtype: torch.dtype, reduction: Reduction) -> torch.Tensor:
        if working_dtype(dtype).is_complex:
            total = torch.view_as_complex(total.view(-1, 2))
        return finish(total, reduction, self.size, dtype)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Every rank's ``x``, stacked: size (ranks, *x.shape)."""
        given = self._agree([_bytes(x)])
        shape = (self.size, *x.shape)
        if given is not None:
            return _joined(given).view(x.dtype).view(shape)
        found = buffers.empty(self.size * x.nbytes)
        self._wait(self.gloo._allgather_base(found, _bytes(x)))
        return found.view(x.dtype).view(shape)

    def all_gather_rows(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's ``x``."""
        return list(self.all_gather(x).unbind(0))

    def all_gather_uneven(self, x: torch.Tensor, shapes: Sequence[Shape]) -> list[torch.Tensor]:
        """Every rank's ``x``, of the sizes given."""
        given = self._agree([_bytes(x)])
        if given is not None:
            return [b.clone().view(x.dtype).view(tuple(s)) for b, s in zip(given, shapes, strict=True)]
        found = []
        for root, shape in enumerate(shapes):
            part = x.clone() if root == self.rank else torch.empty(tuple(shape), dtype=x.dtype)
            self._broadcast(part, root)
            found.append(part)
        return found

    def _broadcast(self, x: torch.Tensor, root: int) -> None:
        if x.numel():
            options = dist.BroadcastOptions()
            options.rootRank = root
            self._wait(self.gloo.broadcast([_bytes(x)], options))

    def broadcast(self, x: torch.Tensor, root: int) -> torch.Tensor:
        """The root's ``x``."""
        given = self._agree([_bytes(x)] if self.rank == root else [])
        if given is not None:
            return _joined(given[root : root + 1]).view(x.dtype).view(x.shape)
        found = x.clone() if self.rank == root else torch.empty_like(x)
        self._broadcast(found, root)
        return found

    def reduce_scatter(self, x: torch.Tensor, reduction: Reduction) -> torch.Tensor:
        """Of ``x`` in as many rows as there are ranks, the reduction of every rank's for this one, flat."""
        return self.reduce_scatter_uneven(x.view(self.size, -1).unbind(0), reduction)

    def reduce_scatter_uneven(self, parts: Sequence[torch.Tensor], reduction: Reduction) -> torch.Tensor:
        """The reduction of what every rank has for this one.

        Args:
            parts: a tensor for each rank; the sizes may differ.
            reduction: how they become one.
        """
        scaled = [self._scaled(p, reduction) for p in parts]
        given = self._agree([_bytes(p) for p in scaled])
        dtype, sizes = parts[0].dtype, [p.numel() for p in parts]
        if given is not None:
            at = sum(sizes[: self.rank])
            mine = [b.view(dtype)[at : at + sizes[self.rank]] for b in given]
            return combine(mine, reduction).view(parts[self.rank].shape)
        # Each rank sends every other its part: what a ring sends, in one step, and added here in the order of ranks.
        received = self._all_to_all(scaled, [parts[self.rank].shape] * self.size)
        return combine(received, reduction)

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        """Of ``x`` in as many rows as there are ranks, every rank's for this one, one after the other."""
        rows = x.view(self.size, -1)
        return _joined(self._exchanged(rows.unbind(0), [rows.shape[1:]] * self.size)).view(x.dtype).view(x.shape)

    def all_to_all_uneven(self, parts: Sequence[torch.Tensor], shapes: Sequence[Shape]) -> list[torch.Tensor]:
        """What every rank has for this one.

        Args:
            parts: a tensor for each rank.
            shapes: the sizes of what comes from each.
        """
        dtype = parts[0].dtype
        found = self._exchanged(parts, shapes)
        return [b.clone().view(dtype).view(tuple(s)) for b, s in zip(found, shapes, strict=True)]

    def _exchanged(self, parts: Sequence[torch.Tensor], shapes: Sequence[Shape]) -> list[torch.Tensor]:
        """The bytes of every rank's part for this one, to be read before the next exchange."""
        dtype = parts[0].dtype
        lengths = torch.tensor([*(p.numel() for p in parts), *map(math.prod, shapes)], dtype=torch.int64)
        given = self._agree([_bytes(lengths), *map(_bytes, parts)])
        if given is None:
            return [_bytes(p) for p in self._all_to_all(parts, shapes)]
        table = [message[: lengths.nbytes].view(torch.int64).tolist() for message in given]
        check_splits(table)
        found = []
        for message, sent in zip(given, table, strict=True):
            at = lengths.nbytes + dtype.itemsize * sum(sent[: self.rank])
            found.append(message[at : at + dtype.itemsize * sent[self.rank]])
        return found

    def _all_to_all(self, parts: Sequence[torch.Tensor], shapes: Sequence[Shape]) -> list[torch.Tensor]:
        dtype = parts[0].dtype
        give, take = [p.nbytes for p in parts], [math.prod(s) * dtype.itemsize for s in shapes]
        sent = torch.cat([_bytes(p) for p in parts])
        received = torch.empty(sum(take), dtype=torch.uint8)
        self._wait(self.gloo.alltoall_base(received, sent, take, give, dist.AllToAllOptions()))
        return [b.view(dtype).view(tuple(s)) for b, s in zip(received.split(take), shapes, strict=True)]

    def scatter(self, x: torch.Tensor | None, like: torch.Tensor, root: int) -> torch.Tensor:
        """The root's row of ``x`` for this rank; ``like`` has its size and dtype. Others give None."""
        given = self._agree([_bytes(x)] if x is not None else [])
        if given is not None:
            return given[root].view(self.size, -1)[self.rank].clone().view(like.dtype).view(like.shape)
        found = torch.empty(like.nbytes, dtype=torch.uint8)
        options = dist.ScatterOptions()
        options.rootRank = root
        self._wait(self.gloo.scatter([found], [[_bytes(p) for p in x.unbind(0)]] if x is not None else [], options))
        return found.view(like.dtype).view(like.shape)

    def gather(self, x: torch.Tensor, root: int) -> list[torch.Tensor]:
        """Every rank's ``x`` on the root; nothing elsewhere."""
        given = self._agree([_bytes(x)])
        if given is not None:
            return [b.clone().view(x.dtype).view(x.shape) for b in given] if self.rank == root else []
        options = dist.GatherOptions()
        options.rootRank = root
        parts = [torch.empty(x.nbytes, dtype=torch.uint8) for _ in range(self.size)] if self.rank == root else []
        self._wait(self.gloo.gather([parts] if parts else [], [_bytes(x)], options))
        return [p.view(x.dtype).view(x.shape) for p in parts]

    def reduce(self, x: torch.Tensor, reduction: Reduction, root: int) -> torch.Tensor:
        """The reduction of every rank's ``x``; only the root may use it."""
        return self.all_reduce(x, reduction)

    def barrier(self) -> None:
        """Wait for every rank."""
        self._agree([])


class Messages:
    """Messages between two ranks of a group.

    Their order counts between two ranks and within one tag only: whoever sends or receives has a thread for each of
    those, and gives a deadline (of ``time.monotonic``) with each message.
    """

    def __init__(self, transport: HostTransport) -> None:
        self.gloo, self.rank = transport.gloo, transport.rank
        self._to_itself: dict[int, queue.SimpleQueue[tuple[torch.Tensor, str]]] = collections.defaultdict(
            queue.SimpleQueue
        )

    def send(self, x: torch.Tensor, text: str, to: int, tag: int, deadline: float) -> None:
        """Send ``x``; returns when it has gone."""
        if to == self.rank:  # gloo has no connection for this
            self._to_itself[tag].put((x.clone(), text))
            return
        head = torch.zeros(SLOT, dtype=torch.uint8)
        data = _bytes(x)
        fits = data.numel() <= ROOM
        _HEADER.pack_into(_numpy(head), 0, 0, _fingerprint(text), data.numel() if fits else -1, data.numel())
        if fits:
            head[_HEADER.size : _HEADER.size + data.numel()] = data
        _wait_message(self.gloo, self.gloo.send([head], to, 2 * tag), deadline)
        if not fits:
            _wait_message(self.gloo, self.gloo.send([data], to, 2 * tag + 1), deadline)

    def receive(
        self, like: torch.Tensor, text: str, source: int, tag: int, deadline: float
    ) -> tuple[torch.Tensor, int]:
        """The next message, of the size and dtype of ``like``, and who sent it (``source`` -1: anyone)."""
        if source == self.rank:
            try:
                found, sent = self._to_itself[tag].get(timeout=max(deadline - time.monotonic(), 0.1))
            except queue.Empty:
                raise CollectiveTimeout("it did not finish in time") from None
            if sent != text:
                raise MismatchError(f"the rank sent itself {sent}, and receives {text}")
            return found, source
        head = torch.zeros(SLOT, dtype=torch.uint8)
        work = self.gloo.recv([head], source, 2 * tag) if source >= 0 else self.gloo.recv_anysource([head], 2 * tag)
        _wait_message(self.gloo, work, deadline)
        source = source if source >= 0 else work._source_rank()
        _, fingerprint, inside, nbytes = _HEADER.unpack_from(_numpy(head), 0)
        if fingerprint != _fingerprint(text):
            raise MismatchError(
                f"rank {source} of the group sent a tensor of another size or dtype ({nbytes} bytes) than {text}"
            )
        if inside >= 0:
            return head[_HEADER.size : _HEADER.size + inside].clone().view(like.dtype).view(like.shape), source
        found = torch.empty(nbytes, dtype=torch.uint8)
        _wait_message(self.gloo, self.gloo.recv([found], source, 2 * tag + 1), deadline)
        return found.view(like.dtype).view(like.shape), source
