"""What must be measured in a process of its own: `import torch`, and the memory that moving a model takes."""

from __future__ import annotations

import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import time

from benchmarks.measure import Measure

__all__ = ["measure_import", "measure_transfer"]


def _installed() -> bool:
    return any(p.value.startswith("torchtpu.") for p in importlib.metadata.entry_points(group="torch.backends"))


def _run(program: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout


def measure_import(rounds: int = 9) -> list[Measure]:
    """`import torch` with the device registered by it, and without."""
    # From a source folder no entry point exists; the explicit import does the same work.
    ours = "import torch" if _installed() else "import torch, torchtpu"
    check = "; import sys; assert 'jax' not in sys.modules and torch._C._get_privateuse1_backend_name() == 'tpu'"
    _run(ours + check)
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for program, autoload, found in ((ours, "1", times[0]), ("import torch", "0", times[1])):
            start = time.perf_counter()
            _run(program, TORCH_DEVICE_BACKEND_AUTOLOAD=autoload)
            found.append(time.perf_counter() - start)
    a, b = times
    measure = Measure(f"`{ours}`", "s", min(a), min(b), statistics.median(a), statistics.median(b))
    measure.note = (
        f"{min(a) - min(b):+.3f} s by the least times, {measure.ours_median - measure.theirs_median:+.3f} s by the "
        "medians (goal: at most 0.1 s more)"
    )
    return [measure]


_TRANSFER = """
import json, sys, threading, time
import torch, torchtpu

GB, PARTS = 10**9, 16

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

model = torch.nn.ParameterList([torch.nn.Parameter(torch.rand(GB // 4 // PARTS)) for _ in range(PARTS)])
originals = [p.data for p in model]  # kept, so that memory they free does not hide what the copies take
torch.ones(1, device="tpu").cpu()
clones = []
start = time.perf_counter()
for p in originals:
    clones.append(p.clone())
clone = time.perf_counter() - start
del clones
before, peak, done = resident(), 0, threading.Event()

def watch():
    global peak
    while not done.wait(0.002):
        peak = max(peak, resident())

watcher = threading.Thread(target=watch)
watcher.start()
start = time.perf_counter()
model.to("tpu")
torch.tpu.synchronize()
seconds = time.perf_counter() - start
done.set()
watcher.join()
end = resident()
assert all(p.device.type == "tpu" for p in model)
torch.testing.assert_close(model[3].detach().cpu(), originals[3], rtol=0, atol=0)
grown = {"peak": (max(peak, end) - before) / GB, "end": (end - before) / GB}
print(json.dumps({"move": seconds, "clone": clone} | grown))
"""


def measure_transfer(rounds: int = 3) -> list[Measure]:
    """1 GB of parameters to the device, against `torch.clone` of the same; and how much memory the process grew by."""
    results = [json.loads(_run(_TRANSFER).splitlines()[-1]) for _ in range(rounds)]
    move, clone = [r["move"] for r in results], [r["clone"] for r in results]
    peak, end = (max(r[key] for r in results) for key in ("peak", "end"))
    measure = Measure(
        "moving 1 GB of parameters", "s", min(move), min(clone), statistics.median(move), statistics.median(clone)
    )
    measure.note = f"the process grew by {end:.2f} copies, and by {peak:.2f} at its peak (goal: at most one copy)"
    return [measure]
