"""Does what runs on the device compile for real TPUs? ``python -m conformance.tpu run | report``.

``run`` takes the first samples of every entry of ``op_db`` (their gradients too, for float32), runs them on the
emulated device, and compiles every program they made with libtpu, ahead of time. It needs no TPU, and resumes where it
stopped. ``report`` writes ``docs/tpu-compile.md``.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import re
import sys
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import torch
from torch.utils._pytree import tree_leaves

from torchtpu.aot import TOPOLOGIES, Compiler, Result, lower_for_tpu

RESULTS = Path(__file__).parent / "results" / "tpu"
DTYPES = ("float32", "bfloat16", "int32", "bool")
FORGET = 150
"""Tasks after which the programs that this process has compiled are dropped: each holds memory mappings."""

Key = tuple[str, str, str]


class Collector:
    """Notes every program that an operator runs, and every operator that runs without one.

    Made before the first operator of the process: kernels keep what they were built with.
    """

    def __init__(self) -> None:
        from torchtpu.eager import kernels

        self.programs: dict[int, Any] = {}
        self.outside: set[str] = set()
        self._kernels: set[Any] = set()
        launcher, runner, dynamic = kernels.launcher, kernels.Kernel.runner, kernels._Dynamic.__call__

        def noting_launcher(program: Any, call: Any) -> Any:
            launch = launcher(program, call)

            def noted(*args: Any) -> Any:
                self.programs[program.uid] = program
                return launch(*args)

            return noted

        def noting_runner(kernel: Any, *args: Any) -> Any:
            self._kernels.add(kernel)
            return runner(kernel, *args)

        def noting_dynamic(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            self.outside.add(str(kernel.op))
            return dynamic(kernel, *args, **kwargs)

        kernels.launcher = noting_launcher
        kernels.Kernel.runner = noting_runner
        kernels._Dynamic.__call__ = noting_dynamic

    def start(self) -> None:
        """Begin a task."""
        self.programs, self.outside = {}, set()

    def forget(self) -> None:
        """Drop the programs of all tasks so far from the kernels."""
        for kernel in self._kernels:
            kernel.calls.clear()
            kernel.programs.clear()
        jax.clear_caches()


def chosen(cases: Iterable[Any], limit: int) -> list[Any]:
    """The first cases of which no tensor is empty: the compiler drops all that is computed from an empty one. If there
    are none among the first 64, the first cases.
    """
    first = list(itertools.islice(cases, 64))
    full = [c for c in first if all(x.numel() for x in tree_leaves(c.inputs) if isinstance(x, torch.Tensor))]
    return (full or first)[:limit]


def run_samples(entry: str, dtype: str, limit: int) -> tuple[int, str]:
    """Run a few samples on the device, and their gradients for float32: how many ran, and the first error."""
    from conformance.suites import SUITES
    from conformance.tolerances import HOST_ARGUMENTS
    from conformance.transfer import copied, to_cpu, to_device

    suites, ran, first = SUITES(), 0, ""
    names = ["ops", "grad"] if dtype == "float32" and (entry, dtype) in suites["grad"].tasks() else ["ops"]
    for name in names:
        cases, _ = suites[name].cases(entry, dtype)
        for case in chosen(cases, limit):
            on_host = copied(case.inputs)
            moved = to_device(case.inputs)
            if entry in HOST_ARGUMENTS:
                moved = moved[0], *case.inputs[1:]
            torch.manual_seed(0)
            try:
                to_cpu(case.run(*moved))
                ran += 1
            except Exception as error:
                try:
                    case.run(*on_host)
                except Exception:  # no sample of this dtype: the CPU refuses it as well
                    continue
                first = first or f"{case.label} of {name}: {type(error).__name__}: {' '.join(str(error).split())[:240]}"
    return ran, first


class Checker:
    """Compiles programs for topologies, each text once."""

    def __init__(self, timeout: float) -> None:
        self.compiler = Compiler(timeout)
        self.known: dict[tuple[str, str], Result] = {}
        self.compiled = 0

    def lower(self, program: Any) -> tuple[str, Result | None]:
        """The program's StableHLO, or why there is none."""
        avals = [jax.ShapeDtypeStruct(t.shape, t.dtype, weak_type=t.weak_type) for t in program.input_types]
        try:
            return lower_for_tpu(program.function, avals), None
        except Exception as error:
            if "different from the lowering platform" in str(error):
                return "", Result("host", "a callback to the host, which JAX lowers only where there is a TPU")
            return "", Result("lower", f"{type(error).__name__}: {error}")

    def check(self, text: str, topology: str) -> Result:
        """Compile a text, unless an equal one has been compiled."""
        key = hashlib.sha256(text.encode()).hexdigest(), topology
        if key not in self.known:
            self.known[key] = self.compiler.compile(text, topology)
            self.compiled += 1
        return self.known[key]


def brief(message: str) -> str:
    """A compiler's message without what differs from program to program: shapes, numbers of instructions, places."""
    line = " ".join(message.split("\n\n")[0].split())
    line = re.sub(r"%[\w.-]+ = (\w+)\[[\d,]*\](\{[^}]*\})? ([\w-]+)\(.*", r"a \3 of \1", line)
    return re.sub(r"(, )?metadata=\{.*", "", line)[:300]


