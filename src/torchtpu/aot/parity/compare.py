"""The comparison itself: three runs for each dtype, and a search for what is at fault."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from torchtpu.aot.parity import record
from torchtpu.aot.parity.measure import Error, compare_all, explained, measure, unit
from torchtpu.aot.parity.operators import Draws, Operator, Replay, Trace, first_difference, line_of
from torchtpu.aot.parity.record import Call, Record
from torchtpu.aot.parity.reference import Wider, widen
from torchtpu.aot.parity.report import Culprit, ModuleRow, Parity, Run, TensorRow
from torchtpu.eager.cache import RecompileWarning

if TYPE_CHECKING:
    from torchtpu.zoo import ModelSource

__all__ = ["compare"]

_REFERENCE = {torch.float32: torch.float64, torch.bfloat16: torch.float32, torch.float16: torch.float32}
_ASSUMED = 8.0
"""Units of rounding that PyTorch CPU is taken to be wrong by where there is no wider dtype to tell."""
_NEAR_ZERO = 1e-3
"""A gradient whose elements are smaller than this share of the others' is measured as if they were that large: that of
a key's bias is nothing but rounding."""


class _Models:
    """One model three times, with the same weights: in a dtype on the CPU and on the device, and in a wider one.

    Attributes:
        dtype: that of the first two.
        cpu, device, wide: the models. ``wide`` is None once it has turned out that it cannot run in a wider dtype; the
            CPU's results are then the reference.
    """

    wide: torch.nn.Module | None

    def __init__(self, source: ModelSource, dtype: torch.dtype, seed: int, device: torch.device) -> None:
        base = source.build("cpu", torch.float32, seed)
        self.dtype = dtype
        self.cpu = _like(base, source, dtype, seed)
        self.wide = _like(self.cpu, source, _REFERENCE[dtype], seed)
        if _REFERENCE[dtype] == torch.float64:
            widen(self.wide)
        self.device = copy.deepcopy(self.cpu).to(device)

    def own(self, error: Error) -> Error:
        """PyTorch CPU's error: as measured, or assumed when there is nothing to measure it by."""
        if self.wide is not None:
            return error
        return Error(error.absolute, _ASSUMED * unit(self.dtype), error.note)


def compare(
    source: ModelSource,
    *,
    kind: str = "train",
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16),
    batch: int = 2,
    seq: int = 16,
    seed: int = 0,
    tiny: bool = True,
    device: str | torch.device = "tpu",
) -> Parity:
    """Run a model on the device and on the CPU, and find where they part.

    The model is in evaluation mode, as dropout draws other numbers on other devices. Every activation is kept, several
    times over: a model that is not tiny needs as much memory.

    Args:
        source: the model, from ``zoo.resolve``.
        kind: ``"train"`` compares the loss and gradients as well; ``"infer"``, ``"decode"``.
        dtypes: float32, bfloat16 or float16.
        batch: samples.
        seq: tokens in each.
        seed: of the weights.
        tiny: compare ``source.tiny()``.
        device: where, other than the CPU.

    Raises:
        ModelError: the model cannot be built or fed.
        ValueError: a dtype has no wider one to judge it by.
    """
    source = source.tiny() if tiny else source
    runs = []
    for dtype in dtypes:
        if dtype not in _REFERENCE:
            raise ValueError(f"parity compares float32, bfloat16 and float16: got {dtype}")
        models = _Models(source, dtype, seed, torch.device(device))
        inputs = source.example_inputs(kind, batch, seq, "cpu", dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RecompileWarning)  # every dtype and every module is a program of its own
            runs.append(_compare(models, inputs, source.loss if kind == "train" else None))
    return Parity(source.name, kind, batch, seq, runs)


def _like(model: torch.nn.Module, source: ModelSource, dtype: torch.dtype, seed: int) -> torch.nn.Module:
    """The source's model in a dtype, with another's parameters and buffers."""
    made = source.build("cpu", dtype, seed).eval()
    values = dict([*model.named_parameters(), *model.named_buffers()])
    with torch.no_grad():
        for name, x in [*made.named_parameters(), *made.named_buffers()]:
            x.copy_(values[name])
    return made


