"""Run tasks over worker processes: resumable, with a time limit per task, and new workers for those that die or
grow.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import re
import select
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, TextIO

__all__ = ["read_results", "run"]

MEMORY_LIMIT = 3000
"""MiB after which a worker is replaced: JAX keeps every program it compiled."""

COMPILE_LIMIT = 8000
"""Programs after which a worker is replaced: each holds memory mappings, of which Linux allows 65,530 a process."""

Task = tuple[str, str, str]


def read_results(folder: Path) -> dict[Task, dict[str, Any]]:
    """Every recorded task; a later line replaces an earlier one."""
    found = {}
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            record = json.loads(line)
            found[record["suite"], record["entry"], record["dtype"]] = record
    return found


class _Worker:
    """A worker process and its pipes."""

    def __init__(self) -> None:
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the worker
        root = Path(__file__).parents[1]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "conformance", "worker"],
            cwd=root,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "TORCHTPU_CACHE_LIMIT": "0",  # a run makes 10^5 programs
                "TORCHTPU_EAGER_MODE": "strict",
                "TORCHTPU_PLATFORM": os.environ.get("TORCHTPU_PLATFORM", "cpu"),
            },
        )

    def ask(self, task: Task, limit: int, timeout: float) -> dict[str, Any]:
        """Send a task and wait for its answer.

        Raises:
            TimeoutError: there was none in time.
            RuntimeError: the process ended; the message holds its last words.
        """
        assert self.process.stdin is not None and self.process.stdout is not None
        suite, entry, dtype = task
        request = json.dumps({"suite": suite, "entry": entry, "dtype": dtype, "limit": limit}) + "\n"
        try:
            self.process.stdin.write(request.encode())
            self.process.stdin.flush()
        except BrokenPipeError:
            raise RuntimeError(self._last_words()) from None
        ready, _, _ = select.select([self.process.stdout], [], [], timeout)
        if not ready:
            raise TimeoutError
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(self._last_words())
        return json.loads(line)

    def _last_words(self) -> str:
        code = self.process.wait()
        self.log.seek(0)
        lines = [x for x in self.log.read().decode(errors="replace").splitlines() if x.strip()]
        return f"the process ended with code {code}: {' '.join(lines[-3:])[-300:]}"

    def stop(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()
        self.log.close()


class _Run:
    """The state that the worker threads share."""

    def __init__(self, tasks: list[Task], folder: Path, limit: int, timeout: float) -> None:
        self.queue: queue.Queue[Task] = queue.Queue()
        for task in tasks:
            self.queue.put(task)
        self.total, self.done, self.folder, self.limit, self.timeout = len(tasks), 0, folder, limit, timeout
        self.counts: dict[str, int] = {}
        self.lock = threading.Lock()
        self.start = time.monotonic()
        self.stopped = False

    def record(self, record: dict[str, Any]) -> None:
        """Append to the suite's file and show where the run stands."""
        with self.lock:
            self.done += 1
            self.counts[record["status"]] = self.counts.get(record["status"], 0) + 1
            file: TextIO
            with open(self.folder / f"{record['suite']}.jsonl", "a") as file:
                file.write(json.dumps(record) + "\n")
            seconds = time.monotonic() - self.start
            left = seconds / self.done * (self.total - self.done)
            counts = " ".join(f"{k} {v}" for k, v in sorted(self.counts.items()))
            line = f"{self.done}/{self.total} {counts} | {seconds:.0f} s, {left:.0f} s left | "
            line += f"{record['suite']} {record['entry']}"
            if sys.stderr.isatty():
                print(f"\r\033[K{line[:150]}", end="", file=sys.stderr, flush=True)
            elif self.done % 50 == 0 or self.done == self.total:
                print(line, file=sys.stderr, flush=True)

    def work(self) -> None:
        """One thread: a worker process, replaced when it must be."""
        worker: _Worker | None = None
        try:
            while not self.stopped:
                try:
                    task = self.queue.get_nowait()
                except queue.Empty:
                    return
                worker = worker or _Worker()
                lost = {"suite": task[0], "entry": task[1], "dtype": task[2], "status": "fail", "cases": 0}
                try:
                    answer = worker.ask(task, self.limit, self.timeout)
                except TimeoutError:
                    self.record({**lost, "seconds": self.timeout, "error": f"no result after {self.timeout:.0f} s"})
                except RuntimeError as error:
                    self.record({**lost, "seconds": 0.0, "error": str(error)})
                else:
                    self.record(answer["record"])
                    if answer["resident"] < MEMORY_LIMIT and answer["compiles"] < COMPILE_LIMIT:
                        continue
                worker.stop()
                worker = None
        finally:
            if worker is not None:
                worker.stop()


def run(arguments: argparse.Namespace) -> int:
    """Run what the arguments select and is not recorded yet."""
    from conformance.suites import SUITES

    suites = SUITES()
    chosen = [s for s in arguments.suite.split(",") if s] or list(suites)
    unknown = [s for s in chosen if s not in suites]
    if unknown:
        print(f"unknown suite {', '.join(unknown)}: choose from {', '.join(suites)}", file=sys.stderr)
        return 2
    dtypes = {d for d in arguments.dtypes.split(",") if d}
    arguments.results.mkdir(parents=True, exist_ok=True)
    recorded = read_results(arguments.results)
    if arguments.redo:
        recorded = {}
    elif arguments.deepen:
        recorded = {k: r for k, r in recorded.items() if not r.get("limit") or 0 < r["cases"] < r["limit"]}
    elif arguments.failed:
        recorded = {k: r for k, r in recorded.items() if r["status"] in ("pass", "host", "empty")}
    tasks = [
        (suite, entry, dtype)
        for suite in chosen
        for entry, dtype in suites[suite].tasks()
        if re.search(arguments.only, entry)
        and (not dtypes or dtype in dtypes)
        and (suite, entry, dtype) not in recorded
    ]
    print(f"{len(tasks)} tasks, {len(recorded)} recorded", file=sys.stderr)
    state = _Run(tasks, arguments.results, arguments.limit, arguments.timeout)
    threads = [threading.Thread(target=state.work, daemon=True) for _ in range(min(arguments.jobs, max(1, len(tasks))))]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            while thread.is_alive():
                thread.join(0.5)
    except KeyboardInterrupt:
        state.stopped = True
        print("\nstopped; run again to resume", file=sys.stderr)
        return 130
    print(file=sys.stderr)
    return 0
