"""Streams and events, in the names of torch.cuda.

XLA orders programs by the data they pass on, so a stream orders nothing by itself: code written for several streams is
right without them, and waiting for a stream waits for its device.
"""

from __future__ import annotations

from typing import Any

import torch

from torchtpu.device._index import device_index

__all__ = ["Event", "Stream", "StreamContext", "current_stream", "default_stream", "set_stream", "stream"]


class Stream(torch.Stream):
    """A stream of a tpu device.

    Args:
        device: the device; the current one by default.
        priority: accepted for compatibility; there is nothing to rank.
    """

    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> Stream:
        if kwargs:  # stream_id, device_index, device_type: how PyTorch copies a stream
            return super().__new__(cls, priority=priority, **kwargs)
        return super().__new__(cls, device=torch.device("tpu", device_index(device)), priority=priority)


class Event(torch.Event):
    """A point in what has been enqueued on a device, to wait for or to measure time between.

    Args:
        enable_timing: note the time when the event is recorded. The work before it is waited for then, so that
            elapsed_time() tells how long the work took.
        blocking: accepted for compatibility.
        interprocess: not supported, as for every backend outside PyTorch's tree.
    """

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Event:
        return super().__new__(
            cls, device="tpu", enable_timing=enable_timing, blocking=blocking, interprocess=interprocess
        )

    def elapsed_time(self, end: torch.Event) -> float:
        """Milliseconds from this event to `end`; both must have been recorded with enable_timing."""
        from torchtpu import _C

        return _C.elapsed_time(self, end)


class StreamContext:
    """Make a stream (and its device) current for a block; None makes no change."""

    def __init__(self, stream: torch.Stream | None):
        self.stream = stream
        self._before: list[torch.Stream] = []

    def __enter__(self) -> torch.Stream | None:
        if self.stream is not None:
            self._before = [current_stream(), current_stream(self.stream.device)]
            set_stream(self.stream)
        return self.stream

    def __exit__(self, *_: object) -> None:
        if self.stream is not None:
            device, stream = self._before
            set_stream(stream)
            set_stream(device)


def stream(stream: torch.Stream | None) -> StreamContext:
    """Context manager that makes a stream current."""
    return StreamContext(stream)


def set_stream(stream: torch.Stream | None) -> None:
    """Make a stream, and its device, current in this thread; None makes no change."""
    from torchtpu import _C

    if stream is None:
        return
    torch.accelerator.set_stream(stream)
    _C.exchange_device(stream.device_index)


def current_stream(device: Any = None) -> Stream:
    """The stream current on a device in this thread."""
    return _wrap(torch.accelerator.current_stream(device_index(device)))


def default_stream(device: Any = None) -> Stream:
    """The stream a device starts with."""
    current = torch.accelerator.current_stream(device_index(device))
    return Stream(stream_id=0, device_index=current.device_index, device_type=current.device_type)


def _wrap(stream: torch.Stream) -> Stream:
    return Stream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)
