"""Check a model on a topology: trace it, lay it out by a plan, compile it, and say what that means."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
import torch
from jax.sharding import AbstractMesh, AxisType

from torchtpu.aot.compile import Compiler, Result
from torchtpu.aot.count import Counts, count
from torchtpu.aot.evaluate import Evaluator
from torchtpu.aot.findings import find, refused
from torchtpu.aot.graph import Graph, capture
from torchtpu.aot.hlo import Hlo, read_hlo
from torchtpu.aot.layout import Layout
from torchtpu.aot.report import Fit, MemoryUse, Report, Timing
from torchtpu.aot.roofline import predict
from torchtpu.aot.saved import EXECUTABLE, write_manifest
from torchtpu.aot.step import Step, build_step
from torchtpu.aot.topology import Topology, standard_topologies
from torchtpu.integrations import experts
from torchtpu.lowering.apply import NoLowering
from torchtpu.sharding import Plan, PlanError, parse, preset
from torchtpu.zoo import ModelSource, count_parameters
from torchtpu_cli import versions

__all__ = ["Request", "Traced", "candidates", "check", "search", "trace"]

TIMEOUT = 3600.0
"""Seconds after which a compile is given up."""

Progress = Callable[[str], contextlib.AbstractContextManager[None]]


@dataclass(frozen=True)
class Request:
    """What is to be checked.

    Attributes:
        source: the model.
        kind: ``"train"``, ``"infer"`` or ``"decode"``.
        batch: samples in a step, all devices together.
        sequence: tokens of each.
        dtype: of the parameters.
        remat: what the backward pass keeps of a layer: ``"full"`` (nothing but its input), ``"dots"`` or ``"none"``.
        timeout: seconds after which a compile is given up.
    """

    source: ModelSource
    kind: str = "train"
    batch: int = 8
    sequence: int = 4096
    dtype: torch.dtype = torch.bfloat16
    remat: str = "full"
    timeout: float = TIMEOUT


@dataclass
class Traced:
    """A model's graph, good for any topology and plan."""

    request: Request
    graph: Graph
    parameters: int
    timing: Timing


@contextlib.contextmanager
def _silent(what: str) -> Iterator[None]:
    yield


def trace(request: Request, progress: Progress = _silent) -> Traced:
    """Build the model on the meta device and trace it.

    Args:
        request: what is to be checked.
        progress: makes a context that says what is under way.

    Raises:
        ModelError: the model cannot be built or fed.
        GraphError: it cannot be traced.
    """
    timing = Timing()
    source = request.source
    with progress(f"building {source.name} without weights"), _timed(timing, "build"):
        model = source.build("meta", request.dtype)
        model.train(request.kind == "train")
        experts.use(model)
        inputs = source.example_inputs(request.kind, request.batch, request.sequence, "meta", request.dtype)
        # A factory may have inputs of its own, whatever was asked for.
        batch = source.units(request.kind, request.batch, request.sequence).batch
        if "use_cache" in inspect.signature(model.forward).parameters and request.kind != "decode":
            inputs["use_cache"] = False
        parameters = count_parameters(model)
    with progress(f"tracing {type(model).__name__}"), _timed(timing, "trace"), _grad(request.kind == "train"):
        graph = capture(model, inputs)
    return Traced(dataclasses.replace(request, batch=batch), graph, parameters, timing)


