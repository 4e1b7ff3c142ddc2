"""One process of a job: runs the checks of a module and leaves what failed as JSON."""

import datetime
import importlib
import inspect
import json
import os
import sys
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

import torchtpu  # noqa: F401


def main() -> None:
    module = importlib.import_module(sys.argv[1])
    rank = int(os.environ["RANK"])
    path = Path(os.environ["JOB_FOLDER"]) / f"results-{rank}.json"
    torch.tpu.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(getattr(module, "BACKEND", "tpu"), timeout=datetime.timedelta(seconds=60))
    checks = [f for name, f in inspect.getmembers(module, inspect.isfunction) if name.startswith("check_")]
    results: dict[str, str] = {}
    for check in sorted(checks, key=lambda f: f.__code__.co_firstlineno):
        name = check.__name__
        start = time.perf_counter()
        try:
            check()
            results[name] = ""
        except Exception:
            results[name] = traceback.format_exc()
        path.write_text(json.dumps(results))
        if rank == 0:
            print(f"{name} {time.perf_counter() - start:.2f} s {'FAILED' if results[name] else ''}", flush=True)
    dist.destroy_process_group()


main()
