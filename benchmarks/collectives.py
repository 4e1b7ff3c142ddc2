"""Collectives on tpu tensors against PyTorch's gloo on CPU tensors, in one run.

    python -m benchmarks.collectives                    # 4 processes
    python -m benchmarks.collectives --processes 2
    TORCHTPU_COLLECTIVES=xla python -m benchmarks.collectives

Every figure is the median over rounds in which both sides take turns, the slowest rank's; the ratio is ours / gloo's.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

SIZES = (64, 16 * 1024, 256 * 1024, 16 * 1024 * 1024)  # float32 elements


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--elements", type=int, nargs="*", default=SIZES, help="float32 elements of the tensors")
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        measure(arguments.elements)
        return
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={arguments.processes}", "--standalone"]
    environment = {"TORCHTPU_PLATFORM": "cpu", "OMP_NUM_THREADS": "1", **os.environ}
    sizes = ["--elements", *map(str, arguments.elements)]
    raise SystemExit(subprocess.call([*command, __file__, *sizes], env=environment))


def measure(sizes: Sequence[int]) -> None:
    """One rank's side."""
    import torch
    import torch.distributed as dist

    import torchtpu  # noqa: F401
    from torchtpu.distributed.transports import chosen
    from torchtpu.runtime import devices

    dist.init_process_group("cpu:gloo,tpu:tpu")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.tpu.set_device(int(os.environ["LOCAL_RANK"]))
    barrier = torch.zeros(1)

    def once(run: Callable[[], None]) -> float:
        dist.all_reduce(barrier)
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    def pair(elements: int, device: str, name: str) -> Callable[[], None]:
        x = torch.ones(elements, device=device)
        part, whole = torch.ones(elements // size, device=device), torch.ones(elements, device=device)
        operations = {
            "all_reduce": lambda: dist.all_reduce(x),
            "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(whole, part),
            "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(part, whole),
            "all_to_all_single": lambda: dist.all_to_all_single(whole, x),
            "broadcast": lambda: dist.broadcast(x, 0),
        }
        run = operations[name]

        def synchronised() -> None:
            run()
            if device != "cpu":
                torch.tpu.synchronize()

        return synchronised

    if rank == 0:
        transport = chosen(devices.choose_platform())
        print(f"{size} processes, torch {torch.__version__}, transport {transport}, {os.cpu_count()} CPUs")
        print("| collective | bytes | ours, ms | gloo, ms | ratio |\n|---|---:|---:|---:|---:|")
    names = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "broadcast")
    for name in names:
        for elements in sizes:
            ours, gloo = pair(elements, "tpu", name), pair(elements, "cpu", name)
            rounds = 9 if elements > 1 << 20 else 60
            for run in (ours, gloo, ours):
                run()
            times = [(once(ours), once(gloo)) for _ in range(rounds)]
            medians = torch.tensor([statistics.median(t) for t in zip(*times, strict=True)])
            dist.all_reduce(medians, op=dist.ReduceOp.MAX)
            a, b = (1e3 * m for m in medians.tolist())
            if rank == 0:
                print(f"| {name} | {elements * 4} | {a:.2f} | {b:.2f} | {a / b:.2f} |", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