def check(
    traced: Traced,
    topology: Topology,
    plan: Plan,
    *,
    progress: Progress = _silent,
    compiler: Compiler | None = None,
    save: Path | None = None,
) -> Report:
    """Compile a traced model for a topology and report.

    Args:
        traced: the model.
        topology: the machine.
        plan: how the model is divided; its mesh has as many devices as the topology.
        progress: makes a context that says what is under way.
        compiler: a process with libtpu to use; a new one by default.
        save: a folder for the compiled executable (see ``saved``).

    Raises:
        PlanError: the plan does not fit the model or the topology.
        ModuleNotFoundError: libtpu is not installed.
    """
    if plan.devices != topology.devices:
        raise PlanError(f"the plan is for {plan.devices} devices, {topology.name} has {topology.devices}")
    request, timing = traced.request, dataclasses.replace(traced.timing)
    report = _blank(traced, topology, plan, timing)
    obstacles = refused(traced.graph)
    if obstacles:
        return dataclasses.replace(report, status="lower", message=obstacles[0].what, findings=obstacles)
    step = build_step(traced.graph, _layout(plan), request.kind, request.remat)
    _check_batch(step, request.batch)
    report.loops = [(loop.name, loop.length) for loop in step.evaluator.loops]
    report.assumptions = [s[0].upper() + s[1:] + "." for s in step.assumptions]
    report.memory = _memory(step, topology, None)
    try:
        with progress(f"lowering for {topology.chip.generation}"), _timed(timing, "lower"):
            counts = count(step.jaxpr())
            text = step.stablehlo()
    except Exception as error:  # whatever JAX or a lowering says, it is what the model cannot do
        reason = str(error).strip().split("\n")[0]
        named = reason if isinstance(error, NoLowering) else f"{type(error).__name__}: {reason}"
        return dataclasses.replace(report, status="lower", message=named)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="torchtpu-check-"))
        compiler = compiler or stack.enter_context(Compiler(request.timeout))
        with progress(f"compiling for {topology.name} ({topology.devices} devices)"), _timed(timing, "compile"):
            file = None
            if save is not None:
                save.mkdir(parents=True, exist_ok=True)
                file = str(save / EXECUTABLE)
            mesh = list(plan.mesh.values())
            result = compiler.compile(
                text, topology.name, mesh=mesh, boxes=plan.experts is not None, dump=folder, save=file
            )
        timing.compiler_bytes = result.compiler_bytes
        if not result.ok:
            report.status, report.message = _failure(result, report.memory)
            with progress("looking for what wastes the chip"), _timed(timing, "analyse"):
                report.findings = find(step, counts, None, None, topology)
                report.fits = _fits(traced, topology, plan, report.memory if report.memory.temporaries else None)
            return report
        if save is not None:
            with jax.enable_x64(True):
                write_manifest(save, step, topology.name, request.source.name, result.coordinates)
            report.saved = str(save)
        with progress("reading the compiled program"), _timed(timing, "analyse"):
            hlo = read_hlo(next(Path(folder).glob("*after_optimizations.txt")))
            _analyse(report, traced, step, counts, hlo, result, topology)
    return report


def _analyse(
    report: Report, traced: Traced, step: Step, counts: Counts, hlo: Hlo, result: Result, topology: Topology
) -> None:
    request = traced.request
    report.memory = _memory(step, topology, result)
    if not report.memory.fits:
        report.status, report.message = "memory", "the compiled step needs more HBM than there is"
    units = report.units if report.unit == "tokens" else None
    report.prediction = predict(
        counts,
        hlo.collectives,
        topology,
        memory=hlo.memory,
        coordinates=result.coordinates,
        tokens=units,
        model_flops=_model_flops(counts, step),
    )
    report.findings = find(step, counts, hlo, report.prediction, topology)
    report.fits = _fits(traced, topology, step.plan, report.memory)
    report.assumptions += [a for a in (*report.prediction.assumptions, *hlo.assumptions) if a not in report.assumptions]
    if (
        step.plan.experts
        and step.plan.capacity is not None
        and any("experts" in str(n.target) for n in traced.graph.fx.nodes)
    ):
        report.assumptions.append(
            f"Each pair of devices exchanges at most {step.plan.capacity:g} times the mean number of tokens for the "
            "experts; what is over it is dropped (capacity in the plan, null to keep all)."
        )
    if request.kind != "train":
        report.assumptions.append("Inputs lie on the device already; tokens are not sampled in the step.")


def _model_flops(counts: Counts, step: Step) -> float | None:
    """Products that the model needs: of experts, without those for room that holds no token. None: all that count."""
    capacity = step.plan.capacity
    nodes = step.evaluator.scopes
    experts_of = [s for s, n in nodes.items() if n.target is torch.ops.torchtpu.experts.default]
    if not experts_of or step.plan.experts is None or capacity is None or capacity <= 1:
        return None
    spent = sum(
        op.flops
        for op in counts.ops
        if op.is_mxu and op.phase != "recompute" and any(scope in op.scope for scope in experts_of)
    )
    return counts.mxu_flops("forward", "backward") - spent * (1 - 1 / capacity)


