"""Run a model and keep what every module took and returned."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

from torchtpu.aot.parity.structure import convert, tensors

__all__ = ["Call", "Record", "cast", "run", "run_call"]


@dataclasses.dataclass
class Call:
    """One call of a module.

    Attributes:
        name: the module's dotted name; empty for the whole model.
        number: which call of that module, from 0.
        kind: the module's class.
        start: its place among the calls as they began; the record's order is that in which they ended.
        arguments: positional and named arguments, with copies of the tensors as they were before the call.
        outputs: copies of the tensors that it returned.
        gradients: of the loss by each of them; None where there is none.
    """

    name: str
    number: int
    kind: str
    start: int
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    outputs: list[torch.Tensor] = dataclasses.field(default_factory=list)
    gradients: list[torch.Tensor | None] = dataclasses.field(default_factory=list)

    @property
    def key(self) -> tuple[str, int]:
        """What identifies the call in another run."""
        return self.name, self.number

    @property
    def inputs(self) -> list[torch.Tensor]:
        """The tensors among the arguments."""
        return tensors(self.arguments)


@dataclasses.dataclass
class Record:
    """A run: its calls in the order in which they ended, the loss, and the gradients of parameters by name.

    ``running`` are the calls that have not ended: none, unless the run raised.
    """

    calls: list[Call] = dataclasses.field(default_factory=list)
    running: list[Call] = dataclasses.field(default_factory=list)
    loss: torch.Tensor | None = None
    gradients: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)


def run(
    model: torch.nn.Module,
    inputs: dict[str, Any],
    loss: Callable[[Any], torch.Tensor] | None,
    record: Record | None = None,
    watching: contextlib.AbstractContextManager[Any] | None = None,
) -> Record:
    """Run a model, and its backward pass if there is a loss.

    Copies stay on the model's device until the end, so that the device runs the program that it would run anyway.

    Args:
        model: its gradients are cleared.
        inputs: arguments of ``forward`` by name; they may be written to.
        loss: from what ``forward`` returned to a scalar; None for a forward without gradients.
        record: what to fill in, for a caller who wants to see how far a run came that raises.
        watching: entered while the model runs.
    """
    record = Record() if record is None else record
    model.zero_grad(set_to_none=True)
    watching = watching or contextlib.nullcontext()
    with torch.set_grad_enabled(loss is not None), _recording(model, record), watching:
        outputs = model(**inputs)
        if loss is not None:
            record.loss = loss(outputs)
            record.loss.backward()
            record.loss = record.loss.detach()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            record.gradients[name] = parameter.grad
    return _to_cpu(record)


def run_call(
    model: torch.nn.Module,
    call: Call,
    gradients: list[torch.Tensor | None] | None = None,
    watching: contextlib.AbstractContextManager[Any] | None = None,
) -> list[torch.Tensor]:
    """Call a submodule with a recorded call's arguments.

    Args:
        model: the model whose submodule it is, on any device, in any dtype.
        call: recorded from a model of that structure.
        gradients: of the loss by its outputs; None for a forward alone.
        watching: entered while the module and its backward pass run.

    Returns:
        Its outputs; or with ``gradients`` those by its inputs and then by its parameters, on the CPU.
    """
    module = model.get_submodule(call.name)
    floating = [p for p in model.parameters() if p.is_floating_point()]
    device = next(iter(model.parameters()), torch.empty(0)).device
    dtype = floating[0].dtype if floating else torch.float32
    args, kwargs = cast(call.arguments, device, dtype, lowest(call))
    watching = watching or contextlib.nullcontext()
    if gradients is None:
        with torch.no_grad(), watching:
            outputs = tensors(module(*args, **kwargs))
        return [x.cpu() for x in outputs]
    leaves = [x.requires_grad_() for x in tensors((args, kwargs)) if x.is_floating_point()]
    args, kwargs = _unleaf(args), _unleaf(kwargs)
    given = cast(gradients, device, dtype, lowest(call))
    wanted = [*leaves, *(p for p in module.parameters() if p.requires_grad)]
    with watching:
        outputs = tensors(module(*args, **kwargs))
        pairs = [(x, g.to(x.dtype)) for x, g in zip(outputs, given, strict=True) if g is not None and x.requires_grad]
        if not pairs:
            return []
        found = torch.autograd.grad([x for x, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True)
    return [torch.zeros(w.shape) if g is None else g.cpu() for w, g in zip(wanted, found, strict=True)]


def lowest(call: Call) -> torch.dtype:
    """The narrowest floating-point dtype among a call's inputs: the one that the model runs in."""
    found = [x.dtype for x in call.inputs if x.is_floating_point()]
    return min(found, key=lambda dtype: torch.finfo(dtype).bits, default=torch.float32)


def cast(value: Any, device: torch.device | str, dtype: torch.dtype, from_dtype: torch.dtype) -> Any:
    """A copy of a value that is on the CPU, on a device, with tensors of one dtype in another."""

    def change(x: torch.Tensor) -> torch.Tensor:
        return x.detach().clone().to(device=device, dtype=dtype if x.dtype == from_dtype else x.dtype)

    return convert(value, change, {from_dtype: dtype, torch.device("cpu"): torch.device(device)})


def _unleaf(value: Any) -> Any:
    """Tensors that may be written to in place, as a leaf may not."""
    return convert(value, lambda x: x.view_as(x) if x.requires_grad else x)


@contextlib.contextmanager
def _recording(model: torch.nn.Module, record: Record) -> Iterator[None]:
    counts: dict[str, int] = {}
    running = record.running
    starts = 0
    handles: list[Any] = []

    def copied(x: torch.Tensor) -> torch.Tensor:
        return x.detach().clone()

    def watch(name: str, module: torch.nn.Module) -> None:
        def before(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            nonlocal starts
            number = counts[name] = counts.get(name, -1) + 1
            call = Call(name, number, type(module).__name__, starts, convert((args, kwargs), copied))
            starts += 1
            running.append(call)

        def after(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> None:
            call = running.pop()
            returned = tensors(outputs)
            call.outputs = [copied(x) for x in returned]
            call.gradients = [None] * len(returned)
            for i, x in enumerate(returned):
                if x.requires_grad:
                    x.register_hook(lambda g, call=call, i=i: call.gradients.__setitem__(i, g.detach()))
            record.calls.append(call)

        handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(module.register_forward_hook(after, with_kwargs=True))

    for name, module in model.named_modules():
        watch(name, module)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _to_cpu(record: Record) -> Record:
    for call in record.calls:
        call.arguments = convert(call.arguments, lambda x: x.cpu())
        call.outputs = [x.cpu() for x in call.outputs]
        call.gradients = [g if g is None else g.cpu() for g in call.gradients]
    record.loss = None if record.loss is None else record.loss.cpu()
    record.gradients = {name: g.cpu() for name, g in record.gradients.items()}
    return record
