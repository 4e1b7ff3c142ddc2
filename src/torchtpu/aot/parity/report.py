"""What a comparison found, as text and as plain data."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from torchtpu.aot.parity.measure import Error

__all__ = ["Culprit", "ModuleRow", "Parity", "Run", "TensorRow"]

WIDTH = 44


@dataclasses.dataclass(frozen=True)
class ModuleRow:
    """One call of a module.

    Attributes:
        name: dotted; ``"(model)"`` for the whole, with ``#2`` for a second call.
        kind: its class.
        device: the device's error.
        cpu: PyTorch CPU's in the same dtype.
        inputs: the device's error in what the module took.
        status: ``"ok"``; ``"wrong"``: rounding does not explain it; ``"inherits"``: it does once the inputs are the
            CPU's; ``"magnifies"``: it does for each of its operators; ``"after"``: not examined, since an earlier
            one is wrong.
    """

    name: str
    kind: str
    device: Error
    cpu: Error
    inputs: Error
    status: str

    @property
    def growth(self) -> float:
        """The relative error over that of the inputs; infinite if they have none."""
        if not self.device.relative:
            return 0.0
        return self.device.relative / self.inputs.relative if self.inputs.relative else math.inf


@dataclasses.dataclass(frozen=True)
class TensorRow:
    """The loss or a parameter's gradient."""

    name: str
    device: Error
    cpu: Error
    ok: bool


@dataclasses.dataclass(frozen=True)
class Culprit:
    """Where the error first grows beyond what rounding explains.

    Attributes:
        module: dotted name.
        kind: its class.
        operator: such as ``"aten.mm.default float32[2, 3], float32[3, 4]"``; empty if it is no single one.
        line: its source line.
        explanation: a sentence.
        backward: whether it is in the backward pass.
    """

    module: str
    kind: str
    operator: str
    line: str
    explanation: str
    backward: bool = False


@dataclasses.dataclass
class Run:
    """The comparison in one dtype.

    Attributes:
        dtype: such as ``"float32"``.
        reference: what errors are measured from.
        modules: in the order in which they ended.
        loss, gradients: of a training step.
        culprit: where it goes wrong; None if it does not.
        notes: sentences on what is not as usual.
    """

    dtype: str
    reference: str
    modules: list[ModuleRow] = dataclasses.field(default_factory=list)
    loss: TensorRow | None = None
    gradients: list[TensorRow] = dataclasses.field(default_factory=list)
    culprit: Culprit | None = None
    notes: list[str] = dataclasses.field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether rounding explains every difference."""
        return self.culprit is None


@dataclasses.dataclass
class Parity:
    """A model on the device against PyTorch CPU."""

    model: str
    kind: str
    batch: int
    seq: int
    runs: list[Run]

    @property
    def ok(self) -> bool:
        """Whether rounding explains every difference in every dtype."""
        return all(run.ok for run in self.runs)

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``json.dumps``; what is infinite is the string ``"inf"``."""
        data = {"ok": self.ok, **dataclasses.asdict(self)}
        for run, plain in zip(self.runs, data["runs"], strict=True):
            plain["ok"] = run.ok
            for row, module in zip(run.modules, plain["modules"], strict=True):
                module["growth"] = row.growth
        return _finite(data)

    def text(self, rows: int = 40) -> str:
        """A table for each dtype and a verdict.

        Args:
            rows: modules shown at most, those with the largest errors; gradients a quarter of it.
        """
        lines = [f"parity of {self.model} with PyTorch CPU: {self.kind}, batch {self.batch}, {self.seq} tokens"]
        for run in self.runs:
            lines += ["", *_run_lines(run, rows)]
        return "\n".join(lines)


def _run_lines(run: Run, rows: int) -> list[str]:
    lines = [
        f"{run.dtype}, errors from {run.reference}",
        f"  {'module':<{WIDTH}}{'max abs':>9}{'relative':>10}{'CPU':>10}{'growth':>8}",
    ]
    shown = run.modules
    if len(shown) > rows:
        # A module that is not in order is shown whatever its size.
        worst = sorted(shown, key=lambda row: (row.status == "ok", -row.device.relative))[:rows]
        shown = [row for row in shown if any(row is other for other in worst)]
    for row in shown:
        growth = "new" if math.isinf(row.growth) else f"{row.growth:.1f}x"
        mark = "" if row.status == "ok" else f"  {row.status}"
        lines.append(
            f"  {_cut(row.name, row.kind):<{WIDTH}}{row.device.absolute:>9.1e}{row.device.relative:>10.1e}"
            f"{row.cpu.relative:>10.1e}{growth if row.device.relative else '-':>8}{mark}"
            + (f" ({row.device.note})" if row.device.note else "")
        )
    if len(run.modules) > len(shown):
        lines.append(f"  ... and {len(run.modules) - len(shown)} modules with smaller errors")
    for title, tensors in (("loss", [run.loss] if run.loss else []), ("gradient", run.gradients)):
        if not tensors:
            continue
        ordered = sorted(tensors, key=lambda t: (t.ok, -t.device.relative))
        lines.append(f"  {title:<{WIDTH}}{'max abs':>9}{'relative':>10}{'CPU':>10}")
        for tensor in ordered[: max(4, rows // 4)]:
            mark = "" if tensor.ok else "  magnified" if run.ok else "  wrong"
            lines.append(
                f"  {_cut(tensor.name, ''):<{WIDTH}}{tensor.device.absolute:>9.1e}{tensor.device.relative:>10.1e}"
                f"{tensor.cpu.relative:>10.1e}{mark}" + (f" ({tensor.device.note})" if tensor.device.note else "")
            )
        if len(ordered) > max(4, rows // 4):
            lines.append(f"  ... and {len(ordered) - max(4, rows // 4)} with smaller errors")
    lines += [f"  note: {note}" for note in run.notes]
    return lines + _verdict(run)


def _verdict(run: Run) -> list[str]:
    if run.culprit is None:
        return [f"  {run.dtype}: rounding explains every difference"]
    c = run.culprit
    where = f"{'the backward of ' if c.backward and c.operator else ''}{c.module} ({c.kind})"
    lines = [f"  {run.dtype}: WRONG: the error first grows beyond rounding in {where}", f"      {c.explanation}"]
    if c.operator:
        lines.append(f"      operator: {c.operator}")
    if c.line:
        lines.append(f"      at {c.line}")
    return lines


def _cut(name: str, kind: str) -> str:
    text = f"{name} {kind}".strip()
    return text if len(text) < WIDTH else "..." + text[4 - WIDTH :]


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