def _layout(plan: Plan) -> Layout:
    types = (AxisType.Auto,) * len(plan.mesh)
    return Layout(plan, AbstractMesh(tuple(plan.mesh.values()), tuple(plan.mesh), axis_types=types), "tpu")


def _check_batch(step: Step, batch: int) -> None:
    """A batch that the plan cannot divide would be copied to every device."""
    plan = step.plan
    parts = plan.size(plan.batch)
    if batch % parts:
        axes = " x ".join(f"{a}={plan.mesh[a]}" for a in plan.batch)
        first = next((v.name for v in step.evaluator.values if v.kind == "input"), "the input")
        raise PlanError(
            f"{first}: dimension 0 (the batch, {batch}) does not divide over {axes}: take a batch that is a multiple "
            f"of {parts}, or another plan"
        )


def _blank(traced: Traced, topology: Topology, plan: Plan, timing: Timing) -> Report:
    request, source = traced.request, traced.request.source
    units = source.units(request.kind, request.batch, request.sequence)
    return Report(
        model=source.name,
        parameters=traced.parameters,
        published=source.published_parameters,
        published_source=source.published.source if source.published else "",
        kind=request.kind,
        batch=request.batch,
        sequence=request.sequence,
        units=units.count,
        unit=units.name,
        dtype=str(request.dtype).removeprefix("torch."),
        topology=topology.name,
        chips=topology.chips,
        devices=topology.devices,
        plan=plan.as_dict(),
        plan_name=plan.name,
        loops=[],
        timing=timing,
        versions=versions(),
    )


def _memory(step: Step, topology: Topology, result: Result | None) -> MemoryUse:
    parts = step.bytes_per_device()
    optimizer = sum(parts.get(k, 0) for k in ("m", "v", "count"))
    state = parts["parameters"] + optimizer + parts["buffers"] + parts["inputs"]
    outputs = result.output_bytes - result.alias_bytes if result else 0
    temporaries, code = (result.temporary_bytes, result.code_bytes) if result else (0, 0)
    arguments = result.argument_bytes if result else state
    return MemoryUse(
        parameters=parts["parameters"],
        optimizer=optimizer,
        buffers=parts["buffers"],
        inputs=parts["inputs"],
        outputs=outputs,
        temporaries=temporaries,
        code=code,
        total=arguments + outputs + temporaries + code,
        available=topology.chip.usable_hbm_bytes,
        compiled=result is not None,
    )


_OUT_OF_MEMORY = re.compile(r"Used ([\d.]+)([KMGT]?) of [\d.]+[KMGT]? hbm[^\n]*", re.IGNORECASE)
_TEMPORARIES = re.compile(r"HLO temporaries \(([\d.]+)([KMGT]?)\) exceeds[^\n]*", re.IGNORECASE)
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def _failure(result: Result, memory: MemoryUse) -> tuple[str, str]:
    """(status, message). A compiler that gives up for want of memory says how much it would have used: ``memory``
    learns it.
    """
    for pattern, beside in ((_OUT_OF_MEMORY, memory.total), (_TEMPORARIES, 0)):
        found = pattern.search(result.message)
        if found is not None:
            memory.temporaries = max(0, round(float(found[1]) * _UNITS[found[2].upper()]) - beside)
            memory.total += memory.temporaries
            return "memory", found[0]
    if "RESOURCE_EXHAUSTED" in result.message:
        return "memory", result.message.split("\n")[0]
    return result.status, result.message


def _fits(traced: Traced, topology: Topology, plan: Plan, memory: MemoryUse | None) -> list[Fit]:
    """Which machines of the generation the step would fit, by the state's bytes and the temporaries' share."""
    found = []
    for other in standard_topologies(topology.chip.generation):
        resized = _resized(plan, other.devices)
        if resized is None or traced.request.batch % resized.size(resized.batch):
            continue
        layout = _layout(resized)
        step_values = Evaluator(traced.graph, layout).values
        weights = sum(resized.bytes(v.shape, v.dtype.itemsize, v.spec) for v in step_values)
        moments = sum(resized.bytes(v.shape, 4, v.spec) for v in step_values if v.trained)
        state = weights + (2 * moments if traced.request.kind == "train" else 0)
        share = topology.devices / other.devices
        temporaries = int((memory.temporaries + memory.outputs) * share) + memory.code if memory is not None else 0
        fits = state + temporaries <= other.chip.usable_hbm_bytes
        found.append(Fit(other.name, other.devices, resized.name, state, temporaries, fits))
    return found