def _compare(models: _Models, inputs: dict[str, Any], loss: Callable[[Any], torch.Tensor] | None) -> Run:
    dtype, wider = models.dtype, _REFERENCE[models.dtype]
    place = next(iter(models.device.parameters())).device

    def given(device: torch.device | str, to: torch.dtype) -> dict[str, Any]:
        return record.cast(inputs, device, to, dtype)

    run = Run(_name(dtype), f"{_name(wider)} on the CPU")
    cpu = Record()
    draws = Draws(lambda: cpu.running[-1] if cpu.running else None)
    record.run(models.cpu, given("cpu", dtype), loss, cpu, draws)
    if draws.drawn:
        call, operator = draws.drawn[0]
        run.culprit = Culprit(
            _title(call) if call else "the backward pass",
            call.kind if call else "after the forward",
            f"{operator.name} {operator.operands}",
            operator.line,
            "it draws random numbers, which differ between devices: what follows cannot be compared",
        )
    try:
        assert models.wide is not None
        with Wider(wider):
            wide = record.run(models.wide, given("cpu", wider), loss)
    except (RuntimeError, NotImplementedError) as error:
        models.wide, wide = None, cpu
        run.reference = f"PyTorch CPU, which cannot run it in {_name(wider)}"
        run.notes.append(f"in {_name(wider)} the CPU says: {str(error).splitlines()[0]}")
    device = Record()
    try:
        record.run(models.device, given(place, dtype), loss, device)
    except Exception as error:  # whatever the device raises where the CPU does not is what is looked for
        run.culprit = _raised(error, device)
        return run
    _modules(run, models, cpu, device, {call.key: call for call in wide.calls})
    if loss is not None:
        _training(run, models, cpu, device, wide)
        tensors = [*([run.loss] if run.loss else []), *run.gradients]
        if run.culprit is None and not all(tensor.ok for tensor in tensors):
            run.culprit = _loss_at_fault(run, models, cpu, device, wide)
            if run.culprit is None:
                _search_backward(run, models, cpu)
    return run


def _modules(run: Run, models: _Models, cpu: Record, device: Record, wide: dict[tuple[str, int], Call]) -> None:
    """Compare every module's outputs; examine those that rounding does not explain until one is wrong by itself."""
    on_device = {call.key: call for call in device.calls}
    missing = [call.key for call in cpu.calls if call.key not in on_device or call.key not in wide]
    if missing or len(on_device) != len(cpu.calls):
        run.notes.append(f"not every module ran in every run, such as {missing[0][0] if missing else '?'}")
    for call in cpu.calls:
        if call.key in missing:
            continue
        there, reference = on_device[call.key], wide[call.key]
        error = compare_all(there.outputs, reference.outputs)
        own = models.own(compare_all(call.outputs, reference.outputs))
        status = "ok"
        if not explained(error, own, models.dtype):
            status = "after" if run.culprit else "inherits"
            if run.culprit is None and not _right_by_itself(models, call):
                run.culprit = _examine(models, call, None)
                status = "wrong" if run.culprit else "magnifies"
        inputs = compare_all(there.inputs, reference.inputs)
        run.modules.append(ModuleRow(_title(call), call.kind, error, own, inputs, status))
    first = next((row.name for row in run.modules if row.status in ("inherits", "magnifies")), None)
    if run.culprit is None and first is not None:
        run.notes.append(
            f"from {first} on, rounding is magnified (a choice between near equals, a difference of near equals, a "
            "sine of a large angle) or in another order; with the CPU's operands every module or operator is right"
        )


def _training(run: Run, models: _Models, cpu: Record, device: Record, wide: Record) -> None:
    assert cpu.loss is not None and device.loss is not None and wide.loss is not None
    error, own = measure(device.loss, wide.loss), models.own(measure(cpu.loss, wide.loss))
    run.loss = TensorRow("loss", error, own, explained(error, own, models.dtype))
    squares = sum(g.double().square().nansum().item() for g in wide.gradients.values())
    scale = _NEAR_ZERO * math.sqrt(squares / max(1, sum(g.numel() for g in wide.gradients.values())))
    for name, reference in wide.gradients.items():
        if name not in device.gradients or name not in cpu.gradients:
            run.gradients.append(TensorRow(name, Error(math.inf, math.inf, "no gradient"), Error(), False))
            continue
        error = measure(device.gradients[name], reference, scale)
        own = models.own(measure(cpu.gradients[name], reference, scale))
        run.gradients.append(TensorRow(name, error, own, explained(error, own, models.dtype)))


def _loss_at_fault(run: Run, models: _Models, cpu: Record, device: Record, wide: Record) -> Culprit | None:
    """The loss, if it or its gradient is wrong although the model's outputs are right."""
    here, there, reference = cpu.calls[-1], device.calls[-1], wide.calls[-1]
    assert run.loss is not None
    right = [
        explained(measure(d, r), models.own(measure(c, r)), models.dtype)
        for d, c, r in zip(there.outputs, here.outputs, reference.outputs, strict=True)
    ]
    wrong = [] if run.loss.ok else ["the loss"]
    for i, (d, c, r) in enumerate(zip(there.gradients, here.gradients, reference.gradients, strict=True)):
        if d is not None and c is not None and r is not None:
            error, own = measure(d, r), models.own(measure(c, r))
            if right[i] and not explained(error, own, models.dtype):
                wrong.append(f"its gradient by output {i} (relative error {error.relative:.1e})")
    if not all(right) or not wrong:
        return None
    return Culprit(
        "the loss", "after the model", "", "", f"the model's outputs are right, and {', '.join(wrong)} is not", True
    )