RANK = ("ok", "host", "fail", "timeout", "crash")
"""What may become of a program, from best to worst; an entry is as good as its worst program."""


def examine(entry: str, dtype: str, topologies: list[str], limit: int, collector: Collector, checker: Checker) -> Any:
    """The records of one entry and dtype, one a topology."""
    start = time.perf_counter()
    collector.start()
    before = torch.tpu.fallbacks()
    ran, error = run_samples(entry, dtype, limit)
    fallbacks = sorted(op for op, n in torch.tpu.fallbacks().items() if n > before.get(op, 0))
    texts = [(p.name, *checker.lower(p)) for p in collector.programs.values()]
    for topology in topologies:
        status, reason = "ok", ""
        if fallbacks or collector.outside:
            status = "host"
            reason = ", ".join(sorted(collector.outside) + [f"{f} on PyTorch CPU" for f in fallbacks])
        for name, text, refused in texts:
            result = refused or checker.check(text, topology)
            became = "fail" if result.status == "lower" else result.status
            if RANK.index(became) > RANK.index(status):
                status, reason = became, f"{name}: {brief(result.message)}"
        if error:
            status, reason = "error", error
        elif ran == 0:
            status, reason = "empty", "the database has no sample that the CPU runs"
        record = {"entry": entry, "dtype": dtype, "topology": topology, "status": status, "programs": len(texts)}
        record |= {"reason": reason} if reason else {}
        yield {**record, "seconds": round(time.perf_counter() - start, 2), "limit": limit}
        start = time.perf_counter()


def read(folder: Path) -> dict[Key, dict[str, Any]]:
    """Every recorded task; a later line replaces an earlier one."""
    path = folder / "entries.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    records = [json.loads(line) for line in lines]
    return {(r["entry"], r["dtype"], r["topology"]): r for r in records}


def tasks(dtypes: list[str]) -> list[tuple[str, str]]:
    """Every (entry, dtype) of ``op_db`` with these dtypes."""
    from conformance.suites import SUITES

    return [(e, d) for e, d in SUITES()["ops"].tasks() if d in dtypes]


def run(arguments: argparse.Namespace) -> int:
    """Run what the arguments select and is not recorded yet."""
    os.environ.setdefault("TORCHTPU_PLATFORM", "cpu")  # libtpu is installed, but there need not be a TPU
    torch.set_num_threads(1)
    torch.tpu.eager_mode = "strict"
    warnings.simplefilter("ignore")
    arguments.results.mkdir(parents=True, exist_ok=True)
    recorded = {} if arguments.redo else read(arguments.results)
    if arguments.failed:
        recorded = {k: r for k, r in recorded.items() if r["status"] in ("ok", "host", "empty")}
    wanted = {}
    for entry, dtype in tasks(arguments.dtypes):
        missing = [t for t in arguments.topologies if (entry, dtype, t) not in recorded]
        if missing and re.search(arguments.only, entry):
            wanted[entry, dtype] = missing
    collector, checker = Collector(), Checker(arguments.timeout)
    end = time.monotonic() + arguments.minutes * 60 if arguments.minutes else float("inf")
    with checker.compiler, open(arguments.results / "entries.jsonl", "a") as file:
        for n, ((entry, dtype), missing) in enumerate(wanted.items(), 1):
            if time.monotonic() > end:
                print("out of time; run again to resume", file=sys.stderr)
                break
            for record in examine(entry, dtype, missing, arguments.limit, collector, checker):
                file.write(json.dumps(record) + "\n")
                file.flush()
                if record["status"] not in ("ok", "host", "empty"):
                    print(f"{entry} {dtype} {record['topology']} {record['status']}: {record['reason'][:200]}")
            if n % 25 == 0 or n == len(wanted):
                print(f"{n}/{len(wanted)} {entry} {dtype}: {checker.compiled} compiles", file=sys.stderr, flush=True)
            if n % FORGET == 0:
                collector.forget()
    return 0


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m conformance.tpu", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("run", help="compile for TPUs what op_db runs; resumes where it stopped")
    one.add_argument("--only", default="", metavar="REGEX", help="entries whose name matches")
    one.add_argument("--dtypes", nargs="+", default=list(DTYPES), help=f"default: {' '.join(DTYPES)}")
    one.add_argument("--topologies", nargs="+", default=list(TOPOLOGIES.values()))
    one.add_argument("--limit", type=int, default=1, metavar="N", help="samples of an entry and dtype (default: 1)")
    one.add_argument("--timeout", type=float, default=120, help="seconds for one compile")
    one.add_argument("--minutes", type=float, default=0, help="stop after this long (default: when done)")
    one.add_argument("--redo", action="store_true", help="run again what is recorded")
    one.add_argument("--failed", action="store_true", help="run again what is recorded and did not compile")
    one.add_argument("--results", type=Path, default=RESULTS)
    report = commands.add_parser("report", help="write docs/tpu-compile.md")
    report.add_argument("--results", type=Path, default=RESULTS)
    report.add_argument("--docs", type=Path, default=Path(__file__).parents[1] / "docs")
    arguments = parser.parse_args()
    if arguments.command == "run":
        return run(arguments)
    from conformance.tpu_report import write

    return write(arguments.results, arguments.docs)


if __name__ == "__main__":
    sys.exit(main())
