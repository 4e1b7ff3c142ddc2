"""``python -m conformance.upstream_distributed run | report``: PyTorch's own tests of torch.distributed on the device.

They are those that the installed PyTorch brings along, ``torch.testing._internal.distributed.distributed_test``, which
PyTorch runs with gloo and NCCL. Three ranks go through them in step, each test in a process group of its own. The
device stands where they have GPUs: ``.cuda()`` and ``torch.cuda``'s functions on devices mean it, and tensors that
name no device lie on it. Resumes where it stopped.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "distributed" / "upstream.jsonl"
PAGE = ROOT / "docs" / "distributed-upstream.md"
RANKS = 3
SECONDS = 120.0
"""What a test may take before the processes are ended and started again after it."""

FOREIGN = {
    "names CUDA itself": ("not compiled with CUDA", "'cuda'", "cuda:", "No CUDA GPUs"),
    "needs torchvision": ("torchvision",),
    "needs more ranks": ("is out of range. Valid ranks",),
    "gloo's or NCCL's own names and words": (
        *("'gloo'", "GLOO", "nccl", "NCCL", "'custom' != 'tpu'", "monitoredBarrier", "(Timed out|closed|timeout)"),
        "local variable 'ddp_model'",  # assigned by the backend's name
    ),
    "makes tensors on the CPU": ("No backend type associated with device type cpu", "tpu:0 and cpu"),
    "objects whose comparison raises": ("ObjectPair",),
    "makes the default group in a way of its own": ("Default process group has not been initialized",),
}
"""What in an error shows that a test cannot be pointed at another device, backend, or launcher."""


# ---- a rank ---------------------------------------------------------------------------------------------------------


def _point_at_the_device() -> Any:
    """The module of the tests, with the device where it has GPUs."""
    os.environ |= {"BACKEND": "gloo", "TEMP_DIR": os.environ["JOB_FOLDER"]}
    import torch
    from torch.testing._internal import common_distributed

    import torchtpu  # noqa: F401

    common_distributed.TEST_CUDA = True
    to_device = {"cuda": lambda self, *_, **__: self.to("tpu")}
    for kind in (torch.Tensor, torch.nn.Module):
        kind.cuda = to_device["cuda"]
    torch.cuda.device_count = lambda: RANKS
    torch.cuda.set_device = torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
    torch.cuda.current_device = lambda: int(os.environ["RANK"])
    from torch.testing._internal.distributed import distributed_test

    # What was decided on import holds for gloo, which takes nearly all of the tests; from here on it is this backend.
    distributed_test.BACKEND = "tpu"
    torch.tpu.set_device(int(os.environ["RANK"]))
    torch.set_default_device("tpu")
    return distributed_test


def _one(case: Any, name: str, store: Any) -> tuple[str, str]:
    """Run a test: how it went, and why."""
    import unittest

    import torch.distributed as dist
    from torch.testing._internal.common_distributed import TEST_SKIPS

    try:
        dist.distributed_c10d._world.group_count = 0  # which a group that could not be made does not put back
        limit = datetime.timedelta(seconds=SECONDS / 4)
        dist.init_process_group("tpu", store=store, rank=case.rank, world_size=RANKS, timeout=limit)
        getattr(case, name)()
    except unittest.SkipTest as reason:
        return "skip", str(reason)
    except SystemExit as left:
        return "skip", next((s.message for s in TEST_SKIPS.values() if s.exit_code == left.code), f"exit {left.code}")
    except BaseException as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        return "fail", f"{type(error).__name__}: {str(error)[:1500]} ({Path(last.filename).name}:{last.lineno})"
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return "pass", ""


def worker(names: list[str]) -> None:
    """One rank: runs the tests in order, and writes a line for each."""
    import unittest

    import torch.distributed as dist

    module = _point_at_the_device()

    class Case(module.DistributedTest._DistTestBase, unittest.TestCase):  # type: ignore[misc, name-defined]
        rank, world_size = int(os.environ["RANK"]), str(RANKS)

        def _barrier(self, *_: Any, **__: Any) -> None:
            dist.barrier()

    from torch.testing._internal.common_utils import TestCase

    Case = type("Case", (Case, TestCase), {})  # type: ignore[misc]
    port = int(os.environ["MASTER_PORT"])
    store = dist.TCPStore("127.0.0.1", port, RANKS, Case.rank == 0, datetime.timedelta(seconds=SECONDS))
    with open(Path(os.environ["JOB_FOLDER"]) / f"results-{Case.rank}", "a", buffering=1) as results:
        for number, name in enumerate(names):
            store.add(f"at/{number}", 1)
            while store.add(f"at/{number}", 0) < RANKS:
                time.sleep(0.01)
            begun = time.monotonic()
            outcome, reason = _one(Case(name), name, dist.PrefixStore(f"test/{number}", store))
            seconds = round(time.monotonic() - begun, 2)
            results.write(json.dumps({"test": name, "outcome": outcome, "reason": reason, "seconds": seconds}) + "\n")


# ---- all ranks ------------------------------------------------------------------------------------------------------


def _names() -> list[str]:
    """The tests, in order, without importing them."""
    import ast
    import importlib.util

    spec = importlib.util.find_spec("torch.testing._internal.distributed")
    assert spec is not None and spec.submodule_search_locations
    tree = ast.parse((Path(spec.submodule_search_locations[0]) / "distributed_test.py").read_text())
    (outer,) = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "DistributedTest"]
    (base,) = [n for n in outer.body if isinstance(n, ast.ClassDef) and n.name == "_DistTestBase"]
    return [n.name for n in base.body if isinstance(n, ast.FunctionDef) and n.name.startswith("test_")]


def _start(folder: Path, names: list[str]) -> list[subprocess.Popen[bytes]]:
    for place in ("barrier", "test_dir", "init_dir"):
        (folder / place).mkdir(parents=True)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    (folder / "names").write_text("\n".join(names))
    found = []
    for rank in range(RANKS):
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
            "TORCHTPU_PLATFORM": "cpu",
            "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
            "OMP_NUM_THREADS": "1",
            "PYTORCH_PRINT_REPRO_ON_FAILURE": "0",
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(RANKS),
            "LOCAL_WORLD_SIZE": str(RANKS),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "JOB_FOLDER": str(folder),
        }
        with open(folder / f"output-{rank}", "wb") as output:
            command = [sys.executable, "-m", "conformance.upstream_distributed", "worker"]
            found.append(subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT))
    return found


def _read(folder: Path) -> list[list[dict[str, Any]]]:
    paths = [folder / f"results-{rank}" for rank in range(RANKS)]
    return [[json.loads(s) for s in p.read_text().splitlines()] if p.exists() else [] for p in paths]


def _merged(lines: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    """One line of those of the ranks: a test passes if it does on a rank that does not skip it, and fails on none."""
    for outcome in ("fail", "pass", "skip"):
        found = [n for n in lines if n["outcome"] == outcome]
        if found:
            break
    return found[0] | {"seconds": max(n["seconds"] for n in lines)}


def run(results: Path, only: str) -> None:
    """Run every test that is not recorded."""
    recorded = {json.loads(s)["test"] for s in results.read_text().splitlines()} if results.exists() else set()
    left = [n for n in _names() if n not in recorded and only in n]
    while left:
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place) / "job"
            processes = _start(folder, left)
            done, since = 0, time.monotonic() + SECONDS  # the start takes its time as well
            while done < len(left) and any(p.poll() is None for p in processes):
                if time.monotonic() - since > SECONDS:
                    break
                time.sleep(0.5)
                now = min(map(len, _read(folder)))
                if now > done:
                    done, since = now, time.monotonic()
            for process in processes:
                process.send_signal(signal.SIGKILL)
                process.wait()
            merged = [_merged(lines) for lines in zip(*_read(folder), strict=False)]
            if len(merged) < len(left):
                told = (folder / "output-0").read_text(errors="replace")[-1500:]
                codes = [p.returncode for p in processes]
                name = left[len(merged)]
                merged.append({"test": name, "outcome": "died", "reason": f"{codes}: {told}", "seconds": SECONDS})
            with open(results, "a") as file:
                file.writelines(json.dumps(n) + "\n" for n in merged)
            print(f"{len(merged)} tests, {len(left) - len(merged)} left", flush=True)
            left = left[len(merged) :]


def _kind(record: dict[str, Any]) -> str:
    """Why a test did not pass, in few words."""
    reason = record["reason"]
    if record["outcome"] == "skip":
        return reason.splitlines()[0][:90] if reason else "no reason given"
    return next((kind for kind, signs in FOREIGN.items() if any(s in reason for s in signs)), "other")


def report(results: Path, page: Path) -> None:
    """Write the page."""
    import torch

    records = [json.loads(s) for s in results.read_text().splitlines()]
    count = collections.Counter(r["outcome"] for r in records)
    failed = [r for r in records if r["outcome"] in ("fail", "died")]
    skipped = collections.Counter(_kind(r) for r in records if r["outcome"] == "skip")
    lines = [
        "# PyTorch's distributed tests",
        "",
        "Generated by `python -m conformance.upstream_distributed report` from what `python -m",
        "conformance.upstream_distributed run` found: the tests of",
        f"`torch.testing._internal.distributed.distributed_test` (torch {torch.__version__}), in {RANKS} processes,",
        "with the device where they have GPUs.",
        "",
        f"{len(records)} of {len(_names())} tests run: {count['pass']} pass, {len(failed)} fail, {count['skip']} skip.",
        "",
        "| failed | kind | error |",
        "|---|---|---|",
    ]
    for r in failed:
        error = " ".join(r["reason"].split())[:200].replace("|", "\\|").replace("`", "'")
        lines.append(f"| `{r['test']}` | {_kind(r)} | {error} |")
    lines += ["", "| skipped, by PyTorch's own reason | tests |", "|---|---:|"]
    lines += [f"| {reason} | {n} |" for reason, n in skipped.most_common()]
    page.write_text("\n".join(lines) + "\n")
    print(lines[7])


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m conformance.upstream_distributed")
    parser.add_argument("command", choices=("run", "report", "worker"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--only", default="", help="a part of the names of the tests to run")
    arguments = parser.parse_args()
    if arguments.command == "worker":
        worker((Path(os.environ["JOB_FOLDER"]) / "names").read_text().split())
    elif arguments.command == "run":
        run(arguments.results, arguments.only)
    else:
        report(arguments.results, arguments.page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