def _search_backward(run: Run, models: _Models, cpu: Record) -> None:
    """Find the module whose backward pass is wrong with the CPU's activations and gradients, the innermost first."""
    for call in sorted(cpu.calls, key=lambda call: -call.start):
        if all(g is None for g in call.gradients) or _right_by_itself(models, call, call.gradients):
            continue
        run.culprit = _examine(models, call, call.gradients)
        if run.culprit is not None:
            return
    run.notes.append(
        "a gradient or the loss differs by more than rounding, but with the CPU's activations every module's backward "
        "pass or operator is right: rounding is magnified on the way"
    )


def _right_by_itself(models: _Models, call: Call, gradients: list[torch.Tensor | None] | None = None) -> bool:
    """Whether rounding explains what a module does on the device with the CPU's inputs."""
    own = record.run_call(models.cpu, call, gradients)
    if models.wide is None:
        reference = own
    else:
        with Wider(_REFERENCE[models.dtype]):
            reference = record.run_call(models.wide, call, gradients)
    got = record.run_call(models.device, call, gradients)
    if len(got) != len(reference) or len(own) != len(reference):
        return False
    scale = 0.0
    if gradients is not None:
        scale = _NEAR_ZERO * max((x.double().square().mean().sqrt().item() for x in reference if x.numel()), default=0)
    return all(
        explained(measure(g, r, scale), models.own(measure(o, r, scale)), models.dtype)
        for g, o, r in zip(got, own, reference, strict=True)
    )


def _examine(models: _Models, call: Call, gradients: list[torch.Tensor | None] | None) -> Culprit | None:
    """Name the operator that makes a module wrong; None if none does, and rounding is magnified inside the module."""
    place = next(iter(models.device.parameters())).device
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Anomaly Detection has been enabled")  # on purpose: it keeps source lines
        anomaly = torch.autograd.set_detect_anomaly(gradients is not None, check_nan=False)
    with anomaly:
        record.run_call(models.cpu, call, gradients, replay := Replay(place))
        record.run_call(models.device, call, gradients, trace := Trace())
    explained_by = _explain(models, call, gradients, replay, trace)
    if explained_by is None:
        return None
    explanation, found = explained_by
    operator = f"{found.name} {found.operands}" if found else ""
    line = found.line if found else ""
    return Culprit(_title(call), call.kind, operator, line, explanation, gradients is not None)


def _explain(
    models: _Models, call: Call, gradients: list[torch.Tensor | None] | None, replay: Replay, trace: Trace
) -> tuple[str, Operator | None] | None:
    wrong = replay.wrong
    if wrong is not None:
        what = wrong.device.note or f"a relative error of {wrong.device.relative:.1e}"
        return f"with the CPU's operands the device has {what} where the CPU has {wrong.cpu.relative:.1e}", wrong
    other = first_difference(replay.operators, trace.operators)
    if other is not None:
        on_cpu, on_device = other
        instead = f"the CPU runs {on_cpu.name} -> {', '.join(on_cpu.results)}" if on_cpu else "the CPU runs no more"
        result = f" -> {', '.join(on_device.results)}" if on_device else ""
        return (
            f"each of the CPU's operators is right on the device, but it runs others there: {instead}, "
            f"the device {on_device.name + result if on_device else 'no more'}",
            on_device or on_cpu,
        )
    with torch.tpu.set_eager_mode("strict"):  # type: ignore[attr-defined]
        alone = _right_by_itself(models, call, gradients)
    if alone:
        return "each operator is right by itself: it is wrong only when operators run as one program", None
    return None


def _raised(error: Exception, device: Record) -> Culprit:
    """Where the device raised."""
    call = device.running[-1] if device.running else None
    explanation = f"it raises {type(error).__name__} on the device: {str(error).splitlines()[0] if str(error) else ''}"
    module, kind = (_title(call), call.kind) if call else ("the backward pass", "after the forward")
    return Culprit(module, kind, "", line_of(error), explanation, not device.running)


def _title(call: Call) -> str:
    name = call.name or "(model)"
    return f"{name} #{call.number + 1}" if call.number else name


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