def _resized(plan: Plan, devices: int) -> Plan | None:
    """A preset on another number of devices: its first axis grows or shrinks. None for a plan that is no preset."""
    if not plan.name or plan.name.endswith(".json"):
        return None
    inner = dict(list(plan.mesh.items())[1:])
    first = next(iter(plan.mesh))
    rest = 1
    for n in inner.values():
        rest *= n
    if devices % rest:
        return None
    return preset({first: devices // rest, **inner})


@contextlib.contextmanager
def _timed(timing: Timing, part: str) -> Iterator[None]:
    start = time.perf_counter()
    try:
        yield
    finally:
        setattr(timing, part, round(time.perf_counter() - start, 2))


@contextlib.contextmanager
def _grad(wanted: bool) -> Iterator[None]:
    with torch.set_grad_enabled(wanted):
        yield


def search(
    traced: Traced,
    topology: Topology,
    *,
    progress: Progress = _silent,
    compiler: Compiler | None = None,
    save: Path | None = None,
    most: int = 4,
) -> Report:
    """Compile with several plans and report the one that fits and is predicted to be fastest.

    Args:
        most: plans that are compiled; they are taken in the order of ``candidates``.

    Raises:
        PlanError: no preset divides the model and its batch over the topology.
    """
    tried: list[tuple[str, str, int, float]] = []
    best: Report | None = None
    plans = candidates(traced, topology)[:most]
    if not plans:
        raise PlanError(
            f"no preset divides a batch of {traced.request.batch} over the {topology.devices} devices of "
            f"{topology.name}: take a batch that is a multiple of the devices, or give a plan"
        )
    with contextlib.ExitStack() as stack:
        compiler = compiler or stack.enter_context(Compiler(traced.request.timeout))
        for i, plan in enumerate(plans, 1):
            numbered: Progress = lambda what, i=i, plan=plan: progress(f"plan {i} of {len(plans)}, {plan.name}: {what}")  # type: ignore[misc]  # noqa: E731
            report = check(traced, topology, plan, progress=numbered, compiler=compiler)
            seconds = report.prediction.serial_seconds if report.prediction else 0.0
            tried.append((plan.name, report.status, report.memory.total if report.memory else 0, seconds))
            if best is None or _rank(report) < _rank(best):
                best = report
        assert best is not None
        if save is not None:
            best = check(traced, topology, parse(best.plan_name), progress=progress, compiler=compiler, save=save)
    best.tried = tried
    return best


def _rank(report: Report) -> tuple[bool, float]:
    return report.status != "ok", report.prediction.serial_seconds if report.prediction else float("inf")


def candidates(traced: Traced, topology: Topology) -> list[Plan]:
    """Presets that divide the model and its batch, those with least to store on a device first."""
    devices, batch = topology.devices, traced.request.batch
    expert_counts = {i.shape[0] for i in traced.graph.inputs if re.search(r"experts\.\w+$", i.name)}
    found: dict[str, tuple[int, Plan]] = {}
    for tp in (1, 2, 4, 8, 16):
        for ep in (1, 2, 4, 8, 16, 32, 64, 128):
            if devices % (tp * ep) or (ep > 1 and any(n % ep for n in expert_counts or {1})):
                continue
            plan = preset({"fsdp": devices // (tp * ep), "ep": ep, "tp": tp})
            if batch % plan.size(plan.batch):
                continue
            found[plan.name] = _held(Evaluator(traced.graph, _layout(plan)), plan), plan
    return [plan for _, plan in sorted(found.values(), key=lambda x: x[0])]


def _held(evaluator: Evaluator, plan: Plan) -> int:
    """Bytes of a device's part of the state, and of one layer's parameters gathered for use."""
    stored = sum(plan.bytes(v.shape, v.dtype.itemsize, v.spec) for v in evaluator.values)
    parameters = [v for v in evaluator.values if v.kind == "parameter"]
    shapes = [v.shape[1:] if v.stacked else v.shape for v in parameters]
    return stored + sum(
        plan.bytes(shape, v.dtype.itemsize, v.used) for shape, v in zip(shapes, parameters, strict=True)
    )
