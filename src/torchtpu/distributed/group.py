"""The collectives of c10d on tpu tensors: which values go where. How they travel is a transport's business."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from torchtpu.distributed import transports
from torchtpu.distributed.errors import CollectiveError, CollectiveTimeout, MismatchError
from torchtpu.distributed.host import Messages
from torchtpu.distributed.pending import Pending
from torchtpu.distributed.reductions import Reduction
from torchtpu.distributed.transports import Transport
from torchtpu.distributed.watch import Call, Watch, user_line
from torchtpu.distributed.work import Both, Lane, Work

__all__ = ["Group"]

Tensors = Sequence[torch.Tensor]
Splits = Sequence[int]


def _kind(t: torch.Tensor) -> str:
    return f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}"


def _kinds(tensors: Tensors) -> str:
    return ", ".join(map(_kind, tensors))


def _whole(tensors: Sequence[torch.Tensor | None], what: str) -> None:
    """Refuse tensors that are not on the device, or sparse."""
    for t in tensors:
        if t is not None and (t.device.type != "tpu" or t.layout is not torch.strided):
            raise ValueError(f"{what}: expected dense tpu tensors, got one on {t.device} with layout {t.layout}")


class Group:
    """One rank of a process group; ``ProcessGroupTPU`` in C++ calls its methods.

    Every method that runs a collective returns a ``Work``; with ``later`` False the collective is over by then.

    Args:
        store: the store of the group.
        rank, size: this rank, and the number of ranks.
        timeout: seconds that a collective may take unless it says otherwise.
        name: the group's name in PyTorch.
        ranks: global ranks of the members.
        watch: what all ranks are doing.
    """

    def __init__(
        self, store: Any, rank: int, size: int, timeout: float, name: str, ranks: Sequence[int], watch: Watch
    ) -> None:
        self.store, self.rank, self.size, self.timeout, self.watch = store, rank, size, timeout, watch
        self.ranks = tuple(ranks)
        self.words = f"group {name} (ranks {', '.join(map(str, self.ranks))})"
        try:
            self.transport: Transport = transports.make(store, rank, size, timeout, self.ranks)
        except RuntimeError as error:  # gloo's, and the store's: somebody did not come in time, or has gone
            raise CollectiveError(
                f"{self.words} could not be made on rank {self.ranks[rank]}: {error}\n"
                f"The other ranks:\n{watch.report(self.ranks)}"
            ) from error
        self.pending: Pending | None = None
        if self.transport.asynchronous:
            self.pending = Pending(self.words, self.ranks, self._explain)
            watch.pending.add(self.pending)
        self.messages = Messages(self.transport.host)
        self.number = 0
        self.broken: Exception | None = None
        self.batch: list[Work] | None = None
        self._lane: Lane | None = Lane.of_all() if self.transport.one_order else None
        self._lanes: dict[tuple[str, int, int], Lane] = {}

    # ---- running ----------------------------------------------------------------------------------------------------

    def _run(
        self,
        text: str,
        inputs: Tensors,
        outputs: Tensors,
        compute: Callable[[Transport, list[Any]], Sequence[Any]],
        write: Callable[[list[torch.Tensor]], None],
        later: bool,
        timeout: float | None,
    ) -> Work:
        """Run a collective.

        Args:
            text: what it is, the same on every rank.
            inputs: tensors whose values go in.
            outputs: tensors that get results, which the handle returns.
            compute: from values of the transport to values of the transport.
            write: puts the results, as new tensors, where they belong.
            later: the caller will wait.
            timeout: seconds; None for the group's.
        """
        if self.broken is not None:
            raise CollectiveError(f"{self.words} cannot be used any more, since a collective failed: {self.broken}")
        _whole([*inputs, *outputs], text)
        device = next((t.device.index for t in (*outputs, *inputs)), None)
        arrays, sizes = [transports.array(t) for t in inputs], [tuple(t.shape) for t in inputs]
        call = Call(self.words, self.number, text, user_line(sys._getframe(1)))
        self.number += 1
        transport = self.transport

        def put(results: Sequence[Any]) -> None:
            try:
                tensors = [transport.tensor(r, device or 0) for r in results]
            except Exception as error:
                raise self._explain(error, call) from error
            write(tensors)

        work = Work(outputs, put)

        def run() -> None:
            self.watch.current = call
            entry = self.pending.begin(call, timeout or self.timeout) if self.pending is not None else None
            try:
                transport.begin(call, timeout or self.timeout)
                work.finish(compute(transport, transport.load(arrays, sizes)))
            except Exception as error:
                work.fail(self._explain(error, call))
            if self.pending is not None and entry is not None:
                self.pending.enqueued(entry, transport.marker)
            else:
                call.done = True

        lane = self._lane
        if transport.asynchronous or (not later and (lane is None or lane.idle)):
            run()
        else:
            if lane is None:
                lane = self._lane = Lane("torchtpu-collectives")
            lane.put(run)
        if not later:
            work.wait()
        return self._batched(work)

    def _batched(self, work: Work) -> Work:
        if self.batch is not None:
            self.batch.append(work)
        return work

    def _explain(self, error: Exception, call: Call) -> Exception:
        """The error to raise: with what failed, and what everybody else was doing."""
        if not isinstance(error, CollectiveError):
            return error
        self.broken = error
        call.done = True
        seconds = time.time() - call.started
        self.watch.publish()
        broken = not isinstance(error, CollectiveTimeout | MismatchError)
        return type(error)(
            f"{call.describe()}, failed on rank {self.ranks[self.rank]} after {seconds:.1f} s: {error}\n"
            f"The other ranks:\n{self.watch.report(self.ranks, broken)}"
        )

    # ---- all ranks to all ranks -------------------------------------------------------------------------------------

    def all_reduce(self, op: int, factor: Any, tensors: Tensors, later: bool, timeout: float | None) -> Work:
        """Each tensor becomes the reduction of that of every rank."""
        reduction = Reduction.of(op, factor)
        return self._run(
            f"all_reduce({reduction.op.name}) {_kinds(tensors)}",
            tensors,
            tensors,
            lambda transport, values: [transport.all_reduce(v, reduction) for v in values],
            lambda results: _copy(tensors, results),
            later,
            timeout,
        )

    def reduce(self, op: int, factor: Any, tensors: Tensors, root: int, later: bool, timeout: float | None) -> Work:
        """The root's tensor becomes the reduction; those of the others stay as they are."""
        reduction = Reduction.of(op, factor)
        return self._run(
            f"reduce({reduction.op.name}) {_kinds(tensors)} to rank {root}",
            tensors,
            tensors,
            lambda transport, values: [transport.reduce(v, reduction, root) for v in values],
            lambda results: _copy(tensors, results) if self.rank == root else None,
            later,
            timeout,
        )

    def all_gather_into_tensor(self, outputs: Tensors, inputs: Tensors, later: bool, timeout: float | None) -> Work:
        """Each output holds the inputs of all ranks, one after the other."""
        for out, x in zip(outputs, inputs, strict=True):
            if out.numel() != x.numel() * self.size or out.dtype != x.dtype:
                raise ValueError(
                    f"all_gather_into_tensor: the output must have {self.size} times the elements of the input and its "
                    f"dtype, got {_kind(out)} for {_kind(x)}"
                )
        return self._run(
            f"all_gather_into_tensor {_kinds(inputs)}",
            inputs,
            outputs,
            lambda transport, values: _sized([transport.all_gather(v) for v in values], outputs),
            lambda results: _copy(outputs, results),
            later,
            timeout,
        )

    def all_gather(self, outputs: Sequence[Tensors], inputs: Tensors, later: bool, timeout: float | None) -> Work:
        """Each list gets the input of every rank; the sizes may differ between ranks."""
        for row in outputs:
            if len(row) != self.size:
                raise ValueError(f"all_gather: expected a list of {self.size} tensors, got {len(row)}")
        shapes = [[tuple(t.shape) for t in row] for row in outputs]
        even = [len({s, *row}) == 1 for row, s in zip(shapes, [tuple(x.shape) for x in inputs], strict=True)]
        text = ", ".join(_kinds(row) for row in outputs)

        def compute(transport: Transport, values: list[Any]) -> list[Any]:
            found: list[Any] = []
            for v, alike, row in zip(values, even, shapes, strict=True):
                found.extend(transport.all_gather_rows(v) if alike else transport.all_gather_uneven(v, row))
            return found

        flat = [t for row in outputs for t in row]
        return self._run(
            f"all_gather {text}", inputs, flat, compute, lambda results: _copy(flat, results), later, timeout
        )

    def reduce_scatter_tensor(
        self, op: int, factor: Any, outputs: Tensors, inputs: Tensors, later: bool, timeout: float | None
    ) -> Work:
        """Each output is the reduction of this rank's part of every rank's input."""
        for out, x in zip(outputs, inputs, strict=True):
            if x.numel() != out.numel() * self.size or out.dtype != x.dtype:
                raise ValueError(
                    f"reduce_scatter_tensor: the input must have {self.size} times the elements of the output and its "
                    f"dtype, got {_kind(x)} for {_kind(out)}"
                )
        reduction = Reduction.of(op, factor)
        return self._run(
            f"reduce_scatter_tensor({reduction.op.name}) {_kinds(inputs)}",
            inputs,
            outputs,
            lambda transport, values: _sized([transport.reduce_scatter(v, reduction) for v in values], outputs),
            lambda results: _copy(outputs, results),
            later,
            timeout,
        )

    def reduce_scatter(
        self, op: int, factor: Any, outputs: Tensors, inputs: Sequence[Tensors], later: bool, timeout: float | None
    ) -> Work:
        """As reduce_scatter_tensor, from lists of tensors, whose sizes may differ between ranks."""
        reduction = Reduction.of(op, factor)
        lengths = [len(row) for row in inputs]
        if any(n != self.size for n in lengths):
            raise ValueError(f"reduce_scatter: expected lists of {self.size} tensors, got {lengths}")

        def compute(transport: Transport, values: list[Any]) -> list[Any]:
            rows = [values[i * self.size : (i + 1) * self.size] for i in range(len(inputs))]
            return [transport.reduce_scatter_uneven(row, reduction) for row in rows]

        return self._run(
            f"reduce_scatter({reduction.op.name}) {'; '.join(map(_kinds, inputs))}",
            [t for row in inputs for t in row],
            outputs,
            compute,
            lambda results: _copy(outputs, results),
            later,
            timeout,
        )

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Splits,
        input_splits: Splits,
        later: bool,
        timeout: float | None,
    ) -> Work:
        """Slices of the input's first dimension go to the ranks; the output holds those that came."""
        if not output_splits and not input_splits and input.shape[0] % self.size == 0:
            return self._run(
                f"all_to_all_single {_kind(input)}",
                [input],
                [output],
                lambda transport, values: _sized([transport.all_to_all(values[0])], [output]),
                lambda results: _copy([output], results),
                later,
                timeout,
            )
        give = list(input_splits) or self._equal(input, "input")
        take = list(output_splits) or self._equal(output, "output")
        if sum(give) != input.shape[0] or sum(take) != output.shape[0]:
            raise ValueError(
                f"all_to_all_single: the splits {give} and {take} do not add up to the first dimensions of "
                f"{_kind(input)} and {_kind(output)}"
            )
        shapes = [(n, *output.shape[1:]) for n in take]
        return self._run(
            f"all_to_all_single {str(input.dtype).removeprefix('torch.')}[*, {list(input.shape[1:])}]",
            input.split(give) if give else [],
            [output],
            lambda transport, values: transport.all_to_all_uneven(values, shapes),
            lambda results: _copy([output], [torch.cat(results)]),
            later,
            timeout,
        )

    def _equal(self, t: torch.Tensor, what: str) -> list[int]:
        if t.shape[0] % self.size:
            raise ValueError(
                f"all_to_all_single: the {what}'s first dimension {t.shape[0]} is no multiple of {self.size}"
            )
        return [t.shape[0] // self.size] * self.size

    def all_to_all(self, outputs: Tensors, inputs: Tensors, later: bool, timeout: float | None) -> Work:
        """Each rank gets one tensor of every rank."""
        shapes = [tuple(t.shape) for t in outputs]
        return self._run(
            f"all_to_all {str(inputs[0].dtype).removeprefix('torch.')}",
            inputs,
            outputs,
            lambda transport, values: transport.all_to_all_uneven(values, shapes),
            lambda results: _copy(outputs, results),
            later,
            timeout,
        )

    def barrier(self, later: bool, timeout: float | None) -> Work:
        """Wait for every rank."""

        def compute(transport: Transport, values: list[Any]) -> list[Any]:
            transport.barrier()
            return []

        return self._run("barrier", [], [], compute, lambda results: None, later, timeout)

    def monitored_barrier(self, timeout: float | None, wait_all_ranks: bool) -> None:
        """A barrier whose error names the ranks that did not come. Every error here does."""
        self.barrier(False, timeout)

    # ---- one rank to all, all to one --------------------------------------------------------------------------------

    def broadcast(self, tensors: Tensors, root: int, later: bool, timeout: float | None) -> Work:
        """The tensors become those of the root."""
        return self._run(
            f"broadcast {_kinds(tensors)} from rank {root}",
            tensors,
            tensors,
            lambda transport, values: [transport.broadcast(v, root) for v in values],
            lambda results: _copy(tensors, results) if self.rank != root else None,
            later,
            timeout,
        )

    def scatter(
        self, outputs: Tensors, inputs: Sequence[Tensors], root: int, later: bool, timeout: float | None
    ) -> Work:
        """Each rank's tensor becomes the root's tensor for it."""
        (output,) = outputs
        given = [torch.stack(list(inputs[0]))] if self.rank == root else []
        if given and given[0].shape != (self.size, *output.shape):
            raise ValueError(
                f"scatter: expected {self.size} tensors of size {list(output.shape)}, got {_kinds(inputs[0])}"
            )
        return self._run(
            f"scatter {_kind(output)} from rank {root}",
            [output, *given],
            outputs,
            lambda transport, values: [transport.scatter(values[1] if given else None, values[0], root)],
            lambda results: _copy(outputs, results),
            later,
            timeout,
        )

    def gather(
        self, outputs: Sequence[Tensors], inputs: Tensors, root: int, later: bool, timeout: float | None
    ) -> Work:
        """The root's list gets the tensor of every rank."""
        (x,) = inputs
        given = list(outputs[0]) if self.rank == root else []

        return self._run(
            f"gather {_kind(x)} to rank {root}",
            inputs,
            given,
            lambda transport, values: transport.gather(values[0], root),
            lambda results: _copy(given, results),
            later,
            timeout,
        )

    # ---- from rank to rank ------------------------------------------------------------------------------------------

    def send(self, tensors: Tensors, destination: int, tag: int) -> Work:
        """Send a tensor; it may change as soon as this returns."""
        (x,) = tensors
        _whole(tensors, "send")
        array, text = transports.array(x), _kind(x)
        work = Work(tensors, lambda results: None)

        def run(deadline: float) -> None:
            value = transports.to_host(array, x.shape)
            self.messages.send(value, text, destination, tag, deadline)
            work.finish([])

        return self._message("send", work, f"send {text} to rank {destination}", destination, tag, run)

    def recv(self, tensors: Tensors, source: int, tag: int) -> Work:
        """Receive a tensor from a rank, or from anyone (-1)."""
        (x,) = tensors
        _whole(tensors, "recv")
        text, like = _kind(x), torch.empty(x.shape, dtype=x.dtype, device="meta")
        work = Work(tensors, lambda results: _copy(tensors, [transports.from_host(results[0], x.device.index)]))

        def run(deadline: float) -> None:
            value, sender = self.messages.receive(like, text, source, tag, deadline)
            work.finish([value], sender)

        return self._message("recv", work, f"recv {text} from rank {source}", source, tag, run)

    def _message(
        self, direction: str, work: Work, text: str, peer: int, tag: int, run: Callable[[float], None]
    ) -> Work:
        call = Call(self.words, self.number, text, user_line(sys._getframe(1)))
        deadline = time.monotonic() + self.timeout

        def guarded() -> None:
            self.watch.current = call
            try:
                run(deadline)
            except Exception as error:
                work.fail(self._explain(error, call))
            call.done = True

        lane = self._lanes.get((direction, peer, tag))
        if lane is None:
            lane = self._lanes[direction, peer, tag] = Lane(f"torchtpu-{direction}")
        lane.put(guarded)
        return self._batched(work)

    # ---- the group --------------------------------------------------------------------------------------------------

    def start_coalescing(self) -> None:
        """Collectives until end_coalescing have one handle."""
        self.batch = []

    def end_coalescing(self) -> Work:
        """The handle of all collectives since start_coalescing."""
        works, self.batch = self.batch or [], None
        return Both(works)

    def split(self, store: Any, ranks: Sequence[int], rank: int, timeout: float, name: str) -> Group:
        """A group of some of this one's ranks, of which this is one."""
        members = [self.ranks[r] for r in ranks]
        prefix = dist.PrefixStore(f"split/{name}/{'-'.join(map(str, members))}", store)
        return Group(prefix, rank, len(ranks), timeout, name, members, self.watch)

    def set_timeout(self, seconds: float) -> None:
        """Seconds that a collective may take from now on."""
        self.timeout = seconds

    def sequence_number(self) -> int:
        """How many collectives the group has begun."""
        return self.number

    def failed(self) -> bool:
        """Whether a collective has failed, after which the group cannot be used."""
        return self.broken is not None

    def shutdown(self) -> None:
        """End the group's threads once their work is done."""
        own = [self._lane] if self._lane is not None and not self.transport.one_order else []
        for lane in (*own, *self._lanes.values()):
            lane.close()
        self._lanes = {}
        self.transport.host.close()

    def abort(self) -> None:
        """Give the group up: whatever is called from now on fails."""
        self.broken = self.broken or CollectiveError("it was aborted")
        self.shutdown()


def _sized(values: Sequence[Any], tensors: Tensors) -> list[Any]:
    return [v.reshape(tuple(t.shape)) for v, t in zip(values, tensors, strict=True)]


def _copy(tensors: Tensors, results: Tensors) -> None:
    with torch.no_grad():
        for t, r in zip(tensors, results, strict=True):
            t.copy_(r)
