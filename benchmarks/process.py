"""What must be measured in a process of its own: `import torch`, and the memory that moving a model takes."""

from __future__ import annotations

import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from benchmarks.measure import Measure

__all__ = ["measure_import", "measure_start", "measure_tenth_step", "measure_transfer"]


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


_STEPS = """
import json, sys, time
import torch, torchtpu
from transformers import LlamaConfig, LlamaForCausalLM
from benchmarks import jax_llama

torch.tpu.init()
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(**jax_llama.SIZES, use_cache=False)).to("tpu")
optimizer = torch.optim.AdamW(model.parameters())
ids = torch.randint(0, jax_llama.VOCAB, (jax_llama.BATCH, jax_llama.SEQ)).to("tpu")
torch.tpu.synchronize()
seconds = []
for _ in range(10):
    start = time.perf_counter()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    loss.item()
    seconds.append(time.perf_counter() - start)
stats = torch.tpu.compile_stats()
print(json.dumps({"seconds": seconds, **{k: stats[k] for k in ("compiles", "compile_seconds", "disk_seconds")}}))
"""


def _ten_steps(**environment: str) -> dict[str, Any]:
    return json.loads(_run(_STEPS, **environment).splitlines()[-1])


def measure_start() -> list[Measure]:
    """The first training step of a second process, whose programs are on disk, against a steady step."""
    with tempfile.TemporaryDirectory() as folder:
        from torchtpu._build import cache_dir

        for built in cache_dir().glob("torch-*"):
            os.symlink(built, os.path.join(folder, built.name))
        environment = {"TORCHTPU_CACHE_DIR": folder, "TORCHTPU_CACHE_LIMIT": "2048"}
        cold, warm = (_ten_steps(**environment) for _ in range(2))
    first, steady = warm["seconds"][0] - warm["disk_seconds"], statistics.median(warm["seconds"][3:])
    measure = Measure(
        "first step of a second process without load time, against a steady step",
        "s",
        first,
        steady,
        first,
        steady,
        2.0,
    )
    measure.note = (
        f"cold: {cold['seconds'][0]:.1f} s, {cold['compiles']} programs compiled in {cold['compile_seconds']:.1f} s; "
        f"warm: {warm['seconds'][0]:.2f} s, {warm['compiles']} compiled, loading took {warm['disk_seconds']:.2f} s"
    )
    return [measure]


def measure_tenth_step() -> list[Measure]:
    """Ten training steps from the first, everything compiled at once, against operators compiled one by one."""
    ours, theirs = (
        sum(_ten_steps(TORCHTPU_EAGER_MODE=mode, TORCHTPU_CACHE_LIMIT="0")["seconds"]) for mode in ("fused", "strict")
    )
    return [Measure("time to the tenth training step", "s", ours, theirs, ours, theirs, 1.0)]
