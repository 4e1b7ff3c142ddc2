"""Progress on standard error: a line that counts seconds on a terminal, a plain line elsewhere."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

__all__ = ["progress"]


@contextlib.contextmanager
def progress(what: str, detail: Callable[[], str] = str) -> Iterator[None]:
    """Say that something is under way, and how long it took.

    Args:
        what: such as "loading the model".
        detail: called now and then for what to add, such as a count; nothing by default.
    """
    start = time.perf_counter()
    terminal = sys.stderr.isatty()
    done = threading.Event()

    def line() -> str:
        added = detail()
        return f"{what} ... {time.perf_counter() - start:.1f} s" + (f" ({added})" if added else "")

    def tick() -> None:
        while not done.wait(0.2):
            print(f"\r\033[K{line()}", end="", file=sys.stderr, flush=True)

    thread = threading.Thread(target=tick, daemon=True)
    if terminal:
        thread.start()
    else:
        print(f"{what} ...", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        done.set()
        if terminal:
            thread.join()
            print("\r\033[K", end="", file=sys.stderr)
    print(line().replace(" ...", ":", 1), file=sys.stderr, flush=True)
