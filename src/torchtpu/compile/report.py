"""What ``torchtpu.explain`` found, as text and as plain data."""

from __future__ import annotations

import textwrap
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["Program", "Report", "Run"]

_SHOWN = 8  # kinds of operators or products that the text lists


@dataclass
class Program:
    """A compiled program. FLOPs and bytes are XLA's estimates, in which the body of a loop counts once.

    Attributes:
        name: what messages call it.
        runs: how often it runs in one call: a block that repeats is compiled once.
        operators: how often each aten overload was recorded in it; for a part of a program, in the whole.
        flops, transcendentals, bytes_accessed: of one run; None where XLA does not say.
        argument_bytes, output_bytes, temporary_bytes, peak_bytes: memory; the last is their sum without what the
            results take over from arguments.
        trace_seconds, compile_seconds: Python and XLA.
        loops: loops in its StableHLO.
        products: matrix products and convolutions, see ``padding.Product``.
        wasted: {edge of the matrix unit: fraction of the products' work on a TPU that goes into padding}.
        stablehlo, hlo: files with the program before and after XLA optimised it.
    """

    name: str
    runs: int
    operators: dict[str, int]
    flops: float | None
    transcendentals: float | None
    bytes_accessed: float | None
    argument_bytes: int
    output_bytes: int
    temporary_bytes: int
    peak_bytes: int
    trace_seconds: float
    compile_seconds: float
    loops: int
    products: list[dict[str, Any]]
    wasted: dict[int, float]
    stablehlo: str
    hlo: str


@dataclass
class Run:
    """One call of the function.

    Attributes:
        seconds: its time, compiling included.
        programs: what was compiled.
        reasons: why, in fused mode.
        flushes: how often what had been recorded was run.
        round_trips: where Python waited for the device: ``what``, ``where`` and ``count``.
        fallbacks: operators that ran on the CPU, and how often.
    """

    seconds: float = 0.0
    programs: list[Program] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    flushes: int = 0
    round_trips: list[dict[str, Any]] = field(default_factory=list)
    fallbacks: dict[str, int] = field(default_factory=dict)


@dataclass
class Report:
    """What ``torchtpu.explain`` returns; ``str()`` is for reading.

    Attributes:
        device: its name.
        folder: where the programs' files are.
        eager: the call in fused mode.
        compiled: the call through ``torch.compile(backend="tpu")``, as far as Dynamo captured it.
        graphs: Dynamo's graphs: ``operators`` and their ``count``.
        graph_breaks: ``reason``, ``where`` and ``details``.
        exact: why graphs whose sizes change were compiled for exact sizes: operators, and what of them is not known.
        recompiles: functions that Dynamo compiled anew in this call: ``function`` and ``reason``.
        error: why Dynamo captured nothing, or None.
        earlier: why fused mode compiled before this report, the latest reasons.
    """

    device: str
    folder: str
    eager: Run
    compiled: Run
    graphs: list[dict[str, Any]] = field(default_factory=list)
    graph_breaks: list[dict[str, str]] = field(default_factory=list)
    exact: list[str] = field(default_factory=list)
    recompiles: list[dict[str, str]] = field(default_factory=list)
    error: str | None = None
    earlier: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"torchtpu.explain on {self.device}", f"programs are in {self.folder}", ""]
        lines += [f"Fused eager mode: {_call(self.eager)}", *_indented(_run(self.eager)), ""]
        if self.error is not None:
            lines.append(f"torch.compile(backend='tpu'): {self.error}")
        else:
            graphs = _plural(len(self.graphs), "graph")
            breaks = _plural(len(self.graph_breaks), "break")
            lines.append(f"torch.compile(backend='tpu'): {graphs}, {breaks}, {_call(self.compiled)}")
        details = []
        for found in self.graph_breaks:
            details.append(f"graph break at {found['where']}: {found['reason']}")
        details += [f"compiled for exact sizes, not for buckets: {why}" for why in self.exact]
        for again in self.recompiles:
            details.append(f"{again['function']} was compiled again: {again['reason']}")
        lines += _indented([*details, *_run(self.compiled)])
        if self.earlier:
            lines += ["", "Compiled earlier in this process, the latest reasons:", *_indented(self.earlier[-_SHOWN:])]
        lines += [
            "",
            "FLOPs and bytes are XLA's estimates; the body of a loop counts once. Padding is an estimate from the",
            "products' sizes, for a matrix unit of 128 (up to v5p) and of 256 (from v6e on).",
        ]
        return "\n".join(lines)


def _call(run: Run) -> str:
    return f"{_plural(len(run.programs), 'program')} compiled, {run.seconds:.2f} s"


def _run(run: Run) -> list[str]:
    lines = [line for i, program in enumerate(run.programs) for line in _program(i, program)]
    lines += [f"compiled because: {reason}" for reason in run.reasons]
    lines += [f"waited for the device {x['count']}x at {x['where']}: {x['what']}" for x in run.round_trips]
    lines += [f"on the CPU, {n}x: {op}" for op, n in run.fallbacks.items()]
    return lines


def _program(index: int, program: Program) -> list[str]:
    times = f", run {program.runs} times" if program.runs > 1 else ""
    lines = [
        f"program {index + 1}: {program.name}{times}, traced in {program.trace_seconds:.2f} s, compiled in "
        f"{program.compile_seconds:.2f} s",
        f"  {_listed([f'{n} {name}' for name, n in program.operators.items()])}",
        f"  {_quantity(program.flops, 'FLOP')}, {_quantity(program.bytes_accessed, 'B')} accessed, memory "
        f"{_quantity(program.peak_bytes, 'B')} (arguments {_quantity(program.argument_bytes, 'B')}, results "
        f"{_quantity(program.output_bytes, 'B')}, temporaries {_quantity(program.temporary_bytes, 'B')})",
    ]
    if program.loops:
        lines.append(f"  {_plural(program.loops, 'loop')}, whose bodies count once")
    unaligned = [x for x in program.products if x["unaligned"]]
    if program.products:
        wasted = " / ".join(map(_percent, program.wasted.values()))
        kinds = f"{len(unaligned)} of {_plural(len(program.products), 'kind')} of product"
        lines.append(f"  padding on a TPU: {wasted} of the products' work; {kinds} not in whole tiles")
    for x in unaligned[:_SHOWN]:
        size = f"{x['batch']} x " if x["batch"] > 1 else ""
        lines.append(
            f"    {x['count']}x {x['kind']} {size}({x['m']}, {x['k']}) by ({x['k']}, {x['n']}) {x['dtype']}: "
            f"{', '.join(x['unaligned'])}; {_percent(x['wasted_128'])} / {_percent(x['wasted_256'])} wasted"
        )
    if len(unaligned) > _SHOWN:
        lines.append(f"    and {len(unaligned) - _SHOWN} more")
    return [*lines, f"  {program.stablehlo}", f"  {program.hlo}"]


def _listed(items: list[str]) -> str:
    more = f", and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return ", ".join(items[:_SHOWN]) + more


def _indented(lines: list[str]) -> list[str]:
    return [textwrap.indent(line, "  ") for line in lines]


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.{1 if fraction > 0.99 else 0}f}%"


def _plural(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def _quantity(n: float | None, unit: str) -> str:
    if n is None:
        return f"unknown {unit}"
    for prefix in ("", "k", "M", "G", "T"):
        if abs(n) < 1000 or prefix == "T":
            break
        n /= 1000
    return f"{n:.3g} {prefix}{unit}"
