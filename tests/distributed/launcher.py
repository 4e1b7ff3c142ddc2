"""Run a module of checks in several processes, once, and tell pytest about each check."""

from __future__ import annotations

import ast
import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

JOBS = Path(__file__).parent / "jobs"
SOURCE = Path(__file__).parents[2] / "src"


@dataclass
class Outcome:
    """What the processes of a job left.

    Attributes:
        codes: exit status of each process.
        outputs: what each printed.
        checks: for each check, the traceback of each rank that failed; empty if it passed.
    """

    codes: list[int]
    outputs: list[str]
    checks: dict[str, list[str]]


def names(module: str) -> list[str]:
    """The checks of a module, in order, without importing it."""
    tree = ast.parse((JOBS / f"{module}.py").read_text())
    return [n.name for n in tree.body if isinstance(n, ast.FunctionDef) and n.name.startswith("check_")]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def environment_of(rank: int, size: int, folder: Path, **environment: str) -> dict[str, str]:
    """What torchrun would tell a process, and where the package is."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(SOURCE), str(JOBS)]),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "TORCHTPU_PLATFORM": "cpu",
        "TORCHTPU_CACHE_LIMIT": "2048",  # these tests count no compiles
        # compiling takes most of the time
        "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "JOB_FOLDER": str(folder),
        **environment,
    }


def start(size: int, command: list[str], folder: Path, **environment: str) -> list[subprocess.Popen]:
    """Start the processes of a job as torchrun would."""
    found = []
    for rank in range(size):
        env = environment_of(rank, size, folder, **environment)
        with open(folder / f"output-{rank}", "w") as output:
            found.append(subprocess.Popen([sys.executable, *command], env=env, stdout=output, stderr=subprocess.STDOUT))
    return found


def finish(processes: list[subprocess.Popen], folder: Path, seconds: float) -> tuple[list[int], list[str]]:
    """Wait for all; those still there after ``seconds`` are killed. Returns exit codes and outputs."""
    end = time.monotonic() + seconds
    for process in processes:
        try:
            process.wait(max(end - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    return [p.returncode for p in processes], [(folder / f"output-{r}").read_text() for r in range(len(processes))]


def run(module: str, size: int, folder: Path, seconds: float = 240, **environment: str) -> Outcome:
    """Run every check of a module in ``size`` processes."""
    folder.mkdir(parents=True, exist_ok=True)
    port = str(free_port())
    processes = start(size, ["-m", "worker", module], folder, MASTER_PORT=port, **environment)
    codes, outputs = finish(processes, folder, seconds)
    checks: dict[str, list[str]] = {name: [] for name in names(module)}
    for rank in range(size):
        path = folder / f"results-{rank}.json"
        found = json.loads(path.read_text()) if path.exists() else {}
        for name, problems in checks.items():
            if name not in found:
                problems.append(f"rank {rank} (exit {codes[rank]}) never ran it:\n{outputs[rank][-3000:]}")
            elif found[name]:
                problems.append(f"rank {rank}:\n{found[name]}")
    return Outcome(codes, outputs, checks)
