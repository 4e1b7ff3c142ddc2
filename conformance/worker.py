"""One worker process: runs tasks that arrive as JSON lines on standard input and answers with records."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

__all__ = ["run_task", "serve"]


def run_task(suite: str, entry: str, dtype: str, limit: int | None) -> dict[str, Any]:
    """Run one (suite, entry, dtype) in this process and return its record."""
    from conformance.case import Record, run_cases
    from conformance.suites import SUITES

    record = Record(suite, entry, dtype)
    try:
        cases, tolerance = SUITES()[suite].cases(entry, dtype)
    except Exception as error:
        record.status, record.error = "fail", f"{type(error).__name__}: {error}"
        return record.as_dict()
    return run_cases(record, cases, tolerance, limit).as_dict()


def _resident() -> int:
    """MiB of memory of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20


def serve() -> int:
    """Answer tasks until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.environ.setdefault("TORCHTPU_PLATFORM", "cpu")
    import torch

    torch.set_num_threads(1)
    from torchtpu.runtime.compiler import statistics

    for line in sys.stdin:
        task = json.loads(line)
        record = run_task(task["suite"], task["entry"], task["dtype"], task["limit"] or None)
        answer = {"record": record, "resident": _resident(), "compiles": statistics.compiles}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    return 0
