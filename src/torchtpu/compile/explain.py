"""``torchtpu.explain``: what a function costs on the device, and why."""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import torch

from torchtpu.compile.report import Program, Report, Run
from torchtpu.compile.tiles import UNITS, products
from torchtpu.eager import fallback, modes, trace
from torchtpu.runtime import devices
from torchtpu.runtime.observe import CompiledProgram, observing

__all__ = ["explain"]

_INTERNAL = tuple(
    f"{Path(str(module.__file__)).parent}/" for module in (torch, jax, sys.modules["torchtpu"], contextlib)
)


def explain(function: Callable[..., Any], *args: Any, dump: str | Path | None = None, **kwargs: Any) -> Report:
    """Call a function twice, in fused eager mode and through ``torch.compile(backend="tpu")``, and report what was
    compiled, what it costs and what slows it down.

    Everything is compiled anew, also what this process or the cache on disk has. Both calls do what the function
    does: buffers, parameters and the generator change as with any two calls.

    Args:
        function: a function or module; one that is compiled already is taken apart again.
        args, kwargs: its arguments.
        dump: the folder for the programs' StableHLO and HLO, made if it is not there; a temporary one by default.

    Returns:
        The report; print it.

    Raises:
        Exception: what the function raises in eager mode. What Dynamo raises is in the report.
    """
    original: Any = getattr(function, "_orig_mod", None) or getattr(function, "_torchdynamo_orig_callable", function)
    devices.initialise()
    folder = Path(dump) if dump is not None else Path(tempfile.mkdtemp(prefix="torchtpu-explain-"))
    folder.mkdir(parents=True, exist_ok=True)
    earlier = list(trace.statistics()["misses"])
    with modes.set_eager_mode("fused"):
        report = Report(devices.device_name(0), str(folder), Run(), Run(), earlier=earlier)
        with _watching(report, report.eager, folder, "eager"):
            result = original(*args, **kwargs)  # held until what computes it has run
        with _watching(report, report.compiled, folder, "compiled"):
            try:
                result = _capture(report, original, args, kwargs)  # noqa: F841 - held as well
            except Exception as failure:
                report.error = f"{type(failure).__name__}: {failure}".splitlines()[0]
    if report.error is None and not report.graphs:
        report.error = "Dynamo found no operators to capture"
    return report


@contextlib.contextmanager
def _watching(report: Report, run: Run, folder: Path, prefix: str) -> Iterator[None]:
    """Note what a block compiles and waits for; the block begins and ends with nothing recorded."""
    trips: Counter[tuple[str, str]] = Counter()
    ran_on_cpu = Counter(fallback.fallbacks())

    def on_compile(program: CompiledProgram) -> None:
        run.programs.append(_describe(program, folder / f"{prefix}-{len(run.programs) + 1:02}"))

    def on_wait(what: str) -> None:
        trips.update([(what, _where())])

    with trace.fresh_cache() as cache, observing(on_compile, on_wait, report.exact.append):
        start = time.perf_counter()
        try:
            yield
        finally:
            trace.flush_all()
            for index in range(devices.count()):
                devices.synchronize(index)
            run.seconds = time.perf_counter() - start
            run.reasons, run.flushes = list(cache.misses), cache.counts["flushes"]
    run.round_trips = [{"what": what, "where": where, "count": n} for (what, where), n in trips.items()]
    run.fallbacks = dict(Counter(fallback.fallbacks()) - ran_on_cpu)


def _where() -> str:
    """The line of the user's program that is being executed."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((*_INTERNAL, "<")):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return "PyTorch"


def _describe(program: CompiledProgram, path: Path) -> Program:
    stablehlo, hlo = Path(f"{path}.stablehlo.mlir"), Path(f"{path}.hlo.txt")
    stablehlo.write_text(program.text)
    hlo.write_text(program.executable.as_text() or "")
    cost, memory = program.executable.cost_analysis() or {}, program.executable.memory_analysis()
    sizes = [getattr(memory, f"{kind}_size_in_bytes", 0) for kind in ("argument", "output", "temp", "alias")]
    found = products(program.text)
    work = sum(p.flops * n for p, n in found)
    filled = {unit: sum(p.flops * n / (1 - p.wasted(unit)) for p, n in found if p.flops) for unit in UNITS}
    return Program(
        name=program.about.name,
        runs=program.about.runs,
        operators=dict(Counter(program.about.operators).most_common()),
        flops=cost.get("flops"),
        transcendentals=cost.get("transcendentals"),
        bytes_accessed=cost.get("bytes accessed"),
        argument_bytes=sizes[0],
        output_bytes=sizes[1],
        temporary_bytes=sizes[2],
        peak_bytes=sum(sizes[:3]) - sizes[3],
        trace_seconds=program.trace_seconds,
        compile_seconds=program.compile_seconds,
        loops=program.text.count("stablehlo.while"),
        products=[p.as_dict(n) for p, n in found],
        wasted={unit: round(1 - work / n, 4) if n else 0.0 for unit, n in filled.items()},
        stablehlo=str(stablehlo),
        hlo=str(hlo),
    )


def _capture(report: Report, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function through Dynamo, apart from what it has compiled before and will compile."""
    from torch._dynamo.utils import get_compilation_metrics

    from torchtpu.compile.backend import backend

    def noting(module: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        names = Counter(str(n.target) for n in module.graph.nodes if n.op.startswith("call_"))
        report.graphs.append({"count": names.total(), "operators": dict(names.most_common())})
        reason: Any = module.compile_subgraph_reason
        if reason is not None and reason.graph_break:
            at = reason.user_stack[-1] if reason.user_stack else None
            where = f"{at.filename}:{at.lineno}" if at is not None else "an unknown line"
            first, _, rest = reason.reason.partition("\n")
            report.graph_breaks.append({"reason": first, "where": where, "details": rest.strip()})
        return backend(module, inputs)

    known = get_compilation_metrics()
    try:
        apart: Any = {"isolate_recompiles": True}  # which the declared types of torch.compile leave out
        return torch.compile(function, backend=noting, **apart)(*args, **kwargs)
    finally:
        for metrics in get_compilation_metrics():
            if not any(metrics is m for m in known) and metrics.recompile_reason:
                report.recompiles.append({"function": str(metrics.co_name), "reason": metrics.recompile_reason})
