"""Handles of collectives: what ``async_op=True`` returns."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from torchtpu.distributed.errors import CollectiveTimeout

__all__ = ["Both", "Lane", "Work"]


class Work:
    """A collective under way. C++ calls these methods.

    Args:
        outputs: the tensors that will hold the results.
        write: puts the results there; called once, by whoever waits first.
    """

    def __init__(self, outputs: Sequence[torch.Tensor], write: Callable[[Any], None]) -> None:
        self.outputs = list(outputs)
        self._write: Callable[[Any], None] | None = write
        self._results: Any = None
        self._error: Exception | None = None
        self._done = threading.Event()
        self._lock = threading.RLock()
        self._future: torch.futures.Future[Any] | None = None
        self._source = -1

    def finish(self, results: Any, source: int = -1) -> None:
        """The results are there."""
        with self._lock:
            self._results, self._source = results, source
            self._done.set()
            if self._future is not None:
                self._complete(self._future)

    def fail(self, error: Exception) -> None:
        """It has failed."""
        with self._lock:
            self._error = error
            self._done.set()
            if self._future is not None:
                self._complete(self._future)

    def wait(self, seconds: float | None = None) -> None:
        """Wait for the results and put them in the output tensors.

        Raises:
            CollectiveTimeout: after ``seconds``.
            Exception: why it failed.
        """
        if not self._done.wait(seconds):
            raise CollectiveTimeout(f"the collective waited for has not finished after {seconds} s")
        self._deliver()

    def _deliver(self) -> None:
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._write is not None:
                write, results, self._write, self._results = self._write, self._results, None, None
                write(results)

    def is_completed(self) -> bool:
        """Whether it has finished or failed."""
        return self._done.is_set()

    def exception(self) -> Exception | None:
        """Why it failed."""
        return self._error

    def source_rank(self) -> int:
        """Who sent what was received."""
        return self._source

    def result(self) -> list[torch.Tensor]:
        """The output tensors; waits."""
        self.wait()
        return self.outputs

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the output tensors."""
        with self._lock:
            if self._future is None:
                self._future = torch.futures.Future()
                if self._done.is_set():
                    self._complete(self._future)
            return self._future

    def _complete(self, future: torch.futures.Future[Any]) -> None:
        try:
            self._deliver()
        except Exception as error:
            future.set_exception(error)
        else:
            future.set_result(self.outputs)


class Both(Work):
    """Several collectives that were called together."""

    def __init__(self, works: Sequence[Work]) -> None:
        super().__init__([t for w in works for t in w.outputs], lambda _: None)
        self.works = works
        self._done.set()

    def wait(self, seconds: float | None = None) -> None:
        """Wait for all of them."""
        end = None if seconds is None else time.monotonic() + seconds
        for work in self.works:
            work.wait(None if end is None else max(end - time.monotonic(), 1e-3))

    def _deliver(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        """Whether all have finished, or one has failed."""
        return all(w.is_completed() for w in self.works) or self.exception() is not None

    def exception(self) -> Exception | None:
        """The first error."""
        return next((w.exception() for w in self.works if w.exception() is not None), None)


class Lane:
    """A thread that runs functions one after the other. It keeps no process alive."""

    _all: ClassVar[weakref.WeakSet[Lane]] = weakref.WeakSet()
    _shared: ClassVar[Lane | None] = None

    def __init__(self, name: str) -> None:
        self._waiting: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._unfinished = 0
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        self._all.add(self)

    @classmethod
    def of_all(cls) -> Lane:
        """The process's own, for what must run in one order whatever its group."""
        if cls._shared is None:
            cls._shared = Lane("torchtpu-collectives")
        return cls._shared

    @classmethod
    def end_all(cls) -> None:
        """End every thread that has nothing left to do; the others are given a second."""
        lanes = list(cls._all)
        for lane in lanes:
            lane.close()
        end = time.monotonic() + 1
        for lane in lanes:
            lane._thread.join(max(end - time.monotonic(), 0))

    def put(self, function: Callable[[], None]) -> None:
        """Run a function, which must not raise, after those before it."""
        with self._lock:
            self._unfinished += 1
        self._waiting.put(function)

    @property
    def idle(self) -> bool:
        """Whether everything that was put has run."""
        return self._unfinished == 0

    def close(self) -> None:
        """End the thread once everything has run."""
        self._waiting.put(None)

    def _run(self) -> None:
        while (function := self._waiting.get()) is not None:
            function()
            with self._lock:
                self._unfinished -= 1
